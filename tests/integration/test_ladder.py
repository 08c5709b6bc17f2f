"""The ladder through the whole stage: an option that is better is accepted and measured with all,
one that is wrong or slower is rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from compile_stage import api
from compile_stage.core.records import RunResult
from compile_stage.pipeline.tuning_options import find_tuned_job

pytestmark = [
    pytest.mark.usefixtures("fake_backends", "known_original"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

BODY = "performance: {min_speedup: null}\nbudget: {measure_seconds: 2.5, soak_seconds: 0, predict_seconds: 0}"


def run(model: Path, policy: Path) -> RunResult:
    result = api.run(f"folder:{model}", policy, out=policy.parent / "out", publish=False)
    assert result.targets, result.problem
    return result


@pytest.mark.slow
def test_what_is_better_is_climbed_and_what_lies_or_is_slower_is_not(
    small_model: Path, write_policy: Callable[..., Path]
) -> None:
    """Broken: a setting would ship that changes the answers or slows the model, or the better one would not ship."""
    policy = write_policy("backends: [fake-ladder], precisions: [fp32], ladder: true", BODY)
    result = run(small_model, policy)
    target = result.targets[0]
    steps = {step.name: step for step in target.ladder}
    assert [step.kind for step in target.ladder] == ["original", "graph", "precision", "memory", *["tuning"] * 4]
    lean, quick = steps["no-ballast"], steps["quick"]
    assert lean.accepted, lean
    assert quick.accepted, quick
    assert not steps["broken"].accepted
    assert "max_rel" in steps["broken"].reason
    assert not steps["slower"].accepted
    assert "rejected: 0." in steps["slower"].reason
    assert not steps["too-late"].accepted
    assert "already set by the policy or by an accepted option: wait_ms" in steps["too-late"].reason

    measured = {candidate.job.id: candidate for candidate in target.candidates}
    assert set(measured) == {step.job_id for step in target.ladder if step.accepted and step.job_id}
    assert quick.job_id.endswith("--fp32--memory-no-ballast--tuned-quick")
    assert measured[quick.job_id].artifact.options == {"ballast_mb": 0, "wait_ms": 3}
    assert quick.speedup_interval[0] > 1.5  # 3 ms and what the network takes, instead of 10 ms and that
    below, plain = measured[lean.job_id], measured[target.ladder[1].job_id]
    assert below.measurement.peak_memory_bytes < plain.measurement.peak_memory_bytes - 60e6
    assert target.selection.winner == quick.job_id

    written = json.loads((policy.parent / "out" / "result.json").read_text())
    told = {step["name"]: step for step in written["targets"][0]["ladder"]}
    assert told["quick"]["p50_s"] < told["no-ballast"]["p50_s"]
    assert told["slower"]["p50_s"] is None
    assert told["quick"]["error"]["outcome"] == "pass"

    again = run(small_model, policy)
    assert again.targets[0].ladder == target.ladder
    worked = [event for event in again.events if event.step in ("compile", "validate", "benchmark")]
    assert worked
    assert all(event.cached for event in worked)


def test_the_plan_tells_what_may_be_tried_and_debug_finds_a_rung_by_its_id(
    small_model: Path, write_policy: Callable[..., Path]
) -> None:
    """Broken: a reader of the plan would be surprised by jobs that it did not have, and could not look into one of
    them."""
    policy = write_policy("backends: [fake-ladder], precisions: [fp32], ladder: true", BODY)
    made = api.plan(f"folder:{small_model}", policy)
    (note,) = [note for note in made.notes if note.startswith("option tuning of cpu")]
    assert "(fake-ladder: memory no-ballast, tuning broken, tuning slower, tuning quick, tuning too-late)" in note
    (job,) = made.jobs
    found = find_tuned_job(made.jobs, f"{job.id}--memory-no-ballast--tuned-quick")
    assert found is not None
    assert found.tuning_options == ("no-ballast", "quick")
    assert found.target.options["fake-ladder"] == {"ballast_mb": 0, "wait_ms": 3}
    assert find_tuned_job(made.jobs, f"{job.id}--tuned-quic") is None
    assert find_tuned_job(made.jobs, job.id) is None
    broken = api.debug(
        f"folder:{small_model}", policy_path=policy, job=f"{job.id}--tuned-broken", out=policy.parent / "debug"
    )
    assert broken.title.endswith("--tuned-broken")


def test_without_being_asked_nothing_is_tried(small_model: Path, write_policy: Callable[..., Path]) -> None:
    """Broken: every run would pay for a ladder, or publish settings that nobody asked for."""
    body = BODY.replace("measure_seconds: 2.5", "measure_seconds: 0.3")
    result = run(small_model, write_policy("backends: [fake-ladder], precisions: [fp32]", body))
    assert result.targets[0].ladder == ()
    assert [candidate.job.tuning_options for candidate in result.targets[0].candidates] == [()]
    assert "ladder" not in {event.step for event in result.events}
    assert "Option tuning" not in (Path(small_model).parent / "out" / "report.html").read_text()
