"""Attention of EAGLE-3's training-time test, in memory linear in the row's length.

Dimension letters: B rows, S positions, N kv heads, G query heads a kv head, D head width, M = N * G
query heads, C queries of a chunk.

At rollout step k row t sees the step-0 keys of rows 0..t, and of every later step only its own row:
there the key stands for position t + j of this row's own rollout. So one causal product and k
"own" dot products stand for a mask of (k S) x (k S). The causal product is a flash kernel's, which
keeps its logsumexp instead of scores; the own terms are merged into it.

The gradient needs no kernel of its own: a flash backward pass remakes exp(score - lse) and
dScore = weight * (dWeight - <dOut, out>), so with the merged `out` and `lse` it gives exactly the
causal part of the gradient of the whole.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from data.documents import Documents, flex, takes_flex

FLASH_DEVICES = ("cpu", "meta")  # devices whose flash kernel takes every dtype
CHUNK = 256  # queries at a time where there is no flash kernel
aten: Any = torch.ops.aten


def rollout_attention(
    query: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents | None = None
) -> Tensor:
    """Attention of rollout step k = len(keys) - 1 (see above), differentiable once.

    Args:
        query: [B, M, S, D]; keys, values: k + 1 tensors [B, N, S, D], step 0 first.
        documents: of a packed row; each is a rollout of its own.

    Returns:
        [B, M, S, D], in autocast's dtype where autocast is on.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query = query.to(dtype)
        keys, values = [k.to(dtype) for k in keys], [v.to(dtype) for v in values]
    if documents is not None:
        if takes_flex(query):
            return merged(query, keys, values, *flex(query, keys[0], values[0], documents))
        parts = zip(*(documents.split(x) for x in (query, *keys, *values)), strict=True)
        rows = [rollout_attention(part[0], *_halves(part[1:])) for part in parts]
        return torch.cat(rows, 2)
    if len(keys) == 1 and device != "meta":  # torch would plan meta tensors without a flash kernel
        return F.scaled_dot_product_attention(
            query, keys[0], values[0], is_causal=True, enable_gqa=True
        )
    out: Tensor = _RolloutAttention.apply(query, *keys, *values)
    return out


def merged(
    query: Tensor, keys: list[Tensor], values: list[Tensor], out: Tensor, lse_BMS: Tensor
) -> Tensor:
    """The own terms of steps 1, 2, ... merged into a causal product that has gradients itself.

    Args:
        out, lse_BMS: the product over step 0 [B, M, S, D] and its logsumexp, both differentiable.
    """
    if len(keys) == 1:
        return out
    M = query.shape[1]
    own = [_own_scores(query, key) for key in keys[1:]]
    total_BMS = torch.stack([lse_BMS.to(own[0].dtype), *own]).logsumexp(0)
    out = out * (lse_BMS - total_BMS).exp()[..., None].to(out.dtype)
    for score_BMS, value in zip(own, values[1:], strict=True):
        out = out + (score_BMS - total_BMS).exp()[..., None].to(out.dtype) * _heads(value, M)
    return out


class _RolloutAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, *keys_values: Tensor) -> Tensor:
        keys, values = _halves(keys_values)
        B, M, S, D = query.shape
        N = keys[0].shape[1]
        out, lse_BMS, ctx.kernel = _causal(query, _heads(keys[0], M), _heads(values[0], M))
        if len(keys) > 1:
            own = [_own_scores(query, key) for key in keys[1:]]
            total_BMS = torch.stack([lse_BMS, *own]).logsumexp(0)
            out = out * (lse_BMS - total_BMS).exp_()[..., None].to(out.dtype)
            lse_BMS = total_BMS
            for score_BMS, value in zip(own, values[1:], strict=True):
                weight = (score_BMS - lse_BMS).exp_().to(out.dtype).view(B, N, M // N, S, 1)
                out.view(B, N, M // N, S, D).addcmul_(weight, value.unsqueeze(2))
        ctx.save_for_backward(query, out, lse_BMS, *keys_values)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
        query, out, lse_BMS, *keys_values = ctx.saved_tensors
        keys, values = _halves(keys_values)
        B, M, S, D = query.shape
        N = keys[0].shape[1]
        d_out = d_out.contiguous()
        d_query, d_key, d_value = _causal_grads(
            d_out, query, _heads(keys[0], M), _heads(values[0], M), out, lse_BMS, ctx.kernel
        )
        d_keys, d_values = [_fold(d_key, N)], [_fold(d_value, N)]
        delta_BMS = (d_out * out).sum(-1, dtype=lse_BMS.dtype) if len(keys) > 1 else lse_BMS
        folded = (B, N, M // N, S, D)
        d_out, query = d_out.view(folded), query.reshape(folded)
        for key, value in zip(keys[1:], values[1:], strict=True):
            weight_BMS = (_own_scores(query.view(B, M, S, D), key) - lse_BMS).exp_()
            d_weight_BMS = (d_out * value.unsqueeze(2)).sum(-1, dtype=lse_BMS.dtype).view(B, M, S)
            d_score = weight_BMS * (d_weight_BMS - delta_BMS) * D**-0.5
            d_score = d_score.to(query.dtype).view(B, N, M // N, S, 1)
            weight = weight_BMS.to(query.dtype).view(B, N, M // N, S, 1)
            d_values.append((weight * d_out).sum(2))
            d_keys.append((d_score * query).sum(2))
            d_query = d_query + (d_score * key.unsqueeze(2)).reshape(B, M, S, D)
        return (d_query, *d_keys, *d_values)


def _halves(keys_values: Any) -> tuple[list[Tensor], list[Tensor]]:
    num_steps = len(keys_values) // 2
    return list(keys_values[:num_steps]), list(keys_values[num_steps:])


def _own_scores(query: Tensor, key: Tensor) -> Tensor:
    """Scaled products of each query with its own row's key, [B, M, S], at least fp32."""
    B, M, S, D = query.shape
    N = key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    products = query.view(B, N, M // N, S, D) * key.unsqueeze(2)
    return products.sum(-1, dtype=dtype).view(B, M, S) * D**-0.5


def _heads(x_BNSD: Tensor, num_heads: int) -> Tensor:
    """Every kv head as often as query heads share it."""
    groups = num_heads // x_BNSD.shape[1]
    return x_BNSD if groups == 1 else x_BNSD.repeat_interleave(groups, 1)


def _fold(d_BMSD: Tensor, num_kv_heads: int) -> Tensor:
    """Sum of the gradients of a kv head's copies."""
    B, M, S, D = d_BMSD.shape
    if num_kv_heads == M:
        return d_BMSD
    return d_BMSD.reshape(B, num_kv_heads, M // num_kv_heads, S, D).sum(2)


def _cuda_flash(query: Tensor) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _causal(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Causal attention and the logsumexp [B, M, S] of its scaled scores; what a kernel keeps."""
    if query.device.type in FLASH_DEVICES:
        return *aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True), ()
    if _cuda_flash(query):
        done = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
        return done[0], done[1], tuple(done[2:8])
    out, lses = torch.empty_like(query), []
    for start in range(0, query.shape[2], CHUNK):
        scores, rows = _chunk_scores(query, key, start)
        lses.append(scores.logsumexp(-1))
        weights = (scores - lses[-1][..., None]).exp_().to(query.dtype)
        out[:, :, rows] = weights @ value[:, :, : rows.stop]
    return out, torch.cat(lses, -1), ()


def _causal_grads(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse_BMS: Tensor,
    kernel: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """The causal part of the gradient, for an `out` and `lse` that other terms were merged into."""
    if query.device.type in FLASH_DEVICES:
        grads: tuple[Tensor, Tensor, Tensor]
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, query, key, value, out, lse_BMS, 0.0, True
        )
        return grads
    if _cuda_flash(query):
        cum_q, cum_k, max_q, max_k, rng_state, unused = kernel
        grads = aten._scaled_dot_product_flash_attention_backward(
            *(d_out, query, key, value, out, lse_BMS, cum_q, cum_k, max_q, max_k),
            *(0.0, True, rng_state, unused),
        )
        return grads
    d_query, scale = torch.empty_like(query), query.shape[-1] ** -0.5
    d_key = torch.zeros_like(key, dtype=lse_BMS.dtype)
    d_value = torch.zeros_like(value, dtype=lse_BMS.dtype)
    delta_BMS = (d_out * out).sum(-1, dtype=lse_BMS.dtype)
    for start in range(0, query.shape[2], CHUNK):
        scores, rows = _chunk_scores(query, key, start)
        seen = slice(0, rows.stop)
        weights = (scores - lse_BMS[:, :, rows, None]).exp_()
        d_weights = (d_out[:, :, rows] @ value[:, :, seen].transpose(-1, -2)).to(weights.dtype)
        d_scores = (weights * (d_weights - delta_BMS[:, :, rows, None]) * scale).to(query.dtype)
        d_query[:, :, rows] = d_scores @ key[:, :, seen]
        d_key[:, :, seen] += d_scores.transpose(-1, -2) @ query[:, :, rows]
        d_value[:, :, seen] += weights.to(query.dtype).transpose(-1, -2) @ d_out[:, :, rows]
    return d_query, d_key.to(key.dtype), d_value.to(value.dtype)


def _chunk_scores(query: Tensor, key: Tensor, start: int) -> tuple[Tensor, slice]:
    """Scaled, masked scores of CHUNK queries over the keys up to their last, at least fp32."""
    rows = slice(start, min(start + CHUNK, query.shape[2]))
    scores = query[:, :, rows] @ key[:, :, : rows.stop].transpose(-1, -2)
    scores = scores.to(torch.promote_types(query.dtype, torch.float32)) * query.shape[-1] ** -0.5
    later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(start + 1)
    return scores.masked_fill_(later, float("-inf")), rows
