"""Work on many samples in a few threads, with the answers in order.

Runtimes and NumPy let other threads run while they compute. A run of its own for each thread, itself on one thread,
computes the same numbers however many threads there are; runtimes that split one run do not promise that.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from compile_stage.core.environment import available_cores

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def granted_threads() -> int:
    """What this process may use: what the engine granted its worker, which it says as OMP_NUM_THREADS; elsewhere all
    cores of the process."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    return available_cores()


def in_threads(task: Callable[[Item], Answer], items: Iterable[Item], threads: int) -> Iterator[Answer]:
    """`task` of each item, in the order of the items, `threads` at once. No more items are read than are under way, and
    an error comes where its answer would."""
    if threads <= 1:
        yield from map(task, items)
        return
    under_way: deque[Future[Answer]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                under_way.append(pool.submit(task, item))
                if len(under_way) >= threads:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
