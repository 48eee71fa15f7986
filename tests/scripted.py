"""A target and drafters that follow a script, for tests of the decoding loop."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from data.cache import KVCache
from data.embedded import byte_tokenizer
from data.target import TargetStates
from drafters.base import DecodingDrafter, Proposal, Sampling


class ScriptedTarget:
    """Next-token logits are a row of a table, chosen by the token before.

    cost: called with the number of forward passes so far, before each of them.
    """

    def __init__(self, table_VV: Tensor, eos_ids: list[int], cost: Any = None) -> None:
        self.table_VV, self.eos_ids = table_VV, eos_ids
        self.vocab_size, self.hidden_size = table_VV.shape[0], table_VV.shape[0]
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.tokenizer = byte_tokenizer()
        self.config = SimpleNamespace(max_position_embeddings=4096)
        self.cost, self.num_passes = cost, 0
        self.seen_lengths: list[list[int]] = []  # of the cache, before each pass

    @classmethod
    def chain(cls, chain: dict[int, int], eos_ids: list[int], vocab_size: int = 64) -> Any:
        """Greedy: after token a comes chain[a], after any other token 0."""
        table_VV = torch.zeros(vocab_size, vocab_size)
        for a in range(vocab_size):
            table_VV[a, chain.get(a, 0)] = 10.0
        return cls(table_VV, eos_ids)

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        return KVCache(0, batch_size, max_length, 1, 1, torch.float32)

    def forward(
        self, ids_BS: Tensor, cache: KVCache, aux_layers: Any = (), nodes: Any = None
    ) -> TargetStates:
        if self.cost:
            self.cost(self.num_passes)
        self.num_passes += 1
        self.seen_lengths.append(cache.lengths_B.tolist())
        cache.begin(ids_BS.shape[1], nodes)
        hidden_BSH = F.one_hot(ids_BS, self.vocab_size).float()
        return TargetStates(hidden_BSH, hidden_BSH[..., :0])

    def logits(self, hidden_H: Tensor) -> Tensor:
        return self.table_VV[hidden_H.argmax(-1)]


class Oracle(DecodingDrafter):
    """Knows the answers; goes wrong on purpose after a given number of right tokens.

    answers: by prompt. num_right: for each round, how many proposed tokens are right; the last
    entry stays; None = all.
    """

    def __init__(
        self,
        answers: dict[tuple[int, ...], list[int]],
        vocab_size: int,
        num_right: list[int] | None = None,
    ) -> None:
        self.answers, self.vocab_size, self.num_right = answers, vocab_size, num_right

    def start(self, prompts: list[list[int]], max_length: int) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(answer=self.answers[tuple(p)], place=1 - len(p), round=0)
            for p in prompts
        ]

    def keep(self, state: Any, rows: list[int]) -> Any:
        return [state[row] for row in rows]

    def observe(self, state: Any, next_ids_BN: Tensor, aux_BNF: Tensor, num_B: Tensor) -> None:
        for row, num in zip(state, num_B.tolist(), strict=True):
            row.place += num  # tokens of the answer that are committed

    def propose(
        self,
        state: Any,
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        rows = []
        for row in state:
            tokens = (row.answer[row.place :] + [0] * num_draft)[:num_draft]
            if self.num_right is not None:
                right = self.num_right[min(row.round, len(self.num_right) - 1)]
                tokens = [
                    t if i < right else (t + 1) % self.vocab_size for i, t in enumerate(tokens)
                ]
            row.round += 1
            rows.append(tokens)
        return Proposal(torch.tensor(rows), torch.full((len(rows),), num_draft))


class FixedLaw(DecodingDrafter):
    """Draws every token from one distribution."""

    def __init__(self, q_V: Tensor) -> None:
        self.q_V = q_V

    def start(self, prompts: list[list[int]], max_length: int) -> None:
        return None

    def keep(self, state: None, rows: list[int]) -> None:
        return None

    def observe(self, state: Any, next_ids_BN: Tensor, aux_BNF: Tensor, num_B: Tensor) -> None:
        return None

    def propose(
        self,
        state: Any,
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        assert uniforms_BK is not None
        B = uniforms_BK.shape[0]
        tokens_BK = torch.searchsorted(self.q_V.cumsum(0), uniforms_BK.contiguous(), right=True)
        q_BKV = self.q_V.expand(B, num_draft, -1)
        return Proposal(tokens_BK.clamp(max=len(self.q_V) - 1), torch.full((B,), num_draft), q_BKV)
