"""What a decode is asked for and what it leaves: settings, rounds, answers, seconds, measurements.

Dimension letters: B rows, W some of them, K proposed tokens, S = K + 1 positions verified,
V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from data.compiled import Compiling
from drafters.base import DraftLaws, Proposal, Sampling
from eval.lossless import pit_columns
from eval.verify import Verdict, verify_block, verify_token


@dataclass(frozen=True, kw_only=True)
class VerifyInputs:
    """All that a verifier could read in one round, the right ones and the wrong ones alike.

    p_BSV, tokens_BK, num_proposed_B, q_BKV, accept_uniforms_BK, final_uniforms_B: the arguments of
    eval.verify.verify_token. draft_uniforms_BK: what drew the proposal. laws: the drafter's, with
    Sampling.keep_laws. Only verifiers that are broken on purpose have a use for the last two.
    """

    p_BSV: Tensor
    tokens_BK: Tensor
    num_proposed_B: Tensor
    q_BKV: Tensor | None
    accept_uniforms_BK: Tensor
    final_uniforms_B: Tensor
    draft_uniforms_BK: Tensor
    laws: DraftLaws | None

    @property
    def judged_B(self) -> Tensor:
        """bool: rows with a proposal."""
        return self.num_proposed_B > 0

    def judged_by(self, rule: Callable[..., Verdict]) -> Verdict:
        """What eval.verify.verify_token or verify_block says."""
        return rule(
            self.p_BSV,
            self.tokens_BK,
            self.num_proposed_B,
            self.q_BKV,
            self.accept_uniforms_BK,
            self.final_uniforms_B,
        )

    def select(self, rows_W: Tensor) -> "VerifyInputs":
        """Some rows of the round."""
        return VerifyInputs(
            p_BSV=self.p_BSV[rows_W],
            tokens_BK=self.tokens_BK[rows_W],
            num_proposed_B=self.num_proposed_B[rows_W],
            q_BKV=None if self.q_BKV is None else self.q_BKV[rows_W],
            accept_uniforms_BK=self.accept_uniforms_BK[rows_W],
            final_uniforms_B=self.final_uniforms_B[rows_W],
            draft_uniforms_BK=self.draft_uniforms_BK[rows_W],
            laws=None if self.laws is None else DraftLaws(*(law[rows_W] for law in self.laws)),
        )

    def fresh(self, uniforms: Callable[[Tensor], Tensor]) -> "VerifyInputs":
        """The same round with other numbers to accept and draw with."""
        return replace(
            self,
            accept_uniforms_BK=uniforms(self.accept_uniforms_BK),
            final_uniforms_B=uniforms(self.final_uniforms_B),
        )

    def both_laws(self) -> tuple[Tensor, Tensor]:
        """p at each position, and q as eval.lossless.pit_columns wants it."""
        q_BSV = drafted_from(self.p_BSV, self.tokens_BK, self.num_proposed_B, self.q_BKV)
        return self.p_BSV, q_BSV

    def emitted(self, verdict: Verdict) -> tuple[Tensor, Tensor, Tensor]:
        """Emitted tokens [B, S], the position that each belongs to, how many count."""
        num_B = verdict.num_accepted_B
        tokens_BS = torch.nn.functional.pad(self.tokens_BK, (0, 1))
        tokens_BS = tokens_BS.scatter(1, num_B[:, None], verdict.next_token_B[:, None])
        places_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        return tokens_BS, places_S.expand(tokens_BS.shape), num_B + 1


Verifier = Callable[[VerifyInputs], Verdict]

_RULES = {"token": verify_token, "block": verify_block}


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """How to decode.

    num_draft: tokens proposed a round (0 with no drafter). stop: strings that end an answer.
    verification: the rule, eval.verify.verify_token or verify_block. verifier: takes its place.
    fixed_shapes: every round has as many positions, and batches shrink by halves, for passes that
    are compiled for each shape.
    """

    max_new_tokens: int
    num_draft: int = 0
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    seed: int = 0
    verification: Literal["token", "block"] = "token"
    verifier: Verifier | None = None
    fixed_shapes: bool = False

    def verify(self, inputs: VerifyInputs) -> Verdict:
        """Judge one round."""
        if self.verifier is not None:
            return self.verifier(inputs)
        return inputs.judged_by(_RULES[self.verification])


@dataclass
class Round:
    """One round of one row.

    proposed: tokens drafted. accepted: of these, kept (not counting what lies behind a stop).
    emitted: tokens added to the answer, correction or bonus included. accepted_before_stop: those
    that the rule accepted, also behind a stop. p, q: of the drafted tokens, in the final
    distributions (q is 1 where a token was chosen outright). next_p: of the last emitted token,
    which is the correction or bonus unless the answer ends inside the draft.
    """

    proposed: int
    accepted: int
    emitted: int
    drafted_ids: list[int]
    accepted_before_stop: int = 0
    p: list[float] = field(default_factory=list, compare=False)
    q: list[float] = field(default_factory=list, compare=False)
    next_p: float | None = field(default=None, compare=False)


@dataclass
class Decoded:
    """The answer to one prompt and how it came about.

    ids: generated tokens, the stop token included. The first comes from the prefill and belongs to
    no round. finish: "stop" or "length". alpha_sum / alpha_count: sum over v of min(p, q) at every
    verified position. pit: of each emitted token eval.lossless.pit_columns (sampled decoding only).
    """

    ids: list[int] = field(default_factory=list)
    finish: str = ""
    rounds: list[Round] = field(default_factory=list)
    alpha_sum: float = 0.0
    alpha_count: int = 0
    pit: list[list[float]] = field(default_factory=list)


@dataclass
class Seconds:
    """Wall time of a decode: prefill apart; the four other parts make up the rounds.

    draft: all passes of the drafter, those over what was committed included. verify: the target's
    pass and logits. sampling: final distributions, accepting, drawing. bookkeeping: the rest.
    What is only measured, not needed to decode (alpha, PIT), and the caller's own `on_tokens` are
    on no clock.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    sampling: float = 0.0
    bookkeeping: float = 0.0

    @property
    def decode(self) -> float:
        return self.draft + self.verify + self.sampling + self.bookkeeping


class Clock:
    """Seconds since the lap before, without those of compiling; waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.last = 0.0
        self.lap()  # what was queued before is not ours

    def lap(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter() - Compiling.seconds
        took, self.last = now - self.last, now
        return took


def record_alpha(
    rows: list[Decoded], proposal: Proposal, p_BSV: Tensor, committed: list[int]
) -> None:
    """Add up sum_v min(p, q) at the positions that were judged, as far as the answer goes."""
    K = proposal.tokens_BK.shape[1]
    if K == 0:
        return
    if proposal.probs_BKV is None:
        alpha_BK = p_BSV[:, :K].gather(-1, proposal.tokens_BK[..., None])[..., 0]
    else:
        alpha_BK = torch.minimum(p_BSV[:, :K], proposal.probs_BKV).sum(-1)
    for row, alphas, num in zip(rows, alpha_BK.tolist(), committed, strict=True):
        if num:
            judged = alphas[: min(num, row.rounds[-1].proposed)]
            row.alpha_sum += sum(judged)
            row.alpha_count += len(judged)


def record_probs(
    rows: list[Decoded],
    proposal: Proposal,
    p_BSV: Tensor,
    emitted_BS: Tensor,
    committed: list[int],
) -> None:
    """Note p and q of the drafted tokens and p of the last emitted one, for the round viewer."""
    K = proposal.tokens_BK.shape[1]
    place_BK1 = proposal.tokens_BK[..., None]
    p_BK = p_BSV[:, :K].gather(-1, place_BK1)[..., 0]
    if proposal.probs_BKV is None:
        q_BK = torch.ones_like(p_BK)
    else:
        q_BK = proposal.probs_BKV.gather(-1, place_BK1)[..., 0]
    next_BS = p_BSV.gather(-1, emitted_BS[..., None])[..., 0]
    lists = zip(rows, p_BK.tolist(), q_BK.tolist(), next_BS.tolist(), committed, strict=True)
    for row, p, q, emitted, num in lists:
        if num:
            last = row.rounds[-1]
            last.p, last.q = p[: last.proposed], q[: last.proposed]
            last.next_p = emitted[num - 1]


def drafted_from(
    p_BSV: Tensor, tokens_BK: Tensor, num_proposed_B: Tensor, q_BKV: Tensor | None
) -> Tensor:
    """q_BSV of eval.lossless.pit_columns: 1 at tokens chosen outright, 0 where none was drafted."""
    q_BSV = torch.zeros_like(p_BSV)
    if q_BKV is None:
        q_BSV[:, :-1].scatter_(-1, tokens_BK[..., None], 1.0)
    else:
        q_BSV[:, :-1] = q_BKV
    places_S = torch.arange(q_BSV.shape[1], device=q_BSV.device)
    return q_BSV.masked_fill_((places_S >= num_proposed_B[:, None])[..., None], 0.0)


def record_pit(
    rows: list[Decoded],
    proposal: Proposal,
    emitted_BS: Tensor,
    p_BSV: Tensor,
    uniforms_BS: Tensor,
    committed: list[int],
) -> None:
    """Transform the tokens that this round committed.

    Args:
        uniforms_BS: at least as wide as p; used for nothing else.
    """
    S = p_BSV.shape[1]
    committed_B = torch.tensor(committed, device=p_BSV.device)
    kept_BS = torch.arange(S, device=p_BSV.device) < committed_B[:, None]
    q_BKV, num_B = proposal.probs_BKV, proposal.num_proposed_B
    q_NV = drafted_from(p_BSV, proposal.tokens_BK, num_B, q_BKV)[kept_BS]
    columns_N3 = pit_columns(p_BSV[kept_BS], emitted_BS[kept_BS], uniforms_BS[:, :S][kept_BS], q_NV)
    for row, values in zip(rows, columns_N3.split(committed), strict=True):
        row.pit += values.tolist()
