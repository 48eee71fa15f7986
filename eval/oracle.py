"""A perfect drafter: it proposes the target's own tokens at the cost of a real drafter.

In every round it proposes as many as the real one does there: what that cannot draft, it has not
paid for.
Its speedup is the ceiling of that drafter: what training alone could still gain. Only greedy
decoding has answers that are known beforehand, so it is measured at temperature 0.

Dimension letters: B rows, K proposed tokens, N newly committed positions.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafters.base import DecodingDrafter, Proposal, Sampling


class _State(NamedTuple):
    inner: Any
    answers: list[list[int]]
    places: list[int]  # of the next token, in its row's answer


class Replay(DecodingDrafter):
    """Runs the drafter `inner` and proposes, for each token of its draft, the target's own.

    answers: by prompt ids, each the tokens of the target alone, the prefill's included.
    """

    def __init__(
        self, inner: DecodingDrafter, answers: Mapping[tuple[int, ...], list[int]]
    ) -> None:
        self.inner, self.answers = inner, answers
        self.aux_layers = inner.aux_layers

    def forget(self) -> None:
        self.inner.forget()

    def start(self, prompts: list[list[int]], max_length: int) -> _State:
        answers = [self.answers.get(tuple(prompt), []) for prompt in prompts]
        places = [1 - len(prompt) for prompt in prompts]  # `observe` is told of the prompt, too
        return _State(self.inner.start(prompts, max_length), answers, places)

    def keep(self, state: _State, rows: list[int]) -> _State:
        return _State(
            self.inner.keep(state.inner, rows),
            [state.answers[row] for row in rows],
            [state.places[row] for row in rows],
        )

    def observe(self, state: _State, next_ids_BN: Tensor, aux_BNF: Tensor, num_B: Tensor) -> None:
        self.inner.observe(state.inner, next_ids_BN, aux_BNF, num_B)
        for b, num in enumerate(num_B.tolist()):
            state.places[b] += num

    def propose(
        self,
        state: _State,
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        drafted = self.inner.propose(state.inner, num_draft, sampling, uniforms_BK, seen_BV)
        rows = zip(state.answers, state.places, drafted.num_proposed_B.tolist(), strict=True)
        known = [answer[place : place + num] for answer, place, num in rows]
        width = drafted.tokens_BK.shape[1]
        tokens = [ids + [0] * (width - len(ids)) for ids in known]
        device = drafted.tokens_BK.device
        return Proposal(
            torch.tensor(tokens, dtype=torch.int64, device=device),
            torch.tensor([len(ids) for ids in known], device=device),
        )
