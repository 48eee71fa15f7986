"""Distillation losses as pure functions (applied chunk by chunk by train.linear_loss).

Shape suffixes: N positions, D draft vocabulary.

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
    loss_N: Tensor = _ForwardKL.apply(logits_ND, p_ND)
    return loss_N


class _ForwardKL(torch.autograd.Function):
    """kl in few passes: one softmax for value and gradient; no gradient for p; no entr (slow)."""

    @staticmethod
    def forward(ctx: Any, logits_ND: Tensor, p_ND: Tensor) -> Tensor:
        q_ND, mass_N = logits_ND.softmax(dim=1), p_ND.sum(dim=1)
        lse_N = logits_ND.amax(dim=1) - q_ND.amax(dim=1).log()
        ctx.save_for_backward(q_ND, p_ND, mass_N)
        log_p_ND = p_ND.clamp(min=torch.finfo(p_ND.dtype).tiny).log_()
        return log_p_ND.sub_(logits_ND).mul_(p_ND).sum(dim=1) + mass_N * lse_N

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


def renormalize(p_ND: Tensor) -> Tensor:
    """Make p / sum(p) over the draft vocabulary; a row without any mass there stays zero."""
    return p_ND / p_ND.sum(dim=1, keepdim=True).clamp(min=torch.finfo(p_ND.dtype).tiny)
