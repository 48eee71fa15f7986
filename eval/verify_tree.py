"""Verification of draft trees: several guesses a position, judged level by level from the root.

Pure functions like those of eval/verify.py, with the same demands on p and the uniforms. At a node
its children are tried in order; the first accepted one is the next node, and where none is accepted
the next token is drawn from what is left of p. The law of the emitted tokens is the target's; the
tests enumerate it in rational arithmetic over these very functions.

Dimension letters: B rows, P nodes, C children of a node, A = depth + 1 nodes of a path,
V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from eval.tree import Tree, ancestors_BPP
from eval.verify import draw


class TreeVerdict(NamedTuple):
    """What one round decided for each row; the row emits num_accepted + 1 tokens.

    num_accepted_B: int64, guesses accepted.
    next_token_B: int64, the token behind the last accepted node.
    path_BA: int64, the accepted nodes, root first; padding (0) from num_accepted + 1 on.
    """

    num_accepted_B: Tensor
    next_token_B: Tensor
    path_BA: Tensor


def verify_tree(
    p_BPV: Tensor, tree: Tree, accept_uniforms_BP: Tensor, final_uniforms_B: Tensor
) -> TreeVerdict:
    """Trees whose guesses were chosen outright (EAGLE-2/3: the drafter's likeliest tokens).

    Each guess is a point mass: a child x is accepted with probability p(x) / (1 - sum of p over
    the siblings tried before); where all are rejected the next token is drawn from p without them.
    Any tree is right that is a function of the committed tokens and the drafter alone.

    Args:
        p_BPV: target probabilities at each node, given the path to it.
        accept_uniforms_BP: in [0, 1); column 0 is unused.
        final_uniforms_B: in [0, 1).

    Raises:
        UserError: p is NaN at the node that the next token is drawn from.
    """
    live_BP, parents_BP = tree.live_BP, tree.parents_BP
    tokens_BP = tree.tokens_BP.masked_fill(~live_BP, 0)
    rows_B1 = torch.arange(p_BPV.shape[0], device=p_BPV.device)[:, None]
    p_x_BP, left_BP, siblings_BPP = masses_of_guesses(p_BPV, tree)
    taken_BP = (accept_uniforms_BP * left_BP < p_x_BP) | (p_x_BP >= left_BP)
    taken_BP &= p_x_BP > 0  # never padding, and nothing impossible when `left` is rounded below 0
    taken_BP &= ~(siblings_BPP & taken_BP[:, None]).any(-1)  # the first of several
    taken_BP[:, 0] = True
    on_path_BP = (taken_BP[:, None] | ~ancestors_BPP(tree)).all(-1)
    num_accepted_B = on_path_BP.sum(-1) - 1
    path_BA = _path(on_path_BP, num_accepted_B, int(tree.depths_BP.max()) + 1)

    leaf_B1 = path_BA.gather(1, num_accepted_B[:, None])
    p_BV = p_BPV[rows_B1, leaf_B1][:, 0]
    tried_BP = live_BP & (parents_BP == leaf_B1)
    dropped_BV = torch.zeros_like(p_BV).scatter_add_(1, tokens_BP, tried_BP.to(p_BV.dtype))
    rest_BV = p_BV.masked_fill(dropped_BV > 0, 0.0)
    # Nothing left means that the siblings hold all mass up to rounding: then p is the right law.
    weights_BV = torch.where(rest_BV.sum(-1, keepdim=True) != 0, rest_BV, p_BV)
    return TreeVerdict(num_accepted_B, draw(weights_BV, num_accepted_B, final_uniforms_B), path_BA)


def masses_of_guesses(p_BPV: Tensor, tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """p of each guess, what the siblings before it leave, and which those are (bool [B, P, P])."""
    live_BP, parents_BP = tree.live_BP, tree.parents_BP
    tokens_BP = tree.tokens_BP.masked_fill(~live_BP, 0)
    num_nodes = tokens_BP.shape[1]
    earlier_PP = torch.ones(num_nodes, num_nodes, device=p_BPV.device).tril(-1).bool()
    siblings_BPP = (parents_BP[:, :, None] == parents_BP[:, None]) & live_BP[:, None] & earlier_PP
    # The same guess made again has nothing left to be accepted with.
    again_BP = (siblings_BPP & (tokens_BP[:, :, None] == tokens_BP[:, None])).any(-1)
    rows_B1 = torch.arange(p_BPV.shape[0], device=p_BPV.device)[:, None]
    p_x_BP = p_BPV[rows_B1, parents_BP, tokens_BP].masked_fill(again_BP | ~live_BP, 0.0)
    return p_x_BP, 1 - (siblings_BPP * p_x_BP[:, None]).sum(-1), siblings_BPP


def _path(on_path_BP: Tensor, num_accepted_B: Tensor, length: int) -> Tensor:
    """Indices of the marked nodes in ascending order, then zeros."""
    first_BA = on_path_BP.long().sort(dim=-1, descending=True, stable=True).indices[:, :length]
    steps_A = torch.arange(first_BA.shape[1], device=on_path_BP.device)
    return first_BA.masked_fill(steps_A > num_accepted_B[:, None], 0)


class SiblingVerdict(NamedTuple):
    """What became of the candidates of one position in each row.

    rank_B: the accepted candidate, or -1.
    rest_BV: what the next token is drawn from where none was accepted.
    chance_B: that one of these candidates is accepted, over the acceptance uniforms.
    """

    rank_B: Tensor
    rest_BV: Tensor
    chance_B: Tensor


def judge_siblings(
    p_BV: Tensor,
    tokens_BC: Tensor,
    num_B: Tensor,
    q_BV: Tensor,
    accept_uniforms_BC: Tensor,
    replacement: bool,
) -> SiblingVerdict:
    """Candidates for one position that were drawn from q, tried in the order of the draws.

    Candidate x is accepted with probability min(1, p(x) / q(x)); a rejection replaces p by
    norm(max(p - q, 0)) (SpecInfer, Miao et al. 2305.09781, section 4.3). Drawn without
    replacement, it also takes x out of q, which is renormalised (Sequoia, Chen et al. 2402.12374,
    section 3.2): q has to be what the next candidate was really drawn from.

    Args:
        num_B: int64, candidates of each row; tokens_BC behind them are padding.
        q_BV: what the first candidate was drawn from.
        replacement: whether a candidate could be drawn again.
    """
    rank_B = torch.full_like(num_B, -1)
    rest_BV, refused_B = p_BV, torch.ones_like(p_BV[:, 0])
    for c in range(tokens_BC.shape[1]):
        real_B = c < num_B
        x_B1 = tokens_BC[:, c : c + 1].masked_fill(~real_B[:, None], 0)
        p_x_B, q_x_B = rest_BV.gather(1, x_B1)[:, 0], q_BV.gather(1, x_B1)[:, 0]
        certain_B = (p_x_B >= q_x_B) & (p_x_B > 0)
        accept_B = (accept_uniforms_BC[:, c] * q_x_B < p_x_B) | certain_B
        rank_B = torch.where((rank_B < 0) & real_B & accept_B, c, rank_B)
        ratio_B = torch.where(certain_B, 1.0, p_x_B / q_x_B.clamp(min=1e-30))
        refused_B = torch.where(real_B, refused_B * (1 - ratio_B), refused_B)
        # From here on as if it had been rejected; an accepted rank stays.
        less_BV = (rest_BV - q_BV).clamp(min=0)
        total_B1 = less_BV.sum(-1, keepdim=True)
        less_BV = torch.where(total_B1 > 0, less_BV / total_B1, rest_BV)
        rest_BV = torch.where(real_B[:, None], less_BV, rest_BV)
        if not replacement:
            fewer_BV = q_BV.scatter(1, x_B1, 0.0)
            fewer_BV = fewer_BV / fewer_BV.sum(-1, keepdim=True).clamp(min=1e-30)
            q_BV = torch.where(real_B[:, None], fewer_BV, q_BV)
    return SiblingVerdict(rank_B, rest_BV, 1 - refused_B)


def verify_sampled_tree(
    p_BPV: Tensor,
    tree: Tree,
    q_BPV: Tensor,
    accept_uniforms_BP: Tensor,
    final_uniforms_B: Tensor,
    replacement: bool,
) -> TreeVerdict:
    """Trees whose guesses were drawn: the children of a node from q at this node.

    Args: as verify_tree; q_BPV: the drafter's distribution at each node; replacement: see
        judge_siblings. How many children a node gets may not depend on what they are.

    Raises:
        UserError: p or q is NaN at the node that the next token is drawn from.
    """
    rows_B = torch.arange(p_BPV.shape[0], device=p_BPV.device)
    node_B = torch.zeros_like(tree.num_nodes_B)
    num_accepted_B, open_B = node_B, torch.ones_like(node_B, dtype=torch.bool)
    weights_BV, path = p_BPV[:, 0], [node_B]
    for _ in range(int(tree.depths_BP.max())):
        children_BC, num_B = _children(tree, node_B)
        verdict = judge_siblings(
            p_BPV[rows_B, node_B],
            tree.tokens_BP.gather(1, children_BC),
            num_B,
            q_BPV[rows_B, node_B],
            accept_uniforms_BP.gather(1, children_BC),
            replacement,
        )
        moved_B = open_B & (verdict.rank_B >= 0)
        weights_BV = torch.where(open_B[:, None], verdict.rest_BV, weights_BV)
        if children_BC.shape[1]:
            child_B = children_BC.gather(1, verdict.rank_B.clamp(min=0)[:, None])[:, 0]
            node_B = torch.where(moved_B, child_B, node_B)
        weights_BV = torch.where(moved_B[:, None], p_BPV[rows_B, node_B], weights_BV)
        num_accepted_B = num_accepted_B + moved_B
        path.append(torch.where(moved_B, node_B, 0))
        open_B = moved_B
    next_token_B = draw(weights_BV, num_accepted_B, final_uniforms_B)
    return TreeVerdict(num_accepted_B, next_token_B, torch.stack(path, 1))


def chances_BA(
    p_BPV: Tensor, tree: Tree, q_BPV: Tensor | None, path_BA: Tensor, replacement: bool
) -> Tensor:
    """The chance at each node of a path that one of its guesses is accepted; NaN without guesses.

    Args: as verify_tree (q_BPV None) and verify_sampled_tree.
    """
    rows_B, columns = torch.arange(p_BPV.shape[0], device=p_BPV.device), []
    for node_B in path_BA.unbind(1):
        children_BC, num_B = _children(tree, node_B)
        tokens_BC, p_BV = tree.tokens_BP.gather(1, children_BC), p_BPV[rows_B, node_B]
        if q_BPV is None:
            real_BC = torch.arange(tokens_BC.shape[1], device=num_B.device) < num_B[:, None]
            places_BC = tokens_BC.masked_fill(~real_BC, 0)
            guessed_BV = torch.zeros_like(p_BV).scatter_add_(1, places_BC, real_BC.to(p_BV.dtype))
            chance_B = (p_BV * (guessed_BV > 0)).sum(-1)
        else:
            ones_BC = torch.ones_like(tokens_BC, dtype=p_BV.dtype)
            q_BV = q_BPV[rows_B, node_B]
            chance_B = judge_siblings(p_BV, tokens_BC, num_B, q_BV, ones_BC, replacement).chance_B
        columns.append(torch.where(num_B > 0, chance_B, torch.nan))
    return torch.stack(columns, 1)


def _children(tree: Tree, node_B: Tensor) -> tuple[Tensor, Tensor]:
    """The children of one node of each row in order (then padding), and how many they are."""
    is_child_BP = tree.live_BP & (tree.parents_BP == node_B[:, None])
    num_B = is_child_BP.sum(-1)
    children_BP = is_child_BP.long().sort(dim=-1, descending=True, stable=True).indices
    return children_BP[:, : int(num_B.max())], num_B
