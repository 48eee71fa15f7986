"""Work done ahead by a thread, in the same order: reading rows while the drafter trains."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from data.batch import Batch

Item = TypeVar("Item")
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Window:
    """What one optimizer step reads, and where the reader stands behind it.

    epoch, index, rows: as in checkpoint.Progress. share: epochs read, as a number for people.
    num_read: tokens of its rows, of all ranks, prompts included. num_places: with the padding.
    """

    batches: list[Batch]
    epoch: int
    index: int
    rows: str
    share: float
    num_read: int
    num_places: int


def prefetched(items: Iterator[Item], num_ahead: int) -> Generator[Item, None, None]:
    """The items of an iterator, of which up to `num_ahead` are made ahead by a thread.

    Order and contents are those of `items`; what it raises is raised at its place. Since the thread
    runs ahead, `items` must not move state that says where the reader stands: let each item carry
    it. Closing this generator (also by leaving a loop over it) ends the thread.

    Args:
        num_ahead: 0 = no thread: each item is made when it is asked for.
    """
    if num_ahead == 0:
        yield from items
        return
    reader = _Ahead(items, num_ahead)
    try:
        while (entry := reader.ready.get())[0] != "end":
            if entry[0] == "error":
                raise entry[1]
            yield entry[1]
    finally:
        reader.stop.set()
        reader.thread.join()


class _Ahead:
    """The thread; it hands over (item, error or end; value)."""

    def __init__(self, items: Iterator[Any], num_ahead: int) -> None:
        self.items = items
        self.ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=num_ahead)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            for item in self.items:
                self._put("item", item)
                if self.stop.is_set():
                    return
            self._put("end", None)
        except BaseException as error:  # raised again where it is read
            self._put("error", error)

    def _put(self, kind: str, value: Any) -> None:
        while not self.stop.is_set():
            try:
                self.ready.put((kind, value), timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return
