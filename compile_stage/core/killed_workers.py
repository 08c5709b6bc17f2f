"""What somebody else killed is tried once more: its worker may have been the largest process of the machine, or have
run into a time limit of it, and is not to blame."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from compile_stage.core.errors import WorkerError

T = TypeVar("T")


def once_more_after_a_kill(attempt: Callable[[bool], T]) -> T:
    """What `attempt(after_a_kill)` answers, by the second one where somebody killed a worker of the first. Without it a
    slower candidate would win, and be promoted.

    Raises:
        WorkerError: The first one failed otherwise, or somebody killed both.
    """
    try:
        return attempt(False)
    except WorkerError as error:
        if not error.killed:
            raise
    return attempt(True)
