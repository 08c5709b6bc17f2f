"""What every step is given."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from factories import run_context

from compile_stage.core.errors import WorkerError
from compile_stage.core.ports import Confinement


class Asked:
    """An engine that takes until it is told to find out, or can't."""

    def __init__(self, error: WorkerError | None = None) -> None:
        self.error, self.told, self.answered = error, threading.Event(), 0

    def confinement(self) -> Confinement:
        self.told.wait(10)
        self.answered += 1
        if self.error is not None:
            raise self.error
        return Confinement()


def asking() -> threading.Thread:
    [thread] = [one for one in threading.enumerate() if one.name == "confinement"]
    return thread


def test_confinement_is_found_out_beside_other_work(tmp_path: Path) -> None:
    """Broken: a run that finds all in the cache waits for a process that it does nothing in."""
    engine = Asked()
    run_context(tmp_path, engine).confinement_beside()
    assert not engine.answered
    thread = asking()
    engine.told.set()
    thread.join(10)
    assert engine.answered == 1


def test_that_it_can_not_be_found_out_is_said_to_who_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a traceback of a thread in the log of a run that ended for another reason, and closed its engine."""
    unheard: list[object] = []
    monkeypatch.setattr(threading, "excepthook", unheard.append)
    engine = Asked(WorkerError("crash", "the worker can't be started"))
    context = run_context(tmp_path, engine)
    context.confinement_beside()
    thread = asking()
    engine.told.set()
    thread.join(10)
    assert not unheard
    with pytest.raises(WorkerError, match="can't be started"):
        context.confinement()
