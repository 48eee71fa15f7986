"""The training loop: read top to bottom.

Sums travel, means do not: the loss of an optimizer step is one sum over all its micro-batches and
ranks, divided once by the number of supervised slots in all of them.
"""

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from data.batch import STAND_IN, Batch, make_batch, num_places, plan_batches
from data.files import stable_hash
from data.pipeline import Prepared
from data.progress import progress
from data.row_file import RowFile
from data.target import Target
from drafters.anchors import choose_anchors
from drafters.base import TrainedDrafter
from recipes.errors import UserError
from recipes.schema import Recipe
from train import checkpoint
from train.distiller import Distiller, autocasts, count_slots
from train.log import MetricsLog
from train.on_policy import with_own_answers
from train.optim import build_optimizer, lr_factor, set_lr
from train.prefetch import Window, prefetched
from train.shards import (
    close,
    divides_weights,
    prepare,
    run_micro_batch,
    take_step,
    whole_drafter,
)
from train.step_clock import StepClock
from train.validate import Numbers, means_of, sum_over_ranks, total_sums, validate, with_states
from train.weights import save_drafter

log = logging.getLogger("draftsmith")


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


class AutocastDistiller(Distiller):
    """A Distiller in bf16 arithmetic over its fp32 weights, the same under every launcher.

    (accelerate's own mixed precision would be autocast under DDP, and bf16 weights under
    DeepSpeed.) The loss is fp32 all the same.
    """

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast(batch.ids_BS.device.type, torch.bfloat16):
            return super().forward(batch)


def make_distiller(
    recipe: Recipe, target: Target, prepared: Prepared, drafter: TrainedDrafter
) -> Distiller:
    """The module to be trained, or measured, with its target."""
    kind = AutocastDistiller if autocasts(recipe.train, target.device) else Distiller
    distiller = kind(drafter, recipe.loss, prepared.vocab).to(target.device)
    distiller.use_target(target)
    return distiller


def epoch_plan(recipe: Recipe, rows: RowFile, epoch: int) -> list[list[int]]:
    """The micro-batches of an epoch, as row indices; a pure function: resume is exact."""
    section = recipe.train
    return plan_batches(
        rows.lengths,
        section.batch_tokens,
        section.micro_batch_size,
        section.seed,
        epoch,
        section.packing,
    )


def deal(window: list[list[int]], rank: int, world: int) -> list[list[int]]:
    """This rank's micro-batches of a step: as many on every rank, so some may be empty."""
    missing = -len(window) % world
    return (window + [[] for _ in range(missing)])[rank::world]


def count_steps(recipe: Recipe, rows: RowFile, world: int) -> int:
    """Optimizer steps of the whole run."""
    section = recipe.train
    if section.max_steps is not None:
        return section.max_steps
    size = world * section.gradient_accumulation
    per_epoch = [
        math.ceil(len(epoch_plan(recipe, rows, e)) / size) for e in range(math.ceil(section.epochs))
    ]
    whole = int(section.epochs)
    last = 0 if whole == len(per_epoch) else (section.epochs - whole) * per_epoch[-1]
    return max(1, sum(per_epoch[:whole]) + math.ceil(last))


def train(
    recipe: Recipe,
    accelerator: Accelerator,
    target: Target,
    prepared: Prepared,
    drafter: TrainedDrafter,
    start: Path | None,
) -> tuple[checkpoint.Progress, TrainedDrafter]:
    """Train `drafter`: checkpoints in RUN/checkpoints, numbers in metrics.jsonl.

    Args:
        start: the checkpoint to go on from; None = from the first step.

    Returns:
        Where the run ended, and the drafter with whole weights (a copy where they are divided).
    """
    section, rows = recipe.train, prepared.train
    world, rank = accelerator.num_processes, accelerator.process_index
    if section.on_policy_share and divides_weights(accelerator):
        raise UserError(
            "train.on_policy_share needs whole weights to write with: use "
            "recipes/accelerate/ddp.yaml, zero1.yaml or zero2.yaml"
        )
    if section.compile is not None and divides_weights(accelerator):
        raise UserError(
            "train.compile needs whole weights on every process: use recipes/accelerate/ddp.yaml, "
            "zero1.yaml or zero2.yaml, or set train.compile: null"
        )
    distiller = make_distiller(recipe, target, prepared, drafter)
    if section.compile is not None:
        drafter.compile_training(section.compile, "train.compile")
    if section.activation_checkpointing:
        distiller.recompute_activations()
    if start is not None:
        checkpoint.load_weights(start, distiller)
    optimizer = build_optimizer(distiller, section)
    model, optimizer = prepare(accelerator, distiller, optimizer)
    done = checkpoint.Progress()
    if start is not None:
        done = checkpoint.load(accelerator, start, recipe, model, optimizer)
        log.info("going on from %s", start)
    num_steps = count_steps(recipe, rows, world)
    limit = math.inf if section.max_minutes is None else 60 * section.max_minutes
    log.info(
        "%d optimizer steps of %d micro-batches on %d processes",
        num_steps,
        section.gradient_accumulation,
        world,
    )

    def whole() -> TrainedDrafter:
        return whole_drafter(accelerator, drafter, target)

    def windows() -> Iterator[Window]:
        """What each step reads, from where `done` stands. A thread may run ahead of the steps."""
        epoch, index, chain = done.epoch, done.index, done.rows
        size = world * section.gradient_accumulation
        while True:
            plan = epoch_plan(recipe, rows, epoch)
            while index < len(plan):
                chosen = plan[index : index + size]
                index += len(chosen)
                read = [rows[i] for indices in chosen for i in indices]
                chain = stable_hash([chain, [row.id for row in read]])
                batches = [load(indices, epoch) for indices in deal(chosen, rank, world)]
                num_read = sum(len(row.ids_S) for row in read)
                places = num_places(chosen, rows.lengths, section.packing)
                share = epoch + index / len(plan)
                yield Window(batches, epoch, index, chain, share, num_read, places)
            epoch, index = epoch + 1, 0

    def load(indices: list[int], epoch: int) -> Batch:
        """A micro-batch from memory and disk alone: no model runs here."""
        chosen = [rows[i] for i in indices] or [rows[0]]
        if prepared.store is not None:
            chosen = [replace(row, states=prepared.store.get(row.id)) for row in chosen]
        batch = make_batch(chosen, range(len(indices)), target.pad_id, section.packing)
        # Random choices follow from seed, epoch and rows alone, so that a resumed run repeats them,
        # with whatever number of processes.
        key = [section.seed, epoch, batch.row_ids]
        batch = replace(batch, seed=int(stable_hash(key)[:8], 16))
        if not section.on_policy_share:
            batch = with_anchors(batch)
        return batch.to(target.device)

    def with_anchors(batch: Batch) -> Batch:
        anchors_A = choose_anchors(batch.mask_BS, drafter.num_anchors, batch.seed, batch.stretches)
        return replace(batch, anchors_A=anchors_A)

    def complete(batch: Batch) -> Batch:
        """What needs the models: the drafter's own answers, the target's states."""
        if section.on_policy_share:
            batch = with_anchors(
                with_own_answers(
                    batch, drafter, section.on_policy_share, target.eos_ids, target.pad_id
                )
            )
        return with_states(target, batch, drafter.aux_layers)

    def measure(page: Path | None) -> tuple[Distiller, Numbers]:
        """Validate; what that fits (DSpark's temperatures) is in no checkpoint."""
        measured = distiller
        if divides_weights(accelerator):
            measured = make_distiller(recipe, target, prepared, whole())
        numbers = validate(recipe, accelerator, target, prepared, measured, page)
        drafter.config = measured.drafter.config
        return measured, numbers

    norms = done.window.pop("grad_norm", [])
    sums = {  # since the last logged line; those of an interrupted window lie with rank 0
        name: torch.tensor(values, dtype=torch.float64, device=target.device) * (rank == 0)
        for name, values in done.window.items()
    }
    logged, logged_step, logged_tokens = time.monotonic(), done.step, done.num_tokens
    read, places = 0, 0  # tokens, and places that they take with their padding
    clock = time.process_time if section.clock == "processor" else time.monotonic
    began = clock() - done.seconds
    metrics_log = MetricsLog(
        recipe.run_dir,
        recipe.log,
        recipe,
        None if start is None else done.step,
        accelerator.is_main_process,
    )
    model.train()
    timer = StepClock(target.device)
    reader = prefetched(windows(), section.prefetch)
    steps = f"steps of {recipe.name}"
    bar = progress(num_steps, steps, math.inf, done.step, accelerator.is_main_process)
    with metrics_log, bar as advance, _Signals() as signals, closing(reader):
        if done.step >= num_steps or done.seconds >= limit:
            measure(None)  # all steps were made, and the drafter was not saved
        else:
            for window in timer.waiting(reader):
                # ---- one optimizer step ----
                elapsed = _same_everywhere(accelerator, clock() - began, limit)
                # A run limited by time moves along its schedule by the clock, if that is further.
                place = max(done.step, elapsed / limit * num_steps)
                lr = section.lr * lr_factor(
                    place, num_steps, section.warmup_ratio * num_steps, section.min_lr_ratio
                )
                set_lr(optimizer, lr)
                done.epoch, done.index, done.rows = window.epoch, window.index, window.rows
                read, places = read + window.num_read, places + window.num_places
                with timer.phase("target"):
                    batches = [complete(batch) for batch in window.batches]
                slots = [count_slots(batch) for batch in batches]
                empty = [b for b, n in zip(batches, slots, strict=True) if not n]
                num_empty = sum(batch.row_ids != [STAND_IN] for batch in empty)
                total, num_empty = sum_over_ranks(accelerator, [sum(slots), num_empty])
                healthy, step_sums = [], dict[str, Tensor]()
                for i, batch in enumerate(batches):
                    scale, ends = 1 / max(total, 1), i + 1 == len(batches)
                    with timer.micro_batch(model, batch.ids_BS.numel()):
                        ok, stats = run_micro_batch(accelerator, model, batch, scale, ends)
                    healthy.append(ok)
                    for name, value in stats.items():
                        step_sums[name] = step_sums.get(name, 0) + value
                with timer.phase("optimizer"):
                    norm = take_step(accelerator, model, optimizer, section.clip)
                done.step += 1
                advance(1)
                done.num_tokens += total
                done.num_empty += num_empty
                done.seconds = clock() - began
                if math.isfinite(norm):
                    for name, value in step_sums.items():
                        sums[name] = sums.get(name, 0) + value
                    norms.append(norm)
                else:
                    _report_skipped(done, batches, healthy, section.max_skipped_steps)
                # ---- once in a while ----
                last = done.step >= num_steps or done.seconds >= limit
                last = bool(_same_everywhere(accelerator, float(last), limit))
                if done.step % recipe.log.every == 0 or last:
                    now = time.monotonic()
                    pace = (now - logged) / max(done.step - logged_step, 1)
                    left = min((num_steps - done.step) * pace, limit - done.seconds)
                    numbers = means_of(total_sums(accelerator, sums)) if sums else {}
                    numbers |= {
                        "lr": lr,
                        "grad_norm": sum(norms) / max(len(norms), 1),
                        "grad_norm_max": max(norms, default=math.nan),
                        "epoch": window.share,
                        "rows": done.rows,
                        "num_tokens": done.num_tokens,
                        "num_skipped": done.num_skipped,
                        "num_empty": done.num_empty,
                        "tokens_per_second": (done.num_tokens - logged_tokens) / (now - logged),
                        "share_supervised": (done.num_tokens - logged_tokens) / max(read, 1),
                        "share_padding": 1 - read / max(places, 1),
                        **timer.numbers(),
                        "minutes": done.seconds / 60,
                        "minutes_left": max(left, 0.0) / 60,
                    }
                    metrics_log.log(done.step, numbers)
                    sums, norms, logged, logged_tokens = {}, [], now, done.num_tokens
                    read, places, logged_step = 0, 0, done.step
                every = section.validate_every
                if last or (every and done.step % every == 0):
                    paused, paused_at = time.monotonic(), clock()
                    page = recipe.run_dir / "samples" / f"step-{done.step}.html"
                    measured, numbers = measure(page)
                    quality = numbers.get("valid/tau", numbers.get("valid/tau_teacher_forced"))
                    if rank == 0 and isinstance(quality, float) and math.isnan(quality):
                        log.warning(
                            "no held-out answer is long enough for loss.num_steps %d, so no step "
                            "is the best one: hold out more, or set train.validate_prompts",
                            recipe.loss.num_steps,
                        )
                    if isinstance(quality, float) and done.improve(quality) and rank == 0:
                        best = recipe.run_dir / "drafter-best"
                        save_drafter(best, measured.drafter, target, recipe, done.num_tokens)
                    metrics_log.log(done.step, numbers)
                    if page.is_file():
                        metrics_log.attach(done.step, "samples", page)
                    began += clock() - paused_at  # validation is not training time
                    logged += time.monotonic() - paused
                    timer.leave_out(time.monotonic() - paused)
                stop = _same_everywhere(accelerator, float(signals.received), 0)
                if last or stop or (section.save_every and done.step % section.save_every == 0):
                    done.window = total_sums(accelerator, sums) | {"grad_norm": norms}
                    checkpoint.save(accelerator, recipe.run_dir, done, recipe, model, optimizer)
                if last:
                    break
                if stop:
                    raise Interrupted(int(stop))
    finished = whole()
    close(accelerator, model)
    return done, finished


def _report_skipped(
    done: checkpoint.Progress,
    batches: list[Batch],
    healthy: list[Tensor],
    limit: int,
) -> None:
    """Say which rows a step was skipped for; UserError when there were too many such steps.

    Named are the micro-batches whose loss or target states are not finite; where there is none
    (a gradient overflowed), all rows of the step.
    """
    done.num_skipped += 1
    mine = [[b.row_ids, bool(ok)] for b, ok in zip(batches, healthy, strict=True)]
    found = gather_object(mine)
    guilty = [ids for ids, ok in found if not ok]
    named = [row_id for ids in guilty or [ids for ids, _ in found] for row_id in ids]
    what = "loss or target states" if guilty else "gradient"
    said = f"step {done.step}: the {what} not finite; rows {', '.join(sorted(named)[:16])}"
    log.warning("%s; the step was skipped (%d so far)", said, done.num_skipped)
    if done.num_skipped > limit:
        raise UserError(
            f"{said}. {done.num_skipped} steps were skipped, train.max_skipped_steps is {limit}: "
            "look at these rows, lower train.lr or train.clip, or raise the limit; no skipped step "
            "changed the weights"
        )


def _same_everywhere(accelerator: Accelerator, number: float, limit: float) -> float:
    """The largest value of all ranks, where ranks could disagree (clocks, signals)."""
    if accelerator.num_processes == 1 or limit == math.inf:
        return number
    values: Tensor = accelerator.gather(torch.tensor([number], device=accelerator.device))
    return float(values.max())
