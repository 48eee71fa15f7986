"""Speculative decoding: draft, verify, commit; the baseline is the same loop without a drafter.

Dimension letters: B rows, K proposed tokens, S = K + 1 positions verified, N committed positions of
a pass, V vocabulary.

Invariant after every round: the target's cache holds all committed tokens of a row but the last
one, which is the first input of the next round.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.sampling import mark_seen, sample, seen_along, seen_in
from data.target import Target
from drafters.base import DecodingDrafter, DraftLaws, Proposal
from eval.lossless import pit_values
from eval.rounds import (
    Clock,
    Decoded,
    DecodeSettings,
    Round,
    Seconds,
    VerifyInputs,
    record_alpha,
    record_pit,
    record_probs,
)
from eval.stopping import cut

__all__ = ["DecodeSettings", "Decoded", "Round", "Seconds", "VerifyInputs", "decode"]

OnTokens = Callable[[int, list[int]], None]
"""(row, ids): what has just been added to the answer of a row; never anything behind its end."""


@torch.inference_mode()
def decode(
    target: Target,
    drafter: DecodingDrafter | None,
    prompts: list[list[int]],
    settings: DecodeSettings,
    indices: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
) -> tuple[list[Decoded], Seconds]:
    """Answer a batch of prompts (token ids); rows keep their own lengths and random numbers.

    Args:
        indices: a number for each prompt, which with settings.seed seeds its random numbers, so
            that they do not depend on the batch it is in. None = its place in the batch.
        on_tokens: told after the prefill and after every round what each row has gained, so that
            the answers can be shown while they are written.

    With temperature 0 in fp32 the tokens equal those of `drafter=None`; with a temperature their
    law does. Both hold under a repetition penalty, too.
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

    clock = Clock(device)
    cache = target.new_cache(B, max_length)
    state = drafter.start(prompts, max_length) if drafter else None
    aux_layers = drafter.aux_layers if drafter else ()
    prompt_BN = pad_sequence([torch.tensor(p) for p in prompts], batch_first=True).to(device)
    states = target.forward(prompt_BN, cache, aux_layers)
    cache.advance(lengths_B)
    logits_BV = target.logits(states.hidden_BSH[rows_B, lengths_B - 1])
    seen_BV = seen_in(prompts, logits_BV.shape[-1], device) if sampling.needs_history else None
    p_BV = sampling.law(logits_BV, seen_BV, where="target logits after the prompt")
    draws_B2 = uniforms(2)
    last_B = sample(p_BV, draws_B2[:, 0])
    if sampling.temperature > 0:
        for row, value in zip(rows, pit_values(p_BV, last_B, draws_B2[:, 1]).tolist(), strict=True):
            row.pit.append(value)
    for row, token in zip(rows, last_B.tolist(), strict=True):
        row.ids += cut(row, [token], settings, target)
    if seen_BV is not None:
        mark_seen(seen_BV, last_B[:, None], torch.ones_like(last_B))
    if drafter:
        next_BN = prompt_BN.roll(-1, 1)
        next_BN[rows_B, lengths_B - 1] = last_B
        drafter.observe(state, next_BN, states.aux_BSF, lengths_B)
    seconds.prefill = clock.lap()
    if on_tokens:
        _tell(on_tokens, rows, [1] * B)
        clock.lap()

    while not all(row.finish for row in rows):
        # Draft: never more than the answer still has room for, the target's own token included.
        room = [0 if r.finish else settings.max_new_tokens - len(r.ids) - 1 for r in rows]
        num_draft = min(settings.num_draft, max(room)) if drafter else 0
        draws = uniforms(3 * most + 2)  # for drafting, accepting, the next token and the PIT
        seconds.bookkeeping += clock.lap()
        if drafter and num_draft:
            proposal = _narrow(
                drafter.propose(state, num_draft, sampling, draws[:, :num_draft], seen_BV),
                torch.tensor(room, device=device),
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
        seen_BSV = None if seen_BV is None else seen_along(seen_BV, proposal.tokens_BK)
        p_BSV = sampling.law(
            logits_BSV.flatten(0, 1),
            None if seen_BSV is None else seen_BSV.flatten(0, 1),
            where=f"target logits, round {max(len(r.rounds) for r in rows) + 1}",
        ).view(B, K + 1, -1)
        verdict = settings.verify(
            VerifyInputs(
                p_BSV=p_BSV,
                tokens_BK=proposal.tokens_BK,
                num_proposed_B=proposal.num_proposed_B,
                q_BKV=proposal.probs_BKV,
                accept_uniforms_BK=draws[:, most : most + K],
                final_uniforms_B=draws[:, 2 * most],
                draft_uniforms_BK=draws[:, :K],
                laws=proposal.laws,
            )
        )
        seconds.sampling += clock.lap()

        # Commit what belongs to the answer: nothing behind a stop is counted or left in a cache.
        last_B = verdict.next_token_B
        emitted_BS = torch.cat([proposal.tokens_BK, last_B[:, None]], 1)
        emitted_BS[rows_B, verdict.num_accepted_B] = last_B
        committed = _commit(rows, emitted_BS, proposal, verdict.num_accepted_B, settings, target)
        committed_B = torch.tensor(committed, device=device)
        cache.advance(committed_B)
        if seen_BV is not None:
            mark_seen(seen_BV, emitted_BS, committed_B)
        seconds.bookkeeping += clock.lap()
        if drafter:
            drafter.observe(state, emitted_BS, states.aux_BSF, committed_B)
        seconds.draft += clock.lap()

        record_alpha(rows, proposal, p_BSV, committed)
        record_probs(rows, proposal, p_BSV, emitted_BS, committed)
        if sampling.temperature > 0:
            uniforms_BS = draws[:, 2 * most + 1 :]
            by_draft = settings.verification == "token"
            record_pit(rows, proposal, emitted_BS, p_BSV, uniforms_BS, committed, by_draft)
        if on_tokens:
            _tell(on_tokens, rows, committed)
        clock.lap()
    return rows, seconds


def _narrow(proposal: Proposal, room_B: Tensor) -> Proposal:
    """The proposal on the target's device, within the room of each row, as wide as the widest."""
    num_B = torch.minimum(proposal.num_proposed_B.to(room_B.device), room_B)
    K, probs, laws = int(num_B.max()), proposal.probs_BKV, proposal.laws
    return Proposal(
        proposal.tokens_BK.to(room_B.device)[:, :K],
        num_B,
        None if probs is None else probs[:, :K],
        None if laws is None else DraftLaws(*(law_BKV[:, :K] for law_BKV in laws)),
    )


def _commit(
    rows: list[Decoded],
    emitted_BS: Tensor,
    proposal: Proposal,
    accepted_B: Tensor,
    settings: DecodeSettings,
    target: Target,
) -> list[int]:
    """Add one round to every row that is not finished; how many tokens each row gains."""
    lists = zip(
        rows,
        emitted_BS.tolist(),
        accepted_B.tolist(),
        proposal.num_proposed_B.tolist(),
        proposal.tokens_BK.tolist(),
        strict=True,
    )
    committed = []
    for row, emitted, accepted, proposed, drafted in lists:
        if row.finish:
            committed.append(0)
            continue
        kept = cut(row, emitted[: accepted + 1], settings, target)
        row.ids += kept
        row.rounds.append(Round(proposed, min(accepted, len(kept)), len(kept), drafted[:proposed]))
        committed.append(len(kept))
    return committed


def _tell(on_tokens: OnTokens, rows: list[Decoded], committed: list[int]) -> None:
    """Hand over what each row has just gained."""
    for b, (row, num) in enumerate(zip(rows, committed, strict=True)):
        if num:
            on_tokens(b, row.ids[-num:])
