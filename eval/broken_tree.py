"""Verifiers of trees that are broken on purpose, as eval.broken has them for chains.

Dimensions: B rows, P nodes (the root and its guesses), V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from data.sampling import sample
from eval.broken import Fault
from eval.tree_inputs import TreeInputs, tree_rule
from eval.verify_tree import TreeVerdict, masses_of_guesses


def replacement_from_p(x: TreeInputs) -> TreeVerdict:
    """Where all guesses of a node are rejected the token comes from p, not from what is left."""
    verdict = tree_rule(x)
    return verdict._replace(next_token_B=_draw_at(x, _last_B(verdict)))


def early_bonus(x: TreeInputs) -> TreeVerdict:
    """The token behind a path that ends in a leaf is drawn from p at the leaf's parent."""
    verdict = tree_rule(x)
    last_B1 = _last_B(verdict)[:, None]
    leaf_B = ~(x.tree.live_BP & (x.tree.parents_BP == last_B1)).any(-1)
    early_B = _draw_at(x, x.tree.parents_BP.gather(1, last_B1)[:, 0])
    return verdict._replace(next_token_B=torch.where(leaf_B, early_B, verdict.next_token_B))


def wrong_branch(x: TreeInputs) -> TreeVerdict:
    """Behind an accepted guess p is read at its first sibling."""
    rows_B1 = torch.arange(x.p_BPV.shape[0], device=x.p_BPV.device)[:, None]
    return tree_rule(replace(x, p_BPV=x.p_BPV[rows_B1, _first_sibling_BP(x)]))


def siblings_alone(x: TreeInputs) -> TreeVerdict:
    """Every guess is accepted with p(x), as if none of its siblings had been rejected before."""
    left_BP = masses_of_guesses(x.p_BPV, x.tree)[1]
    return tree_rule(replace(x, accept_uniforms_BP=x.accept_uniforms_BP / left_BP.clamp(min=1e-9)))


def siblings_as_drawn(x: TreeInputs) -> TreeVerdict:
    """The drafter's likeliest tokens are judged as if they had been drawn from q."""
    assert x.grown.laws is not None
    drawn = x.grown._replace(q_BPV=x.grown.laws.final_BKV)
    return tree_rule(replace(x, grown=drawn, replacement=True))


def reused_uniform(x: TreeInputs) -> TreeVerdict:
    """The number that drew a guess decides whether it is accepted, too."""
    return tree_rule(replace(x, accept_uniforms_BP=x.grown.uniforms_BP))


def previous_q(x: TreeInputs) -> TreeVerdict:
    """Guesses below the first level are judged by the q of the level before."""
    assert x.grown.q_BPV is not None
    rows_B1 = torch.arange(x.p_BPV.shape[0], device=x.p_BPV.device)[:, None]
    before_BPV = x.grown.q_BPV[rows_B1, x.tree.parents_BP]
    return tree_rule(replace(x, grown=x.grown._replace(q_BPV=before_BPV)))


def unfiltered_q(x: TreeInputs) -> TreeVerdict:
    """q is taken before top-k and top-p, but the guesses were drawn after them."""
    assert x.grown.laws is not None
    return tree_rule(replace(x, grown=x.grown._replace(q_BPV=x.grown.laws.unfiltered_BKV)))


def other_replacement(x: TreeInputs) -> TreeVerdict:
    """Siblings that were drawn with replacement are judged as if without, or the other way."""
    return tree_rule(replace(x, replacement=not x.replacement))


def _draw_at(x: TreeInputs, node_B: Tensor) -> Tensor:
    rows_B = torch.arange(len(node_B), device=node_B.device)
    return sample(x.p_BPV[rows_B, node_B], x.final_uniforms_B)


def _last_B(verdict: TreeVerdict) -> Tensor:
    """The node that each path ends in."""
    return verdict.path_BA.gather(1, verdict.num_accepted_B[:, None])[:, 0]


def _first_sibling_BP(x: TreeInputs) -> Tensor:
    """The first guess below the same parent; of the root and of padding the root."""
    parents_BP, live_BP = x.tree.parents_BP, x.tree.live_BP
    alike_BPP = (parents_BP[:, :, None] == parents_BP[:, None]) & live_BP[:, None]
    return alike_BPP.long().argmax(-1).masked_fill(~live_BP, 0)


def _any(_x: TreeInputs) -> bool:
    return True


def _deep(x: TreeInputs) -> bool:
    return x.grown.q_BPV is not None and int(x.tree.depths_BP.max()) > 1


def _filtered(x: TreeInputs) -> bool:
    laws = x.grown.laws
    return laws is not None and not torch.equal(*laws)  # final, unfiltered


def _with_laws(x: TreeInputs) -> bool:
    return x.grown.laws is not None


OF_ALL: dict[str, Fault[TreeInputs]] = {
    "replacement_from_p": Fault(
        "after a rejection draws from p, not from what is left", _any, replacement_from_p
    ),
    "early_bonus": Fault("draws the token behind a leaf one node early", _any, early_bonus),
    "wrong_branch": Fault("reads p at the first sibling of the accepted guess", _any, wrong_branch),
}
OF_TOP = OF_ALL | {
    "siblings_alone": Fault("accepts each sibling as if it were the first", _any, siblings_alone),
    "siblings_as_drawn": Fault(
        "judges the likeliest tokens as if they had been drawn", _with_laws, siblings_as_drawn
    ),
}
OF_DRAWN = OF_ALL | {
    "reused_uniform": Fault("accepts with the random number that drew", _any, reused_uniform),
    "previous_q": Fault("judges by q of the level before", _deep, previous_q),
    "unfiltered_q": Fault("takes q before top-p", _filtered, unfiltered_q),
    "other_replacement": Fault(
        "judges draws with replacement as if without, or the reverse", _any, other_replacement
    ),
}
