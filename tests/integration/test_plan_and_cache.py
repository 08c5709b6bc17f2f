"""`plan` says what the cache already holds, by looking where `run` would look."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from compile_stage import api
from compile_stage.cli.render import Display
from compile_stage.core.records import Plan
from compile_stage.engine.local import LocalEngine

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

FAST = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}"


def by_scheme(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {job.scheme.name: plan.cached_steps[job.id] for job in plan.jobs}


def test_plan_knows_what_a_run_would_find_and_opens_the_source_once(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: nobody would know whether the next run takes seconds or an hour, or asking would compile."""
    policy = write_policy("backends: [onnxruntime], precisions: [int8-dynamic, fp32]", FAST)
    uri = f"folder:{small_model}"

    assert set(by_scheme(api.plan(uri, policy)).values()) == {()}  # the source is opened, and its samples are read
    with monkeypatch.context() as patched:
        patched.setattr(LocalEngine, "worker", None)
        assert set(by_scheme(api.plan(uri, policy)).values()) == {()}

    result = api.run(uri, policy, out=tmp_path / "out", publish=False)
    assert result.exit_code == 0, result.problem

    with monkeypatch.context() as patched:
        patched.setattr(LocalEngine, "worker", None)
        full = api.plan(uri, policy)
        assert by_scheme(full) == {
            "int8-dynamic": ("lower", "compile", "validate", "benchmark"),
            "fp32": ("compile", "validate", "benchmark"),
        }
        tighter = api.plan(uri, policy, sets=["tolerances.fp32.cosine=0.99999"])
        # Another limit is another proof; the same candidates are then measured against the same original.
        assert by_scheme(tighter) == {"int8-dynamic": ("lower", "compile", "validate"), "fp32": ("compile",)}
    more = ["targets.cpu.threads=2"]
    api.plan(uri, policy, sets=more)  # whether the backend takes the graph on such a target is asked once
    with monkeypatch.context() as patched:
        patched.setattr(LocalEngine, "worker", None)
        assert by_scheme(api.plan(uri, policy, sets=more)) == {"int8-dynamic": ("lower",), "fp32": ()}

    shown = io.StringIO()
    display = Display(shown, width=200)
    display.show_plan(full)
    display.show_plan(tighter)
    assert "nothing: all of it is in the cache" in shown.getvalue()
    assert "validate, benchmark (cached: compile)" in shown.getvalue()
