"""Broken verifiers beside the right one: what they would emit in the rounds that it judges.

That is cheaper than a run of each. In every round that the right rule judges, they judge the same
p, q and proposal with acceptance and final numbers of their own, and what they would emit is
transformed. This is one round of the broken loop, to the letter, from a state that the target's
law visits (the broken loop itself would visit others); p at every emitted position is the law
given its true prefix, for what a rule emits is accepted tokens of this proposal and one token
behind them. What lies behind an end token is kept: it has a law as well.

Tokens of different rounds may be pooled: given all before a round, its proposal is fresh, so a
right rule's transforms are uniform and independent, though the right loop moves on by the same
proposal. The right rule is replayed, too, as a control. Further replays of a round share its
proposal and are not independent: they refine an estimated distance, and only the first counts
for a p-value.

Dimensions: B rows, K proposed tokens, S = K + 1, N emitted tokens, V vocabulary, W rows with a
proposal.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from drafters.base import DraftLaws
from eval.broken import Fault, token_rule
from eval.lossless import pit_columns
from eval.rounds import Verifier, VerifyInputs, drafted_from
from eval.verify import Verdict

CONTROL = "control"  # name of the right rule among those that are replayed


class Replays:
    """A verifier that judges with the right rule and lets broken ones judge the same rounds.

    columns: by rule and replay, tensors [N, 3] of transforms (eval.lossless.pit_columns).
    """

    def __init__(
        self, verify: Verifier, faults: Mapping[str, Fault], num_replays: int, seed: int
    ) -> None:
        self.verify, self.num_replays = verify, num_replays
        right = Fault("the right rule, replayed as the others", lambda _x: True, token_rule)
        self.rules = {CONTROL: right, **faults}
        self.columns: dict[str, list[list[Tensor]]] = {
            name: [[] for _ in range(num_replays)] for name in self.rules
        }
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, x: VerifyInputs) -> Verdict:
        verdict = self.verify(x)
        rows_W = (x.num_proposed_B > 0).nonzero()[:, 0]
        if len(rows_W):
            x = _select(x, rows_W)
            q_BSV = drafted_from(x.p_BSV, x.tokens_BK, x.num_proposed_B, x.q_BKV)
            for name, rule in self.rules.items():
                if rule.applies(x):
                    for columns in self.columns[name]:
                        columns.append(self._replay(rule, x, q_BSV))
        return verdict

    def _replay(self, rule: Fault, x: VerifyInputs, q_BSV: Tensor) -> Tensor:
        fresh = replace(
            x,
            accept_uniforms_BK=self._uniforms(x.accept_uniforms_BK),
            final_uniforms_B=self._uniforms(x.final_uniforms_B),
        )
        num_accepted_B, next_B = rule.verify(fresh)
        emitted_BS = torch.nn.functional.pad(x.tokens_BK, (0, 1))
        emitted_BS = emitted_BS.scatter(1, num_accepted_B[:, None], next_B[:, None])
        places_S = torch.arange(emitted_BS.shape[1], device=emitted_BS.device)
        kept_BS = places_S <= num_accepted_B[:, None]
        tokens_N = emitted_BS[kept_BS]
        uniforms_N = self._uniforms(tokens_N)
        return pit_columns(x.p_BSV[kept_BS], tokens_N, uniforms_N, q_BSV[kept_BS]).cpu()

    def _uniforms(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self.generator).to(like.device)

    def pooled(self, name: str, num_replays: int | None = None) -> list[list[float]]:
        """Transforms of the first replays (None = all) of all rounds; may be empty."""
        parts = [part for columns in self.columns[name][:num_replays] for part in columns]
        values: list[list[float]] = torch.cat(parts).tolist() if parts else []
        return values


def _select(x: VerifyInputs, rows_W: Tensor) -> VerifyInputs:
    """Some rows of a round."""
    laws = None if x.laws is None else DraftLaws(*(law_BKV[rows_W] for law_BKV in x.laws))
    return VerifyInputs(
        p_BSV=x.p_BSV[rows_W],
        tokens_BK=x.tokens_BK[rows_W],
        num_proposed_B=x.num_proposed_B[rows_W],
        q_BKV=None if x.q_BKV is None else x.q_BKV[rows_W],
        accept_uniforms_BK=x.accept_uniforms_BK[rows_W],
        final_uniforms_B=x.final_uniforms_B[rows_W],
        draft_uniforms_BK=x.draft_uniforms_BK[rows_W],
        laws=laws,
    )
