"""Which anchors and slots of a batch are trained on (geometry: drafters.base.Slots).

Dimension letters: B rows, S positions, A anchors, N slots.
"""

import math

import torch
from torch import Tensor

from data.batch import Batch


def supervised_anchors(mask_BS: Tensor, num_depths: int) -> list[Tensor]:
    """For each depth k the flat anchors b * S + s whose slot is supervised (int64, ascending).

    Tokens s .. s + 1 + k all belong to the assistant. (An anchor is a token of an answer: the
    first token of one comes from the target's prefill, so no drafter is ever asked for it.)
    """
    S = mask_BS.shape[1]
    valid_BS = mask_BS.clone()
    anchors = []
    for k in range(num_depths):
        shifted_BS = torch.zeros_like(mask_BS)
        if k + 1 < S:
            shifted_BS[:, : S - 1 - k] = mask_BS[:, 1 + k :]
        valid_BS = valid_BS & shifted_BS
        anchors.append(valid_BS.flatten().nonzero()[:, 0])
    return anchors


def choose_anchors(
    mask_BS: Tensor, num_anchors: int | None, seed: int, stretches: list[int] | None = None
) -> Tensor:
    """Anchors of a step [A], flat and ascending: all, or at most `num_anchors` a row at random.

    Args:
        stretches: of the batch, where it is packed: then a row is a document.
    """
    all_A = supervised_anchors(mask_BS, 1)[0]
    if num_anchors is None:
        return all_A
    generator = torch.Generator().manual_seed(seed)
    num_rows, length = mask_BS.shape
    chosen = []
    for row_A in by_stretch(all_A, stretches or [length] * num_rows):
        keep = torch.randperm(len(row_A), generator=generator)[:num_anchors].to(row_A.device)
        chosen.append(row_A[keep.sort()[0]])
    return torch.cat(chosen)


def by_stretch(anchors_A: Tensor, stretches: list[int]) -> list[Tensor]:
    """Flat anchors (ascending) of each stretch of flat places, see Batch.stretches."""
    ends_T = torch.tensor(stretches).cumsum(0)
    counts_T = torch.searchsorted(anchors_A, ends_T.to(anchors_A.device))
    return list(anchors_A.tensor_split(counts_T[:-1].cpu()))


def anchors_of(batch: Batch) -> Tensor:
    """The anchors chosen for this batch; all, where none were chosen."""
    if batch.anchors_A is not None:
        return batch.anchors_A
    return supervised_anchors(batch.mask_BS, 1)[0]


def supervised_slots(batch: Batch, num_depths: int) -> tuple[Tensor, Tensor]:
    """Every supervised slot behind the batch's anchors: (anchor_N, depth_N), depth by depth."""
    chosen_BS = torch.zeros_like(batch.mask_BS).flatten()
    chosen_BS[anchors_of(batch)] = True
    parts = [a[chosen_BS[a]] for a in supervised_anchors(batch.mask_BS, num_depths)]
    depths = [torch.full_like(part, k) for k, part in enumerate(parts)]
    return torch.cat(parts), torch.cat(depths)


def drop_by_depth(
    row_A: Tensor,
    allowed: list[Tensor],
    generator: torch.Generator,
    keep_ratio: float,
    min_keep_ratio: float,
) -> list[Tensor]:
    """Anchors of depths 1, 2, ...: conditional drop (PARD; COD sampling of P-EAGLE).

    The share max(keep_ratio^d, min_keep_ratio) of a row's anchors trains depth d. Each set lies
    within the one before, so that all that a slot sees is there.

    Args:
        row_A: flat anchors of one row.
        allowed: `supervised_anchors`, depth by depth.

    Returns:
        A set for each depth from 1 on, and an empty one where there is no such depth.
    """
    kept = row_A[torch.randperm(len(row_A), generator=generator).to(row_A.device)]
    sets = []
    for depth, allowed_A in enumerate(allowed[1:], 1):
        share = max(keep_ratio**depth, min_keep_ratio)
        kept = kept[torch.isin(kept, allowed_A)][: math.ceil(share * len(row_A))]
        sets.append(kept)
    return sets or [kept[:0]]
