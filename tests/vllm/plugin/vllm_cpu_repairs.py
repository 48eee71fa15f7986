"""Repairs of two faults of vLLM 0.32 on a CPU without Triton; vLLM loads it as a plugin.

1. Before verification, the sampling parameters of a request are repeated for each of its drafted
   tokens. The CPU fallback writes them into a copy that is thrown away, so with a temperature
   tokens are drawn by whatever the memory held (vllm-project/vllm issue 55005).
2. DFlash norms the keys of the context of all its layers at once, with one weight row a layer; the
   CPU's RMSNorm knows rows only as one vector and uses the first for every layer. Text stays
   right, but fewer drafts are accepted.

Dimension letters: L drafter layers.
"""

from typing import Any

import torch
from torch import Tensor


def expand(
    output: Tensor,
    values: Tensor,
    ends: Tensor,
    replace_from: Any,
    replace_to: Any,
    **_limits: Any,
) -> None:
    """Repeat each request's value for its tokens; `ends` are running totals of their numbers."""
    ends = ends.to(torch.int64)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    values = values.masked_fill(values == replace_from, replace_to)
    output.copy_(values.repeat_interleave(counts).to(output.dtype))


def norm_context_keys(self: Any, keys: Tensor) -> Tensor:
    """RMSNorm over the last axis of keys [L, ...], each layer with its own weight."""
    wide = keys.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
    return (wide.to(keys.dtype) * self._k_norm_weights[:, None, None, :]).contiguous()


def apply() -> None:
    """Put both in place of what they repair."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand
    DFlashQwen3Model._normalize_context_k = norm_context_keys
