"""Suffix decoding (Oliaro et al. 2411.04975; as Arctic Inference counts, which vLLM runs).

Dimension letters: B rows, K proposed tokens, V vocabulary, N newly committed positions.

A tree holds every piece of at most `max_depth` tokens of a text, with the times that it occurs.
Each suffix of the text that occurred before is a match; from there the most frequent continuation
is followed while its probability lasts. Of all matches the continuation with the largest sum of
probabilities, its expected accepted length, is proposed, so drafts are as long as they are certain.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafters.base import DecodingDrafter, Proposal, Sampling


class _Node:
    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, _Node] = {}

    def child(self, token: int) -> "_Node":
        if token not in self.children:
            self.children[token] = _Node()
        self.children[token].count += 1
        return self.children[token]


class SuffixTree:
    """Counts of all pieces of the texts that were put in; ends are those of the newest text."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.root = _Node()
        self._ends: list[_Node] = []  # of its suffixes, shortest first

    def push(self, token: int) -> None:
        """The next token of the newest text."""
        before = [self.root, *self._ends][: self.max_depth]
        self._ends = [node.child(token) for node in before]

    def add(self, ids: Sequence[int]) -> None:
        """A whole text."""
        self._ends.clear()
        for token in ids:
            self.push(token)
        self._ends.clear()

    def remove(self, ids: Sequence[int]) -> None:
        """Take back a text that was added."""
        for start in range(len(ids)):
            node = self.root
            for token in ids[start : start + self.max_depth]:
                child = node.children[token]
                child.count -= 1
                if child.count == 0:
                    del node.children[token]
                    break
                node = child

    def matches(self, ids: Sequence[int]) -> list[tuple[int, _Node]]:
        """(length, node) of each suffix of `ids` that is in the tree, shortest first."""
        found = []
        for length in range(1, min(self.max_depth, len(ids)) + 1):
            node: _Node | None = self.root
            for token in ids[-length:]:
                node = node.children.get(token) if node is not None else None
            if node is None:
                break
            found.append((length, node))
        return found


@dataclass(frozen=True)
class _Guess:
    tokens: list[int]
    score: float


def _follow(node: _Node, limit: int, min_prob: float) -> _Guess:
    """The likeliest continuation; among equals the one that is newer to the tree."""
    tokens: list[int] = []
    prob, score = 1.0, 0.0
    while len(tokens) < limit and node.children:
        token, child = max(reversed(node.children.items()), key=lambda item: item[1].count)
        prob *= child.count / node.count
        if prob < min_prob:
            break
        tokens.append(token)
        score += prob
        node = child
    return _Guess(tokens, score)


@dataclass
class _Row:
    tree: SuffixTree
    num_prompt: int
    ids: list[int] = field(default_factory=list)

    def push(self, token: int) -> None:
        self.ids.append(token)
        self.tree.push(token)


class Suffix(DecodingDrafter):
    """The drafter; a draft is at most max_factor times as long as its match.

    max_depth: longest match and its continuation together. min_prob: of the draft as a whole.
    min_match: of tokens; shorter matches are passed over. num_cached: answers of earlier decodes
    that are searched too, the newest ones, until `forget`; what is drafted then depends on what was
    asked before.
    """

    def __init__(
        self,
        max_depth: int = 24,
        max_factor: float = 1.0,
        min_prob: float = 0.1,
        num_cached: int = 0,
        min_match: int = 1,
    ) -> None:
        self.max_depth, self.max_factor, self.min_prob = max_depth, max_factor, min_prob
        self.num_cached, self.min_match = num_cached, min_match
        self.forget()

    def forget(self) -> None:
        """No earlier answers are known."""
        self._shared = SuffixTree(self.max_depth)
        self._cached: deque[list[int]] = deque()
        self._open: list[_Row] = []

    def start(self, prompts: list[list[int]], max_length: int) -> list[_Row]:
        self._keep_answers()
        rows = [_Row(SuffixTree(self.max_depth), len(prompt)) for prompt in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            row.push(prompt[0])  # `observe` brings every later token, prompt included
        if self.num_cached:
            self._open = rows
        return rows

    def _keep_answers(self) -> None:
        """The answers of the decode before become searchable; the oldest ones go."""
        for row in self._open:
            answer = row.ids[row.num_prompt :]
            self._cached.append(answer)
            self._shared.add(answer)
            if len(self._cached) > self.num_cached:
                self._shared.remove(self._cached.popleft())
        self._open = []

    def keep(self, state: list[_Row], rows: list[int]) -> list[_Row]:
        return [state[row] for row in rows]

    def observe(
        self, state: list[_Row], next_ids_BN: Tensor, aux_BNF: Tensor, num_B: Tensor
    ) -> None:
        for row, ids, num in zip(state, next_ids_BN.tolist(), num_B.tolist(), strict=True):
            for token in ids[:num]:
                row.push(token)

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
            found = self._best(row, num_draft).tokens
            tokens_BK[b, : len(found)] = torch.tensor(found, dtype=torch.int64)
            counts.append(len(found))
        return Proposal(tokens_BK, torch.tensor(counts, dtype=torch.int64))

    def _best(self, row: _Row, num_draft: int) -> _Guess:
        """The best continuation; of equal ones that of the longest match, in this very text."""
        best = _Guess([], 0.0)
        for tree in (self._shared, row.tree) if self._cached else (row.tree,):
            for length, node in tree.matches(row.ids):
                if length < self.min_match:
                    continue
                limit = int(min(num_draft, length * self.max_factor))
                guess = _follow(node, limit, self.min_prob)
                if guess.score >= best.score:
                    best = guess
        return best
