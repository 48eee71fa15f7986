"""Checkpoints that hold everything a run needs to go on as if it had never stopped.

A checkpoint is the folder `RUN/checkpoints/step-N`:

    weights.safetensors   the trained module, whole, whatever launcher holds it in parts
    moments.safetensors   the optimizer's state by parameter name, whole
    random-R.json         random states of rank R: python, numpy, torch, CUDA
    state.json            position, best metric, recipe; size and sha256 of every file

So a run may go on with another launcher, and with another number of processes. A checkpoint is
written under a temporary name and renamed, so a killed run leaves no half one; the sums find what
a disk lost later.
"""

from __future__ import annotations

import json
import logging
import math
import random
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data.files import read_json, replace_dir, sha256, write_json, write_text
from recipes.errors import UserError
from recipes.schema import Recipe
from train.shards import set_moments, whole_moments, whole_weights

logger = logging.getLogger("draftsmith")

STATE, WEIGHTS, MOMENTS = "state.json", "weights.safetensors", "moments.safetensors"
VERSION = 2

FREE = (
    "name",
    "output_dir",
    "target.device",
    "target.placement",
    "loss.chunk_size",
    "train.save_every",
    "train.keep_checkpoints",
    "train.max_skipped_steps",
    "train.prefetch",
    "train.activation_checkpointing",
    "train.compile",
    "train.gradient_accumulation",  # times processes it must stay: see _check_step
    "train.validate_",
    "eval.",
    "export.",
    "log.",
)
"""Recipe keys, or beginnings of keys, that may change on resume: they do not change the weights."""


@dataclass
class Progress:
    """Where a run stands.

    step: optimizer steps made, skipped ones included.
    epoch, index: next entry of the batch plan, both 0-based, of all ranks together.
    rows: hash over the row ids of all steps so far, one after the other.
    num_tokens: supervised slots of depth 0 (train.distiller.count_slots) of all steps and ranks:
        where num_anchors are drawn from a row, no more than those.
    num_skipped: steps left out because a number was not finite.
    num_empty: micro-batches without one supervised token.
    seconds: training time, earlier parts of a resumed run included.
    best, best_step: best validation metric so far (higher is better) and the step it was reached.
    window: sums since the last logged line, all ranks, and the gradient norms (`grad_norm`).
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    rows: str = ""
    num_tokens: int = 0
    num_skipped: int = 0
    num_empty: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int | None = None
    window: dict[str, list[float]] = field(default_factory=dict)

    def improve(self, metric: float) -> bool:
        """Note a validation metric of this step; True when it is the best so far."""
        if math.isnan(metric) or (self.best is not None and metric <= self.best):
            return False
        self.best, self.best_step = metric, self.step
        return True


def folder(run_dir: Path, step: int) -> Path:
    """Folder of the checkpoint made after `step` optimizer steps."""
    return run_dir / "checkpoints" / f"step-{step}"


def save(
    accelerator: Accelerator,
    run_dir: Path,
    progress: Progress,
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Path:
    """Write a checkpoint and delete the oldest ones. All ranks call it.

    Kept are the recipe's number of newest checkpoints, and that of the best step.

    Args:
        model, optimizer: as accelerate prepared them.

    Returns:
        Its folder.
    """
    final = folder(run_dir, progress.step)
    weights = whole_weights(accelerator, accelerator.unwrap_model(model))
    moments = whole_moments(accelerator, model, optimizer)
    with ExitStack() as stack:
        temporary = [""]
        if accelerator.is_main_process:
            temporary = [str(stack.enter_context(replace_dir(final)))]
        broadcast_object_list(temporary, from_process=0)
        path = Path(temporary[0])
        write_text(path / f"random-{accelerator.process_index}.json", json.dumps(_random_state()))
        if accelerator.is_main_process:
            _save(weights, path / WEIGHTS)
            _save(moments, path / MOMENTS)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _write_state(path, progress, recipe, accelerator.num_processes)
    if accelerator.is_main_process:
        _rotate(run_dir, recipe.train.keep_checkpoints, progress.best_step)
    accelerator.wait_for_everyone()
    return final


def latest(run_dir: Path) -> Path | None:
    """Folder of the newest sound checkpoint; a damaged one is passed over, and that is said.

    Every file of the newest one is read, to compare its sum.

    Raises:
        UserError: there are checkpoints, and none is sound.
    """
    faults = []
    for path in reversed(_checkpoints(run_dir)):
        fault = _fault(path)
        if fault is None:
            return path
        faults.append(f"{path.name}: {fault}")
        logger.warning("checkpoint %s is damaged (%s); trying an older one", path, fault)
    if faults:
        raise UserError(
            f"no checkpoint in {run_dir / 'checkpoints'} can be used ({'; '.join(faults)}): "
            "restore one, or delete that folder and start anew"
        )
    return None


def load_weights(path: Path, module: nn.Module) -> None:
    """Put the saved weights into the trained module; before prepare(), which may divide it."""
    module.load_state_dict(load_file(path / WEIGHTS), strict=True)


def load(
    accelerator: Accelerator,
    path: Path,
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Progress:
    """Restore the rest of what `save` wrote. All ranks call it, after prepare().

    A rank that the saving run did not have keeps its random states; nothing that is learnt depends
    on them (every random choice of a step follows from the recipe's seed and its rows).

    Args:
        path: a checkpoint folder, e.g. from latest().
        recipe: of the run that goes on.

    Raises:
        UserError: see check_recipe.
    """
    state = check_recipe(path, recipe, accelerator.num_processes)
    set_moments(accelerator, model, optimizer, load_file(path / MOMENTS))
    drawn = path / f"random-{accelerator.process_index}.json"
    if drawn.is_file():
        _set_random_state(read_json(drawn))
    return Progress(**state["progress"])


def check_recipe(path: Path, recipe: Recipe, num_processes: int) -> dict[str, Any]:
    """Read state.json of a sound checkpoint, and refuse one that this run would not continue.

    Raises:
        UserError: the recipe differs in a key that changes the result, or a step would not hold
            as many micro-batches.
    """
    state: dict[str, Any] = read_json(path / STATE)
    changes = differences(state["recipe"], recipe.model_dump(mode="json"))
    if changes:
        raise UserError(
            f"cannot resume from {path}: the recipe differs in keys that change the result: "
            + "; ".join(changes)
            + ". Restore them, or start anew under another name"
        )
    _check_step(path, state, recipe, num_processes)
    return state


def _check_step(path: Path, state: dict[str, Any], recipe: Recipe, num_processes: int) -> None:
    """Processes times accumulation is the size of a step: schedule and data follow from it."""
    before = state["num_processes"] * state["recipe"]["train"]["gradient_accumulation"]
    accumulation = recipe.train.gradient_accumulation
    if num_processes * accumulation == before:
        return
    if before % num_processes == 0:
        mend = f"set train.gradient_accumulation={before // num_processes}"
    else:
        fitting = [str(n) for n in range(1, before + 1) if before % n == 0]
        mend = (
            f"launch {' or '.join(fitting)} processes, with train.gradient_accumulation = "
            f"{before} / processes"
        )
    raise UserError(
        f"cannot resume from {path}: its steps have {before} micro-batches "
        f"({state['num_processes']} processes x train.gradient_accumulation="
        f"{state['recipe']['train']['gradient_accumulation']}), this run's have "
        f"{num_processes * accumulation} ({num_processes} x {accumulation}): {mend}"
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Name dotted recipe keys that differ and change the result, as `key: old -> new`."""
    flat_old, flat_new = _flatten(old), _flatten(new)
    return [
        f"{key}: {flat_old.get(key, 'absent')} -> {flat_new.get(key, 'absent')}"
        for key in sorted(flat_old.keys() | flat_new.keys())
        if not key.startswith(FREE) and flat_old.get(key, "absent") != flat_new.get(key, "absent")
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _write_state(path: Path, progress: Progress, recipe: Recipe, num_processes: int) -> None:
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    state = {
        "version": VERSION,
        "progress": asdict(progress),
        "num_processes": num_processes,
        "recipe": recipe.model_dump(mode="json"),
        "files": {
            file.relative_to(path).as_posix(): [file.stat().st_size, sha256(file)] for file in files
        },
    }
    write_json(path / STATE, state)


def _fault(path: Path) -> str | None:
    """What makes a checkpoint unusable, or None."""
    try:
        state = read_json(path / STATE)
    except UserError as error:
        return str(error)
    if not isinstance(state, dict) or not {"version", "files", "recipe"} <= state.keys():
        return f"{STATE} is damaged"
    if state["version"] != VERSION:
        return f"format {state['version']}, this version reads {VERSION}"
    for name, (size, digest) in state["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {size} were written"
        if sha256(file) != digest:
            return f"{name} has other content than was written (its sha256 differs)"
    return None


def _checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders, oldest first. Temporary names do not match."""
    paths = (run_dir / "checkpoints").glob("step-*")
    named = [path for path in paths if re.fullmatch(r"step-\d+", path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step-")))


def _rotate(run_dir: Path, keep: int, best_step: int | None) -> None:
    for path in (run_dir / "checkpoints").glob(".step-*"):
        shutil.rmtree(path)  # what a killed run left half-written
    for path in _checkpoints(run_dir)[:-keep]:
        if best_step is None or path != folder(run_dir, best_step):
            shutil.rmtree(path)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}") from error


def _random_state() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=True)
    name, keys, *rest = state
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in torch.cuda.get_rng_state_all()],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    for device, values in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(torch.tensor(values, dtype=torch.uint8), device)
