"""The drafter's head and a loss (train.losses) over positions, chunk by chunk.

Shape suffixes: N positions, C positions of a chunk or block, D draft vocabulary, H hidden.

No logits of [N, D] exist: the matrix products take a chunk of positions, and what is made of the
logits, on a CPU, a block of the chunk that stays in its cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafters.base import Head
from train.losses import OUTSIDE, LossFn, LossOptions, ce, renormalize

Teacher = Callable[[slice], tuple[Tensor, Tensor]]
"""rows -> (p_ND, labels_N) there: fp32 probabilities, not renormalised, and int64 labels."""

BLOCK_NUMBERS = 1 << 18  # logits whose loss is made at once on a CPU: they stay in its cache
STATS = ("num_positions", "loss_sum", "alpha_sum", "num_top1")


def linear_loss(
    hidden_NH: Tensor,
    weight: Head,
    teacher: Teacher,
    loss_fn: LossFn,
    options: LossOptions,
    chunk_size: int,
    weights_N: Tensor | None = None,
    groups_N: Tensor | None = None,
    num_groups: int = 1,
    block_size: int | None = None,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Sum of a loss over positions, with the drafter's head applied chunk by chunk.

    Logits, probabilities and their gradients exist for one chunk of positions at a time; both
    gradients are made in the forward pass and multiplied by the incoming scalar in the backward
    pass. Equals the loss on all logits.

    Args:
        hidden_NH: inputs of the head at the supervised positions only. N = 0 gives a loss of
            exactly 0 and zero gradients, so that every rank can call backward.
        weight: the head [D, H], or parts of it side by side. A part that needs no
            gradient gets none.
        teacher: the target's side of a chunk; called once a chunk, without gradients. It returns
            the probabilities *not* renormalised, so that alpha is the true one.
        loss_fn: one of LOSSES.
        options: see LossOptions.
        chunk_size: positions a chunk, at least 1. Peak memory is a few times chunk_size * D * 4
            bytes.
        weights_N: factor of each position's loss, 1 where absent. Metrics do not use it.
        block_size: positions of a chunk whose loss is made at once; None = what fits a processor's
            cache, elsewhere all of them.
        groups_N: int64 in 0..num_groups-1; metrics are summed by group (e.g. rollout steps).

    Returns:
        loss_sum: scalar (fp32; fp64 for fp64 inputs), differentiable once in hidden and weight.
        stats: detached fp64 [num_groups], sums over positions: num_positions; loss_sum (without
            weights); alpha_sum, of sum_v min(p, q) with the un-renormalised p; num_top1, positions
            where argmax q is the label.
        alpha_N: detached fp32, sum_v min(p, q) of every position.

    The matrix products run in autocast's dtype where autocast is on, else in the wider dtype of
    hidden and weight.
    """
    assert chunk_size >= 1, chunk_size
    parts = weight if isinstance(weight, tuple) else (weight,)
    device = hidden_NH.device.type
    if torch.is_autocast_enabled(device):
        matmul_dtype = torch.get_autocast_dtype(device)
    else:
        matmul_dtype = hidden_NH.dtype
        for part_DH in parts:
            matmul_dtype = torch.promote_types(matmul_dtype, part_DH.dtype)
    grad = torch.is_grad_enabled()
    if block_size is None and device == "cpu":
        block_size = max(1, BLOCK_NUMBERS // len(parts[0]))
    work = _Work(
        teacher=teacher,
        loss_fn=loss_fn,
        options=options,
        chunk_size=chunk_size,
        block_size=block_size or chunk_size,
        weights_N=weights_N,
        groups_N=groups_N,
        num_groups=num_groups,
        matmul_dtype=matmul_dtype,
        hidden_grad=grad and hidden_NH.requires_grad,
        weight_grads=tuple(grad and part_DH.requires_grad for part_DH in parts),
    )
    loss_sum, stats, alpha_N = _LinearLoss.apply(hidden_NH, work, *parts)
    return loss_sum, dict(zip(STATS, stats.unbind(), strict=True)), alpha_N


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Everything of linear_loss that is not a differentiable input."""

    teacher: Teacher
    loss_fn: LossFn
    options: LossOptions
    chunk_size: int
    block_size: int
    weights_N: Tensor | None
    groups_N: Tensor | None
    num_groups: int
    matmul_dtype: torch.dtype
    hidden_grad: bool
    weight_grads: tuple[bool, ...]


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, work: _Work, *parts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_positions = hidden_NH.shape[0]
        alpha_N = hidden_NH.new_zeros(num_positions, dtype=torch.float32)
        loss_dtype = torch.promote_types(work.matmul_dtype, torch.float32)
        heads = [part_DH.to(work.matmul_dtype) for part_DH in parts]
        widths = [part_DH.shape[1] for part_DH in parts]
        d_hidden_NH = torch.zeros_like(hidden_NH) if work.hidden_grad else None
        # The sum over chunks is kept in fp32 also where the products are bf16.
        d_parts = [
            torch.zeros_like(part_DH, dtype=loss_dtype) if wanted else None
            for part_DH, wanted in zip(parts, work.weight_grads, strict=True)
        ]
        stats = hidden_NH.new_zeros((len(STATS), work.num_groups), dtype=torch.float64)
        loss_sum = hidden_NH.new_zeros((), dtype=torch.float64)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for start in range(0, num_positions, work.chunk_size):
                rows = slice(start, min(start + work.chunk_size, num_positions))
                inputs = hidden_NH[rows].to(work.matmul_dtype).split(widths, dim=1)
                logits_CD = (inputs[0] @ heads[0].T).to(loss_dtype)
                for inputs_CH, head_DH in zip(inputs[1:], heads[1:], strict=True):
                    logits_CD += inputs_CH @ head_DH.T
                d_logits_CD, loss, sums_4C = _chunk(work, rows, logits_CD)
                loss_sum += loss
                alpha_N[rows] = sums_4C[2].float()
                if work.groups_N is None:
                    stats[:, 0] += sums_4C.sum(dim=1)
                else:
                    stats.index_add_(1, work.groups_N[rows], sums_4C)
                d_logits_CD = d_logits_CD.to(work.matmul_dtype)
                if d_hidden_NH is not None:
                    d_inputs = d_hidden_NH[rows].split(widths, dim=1)
                    for d_inputs_CH, head_DH in zip(d_inputs, heads, strict=True):
                        d_inputs_CH.copy_(d_logits_CD @ head_DH)
                for d_part_DH, inputs_CH in zip(d_parts, inputs, strict=True):
                    if d_part_DH is None:
                        continue
                    if d_part_DH.dtype == work.matmul_dtype:
                        d_part_DH.addmm_(d_logits_CD.T, inputs_CH)
                    else:
                        d_part_DH += d_logits_CD.T @ inputs_CH
        ctx.save_for_backward(
            d_hidden_NH,
            *(
                None if d_part_DH is None else d_part_DH.to(part_DH.dtype)
                for d_part_DH, part_DH in zip(d_parts, parts, strict=True)
            ),
        )
        ctx.mark_non_differentiable(stats, alpha_N)
        return loss_sum.to(loss_dtype), stats, alpha_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_loss: Tensor, _d_stats: Tensor, _d_alpha_N: Tensor
    ) -> tuple[Tensor | None, ...]:
        d_hidden_NH, *d_parts = (
            None if d is None else d * d_loss.to(d.dtype) for d in ctx.saved_tensors
        )
        return d_hidden_NH, None, *d_parts


def _chunk(work: _Work, rows: slice, logits_CD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the chunk's loss in its logits (in their place), the loss, STATS [4, C]."""
    p_CD, labels_C = work.teacher(rows)
    losses, sums = [], []
    for start in range(0, len(logits_CD), work.block_size):
        block = slice(start, start + work.block_size)
        weights_C = None if work.weights_N is None else work.weights_N[rows][block]
        loss, sums_4C = _block(work, logits_CD[block], p_CD[block], labels_C[block], weights_C)
        losses.append(loss)
        sums.append(sums_4C)
    return logits_CD, torch.stack(losses).sum(), torch.cat(sums, dim=1)


def _block(
    work: _Work, raw_CD: Tensor, p_CD: Tensor, labels_C: Tensor, weights_C: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The loss of some positions and their STATS [4, C]; the logits become their gradient."""
    with torch.enable_grad():
        logits_CD = raw_CD.detach().requires_grad_()
        loss_p_CD = renormalize(p_CD) if work.options.renormalize else p_CD
        losses_C = work.loss_fn(logits_CD, loss_p_CD, labels_C, work.options)
        if share := work.options.ce_share:
            hard_C = ce(logits_CD, loss_p_CD, labels_C, work.options)
            losses_C = share * hard_C + (1.0 - share) * losses_C
        loss = (losses_C if weights_C is None else losses_C * weights_C).sum()
    need_grad = work.hidden_grad or any(work.weight_grads)
    d_logits_CD = torch.autograd.grad(loss, logits_CD)[0] if need_grad else None
    picked_C = raw_CD.gather(1, labels_C.clamp(min=0)[:, None])[:, 0]
    top1_C = (picked_C == raw_CD.amax(dim=1)) & (labels_C != OUTSIDE)  # argmax is far slower
    alpha_C = torch.minimum(p_CD, raw_CD.softmax(dim=1)).sum(dim=1)
    ones_C = torch.ones_like(alpha_C)
    sums_4C = torch.stack([x.detach().double() for x in (ones_C, losses_C, alpha_C, top1_C)])
    if d_logits_CD is not None:
        raw_CD.copy_(d_logits_CD)
    return loss.detach().double(), sums_4C


@torch.no_grad()
def head_pass(
    hidden_NH: Tensor, weight: Head, teacher: Teacher, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """What weights of positions are made from, before the loss: (alpha_N, q_N), fp32.

    alpha is sum_v min(p, q), q the drafter's probability of the token that followed (0 where it is
    outside the draft vocabulary). Chunked as the loss is; no gradients.
    """
    parts = weight if isinstance(weight, tuple) else (weight,)
    widths, alphas, labels = [part_DH.shape[1] for part_DH in parts], [], []
    for start in range(0, len(hidden_NH), chunk_size):
        rows = slice(start, min(start + chunk_size, len(hidden_NH)))
        p_CD, labels_C = teacher(rows)
        inputs = hidden_NH[rows].split(widths, dim=1)
        logits = [x.to(part.dtype) @ part.T for x, part in zip(inputs, parts, strict=True)]
        q_CD = sum(logits[1:], logits[0]).float().softmax(dim=1)
        alphas.append(torch.minimum(p_CD, q_CD).sum(dim=1))
        picked_C = q_CD.gather(1, labels_C.clamp(min=0)[:, None])[:, 0]
        labels.append(torch.where(labels_C != OUTSIDE, picked_C, 0.0))
    none = hidden_NH.new_zeros(0, dtype=torch.float32)
    return torch.cat(alphas or [none]), torch.cat(labels or [none])
