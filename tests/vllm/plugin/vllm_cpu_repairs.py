"""Repairs of three faults of vLLM 0.32 on a CPU without Triton; vLLM loads it as a plugin.

1. Before verification, the sampling parameters of a request are repeated for each of its drafted
   tokens. The CPU fallback writes them into a copy that is thrown away, so with a temperature
   tokens are drawn by whatever the memory held (vllm-project/vllm issue 55005).
2. DFlash norms the keys of the context of all its layers at once, with one weight row a layer; the
   CPU's RMSNorm knows rows only as one vector and uses the first for every layer. Text stays
   right, but fewer drafts are accepted.
3. The connector that writes hidden states to files copies them by a CUDA stream, which a CPU lacks.

Dimension letters: L drafter layers; N blocks, T tokens of one, S tokens of a request, C captured
layers, H hidden width.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def expand(
    output: Tensor,
    values: Tensor,
    ends: Tensor,
    replace_from: Any,
    replace_to: Any,
    *_limits: Any,
    **_named_limits: Any,
) -> None:
    """Repeat each request's value for its tokens; `ends` are running totals of their numbers.

    vLLM calls it by place or by name, with a limit that is of no use here.
    """
    ends = ends.to(torch.int64)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    values = values.masked_fill(values == replace_from, replace_to)
    output.copy_(values.repeat_interleave(counts).to(output.dtype))


def norm_context_keys(self: Any, keys: Tensor) -> Tensor:
    """RMSNorm over the last axis of keys [L, ...], each layer with its own weight."""
    wide = keys.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
    return (wide.to(keys.dtype) * self._k_norm_weights[:, None, None, :]).contiguous()


def write_states(self: Any, pending: Any) -> None:
    """Write the states [S, C, H] of a request that ended, and let go of the file's lock."""
    if not self._is_tp_rank_zero:
        return
    blocks_NCTH = self._kv_cache[torch.tensor(pending.block_ids)]
    states_SCH = blocks_NCTH.transpose(1, 2).flatten(0, 1)[: len(pending.token_ids)]
    tensors = {"hidden_states": states_SCH.contiguous(), "token_ids": pending.token_ids.clone()}
    os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
    lock = self._lock_fds.pop(pending.req_id, None)
    try:
        save_file(tensors, pending.filename)
    finally:
        if lock is not None:
            os.close(lock)
    self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)


def apply() -> None:
    """Put all in place of what they repair."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand
    DFlashQwen3Model._normalize_context_k = norm_context_keys
    connector = example_hidden_states_connector.ExampleHiddenStatesConnector
    connector._submit_async_write = write_states
