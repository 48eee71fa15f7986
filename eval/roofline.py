"""The bound that memory and arithmetic set on a pass: time >= max(bytes / bandwidth, FLOPs / peak).

Every weight that is used is read once a pass; a multiply-add is two FLOPs. Measured passes are
slower: launch overhead, softmax and norms are not in it. The ratio of the two says how much of a
speedup is left to the engine.
"""

import time
from typing import Any, NamedTuple

import torch

from data.target import Target
from drafters.base import DecodingDrafter, TrainedDrafter
from drafters.lookup import LookupThen
from eval.theory import Costs


class Device(NamedTuple):
    """bandwidth: bytes a second. peak: dense bf16 FLOPs a second. source: of the two numbers."""

    name: str
    bandwidth: float
    peak: float
    source: str


# Peaks are dense, without sparsity; SXM boards where there are several.
DEVICES = (
    Device("A100", 2.039e12, 312e12, "NVIDIA A100 80GB SXM datasheet"),
    Device("H100", 3.35e12, 989e12, "NVIDIA H100 SXM datasheet"),
    Device("H200", 4.8e12, 989e12, "NVIDIA H200 SXM datasheet"),
    Device("B200", 8.0e12, 2250e12, "NVIDIA HGX B200 datasheet"),
    Device("L40S", 0.864e12, 362e12, "NVIDIA L40S datasheet"),
    Device("L4", 0.3e12, 121e12, "NVIDIA L4 datasheet"),
)


class Work(NamedTuple):
    """What a pass moves and computes.

    fixed_bytes: weights read once. row_flops: a position. context_bytes, context_flops: keys and
    values read a row of the batch, and attention over them a position.
    """

    fixed_bytes: float
    row_flops: float
    context_bytes: float = 0.0
    context_flops: float = 0.0


def find_device(name: str) -> Device | None:
    """The entry of the table whose name is a word of `name`, as torch spells it."""
    words = name.replace("-", " ").split()
    return next((device for device in DEVICES if device.name in words), None)


def measure_device(device: torch.device, dtype: torch.dtype, num_bytes: int = 1 << 28) -> Device:
    """Bandwidth of a sum over num_bytes, and FLOPs of a square product, in `dtype`; best of 5."""
    values_N = torch.ones(num_bytes // 4, device=device)
    n = 4096 if device.type == "cuda" else 1024
    square_NN = torch.ones(n, n, dtype=dtype, device=device)
    summing, product = [], []
    for _ in range(5):
        summing.append(_seconds(values_N.sum, device))
        product.append(_seconds(lambda: square_NN @ square_NN, device))
    return Device("this machine", num_bytes / min(summing), 2 * n**3 / min(product), "measured")


def _seconds(call: Any, device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def target_work(target: Target, context: int) -> Work:
    """A pass of the target behind `context` tokens. An embedding that is no head is not read."""
    config, itemsize = target.config, target.dtype.itemsize
    weights = sum(p.numel() for p in target.model.parameters())
    if target.head_weight_VH.data_ptr() != target.embed_weight_VH.data_ptr():
        weights -= target.embed_weight_VH.numel()
    heads = int(config.num_attention_heads)
    head_dim = int(config.to_dict().get("head_dim") or target.hidden_size // heads)
    kv_heads = int(config.num_key_value_heads or heads)
    cached = 2 * target.num_layers * kv_heads * head_dim * context * itemsize
    attention = 4 * target.num_layers * heads * head_dim * context
    return Work(weights * itemsize, 2 * weights, cached, attention)


def weights_read(drafter: TrainedDrafter) -> int:
    """How many weights a pass multiplies: its own, and its head once, also where it is borrowed.

    Of a table that tokens are looked up in, a few rows are read; it counts where it is the head.
    """
    used = {weight.data_ptr(): weight.numel() for weight in drafter.parameters()}
    tables = [part.weight for part in drafter.modules() if isinstance(part, torch.nn.Embedding)]
    for weight in [*tables, *drafter.vocabulary_weights()]:
        used.pop(weight.data_ptr(), None)
    for head in drafter.head_weights():
        parts = head if isinstance(head, tuple) else (head,)
        used |= {part.data_ptr(): part.numel() for part in parts}
    return sum(used.values())


def drafter_work(drafter: DecodingDrafter, itemsize: int) -> Work | None:
    """A pass of a drafter, its short cache left out; None without weights.

    Of lookup in front of a head it is the head's, whose pass a round needs where lookup finds none.
    """
    head = drafter.head if isinstance(drafter, LookupThen) else drafter
    if not isinstance(head, TrainedDrafter):
        return None
    weights = weights_read(head)
    return Work(weights * itemsize, 2 * weights)


def pass_ms(device: Device, work: Work, batch_size: int, num_positions: int) -> float:
    """The least milliseconds of a pass over some positions of every row."""
    num_bytes = work.fixed_bytes + batch_size * work.context_bytes
    flops = batch_size * num_positions * (work.row_flops + work.context_flops)
    return 1000 * max(num_bytes / device.bandwidth, flops / device.peak)


def roofline_costs(
    device: Device,
    target: Work,
    drafter: Work | None,
    batch_size: int,
    max_draft_tokens: int = 16,
    parallel: bool = False,
) -> Costs:
    """The least costs of a round; a sequential drafter makes one pass a token.

    Args:
        drafter: None for one without weights, whose passes cost nothing.
        parallel: all tokens are drafted in one pass.
    """
    step = 0.0 if drafter is None else pass_ms(device, drafter, batch_size, 1)
    sizes = range(1, max_draft_tokens + 1)
    return Costs(
        verify_ms={r: pass_ms(device, target, batch_size, r) for r in [*sizes, len(sizes) + 1]},
        draft_ms={K: step if parallel else K * step for K in sizes},
        loop_ms={0: 0.0},
    )
