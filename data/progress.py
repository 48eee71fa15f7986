"""Progress of long work: a bar on a terminal, plain lines in a log."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

logger = logging.getLogger("draftsmith")


def log_to_stderr(enabled: bool = True) -> None:
    """Show the project's log lines (for scripts); `enabled` is False on all ranks but the main."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger.handlers = [handler] if enabled else [logging.NullHandler()]
    logger.setLevel(logging.INFO)
    logger.propagate = False


@contextmanager
def progress(
    total: int | None,
    description: str,
    log_seconds: float = 30.0,
    num_done: int = 0,
    enabled: bool = True,
) -> Iterator[Callable[[int], None]]:
    """Yield a function that reports how many more units are done.

    On a terminal a bar with the time left is drawn. Elsewhere (a file, CI) a plain log line comes
    every log_seconds, and one at the end.

    Args:
        total: units of work; None = unknown.
        description: a noun phrase, e.g. `answers`.
        log_seconds: seconds between two log lines.
        num_done: units done before.
        enabled: False on all ranks but the main one: nothing is shown.
    """
    if not enabled:
        yield lambda _: None
        return
    console = Console()
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(description, total=total, completed=num_done)
            yield lambda num: bar.advance(task, num)
        return
    lines = _ProgressLines(total, description, log_seconds, num_done)
    yield lines.advance
    if lines.num_shown != lines.num_done:
        lines.show()


class _ProgressLines:
    def __init__(
        self, total: int | None, description: str, log_seconds: float, num_done: int
    ) -> None:
        self.total, self.description, self.log_seconds = total, description, log_seconds
        self.num_before = self.num_done = num_done
        self.num_shown = -1
        self.start = self.shown = time.monotonic()

    def advance(self, num: int) -> None:
        self.num_done += num
        if time.monotonic() - self.shown >= self.log_seconds:
            self.show()

    def show(self) -> None:
        self.shown, self.num_shown = time.monotonic(), self.num_done
        of_total = "" if self.total is None else f"/{self.total}"
        seconds, num_new = self.shown - self.start, self.num_done - self.num_before
        left = ""
        if self.total is not None and 0 < num_new < self.total - self.num_before:
            left = f", about {seconds / num_new * (self.total - self.num_done):.0f} s left"
        text = f"{self.description} {self.num_done}{of_total}  {seconds:.0f} s{left}"
        logger.info(text)
