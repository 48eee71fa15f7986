"""Two kernels that the frozen target runs on: cached attention and thin matrix products.

Dimension letters: B rows, S new tokens, T places, N kv heads, G query heads of each, D head width.

Both hang into the transformers model by its own extension points (an attention implementation by
name, and a subclass of nn.Linear), so every architecture keeps its own modelling code.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from data.documents import Documents, flex, takes_flex
from recipes.errors import UserError

ATTENTION = "draftsmith"
THIN_ROWS = 256  # up to here the product taken from the other side was faster
FEW_QUERIES = 64  # query rows a kv head, up to which attention is two plain products


class Keys(Protocol):
    """Where attention finds what may be read beside the new tokens: a `KVCache`, or its like."""

    def append(self, layer: int, keys: Tensor, values: Tensor, /) -> tuple[Tensor, Tensor]:
        """Take in the new entries; return all that may be read."""

    def mask_BST(self, sliding_window: int | None = None) -> Tensor:
        """True where new token s of row b may look at place t."""


class Chains(Keys, Protocol):
    """Masks behind the S tokens of a row, each a part of a draft: what a training pass may add.

    longest: no row looks further back than this many positions.
    """

    longest: int

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, /
    ) -> Tensor:
        """What `mask_BST` says, [B, N*G, S, D], without that mask."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    kv_cache: Keys | None = None,
    documents: Documents | None = None,
    chains: Chains | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of a transformers model, causal, over its own tokens or over a `KVCache`.

    Args:
        query: [B, N*G, S, D]; key, value: [B, N, S, D] of the new tokens.
        _attention_mask: ignored: rows are padded on the right, so causality is all there is.
        kv_cache: the keys to append to and to read; None attends within the S tokens.
        documents: what a packed row holds, of which each attends to itself; without a kv_cache.
        chains: in place of a kv_cache. Only windows and caps need its mask.

    Returns:
        [B, S, N*G, D] and None, as transformers expects.
    """
    if s_aux is not None:
        raise UserError("this target uses attention sinks, which are not supported yet")
    if documents is not None:
        assert kv_cache is None, "rows are packed in training alone"
        return _packed(query, key, value, documents, scaling, sliding_window, softcap), None
    if chains is not None:
        window = sliding_window is not None and sliding_window < chains.longest
        if softcap is None and not window:
            return chains.attention(query, key, value, scaling).transpose(1, 2), None
        kv_cache = chains
    if kv_cache is None:
        out = _own_tokens(query, key, value, scaling, sliding_window, softcap)
    else:
        key, value = kv_cache.append(module.layer_idx, key, value)
        mask_BST = kv_cache.mask_BST(sliding_window)
        if softcap is None:
            out = masked_attention(query, key, value, mask_BST, scaling)
        else:
            out = _softcapped(query, key, value, mask_BST, scaling, softcap)
    return out.transpose(1, 2), None


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Every document of a packed row over itself: [B, S, N*G, D]."""
    if takes_flex(query):
        out = flex(query, key, value, documents, scaling, window, softcap)[0]
    else:
        parts = zip(*(documents.split(x) for x in (query, key, value)), strict=True)
        out = torch.cat([_own_tokens(q, k, v, scaling, window, softcap) for q, k, v in parts], 2)
    return out.transpose(1, 2)


def _own_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of a row over its own tokens: [B, N*G, S, D]."""
    S, mask_BST = query.shape[2], None
    if window is not None and window < S:
        ones_SS = torch.ones(S, S, dtype=torch.bool, device=query.device)
        mask_BST = (ones_SS.tril() & ones_SS.triu(1 - window))[None]
    if softcap is not None:
        return _softcapped(query, key, value, mask_BST, scaling, softcap)
    if mask_BST is None:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
    return masked_attention(query, key, value, mask_BST, scaling)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask_BST: Tensor, scaling: float | None = None
) -> Tensor:
    """Grouped attention under a mask: [B, N*G, S, D].

    Query heads that share a kv head become rows of one product, so that no key is ever copied.
    """
    B, heads, S, D = query.shape
    N = key.shape[1]
    G = heads // N
    folded = query.reshape(B, N, G * S, D)
    mask = mask_BST[:, None].expand(-1, G, -1, -1).reshape(mask_BST.shape[0], 1, G * S, -1)
    if query.is_cpu and B > 1 and G * S <= FEW_QUERIES:
        # torch's kernel copies every key to scale it here; scaling the few queries is enough.
        scores = (folded * (D**-0.5 if scaling is None else scaling)) @ key.transpose(2, 3)
        out = scores.masked_fill_(~mask, float("-inf")).softmax(-1) @ value
    else:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(B, heads, S, D)


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask_BST: Tensor | None,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """Attention whose scores pass through cap * tanh(score / cap) (Gemma 2)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if mask_BST is None:
        S = query.shape[2]
        mask_BST = torch.ones(1, S, S, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~mask_BST[:, None], float("-inf"))
    return torch.matmul(scores.float().softmax(-1).to(value.dtype), value)


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, lambda *_args, **_kwargs: None)


def thin_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T for few rows of fp32 on a CPU: the product is taken from the other side.

    A row-major weight against a handful of columns streams the weight once; the usual order packs
    it first, which costs 2 to 5 times more at 2..8 rows. One row is padded to two for the same
    reason. Elsewhere (many rows, bf16, CUDA) this is nn.functional.linear.
    """
    num_rows = x.numel() // x.shape[-1]
    if x.dtype != torch.float32 or num_rows > THIN_ROWS or not x.is_cpu:
        return F.linear(x, weight, bias)
    rows = x.reshape(num_rows, x.shape[-1])
    columns = torch.cat([rows, rows]) if num_rows == 1 else rows
    # Contiguous, since all that follows would be slower on a transposed layout than the copy is.
    out = torch.mm(weight, columns.t())[:, :num_rows].t().contiguous()
    if bias is not None:
        out = out + bias
    return out.reshape(*x.shape[:-1], weight.shape[0])


class ThinLinear(nn.Linear):
    """nn.Linear of a frozen model that decodes a few rows at a time."""

    def forward(self, x: Tensor) -> Tensor:
        """The product, by whichever side is faster."""
        return thin_linear(x, self.weight, self.bias)


def use_thin_linears(model: nn.Module) -> None:
    """Turn every plain nn.Linear of a frozen model into a ThinLinear, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = ThinLinear
