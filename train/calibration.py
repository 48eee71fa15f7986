"""Temperatures that make DSpark's predicted survival true, fitted on held-out rows.

Dimension letters: N slots, A drafts (anchors), G depths, T temperatures tried, M bins.

The confidence head is trained position by position, and errors of its predictions multiply along a
draft. So each depth gets a temperature that its logits are divided by, fitted from left to right on
the product of all predictions so far (sequential temperature scaling, DSpark). What it is compared
with is the product of the true alphas, teacher-forced at temperature 1: at temperature 0 fewer or
more tokens may be accepted than predicted. Lengths of drafts depend on it, their text does not.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from data.batch import Batch
from drafters.dspark import DSpark, DSparkSlots
from train.distiller import Distiller
from train.weighting import by_draft

NUM_BINS = 15
MIN_DRAFTS = 50  # with fewer that deep, the temperature there stays 1
GRID_T = 2.0 ** torch.linspace(-3, 3, 61, dtype=torch.float64)


@torch.no_grad()
def calibrate(distiller: Distiller, batches: Iterable[Batch]) -> None:
    """Give a DSpark with a confidence head its temperatures; others are left as they are.

    Args:
        batches: held-out rows with target states.
    """
    drafter, num_depths = distiller.drafter, distiller.loss.num_steps
    if not isinstance(drafter, DSpark) or drafter.confidence_head is None:
        return
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in batches:
        _, _, slots, alpha_N = distiller.judge(batch)
        assert isinstance(slots, DSparkSlots) and slots.confidence_N is not None
        where = slots.anchor_N, slots.depth_N, num_depths
        known_AG = by_draft(torch.ones_like(alpha_N), *where) > 0
        logits_AG, alpha_AG = (
            by_draft(slots.confidence_N.float(), *where),
            by_draft(alpha_N, *where),
        )
        parts.append((logits_AG.double().cpu(), alpha_AG.double().cpu(), known_AG.cpu()))
    if not parts:
        return
    logits_AG, alpha_AG, known_AG = (torch.cat(part) for part in zip(*parts, strict=True))
    found = fit_temperatures(logits_AG, alpha_AG, known_AG)
    most = drafter.config.max_draft  # depths that were not trained keep 1
    padded = (found + (1.0,) * most)[:most]
    drafter.config = replace(drafter.config, confidence_temperatures=padded)


def fit_temperatures(logits_AG: Tensor, alpha_AG: Tensor, known_AG: Tensor) -> tuple[float, ...]:
    """One temperature a depth, each the best of GRID_T behind those before it.

    Args:
        logits_AG: of the confidence head, fp64.
        alpha_AG: what it predicts.
        known_AG: which slots are supervised; a draft counts at a depth up to which all are.
    """
    predicted_A, survival_A = torch.ones_like(logits_AG[:, 0]), alpha_AG.cumprod(1)
    whole_AG = known_AG.long().cumprod(1) > 0
    temperatures = []
    for k in range(logits_AG.shape[1]):
        there_A, best = whole_AG[:, k], 1.0
        if int(there_A.sum()) >= MIN_DRAFTS:
            tried_TA = predicted_A[there_A] * (logits_AG[there_A, k] / GRID_T[:, None]).sigmoid()
            errors = [calibration_error(tried_A, survival_A[there_A, k]) for tried_A in tried_TA]
            far_T = GRID_T.log().abs().tolist()  # of equal ones, the nearest to no change
            best = float(GRID_T[min(range(len(errors)), key=lambda t: (errors[t], far_T[t]))])
        temperatures.append(best)
        predicted_A = predicted_A * (logits_AG[:, k] / best).sigmoid()
    return tuple(temperatures)


def calibration_error(predicted_A: Tensor, true_A: Tensor) -> float:
    """Expected calibration error: mean over drafts of their bin's |mean predicted - mean true|."""
    bin_A = (predicted_A * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    gap_M = predicted_A.new_zeros(NUM_BINS).index_add_(0, bin_A, predicted_A - true_A)
    return float(gap_M.abs().sum()) / len(predicted_A)
