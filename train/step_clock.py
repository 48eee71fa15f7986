"""Where the time of training steps goes, how much arithmetic they do, and what memory they took.

Phases of a step: data (waiting for rows), target (its states, where they are not cached), forward,
backward, optimizer. On a GPU the phases are read from its own events once a logged line, so that no
step waits for them.

    MFU = (matrix-product FLOPs a position * positions) / (seconds * peak FLOPs a second)

FLOPs a position are counted (torch.utils.flop_counter) over forward and backward of the first
micro-batch, padding included; a multiply-add is two. What activation checkpointing computes again
is in it. The peak is the GPU's dense bf16 one by its data sheet (eval.roofline), or, elsewhere,
that of a square product measured when training starts.
"""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from eval.roofline import find_device, measure_device

Item = TypeVar("Item")
PHASES = ("data", "target", "forward", "backward", "optimizer")
aten: Any = torch.ops.aten
# Shapes -> FLOPs of what the counter does not know; the causal mask is not deducted.
CPU_FLASH = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q, k, v
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda out, q, k, v, *_, **__: (
        sdpa_backward_flop_count(out, q, k, v)
    ),
}


class CountFlops(TorchDispatchMode):
    """Adds up FLOPs; every operation runs as it would without, bit for bit.

    (torch's own counter takes some apart: a resumed run would no longer be the straight one.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count it."""
        out = func(*args, **(kwargs or {}))
        count: Any = CPU_FLASH.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*(x.shape if isinstance(x, torch.Tensor) else x for x in args))
        elif func._overloadpacket in flop_registry:
            formula: Any = flop_registry[func._overloadpacket]
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


class StepClock:
    """Time by phase since the last `numbers()`, FLOPs and memory."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device = device
        self.peak = peak_flops(device)
        self.flops_per_position = 0.0
        self.clear()

    def clear(self) -> None:
        """Forget what was measured; the FLOPs a position stay."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, Any, Any]] = []
        self._positions = 0
        self._began = time.perf_counter()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        if self.cuda and name != "data":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
            return
        began = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - began

    @contextmanager
    def micro_batch(self, model: nn.Module, num_positions: int) -> Iterator[None]:
        """Time a forward and backward pass of `model`: what is not its forward pass is backward.

        Args:
            num_positions: B * S of the batch.
        """
        self._positions += num_positions
        phases = [self.phase("forward"), self.phase("backward")]

        def enter(*_: Any) -> None:
            phases[0].__enter__()

        def change(*_: Any) -> None:
            phases[0].__exit__(None, None, None)
            phases[1].__enter__()

        hooks = [model.register_forward_pre_hook(enter), model.register_forward_hook(change)]
        try:
            if self.flops_per_position:
                yield
            else:
                # Under a counter torch.compile would skip its parts, then and ever after.
                with torch.compiler.set_stance("force_eager"), CountFlops() as counter:
                    yield
                self.flops_per_position = counter.flops / max(num_positions, 1)
            phases[1].__exit__(None, None, None)
        finally:
            for hook in hooks:
                hook.remove()

    def leave_out(self, seconds: float) -> None:
        """Take time that was no training (validation) out of what `numbers` divides by."""
        self._began += seconds

    def waiting(self, items: Iterator[Item]) -> Iterator[Item]:
        """The items; the time until each is there is phase data."""
        while True:
            with self.phase("data"):
                item = next(items, None)
            if item is None:
                return
            yield item

    def numbers(self) -> dict[str, float]:
        """Means since the last call, which clears them.

        Returns:
            share_data, ..., share_optimizer: of the time, what is left is logging and the like;
            mfu; memory_gb: the most that the device held (on a CPU the process, since it began).
        """
        if self._events:
            torch.cuda.synchronize(self.device)
        for name, start, end in self._events:
            self._seconds[name] += start.elapsed_time(end) / 1000
        seconds = max(time.perf_counter() - self._began, 1e-9)
        found = {f"share_{name}": self._seconds[name] / seconds for name in PHASES}
        found["mfu"] = self.flops_per_position * self._positions / seconds / self.peak
        found["memory_gb"] = peak_memory(self.device) / 1e9
        self.clear()
        return found


def peak_flops(device: torch.device) -> float:
    """Dense bf16 FLOPs a second by data sheet; of an unknown GPU or a CPU, measured (fp32)."""
    if device.type == "cuda":
        known = find_device(torch.cuda.get_device_name(device))
        if known is not None:
            return known.peak
        return measure_device(device, torch.bfloat16).peak
    return measure_device(device, torch.float32, num_bytes=1 << 20).peak


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch held on a GPU since the last clearing, or this process ever."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
