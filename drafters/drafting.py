"""Drawing the tokens of one proposal, position by position, from logits over a draft vocabulary.

Dimension letters: B rows, K proposed tokens, V target vocabulary, D draft vocabulary.
"""

import torch
from torch import Tensor

from data.sampling import sample
from drafters.base import DraftLaws, Proposal, Sampling, TrainedDrafter


class Draft:
    """The tokens drawn so far; `draw` adds one a row, `proposal` ends it.

    The distribution that is handed on is the very one that was drawn from. What is drafted counts
    as seen for the tokens after it (repetition penalty). Arguments as in DecodingDrafter.propose.
    """

    def __init__(
        self,
        drafter: TrainedDrafter,
        sampling: Sampling,
        uniforms_BK: Tensor | None,
        seen_BV: Tensor | None,
    ) -> None:
        self.sampling, self.uniforms_BK = sampling, uniforms_BK
        self.ids_D, self.vocab_size = drafter.draft_ids_D, int(drafter.config.vocab_size)
        self.seen_BD = None if seen_BV is None else seen_BV[:, self.ids_D]
        self.tokens: list[Tensor] = []
        self.probs: list[Tensor] = []
        self.laws: list[DraftLaws] = []

    def draw(self, logits_BD: Tensor) -> Tensor:
        """The next token of every row, as target ids [B]: the likeliest, or drawn."""
        sampling, logits_BD, seen_BD = self.sampling, logits_BD.float(), self.seen_BD
        if sampling.keep_laws:
            both = sampling.law(logits_BD, seen_BD), sampling.unfiltered(logits_BD, seen_BD)
            self.laws.append(DraftLaws(*(self._spread(q_BD) for q_BD in both)))
        if sampling.draft_sampled and sampling.temperature > 0:
            assert self.uniforms_BK is not None, "a sampled draft needs its own uniforms"
            q_BD = sampling.law(logits_BD, seen_BD, where="drafter logits")
            draft_B = sample(q_BD, self.uniforms_BK[:, len(self.tokens)])
            self.probs.append(self._spread(q_BD))
        else:
            draft_B = sampling.penalised(logits_BD, seen_BD).argmax(-1)
        if seen_BD is not None:
            seen_BD.scatter_(1, draft_B[:, None], True)
        self.tokens.append(self.ids_D[draft_B])
        return self.tokens[-1]

    def proposal(self, num_proposed_B: Tensor | None = None) -> Proposal:
        """What was drawn; rows may keep fewer than all (None = all)."""
        tokens_BK = torch.stack(self.tokens, 1)
        if num_proposed_B is None:
            num_proposed_B = torch.full_like(tokens_BK[:, 0], tokens_BK.shape[1])
        return Proposal(
            tokens_BK,
            num_proposed_B,
            torch.stack(self.probs, 1) if self.probs else None,
            DraftLaws(*(torch.stack(qs, 1) for qs in zip(*self.laws, strict=True)))
            if self.laws
            else None,
        )

    def _spread(self, q_BD: Tensor) -> Tensor:
        """Probabilities over the draft vocabulary -> over the target's."""
        q_BV = q_BD.new_zeros(q_BD.shape[0], self.vocab_size)
        return q_BV.index_copy_(1, self.ids_D, q_BD)
