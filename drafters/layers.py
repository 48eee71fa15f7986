"""Parts that drafters share: norm, rotary positions, one attention layer, MLP.

Dimension letters: B rows, S positions, H width, N kv heads, G query heads a kv head, D head width,
J earlier rollout steps.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.attention import thin_linear

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (query, key, value) -> [B, N*G, S, D]


class Linear(nn.Linear):
    """nn.Linear that takes the thin product when it decodes a few rows without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        return thin_linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean taken in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


def rotate(x_BNSD: Tensor, cos_BSD: Tensor, sin_BSD: Tensor) -> Tensor:
    """Rotary embedding in the half-split ("neox") layout."""
    first, second = x_BNSD.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    cos, sin = cos_BSD[:, None].to(x_BNSD.dtype), sin_BSD[:, None].to(x_BNSD.dtype)
    return x_BNSD * cos + turned * sin


def rollout_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of rollout step k = len(keys) - 1 (EAGLE-3's training-time test).

    Row t sees the step-0 keys of rows 0..t, and of every later step only its own row: there the
    key stands for position t + j of this row's own rollout. So one causal product and J diagonal
    dot products replace a mask of (k S) x (k S).

    Args:
        query: [B, N*G, S, D]; keys, values: k + 1 tensors [B, N, S, D], step 0 first.
    """
    if len(keys) == 1:
        return F.scaled_dot_product_attention(
            query, keys[0], values[0], is_causal=True, enable_gqa=True
        )
    B, heads, S, D = query.shape
    N = keys[0].shape[1]
    query = query.view(B, N, heads // N, S, D)
    scores = query @ keys[0].unsqueeze(2).transpose(-1, -2)
    causal_SS = torch.ones(S, S, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~causal_SS, float("-inf"))
    own = torch.stack([(query * key.unsqueeze(2)).sum(-1) for key in keys[1:]], -1)
    weights = torch.cat([scores, own], -1).float().mul(D**-0.5).softmax(-1).to(query.dtype)
    out = weights[..., :S] @ values[0].unsqueeze(2)
    for j, value in enumerate(values[1:]):
        out = out + weights[..., S + j : S + j + 1] * value.unsqueeze(2)
    return out.reshape(B, heads, S, D)


class Attention(nn.Module):
    """Projections and rotary positions around an attention that the caller supplies."""

    def __init__(
        self, in_width: int, width: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = Linear(in_width, num_heads * head_dim, bias=False)
        self.k_proj = Linear(in_width, num_kv_heads * head_dim, bias=False)
        self.v_proj = Linear(in_width, num_kv_heads * head_dim, bias=False)
        self.o_proj = Linear(num_heads * head_dim, width, bias=False)

    def forward(self, x_BSH: Tensor, cos_BSD: Tensor, sin_BSD: Tensor, attend: Attend) -> Tensor:
        B, S = x_BSH.shape[:2]
        shape = (B, S, -1, self.head_dim)
        query = self.q_proj(x_BSH).view(shape).transpose(1, 2)
        key = self.k_proj(x_BSH).view(shape).transpose(1, 2)
        value = self.v_proj(x_BSH).view(shape).transpose(1, 2)
        query, key = rotate(query, cos_BSD, sin_BSD), rotate(key, cos_BSD, sin_BSD)
        return self.o_proj(attend(query, key, value).transpose(1, 2).reshape(B, S, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner_width, bias=False)
        self.up_proj = Linear(width, inner_width, bias=False)
        self.down_proj = Linear(inner_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
