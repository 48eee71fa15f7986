"""N-gram lookup (vLLM: ngram), which has no weights, and such a drafter before a trained head.

Dimension letters: B rows, K proposed tokens, V vocabulary, N newly committed positions.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.base import DecodingDrafter, Proposal, Sampling

UNTRAINED = ("lookup", "suffix")  # names in eval.drafters of those without weights


@dataclass
class _Row:
    """Tokens of one row, and for every n-gram the place after its latest but one occurrence."""

    ids: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    pending: list[tuple[int, ...]] = field(default_factory=list)

    def push(self, token: int, sizes: range) -> None:
        # N-grams that ended at the previous token get their continuation only now, so that a
        # lookup never finds the very n-gram it starts from.
        for gram in self.pending:
            self.after[gram] = len(self.ids)
        self.ids.append(token)
        self.pending = [tuple(self.ids[-n:]) for n in sizes if n <= len(self.ids)]


class Lookup(DecodingDrafter):
    """Prompt lookup: where the last n tokens stood before, propose what followed them there.

    The longest n-gram is tried first, and its latest earlier occurrence is used.
    """

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self.sizes = range(ngram_max, ngram_min - 1, -1)

    def start(self, prompts: list[list[int]], max_length: int) -> list[_Row]:
        rows = [_Row() for _ in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            row.push(prompt[0], self.sizes)  # `observe` brings every later token, prompt included
        return rows

    def keep(self, state: list[_Row], rows: list[int]) -> list[_Row]:
        return [state[row] for row in rows]

    def observe(
        self, state: list[_Row], next_ids_BN: Tensor, aux_BNF: Tensor, num_B: Tensor
    ) -> None:
        for row, ids, num in zip(state, next_ids_BN.tolist(), num_B.tolist(), strict=True):
            for token in ids[:num]:
                row.push(token, self.sizes)

    def propose(
        self,
        state: list[_Row],
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        tokens_BK = torch.zeros(len(state), num_draft, dtype=torch.int64)
        counts = []
        for b, row in enumerate(state):
            start = next((row.after[g] for g in row.pending if g in row.after), len(row.ids))
            found = row.ids[start : start + num_draft]
            tokens_BK[b, : len(found)] = torch.tensor(found, dtype=torch.int64)
            counts.append(len(found))
        return Proposal(tokens_BK, torch.tensor(counts, dtype=torch.int64))


@dataclass
class _Both:
    lookup: Any
    head: Any


class LookupThen(DecodingDrafter):
    """Lookup (or suffix) where it hits, else the trained drafter; chosen row by row.

    The choice depends on committed tokens alone, so verification stays exact.
    """

    def __init__(self, lookup: DecodingDrafter, head: DecodingDrafter) -> None:
        self.lookup, self.head = lookup, head
        self.aux_layers = head.aux_layers

    def compile_passes(self, mode: str, key: str) -> None:
        self.head.compile_passes(mode, key)

    def forget(self) -> None:
        self.lookup.forget()
        self.head.forget()

    def start(self, prompts: list[list[int]], max_length: int) -> _Both:
        return _Both(self.lookup.start(prompts, max_length), self.head.start(prompts, max_length))

    def keep(self, state: _Both, rows: list[int]) -> _Both:
        return _Both(self.lookup.keep(state.lookup, rows), self.head.keep(state.head, rows))

    def observe(self, state: _Both, next_ids_BN: Tensor, aux_BNF: Tensor, num_B: Tensor) -> None:
        self.head.observe(state.head, next_ids_BN, aux_BNF, num_B)
        self.lookup.observe(state.lookup, next_ids_BN, aux_BNF, num_B)

    def propose(
        self,
        state: _Both,
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        found = self.lookup.propose(state.lookup, num_draft, sampling, uniforms_BK)
        hit_B = found.num_proposed_B > 0
        if bool(hit_B.all()):
            return found
        drafted = self.head.propose(state.head, num_draft, sampling, uniforms_BK, seen_BV)
        device = drafted.tokens_BK.device
        hit_B, found_BK = hit_B.to(device), found.tokens_BK.to(device)
        rest = num_draft - drafted.tokens_BK.shape[1]  # a head may stop before lookup does
        tokens_BK = torch.where(hit_B[:, None], found_BK, pad(drafted.tokens_BK, (0, rest)))
        num_B = torch.where(hit_B, found.num_proposed_B.to(device), drafted.num_proposed_B)
        probs_BKV = drafted.probs_BKV
        if probs_BKV is not None:
            probs_BKV = pad(probs_BKV, (0, 0, 0, rest))
            if bool(hit_B.any()):
                certain = torch.zeros_like(probs_BKV).scatter_(-1, found_BK[..., None], 1.0)
                probs_BKV = torch.where(hit_B[:, None, None], certain, probs_BKV)
        return Proposal(tokens_BK, num_B, probs_BKV)
