"""One drafter, one target, one loss: what a training step computes, with its sums.

Dimension letters: B rows, S positions, N supervised (position, step) pairs, D draft vocabulary,
H width, G rollout steps.

The drafter's rollout gives a head input for every row and step. Row t of step k predicts token
t+2+k from the target's distribution at position t+1+k; it is supervised when tokens t+1 .. t+2+k
all belong to the assistant. (Row t of step 0 therefore starts at the first token of an answer that
a drafter can ever be asked for: the one before it comes from the target's prefill.)
"""

import torch
from torch import Tensor, nn

from data.batch import Batch
from data.target import Target
from data.vocab import DraftVocab
from drafters.eagle3 import Eagle3
from recipes.schema import LossSection
from train.losses import LOSSES, LossOptions, linear_loss


def supervised_pairs(mask_BS: Tensor, num_steps: int) -> list[Tensor]:
    """For each rollout step k the flat row indices b * S + t that are supervised (int64)."""
    S = mask_BS.shape[1]
    valid_BS = torch.zeros_like(mask_BS)
    valid_BS[:, : S - 1] = mask_BS[:, 1:]
    pairs = []
    for k in range(num_steps):
        shifted_BS = torch.zeros_like(mask_BS)
        if k + 2 < S:
            shifted_BS[:, : S - 2 - k] = mask_BS[:, 2 + k :]
        valid_BS = valid_BS & shifted_BS
        pairs.append(valid_BS.flatten().nonzero()[:, 0])
    return pairs


class Distiller(nn.Module):
    """The trained module: its forward pass is the whole loss, so that wrappers see one call.

    The target stays outside (it is not a submodule): nothing of it is trained, moved or saved.
    """

    def __init__(self, drafter: Eagle3, loss: LossSection, vocab: DraftVocab) -> None:
        super().__init__()
        self.drafter = drafter
        self.loss = loss
        self.options = LossOptions(
            renormalize=loss.renormalize, lk_scale=loss.lk_scale, lk_decay=loss.lk_decay
        )
        self.register_buffer("draft_ids_V", vocab.draft_ids_V, persistent=False)
        self._target: list[Target] = []

    def use_target(self, target: Target) -> None:
        """Lend the frozen target: its embedding to the drafter, its head to the loss."""
        self.drafter.use_embeddings(target.embed_weight_VH)
        self._target = [target]
        self._head_rows = target.head_rows(self.drafter.draft_ids_D)

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum over supervised pairs of step_decay^k * loss, and sums [G] of what is reported.

        The batch carries states (see data.batch). Divide the loss by the number of pairs of step 0
        of the whole optimizer step, see `count_pairs`.
        """
        assert batch.aux_BSF is not None, "states are attached before the step"
        steps = self.loss.num_steps
        ids_BS = batch.ids_BS
        pairs = supervised_pairs(batch.mask_BS, steps)
        heads = self.drafter.rollout(ids_BS, batch.aux_BSF, steps)
        groups_N = torch.cat([torch.full_like(p, k) for k, p in enumerate(pairs)])
        # Pairs are ordered by the target position they learn from, so that each chunk asks for few
        # distinct target distributions.
        position_N = torch.cat(pairs) + 1 + groups_N
        hidden_NH = torch.cat([h.flatten(0, 1)[p] for h, p in zip(heads, pairs, strict=True)])
        position_N, order_N = position_N.sort(stable=True)
        hidden_NH, groups_N = hidden_NH[order_N], groups_N[order_N]
        labels_N = self.get_buffer("draft_ids_V")[ids_BS.flatten()[position_N + 1]]
        if self.options.renormalize:
            hidden_NH, position_N, groups_N, labels_N = self._inside(
                batch, hidden_NH, position_N, groups_N, labels_N
            )
        weights_N = self.loss.step_decay ** groups_N.to(hidden_NH.dtype)

        def teacher(rows: slice) -> tuple[Tensor, Tensor]:
            return self._teacher(batch, position_N[rows]), labels_N[rows]

        return linear_loss(
            hidden_NH,
            self.drafter.lm_head.weight,
            teacher,
            LOSSES[self.loss.name],
            self.options,
            self.loss.chunk_size,
            weights_N,
            groups_N,
            steps,
        )

    def _teacher(self, batch: Batch, position_C: Tensor) -> Tensor:
        """The target's probabilities of the draft vocabulary (missing mass kept) at positions."""
        assert batch.hidden_BSH is not None and batch.lse_BS is not None
        target = self._target[0]
        unique_U, inverse_C = position_C.unique_consecutive(return_inverse=True)
        hidden_UH = batch.hidden_BSH.flatten(0, 1)[unique_U].to(target.dtype)
        logits_UD = target.logits(hidden_UH, self._head_rows)
        lse_U1 = batch.lse_BS.flatten()[unique_U][:, None]
        return (logits_UD - lse_U1).exp_()[inverse_C]

    def _inside(
        self,
        batch: Batch,
        hidden_NH: Tensor,
        position_N: Tensor,
        groups_N: Tensor,
        labels_N: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """EAGLE-3 leaves out positions whose most likely token the drafter cannot propose."""
        assert batch.argmax_BS is not None
        argmax_N = batch.argmax_BS.flatten()[position_N].long()
        keep_N = self.get_buffer("draft_ids_V")[argmax_N] >= 0
        return hidden_NH[keep_N], position_N[keep_N], groups_N[keep_N], labels_N[keep_N]


def count_pairs(mask_BS: Tensor) -> int:
    """Supervised pairs of step 0: the denominator of the loss."""
    return len(supervised_pairs(mask_BS, 1)[0])
