"""Rows to batches: padding or packing, a deterministic batch plan, its division among ranks.

Shape suffixes (this legend serves the whole project):
  B rows of a batch, S positions of the longest row (0-based, right-padded), H hidden size of the
  target, F = captured layers * H, the captured states side by side.

A Batch:
  ids_BS     int64   tokens; padding holds pad_id, which may be a real token's id (pad = eos):
                     nothing compares ids with it, only lengths_B says what is padding
  mask_BS    bool    True on supervised tokens: what the assistant wrote, with its end-of-turn token
  lengths_B  int64   tokens of each row
  aux_BSF            states of the captured layers after reading token s (cached states only)
  hidden_BSH         last layer's output before the final norm, same position (cached states only)
  lse_BS     fp32    logsumexp of the target's full-vocabulary logits there, so that exp(logit -
                     lse) is a probability also where only the draft vocabulary's logits are
                     computed (cached states only, may be absent)
  argmax_BS  int32   the target's most likely next token there (beside lse_BS)
  anchors_A  int64   flat positions b * S + s behind which drafts are trained; None = every one
  documents          of a packed batch: it has one row, the documents one behind the other, and
                     row_ids names those; None = every row is one document
  seed               of the random choices of a training pass over this batch
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.documents import Documents

WINDOW_BATCHES = 64
"""Rows are sorted by length within windows of about this many batches."""

STAND_IN = "stand-in"  # the id of such a row

STAND_IN_TOKENS = 16
"""Length of the stand-in row of a rank that has no batch left."""


@dataclass(frozen=True, kw_only=True)
class States:
    """The target's cached states of one row."""

    aux_SF: Tensor
    hidden_SH: Tensor
    lse_S: Tensor | None = None
    argmax_S: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One conversation as tokens: ids_S int64, mask_S bool (True = supervised)."""

    id: str
    ids_S: Tensor
    mask_S: Tensor
    states: States | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Padded rows, or packed ones; see the legend above."""

    row_ids: list[str]
    ids_BS: Tensor
    mask_BS: Tensor
    lengths_B: Tensor
    aux_BSF: Tensor | None = None
    hidden_BSH: Tensor | None = None
    lse_BS: Tensor | None = None
    argmax_BS: Tensor | None = None
    anchors_A: Tensor | None = None
    documents: Documents | None = None
    seed: int = 0

    @property
    def position_1S(self) -> Tensor:
        """Place of each token within its document: int64 [1, S], the same in every row."""
        if self.documents is not None:
            return self.documents.position_1S
        return torch.arange(self.ids_BS.shape[1], device=self.ids_BS.device)[None]

    @property
    def stretches(self) -> list[int]:
        """Lengths of the stretches of flat places b * S + s that are a document each.

        (With its padding, where rows are padded.)
        """
        if self.documents is not None:
            return self.documents.lengths
        num_rows, length = self.ids_BS.shape
        return [length] * num_rows

    @property
    def valid_BS(self) -> Tensor:
        """Bool, True on real tokens."""
        steps_S = torch.arange(self.ids_BS.shape[1], device=self.ids_BS.device)
        return steps_S < self.lengths_B[:, None]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, non_blocking=True)

        return replace(
            self,
            ids_BS=self.ids_BS.to(device, non_blocking=True),
            mask_BS=self.mask_BS.to(device, non_blocking=True),
            lengths_B=self.lengths_B.to(device, non_blocking=True),
            aux_BSF=move(self.aux_BSF),
            hidden_BSH=move(self.hidden_BSH),
            lse_BS=move(self.lse_BS),
            argmax_BS=move(self.argmax_BS),
            anchors_A=move(self.anchors_A),
            documents=None if self.documents is None else self.documents.to(device),
        )


def collate(rows: Sequence[Row], pad_id: int = 0, packing: bool = False) -> Batch:
    """Pad rows on the right to the longest one, or pack them: one behind the other in one row.

    All rows have states, or none has. The first token of a row is supervised in none: nothing
    stands before it, so nobody drafts it. That also keeps drafts within their document, since all
    tokens from anchor to slot are supervised (drafters.anchors).
    """
    join = _chain if packing else _pad
    assert rows, "a batch has at least one row; see make_batch for a rank without rows"
    for row in rows:
        assert row.ids_S.shape == row.mask_S.shape, (row.id, row.ids_S.shape, row.mask_S.shape)
    states = [row.states for row in rows if row.states is not None]
    assert len(states) in (0, len(rows)), "some rows have cached states and some have none"
    lse = [state.lse_S for state in states if state.lse_S is not None]
    assert len(lse) in (0, len(states)), "some rows have a cached lse and some have none"
    argmax = [state.argmax_S for state in states if state.argmax_S is not None]
    assert len(argmax) in (0, len(lse)), "some rows have a cached argmax and some have none"
    lengths = [len(row.ids_S) for row in rows]
    masks = [torch.cat([row.mask_S.new_zeros(1), row.mask_S[1:]]) for row in rows]
    return Batch(
        row_ids=[row.id for row in rows],
        ids_BS=join([row.ids_S for row in rows], pad_id),
        mask_BS=join(masks, False),
        lengths_B=torch.tensor([sum(lengths)] if packing else lengths),
        aux_BSF=join([state.aux_SF for state in states], 0.0) if states else None,
        hidden_BSH=join([state.hidden_SH for state in states], 0.0) if states else None,
        lse_BS=join(lse, 0.0) if lse else None,
        argmax_BS=join(argmax, 0) if argmax else None,
        documents=Documents(lengths) if packing else None,
    )


def make_batch(
    rows: Sequence[Row], indices: Sequence[int], pad_id: int = 0, packing: bool = False
) -> Batch:
    """Collate one entry of a plan; an empty entry gives a stand_in, which contributes zero."""
    chosen = [rows[index] for index in indices] or [stand_in(rows[0])]
    return collate(chosen, pad_id, packing)


def stand_in(row: Row) -> Row:
    """The head of a real row without supervised tokens.

    A rank that has no batch left must still take part in the step. A real row has the right dtypes
    and widths whatever the target, and an empty mask adds exactly nothing to loss, gradient and
    counts.
    """
    head = slice(0, STAND_IN_TOKENS)
    states = row.states
    if states is not None:
        states = States(
            aux_SF=states.aux_SF[head],
            hidden_SH=states.hidden_SH[head],
            lse_S=None if states.lse_S is None else states.lse_S[head],
            argmax_S=None if states.argmax_S is None else states.argmax_S[head],
        )
    mask_S = torch.zeros_like(row.mask_S[head])
    return Row(id=STAND_IN, ids_S=row.ids_S[head], mask_S=mask_S, states=states)


def plan_batches(
    lengths: Sequence[int],
    batch_tokens: int | None,
    micro_batch_size: int,
    seed: int,
    epoch: int,
    packing: bool = False,
) -> list[list[int]]:
    """Row indices of every micro-batch of one epoch, in order.

    A pure function of its arguments, so a position (epoch, index) is all that a resumed run needs.
    Every row comes exactly once; the last partial batch is kept. Rows of similar length share a
    padded batch; a packed one is filled with rows of any length.

    Args:
        lengths: tokens of each row.
        batch_tokens: cap on rows * longest row of a batch (padding counts), or on the tokens of a
            packed one. A longer row is a batch of its own.
        micro_batch_size: rows a batch; used where batch_tokens is None.
        seed: of the order, together with the epoch.
        epoch: 0-based; each has an order of its own.
        packing: the rows of a batch stand in one row, without padding (needs batch_tokens).
    """
    assert batch_tokens is not None or not packing, "packed rows have a budget"
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    rows_a_batch = micro_batch_size
    if batch_tokens is not None and lengths:
        rows_a_batch = max(1, batch_tokens * len(lengths) // max(1, sum(lengths)))
    window = rows_a_batch * WINDOW_BATCHES
    plan: list[list[int]] = []
    for start in range(0, len(order), window):
        by_length = sorted(order[start : start + window], key=lambda index: -lengths[index])
        if packing and batch_tokens is not None:
            plan += _fill(by_length, lengths, batch_tokens)
        else:
            plan += _cut(by_length, lengths, batch_tokens, micro_batch_size)
    rng.shuffle(plan)
    return plan


def num_places(plan: Sequence[Sequence[int]], lengths: Sequence[int], packing: bool) -> int:
    """Places of the batches of a plan, padding included: what a step computes."""
    if packing:
        return sum(lengths[index] for batch in plan for index in batch)
    return sum(len(batch) * max(lengths[index] for index in batch) for batch in plan if batch)


def shard(plan: list[list[int]], rank: int, world: int) -> list[list[int]]:
    """This rank's part of a plan: entry i of rank r is entry i * world + r of the plan.

    All ranks get the same number of entries, so none waits for another at the end; what is missing
    is filled with empty entries, which make_batch turns into batches that contribute zero.
    """
    missing = -len(plan) % world
    return (plan + [[] for _ in range(missing)])[rank::world]


def _cut(
    by_length: list[int], lengths: Sequence[int], batch_tokens: int | None, micro_batch_size: int
) -> list[list[int]]:
    """Cut rows, longest first, into batches."""
    batches: list[list[int]] = []
    for index in by_length:
        full = True
        if batches:
            batch = batches[-1]
            if batch_tokens is None:
                full = len(batch) == micro_batch_size
            else:
                full = (len(batch) + 1) * lengths[batch[0]] > batch_tokens
        if full:
            batches.append([])
        batches[-1].append(index)
    return batches


def _fill(by_length: list[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Rows, longest first, each into the batch that it leaves the least room in (best fit)."""
    batches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, batch), ascending
    for index in by_length:
        place = bisect_left(rooms, (lengths[index], -1))
        if place < len(rooms):
            room, batch = rooms.pop(place)
        else:
            room, batch = batch_tokens, len(batches)
            batches.append([])
        batches[batch].append(index)
        insort(rooms, (room - lengths[index], batch))
    return batches


def _chain(tensors: Sequence[Tensor], _value: float) -> Tensor:
    return torch.cat(list(tensors))[None]


def _pad(tensors: Sequence[Tensor], value: float) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=value)
