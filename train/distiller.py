"""One drafter, one target, one loss: what a training step computes, with its sums.

Dimension letters: B rows, S positions, N supervised slots, C slots of a chunk, U distinct positions
of one, D draft vocabulary, W width of what the head reads, G depths.

The drafter gives a head input for every supervised slot (drafters.base.Slots): anchor s and depth k
guess token s+1+k, whose distribution the target gives at position s+k.
"""

import torch
from torch import Tensor, nn

from data.batch import Batch
from data.target import HeadRows, Target
from data.target_config import resolve_dtype
from data.vocab import DraftVocab
from drafters.anchors import anchors_of
from drafters.base import Slots, TrainedDrafter
from drafters.layers import MLP
from drafters.p_eagle import rolls_out
from drafters.small_lm import SmallLM
from recipes.schema import LossSection
from recipes.train_section import TrainSection
from train.linear_loss import Teacher, head_pass, linear_loss
from train.losses import LOSSES, LossOptions
from train.weighting import by_draft, d_pace_weights, end_to_end_weights


def autocasts(section: TrainSection, device: torch.device) -> bool:
    """Whether the drafter's products are bf16 in training (`train.mixed_precision`)."""
    kind = section.mixed_precision
    return kind == "bf16" or (kind == "auto" and resolve_dtype("auto", device) == torch.bfloat16)


class Distiller(nn.Module):
    """The trained module: its forward pass is the whole loss, so that wrappers see one call.

    The target stays outside (it is not a submodule): nothing of it is trained, moved or saved.
    """

    def __init__(self, drafter: TrainedDrafter, loss: LossSection, vocab: DraftVocab) -> None:
        super().__init__()
        self.drafter = drafter
        self.loss = loss
        self.options = LossOptions(
            renormalize=loss.renormalize,
            lk_scale=loss.lk_scale,
            lk_decay=loss.lk_decay,
            ce_share=loss.ce_share,
        )
        self.block_size: int | None = None  # of train.linear_loss
        self.register_buffer("draft_ids_V", vocab.draft_ids_V, persistent=False)
        self._target: list[Target] = []
        self._head_rows: HeadRows | None = None

    def use_target(self, target: Target) -> None:
        """Lend the frozen target: its embedding to the drafter, its head to the loss."""
        self.drafter.use_target(target)
        self._target = [target]
        ids_D = self.drafter.draft_ids_D
        whole = len(ids_D) == target.vocab_size  # then a copy of the head would be waste
        self._head_rows = None if whole else target.head_rows(ids_D)

    def recompute_activations(self) -> None:
        """Keep less of the drafter's forward pass and run it again in the backward pass.

        EAGLE-1, EAGLE-3 and MTP run whole rollout steps again, language models their layers, the
        others their MLPs. Medusa has none of these (recipes refuse it).
        """
        drafter = self.drafter
        if isinstance(drafter, SmallLM):
            drafter.lm.gradient_checkpointing_enable({"use_reentrant": False})
            return
        if rolls_out(drafter):
            drafter.recompute = True
            return
        for module in drafter.modules():
            if isinstance(module, MLP):
                module.recompute = True

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted sum of the loss over supervised slots, and sums [G] of what is reported.

        The batch carries states (see data.batch). Divide the loss by the number of slots of depth
        0 of the whole optimizer step, see `count_slots`.
        """
        loss, stats, slots, alpha_N = self.judge(batch)
        extra = self.drafter.extra_loss(batch, slots, alpha_N)
        return (loss if extra is None else loss + extra), stats

    def judge(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor], Slots, Tensor]:
        """The loss of the guesses, its sums, the slots and alpha [N] of each, detached.

        Alpha is 0 where renormalisation leaves a slot out.
        """
        num_depths = self.loss.num_steps
        slots = self.drafter.slots(batch, num_depths)
        # In the order of the target positions that they learn from, so that each chunk asks for
        # few distinct target distributions.
        position_N, order_N = (slots.anchor_N + slots.depth_N).sort(stable=True)
        head_NW, depth_N = slots.head_NW[order_N], slots.depth_N[order_N]
        labels_N = self.get_buffer("draft_ids_V")[batch.ids_BS.flatten()[position_N + 1]]
        if self.options.renormalize:
            keep_N = self._inside(batch, position_N)
            head_NW, depth_N = head_NW[keep_N], depth_N[keep_N]
            position_N, labels_N, order_N = position_N[keep_N], labels_N[keep_N], order_N[keep_N]
        alpha_N = torch.zeros(len(slots.anchor_N), device=head_NW.device)
        heads = self.drafter.head_weights()
        parts: list[slice | Tensor] = [slice(None)]
        if len(heads) > 1:
            parts = [depth_N == k for k in range(len(heads))]
        teachers = [self._teacher(batch, position_N[part], labels_N[part]) for part in parts]
        weights_N = self.loss.step_decay ** depth_N.to(head_NW.dtype)
        if self.loss.name == "e2e_tv" or self.loss.position_weights == "d_pace":
            alphas_N, q_N = torch.zeros_like(weights_N), torch.zeros_like(weights_N)
            for head, part, teacher in zip(heads, parts, teachers, strict=True):
                passed = head_pass(head_NW[part], head, teacher, self.loss.chunk_size)
                alphas_N[part], q_N[part] = passed[0].to(q_N), passed[1].to(q_N)
            weights_N = self._weights(alphas_N, q_N, position_N - depth_N, depth_N)

        loss, stats = head_NW.new_zeros(()), dict[str, Tensor]()
        for head, part, teacher in zip(heads, parts, teachers, strict=True):
            part_loss, part_stats, part_alpha_N = linear_loss(
                head_NW[part],
                head,
                teacher,
                LOSSES[self.loss.name],
                self.options,
                self.loss.chunk_size,
                weights_N[part],
                depth_N[part],
                num_depths,
                self.block_size,
            )
            loss = loss + part_loss
            stats = {k: stats.get(k, 0) + v for k, v in part_stats.items()}
            alpha_N[order_N[part]] = part_alpha_N
        return loss, stats, slots, alpha_N

    def _weights(self, alpha_N: Tensor, q_N: Tensor, anchor_N: Tensor, depth_N: Tensor) -> Tensor:
        """Weights by what a slot does to the accepted length of its draft (train.weighting)."""
        num_depths = self.loss.num_steps
        _, place_N = anchor_N.unique(return_inverse=True)
        if self.loss.name == "e2e_tv":
            table_AG = end_to_end_weights(by_draft(alpha_N, anchor_N, depth_N, num_depths))
        else:
            known_AG = by_draft(torch.ones_like(q_N), anchor_N, depth_N, num_depths) > 0
            table_AG = d_pace_weights(by_draft(q_N, anchor_N, depth_N, num_depths), known_AG)
        return table_AG[place_N, depth_N]

    def _teacher(self, batch: Batch, position_N: Tensor, labels_N: Tensor) -> Teacher:
        """The target's probabilities of the draft vocabulary (missing mass kept) at positions."""
        assert batch.hidden_BSH is not None and batch.lse_BS is not None
        target, hidden_BSH, lse_BS = self._target[0], batch.hidden_BSH, batch.lse_BS
        unique_U, inverse_N = position_N.unique_consecutive(return_inverse=True)
        hidden_SH, lse_S = hidden_BSH.flatten(0, 1), lse_BS.flatten()
        # Where each chunk's distinct positions begin and end: asked of the device once, not once a
        # chunk.
        size = self.loss.chunk_size
        ends = [min(start + size, len(position_N)) - 1 for start in range(0, len(position_N), size)]
        firsts, lasts = inverse_N[::size].tolist(), inverse_N[ends].tolist()

        def teacher(rows: slice) -> tuple[Tensor, Tensor]:
            chunk = rows.start // size
            assert rows.start % size == 0, "chunks are those of the loss"
            unique_C = unique_U[firsts[chunk] : lasts[chunk] + 1]
            logits_UD = target.logits(hidden_SH[unique_C].to(target.dtype), self._head_rows)
            p_UD = logits_UD.sub_(lse_S[unique_C][:, None]).exp_()
            return p_UD.index_select(0, inverse_N[rows] - firsts[chunk]), labels_N[rows]

        return teacher

    def _inside(self, batch: Batch, position_N: Tensor) -> Tensor:
        """EAGLE-3 leaves out positions whose most likely token the drafter cannot propose."""
        assert batch.argmax_BS is not None
        argmax_N = batch.argmax_BS.flatten()[position_N].long()
        return self.get_buffer("draft_ids_V")[argmax_N] >= 0


def count_slots(batch: Batch) -> int:
    """Supervised slots of depth 0, one an anchor: the denominator of the loss."""
    return len(anchors_of(batch))
