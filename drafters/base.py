"""What the decoding loop asks of a drafter, and what it gets.

Dimension letters: B rows, S positions, K proposed tokens, V target vocabulary, D draft vocabulary,
N newly committed positions (decoding) or slots (training), F captured width, W width of what the
head reads.

A drafter with weights is one nn.Module with three uses: `slots` (training: many positions at
once), `observe` + `propose` (decoding: step by step, with a cache) and the tensors that its
exporter names. A drafter without weights only decodes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from data.batch import Batch
from data.compiled import CompiledPass, Parted
from data.sampling import final_probs, penalise
from data.target import Target
from recipes.errors import UserError


class DraftLaws(NamedTuple):
    """The drafter's distributions at each proposed token, also where it did not draw from them.

    final_BKV: after temperature and all filters. unfiltered_BKV: after temperature alone.
    """

    final_BKV: Tensor
    unfiltered_BKV: Tensor


@dataclass
class Proposal:
    """Tokens that a drafter guesses for one round.

    tokens_BK: int64 target ids; entries from num_proposed_B on are padding.
    num_proposed_B: int64, 0..K.
    probs_BKV: fp32 distribution each token was drawn from, or None where every token was chosen
        outright (a point mass: greedy drafting, n-gram lookup).
    laws: only with Sampling.keep_laws, from drafters that have them.
    """

    tokens_BK: Tensor
    num_proposed_B: Tensor
    probs_BKV: Tensor | None = None
    laws: DraftLaws | None = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, by target and drafter alike; temperature 0 is greedy.

    draft_sampled: the drafter draws too. keep_laws: proposals carry `laws`, for verifiers that are
    broken on purpose.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    draft_sampled: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    keep_laws: bool = False

    @property
    def needs_history(self) -> bool:
        """Whether the law of a token depends on which tokens have been seen."""
        return self.repetition_penalty != 1

    def penalised(self, logits_NV: Tensor, seen_NV: Tensor | None) -> Tensor:
        """Logits after the repetition penalty; seen_NV (bool) may be None where there is none."""
        if not self.needs_history:
            return logits_NV
        assert seen_NV is not None, "a repetition penalty needs the tokens seen so far"
        return penalise(logits_NV, seen_NV, self.repetition_penalty)

    def law(
        self, logits_NV: Tensor, seen_NV: Tensor | None = None, where: str = "logits"
    ) -> Tensor:
        """The final distribution, fp32: penalty, temperature, min-p, top-k, top-p.

        Raises:
            UserError: a setting is out of range or a row cannot be drawn from; it names `where`.
        """
        return final_probs(
            self.penalised(logits_NV, seen_NV),
            self.temperature,
            self.top_k,
            self.top_p,
            where,
            self.min_p,
        )

    def unfiltered(self, logits_NV: Tensor, seen_NV: Tensor | None = None) -> Tensor:
        """The distribution before min-p, top-k and top-p."""
        return final_probs(self.penalised(logits_NV, seen_NV), self.temperature)


class DecodingDrafter(ABC):
    """The interface of the decoding loop."""

    aux_layers: tuple[int, ...] = ()  # target layers whose states `observe` is given

    def compile_passes(self, mode: str, key: str) -> None:
        """Run the short passes of decodes to come through torch.compile (data.compiled).

        Nothing changes where a drafter has no network, or only single products.
        """
        return None

    def forget(self) -> None:
        """Drop what earlier decodes left behind, so that the next one is like a first one.

        Nothing is left behind but by drafters that search earlier answers.
        """
        return None

    @abstractmethod
    def start(self, prompts: list[list[int]], max_length: int) -> Any:
        """Make the state for one decode of these prompts (rows), of at most `max_length` tokens."""

    @abstractmethod
    def keep(self, state: Any, rows: list[int]) -> Any:
        """The state of some rows alone; the one given is not used again.

        Args:
            rows: as in data.cache.KVCache.keep_rows.
        """

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
        self,
        state: Any,
        num_draft: int,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None = None,
    ) -> Proposal:
        """Guess up to `num_draft` tokens behind the last committed one.

        Args:
            uniforms_BK: in [0, 1), one a draw; None when nothing is drawn. They must not be used
                for acceptance as well.
            seen_BV: bool, the tokens committed so far; given if `sampling.needs_history`. What is
                drafted counts as seen for the tokens after it. It may not be changed.
        """


@dataclass
class Slots:
    """Places of a batch where a drafter guesses a token, in any order.

    A draft starts behind an anchor: the last committed token, at position s of its row. The slot
    of depth k guesses token s + 1 + k, which the target predicts at position s + k; so depth 0 is
    the first token of a draft. Every architecture drafts with this geometry.

    head_NW: what the head reads there.
    anchor_N: int64 flat index b * S + s.
    depth_N: int64 k.
    """

    head_NW: Tensor
    anchor_N: Tensor
    depth_N: Tensor


Head = Tensor | tuple[Tensor, ...]
"""The weight [D, W] of a head, or parts of it that stand side by side and are never joined."""


class TrainedDrafter(nn.Module, DecodingDrafter):
    """A drafter with weights of its own.

    method: its name in recipes, results and draftsmith.json.
    num_anchors: anchors a row that a training step draws at random; None = every one.
    d2t: int64 buffer [D]: target id = draft id + d2t[draft id]; zeros for a whole vocabulary.
    """

    method: ClassVar[str]
    num_anchors: int | None = None
    config: Any  # a frozen dataclass with its shape
    _compiled: CompiledPass | None = None
    d2t: Tensor

    @property
    def draft_ids_D(self) -> Tensor:
        """Target id of every draft id."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    @abstractmethod
    def use_target(self, target: Target) -> None:
        """Borrow what is the target's (embedding, final norm, head): never trained or saved."""

    @abstractmethod
    def slots(self, batch: Batch, num_depths: int) -> Slots:
        """The training pass: head inputs of the drafts behind `batch.anchors_A`.

        Only slots whose token is supervised, with all that stands between it and the anchor (see
        drafters.anchors). Random choices are drawn from `batch.seed` alone.
        """

    @abstractmethod
    def head_weights(self) -> Sequence[Head]:
        """The head [D, W]; one for all depths, or one for each."""

    def vocabulary_weights(self) -> list[nn.Parameter]:
        """What `trains_head` of a recipe's section trains or leaves as it came."""
        own = dict(self.named_parameters()).get("lm_head.weight")
        return [] if own is None else [own]

    def compile_training(self, mode: str, key: str) -> None:
        """Run the parts between attention and gathers through torch.compile, in training alone.

        Args:
            mode, key: see data.compiled.compiled.

        Raises:
            UserError: there is no such part.
        """
        parted = [module for module in self.modules() if isinstance(module, Parted)]
        if not parted:
            raise UserError(
                f"{key}: {mode}: the drafter {self.method} has no part to compile; set {key}: null"
            )
        for module in parted:
            module.compile_as = (mode, key)

    def extra_loss(self, batch: Batch, slots: Slots, alpha_N: Tensor) -> Tensor | None:
        """A sum over slots to be added to the loss, e.g. of a confidence head.

        Args:
            alpha_N: sum_v min(p, q) at each slot, detached.
        """
        return None
