"""Time by phase, FLOPs, memory."""

import time

import pytest
import torch
from torch import nn

from train.step_clock import StepClock, peak_flops

CPU = torch.device("cpu")


class Slow(nn.Module):
    """Ten milliseconds forward; its loss is one product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 16, bias=False)

    def forward(self, x_NI: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return self.linear(x_NI).sum()


def test_phases_flops_and_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.step_clock.peak_flops", lambda _: 1e9)
    clock, model = StepClock(CPU), Slow()
    with clock.phase("data"):
        time.sleep(0.01)
    x_NI = torch.randn(4, 32, requires_grad=True)
    for _ in range(2):
        with clock.micro_batch(model, 4):
            model(x_NI).backward()
    with clock.phase("optimizer"):
        time.sleep(0.01)
    began = clock._began
    numbers = clock.numbers()
    seconds = time.perf_counter() - began
    # Three products of 4 x 32 x 16: forward, gradient of the weight, gradient of the input.
    assert clock.flops_per_position == 3 * 2 * 32 * 16
    assert numbers["mfu"] == pytest.approx(2 * 4 * 3 * 2 * 32 * 16 / seconds / 1e9, rel=0.05)
    shares = {k: v for k, v in numbers.items() if k.startswith("share_")}
    assert list(shares) == [
        f"share_{p}" for p in ("data", "target", "forward", "backward", "optimizer")
    ]
    assert shares["share_target"] == 0
    assert shares["share_forward"] * seconds >= 0.02 * 0.95
    assert shares["share_backward"] > 0 and sum(shares.values()) <= 1.001
    assert 0.05 < numbers["memory_gb"] < 1000
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert clock.numbers()["share_data"] == 0  # the window began anew


def test_validation_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.step_clock.peak_flops", lambda _: 1e9)
    clock = StepClock(CPU)
    with clock.phase("data"):
        time.sleep(0.02)
    time.sleep(0.02)
    clock.leave_out(0.02)
    assert clock.numbers()["share_data"] > 0.6


def test_attention_of_the_rollout_is_counted() -> None:
    from drafters.rollout_attention import rollout_attention
    from train.step_clock import CountFlops

    def part(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, 10, 8, requires_grad=True)

    with CountFlops() as counter:
        out = rollout_attention(part(2), [part(1), part(1)], [part(1), part(1)])
        forward = counter.flops
        out.sum().backward()
    assert forward == 2 * 2 * 2 * 10 * 10 * 8  # two products of 2 heads, the mask not deducted
    assert counter.flops == forward + 5 * 2 * 2 * 10 * 10 * 8


def test_a_peak_is_measured_on_a_cpu() -> None:
    assert 1e8 < peak_flops(CPU) < 1e15
