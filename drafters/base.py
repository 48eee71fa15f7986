"""What the decoding loop asks of a drafter, and what it gets.

Dimension letters: B rows, K proposed tokens, V target vocabulary, N newly committed positions,
F captured width.

A drafter with weights is one nn.Module with three uses: `rollout` (training: many positions at
once), `observe` + `propose` (decoding: step by step, with a cache) and the tensors that its
exporter names. A drafter without weights only decodes.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class Proposal:
    """Tokens that a drafter guesses for one round.

    tokens_BK: int64 target ids; entries from num_proposed_B on are padding.
    num_proposed_B: int64, 0..K.
    probs_BKV: fp32 distribution each token was drawn from, or None where every token was chosen
        outright (a point mass: greedy drafting, n-gram lookup).
    """

    tokens_BK: Tensor
    num_proposed_B: Tensor
    probs_BKV: Tensor | None = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy. `draft_sampled`: the drafter draws too."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    draft_sampled: bool = False


class DecodingDrafter(ABC):
    """The interface of the decoding loop."""

    aux_layers: tuple[int, ...] = ()  # target layers whose states `observe` is given

    @abstractmethod
    def start(self, prompts: list[list[int]], max_length: int) -> Any:
        """Make the state for one decode of these prompts (rows), of at most `max_length` tokens."""

    @abstractmethod
    def observe(self, state: Any, next_ids_BN: Tensor, aux_BNF: Tensor, num_B: Tensor) -> None:
        """Take in committed positions.

        Args:
            next_ids_BN: for every position that the target has just run over, the committed token
                *after* it (the last one is the token that the target has not run over yet).
            aux_BNF: the captured target states at those positions.
            num_B: how many of the N are real, row by row; the rest is padding.
        """

    @abstractmethod
    def propose(
        self, state: Any, num_draft: int, sampling: Sampling, uniforms_BK: Tensor | None
    ) -> Proposal:
        """Guess up to `num_draft` tokens behind the last committed one.

        Args:
            uniforms_BK: in [0, 1), one a draw; None when nothing is drawn. They must not be used
                for acceptance as well.
        """
