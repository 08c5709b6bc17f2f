"""The workers in which third parties' plug-ins answer the stage's questions, and when they live."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from factories import run_context, target

from compile_stage.core import plugins
from compile_stage.engine.local import LocalEngine


def workers() -> list[int]:
    """Processes of workers that this one has started."""
    return [child.pid for child in psutil.Process().children() if "compile_stage.engine.worker" in child.cmdline()]


@pytest.mark.usefixtures("fake_backends", "isolated_home")
def test_no_plug_in_has_a_process_beside_a_measurement(tmp_path: Path) -> None:
    """Broken: a plug-in starts a thread when it is imported to be asked, which computes while the original is timed. It
    takes no turns, so nobody watches it, and its backend wins since the original looks slow."""
    before = workers()
    engine = LocalEngine()
    context = run_context(tmp_path, engine)
    try:
        backend = plugins.load("backends", "fake-slow")
        assert backend.schemes(target(), "fp32")
        assert len(workers()) == len(before) + 1, "it is asked in a worker, which stays for the next question"
        with context.alone():
            assert workers() == before
            assert backend.schemes(target(), "fp32"), "what it has answered is known"
            assert backend.schemes(target("other"), "fp32"), "it can be asked something new"
            assert workers() == before, "in a worker for that question alone"
        assert backend.schemes(target("a third"), "fp32")
        assert len(workers()) == len(before) + 1
    finally:
        plugins.refresh()
        engine.close()
    assert workers() == before
