"""`backends: auto`: whatever is installed and suits the device, and a short look at what is hopeless."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile_stage import api
from compile_stage.core.records import RunResult
from compile_stage.engine.local import LocalEngine
from compile_stage.pipeline import pruning
from compile_stage.report.result import result_json_schema

pytestmark = [
    pytest.mark.usefixtures("fake_backends", "known_original"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

BODY = """\
performance: {min_speedup: null}
budget: {measure_seconds: 3, soak_seconds: 0.2, predict_seconds: 0}
compliance: {allowed_backends: [onnxruntime, fake-slow]}
"""


def run_beside_slow(other: str, model: Path, write_policy: Callable[..., Path]) -> tuple[RunResult, Path]:
    """A run of two backends, fake-slow and `other`; and the folder of its reports."""
    policy = write_policy("backends: auto, precisions: [fp32]", BODY.replace("onnxruntime", other))
    out = policy.parent / "out"
    return api.run(f"folder:{model}", policy, out=out, publish=False), out


@pytest.mark.slow
def test_what_is_hopeless_is_dropped_early_and_said(small_model: Path, write_policy: Callable[..., Path]) -> None:
    """Broken: a backend that is many times slower would cost each round of a run that only asked for whatever is good,
    or would vanish from the report."""
    policy = write_policy("backends: auto, precisions: [fp32], batch_sizes: [1, 4]", BODY)
    result = api.run(f"folder:{small_model}", policy, out=policy.parent / "out", publish=False)
    target = result.targets[0]
    found = {candidate.job.backend: candidate for candidate in target.candidates}
    assert set(found) == {"onnxruntime", "fake-slow"}
    assert target.selection.winner == found["onnxruntime"].job.id
    slow = found["fake-slow"]
    assert target.selection.states[slow.job.id] == "lost"
    assert re.match(r"dropped after \d+ rounds: its latency was at least", target.selection.reasons[slow.job.id])
    assert [timing.rounds for timing in slow.measurement.timings] in ([2], [3], [4], [5], [6])
    assert len(found["onnxruntime"].measurement.timings) == 2
    assert "its latency was at least" in (policy.parent / "out" / "report.md").read_text()

    named = api.run(
        f"folder:{small_model}", policy, sets=["targets.cpu.backends=[onnxruntime, fake-slow]"],
        out=policy.parent / "named", publish=False,
    )  # fmt: skip
    (slow,) = [c for c in named.targets[0].candidates if c.job.backend == "fake-slow"]
    assert [timing.batch_size for timing in slow.measurement.timings] == [1, 4]


@pytest.mark.slow
def test_a_hopeless_one_is_dropped_before_a_proof_that_takes_long(
    small_model: Path, write_policy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: minutes of a run that asked for whatever is good would go into proving what loses anyway; or it would
    count as proven, or as failed; or what is named would be dropped too."""
    monkeypatch.setattr(pruning, "WORTH_S", 1.0)  # the proof takes 64 calls of 20 ms
    policy = write_policy("backends: auto, precisions: [fp32]", BODY)
    out = policy.parent / "out"
    result = api.run(f"folder:{small_model}", policy, out=out, publish=False)
    target = result.targets[0]
    found = {candidate.job.backend: candidate for candidate in target.candidates}
    slow, good = found["fake-slow"], found["onnxruntime"]
    assert result.exit_code == 0
    assert target.selection.winner == good.job.id
    assert target.selection.states[slow.job.id] == "compiled_not_validated"
    assert slow.verdict is None
    reason = target.selection.reasons[slow.job.id]
    assert re.fullmatch(
        r"dropped after [26] rounds: its latency was at least [\d.e+]+ times that of the original in each, so it was "
        r"not validated, which would have taken about [\d.]+ seconds; to have it validated, list the backends by name "
        r"instead of auto",
        reason,
    )
    assert {event.step for event in result.events if event.job_id == slow.job.id} == {"compile", "look", "benchmark"}
    assert {event.step for event in result.events if event.job_id == good.job.id} >= {"look", "validate"}

    import jsonschema

    written = json.loads((out / "result.json").read_text())
    jsonschema.validate(written, result_json_schema())
    (row,) = [one for one in written["targets"][0]["candidates"] if one["backend"] == "fake-slow"]
    assert row["state"] == "compiled_not_validated"
    assert row["reason"] == reason
    assert row["verdict"] is None
    assert row["timing"]["by_batch"]["1"]["rounds"] in (2, 6)
    assert reason in (out / "report.md").read_text()
    assert f'<skipped message="{reason}"' in (out / "junit.xml").read_text()

    started = _count_workers(monkeypatch)
    again = api.run(f"folder:{small_model}", policy, out=policy.parent / "again", publish=False)
    assert again.targets[0].selection.reasons == target.selection.reasons
    assert not [name for name in started if name.startswith("small-net")], "what was found is looked at anew"

    named = api.run(
        f"folder:{small_model}", policy, sets=["targets.cpu.backends=[onnxruntime, fake-slow]"],
        out=policy.parent / "named", publish=False,
    )  # fmt: skip
    (slow,) = [c for c in named.targets[0].candidates if c.job.backend == "fake-slow"]
    assert slow.verdict is not None
    assert "look" not in {event.step for event in named.events}


@pytest.mark.slow
def test_what_was_dropped_is_proven_after_all_when_nothing_else_passes(
    small_model: Path, write_policy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a run that has a winner would end without one, since a short look threw it away."""
    monkeypatch.setattr(pruning, "WORTH_S", 1.0)
    result, out = run_beside_slow("fake-constant", small_model, write_policy)
    target = result.targets[0]
    assert target.winner is not None
    assert target.winner.job.backend == "fake-slow"
    assert target.winner.verdict is not None
    assert target.winner.verdict.passed
    (note,) = [note for note in result.notes if "validated after all" in note]
    assert "and then validated after all, since no other candidate passed" in note
    assert note in (out / "report.md").read_text()


@pytest.mark.slow
def test_what_passes_and_dies_while_it_is_measured_leaves_the_dropped_one_to_be_proven(
    small_model: Path, write_policy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: whether anything wins would be asked before the measurement, which has its own ways to fail."""
    monkeypatch.setattr(pruning, "WORTH_S", 1.0)
    result, _ = run_beside_slow("fake-dies-later", small_model, write_policy)
    target = result.targets[0]
    states = {candidate.job.backend: target.selection.states[candidate.job.id] for candidate in target.candidates}
    assert states == {"fake-slow": "won", "fake-dies-later": "failed"}
    assert any("validated after all" in note for note in result.notes)


@pytest.mark.slow
def test_a_job_starts_one_worker_where_its_backend_has_no_toolchain(
    small_model: Path, write_policy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: each job would pay for a second process, its imports and its memory, and never call it."""
    started = _count_workers(monkeypatch)
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", BODY)
    result = api.run(f"folder:{small_model}", policy, out=policy.parent / "out", publish=False)
    (candidate,) = result.targets[0].candidates
    assert started.count(candidate.job.id) == 1
    assert started.count("source") == 1


def _count_workers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the workers that are started from now on."""
    started: list[str] = []
    start = LocalEngine.worker

    def counted(self: LocalEngine, name: str, needs: Any) -> Any:
        started.append(name)
        return start(self, name, needs)

    monkeypatch.setattr(LocalEngine, "worker", counted)
    return started
