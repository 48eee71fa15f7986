"""Parameter groups, schedule, clipping."""

import math
import sys
import types

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from recipes.errors import UserError
from recipes.train_section import TrainSection
from train.distiller import autocasts
from train.optim import build_optimizer, clip, lr_factor, param_groups, set_lr
from train.shards import prepare, set_moments, take_step, whole_moments


def test_norms_and_biases_are_not_decayed_and_frozen_parameters_are_absent():
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Embedding(5, 3))
    module[2].weight.requires_grad_(False)
    decayed, plain = param_groups(module, 0.1)
    assert [p.shape for p in decayed["params"]] == [(4, 3)]
    assert decayed["weight_decay"] == 0.1
    assert [p.shape for p in plain["params"]] == [(4,), (4,), (4,)]
    assert plain["weight_decay"] == 0
    assert len(param_groups(nn.LayerNorm(4), 0.1)) == 1


def test_optimizer_takes_the_recipe_and_the_rate_of_the_step():
    section = TrainSection(lr=2e-4, betas=(0.8, 0.9), weight_decay=0.3)
    optimizer = build_optimizer(nn.Linear(2, 2), section)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
    set_lr(optimizer, 1e-5)
    assert {group["lr"] for group in optimizer.param_groups} == {1e-5}


def test_8_bit_moments_say_what_they_need(monkeypatch):
    section = TrainSection(optimizer="adamw8bit")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UserError, match=r"adamw8bit needs bitsandbytes.*pip install.*set adamw"):
        build_optimizer(nn.Linear(2, 2), section)


def test_8_bit_moments_that_do_not_run_here_are_refused(monkeypatch):
    class Refuses(torch.optim.AdamW):
        def step(self, closure=None):
            raise NotImplementedError("no kernel for cpu")

    library = types.ModuleType("bitsandbytes.optim")
    library.AdamW8bit = Refuses
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", library)
    wanted = r"does not run on cpu.*NotImplementedError: no kernel for cpu.*or set adamw"
    with pytest.raises(UserError, match=wanted):
        build_optimizer(nn.Linear(2, 2), TrainSection(optimizer="adamw8bit"))


@pytest.mark.parametrize("launcher", ["zero", "fsdp"])
def test_8_bit_moments_are_not_divided(monkeypatch, launcher):
    monkeypatch.setattr("train.shards.uses_fsdp", lambda _: launcher == "fsdp")
    monkeypatch.setattr("train.shards.zero_stage", lambda _: 2 * (launcher == "zero"))
    module = nn.Linear(2, 2)
    eight = torch.optim.SGD(module.parameters())  # whatever is not torch's AdamW
    with pytest.raises(UserError, match=r"adamw8bit.*ddp\.yaml, or set adamw"):
        prepare(Accelerator(cpu=True), module, eight)


def test_8_bit_adamw_follows_adamw_and_goes_on_from_its_moments():
    pytest.importorskip("bitsandbytes")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    inputs, wanted = torch.randn(64, 64), torch.randn(64, 64)
    first = nn.Linear(64, 64).state_dict()

    def made(optimizer):
        model = nn.Linear(64, 64)
        model.load_state_dict(first)
        section = TrainSection(optimizer=optimizer, lr=1e-3)
        return prepare(accelerator, model, build_optimizer(model, section))

    def steps(model, optimizer, num):
        for _ in range(num):
            (model(inputs) - wanted).square().mean().backward()
            take_step(accelerator, model, optimizer, 1.0)
        return model.weight.detach().clone()

    eight, adam = made("adamw8bit"), made("adamw")
    half = steps(*eight, 5)
    state = next(iter(eight[1].optimizer.state.values()))
    assert {state["state1"].dtype, state["state2"].dtype} == {torch.uint8}
    moments = {k: v.clone() for k, v in whole_moments(accelerator, *eight).items()}
    again = made("adamw8bit")
    again[0].load_state_dict(eight[0].state_dict())
    set_moments(accelerator, *again, moments)
    straight = steps(*eight, 5)
    assert torch.equal(straight, steps(*again, 5))  # bit for bit
    plain = steps(*adam, 10)
    moved = (plain - first["weight"]).abs().mean()
    assert (straight - plain).abs().mean() < 0.1 * moved
    assert not torch.equal(straight, half)


def test_auto_is_bf16_where_the_hardware_multiplies_it(monkeypatch):
    kinds = [TrainSection(mixed_precision=kind) for kind in ("no", "bf16", "auto")]
    for native in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        on_cpu = [autocasts(kind, torch.device("cpu")) for kind in kinds]
        assert on_cpu == [False, True, native]
    assert [autocasts(kind, torch.device("cuda")) for kind in kinds] == [False, True, True]


def test_moments_stay_fp32_under_bf16_arithmetic():
    model = nn.Linear(64, 64)
    optimizer = build_optimizer(model, TrainSection(mixed_precision="bf16"))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(3, 64))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    optimizer.step()
    kept = [t.dtype for state in optimizer.state.values() for t in state.values()]
    assert {p.dtype for p in model.parameters()} | set(kept) == {torch.float32}


def test_warm_up_then_cosine():
    factors = [lr_factor(step, num_steps=8, warmup_steps=4, min_ratio=0.1) for step in range(9)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[6] == pytest.approx(0.55)  # half way: the mean of 1 and 0.1
    assert factors[8] == pytest.approx(0.1)
    assert lr_factor(100, 8, 4, 0.1) == pytest.approx(0.1)
    assert all(factor > 0 for factor in factors)


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("warmup_steps", [0, 1, 0.3, 5])
def test_short_runs_have_rates_within_zero_and_one(num_steps, warmup_steps):
    for step in range(num_steps + 1):
        assert 0 <= lr_factor(step, num_steps, warmup_steps, 0.0) <= 1
    assert lr_factor(0, num_steps, warmup_steps, 0.0) > 0


def test_clip_returns_the_norm_before_clipping():
    accelerator = Accelerator(cpu=True)
    module = nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip(accelerator, module, 0.5) == pytest.approx(5.0)
    assert module.weight.grad.norm().item() == pytest.approx(0.5)
    assert clip(accelerator, module, 1.0) == pytest.approx(0.5)  # small ones stay
    assert module.weight.grad.norm().item() == pytest.approx(0.5)
    module.weight.grad = torch.tensor([[math.nan, 0.0]])
    assert math.isnan(clip(accelerator, module, 0.5))
