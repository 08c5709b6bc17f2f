"""What somebody killed is tried once more, and nothing else is."""

from __future__ import annotations

import pytest

from compile_stage.core.errors import WorkerError
from compile_stage.core.killed_workers import once_more_after_a_kill


@pytest.mark.parametrize(("kills", "killed", "attempts"), [(0, True, 1), (1, True, 2), (2, True, 2), (1, False, 1)])
def test_one_kill_is_forgiven(kills: int, killed: bool, attempts: int) -> None:
    """Broken: a slower candidate wins where somebody killed the faster one's worker, or a crash is tried for ever."""
    made: list[bool] = []

    def attempt(after_a_kill: bool) -> str:
        made.append(after_a_kill)
        if len(made) <= kills:
            raise WorkerError("crash", "ended by SIGKILL", killed=killed)
        return "done"

    if kills < attempts:
        assert once_more_after_a_kill(attempt) == "done"
    else:
        with pytest.raises(WorkerError):
            once_more_after_a_kill(attempt)
    assert made == [False, True][:attempts]
