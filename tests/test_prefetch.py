"""Reading ahead changes nothing but the time."""

import threading
import time
from collections.abc import Iterator

import pytest

from train.prefetch import prefetched


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_same_items_in_the_same_order(num_ahead: int) -> None:
    assert list(prefetched(iter(range(20)), num_ahead)) == list(range(20))


@pytest.mark.parametrize("num_ahead", [0, 2])
def test_an_error_comes_at_its_place(num_ahead: int) -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("row 3 is damaged")

    reader = prefetched(items(), num_ahead)
    assert [next(reader), next(reader)] == [1, 2]
    with pytest.raises(ValueError, match="row 3 is damaged"):
        next(reader)


def test_at_most_so_many_are_made_ahead() -> None:
    made = []

    def items() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            yield i

    reader = prefetched(items(), 2)
    assert next(reader) == 0
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3]  # one read, two waiting, one in the thread's hand
    reader.close()


def test_leaving_ends_the_thread() -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    reader = prefetched(iter(range(100)), 2)
    assert next(reader) == 0
    assert "prefetch" in names()
    reader.close()
    assert "prefetch" not in names()
