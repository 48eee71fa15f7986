"""Speculative decoding with draft trees: grow, verify all branches in one pass, keep one path.

The loop of eval/decode.py with another round: the target runs once over the last committed token
and all guesses, each of which attends to what is committed and to its own ancestors; the accepted
path then moves up in the cache, and nothing is computed twice.

Dimension letters: B rows, P nodes (the root and its guesses), A nodes of a path, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from data.target import Target
from drafters.base import DecodingDrafter
from eval.decode import OnTokens, Run
from eval.grow_tree import check_spec, grow
from eval.lossless import pit_columns
from eval.rounds import Decoded, DecodeSettings, Round, Seconds
from eval.stopping import cut
from eval.tree import (
    Tree,
    TreeSpec,
    attention_nodes,
    chain,
    cut_depth,
    first_choices,
    seen_at_nodes,
)
from eval.verify_tree import TreeVerdict, verify_tree


@torch.inference_mode()
def decode_tree(
    target: Target,
    drafter: DecodingDrafter,
    prompts: list[list[int]],
    settings: DecodeSettings,
    spec: TreeSpec,
    indices: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
) -> tuple[list[Decoded], Seconds]:
    """Answer a batch of prompts (token ids) as eval.decode.decode does, drafting trees.

    A round's `proposed` is the depth of its tree, `drafted_ids` one branch of it: the accepted
    path and, behind it, the drafter's first choices. `alpha` is the chance that one of the guesses
    at a position is accepted.

    Args:
        settings: num_draft, verification and verifier have no effect here.
        spec: the shape of the trees.
        indices, on_tokens: as in decode.

    Raises:
        UserError: a tree that this drafter cannot propose, or drawn guesses.
    """
    check_spec(drafter, spec, settings.sampling)
    settings = replace(settings, num_draft=max(spec.num_guesses, spec.num_drafter_places))
    run = _TreeRun(target, drafter, prompts, settings, indices, on_tokens)
    run.spec = spec
    return run.finish(prompts)


class _TreeRun(Run):
    """One decode that drafts trees."""

    spec: TreeSpec

    def round(self) -> None:
        """Draft, verify, commit; one pass of the target."""
        most, clock, seconds = self.settings.num_draft, self.clock, self.seconds
        draws = self.uniforms(3 * most + 2)  # laid out as in a round of chains
        seconds.bookkeeping += clock.lap()
        tree = self.tree()
        P = tree.tokens_BP.shape[1]
        seconds.draft += clock.lap()

        # Verify: one pass of the target over the root and all guesses.
        nodes = attention_nodes(tree)
        states = self.target.forward(tree.tokens_BP, self.cache, self.aux_layers, nodes)
        logits_BPV = self.target.logits(states.hidden_BSH)
        seconds.verify += clock.lap()
        p_BPV = self.tree_law(logits_BPV, tree)
        accept_BP = draws[:, most - 1 : most - 1 + P]  # a column for the root, which needs none
        verdict = verify_tree(p_BPV, tree, accept_BP, draws[:, 2 * most])
        seconds.sampling += clock.lap()

        # Commit what belongs to the answer, as in a round of chains; then keep its path.
        self.last_B = verdict.next_token_B
        path_BA, accepted_B = verdict.path_BA, verdict.num_accepted_B
        emitted_BA = tree.tokens_BP.gather(1, path_BA).roll(-1, 1)
        emitted_BA[self.rows_B, accepted_B] = self.last_B
        committed = self.commit_tree(emitted_BA, tree, accepted_B)
        committed_B = torch.tensor(committed, device=self.device)
        self.cache.keep_path(path_BA, committed_B)
        self.mark(emitted_BA, committed_B)
        seconds.bookkeeping += clock.lap()
        if self.drafter:
            aux_BAF = states.aux_BSF[self.rows_B[:, None], path_BA]
            self.drafter.observe(self.state, emitted_BA, aux_BAF, committed_B)
        seconds.draft += clock.lap()

        uniforms_BA = draws[:, 2 * most + 1 :][:, : path_BA.shape[1]]
        self.record(tree, p_BPV, verdict, emitted_BA, committed)
        if self.sampling.temperature > 0:
            self.record_pit(tree, p_BPV, path_BA, emitted_BA, uniforms_BA, committed)
        self.tell(committed)
        clock.lap()

    def tree(self) -> Tree:
        """Guesses, none deeper than the answer of its row has room for."""
        cap = self.settings.max_new_tokens - 1
        room = [0 if row.finish else cap - len(row.ids) for row in self.rows]
        num_levels = min(self.spec.depth, max(room))
        if self.drafter is None or num_levels == 0:
            none_B = torch.zeros_like(self.last_B)
            return chain(self.last_B, none_B[:, None][:, :0], none_B)
        tree = grow(
            self.drafter,
            self.state,
            self.last_B,
            self.spec,
            num_levels,
            self.sampling,
            self.seen_BV,
        )
        return cut_depth(tree, torch.tensor(room, device=self.device))

    def tree_law(self, logits_BPV: Tensor, tree: Tree) -> Tensor:
        """The target's final distributions at every node."""
        seen_NV = None
        if self.seen_BV is not None:
            seen_NV = seen_at_nodes(tree, self.seen_BV).flatten(0, 1)
        where = f"target logits, round {max(len(row.rounds) for row in self.rows) + 1}"
        p_NV = self.sampling.law(logits_BPV.flatten(0, 1), seen_NV, where)
        return p_NV.view(logits_BPV.shape)

    def commit_tree(self, emitted_BA: Tensor, tree: Tree, accepted_B: Tensor) -> list[int]:
        """Add one round to every row that is not finished; how many tokens each row gains."""
        depth_B = tree.depths_BP.masked_fill(~tree.live_BP, 0).amax(-1)
        lists = zip(
            self.rows, emitted_BA.tolist(), accepted_B.tolist(), depth_B.tolist(), strict=True
        )
        committed = []
        for row, emitted, accepted, depth in lists:
            if row.finish:
                committed.append(0)
                continue
            kept = cut(row, emitted[: accepted + 1], self.settings, self.target)
            row.ids += kept
            row.rounds.append(Round(depth, min(accepted, len(kept)), len(kept), [], accepted))
            committed.append(len(kept))
        return committed

    def record(
        self,
        tree: Tree,
        p_BPV: Tensor,
        verdict: TreeVerdict,
        emitted_BA: Tensor,
        committed: list[int],
    ) -> None:
        """What is measured and shown, not needed to decode: alpha, and one branch with its p."""
        rows_B1, live_BP, path_BA = self.rows_B[:, None], tree.live_BP, verdict.path_BA
        p_x_BP = p_BPV[rows_B1, tree.parents_BP, tree.tokens_BP].masked_fill(~live_BP, 0.0)
        children_BP = torch.zeros_like(p_x_BP).scatter_add(1, tree.parents_BP, live_BP.float())
        alpha_BP = torch.zeros_like(p_x_BP).scatter_add(1, tree.parents_BP, p_x_BP)
        lists = zip(
            self.rows,
            committed,
            alpha_BP.gather(1, path_BA).tolist(),
            (children_BP.gather(1, path_BA) > 0).tolist(),
            p_BPV[rows_B1, path_BA].gather(-1, emitted_BA[..., None])[..., 0].tolist(),
            p_x_BP.tolist(),
            tree.tokens_BP.tolist(),
            first_choices(tree, path_BA, verdict.num_accepted_B),
            strict=True,
        )
        for row, num, alphas, judged, emitted, p_x, tokens, branch in lists:
            if num:
                row.alpha_sum += sum(a for a, j in zip(alphas[:num], judged, strict=False) if j)
                row.alpha_count += sum(judged[:num])
                last = row.rounds[-1]
                last.drafted_ids = [tokens[n] for n in branch]
                last.p, last.q = [p_x[n] for n in branch], [1.0] * len(branch)
                last.next_p = emitted[num - 1]

    def record_pit(
        self,
        tree: Tree,
        p_BPV: Tensor,
        path_BA: Tensor,
        emitted_BA: Tensor,
        uniforms_BA: Tensor,
        committed: list[int],
    ) -> None:
        """Transform the tokens that this round committed; each position decides for itself."""
        rows_B1 = self.rows_B[:, None]
        guessed_BPV = torch.zeros_like(p_BPV)
        where = rows_B1.expand_as(tree.parents_BP), tree.parents_BP, tree.tokens_BP
        guessed_BPV.index_put_(where, tree.live_BP.to(p_BPV.dtype), accumulate=True)
        committed_B = torch.tensor(committed, device=self.device)
        kept_BA = torch.arange(path_BA.shape[1], device=self.device) < committed_B[:, None]
        columns_N3 = pit_columns(
            p_BPV[rows_B1, path_BA][kept_BA],
            emitted_BA[kept_BA],
            uniforms_BA[kept_BA],
            guessed_BPV[rows_B1, path_BA][kept_BA].clamp(max=1),
        )
        for row, values in zip(self.rows, columns_N3.split(committed), strict=True):
            row.pit += values.tolist()
