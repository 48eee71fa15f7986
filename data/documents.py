"""Documents one behind the other in one row, of which none sees another.

Dimension letters: B rows (1), S places of the packed row, N kv heads, G query heads of each, D head
width.

What may be seen is one rule, `sees`. On CUDA it becomes the block mask of one FlexAttention over
the whole row; elsewhere each document is a call of its own to the attention of rows that stand
alone, which is that rule without a mask, and costs what the documents cost, not the row squared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

FLEX_HEAD_DIM = 16  # FlexAttention's kernels take no narrower heads


def sees(query: Tensor, key: Tensor, start: Tensor, window: int | None = None) -> Tensor:
    """Whether place `query` of a row, whose document begins at `start`, looks at place `key`.

    Args:
        window: how many places of its document it sees, itself included; None = all up to itself.
    """
    seen = (key <= query) & (key >= start)
    return seen if window is None else seen & (key > query - window)


class Documents:
    """Where the documents of a packed row lie.

    Args:
        lengths: tokens of each, in order; S together.

    position_1S: int64, place of each token within its document.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = list(lengths)
        positions = torch.cat([torch.arange(n) for n in self.lengths])[None]
        self.position_1S = positions.to(device, non_blocking=True)
        self._block_masks: dict[int | None, BlockMask] = {}

    def to(self, device: torch.device | str) -> Documents:
        """The same documents on another device."""
        return Documents(self.lengths, device)

    @property
    def start_S(self) -> Tensor:
        """Where the document of each place begins."""
        places_S = torch.arange(self.position_1S.shape[1], device=self.position_1S.device)
        return places_S - self.position_1S[0]

    def model_inputs(self) -> dict[str, Any]:
        """What a transformers model on the project's attention is called with beside tokens."""
        return {"position_ids": self.position_1S, "documents": self}

    def split(self, x: Tensor, dim: int = 2) -> tuple[Tensor, ...]:
        """A tensor over the places of the row, document by document."""
        return x.split(self.lengths, dim)

    def block_mask(self, window: int | None = None) -> BlockMask:
        """`sees` as FlexAttention's BlockMask; made once for all layers of a pass."""
        if window not in self._block_masks:
            start_S, S = self.start_S, self.position_1S.shape[1]

            def rule(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return sees(query, key, start_S[query], window)

            self._block_masks[window] = create_block_mask(
                rule, None, None, S, S, device=str(start_S.device)
            )
        return self._block_masks[window]


def takes_flex(query: Tensor) -> bool:
    """Whether packed attention of these heads is one FlexAttention, or goes by document."""
    return query.is_cuda and query.shape[-1] >= FLEX_HEAD_DIM


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a packed row as one FlexAttention, compiled where it runs on CUDA.

    Args:
        query: [B, N*G, S, D]; key, value: [B, N, S, D].

    Returns:
        [B, N*G, S, D], and the logsumexp [B, N*G, S] of the scaled scores in fp32.
    """

    def cap(score: Tensor, *_places: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    out, extra = _flex_attention(query.is_cuda)(
        query,
        key,
        value,
        score_mod=None if softcap is None else cap,
        block_mask=documents.block_mask(window),
        scale=scaling,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    return out, extra.lse


@cache
def _flex_attention(compiled: bool) -> Callable[..., Any]:
    run: Callable[..., Any] = flex_attention
    return torch.compile(run, dynamic=True) if compiled else run
