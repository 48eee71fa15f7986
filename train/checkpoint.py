"""Checkpoints that hold everything a run needs to go on as if it had never stopped.

A checkpoint is the folder `RUN/checkpoints/step-N`: the states that accelerate saves (model,
optimizer and, a file each rank, the random states of python, numpy, torch and CUDA; shards under
DeepSpeed and FSDP) and state.json: position, best metric, recipe, sizes of all files.
It is written under a temporary name and renamed, so a killed run leaves no half checkpoint.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from data.files import read_json, replace_dir, write_json
from recipes.errors import UserError
from recipes.schema import Recipe

logger = logging.getLogger("draftsmith")

STATE = "state.json"
VERSION = 1

FREE = (
    "name",
    "output_dir",
    "target.device",
    "loss.chunk_size",
    "train.save_every",
    "train.keep_checkpoints",
    "train.validate_",
    "eval.",
    "export.",
    "log.",
)
"""Recipe keys, or beginnings of keys, that may change on resume: they do not change the weights."""


@dataclass
class Progress:
    """Where a run stands.

    step: optimizer steps made.
    epoch, index: next entry of the batch plan, both 0-based; index counts this rank's entries.
    num_tokens: supervised tokens seen, all ranks.
    seconds: training time, earlier parts of a resumed run included.
    best, best_step: best validation metric so far (higher is better) and the step it was reached.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    best: float | None = None
    best_step: int | None = None

    def improve(self, metric: float) -> bool:
        """Note a validation metric of this step; True when it is the best so far."""
        if self.best is not None and not metric > self.best:
            return False
        self.best, self.best_step = metric, self.step
        return True


def folder(run_dir: Path, step: int) -> Path:
    """Folder of the checkpoint made after `step` optimizer steps."""
    return run_dir / "checkpoints" / f"step-{step}"


def save(accelerator: Accelerator, run_dir: Path, progress: Progress, recipe: Recipe) -> Path:
    """Write a checkpoint and delete the oldest ones. All ranks call it.

    Kept are the recipe's number of newest checkpoints, and that of the best step.

    Returns:
        Its folder.
    """
    final = folder(run_dir, progress.step)
    with ExitStack() as stack:
        temporary = [""]
        if accelerator.is_main_process:
            temporary = [str(stack.enter_context(replace_dir(final)))]
        broadcast_object_list(temporary, from_process=0)
        accelerator.save_state(temporary[0])
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _write_state(Path(temporary[0]), progress, recipe, accelerator.num_processes)
    if accelerator.is_main_process:
        _rotate(run_dir, recipe.train.keep_checkpoints, progress.best_step)
    accelerator.wait_for_everyone()
    return final


def latest(run_dir: Path) -> Path | None:
    """Folder of the newest complete checkpoint; a damaged one is passed over, and that is said."""
    for path in reversed(_checkpoints(run_dir)):
        fault = _fault(path)
        if fault is None:
            return path
        logger.warning("checkpoint %s is not complete (%s); trying an older one", path, fault)
    return None


def load(accelerator: Accelerator, path: Path, recipe: Recipe) -> Progress:
    """Restore what `save` wrote. Call it on all ranks, after prepare() and before the first step.

    Args:
        accelerator: with the same models and optimizers prepared, in the same order.
        path: a checkpoint folder, e.g. from latest().
        recipe: of the run that goes on.

    Raises:
        UserError: the checkpoint is damaged, was made by another number of processes, or with a
            recipe that differs in a key that changes the result.
    """
    fault = _fault(path)
    if fault is not None:
        raise UserError(f"checkpoint {path} is not complete: {fault}")
    check_recipe(path, recipe)
    state = read_json(path / STATE)
    if state["num_processes"] != accelerator.num_processes:
        raise UserError(
            f"cannot resume from {path}: it was made by {state['num_processes']} processes, this "
            f"run has {accelerator.num_processes}; launch as many"
        )
    accelerator.load_state(str(path))
    return Progress(**state["progress"])


def check_recipe(path: Path, recipe: Recipe) -> None:
    """Refuse (UserError) a complete checkpoint of a recipe that differs in what matters."""
    changes = differences(read_json(path / STATE)["recipe"], recipe.model_dump(mode="json"))
    if changes:
        raise UserError(
            f"cannot resume from {path}: the recipe differs in keys that change the result: "
            + "; ".join(changes)
            + ". Restore them, or start anew under another name"
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
        "files": {file.relative_to(path).as_posix(): file.stat().st_size for file in files},
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
    for name, size in state["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {size} were written"
    return None


def _checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint folders, oldest first. Temporary names do not match."""
    paths = (run_dir / "checkpoints").glob("step-*")
    named = [path for path in paths if re.fullmatch(r"step-\d+", path.name)]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step-")))


def _rotate(run_dir: Path, keep: int, best_step: int | None) -> None:
    for path in _checkpoints(run_dir)[:-keep]:
        if best_step is None or path != folder(run_dir, best_step):
            shutil.rmtree(path)
