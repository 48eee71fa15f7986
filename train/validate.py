"""What is measured on held-out rows, and how sums over micro-batches and ranks become means.

Dimension letters: G rollout steps.

Ranks share the work and add up sums: numerators and counts, in fp64, divided once.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from data.batch import Batch, Row, make_batch
from data.hidden_states import summaries
from data.pipeline import VALIDATION_ROWS, Prepared
from data.target import Target
from drafters.base import Sampling
from eval.decode import DecodeSettings, decode
from eval.rounds import Decoded
from recipes.schema import Recipe
from train.calibration import calibrate
from train.distiller import Distiller
from train.linear_loss import STATS
from train.samples import write_samples

BATCH_ROWS = 8

Numbers = dict[str, float | list[float] | str]


def with_states(target: Target, batch: Batch, aux_layers: tuple[int, ...]) -> Batch:
    """The batch with target states: those it came with, else computed now (states: online)."""
    batch = batch.to(target.device)
    if batch.aux_BSF is not None:
        return batch
    states = target.forward(batch.ids_BS, None, aux_layers, documents=batch.documents)
    needed_BS = torch.zeros_like(batch.mask_BS)
    needed_BS[:, :-1] = batch.mask_BS[:, 1:]
    lse, argmax = summaries(target, states.hidden_BSH.flatten(0, 1), needed_BS.flatten())
    return replace(
        batch,
        aux_BSF=states.aux_BSF,
        hidden_BSH=states.hidden_BSH,
        lse_BS=lse.view(batch.ids_BS.shape),
        argmax_BS=argmax.view(batch.ids_BS.shape),
    )


def sum_over_ranks(accelerator: Accelerator, numbers: list[int]) -> list[int]:
    """Whole numbers added up over all ranks."""
    if accelerator.num_processes == 1:
        return numbers
    total: Tensor = accelerator.reduce(torch.tensor(numbers, device=accelerator.device), "sum")
    return [int(number) for number in total.tolist()]


def total_sums(accelerator: Accelerator, sums: dict[str, Tensor]) -> dict[str, list[float]]:
    """Sums [G] of this rank -> of all ranks."""
    if accelerator.num_processes == 1:
        return {name: value.tolist() for name, value in sums.items()}
    return {name: accelerator.reduce(value, "sum").tolist() for name, value in sums.items()}


def means_of(totals: dict[str, list[float]]) -> Numbers:
    """Totals [G] -> means, each divided once; NaN where nothing was counted."""
    counts = totals["num_positions"]

    def means(name: str) -> list[float]:
        return [x / n if n else math.nan for x, n in zip(totals[name], counts, strict=True)]

    alpha = means("alpha_sum")
    return {
        "loss": means("loss_sum")[0],
        "loss_by_step": means("loss_sum"),
        "alpha_by_step": alpha,
        "top1_by_step": means("num_top1"),
        "tau_teacher_forced": tau_of(alpha),
    }


def tau_of(alpha_by_step: list[float]) -> float:
    """1 + sum over j of prod over i <= j of alpha_i: the tau that teacher-forced alphas suggest.

    It is not tau: the rows are the target's text, not what a drafter met on its own way.
    """
    product, tau = 1.0, 1.0
    for alpha in alpha_by_step:
        product *= alpha
        tau += product
    return tau


def _decoded_numbers(accelerator: Accelerator, answers: list[Decoded], num_draft: int) -> Numbers:
    """Tau, alpha and the share of rounds that accept i tokens or more, over all ranks' answers."""
    rounds = [r for answer in answers for r in answer.rounds]
    survivors = [sum(r.accepted > i for r in rounds) for i in range(num_draft)]
    sums = {
        "rounds": [len(rounds), sum(r.emitted for r in rounds)],
        "alpha": [sum(a.alpha_count for a in answers), sum(a.alpha_sum for a in answers)],
        "survivors": survivors,
    }
    device = accelerator.device
    totals = total_sums(
        accelerator,
        {name: torch.tensor(x, dtype=torch.float64, device=device) for name, x in sums.items()},
    )
    numbers: Numbers = {}
    if num_rounds := totals["rounds"][0]:
        numbers["valid/tau"] = totals["rounds"][1] / num_rounds
        numbers["valid/survival"] = [number / num_rounds for number in totals["survivors"]]
    if num_verified := totals["alpha"][0]:
        numbers["valid/alpha"] = totals["alpha"][1] / num_verified
    return numbers


def _heldout_rows(prepared: Prepared, target: Target) -> Sequence[Row]:
    """Held-out rows of the teacher-forced metrics; with stored states where no others are."""
    rows, store = prepared.heldout[:VALIDATION_ROWS], prepared.store
    if target.whole or store is None:
        return rows
    return [replace(row, states=store.get(row.id)) for row in rows if row.id in store]


@torch.no_grad()
def validate(
    recipe: Recipe,
    accelerator: Accelerator,
    target: Target,
    prepared: Prepared,
    distiller: Distiller,
    samples: Path | None = None,
) -> Numbers:
    """Held-out rows, teacher-forced, and real speculative decoding of held-out prompts.

    The true tau stands beside the teacher-forced one. Batches and prompts are dealt out to the
    ranks. Training mode is restored whatever happens.

    Args:
        distiller: not wrapped, with whole weights.
        samples: HTML file for a few of the answers, written by rank 0.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    section, training = recipe.train, distiller.training
    numbers: Numbers = {}
    distiller.eval()
    try:
        # Rows of similar length share a batch, so that little of it is padding.
        rows = sorted(_heldout_rows(prepared, target), key=lambda row: len(row.ids_S))
        if rows:
            empty = torch.zeros(recipe.loss.num_steps, dtype=torch.float64, device=target.device)
            sums = {name: empty.clone() for name in STATS}
            layers = distiller.drafter.aux_layers
            batches = [
                make_batch(rows, range(i, min(i + BATCH_ROWS, len(rows))), target.pad_id)
                for i in range(0, len(rows), BATCH_ROWS)
            ]
            calibrate(distiller, (with_states(target, batch, layers) for batch in batches))
            with target.uneven():
                for batch in batches[rank::world]:
                    for name, value in distiller(with_states(target, batch, layers))[1].items():
                        sums[name] += value
            means = means_of(total_sums(accelerator, sums))
            numbers |= {f"valid/{name}": value for name, value in means.items()}
        prompts = prepared.heldout_prompts[: section.validate_prompts]
        if prompts:
            settings = DecodeSettings(
                max_new_tokens=section.validate_max_new_tokens,
                num_draft=recipe.eval.num_draft_tokens,
                sampling=Sampling(temperature=0.0),
            )
            mine = prompts[rank::world]
            with target.uneven():
                answers = decode(target, distiller.drafter, mine, settings)[0] if mine else []
            numbers |= _decoded_numbers(accelerator, answers, settings.num_draft)
            if samples is not None and rank == 0 and answers:
                write_samples(samples, f"{recipe.name}: {samples.stem}", target, mine, answers)
    finally:
        distiller.train(training)
    return numbers
