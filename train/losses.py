"""Distillation losses as pure functions, and the chunked head that applies them.

Shape suffixes: N positions, D draft vocabulary, H hidden.

Every loss takes (logits_ND, p_ND, labels_N, options), by position, and returns losses_N:
  logits_ND  fp32 (or fp64) logits of the drafter over the draft vocabulary; q = softmax(logits)
  p_ND       the target's probabilities of the same D tokens. A row sums to at most 1; what is
             missing is the mass of the tokens that the draft vocabulary lacks (it is zero after
             renormalisation)
  labels_N   int64 index of the token that followed, within the draft vocabulary; -1 = that token is
             not in it
Nothing here averages: losses and metrics are sums over positions, divided once by their count after
all micro-batches and ranks were added, so the result does not depend on how a batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafters.base import Head

OUTSIDE = -1
"""Label of a position whose token is not in the draft vocabulary."""


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """What the losses can be told.

    renormalize: the loss sees p / sum(p) over the draft vocabulary (EAGLE-3); False keeps the
        missing mass.
    lk_scale, lk_decay: lk_hybrid's weight of the KL part is lk_scale * exp(-lk_decay * alpha).
    ce_share: this share s mixes hard labels in, s * ce + (1 - s) * loss.
    """

    renormalize: bool = True
    lk_scale: float = 1.0
    lk_decay: float = 3.0
    ce_share: float = 0.0


def ce(logits_ND: Tensor, _p_ND: Tensor, labels_N: Tensor, _options: LossOptions) -> Tensor:
    """Cross-entropy on the token that followed: -log q(x).

    0 where x is outside the draft vocabulary. Use it when only the target's text is known, not its
    distribution, or as the hard-label baseline.

    Returns:
        losses_N in nats.
    Source: Medusa (arXiv 2401.10774), DFlash.
    """
    inside_N = labels_N != OUTSIDE
    picked_N = logits_ND.gather(1, labels_N.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(inside_N, logits_ND.logsumexp(dim=1) - picked_N, 0.0)


def kl(logits_ND: Tensor, p_ND: Tensor, _labels_N: Tensor, _options: LossOptions) -> Tensor:
    """Forward KL divergence: sum_v p(v) log(p(v) / q(v)) over the draft vocabulary.

    The default: strong gradients from the first step on. Differs from the soft cross-entropy of
    EAGLE-3 by the entropy of p, which has no gradient. With missing mass (renormalize off) the sum
    is not a divergence and may be negative; its gradient, sum(p) * q - p, is still right.

    Returns:
        losses_N in nats.
    Source: EAGLE-3 (arXiv 2503.01840).
    """
    # sum p (log p - log q), with log q = logit - logsumexp taken apart. Without entr, which is slow
    # on a CPU, and without a gradient for p.
    with torch.no_grad():
        log_p_ND = p_ND.clamp(min=torch.finfo(p_ND.dtype).tiny).log_()
        entropy_N: Tensor = -torch.linalg.vecdot(p_ND, log_p_ND)
    soft_N: Tensor = _SoftCrossEntropy.apply(logits_ND, p_ND)
    return soft_N - entropy_N


class _SoftCrossEntropy(torch.autograd.Function):
    """-sum_v p(v) log q(v) by row; one softmax serves the logsumexp and the gradient."""

    @staticmethod
    def forward(ctx: Any, logits_ND: Tensor, p_ND: Tensor) -> Tensor:
        q_ND, mass_N = logits_ND.softmax(dim=1), p_ND.sum(dim=1)
        lse_N = logits_ND.amax(dim=1) - q_ND.amax(dim=1).log()
        ctx.save_for_backward(q_ND, p_ND, mass_N)
        return mass_N * lse_N - torch.linalg.vecdot(p_ND, logits_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses_N: Tensor) -> tuple[Tensor, None]:
        q_ND, p_ND, mass_N = ctx.saved_tensors
        d_logits_ND = q_ND * (d_losses_N * mass_N)[:, None]
        return d_logits_ND.addcmul_(p_ND, d_losses_N[:, None], value=-1), None


def tv(logits_ND: Tensor, p_ND: Tensor, _labels_N: Tensor, _options: LossOptions) -> Tensor:
    """Total variation distance: 1 - sum_v min(p(v), q(v)).

    The probability that a sampled draft is rejected, hence the exact objective; best late in
    training: its gradient vanishes where p and q hardly overlap. (Half of the L1 distance when
    p sums to 1; some code trains on the L1 distance, which is twice this.)

    Returns:
        losses_N in [0, 1].
    Source: DistillSpec (arXiv 2310.08461); Leviathan et al. (arXiv 2211.17192) for the acceptance
        probability.
    """
    return 1.0 - torch.minimum(p_ND, logits_ND.softmax(dim=1)).sum(dim=1)


def lk_hybrid(logits_ND: Tensor, p_ND: Tensor, labels_N: Tensor, options: LossOptions) -> Tensor:
    """KL turning into TV: lam * KL + (1 - lam) * TV.

    lam = min(1, lk_scale * exp(-lk_decay * alpha)) with alpha = sum_v min(p(v), q(v)). Starts as KL
    where the drafter is bad and ends as TV where it is good, position by position; no gradient
    flows through lam. Use it when acceptance, not likelihood, is what counts and training is
    long enough to reach it.

    Returns:
        losses_N.
    Source: the LK losses of speculators (scale 1, decay 3) and SpecForge (kl_scale, kl_decay).
    """
    tv_N = tv(logits_ND, p_ND, labels_N, options)
    alpha_N = 1.0 - tv_N.detach()
    lam_N = (options.lk_scale * torch.exp(-options.lk_decay * alpha_N)).clamp(max=1.0)
    return lam_N * kl(logits_ND, p_ND, labels_N, options) + (1.0 - lam_N) * tv_N


def rkl(logits_ND: Tensor, p_ND: Tensor, _labels_N: Tensor, _options: LossOptions) -> Tensor:
    """Reverse KL divergence: sum_v q(v) log(q(v) / p(v)) over the draft vocabulary.

    Seeks the modes of p rather than its whole mass. p below 1e-8 counts as 1e-8.

    Returns:
        losses_N in nats.
    Source: DistillSpec (arXiv 2310.08461).
    """
    log_q_ND = logits_ND.log_softmax(dim=1)
    return (log_q_ND.exp() * (log_q_ND - p_ND.clamp(min=SMALL).log())).sum(dim=1)


def jsd(logits_ND: Tensor, p_ND: Tensor, _labels_N: Tensor, _options: LossOptions) -> Tensor:
    """Jensen-Shannon divergence: (KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2.

    Bounded by log 2, symmetric: between forward and reverse KL.

    Returns:
        losses_N in nats.
    Source: DistillSpec (arXiv 2310.08461).
    """
    q_ND: Tensor = logits_ND.softmax(dim=1)
    log_m_ND = (0.5 * (p_ND + q_ND)).clamp(min=SMALL).log()
    to_p_N = -torch.special.entr(p_ND).sum(dim=1) - (p_ND * log_m_ND).sum(dim=1)
    to_q_N = (q_ND * (logits_ND.log_softmax(dim=1) - log_m_ND)).sum(dim=1)
    both_N: Tensor = 0.5 * (to_p_N + to_q_N)
    return both_N


def l1(logits_ND: Tensor, p_ND: Tensor, _labels_N: Tensor, _options: LossOptions) -> Tensor:
    """L1 distance sum_v |p(v) - q(v)|: twice tv where p sums to 1.

    Returns:
        losses_N in [0, 2].
    Source: DSpark (DeepSpec's loss.py), with ce_share 0.1 and confidence loss beside it.
    """
    return (p_ND - logits_ND.softmax(dim=1)).abs().sum(dim=1)


def nla(logits_ND: Tensor, p_ND: Tensor, labels_N: Tensor, options: LossOptions) -> Tensor:
    """Negative log acceptance: -log sum_v min(p(v), q(v)).

    The gradient of tv divided by alpha, so that a bad drafter is pushed as hard as a good one.

    Returns:
        losses_N in nats.
    Source: the LK-alpha loss of SpecForge.
    """
    return -(1.0 - tv(logits_ND, p_ND, labels_N, options)).clamp(min=SMALL).log()


SMALL = 1e-8

LossFn = Callable[[Tensor, Tensor, Tensor, LossOptions], Tensor]
LOSSES: dict[str, LossFn] = {
    "ce": ce,
    "kl": kl,
    "rkl": rkl,
    "jsd": jsd,
    "tv": tv,
    "l1": l1,
    "nla": nla,
    "lk_hybrid": lk_hybrid,
    "e2e_tv": tv,  # with the weights of train.weighting
}

Teacher = Callable[[slice], tuple[Tensor, Tensor]]
"""rows -> (p_ND, labels_N) there: fp32 probabilities, not renormalised, and int64 labels."""

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
    work = _Work(
        teacher=teacher,
        loss_fn=loss_fn,
        options=options,
        chunk_size=chunk_size,
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
    """Gradient of the chunk's loss in its logits, the loss, and STATS by position [4, C]."""
    p_CD, labels_C = work.teacher(rows)
    with torch.enable_grad():
        logits_CD = logits_CD.detach().requires_grad_()
        loss_p_CD = renormalize(p_CD) if work.options.renormalize else p_CD
        losses_C = work.loss_fn(logits_CD, loss_p_CD, labels_C, work.options)
        if share := work.options.ce_share:
            hard_C = ce(logits_CD, loss_p_CD, labels_C, work.options)
            losses_C = share * hard_C + (1.0 - share) * losses_C
        weighted_C = losses_C if work.weights_N is None else losses_C * work.weights_N[rows]
        loss = weighted_C.sum()
    need_grad = work.hidden_grad or any(work.weight_grads)
    d_logits_CD = torch.autograd.grad(loss, logits_CD)[0] if need_grad else logits_CD.detach()
    logits_CD = logits_CD.detach()
    picked_C = logits_CD.gather(1, labels_C.clamp(min=0)[:, None])[:, 0]
    top1_C = (picked_C == logits_CD.amax(dim=1)) & (labels_C != OUTSIDE)  # argmax is far slower
    alpha_C = torch.minimum(p_CD, logits_CD.softmax(dim=1)).sum(dim=1)
    ones_C = torch.ones_like(alpha_C)
    sums_4C = torch.stack([x.detach().double() for x in (ones_C, losses_C, alpha_C, top1_C)])
    return d_logits_CD, loss.detach().double(), sums_4C


def renormalize(p_ND: Tensor) -> Tensor:
    """Make p / sum(p) over the draft vocabulary; a row without any mass there stays zero."""
    return p_ND / p_ND.sum(dim=1, keepdim=True).clamp(min=torch.finfo(p_ND.dtype).tiny)


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
