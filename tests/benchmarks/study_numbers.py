"""What the study computes: held-out acceptance, accepted positions, learning curve, who is ahead.

Dimension letters: C clusters (held-out rows, or prompts), G depths, W resamples.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data.batch import Batch, Row, make_batch
from data.target import Target
from data.vocab import DraftVocab
from drafters.anchors import supervised_slots
from drafters.base import DecodingDrafter, Sampling, TrainedDrafter
from eval.metrics import PromptRecord, interval, resample_counts
from recipes.schema import Recipe
from train.distiller import Distiller
from train.validate import with_states

RECURRENT = {"eagle1", "eagle3", "mtp"}  # can be asked about deeper steps than they learned
QUARTERS = (0.25, 0.5, 0.75, 1.0)

Floats = NDArray[np.float64]
Bounded = Mapping[str, Sequence[float]]  # task -> value, lower and upper end of its interval


@dataclass
class Heldout:
    """Sums over the positions of each held-out row, [C, G] each.

    alpha: of sum_v min(p, q). top1: positions where the drafter's likeliest token is the target's.
    counts: positions.
    """

    alpha_CG: Floats
    top1_CG: Floats
    counts_CG: Floats


def num_depths(recipe: Recipe) -> int:
    """Positions whose acceptance is measured: those of a draft, or those that were learned."""
    deeper = recipe.drafter.method in RECURRENT
    return max(recipe.loss.num_steps, recipe.eval.num_draft_tokens if deeper else 0)


@torch.no_grad()
def heldout_sums(
    recipe: Recipe,
    target: Target,
    vocab: DraftVocab,
    held_out: Sequence[Row],
    drafter: TrainedDrafter,
    num_steps: int,
) -> Heldout:
    """What a drafter does on held-out rows at the first depths, teacher-forced."""
    loss = recipe.loss.model_copy(update={"num_steps": num_steps, "renormalize": False})
    distiller = Distiller(drafter, loss, vocab).to(target.device).eval()
    distiller.use_target(target)
    found: list[list[Floats]] = []
    for i in range(len(held_out)):
        batch = make_batch(held_out, [i], target.pad_id)
        stats = distiller(with_states(target, batch, drafter.aux_layers))[1]
        names = ("alpha_sum", "num_top1", "num_positions")
        found.append([stats[name].cpu().double().numpy() for name in names])
    return Heldout(*(np.stack(part) for part in zip(*found, strict=True)))


@torch.no_grad()
def heldout_guesses(target: Target, held_out: Sequence[Row], drafter: DecodingDrafter) -> Heldout:
    """The first guesses of a drafter without weights at the same positions; none is a miss.

    Its q holds one token, so alpha is the probability that the target gives the guess.
    """
    rows = []
    for i in range(len(held_out)):
        batch = with_states(target, make_batch(held_out, [i], target.pad_id), ())
        rows.append(_first_guesses(target, batch, drafter))
    return Heldout(*(np.array(part)[:, None] for part in zip(*rows, strict=True)))


def _first_guesses(
    target: Target, batch: Batch, drafter: DecodingDrafter
) -> tuple[float, float, float]:
    """Of the first guesses of a row: sum of p, how many are the likeliest token, positions."""
    assert batch.argmax_BS is not None
    assert batch.hidden_BSH is not None and batch.lse_BS is not None
    ids_1S, argmax_S = batch.ids_BS.cpu(), batch.argmax_BS[0].tolist()
    wanted = set(supervised_slots(batch, 1)[0].tolist())
    state = drafter.start(ids_1S.tolist(), ids_1S.shape[1])
    one_1, guesses = torch.ones(1, dtype=torch.int64), dict[int, int]()
    for s in range(max(wanted, default=-1) + 1):
        if s:
            drafter.observe(state, ids_1S[:, s : s + 1], torch.zeros(1, 1, 0), one_1)
        if s in wanted:
            proposal = drafter.propose(state, 1, Sampling(), None)
            if int(proposal.num_proposed_B[0]) > 0:
                guesses[s] = int(proposal.tokens_BK[0, 0])
    hits = sum(guess == argmax_S[s] for s, guess in guesses.items())
    pairs_N2 = torch.tensor([*guesses.items()], dtype=torch.int64, device=target.device)
    at_N, token_N = pairs_N2.view(-1, 2).unbind(1)
    logits_NN = target.logits(batch.hidden_BSH[0, at_N], target.head_rows(token_N))
    p_N = (logits_NN.diagonal() - batch.lse_BS[0, at_N]).exp()
    return float(p_N.sum()), float(hits), float(len(wanted))


def resamples(num_clusters: int) -> Floats:
    """How often each cluster counts: once each, then in every resample; [1 + W, C]."""
    return np.vstack([np.ones((1, num_clusters)), resample_counts(num_clusters, seed=0)])


def bounded(values_W: Floats) -> list[float]:
    """The first value, and the middle 95% of the others."""
    ends = interval(values_W[1:])
    assert ends is not None, "two clusters or more"
    return [float(values_W[0]), *ends]


def rates(sums_CG: Floats, counts_CG: Floats) -> list[list[float] | None]:
    """Means by depth with their intervals over clusters; None where nothing was counted."""
    weights_WC = resamples(len(sums_CG))
    sums_WG, counts_WG = weights_WC @ sums_CG, weights_WC @ counts_CG
    return [
        bounded(sums_WG[:, g] / np.maximum(counts_WG[:, g], 1)) if counts_WG[0, g] else None
        for g in range(sums_CG.shape[1])
    ]


def gain(before: tuple[Floats, Floats], after: tuple[Floats, Floats]) -> list[float]:
    """By how much the first depth's mean is higher after than before, with its 95% interval.

    Args:
        before: sums and counts [C, G] of the same rows, which are resampled together.
        after: likewise.
    """
    weights_WC = resamples(len(before[0]))

    def means(sums: tuple[Floats, Floats]) -> Floats:
        mean_W: Floats = (weights_WC @ sums[0][:, 0]) / np.maximum(weights_WC @ sums[1][:, 0], 1)
        return mean_W

    return bounded(means(after) - means(before))


def accepted(records: Sequence[PromptRecord], num_draft: int) -> list[list[float] | None]:
    """Share of rounds that accept position k, of those that accepted k - 1; over prompts."""
    counts: dict[str, Floats] = {}
    for record in records:
        kept = np.array(record.accepted, dtype=np.float64)
        reached = np.array([(kept >= k).sum() for k in range(num_draft + 1)], dtype=np.float64)
        counts[record.prompt_id] = counts.get(record.prompt_id, 0) + reached
    table_CK = np.stack(list(counts.values()))
    return rates(table_CK[:, 1:], table_CK[:, :-1])


def tokens_and_rounds(records: Sequence[PromptRecord]) -> list[list[float]]:
    """Tokens and rounds of each prompt, all its turns together; their ratio is tau."""
    found: dict[str, list[float]] = {}
    for record in records:
        sums = found.setdefault(record.prompt_id, [0.0, 0.0])
        sums[0] += record.num_tokens
        sums[1] += len(record.accepted or [])
    return list(found.values())


def tau_gain(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> list[float]:
    """By how much tau is higher after than before, on the same prompts, with its 95% interval.

    Args:
        before: tokens and rounds of each prompt.
        after: likewise, in the same order.
    """
    old, new = (np.array(sums) for sums in (before, after))
    return gain((old[:, :1], old[:, 1:]), (new[:, :1], new[:, 1:]))


def learning_curve(metrics: Path) -> list[dict[str, Any]]:
    """Loss, alpha and top-1 by step over training rows, means of each quarter of the time.

    None where a quarter has no line.
    """
    entries = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    lines = [line for line in entries if "loss" in line and "minutes" in line]
    end, start, points = max((line["minutes"] for line in lines), default=0.0), -1.0, []
    for share in QUARTERS:
        part = [line for line in lines if start < line["minutes"] <= share * end]
        start = share * end
        means = {
            name: np.mean([line[f"{name}_by_step"] for line in part], axis=0).tolist()
            if part
            else None
            for name in ("alpha", "top1")
        }
        points.append(
            {
                "minutes": share * end,
                "tokens": part[-1]["num_tokens"] if part else None,
                "loss": float(np.mean([line["loss"] for line in part])) if part else None,
                **means,
            }
        )
    return points


def mean(values: Bounded) -> float:
    """Of the values of all tasks, each counting once."""
    return sum(value[0] for value in values.values()) / len(values)


def ahead(ours: Bounded, theirs: Bounded) -> bool:
    """Whether on every task our whole interval lies above theirs."""
    return all(ours[task][1] > theirs[task][2] for task in ours)
