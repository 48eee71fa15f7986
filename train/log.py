"""Where a run's numbers go, and what it was: metrics and run record."""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from typing_extensions import Self

from data.files import write_json, write_text
from data.provenance import ROOT, git_state, hardware, versions
from recipes.errors import UserError
from recipes.schema import LogSection, Recipe, dump_recipe

logger = logging.getLogger("draftsmith")

Value = float | int | str | list[float]
RECIPE_FILE, RECORD_FILE = "recipe.yaml", "run.json"
START_SECONDS, END_SECONDS = 20.0, 60.0


class Sink(Protocol):
    """A place beside metrics.jsonl."""

    def write(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Take the numbers of one step."""

    def attach(self, step: int, name: str, path: Path) -> None:
        """Take a file: a page to look at (.html), or a text to keep."""

    def close(self) -> None:
        """Flush."""


class MetricsLog:
    """Numbers of a run: a line on the console, a line in metrics.jsonl, wandb and tensorboard.

    Use it as a context manager. Each line of metrics.jsonl is a JSON object with step, time (Unix
    seconds) and the metrics; a number that is not finite is null there, and spelt on the console.
    """

    def __init__(
        self,
        run_dir: Path,
        section: LogSection,
        recipe: Recipe,
        resume_step: int | None = None,
        enabled: bool = True,
    ) -> None:
        """Open all places.

        Args:
            run_dir: everything is written under it.
            section: which places there are.
            recipe: shown beside the curves.
            resume_step: step of the checkpoint that the run goes on from: later lines of
                metrics.jsonl are dropped, they come again. None starts the file anew.
            enabled: False on all ranks but the main one: every method does nothing.
        """
        self.enabled = enabled
        self.sinks: list[Sink] = []
        if not enabled:
            return
        self.path = run_dir / "metrics.jsonl"
        kept = [] if resume_step is None else _lines_until(self.path, resume_step)
        write_text(self.path, "".join(kept))
        if section.wandb != "off":
            self.sinks.append(WandbSink(run_dir, section, recipe, resume_step is not None))
        if section.tensorboard:
            self.sinks.append(TensorboardSink(run_dir, resume_step))
        for name in (RECIPE_FILE, RECORD_FILE):
            if (run_dir / name).is_file():
                self.attach(resume_step or 0, name.split(".")[0], run_dir / name)

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Write the metrics of one step everywhere."""
        if not self.enabled:
            return
        logger.info("step %d  %s", step, "  ".join(f"{k} {_show(v)}" for k, v in metrics.items()))
        line = {"step": step, "time": round(time.time(), 3)}
        line |= {key: _json_value(value) for key, value in metrics.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        for sink in self.sinks:
            sink.write(step, metrics)

    def attach(self, step: int, name: str, path: Path) -> None:
        """Hand a file over to the places beside RUN, where it lies already."""
        for sink in self.sinks:
            sink.attach(step, name, path)

    def close(self) -> None:
        """Flush and close all places."""
        for sink in self.sinks:
            sink.close()
        self.sinks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class WandbSink:
    """Weights & Biases; its files lie in RUN/wandb. Offline mode uses no network.

    Online it waits at most START_SECONDS for an answer at the start and END_SECONDS at the end; in
    between it sends from a process of its own. What was not sent stays in RUN/wandb, for `wandb
    sync`.
    """

    def __init__(self, run_dir: Path, section: LogSection, recipe: Recipe, resume: bool) -> None:
        # Crash reports would be sent over the network even in offline mode.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                f"log.wandb={section.wandb} needs wandb: pip install wandb, or set log.wandb=off"
            ) from error
        id_file = run_dir / "wandb_run_id"
        if not (resume and id_file.is_file()):
            write_text(id_file, secrets.token_hex(4))
        try:
            self.run = wandb.init(
                mode="offline" if section.wandb == "offline" else "online",
                project=section.project,
                name=recipe.name,
                id=id_file.read_text(encoding="utf-8"),
                resume="allow" if section.wandb == "online" else None,
                dir=str(run_dir),
                config=recipe.model_dump(mode="json"),
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    init_timeout=START_SECONDS,
                    login_timeout=START_SECONDS,
                    finish_timeout=END_SECONDS,
                ),
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"wandb did not start: {reason}. Log in with `wandb login`, or set "
                "log.wandb=offline (without network, and later: wandb sync)"
            ) from error
        self.page, self.name = wandb.Html, recipe.name

    def write(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Queue the numbers; wandb sends them from a process of its own."""
        self.run.log(dict(metrics), step=step)

    def attach(self, step: int, name: str, path: Path) -> None:
        """A page beside the curves, another file as an artefact."""
        if path.suffix == ".html":
            self.run.log({name: self.page(path.read_text(encoding="utf-8"))}, step=step)
        else:
            self.run.log_artifact(str(path), name=f"{self.name}-{name}", type="run")

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class TensorboardSink:
    """Event files in RUN/tensorboard."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "log.tensorboard=true needs tensorboard: pip install tensorboard, or set it false"
            ) from error
        purge_step = None if resume_step is None else resume_step + 1
        self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Write scalars; a list becomes one curve an entry."""
        for key, value in metrics.items():
            if isinstance(value, list):
                for index, entry in enumerate(value):
                    self.writer.add_scalar(f"{key}/{index}", entry, step)
            elif not isinstance(value, str):
                self.writer.add_scalar(key, value, step)

    def attach(self, step: int, name: str, path: Path) -> None:
        """Write a text; of a page, where it lies."""
        page = path.suffix == ".html"
        text = str(path) if page else path.read_text(encoding="utf-8")
        self.writer.add_text(name, text if page else f"```\n{text}\n```", step)

    def close(self) -> None:
        """Flush the event file."""
        self.writer.close()


def run_record(recipe: Recipe) -> dict[str, Any]:
    """What was run, on what, with what: enough to run it again and to judge a difference."""
    return {
        "command": shlex.join(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": git_state(ROOT),
        "versions": versions(),
        "hardware": hardware(),
        "num_processes": int(os.environ.get("WORLD_SIZE", "1")),
        "recipe": recipe.model_dump(mode="json"),
    }


def write_run_record(recipe: Recipe) -> Path:
    """Write run_record to RUN/run.json, and the resolved recipe beside it."""
    path = recipe.run_dir / RECORD_FILE
    write_json(path, run_record(recipe))
    write_text(recipe.run_dir / RECIPE_FILE, dump_recipe(recipe))
    return path


def result_line(
    folder: Path, steps: int, num_tokens: int, seconds: float, tau: float | None, decoded: bool
) -> str:
    """The end of a run in one line.

    Args:
        tau: the best of held-out rows, where there is one.
        decoded: by decoding, else teacher-forced.
    """
    kind = "validated tau" if decoded else "teacher-forced tau (nothing was decoded)"
    best = "" if tau is None else f"best {kind} {tau:.3f}, "
    return (
        f"result: {best}{steps:,} steps, {num_tokens:,} supervised tokens, "
        f"{seconds / 60:.1f} minutes; drafter in {folder}"
    )


def _lines_until(path: Path, step: int) -> list[str]:
    """Lines of a metrics file up to a step; what a killed run left half-written is dropped."""
    kept: list[str] = []
    if not path.is_file():
        return kept
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            whole = line.endswith("\n") and json.loads(line)["step"] <= step
        except (json.JSONDecodeError, KeyError, TypeError):
            whole = False
        if whole:
            kept.append(line)
    return kept


def _show(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + " ".join(_show(entry) for entry in value) + "]"
    return str(value)


def _json_value(value: Value) -> Any:
    if isinstance(value, list):
        return [_json_value(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
