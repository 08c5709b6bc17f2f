"""Nothing that a backend does, or says, may become a pass, or harm another job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compile_stage import api
from compile_stage.core.records import Candidate, Outcome, RunResult

pytestmark = [
    pytest.mark.usefixtures("fake_backends", "known_original"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

DYING = {
    # backend: (kind of failure, words that name it)
    "fake-segfault": ("crash", "SIGSEGV"),
    "fake-endless": ("timeout", "longer than"),
    "fake-greedy": ("out_of_memory", "memory"),
    "fake-garbage": ("exception", "dict"),
    "fake-missing-file": ("exception", "no such file"),
    "fake-raises": ("exception", "operator Foo is not supported"),
}
LYING = {
    # backend: (metric of the check that catches it, words in its reason)
    "fake-lost-output": ("outputs", "z"),
    "fake-renamed-output": ("outputs", "y_0"),
    "fake-empty": (None, ""),
    "fake-nothing": (None, ""),
    "fake-fewer-rows": (None, ""),
    "fake-nan": ("finite", "NaN"),
    "fake-one-nan": ("finite", "NaN"),
    "fake-infinite": ("finite", "infinite"),
    "fake-constant": ("cosine", ""),
    "fake-shape": ("shape", ""),
    "fake-text": (None, ""),
}


def run(model: Path, policy: Path, out: Path) -> RunResult:
    return api.run(f"folder:{model}", policy, out=out, publish=False)


def only(result: RunResult, backend: str) -> Candidate:
    return next(c for t in result.targets for c in t.candidates if c.job.backend == backend)


@pytest.mark.slow
def test_each_way_to_die_is_named_rightly_and_harms_nobody_else(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: a segfault would take the stage with it, or an endless loop would hold a CI job for ever."""
    policy = write_policy(
        f"backends: [{', '.join(DYING)}, onnxruntime], precisions: [fp32]",
        # On a loaded machine too an honest job must end before its time does, and a greedy one have the memory by then.
        "performance: {min_speedup: null}\n"
        "budget: {job_minutes: 0.4, job_memory_mb: 600, measure_seconds: 1, soak_seconds: 0, predict_seconds: 0}",
    )
    result = run(small_model, policy, tmp_path / "out")
    for backend, (kind, words) in DYING.items():
        failure = only(result, backend).failure
        assert failure is not None, backend
        assert (failure.kind, failure.step) == (kind, "compile"), (backend, failure)
        assert words in failure.problem + failure.detail, (backend, failure)
    assert result.targets[0].selection.winner == only(result, "onnxruntime").job.id
    assert result.exit_code == 0


@pytest.mark.slow
def test_a_compiler_that_measures_has_the_machine_alone(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: a tuner would time its kernels beside another compilation, and keep the wrong ones."""
    policy = write_policy(
        "backends: [fake-beside, fake-measures], precisions: [fp32]",
        "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.5, soak_seconds: 0, predict_seconds: 0}",
    )
    result = run(small_model, policy, tmp_path / "out")
    assert result.exit_code == 0
    artifacts = (only(result, name).artifact for name in ("fake-measures", "fake-beside"))
    times = [tuple(map(float, artifact.notes[-1].split())) for artifact in artifacts if artifact is not None]
    (begin, end), (other_begin, other_end) = times
    assert end <= other_begin or other_end <= begin


def test_no_false_answer_passes(small_model: Path, write_policy: Callable[..., Path], tmp_path: Path) -> None:
    """Broken: a pass with an output lost, renamed, empty, shortened, of NaN or of other values than the original's."""
    policy = write_policy(
        f"backends: [{', '.join(LYING)}], precisions: [fp32]",
        "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.5, soak_seconds: 0, predict_seconds: 0}",
    )
    result = run(small_model, policy, tmp_path / "out")
    assert result.targets[0].selection.winner is None
    assert result.exit_code == 3
    for backend, (metric, words) in LYING.items():
        candidate = only(result, backend)
        assert candidate.verdict is None or not candidate.verdict.passed, backend
        if metric is not None:
            assert candidate.verdict is not None, (backend, candidate.failure, candidate.refused)
            caught = [c for c in candidate.verdict.checks if c.outcome is not Outcome.PASS and c.gate.metric == metric]
            assert caught, (backend, candidate.verdict)
            assert any(words in c.reason for c in caught), (backend, caught)
        assert result.targets[0].selection.reasons[candidate.job.id], backend


@pytest.mark.slow
def test_slower_than_the_original_is_rejected_for_that_reason(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: an artifact that is right but slower would be shipped, as peers do."""
    policy = write_policy(
        "backends: [fake-slow], precisions: [fp32]",
        "budget: {measure_seconds: 2, soak_seconds: 0, predict_seconds: 0}",
    )
    result = run(small_model, policy, tmp_path / "out")
    assert result.exit_code == 3
    assert "slower" in result.targets[0].selection.reasons[only(result, "fake-slow").job.id]


def test_dying_while_it_is_measured_costs_only_that_candidate(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: one crash in the measurement would lose everybody's numbers, or be cached."""
    policy = write_policy(
        "backends: [fake-dies-later, onnxruntime], precisions: [fp32]",
        "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.5, soak_seconds: 0, predict_seconds: 0}",
    )
    result = run(small_model, policy, tmp_path / "out")
    failure = only(result, "fake-dies-later").failure
    assert failure is not None
    assert (failure.kind, failure.step) == ("crash", "benchmark")
    assert result.targets[0].selection.winner == only(result, "onnxruntime").job.id


@pytest.mark.parametrize("source", ["synthetic", "few"])
def test_nothing_real_compared_is_no_pass(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, source: str
) -> None:
    """Broken: made-up samples, or three of them, would prove a model."""
    policy = write_policy(
        "backends: [onnxruntime], precisions: [fp32]",
        "budget: {measure_seconds: 1, soak_seconds: 0, predict_seconds: 0}",
    )
    chosen = "data.validation.source=synthetic" if source == "synthetic" else "data.validation.max_samples=3"
    result = api.run(f"folder:{small_model}", policy, sets=[chosen], out=tmp_path / "out", publish=False)
    assert result.exit_code == 3
    (refused,) = result.refused
    assert ("synthetic" if source == "synthetic" else "there are 3 validation samples") in refused.reason
    assert not result.targets[0].candidates
