"""Drafters that propose trees: EAGLE-3 grows one level a pass; the others propose chains.

Dimension letters: B rows, F nodes that the drafter runs over on one level, C children of each,
N = F * C nodes of a level, M nodes of all levels, P nodes the drafter has run over so far,
D draft vocabulary, H drafter width, V target vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from data.attention import masked_attention
from data.cache import TreeNodes
from drafters.base import DecodingDrafter, Sampling
from drafters.eagle3 import Eagle3, Eagle3State
from drafters.layers import Attend
from eval.tree import DynamicTree, FixedTree, Tree, TreeSpec, chain
from recipes.errors import UserError


def check_spec(drafter: DecodingDrafter, spec: TreeSpec, sampling: Sampling) -> None:
    """Refuse what `grow` cannot do.

    Raises:
        UserError: a tree that branches from a drafter other than EAGLE-3, or drawn guesses.
    """
    is_chain = isinstance(spec, FixedTree) and set(spec.children) == {1}
    if not is_chain and not isinstance(drafter, Eagle3):
        raise UserError(
            f"{type(drafter).__name__} proposes chains, not {spec}; use eval.verification: token"
        )
    if sampling.draft_sampled and sampling.temperature > 0:
        raise UserError(
            "the guesses of a tree are the drafter's likeliest tokens, not drawn ones: "
            "draft greedily, or use eval.verification: token"
        )


def grow(
    drafter: DecodingDrafter,
    state: Any,
    root_B: Tensor,
    spec: TreeSpec,
    num_levels: int,
    sampling: Sampling,
    seen_BV: Tensor | None = None,
) -> Tree:
    """Guess a tree behind the last committed token; the drafter's state ends as it was.

    Args:
        root_B: the last committed token of each row.
        num_levels: levels that are wanted, at least 1 and at most spec.depth.
        seen_BV: bool, the tokens committed so far; given if `sampling.needs_history`.
    """
    if isinstance(drafter, Eagle3):
        return _Growth(drafter, state, spec, sampling, seen_BV).tree(root_B, num_levels)
    proposal = drafter.propose(state, num_levels, sampling, None, seen_BV)
    device = root_B.device
    return chain(root_B, proposal.tokens_BK.to(device), proposal.num_proposed_B.to(device))


class _Growth:
    """One tree of an EAGLE-3 drafter.

    Row t of the drafter reads token t + 1, so its cache holds the root's row already, and a node of
    depth d stands at position length + d - 1.
    """

    def __init__(
        self,
        drafter: Eagle3,
        state: Eagle3State,
        spec: TreeSpec,
        sampling: Sampling,
        seen_BV: Tensor | None,
    ) -> None:
        self.drafter, self.cache, self.spec, self.sampling = drafter, state.cache, spec, sampling
        num_rows = self.cache.batch_size
        self.hidden_BFH = state.last_hidden_BH[:, None]
        self.seen_BFD = None if seen_BV is None else seen_BV[:, None, drafter.draft_ids_D]
        self.score_BF = self.hidden_BFH.new_zeros(num_rows, 1, dtype=torch.float32)
        self.node_BF = self.cache.lengths_B.new_zeros(num_rows, 1)  # in the tree; the root is 0
        self.depths_BP = self.cache.lengths_B.new_zeros(num_rows, 0)
        self.sees_BFP = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=self.node_BF.device)

    @torch.no_grad()
    def tree(self, root_B: Tensor, num_levels: int) -> Tree:
        tokens, parents, scores, depths = [root_B[:, None]], [self.node_BF], [], [self.node_BF]
        num_nodes = 1
        for level in range(num_levels):
            draft_BN, score_BN = self.expand(level)
            C = draft_BN.shape[1] // self.node_BF.shape[1]
            tokens.append(self.drafter.draft_ids_D[draft_BN])
            parents.append(self.node_BF.repeat_interleave(C, 1))
            scores.append(score_BN)
            depths.append(torch.full_like(draft_BN, level + 1))
            if level + 1 < num_levels:
                self.go_on(draft_BN, score_BN, C, num_nodes, level)
            num_nodes += draft_BN.shape[1]
        full_B = torch.full_like(root_B, num_nodes)
        tree = Tree(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(depths, 1), full_B)
        if isinstance(self.spec, FixedTree):
            return tree
        return _likeliest(tree, torch.cat(scores, 1), self.spec.num_nodes)

    def expand(self, level: int) -> tuple[Tensor, Tensor]:
        """Draft ids and scores (log-probability from the root) of the next level, best first."""
        spec, drafter = self.spec, self.drafter
        width = spec.children[level] if isinstance(spec, FixedTree) else spec.top_k
        logits_BFD = drafter.lm_head(drafter.head_input(self.hidden_BFH)).float()
        logits_BFD = self.sampling.penalised(logits_BFD, self.seen_BFD)
        best = logits_BFD.log_softmax(-1).topk(min(width, logits_BFD.shape[-1]), -1)
        score_BFC = self.score_BF[..., None] + best.values
        return best.indices.flatten(1), score_BFC.flatten(1)

    def go_on(self, draft_BN: Tensor, score_BN: Tensor, C: int, num_nodes: int, level: int) -> None:
        """Run the drafter over those nodes of a level that get children."""
        if isinstance(self.spec, DynamicTree):
            pick_BF = score_BN.topk(min(self.spec.top_k, score_BN.shape[1]), -1).indices
        else:
            pick_BF = torch.arange(score_BN.shape[1], device=score_BN.device).expand_as(score_BN)
        parent_BF = pick_BF // C  # on the level before
        draft_BF = draft_BN.gather(1, pick_BF)
        self.score_BF, self.node_BF = score_BN.gather(1, pick_BF), pick_BF + num_nodes
        if self.seen_BFD is not None:
            self.seen_BFD = _rows(self.seen_BFD, parent_BF).scatter(2, draft_BF[..., None], True)
        own_BFF = torch.eye(pick_BF.shape[1], dtype=torch.bool, device=pick_BF.device)
        own_BFF = own_BFF.expand(pick_BF.shape[0], -1, -1)
        above_BFP = _rows(self.sees_BFP, parent_BF)
        self.sees_BFP = torch.cat([above_BFP, own_BFF], -1)
        self.depths_BP = torch.cat([self.depths_BP, torch.full_like(pick_BF, level)], 1)
        ids_BF = self.drafter.draft_ids_D[draft_BF]
        self.hidden_BFH = self.step(ids_BF, _rows(self.hidden_BFH, parent_BF))

    def step(self, ids_BF: Tensor, hidden_BFH: Tensor) -> Tensor:
        cache = self.cache
        cache.begin(ids_BF.shape[1], TreeNodes(self.depths_BP, self.sees_BFP))
        mask_BFT = cache.mask_BST()

        def attend_in(layer: int) -> Attend:
            return lambda query, key, value: masked_attention(
                query, *cache.append(layer, key, value), mask_BFT
            )

        attends = [attend_in(i) for i in range(len(self.drafter.layers))]
        return self.drafter.step(ids_BF, hidden_BFH, cache.positions_BS, attends)


def _rows(x_BFX: Tensor, index_BG: Tensor) -> Tensor:
    """x[b, index[b, g]]: [B, G, X]."""
    return x_BFX.gather(1, index_BG[..., None].expand(-1, -1, x_BFX.shape[-1]))


def _likeliest(tree: Tree, scores_BM: Tensor, num_nodes: int) -> Tree:
    """The guesses with the best scores.

    A child's is no better than its parent's, which stands before it, so with a stable order no
    node is kept without its parent.
    """
    order_BM = scores_BM.sort(dim=-1, descending=True, stable=True).indices
    kept_BN = order_BM[:, :num_nodes].sort(-1).values + 1
    kept_BP = torch.nn.functional.pad(kept_BN, (1, 0))  # and the root
    place_BP = torch.zeros_like(tree.parents_BP)
    nodes_P = torch.arange(kept_BP.shape[1], device=kept_BP.device)
    place_BP.scatter_(1, kept_BP, nodes_P.expand_as(kept_BP))
    return Tree(
        tree.tokens_BP.gather(1, kept_BP),
        place_BP.gather(1, tree.parents_BP.gather(1, kept_BP)),
        tree.depths_BP.gather(1, kept_BP),
        torch.full_like(tree.num_nodes_B, kept_BP.shape[1]),
    )
