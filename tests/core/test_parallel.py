"""Work in threads comes back in order, and reads no further ahead than it works."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from compile_stage.core.environment import available_cores
from compile_stage.core.parallel import granted_threads, in_threads


@pytest.mark.parametrize("threads", [1, 3])
def test_answers_come_in_the_order_of_the_items(threads: int) -> None:
    """Broken: statistics would be merged in the order of chance, and the same model would give other bytes."""

    def slow_when_even(item: int) -> int:
        time.sleep(0.01 * (item % 2 == 0))
        return item * item

    assert list(in_threads(slow_when_even, range(12), threads)) == [item * item for item in range(12)]
    assert list(in_threads(slow_when_even, (), threads)) == []


def test_threads_work_at_once() -> None:
    """Broken: the second core would stand idle; the barrier lets nobody through alone."""
    barrier = threading.Barrier(2, timeout=30)

    def meet(_: int) -> bool:
        barrier.wait()
        return True

    assert list(in_threads(meet, range(4), 2)) == [True] * 4


def test_no_more_items_are_read_than_are_under_way() -> None:
    """Broken: all samples of a data set would be held in memory at once."""
    read = 0

    def items() -> Iterator[int]:
        nonlocal read
        for item in range(20):
            read += 1
            yield item

    for done, _ in enumerate(in_threads(lambda item: item, items(), 3)):
        assert read <= done + 3


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_comes_where_its_answer_would(threads: int) -> None:
    """Broken: a sample that can't be run would pass in silence, or hide those before it."""
    answers = in_threads(lambda item: 1 // (3 - item), range(9), threads)
    assert [next(answers) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(answers)


@pytest.mark.parametrize(("said", "granted"), [("3", 3), ("", None), ("0", None), ("many", None)])
def test_what_the_engine_granted(said: str, granted: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a worker would take more threads than its job was given, or die of what somebody else wrote there."""
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert granted_threads() == (granted or available_cores())
