"""Speculative decoding: draft, verify, commit; the baseline is the same loop without a drafter.

Dimension letters: B rows, K proposed tokens, S = K + 1 positions verified, N committed positions of
a pass, V vocabulary.

Invariant after every round: the target's cache holds all committed tokens of a row but the last
one, which is the first input of the next round.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.sampling import final_probs, sample
from data.target import Target
from drafters.base import DecodingDrafter, Proposal, Sampling
from eval.lossless import pit_values
from eval.verify import verify_token


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """num_draft: tokens proposed a round (0 with no drafter); stop: strings that end an answer."""

    max_new_tokens: int
    num_draft: int = 0
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass
class Round:
    """One round of one row.

    proposed: tokens drafted. accepted: of these, kept (not counting what lies behind a stop).
    emitted: tokens added to the answer, correction or bonus included.
    """

    proposed: int
    accepted: int
    emitted: int
    drafted_ids: list[int]


@dataclass
class Decoded:
    """The answer to one prompt and how it came about.

    ids: generated tokens, the stop token included. The first comes from the prefill and belongs to
    no round. finish: "stop" or "length". alpha_sum / alpha_count: sum over v of min(p, q) at every
    verified position. pit: transforms of the emitted tokens (sampled decoding only).
    """

    ids: list[int] = field(default_factory=list)
    finish: str = ""
    rounds: list[Round] = field(default_factory=list)
    alpha_sum: float = 0.0
    alpha_count: int = 0
    pit: list[float] = field(default_factory=list)


@dataclass
class Seconds:
    """Wall time of a decode: prefill apart; draft + verify + other make up the rounds.

    What is only measured, not needed to decode (alpha, PIT), is on no clock.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    @property
    def decode(self) -> float:
        return self.draft + self.verify + self.other


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.last = 0.0
        self.lap()  # what was queued before is not ours

    def lap(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        took, self.last = now - self.last, now
        return took


def _cut(row: Decoded, new: list[int], settings: DecodeSettings, target: Target) -> list[int]:
    """The part of `new` that belongs to the answer; sets `finish`. A stop goes before the cap."""
    for i, token in enumerate(new):
        if len(row.ids) + i + 1 > settings.max_new_tokens:
            row.finish = "length"
            return new[:i]
        if token in target.eos_ids:
            row.finish = "stop"
            return new[: i + 1]
        if settings.stop:
            text = target.tokenizer.decode(row.ids + new[: i + 1])
            if any(s in text for s in settings.stop):
                row.finish = "stop"
                return new[: i + 1]
    if len(row.ids) + len(new) == settings.max_new_tokens:
        row.finish = "length"
    return new


@torch.inference_mode()
def decode(
    target: Target,
    drafter: DecodingDrafter | None,
    prompts: list[list[int]],
    settings: DecodeSettings,
    indices: Sequence[int] | None = None,
) -> tuple[list[Decoded], Seconds]:
    """Answer a batch of prompts (token ids); rows keep their own lengths and random numbers.

    Args:
        indices: a number for each prompt, which with settings.seed seeds its random numbers, so
            that they do not depend on the batch it is in. None = its place in the batch.

    With temperature 0 in fp32 the tokens equal those of `drafter=None`; with a temperature their
    law does.
    """
    B, device, sampling, most = len(prompts), target.device, settings.sampling, settings.num_draft
    rows, seconds = [Decoded() for _ in prompts], Seconds()
    generators = [
        torch.Generator().manual_seed(settings.seed * 1_000_003 + i)
        for i in (range(B) if indices is None else indices)
    ]
    lengths_B = torch.tensor([len(p) for p in prompts], device=device)
    max_length = int(lengths_B.max()) + settings.max_new_tokens + settings.num_draft + 1
    rows_B = torch.arange(B, device=device)

    def uniforms(num: int) -> Tensor:
        return torch.stack([torch.rand(num, generator=g) for g in generators]).to(device)

    clock = _Clock(device)
    cache = target.new_cache(B, max_length)
    state = drafter.start(prompts, max_length) if drafter else None
    aux_layers = drafter.aux_layers if drafter else ()
    prompt_BN = pad_sequence([torch.tensor(p) for p in prompts], batch_first=True).to(device)
    states = target.forward(prompt_BN, cache, aux_layers)
    cache.advance(lengths_B)
    p_BV = final_probs(
        target.logits(states.hidden_BSH[rows_B, lengths_B - 1]),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        where="target logits after the prompt",
    )
    draws_B2 = uniforms(2)
    last_B = sample(p_BV, draws_B2[:, 0])
    if sampling.temperature > 0:
        for row, value in zip(rows, pit_values(p_BV, last_B, draws_B2[:, 1]).tolist(), strict=True):
            row.pit.append(value)
    for row, token in zip(rows, last_B.tolist(), strict=True):
        row.ids += _cut(row, [token], settings, target)
    if drafter:
        next_BN = prompt_BN.roll(-1, 1)
        next_BN[rows_B, lengths_B - 1] = last_B
        drafter.observe(state, next_BN, states.aux_BSF, lengths_B)
    seconds.prefill = clock.lap()

    while not all(row.finish for row in rows):
        # Draft: never more than the answer still has room for, the target's own token included.
        room = [0 if r.finish else settings.max_new_tokens - len(r.ids) - 1 for r in rows]
        num_draft = min(settings.num_draft, max(room)) if drafter else 0
        draws = uniforms(3 * most + 2)  # for drafting, accepting, the next token and the PIT
        if drafter and num_draft:
            proposal = drafter.propose(state, num_draft, sampling, draws[:, :num_draft])
            room_B = torch.tensor(room, device=device)
            num_B = torch.minimum(proposal.num_proposed_B.to(device), room_B)
            tokens_BK = proposal.tokens_BK.to(device)
            width = int(num_B.max())
            proposal = Proposal(
                tokens_BK[:, :width],
                num_B,
                None if proposal.probs_BKV is None else proposal.probs_BKV[:, :width],
            )
        else:
            none_B = torch.zeros(B, dtype=torch.int64, device=device)
            proposal = Proposal(none_B[:, None][:, :0], none_B)
        K = proposal.tokens_BK.shape[1]
        seconds.draft += clock.lap()

        # Verify: one pass of the target over the last committed token and the proposal.
        states = target.forward(
            torch.cat([last_B[:, None], proposal.tokens_BK], 1), cache, aux_layers
        )
        logits_BSV = target.logits(states.hidden_BSH)
        seconds.verify += clock.lap()
        p_BSV = final_probs(
            logits_BSV.flatten(0, 1),
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            where=f"target logits, round {max(len(r.rounds) for r in rows) + 1}",
        ).view(B, K + 1, -1)
        verdict = verify_token(
            p_BSV,
            proposal.tokens_BK,
            proposal.num_proposed_B,
            proposal.probs_BKV,
            draws[:, most : most + K],
            draws[:, 2 * most],
        )

        # Commit what belongs to the answer: nothing behind a stop is counted or left in a cache.
        last_B = verdict.next_token_B
        emitted_BS = torch.cat([proposal.tokens_BK, last_B[:, None]], 1)
        emitted_BS[rows_B, verdict.num_accepted_B] = last_B
        active = [not row.finish for row in rows]
        _commit(rows, emitted_BS, proposal, verdict.num_accepted_B, settings, target)
        committed = [
            row.rounds[-1].emitted if on else 0 for row, on in zip(rows, active, strict=True)
        ]
        committed_B = torch.tensor(committed, device=device)
        cache.advance(committed_B)
        if drafter:
            drafter.observe(state, emitted_BS, states.aux_BSF, committed_B)
        seconds.other += clock.lap()

        _record_alpha(rows, proposal, p_BSV, committed)
        if sampling.temperature > 0:
            _record_pit(rows, emitted_BS, p_BSV, draws[:, 2 * most + 1 :], committed)
        clock.lap()
    return rows, seconds


def _commit(
    rows: list[Decoded],
    emitted_BS: Tensor,
    proposal: Proposal,
    accepted_B: Tensor,
    settings: DecodeSettings,
    target: Target,
) -> None:
    """Add one round to every row that is not finished."""
    lists = zip(
        rows,
        emitted_BS.tolist(),
        accepted_B.tolist(),
        proposal.num_proposed_B.tolist(),
        proposal.tokens_BK.tolist(),
        strict=True,
    )
    for row, emitted, accepted, proposed, drafted in lists:
        if row.finish:
            continue
        kept = _cut(row, emitted[: accepted + 1], settings, target)
        row.ids += kept
        row.rounds.append(Round(proposed, min(accepted, len(kept)), len(kept), drafted[:proposed]))


def _record_alpha(
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


def _record_pit(
    rows: list[Decoded],
    emitted_BS: Tensor,
    p_BSV: Tensor,
    uniforms_BS: Tensor,
    committed: list[int],
) -> None:
    """Transform the tokens that this round committed."""
    for b, (row, num) in enumerate(zip(rows, committed, strict=True)):
        if num:
            values = pit_values(p_BSV[b, :num], emitted_BS[b, :num], uniforms_BS[b, :num])
            row.pit += values.tolist()
