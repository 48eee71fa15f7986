"""Speculative decoding with draft trees: grow, verify all branches in one pass, keep one path.

The loop of eval/decode.py with another round: the target runs once over the last committed token
and all guesses, each of which attends to what is committed and to its own ancestors; the accepted
path then moves up in the cache, and nothing is computed twice.

Dimension letters: B rows, P nodes (the root and its guesses), A nodes of a path, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import isnan

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    first_choices,
    seen_at_nodes,
)
from eval.tree_inputs import Grown, TreeInputs, TreeVerifier, guessed_from, tree_rule
from eval.verify_tree import TreeVerdict, chances_BA


@torch.inference_mode()
def decode_tree(
    target: Target,
    drafter: DecodingDrafter,
    prompts: list[list[int]],
    settings: DecodeSettings,
    spec: TreeSpec,
    indices: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
    verify: TreeVerifier = tree_rule,
) -> tuple[list[Decoded], Seconds]:
    """Answer a batch of prompts (token ids) as eval.decode.decode does, drafting trees.

    A round's `proposed` is the depth of its tree, `drafted_ids` one branch of it: the accepted
    path and, behind it, the drafter's first choices. `alpha` is the chance that one of the guesses
    at a position is accepted, given what they are.

    Args:
        settings: num_draft, verification and verifier have no effect here.
        spec: the shape of the trees, and how siblings are chosen.
        indices, on_tokens: as in decode.
        verify: takes the place of the right rule.

    Raises:
        UserError: a tree that this drafter cannot propose, or siblings that are drawn where drafts
            are not.
    """
    check_spec(drafter, spec, settings.sampling)
    settings = replace(settings, num_draft=max(spec.num_guesses, spec.num_drafter_places))
    run = _TreeRun(target, drafter, prompts, settings, indices, on_tokens)
    run.spec, run.verify = spec, verify
    return run.finish(prompts)


class _TreeRun(Run):
    """One decode that drafts trees."""

    spec: TreeSpec
    verify: TreeVerifier

    def round(self) -> None:
        """Draft, verify, commit; one pass of the target."""
        most, clock, seconds = self.settings.num_draft, self.clock, self.seconds
        draws = self.uniforms(3 * most + 2)  # laid out as in a round of chains
        seconds.bookkeeping += clock.lap()
        grown = self.grown(draws[:, :most])
        tree = grown.tree
        P = tree.tokens_BP.shape[1]
        seconds.draft += clock.lap()

        # Verify: one pass of the target over the root and all guesses.
        nodes = attention_nodes(tree)
        states = self.target.forward(tree.tokens_BP, self.cache, self.aux_layers, nodes)
        logits_BPV = self.target.logits(states.hidden_BSH)
        seconds.verify += clock.lap()
        p_BPV = self.tree_law(logits_BPV, tree)
        x = TreeInputs(
            p_BPV=p_BPV,
            grown=grown,
            replacement=self.spec.siblings == "with_replacement",
            accept_uniforms_BP=pad(draws[:, most : most + P - 1], (1, 0)),  # none for the root
            final_uniforms_B=draws[:, 2 * most],
        )
        verdict = self.verify(x)
        seconds.sampling += clock.lap()

        # Commit what belongs to the answer, as in a round of chains; then keep its path.
        self.last_B = verdict.next_token_B
        emitted_BA, path_BA, _ = x.emitted(verdict)
        committed = self.commit_tree(emitted_BA, tree, verdict.num_accepted_B)
        committed_B = torch.tensor(committed, device=self.device)
        self.cache.keep_path(path_BA, committed_B)
        self.mark(emitted_BA, committed_B)
        seconds.bookkeeping += clock.lap()
        if self.drafter:
            aux_BAF = states.aux_BSF[self.rows_B[:, None], path_BA]
            self.drafter.observe(self.state, emitted_BA, aux_BAF, committed_B)
        seconds.draft += clock.lap()

        uniforms_BA = draws[:, 2 * most + 1 :][:, : path_BA.shape[1]]
        self.record(x, verdict, emitted_BA, committed)
        if self.sampling.temperature > 0:
            self.record_pit(x, path_BA, emitted_BA, uniforms_BA, committed)
        self.tell(committed)
        clock.lap()

    def grown(self, uniforms_BM: Tensor) -> Grown:
        """Guesses, none deeper than the answer of its row has room for."""
        cap = self.settings.max_new_tokens - 1
        room = [0 if row.finish else cap - len(row.ids) for row in self.rows]
        num_levels = min(self.spec.depth, max(room))
        if self.drafter is None or num_levels == 0:
            none_B = torch.zeros_like(self.last_B)
            root = chain(self.last_B, none_B[:, None][:, :0], none_B)
            return Grown(root, None, torch.zeros_like(root.tokens_BP, dtype=torch.float32), None)
        grown = grow(
            self.drafter,
            self.state,
            self.last_B,
            self.spec,
            num_levels,
            self.sampling,
            uniforms_BM,
            self.seen_BV,
        )
        return grown.cut(torch.tensor(room, device=self.device))

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
        self, x: TreeInputs, verdict: TreeVerdict, emitted_BA: Tensor, committed: list[int]
    ) -> None:
        """What is measured and shown, not needed to decode: alpha, and one branch with p and q."""
        tree, q_BPV, path_BA = x.tree, x.grown.q_BPV, verdict.path_BA
        rows_B1, tokens_BP = self.rows_B[:, None], tree.tokens_BP.masked_fill(~tree.live_BP, 0)
        p_x_BP = x.p_BPV[rows_B1, tree.parents_BP, tokens_BP]
        q_x_BP = torch.ones_like(p_x_BP)
        if q_BPV is not None:
            q_x_BP = q_BPV[rows_B1, tree.parents_BP, tokens_BP]
        alpha_BA = chances_BA(x.p_BPV, tree, q_BPV, path_BA, x.replacement)
        lists = zip(
            self.rows,
            committed,
            alpha_BA.tolist(),
            x.p_BPV[rows_B1, path_BA].gather(-1, emitted_BA[..., None])[..., 0].tolist(),
            p_x_BP.tolist(),
            q_x_BP.tolist(),
            tree.tokens_BP.tolist(),
            first_choices(tree, path_BA, verdict.num_accepted_B),
            strict=True,
        )
        for row, num, alphas, emitted, p_x, q_x, tokens, branch in lists:
            if num:
                judged = [alpha for alpha in alphas[:num] if not isnan(alpha)]
                row.alpha_sum += sum(judged)
                row.alpha_count += len(judged)
                last = row.rounds[-1]
                last.drafted_ids = [tokens[n] for n in branch]
                last.p, last.q = [p_x[n] for n in branch], [q_x[n] for n in branch]
                last.next_p = emitted[num - 1]

    def record_pit(
        self,
        x: TreeInputs,
        path_BA: Tensor,
        emitted_BA: Tensor,
        uniforms_BA: Tensor,
        committed: list[int],
    ) -> None:
        """Transform the tokens that this round committed; each position decides for itself."""
        committed_B = torch.tensor(committed, device=self.device)
        kept_BA = torch.arange(path_BA.shape[1], device=self.device) < committed_B[:, None]
        rows_N, nodes_N = self.rows_B[kept_BA.nonzero()[:, 0]], path_BA[kept_BA]
        columns_N3 = pit_columns(
            x.p_BPV[rows_N, nodes_N],
            emitted_BA[kept_BA],
            uniforms_BA[kept_BA],
            guessed_from(x.p_BPV, x.grown)[rows_N, nodes_N],
        )
        for row, values in zip(self.rows, columns_N3.split(committed), strict=True):
            row.pit += values.tolist()
