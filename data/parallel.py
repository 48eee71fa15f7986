"""A function over a stream by several processes, in order and without reading far ahead."""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Mapped = Callable[[Iterable[Item]], Iterator[tuple[Item, Result]]]

BATCH = 64  # items sent to a process together
AHEAD = 4  # batches a process that may wait

_state: dict[str, Any] = {}


def _begin(function: Callable[[Any, Any], Any], settings: Any) -> None:
    _state["function"], _state["settings"] = function, settings


def _work(items: list[Any]) -> list[Any]:
    return [_state["function"](item, _state["settings"]) for item in items]


@contextmanager
def worker_map(
    num_workers: int, function: Callable[[Item, Any], Result], settings: Any
) -> Iterator["Mapped[Item, Result]"]:
    """Yield a map: items -> pairs of each item and function(item, settings), in order.

    Args:
        num_workers: processes; 0 computes here. They start anew ("spawn"), so that none inherits
            threads or a device.
        function: of a module's top level.
        settings: sent to every process once.
    """
    if num_workers == 0:
        yield lambda items: ((item, function(item, settings)) for item in items)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_workers, _begin, (function, settings)) as pool:

        def mapped(items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
            waiting: deque[Any] = deque()
            stream = iter(items)
            while batch := list(islice(stream, BATCH)):
                waiting.append((batch, pool.apply_async(_work, (batch,))))
                if len(waiting) > num_workers * AHEAD:
                    done, results = waiting.popleft()
                    yield from zip(done, results.get(), strict=True)
            for done, results in waiting:
                yield from zip(done, results.get(), strict=True)

        yield mapped
