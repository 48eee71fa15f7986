"""Speculative decoding: draft, verify, commit; the baseline is the same loop without a drafter.

Dimension letters: B rows, K proposed tokens, S = K + 1 positions verified, N committed positions of
a pass, V vocabulary.

Invariant after every round: the target's cache holds all committed tokens of a row but the last
one, which is the first input of the next round.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from data.sampling import mark_seen, sample, seen_along, seen_in
from data.target import Target
from drafters.base import DecodingDrafter, DraftLaws, Proposal
from eval.lossless import pit_columns
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
    run = Run(target, drafter, prompts, settings, indices, on_tokens)
    return run.finish(prompts)


class Run:
    """One decode: the rows, their caches and random numbers, and the clock.

    answers: all, in the order of the prompts. rows: those still computed, in the order of the
    caches; numbers: their places among the answers. Rows that are finished leave, so that a batch
    does not cost what it did until its last row is done.
    """

    def __init__(
        self,
        target: Target,
        drafter: DecodingDrafter | None,
        prompts: list[list[int]],
        settings: DecodeSettings,
        indices: Sequence[int] | None,
        on_tokens: OnTokens | None,
    ) -> None:
        self.target, self.drafter, self.settings = target, drafter, settings
        self.sampling, self.device, self.on_tokens = settings.sampling, target.device, on_tokens
        self.answers, self.seconds = [Decoded() for _ in prompts], Seconds()
        self.rows, self.numbers = list(self.answers), list(range(len(prompts)))
        self.generators = [
            torch.Generator().manual_seed(settings.seed * 1_000_003 + i)
            for i in (range(len(prompts)) if indices is None else indices)
        ]
        self.clock = Clock(self.device)
        longest = max(len(p) for p in prompts)
        max_length = longest + settings.max_new_tokens + settings.num_draft + 1
        self.cache = target.new_cache(len(prompts), max_length)
        self.state = drafter.start(prompts, max_length) if drafter else None
        self.aux_layers = drafter.aux_layers if drafter else ()
        self.last_B = self.rows_B.new_zeros(len(prompts))
        self.seen_BV: Tensor | None = None  # only kept for a repetition penalty

    @property
    def rows_B(self) -> Tensor:
        """Indices of the rows still computed."""
        return self.cache.rows_B

    def finish(self, prompts: list[list[int]]) -> tuple[list[Decoded], Seconds]:
        """Round after round until every answer has ended."""
        self.prefill(prompts)
        while not all(row.finish for row in self.rows):
            self.drop_finished()
            self.round()
        return self.answers, self.seconds

    def drop_finished(self) -> None:
        """Leave finished rows behind; the last rows of the batch take the places of others."""
        live = [b for b, row in enumerate(self.rows) if not row.finish]
        num = len(live)
        if self.settings.fixed_shapes:
            num = min(len(self.rows), 1 << (num - 1).bit_length())
        if num == len(self.rows):
            return
        last = iter(b for b in live if b >= num)
        kept = [next(last, b) if self.rows[b].finish else b for b in range(num)]
        self.cache.keep_rows(kept)
        if self.drafter:
            self.state = self.drafter.keep(self.state, kept)
        self.rows = [self.rows[b] for b in kept]
        self.numbers = [self.numbers[b] for b in kept]
        self.generators = [self.generators[b] for b in kept]
        self.last_B = self.last_B[kept]
        self.seen_BV = None if self.seen_BV is None else self.seen_BV[kept]

    def uniforms(self, num: int) -> Tensor:
        """Fresh random numbers [B, num], each row's from its own generator."""
        return torch.stack([torch.rand(num, generator=g) for g in self.generators]).to(self.device)

    def prefill(self, prompts: list[list[int]]) -> None:
        """Run over the prompts; the first token of each answer."""
        lengths_B = torch.tensor([len(p) for p in prompts], device=self.device)
        prompt_BN = pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
        prompt_BN = prompt_BN.to(self.device)
        states = self.target.forward(prompt_BN, self.cache, self.aux_layers)
        self.cache.advance(lengths_B)
        logits_BV = self.target.logits(states.hidden_BSH[self.rows_B, lengths_B - 1])
        if self.sampling.needs_history:
            self.seen_BV = seen_in(prompts, logits_BV.shape[-1], self.device)
        p_BV = self.sampling.law(logits_BV, self.seen_BV, where="target logits after the prompt")
        draws_B2 = self.uniforms(2)
        self.last_B = sample(p_BV, draws_B2[:, 0])
        for row, token in zip(self.rows, self.last_B.tolist(), strict=True):
            row.ids += cut(row, [token], self.settings, self.target)
        self.mark(self.last_B[:, None], torch.ones_like(self.last_B))
        if self.drafter:
            next_BN = prompt_BN.roll(-1, 1)
            next_BN[self.rows_B, lengths_B - 1] = self.last_B
            self.drafter.observe(self.state, next_BN, states.aux_BSF, lengths_B)
        self.seconds.prefill = self.clock.lap()
        if self.sampling.temperature > 0:
            values = pit_columns(p_BV, self.last_B, draws_B2[:, 1]).tolist()
            for row, value in zip(self.rows, values, strict=True):
                row.pit.append(value)
        self.tell([1] * len(prompts))
        self.clock.lap()

    def round(self) -> None:
        """Draft, verify, commit; one pass of the target."""
        most, clock, seconds = self.settings.num_draft, self.clock, self.seconds
        draws = self.uniforms(3 * most + 2)  # for drafting, accepting, the next token and the PIT
        seconds.bookkeeping += clock.lap()
        proposal = self.draft(draws[:, :most])
        K = proposal.tokens_BK.shape[1]
        seconds.draft += clock.lap()

        # Verify: one pass of the target over the last committed token and the proposal.
        ids_BS = torch.cat([self.last_B[:, None], proposal.tokens_BK], 1)
        states = self.target.forward(ids_BS, self.cache, self.aux_layers)
        logits_BSV = self.target.logits(states.hidden_BSH)
        seconds.verify += clock.lap()
        p_BSV = self.law(logits_BSV, proposal)
        verdict = self.settings.verify(
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
        self.last_B = verdict.next_token_B
        emitted_BS = torch.cat([proposal.tokens_BK, self.last_B[:, None]], 1)
        emitted_BS[self.rows_B, verdict.num_accepted_B] = self.last_B
        committed = self.commit(emitted_BS, proposal, verdict.num_accepted_B)
        committed_B = torch.tensor(committed, device=self.device)
        self.cache.advance(committed_B)
        self.mark(emitted_BS, committed_B)
        seconds.bookkeeping += clock.lap()
        if self.drafter:
            self.drafter.observe(self.state, emitted_BS, states.aux_BSF, committed_B)
        seconds.draft += clock.lap()

        record_alpha(self.rows, proposal, p_BSV, committed)
        record_probs(self.rows, proposal, p_BSV, emitted_BS, committed)
        if self.sampling.temperature > 0:
            uniforms_BS = draws[:, 2 * most + 1 :]
            record_pit(self.rows, proposal, emitted_BS, p_BSV, uniforms_BS, committed)
        self.tell(committed)
        clock.lap()

    def draft(self, uniforms_BK: Tensor) -> Proposal:
        """Never more than an answer still has room for, the target's own token included."""
        cap = self.settings.max_new_tokens - 1
        room = [0 if row.finish else cap - len(row.ids) for row in self.rows]
        most = self.settings.num_draft
        num_draft = most if self.settings.fixed_shapes else min(most, max(room))
        if not self.drafter or not num_draft:
            return Proposal(self.last_B[:, None][:, :0], torch.zeros_like(self.last_B))
        proposal = self.drafter.propose(
            self.state, num_draft, self.sampling, uniforms_BK[:, :num_draft], self.seen_BV
        )
        room_B = torch.tensor(room, device=self.device)
        return _narrow(proposal, room_B, most if self.settings.fixed_shapes else 0)

    def law(self, logits_BSV: Tensor, proposal: Proposal) -> Tensor:
        """The target's final distributions at every position of the proposal."""
        seen_NV = None
        if self.seen_BV is not None:
            seen_NV = seen_along(self.seen_BV, proposal.tokens_BK).flatten(0, 1)
        where = f"target logits, round {max(len(row.rounds) for row in self.rows) + 1}"
        p_NV = self.sampling.law(logits_BSV.flatten(0, 1), seen_NV, where)
        return p_NV.view(logits_BSV.shape)

    def commit(self, emitted_BS: Tensor, proposal: Proposal, accepted_B: Tensor) -> list[int]:
        """Add one round to every row that is not finished; how many tokens each row gains."""
        lists = zip(
            self.rows,
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
            kept = cut(row, emitted[: accepted + 1], self.settings, self.target)
            row.ids += kept
            num, inside = len(kept), min(accepted, len(kept))
            row.rounds.append(Round(proposed, inside, num, drafted[:proposed], accepted))
            committed.append(num)
        return committed

    def mark(self, ids_BN: Tensor, num_B: Tensor) -> None:
        """The first `num` tokens of each row have been seen now."""
        if self.seen_BV is not None:
            mark_seen(self.seen_BV, ids_BN, num_B)

    def tell(self, committed: list[int]) -> None:
        """Hand over what each row has just gained."""
        if self.on_tokens is None:
            return
        for number, row, num in zip(self.numbers, self.rows, committed, strict=True):
            if num:
                self.on_tokens(number, row.ids[-num:])


def _narrow(proposal: Proposal, room_B: Tensor, width: int) -> Proposal:
    """The proposal on the target's device, within the room of each row, as wide as the widest.

    Args:
        width: at least so wide; no row proposes what is added.
    """
    num_B = torch.minimum(proposal.num_proposed_B.to(room_B.device), room_B)
    K, probs, laws = max(int(num_B.max()), width), proposal.probs_BKV, proposal.laws
    more = max(0, K - proposal.tokens_BK.shape[1])

    def cut(law_BKV: Tensor) -> Tensor:
        return pad(law_BKV, (0, 0, 0, more)) if more else law_BKV[:, :K]

    return Proposal(
        pad(proposal.tokens_BK.to(room_B.device)[:, :K], (0, more)),
        num_B,
        None if probs is None else cut(probs),
        None if laws is None else DraftLaws(*map(cut, laws)),
    )
