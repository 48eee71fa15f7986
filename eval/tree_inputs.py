"""What a verifier of trees reads in one round, the right rule, and the guesses it is about.

Dimension letters: B rows, P nodes (the root and its guesses), A nodes of a path, V vocabulary,
W some of the rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.base import DraftLaws
from eval.tree import Tree, cut_depth
from eval.verify_tree import TreeVerdict, verify_sampled_tree, verify_tree


class Grown(NamedTuple):
    """The guesses of one round.

    q_BPV: the distribution that the first guess below each node was drawn from, of no meaning at
        nodes without guesses; None where all were chosen outright.
    uniforms_BP: what drew each guess; any numbers where none was drawn, and at the root.
    laws: the drafter's distributions at each node (K = P); only with Sampling.keep_laws.
    """

    tree: Tree
    q_BPV: Tensor | None
    uniforms_BP: Tensor
    laws: DraftLaws | None

    def cut(self, most_B: Tensor) -> "Grown":
        """Without the guesses deeper than `most` of their row."""
        tree = cut_depth(self.tree, most_B)
        P = tree.tokens_BP.shape[1]
        q_BPV, laws = self.q_BPV, self.laws
        return Grown(
            tree,
            None if q_BPV is None else q_BPV[:, :P],
            self.uniforms_BP[:, :P],
            None if laws is None else DraftLaws(*(law[:, :P] for law in laws)),
        )


@dataclass(frozen=True, kw_only=True)
class TreeInputs:
    """All that a verifier of trees could read in one round, the right one and the wrong ones.

    p_BPV, accept_uniforms_BP, final_uniforms_B: the arguments of eval.verify_tree.verify_tree.
    replacement: how the guesses of one node were drawn, if they were.
    """

    p_BPV: Tensor
    grown: Grown
    replacement: bool
    accept_uniforms_BP: Tensor
    final_uniforms_B: Tensor

    @property
    def tree(self) -> Tree:
        return self.grown.tree

    @property
    def judged_B(self) -> Tensor:
        """bool: rows with a guess."""
        return self.tree.num_nodes_B > 1

    def select(self, rows_W: Tensor) -> "TreeInputs":
        """Some rows of the round."""
        tree, q_BPV, uniforms_BP, laws = self.grown
        grown = Grown(
            Tree(*(part[rows_W] for part in tree)),
            None if q_BPV is None else q_BPV[rows_W],
            uniforms_BP[rows_W],
            None if laws is None else DraftLaws(*(law[rows_W] for law in laws)),
        )
        return replace(
            self,
            p_BPV=self.p_BPV[rows_W],
            grown=grown,
            accept_uniforms_BP=self.accept_uniforms_BP[rows_W],
            final_uniforms_B=self.final_uniforms_B[rows_W],
        )

    def fresh(self, uniforms: Callable[[Tensor], Tensor]) -> "TreeInputs":
        """The same round with other numbers to accept and draw with."""
        return replace(
            self,
            accept_uniforms_BP=uniforms(self.accept_uniforms_BP),
            final_uniforms_B=uniforms(self.final_uniforms_B),
        )

    def both_laws(self) -> tuple[Tensor, Tensor]:
        """p at each node, and q as eval.lossless.pit_columns wants it."""
        return self.p_BPV, guessed_from(self.p_BPV, self.grown)

    def emitted(self, verdict: TreeVerdict) -> tuple[Tensor, Tensor, Tensor]:
        """Emitted tokens [B, A], the node that each stands behind, how many count."""
        tokens_BA = self.tree.tokens_BP.gather(1, verdict.path_BA).roll(-1, 1)
        tokens_BA.scatter_(1, verdict.num_accepted_B[:, None], verdict.next_token_B[:, None])
        return tokens_BA, verdict.path_BA, verdict.num_accepted_B + 1


TreeVerifier = Callable[[TreeInputs], TreeVerdict]


def tree_rule(x: TreeInputs) -> TreeVerdict:
    """The right rule for how the guesses were made: chosen outright, or drawn."""
    if x.grown.q_BPV is None:
        return verify_tree(x.p_BPV, x.tree, x.accept_uniforms_BP, x.final_uniforms_B)
    return verify_sampled_tree(
        x.p_BPV,
        x.tree,
        x.grown.q_BPV,
        x.accept_uniforms_BP,
        x.final_uniforms_B,
        x.replacement,
    )


def guessed_from(p_BPV: Tensor, grown: Grown) -> Tensor:
    """q of eval.lossless.pit_columns at each node: 1 at guesses chosen outright, 0 without any."""
    if grown.q_BPV is not None:
        return grown.q_BPV
    tree, q_BPV = grown.tree, torch.zeros_like(p_BPV)
    rows_B1 = torch.arange(p_BPV.shape[0], device=p_BPV.device)[:, None]
    live_BP = tree.live_BP
    where = rows_B1.expand_as(live_BP), tree.parents_BP, tree.tokens_BP.masked_fill(~live_BP, 0)
    return q_BPV.index_put_(where, live_BP.to(p_BPV.dtype), accumulate=True).clamp_(max=1)
