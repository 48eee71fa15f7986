"""How well a drafter guesses the next token along given answers: acceptance without decoding.

Teacher-forced: at every token of an answer the drafter has read the true text and the target's
states up to there and guesses one token. Unlike alpha of a decode this neither depends on the
number of draft tokens nor on which positions the rounds happened to visit, so it compares drafters.

Dimension letters: B rows, S positions, N one position of every row, V vocabulary, F captured width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.sampling import mark_seen, seen_in
from data.target import Target
from drafters.base import DecodingDrafter, Sampling

BATCH = 8  # rows side by side; no result depends on it


class Forced(NamedTuple):
    """Sums over positions: of sum_v min(p, q), of equal likeliest tokens, and how many.

    num_positions: where the drafter proposed something; num_silent: where it did not (lookup).
    """

    alpha_sum: float = 0.0
    num_top1: int = 0
    num_positions: int = 0
    num_silent: int = 0

    @property
    def alpha(self) -> float | None:
        """Mean acceptance; a position without a proposal accepts nothing."""
        total = self.num_positions + self.num_silent
        return self.alpha_sum / total if total else None

    @property
    def top1(self) -> float | None:
        """Share of positions at which the likeliest tokens of target and drafter agree."""
        total = self.num_positions + self.num_silent
        return self.num_top1 / total if total else None


@torch.inference_mode()
def teacher_forced(
    target: Target,
    drafter: DecodingDrafter,
    answers: Sequence[tuple[list[int], list[int]]],
    sampling: Sampling,
    seed: int = 0,
) -> Forced:
    """One pass of drafter and target over answers.

    The first token of an answer comes from the prefill and is not drafted, so it does not count.
    The drafter knows no other answers: what earlier decodes left behind is dropped first.

    Args:
        answers: (prompt ids, answer ids), e.g. those of the target alone.
        sampling: p and q are final distributions under it; q is a point mass where the drafter
            chooses outright.
        seed: of the draws of a sampled drafter, which q does not depend on.
    """
    total = Forced()
    usable = [(prompt, answer) for prompt, answer in answers if len(answer) > 1]
    # A batch runs as long as its longest answer, so similar ones share one.
    usable.sort(key=lambda pair: (len(pair[1]), len(pair[0])))
    for start in range(0, len(usable), BATCH):
        found = _forced_batch(target, drafter, usable[start : start + BATCH], sampling, seed)
        total = Forced(
            total.alpha_sum + found.alpha_sum,
            total.num_top1 + found.num_top1,
            total.num_positions + found.num_positions,
            total.num_silent + found.num_silent,
        )
    return total


def _forced_batch(
    target: Target,
    drafter: DecodingDrafter,
    answers: Sequence[tuple[list[int], list[int]]],
    sampling: Sampling,
    seed: int,
) -> Forced:
    B, device = len(answers), target.device
    prompts = [prompt for prompt, _ in answers]
    texts = [prompt + answer for prompt, answer in answers]
    ids_BS = pad_sequence([torch.tensor(text) for text in texts], batch_first=True).to(device)
    rows_B = torch.arange(B, device=device)
    starts_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    lengths_B = torch.tensor([len(text) for text in texts], device=device)
    states = target.forward(ids_BS, target.new_cache(B, ids_BS.shape[1]), drafter.aux_layers)
    next_BS = ids_BS.roll(-1, 1)

    drafter.forget()  # the very answers that are scored may have been decoded before
    state = drafter.start(prompts, ids_BS.shape[1] + 2)
    width = int(starts_B.max())
    drafter.observe(state, next_BS[:, :width], states.aux_BSF[:, :width], starts_B)
    generator = torch.Generator().manual_seed(seed)
    num_vocab = target.logits(states.hidden_BSH[:1, 0]).shape[-1]
    seen_BV = seen_in(prompts, num_vocab, device) if sampling.needs_history else None
    alpha_sum, num_top1, num_positions, num_silent = 0.0, 0, 0, 0
    for step in range(int((lengths_B - starts_B).max()) - 1):
        # The last token known is answer[step], at position `place`; answer[step + 1] is guessed.
        place_B = (starts_B + step).clamp(max=ids_BS.shape[1] - 1)
        open_B = starts_B + step + 1 < lengths_B
        if seen_BV is not None:
            mark_seen(seen_BV, ids_BS[rows_B, place_B][:, None], open_B.long())
        draws_B1 = torch.rand(B, 1, generator=generator).to(device)
        proposal = drafter.propose(state, 1, sampling, draws_B1, seen_BV)
        p_BV = sampling.law(target.logits(states.hidden_BSH[rows_B, place_B]), seen_BV)
        tokens_B = proposal.tokens_BK[:, 0].to(device)
        if proposal.probs_BKV is None:
            alpha_B, top_B = p_BV.gather(-1, tokens_B[:, None])[:, 0], tokens_B
        else:
            q_BV = proposal.probs_BKV[:, 0]
            alpha_B, top_B = torch.minimum(p_BV, q_BV).sum(-1), q_BV.argmax(-1)
        guessed_B = open_B & (proposal.num_proposed_B.to(device) > 0)
        alpha_sum += float(alpha_B[guessed_B].sum())
        num_top1 += int((guessed_B & (top_B == p_BV.argmax(-1))).sum())
        num_positions += int(guessed_B.sum())
        num_silent += int((open_B & ~guessed_B).sum())
        drafter.observe(
            state,
            next_BS[rows_B, place_B][:, None],
            _at(states.aux_BSF, rows_B, place_B),
            open_B.long(),
        )
    return Forced(alpha_sum, num_top1, num_positions, num_silent)


def _at(aux_BSF: Tensor, rows_B: Tensor, place_B: Tensor) -> Tensor:
    """The captured states of one position of every row, [B, 1, F]."""
    return aux_BSF[rows_B, place_B][:, None]
