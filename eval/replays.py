"""Broken verifiers beside the right one: what they would emit in the rounds that it judges.

That is cheaper than a run of each. In every round that the right rule judges, they judge the same
p, q and guesses with acceptance and final numbers of their own, and what they would emit is
transformed. This is one round of the broken loop, to the letter, from a state that the target's
law visits (the broken loop itself would visit others); p at every emitted position is the law
given its true prefix, for what a rule emits is accepted guesses of this round and one token
behind them. What lies behind an end token is kept: it has a law as well.

Tokens of different rounds may be pooled: given all before a round, its guesses are fresh, so a
right rule's transforms are uniform and independent, though the right loop moves on by the same
guesses. The right rule is replayed, too, as a control. Further replays of a round share its
guesses and are not independent: they refine an estimated distance, and only the first counts
for a p-value.

In one replay all rules are given the same numbers. Rounds in which a broken rule then emits what
the right one does say nothing about it: a pair of models on which it does so in every round has no
use for that rule's fault.

Dimensions: B rows, P positions (a chain's K + 1, a tree's nodes), A tokens emitted at most,
N emitted tokens, V vocabulary, W rows with a guess.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from eval.broken import Fault
from eval.lossless import pit_columns

CONTROL = "control"  # name of the right rule among those that are replayed


class Inputs(Protocol):
    """A round of chains (eval.rounds.VerifyInputs) or of trees (eval.tree_inputs.TreeInputs)."""

    @property
    def judged_B(self) -> Tensor: ...
    def select(self, rows_W: Tensor) -> Any: ...
    def fresh(self, uniforms: Callable[[Tensor], Tensor]) -> Any: ...
    def both_laws(self) -> tuple[Tensor, Tensor]: ...
    def emitted(self, verdict: Any) -> tuple[Tensor, Tensor, Tensor]: ...


X = TypeVar("X", bound=Inputs)


class Replays(Generic[X]):
    """A verifier that judges with `verify` and lets broken ones judge the same rounds.

    Args:
        verify: judges for the loop.
        control: the right rule.
        faults: those that apply to a round judge it.

    columns: by rule and replay, tensors [N, 3] of transforms (eval.lossless.pit_columns).
    num_rounds, num_other: by rule, the rounds that it judged, and those of them in which it emitted
        other tokens than the right rule; of all replays.
    certain: whether at every position judged so far the guesses are accepted with certainty: q = p,
        or outright guesses with all of p.
    """

    def __init__(
        self,
        verify: Callable[[X], Any],
        control: Callable[[X], Any],
        faults: Mapping[str, Fault[X]],
        num_replays: int,
        seed: int,
    ) -> None:
        self.verify, self.num_replays = verify, num_replays
        right = Fault("the right rule, replayed as the others", lambda _x: True, control)
        self.rules: dict[str, Fault[X]] = {CONTROL: right, **faults}
        self.columns: dict[str, list[list[Tensor]]] = {
            name: [[] for _ in range(num_replays)] for name in self.rules
        }
        self.num_rounds, self.num_other = dict.fromkeys(self.rules, 0), dict.fromkeys(self.rules, 0)
        self.certain = True
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, x: X) -> Any:
        verdict = self.verify(x)
        rows_W = x.judged_B.nonzero()[:, 0]
        if len(rows_W):
            self._judge(x.select(rows_W))
        return verdict

    def _judge(self, x: X) -> None:
        p_BPV, q_BPV = x.both_laws()
        drafted_BP = (q_BPV > 0).any(-1)
        alpha_N = torch.minimum(p_BPV, q_BPV).sum(-1)[drafted_BP]
        self.certain &= bool((alpha_N > 1 - 1e-6).all())
        for replay in range(self.num_replays):
            fresh = x.fresh(self._uniforms)
            expected: Tensor | None = None
            for name, rule in self.rules.items():
                if not rule.applies(x):
                    continue
                tokens_BA, place_BA, num_B = x.emitted(rule.verify(fresh))
                kept_BA = torch.arange(tokens_BA.shape[1], device=num_B.device) < num_B[:, None]
                tokens_N, place_N = tokens_BA[kept_BA], place_BA[kept_BA]
                row_N = kept_BA.nonzero()[:, 0]
                p_NV, q_NV = p_BPV[row_N, place_N], q_BPV[row_N, place_N]
                columns_N3 = pit_columns(p_NV, tokens_N, self._uniforms(tokens_N), q_NV)
                self.columns[name][replay].append(columns_N3.cpu())
                shown_BA = tokens_BA.masked_fill(~kept_BA, -1)
                expected = shown_BA if expected is None else expected  # the control comes first
                self.num_rounds[name] += len(shown_BA)
                self.num_other[name] += int((shown_BA != expected).any(-1).sum())

    def _uniforms(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self.generator).to(like.device)

    def pooled(self, name: str, num_replays: int | None = None) -> list[list[float]]:
        """Transforms of the first replays (None = all) of all rounds; may be empty."""
        parts = [part for columns in self.columns[name][:num_replays] for part in columns]
        values: list[list[float]] = torch.cat(parts).tolist() if parts else []
        return values
