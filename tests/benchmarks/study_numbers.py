"""What the study computes beside the records: held-out acceptance, learning curve, who is ahead.

Dimension letters: R rows, G depths, W resamples.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data.batch import make_batch
from data.pipeline import Prepared
from data.target import Target
from drafters.base import TrainedDrafter
from recipes.schema import Recipe
from train.distiller import Distiller
from train.validate import with_states

NUM_ROWS = 64  # held-out rows of the teacher-forced acceptance
NUM_RESAMPLES = 2000
RECURRENT = {"eagle1", "eagle3", "mtp"}  # can be asked about deeper steps than they learned
QUARTERS = (0.25, 0.5, 0.75, 1.0)

Floats = NDArray[np.float64]
Bounded = Mapping[str, Sequence[float]]  # task -> value, lower and upper end of its interval


def num_depths(recipe: Recipe) -> int:
    """Positions whose acceptance is measured: those of a draft, or those that were learned."""
    deeper = recipe.drafter.method in RECURRENT
    return max(recipe.loss.num_steps, recipe.eval.num_draft_tokens if deeper else 0)


@torch.no_grad()
def heldout_sums(
    recipe: Recipe, target: Target, prepared: Prepared, drafter: TrainedDrafter
) -> tuple[Floats, Floats]:
    """Sums of alpha and counts of positions, [R, G] each, teacher-forced on held-out rows."""
    shape = {"num_steps": num_depths(recipe), "renormalize": False}
    distiller = Distiller(drafter, recipe.loss.model_copy(update=shape), prepared.vocab)
    distiller.to(target.device).eval()
    distiller.use_target(target)
    sums, counts = [], []
    for row in prepared.heldout[:NUM_ROWS]:
        batch = with_states(target, make_batch([row], [0], target.pad_id), drafter.aux_layers)
        stats = distiller(batch)[1]
        sums.append(stats["alpha_sum"].cpu().double().numpy())
        counts.append(stats["num_positions"].cpu().double().numpy())
    return np.stack(sums), np.stack(counts)


def ratio(sums_RG: Floats, counts_RG: Floats) -> list[float | None]:
    """Means by depth; None where nothing was counted."""
    total_G, count_G = sums_RG.sum(0), counts_RG.sum(0)
    return [float(s / n) if n else None for s, n in zip(total_G, count_G, strict=True)]


def gain(before: tuple[Floats, Floats], after: tuple[Floats, Floats]) -> list[float]:
    """How much the first position's alpha rose, with the ends of its 95% interval.

    The interval resamples rows, the same ones before and after.
    """
    num_rows = len(before[0])
    weights_WR = np.random.default_rng(0).multinomial(
        num_rows, [1 / num_rows] * num_rows, size=NUM_RESAMPLES
    )
    weights_WR = np.vstack([np.ones((1, num_rows)), weights_WR])

    def alphas(sums: tuple[Floats, Floats]) -> Floats:
        return (weights_WR @ sums[0][:, 0]) / np.maximum(weights_WR @ sums[1][:, 0], 1)

    rise_W = alphas(after) - alphas(before)
    low, high = np.percentile(rise_W[1:], [2.5, 97.5])
    return [float(rise_W[0]), float(low), float(high)]


def learning_curve(metrics: Path) -> list[dict[str, Any]]:
    """Loss and alpha by step over training rows, means of each quarter of the time.

    None where a quarter has no line.
    """
    entries = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    lines = [line for line in entries if "loss" in line and "minutes" in line]
    end, start, points = max((line["minutes"] for line in lines), default=0.0), -1.0, []
    for share in QUARTERS:
        part = [line for line in lines if start < line["minutes"] <= share * end]
        start = share * end
        alphas = [line["alpha_by_step"] for line in part]
        points.append(
            {
                "minutes": share * end,
                "tokens": part[-1]["num_tokens"] if part else None,
                "loss": float(np.mean([line["loss"] for line in part])) if part else None,
                "alpha": np.mean(alphas, axis=0).tolist() if part else None,
            }
        )
    return points


def mean(values: Bounded) -> float:
    """Of the values of all tasks, each counting once."""
    return sum(value[0] for value in values.values()) / len(values)


def ahead(ours: Bounded, theirs: Bounded) -> bool:
    """Whether on every task our whole interval lies above theirs."""
    return all(ours[task][1] > theirs[task][2] for task in ours)


def behind(ours: Bounded, theirs: Bounded) -> bool:
    """Whether on every task our whole interval lies below theirs."""
    return ahead(theirs, ours)


def best_num_draft(record: Mapping[str, Any]) -> int:
    """Draft tokens with the highest predicted speedup, a mean over tasks; at most the measured."""
    most = record["settings"]["num_draft_tokens"]
    curves = [task["predicted_curve"] for task in record["tasks"].values()]
    by_number = {
        point["num_draft_tokens"]: sum(curve[i]["speedup"] for curve in curves) / len(curves)
        for i, point in enumerate(curves[0])
        if point["num_draft_tokens"] <= most
    }
    return max(by_number, key=lambda number: (by_number[number], -number))
