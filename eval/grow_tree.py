"""Drafters that propose trees: EAGLE and MTP grow one level a pass; the others propose chains.

The guesses below a node are the drafter's likeliest tokens or draws from its final distribution
there (eval.tree.Siblings). Which nodes get how many never depends on what was drawn.

Dimension letters: B rows, F nodes that the drafter runs over on one level, C children of each,
N = F * C nodes of a level, M nodes of all levels, P nodes (in _Growth: those the drafter has run
over so far), D draft vocabulary, H drafter width, V target vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from data.attention import masked_attention
from data.cache import TreeNodes
from data.sampling import sample
from drafters.base import DecodingDrafter, DraftLaws, Sampling
from drafters.eagle3 import Eagle3, Eagle3State
from drafters.layers import Attend
from drafters.p_eagle import rolls_out
from eval.tree import DynamicTree, FixedTree, Tree, TreeSpec, chain, select_nodes
from eval.tree_inputs import Grown
from recipes.errors import UserError


def check_spec(drafter: DecodingDrafter, spec: TreeSpec, sampling: Sampling) -> None:
    """Refuse what `grow` cannot do.

    Raises:
        UserError: a tree that branches from a drafter that proposes chains; siblings are drawn and
            drafts are not, or the other way round.
    """
    is_chain = isinstance(spec, FixedTree) and set(spec.children) == {1}
    if not is_chain and not rolls_out(drafter):
        raise UserError(
            f"{type(drafter).__name__} proposes chains, no trees; use eval.verification: token"
        )
    if sampling.temperature == 0:
        return
    if sampling.draft_sampled and spec.siblings == "top":
        raise UserError(
            "siblings top are the drafter's likeliest tokens, not drawn ones: draft greedily, or "
            "use eval.siblings: without_replacement"
        )
    if not sampling.draft_sampled and spec.siblings != "top":
        raise UserError(
            f"siblings {spec.siblings} are drawn: set eval.draft_sampling: sampled, or use "
            "eval.siblings: top"
        )


def grow(
    drafter: DecodingDrafter,
    state: Any,
    root_B: Tensor,
    spec: TreeSpec,
    num_levels: int,
    sampling: Sampling,
    uniforms_BM: Tensor,
    seen_BV: Tensor | None = None,
) -> Grown:
    """Guess a tree behind the last committed token; the drafter's state ends as it was.

    Args:
        root_B: the last committed token of each row.
        num_levels: levels that are wanted, at least 1 and at most spec.depth.
        uniforms_BM: in [0, 1), one a guess, used for nothing else.
        seen_BV: bool, the tokens committed so far; given if `sampling.needs_history`.
    """
    if rolls_out(drafter):
        growth = _Growth(drafter, state, spec, sampling, uniforms_BM, seen_BV)
        return growth.grown(root_B, num_levels)
    proposal = drafter.propose(state, num_levels, sampling, uniforms_BM[:, :num_levels], seen_BV)
    device, laws, q_BKV = root_B.device, proposal.laws, proposal.probs_BKV
    tree = chain(root_B, proposal.tokens_BK.to(device), proposal.num_proposed_B.to(device))
    return Grown(
        tree,
        None if q_BKV is None else _behind(q_BKV).to(device),
        pad(uniforms_BM[:, : tree.tokens_BP.shape[1] - 1], (1, 0)),
        None if laws is None else DraftLaws(*(_behind(law).to(device) for law in laws)),
    )


def _behind(law_BKV: Tensor) -> Tensor:
    """Distributions at the nodes of a chain: the last guess has none below it."""
    return pad(law_BKV, (0, 0, 0, 1))


def draw_siblings(q_ND: Tensor, uniforms_NC: Tensor, replacement: bool) -> tuple[Tensor, Tensor]:
    """Draws from each of the distributions, and which of them there are (bool [N, C]).

    Without replacement a row of q with fewer than C tokens is used up by the last draws.
    """
    tokens, real = [], []
    for c in range(uniforms_NC.shape[1]):
        left_N = q_ND.sum(-1) > 0
        # A row that is used up draws what is thrown away.
        weights_ND = torch.where(left_N[:, None], q_ND, torch.ones_like(q_ND))
        tokens.append(sample(weights_ND, uniforms_NC[:, c]))
        real.append(left_N)
        if not replacement:
            q_ND = q_ND.scatter(1, tokens[-1][:, None], 0.0)
    return torch.stack(tokens, 1), torch.stack(real, 1)


class _Growth:
    """One tree of an EAGLE or MTP drafter.

    Row t of the drafter reads token t + 1, so its cache holds the root's row already, and a node of
    depth d stands at position length + d - 1.
    """

    def __init__(
        self,
        drafter: Eagle3,
        state: Eagle3State,
        spec: TreeSpec,
        sampling: Sampling,
        uniforms_BM: Tensor,
        seen_BV: Tensor | None,
    ) -> None:
        self.drafter, self.cache, self.spec, self.sampling = drafter, state.cache, spec, sampling
        self.drawn = spec.siblings != "top" and sampling.temperature > 0
        self.uniforms_BM = uniforms_BM
        self.num_laws = 2 if sampling.keep_laws else int(self.drawn)
        num_rows = self.cache.batch_size
        self.hidden_BFH = state.last_hidden_BH[:, None]
        self.seen_BFD = None if seen_BV is None else seen_BV[:, None, drafter.draft_ids_D]
        self.score_BF = self.hidden_BFH.new_zeros(num_rows, 1, dtype=torch.float32)
        self.node_BF = self.cache.lengths_B.new_zeros(num_rows, 1)  # in the tree; the root is 0
        self.real_BF = torch.ones_like(self.node_BF, dtype=torch.bool)
        self.depths_BP = self.cache.lengths_B.new_zeros(num_rows, 0)
        self.sees_BFP = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=self.node_BF.device)
        self.laws: list[tuple[Tensor, list[Tensor]]] = []  # nodes [B, F], distributions [B, F, D]

    @torch.no_grad()
    def grown(self, root_B: Tensor, num_levels: int) -> Grown:
        tokens, parents, depths = [root_B[:, None]], [self.node_BF], [self.node_BF]
        scores, real = [], [self.real_BF]
        num_nodes = 1
        for level in range(num_levels):
            draft_BN, score_BN, real_BN = self.expand(level, num_nodes)
            C = draft_BN.shape[1] // self.node_BF.shape[1]
            tokens.append(self.drafter.draft_ids_D[draft_BN])
            parents.append(self.node_BF.repeat_interleave(C, 1))
            scores.append(score_BN)
            real.append(real_BN)
            depths.append(torch.full_like(draft_BN, level + 1))
            if level + 1 < num_levels:
                self.real_BF = real_BN
                self.go_on(draft_BN, score_BN, C, num_nodes, level)
            num_nodes += draft_BN.shape[1]
        full_B = torch.full_like(root_B, num_nodes)
        tree = Tree(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(depths, 1), full_B)
        if isinstance(self.spec, DynamicTree):
            kept_BP, num_B = _likeliest(torch.cat(scores, 1), self.spec.num_nodes)
        else:
            kept_BP, num_B = _existing(torch.cat(real, 1))
        laws = [self.at_nodes(i, num_nodes, kept_BP) for i in range(self.num_laws)]
        uniforms_BP = torch.zeros_like(kept_BP, dtype=self.uniforms_BM.dtype)
        if self.drawn:
            uniforms_BP = pad(self.uniforms_BM[:, : num_nodes - 1], (1, 0)).gather(1, kept_BP)
        return Grown(
            select_nodes(tree, kept_BP, num_B),
            laws[0] if self.drawn else None,
            uniforms_BP,
            DraftLaws(*laws) if self.num_laws == 2 else None,
        )

    def at_nodes(self, which: int, num_nodes: int, kept_BP: Tensor) -> Tensor:
        """The distributions of all levels at the nodes that are kept, over the target's tokens."""
        rows_B1 = self.cache.rows_B[:, None]
        first_BFD = self.laws[0][1][which]
        law_BMD = first_BFD.new_zeros(first_BFD.shape[0], num_nodes, first_BFD.shape[-1])
        for node_BF, laws in self.laws:
            law_BMD[rows_B1, node_BF] = laws[which]
        law_BPV = first_BFD.new_zeros(*kept_BP.shape, self.drafter.config.vocab_size)
        return law_BPV.index_copy_(2, self.drafter.draft_ids_D, law_BMD[rows_B1, kept_BP])

    def expand(self, level: int, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """The next level's draft ids, scores (log-probability from the root), and which exist.

        The likeliest tokens come best first and all exist. Of drawn ones the order is that of the
        draws, and the score 0.
        """
        spec, drafter = self.spec, self.drafter
        width = spec.children[level] if isinstance(spec, FixedTree) else spec.top_k
        logits_BFD = drafter.head_logits(self.hidden_BFH).float()
        law_BFD = self.keep_laws(logits_BFD)
        if self.drawn:
            assert law_BFD is not None
            shape = (*self.node_BF.shape, width)
            uniforms_BN = self.uniforms_BM[:, num_nodes - 1 :][:, : shape[1] * width]
            replacement = spec.siblings == "with_replacement"
            draft_XC, real_XC = draw_siblings(
                law_BFD.flatten(0, 1), uniforms_BN.reshape(-1, width), replacement
            )
            real_BFC = real_XC.view(shape) & self.real_BF[..., None]
            draft_BN = draft_XC.view(shape).flatten(1)
            return draft_BN, self.score_BF.new_zeros(draft_BN.shape), real_BFC.flatten(1)
        logits_BFD = self.sampling.penalised(logits_BFD, self.seen_BFD)
        best = logits_BFD.log_softmax(-1).topk(min(width, logits_BFD.shape[-1]), -1)
        score_BN = (self.score_BF[..., None] + best.values).flatten(1)
        draft_BN = best.indices.flatten(1)
        return draft_BN, score_BN, torch.ones_like(draft_BN, dtype=torch.bool)

    def keep_laws(self, logits_BFD: Tensor) -> Tensor | None:
        """The final distributions of the level, where they are needed."""
        if not self.num_laws:
            return None
        logits_XD, shape = logits_BFD.flatten(0, 1), logits_BFD.shape
        seen_XD = None if self.seen_BFD is None else self.seen_BFD.flatten(0, 1)
        laws = [self.sampling.law(logits_XD, seen_XD, "drafter logits").view(shape)]
        if self.num_laws == 2:
            laws.append(self.sampling.unfiltered(logits_XD, seen_XD).view(shape))
        self.laws.append((self.node_BF, laws))
        return laws[0]

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


def _likeliest(scores_BM: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """The root and the guesses with the best scores: their indices, ascending; how many.

    A child's is no better than its parent's, which stands before it, so with a stable order no
    node is kept without its parent.
    """
    order_BM = scores_BM.sort(dim=-1, descending=True, stable=True).indices
    kept_BP = pad(order_BM[:, :num_nodes].sort(-1).values + 1, (1, 0))
    return kept_BP, torch.full_like(kept_BP[:, 0], kept_BP.shape[1])


def _existing(real_BM: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes that exist, ascending, then padding; how many (the root included)."""
    num_B = real_BM.sum(-1)
    order_BM = real_BM.long().sort(dim=-1, descending=True, stable=True).indices
    return order_BM[:, : int(num_B.max())], num_B
