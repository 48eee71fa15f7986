"""Times of several arms that take turns, so that a busy machine slows all alike; their table."""

import statistics
import time
from collections.abc import Callable


def interleaved(arms: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of every arm, after one call each that does not count."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats + 1):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def head() -> None:
    """The head of a table, as docs/performance.md has it."""
    print("\n| what | ratio |\n|---|---|", flush=True)


def row(what: str, found: str) -> None:
    """A line of the table."""
    print(f"| {what} | {found} |", flush=True)
