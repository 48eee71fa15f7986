"""The training loop: read top to bottom.

Dimension letters: G rollout steps.

Sums travel, means do not: the loss of an optimizer step is one sum over all its micro-batches and
ranks, divided once by the number of supervised slots in all of them.
"""

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import FrameType

import torch
from accelerate import Accelerator
from torch import Tensor

from data.batch import Batch, Row, make_batch, plan_batches, shard
from data.files import stable_hash
from data.hidden_states import summaries
from data.pipeline import Prepared
from data.target import Target
from drafters.anchors import choose_anchors
from drafters.base import Sampling, TrainedDrafter
from eval.decode import DecodeSettings, decode
from recipes.errors import UserError
from recipes.schema import Recipe
from train import checkpoint
from train.distiller import Distiller, count_slots
from train.log import MetricsLog
from train.optim import build_optimizer, clip, lr_factor, set_lr
from train.weights import save_drafter

log = logging.getLogger("draftsmith")

VALIDATION_ROWS = 64  # held-out rows of the teacher-forced metrics


class Interrupted(Exception):
    """SIGINT or SIGTERM: the state is saved. `signum` says which."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class _Signals:
    """Remembers SIGINT and SIGTERM until the step is over; the previous handlers come back."""

    def __enter__(self) -> "_Signals":
        self.received = 0
        self._old = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        self.received = signum


def epoch_plan(
    recipe: Recipe, rows: list[Row], epoch: int, rank: int, world: int
) -> list[list[int]]:
    """This rank's micro-batches of an epoch, as row indices; a pure function: resume is exact."""
    section = recipe.train
    lengths = [len(row.ids_S) for row in rows]
    plan = plan_batches(
        lengths, section.batch_tokens, section.micro_batch_size, section.seed, epoch
    )
    return shard(plan, rank, world)


def count_steps(recipe: Recipe, rows: list[Row], world: int) -> int:
    """Optimizer steps of the whole run."""
    section = recipe.train
    if section.max_steps is not None:
        return section.max_steps
    per_epoch = [
        math.ceil(len(epoch_plan(recipe, rows, e, 0, world)) / section.gradient_accumulation)
        for e in range(math.ceil(section.epochs))
    ]
    whole = int(section.epochs)
    last = 0 if whole == len(per_epoch) else (section.epochs - whole) * per_epoch[-1]
    return max(1, sum(per_epoch[:whole]) + math.ceil(last))


def with_states(target: Target, batch: Batch, aux_layers: tuple[int, ...]) -> Batch:
    """The batch with target states: those it came with, else computed now (states: online)."""
    batch = batch.to(target.device)
    if batch.aux_BSF is not None:
        return batch
    states = target.forward(batch.ids_BS, None, aux_layers)
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


def train(
    recipe: Recipe,
    accelerator: Accelerator,
    target: Target,
    prepared: Prepared,
    drafter: TrainedDrafter,
    resume: bool,
) -> checkpoint.Progress:
    """Train `drafter` in place: checkpoints in RUN/checkpoints, numbers in metrics.jsonl."""
    section, rows = recipe.train, prepared.train
    world, rank = accelerator.num_processes, accelerator.process_index
    distiller = Distiller(drafter, recipe.loss, prepared.vocab).to(target.device)
    distiller.use_target(target)
    optimizer = build_optimizer(distiller, section)
    model, optimizer = accelerator.prepare(distiller, optimizer)
    done = checkpoint.Progress()
    start = checkpoint.latest(recipe.run_dir) if resume else None
    if start is not None:
        done = checkpoint.load(accelerator, start, recipe)
        log.info("going on from %s", start)
    num_steps = count_steps(recipe, rows, world)
    limit = math.inf if section.max_minutes is None else 60 * section.max_minutes
    log.info(
        "%d optimizer steps of %d micro-batches on %d processes",
        num_steps,
        section.gradient_accumulation,
        world,
    )

    plan: list[list[int]] = []

    def windows() -> Iterator[list[Batch]]:
        """Micro-batches of each optimizer step, from where `done` stands; moves it on."""
        while True:
            plan[:] = epoch_plan(recipe, rows, done.epoch, rank, world)
            while done.index < len(plan):
                window = plan[done.index : done.index + section.gradient_accumulation]
                done.index += len(window)
                yield [load(indices, done.index) for indices in window]
            done.epoch, done.index = done.epoch + 1, 0

    def load(indices: list[int], place: int) -> Batch:
        chosen = [rows[i] for i in indices] or [rows[0]]
        if prepared.store is not None:
            chosen = [replace(row, states=prepared.store.get(row.id)) for row in chosen]
        batch = make_batch(chosen, range(len(indices)), target.pad_id)
        # Random choices follow from seed, epoch and rows alone, so that a resumed run repeats them.
        key = [section.seed, done.epoch, place, batch.row_ids]
        batch = replace(batch, seed=int(stable_hash(key)[:8], 16))
        batch = replace(
            batch, anchors_A=choose_anchors(batch.mask_BS, drafter.num_anchors, batch.seed)
        )
        return with_states(target, batch, drafter.aux_layers)

    sums: dict[str, Tensor] = {}
    norms: list[float] = []
    clock = time.monotonic()
    logged, logged_tokens = clock, done.num_tokens
    began = clock - done.seconds
    metrics_log = MetricsLog(
        recipe.run_dir,
        recipe.log,
        recipe,
        None if start is None else done.step,
        accelerator.is_main_process,
    )
    model.train()
    with metrics_log, _Signals() as signals:
        if done.step < num_steps:
            for batches in windows():
                # ---- one optimizer step ----
                elapsed = _same_everywhere(accelerator, time.monotonic() - began, limit)
                # A run limited by time moves along its schedule by the clock, if that is further.
                place = max(done.step, elapsed / limit * num_steps)
                lr = section.lr * lr_factor(
                    place, num_steps, section.warmup_ratio * num_steps, section.min_lr_ratio
                )
                set_lr(optimizer, lr)
                num_slots = sum(count_slots(batch) for batch in batches)
                total = _sum_over_ranks(accelerator, num_slots)
                for i, batch in enumerate(batches):
                    with accelerator.no_sync(model) if i + 1 < len(batches) else nullcontext():
                        loss, stats = model(batch)
                        # Wrappers average gradients over ranks; the sum is what is wanted.
                        accelerator.backward(loss * (world / max(total, 1)))
                    for name, value in stats.items():
                        sums[name] = sums.get(name, 0) + value
                norm = clip(accelerator, model, section.clip)
                if not math.isfinite(norm):
                    ids = [row_id for batch in batches for row_id in batch.row_ids]
                    raise UserError(
                        f"step {done.step + 1}: the gradient is not finite (norm {norm}); rows "
                        f"{ids[:8]}; nothing was changed by this step, the last checkpoint is good"
                    )
                optimizer.step()
                optimizer.zero_grad()
                norms.append(norm)
                done.step += 1
                done.num_tokens += total
                done.seconds = time.monotonic() - began
                # ---- once in a while ----
                last = done.step >= num_steps or done.seconds >= limit
                last = bool(_same_everywhere(accelerator, float(last), limit))
                if done.step % recipe.log.every == 0 or last:
                    now = time.monotonic()
                    numbers = _metrics(accelerator, sums)
                    numbers |= {
                        "lr": lr,
                        "grad_norm": sum(norms) / len(norms),
                        "grad_norm_max": max(norms),
                        "epoch": done.epoch + done.index / len(plan),
                        "num_tokens": done.num_tokens,
                        "tokens_per_second": (done.num_tokens - logged_tokens) / (now - logged),
                        "minutes": done.seconds / 60,
                    }
                    metrics_log.log(done.step, numbers)
                    sums, norms, logged, logged_tokens = {}, [], now, done.num_tokens
                every = section.validate_every
                if last or (every and done.step % every == 0):
                    paused = time.monotonic()
                    numbers = validate(recipe, accelerator, target, prepared, model)
                    quality = numbers.get("valid/tau", numbers.get("valid/tau_teacher_forced"))
                    if isinstance(quality, float) and done.improve(quality) and rank == 0:
                        best = recipe.run_dir / "drafter-best"
                        save_drafter(best, drafter, target, recipe, done.num_tokens)
                    metrics_log.log(done.step, numbers)
                    began += time.monotonic() - paused  # validation is not training time
                    logged += time.monotonic() - paused
                stop = _same_everywhere(accelerator, float(signals.received), 0)
                if last or stop or (section.save_every and done.step % section.save_every == 0):
                    checkpoint.save(accelerator, recipe.run_dir, done, recipe)
                if last:
                    break
                if stop:
                    raise Interrupted(int(stop))
    return done


def _metrics(accelerator: Accelerator, sums: dict[str, Tensor]) -> dict[str, float | list[float]]:
    """Sums [G] over micro-batches (and ranks, here) -> means, each divided once."""
    totals = {
        name: accelerator.reduce(value.float(), "sum").tolist() for name, value in sums.items()
    }
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


def validate(
    recipe: Recipe,
    accelerator: Accelerator,
    target: Target,
    prepared: Prepared,
    model: torch.nn.Module,
) -> dict[str, float | list[float]]:
    """Held-out rows, teacher-forced, and real speculative decoding of held-out prompts.

    The true tau stands beside the teacher-forced one. Training mode is restored whatever happens.
    """
    distiller: Distiller = accelerator.unwrap_model(model)
    section, training = recipe.train, distiller.training
    numbers: dict[str, float | list[float]] = {}
    distiller.eval()
    try:
        with torch.no_grad():
            sums: dict[str, Tensor] = {}
            rows = prepared.heldout[:VALIDATION_ROWS]
            for i in range(0, len(rows), 8):
                batch = make_batch(rows, range(i, min(i + 8, len(rows))), target.pad_id)
                batch = with_states(target, batch, distiller.drafter.aux_layers)
                for name, value in distiller(batch)[1].items():
                    sums[name] = sums.get(name, 0) + value
            if sums:
                share = {
                    k: v / accelerator.num_processes for k, v in sums.items()
                }  # all ranks alike
                numbers |= {f"valid/{k}": v for k, v in _metrics(accelerator, share).items()}
        prompts = prepared.heldout_prompts[: section.validate_prompts]
        if prompts:
            settings = DecodeSettings(
                max_new_tokens=section.validate_max_new_tokens,
                num_draft=recipe.eval.num_draft_tokens,
                sampling=Sampling(temperature=0.0),
            )
            answers, _ = decode(target, distiller.drafter, prompts, settings)
            emitted = sum(r.emitted for a in answers for r in a.rounds)
            rounds = sum(len(a.rounds) for a in answers)
            if rounds:
                numbers["valid/tau"] = emitted / rounds
    finally:
        distiller.train(training)
    return numbers


def _sum_over_ranks(accelerator: Accelerator, number: int) -> int:
    if accelerator.num_processes == 1:
        return number
    total: Tensor = accelerator.reduce(torch.tensor(number, device=accelerator.device), "sum")
    return int(total)


def _same_everywhere(accelerator: Accelerator, number: float, limit: float) -> float:
    """The largest value of all ranks, where ranks could disagree (clocks, signals)."""
    if accelerator.num_processes == 1 or limit == math.inf:
        return number
    values: Tensor = accelerator.gather(torch.tensor([number], device=accelerator.device))
    return float(values.max())
