"""Drafts as blocks behind anchors: how a training pass packs them and what they may look at.

Dimension letters: B rows, S positions, A blocks a row, L slots of a block, N kv heads, G query
heads of each, D head width, T context places, X anchors in a flat list.

A block stands behind its anchor at position s of a row. Its slots see the context places before s
(strictly: when it is drafted, the target has not run over the anchor) and slots of their own block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from data.documents import Documents
from drafters.anchors import by_stretch

MAX_SCORES = 2**27  # attention scores that exist at once: 512 MB in fp32, a few copies of it


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch, packed row by row; unused ones stand at position 0.

    position_BA: int64 position of the anchor in its document.
    place_BA: int64 its place in the row: the same, unless rows are packed.
    index_X: int64, for every flat place b * S + s the number b * A + a of the block behind it;
        -1 where there is none.
    reach: largest position of a, over the rows.
    counts: of a packed row, how many blocks stand in each document.
    documents: of a packed row.
    """

    position_BA: Tensor
    place_BA: Tensor
    index_X: Tensor
    reach: list[int]
    counts: list[int] | None = None
    documents: Documents | None = None


def pack_blocks(anchors_X: Tensor, shape: torch.Size, documents: Documents | None = None) -> Blocks:
    """Blocks behind flat anchors b * S + s (ascending); one unused block where there is none.

    Args:
        shape: (B, S) of the batch.
        documents: of a packed batch.
    """
    num_rows, length = shape
    rows_X = anchors_X // length
    counts_B = torch.bincount(rows_X, minlength=num_rows)
    starts_B = counts_B.cumsum(0) - counts_B
    most = max(1, int(counts_B.max()))
    place_X = torch.arange(len(anchors_X), device=anchors_X.device) - starts_B[rows_X]
    place_BA = anchors_X.new_zeros(num_rows, most)
    place_BA[rows_X, place_X] = anchors_X % length
    index_X = anchors_X.new_full((num_rows * length,), -1)
    index_X[anchors_X] = rows_X * most + place_X
    if documents is None:
        return Blocks(place_BA, place_BA, index_X, place_BA.amax(0).tolist())
    counts = [len(part) for part in by_stretch(place_BA[0], documents.lengths)]
    position_BA = documents.position_1S.gather(1, place_BA)
    return Blocks(position_BA, place_BA, index_X, position_BA[0].tolist(), counts, documents)


def block_ids(ids_BS: Tensor, blocks: Blocks, mask_token_id: int, block_size: int) -> Tensor:
    """Tokens of all blocks [B, A * L]: the anchor's, then masks."""
    ids_BAL = ids_BS.new_full((*blocks.position_BA.shape, block_size), mask_token_id)
    ids_BAL[..., 0] = ids_BS.gather(1, blocks.place_BA)
    return ids_BAL.flatten(1)


def block_positions(blocks: Blocks, block_size: int) -> Tensor:
    """Positions of all slots in their document [B, A * L]: s, s + 1, ..."""
    offsets_L = torch.arange(block_size, device=blocks.position_BA.device)
    return (blocks.position_BA[..., None] + offsets_L).flatten(1)


def block_attention(
    query: Tensor,
    context: tuple[Tensor, Tensor],
    key: Tensor,
    value: Tensor,
    blocks: Blocks,
    sees_LL: Tensor,
) -> Tensor:
    """Attention of packed blocks: over the context before each anchor and within the block.

    No block ever meets the keys of another, so scores take B * N*G * A*L * (T + L) numbers, not
    the A*L squared of one mask over everything. Above MAX_SCORES blocks are done in groups (by
    ascending anchor, so that early ones meet a short context), each computed again in the
    backward pass.

    Args:
        query: [B, N*G, A*L, D]; key, value: [B, N, A*L, D] of the slots.
        context: keys and values [B, N, T, D], one a position.
        sees_LL: bool, which slots of its block a slot sees (never none).

    Returns:
        [B, N*G, A*L, D].
    """
    if blocks.documents is not None:
        return _by_document(query, context, key, value, blocks, sees_LL)
    B, heads, _, D = query.shape
    N, A, L = key.shape[1], blocks.position_BA.shape[1], sees_LL.shape[0]
    query = query.view(B, N, heads // N, A, L, D)
    key, value = key.view(B, N, A, L, D), value.view(B, N, A, L, D)
    group = max(1, MAX_SCORES // (B * heads * L * (context[0].shape[2] + L)))
    if group >= A:
        out = _attend(query, *context, key, value, blocks.position_BA, sees_LL)
        return out.reshape(B, heads, A * L, D)
    parts = []
    for start in range(0, A, group):
        part = slice(start, start + group)
        T = max(blocks.reach[part])
        arguments = (
            query[:, :, :, part],
            context[0][:, :, :T],
            context[1][:, :, :T],
            key[:, :, part],
            value[:, :, part],
            blocks.position_BA[:, part],
            sees_LL,
        )
        parts.append(checkpoint(_attend, *arguments, use_reentrant=False))
    return torch.cat(parts, 3).reshape(B, heads, A * L, D)


def _by_document(
    query: Tensor,
    context: tuple[Tensor, Tensor],
    key: Tensor,
    value: Tensor,
    blocks: Blocks,
    sees_LL: Tensor,
) -> Tensor:
    """The same for a packed row: the blocks of each document over its own context."""
    assert blocks.documents is not None and blocks.counts is not None
    slots = [count * len(sees_LL) for count in blocks.counts]
    parts = zip(
        *(x.split(slots, 2) for x in (query, key, value)),
        *(blocks.documents.split(x) for x in context),
        blocks.position_BA.split(blocks.counts, 1),
        strict=True,
    )
    out, start = [], 0
    for count, (asked, own_key, own_value, *around, position_1A) in zip(
        blocks.counts, parts, strict=True
    ):
        reach = blocks.reach[start : start + count]
        start += count
        alone = Blocks(position_1A, position_1A, blocks.index_X, reach)
        if count:
            around_it = (around[0], around[1])
            out.append(block_attention(asked, around_it, own_key, own_value, alone, sees_LL))
    return torch.cat(out, 2)


def _attend(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    key: Tensor,
    value: Tensor,
    position_BA: Tensor,
    sees_LL: Tensor,
) -> Tensor:
    """query [B, N, G, A, L, D] over context [B, N, T, D] and its block [B, N, A, L, D]."""
    B, N, G, A, L, D = query.shape
    T = context_key.shape[2]
    before = query.reshape(B, N, G * A * L, D) @ context_key.transpose(-1, -2)
    places_T = torch.arange(T, device=query.device)
    seen = (places_T < position_BA[..., None])[:, None, None, :, None]
    before = before.view(B, N, G, A, L, T).masked_fill(~seen, float("-inf"))
    inside = query @ key[:, :, None].transpose(-1, -2)
    inside = inside.masked_fill(~sees_LL, float("-inf"))
    weights = torch.cat([before, inside], -1).float().mul(D**-0.5).softmax(-1).to(value.dtype)
    out = weights[..., :T].reshape(B, N, G * A * L, T) @ context_value
    return out.view(B, N, G, A, L, D) + weights[..., T:] @ value[:, :, None]
