"""What every step is given."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from factories import run_context

from compile_stage.core.errors import CompileStageError
from compile_stage.core.ports import Confinement
from compile_stage.engine.local import LocalEngine


class SlowEngine:
    """An engine that answers once it is released."""

    def __init__(self) -> None:
        self.released, self.answered = threading.Event(), 0

    def confinement(self) -> Confinement:
        self.released.wait(10)
        self.answered += 1
        return Confinement()


def asking() -> threading.Thread:
    [thread] = [one for one in threading.enumerate() if one.name == "confinement"]
    return thread


def test_confinement_is_found_out_beside_other_work(tmp_path: Path) -> None:
    """Broken: a run that finds all in the cache waits for a process that it does nothing in."""
    engine = SlowEngine()
    run_context(tmp_path, engine).confinement_beside()
    assert not engine.answered
    thread = asking()
    engine.released.set()
    thread.join(10)
    assert engine.answered == 1


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.06])
def test_a_run_that_ends_meanwhile_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    """Broken: a traceback of a thread, or a worker, is left of a run that ended early and closed its engine."""
    unheard: list[object] = []
    monkeypatch.setattr(threading, "excepthook", unheard.append)
    engine = LocalEngine()
    context = run_context(tmp_path, engine)
    context.confinement_beside()
    thread = asking()
    time.sleep(after_s)
    engine.close()
    thread.join(10)
    assert not thread.is_alive()
    assert not unheard
    assert not engine._workers
    with suppress(CompileStageError):  # closed, or known by then
        context.confinement()
