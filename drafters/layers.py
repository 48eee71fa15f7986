"""Parts that drafters share: norm, rotary positions, one attention layer, MLP.

Dimension letters: B rows, S positions, H width, N kv heads, G query heads a kv head, D head width,
R rotated part of it, M all heads side by side.
"""

from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from data.attention import thin_linear
from data.compiled import Parted, part

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (query, key, value) -> [B, N*G, S, D]


class Linear(nn.Linear):
    """nn.Linear that takes the thin product when it decodes a few rows without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        return thin_linear(x, self.weight, self.bias)


class RMSNorm(Parted):
    """x / rms(x) * weight, the mean taken in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    @part
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


def rotary_table(
    head_dim: int, max_position_embeddings: int, rope_parameters: dict[str, Any]
) -> LlamaRotaryEmbedding:
    """Rotary tables (x, positions) -> cos, sin; every scaling that transformers knows.

    They are as wide as what is rotated: `partial_rotary_factor` may leave part of a head as it is.
    Made on the CPU also where weights are built on meta. Keep it out of the module (in a list):
    casting a drafter to bf16 must not round it.

    Raises:
        KeyError, TypeError, ValueError: no scaling has these parameters.
    """
    factor = float(rope_parameters.get("partial_rotary_factor") or 1.0)
    default = (
        rope_parameters.get("rope_type", "default") == "default"
    )  # the others do it themselves
    try:
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=int(head_dim * factor) if default else head_dim,
            max_position_embeddings=max_position_embeddings,
            rope_parameters=dict(rope_parameters),
        )
    except StrictDataclassError as error:
        raise ValueError(f"rope_parameters {rope_parameters}: {error}") from error
    with torch.device("cpu"):
        return LlamaRotaryEmbedding(config)


def rotate(x_BNSD: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> Tensor:
    """Rotary embedding of the first R of D widths, in the half-split ("neox") layout."""
    width = cos_BSR.shape[-1]
    x_BNSR, rest = x_BNSD[..., :width], x_BNSD[..., width:]
    first, second = x_BNSR.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    cos, sin = cos_BSR[:, None].to(x_BNSD.dtype), sin_BSR[:, None].to(x_BNSD.dtype)
    rotated = x_BNSR * cos + turned * sin
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


class Attention(Parted):
    """Projections, norms of queries and keys, and rotary positions around a supplied attention.

    bias: of all four projections. qk_norm_eps: RMSNorm of every query and key head (Qwen3); None =
    none (Llama).
    """

    def __init__(
        self,
        in_width: int,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = Linear(in_width, num_heads * head_dim, bias=bias)
        self.k_proj = Linear(in_width, num_kv_heads * head_dim, bias=bias)
        self.v_proj = Linear(in_width, num_kv_heads * head_dim, bias=bias)
        self.o_proj = Linear(num_heads * head_dim, width, bias=bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)

    @part
    def keys_values(self, x_BSH: Tensor, cos_BSR: Tensor, sin_BSR: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, normed and rotated, and values: each [B, N, S, D]."""
        key, value = self._heads(self.k_proj(x_BSH)), self._heads(self.v_proj(x_BSH))
        if self.k_norm is not None:
            key = self.k_norm(key)
        return rotate(key, cos_BSR, sin_BSR), value

    def heads(
        self, x_BSH: Tensor, cos_BSR: Tensor, sin_BSR: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What is attended with: queries [B, N*G, S, D], keys and values [B, N, S, D]."""
        query = self._heads(self.q_proj(x_BSH))
        if self.q_norm is not None:
            query = self.q_norm(query)
        return rotate(query, cos_BSR, sin_BSR), *self.keys_values(x_BSH, cos_BSR, sin_BSR)

    def join(self, out_BMSD: Tensor) -> Tensor:
        """What attention gave, all heads side by side and projected [B, S, H]."""
        return self.o_proj(out_BMSD.transpose(1, 2).flatten(2))

    def _heads(self, x_BSM: Tensor) -> Tensor:
        return x_BSM.view(*x_BSM.shape[:2], -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU. recompute: keep its input only; the backward pass runs it again."""

    recompute = False

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner_width, bias=False)
        self.up_proj = Linear(width, inner_width, bias=False)
        self.down_proj = Linear(inner_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            out: Tensor = checkpoint(self._inner, x, use_reentrant=False, preserve_rng_state=False)
            return out
        return self._inner(x)

    def _inner(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
