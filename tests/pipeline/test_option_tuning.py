"""Option tuning: what may be tried, what is better, and how the steps are laid out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import factories
import numpy as np
import pytest
from factories import measurement, passed, run_context, target, target_policy, timing

from compile_stage.core import plugins
from compile_stage.core.records import Budget, Candidate, Job, Measurement, OptimizationStep, Plan, TuningOption
from compile_stage.measure.restarts import merge
from compile_stage.pipeline.inputs import TargetRun
from compile_stage.pipeline.option_tuning import Tuning, lay_out, tune
from compile_stage.pipeline.tuning_options import is_better, options_of, refuse_option, tuned_job
from compile_stage.steps.select import select

TARGET = target(batch_sizes=(1, 8), threads=2)
POLICY = target_policy(TARGET, ladder=True)
NO_ARENA = TuningOption(kind="memory", name="no-arena", options={"memory_arena": False})
DENORMALS = TuningOption(kind="tuning", name="denormals", options={"config": {"session.set_denormal_as_zero": "1"}})


def job(precision: str = "fp32", **options: Any) -> Job:
    where = replace(TARGET, options={"onnxruntime": options, "openvino": {"num_streams": 1}})
    return factories.job(precision, where=where)


def measured(speedup: float | None, memory: float = 100e6, noise: float = 0.001) -> Measurement:
    return measurement(timings=(timing(speedup, noise=noise),), peak_memory_bytes=int(memory))


def candidate(of: Job, speedup: float | None = 2.0) -> Candidate:
    if speedup is not None:
        return passed(of, speedup)
    return passed(of, measurement=None).in_state("failed", "it passes every gate, but it was not measured")


# ------------------------------------------------------------------------------------------------------ what is tried


def test_a_rung_is_laid_over_the_options_and_named_in_the_job() -> None:
    """Broken: a setting would wipe out the policy's own options, or two attempts would share an id."""
    lower = tuned_job(job(config={"session.x": "1"}), NO_ARENA)
    upper = tuned_job(lower, DENORMALS)
    assert upper.target.options == {
        "onnxruntime": {"config": {"session.x": "1", "session.set_denormal_as_zero": "1"}, "memory_arena": False},
        "openvino": {"num_streams": 1},
    }
    assert upper.id == "m-1--cpu--onnxruntime--fp32--memory-no-arena--tuned-denormals"
    assert upper.scheme.name == "fp32+no-arena+denormals"
    assert upper.tuning_options == ("no-arena", "denormals")


@pytest.mark.parametrize(
    ("rung", "options", "stated"),
    [
        (NO_ARENA, {"memory_arena": True}, "memory_arena"),
        (DENORMALS, {"config": {"session.set_denormal_as_zero": "0"}}, "session.set_denormal_as_zero"),
        (DENORMALS, {"config": {"session.other": "0"}, "memory_arena": True}, None),
    ],
)
def test_what_the_policy_says_is_not_overruled(rung: TuningOption, options: dict[str, Any], stated: str | None) -> None:
    """Broken: an option that a team wrote down would be changed by the ladder."""
    reason = refuse_option(rung, job(**options))
    assert (reason is None) if stated is None else (stated in str(reason))


def test_memory_comes_before_tuning() -> None:
    """Broken: the order of the ladder would be that of a backend's list."""
    kinds = [rung.kind for rung in options_of("onnxruntime", TARGET, job().scheme)]
    assert kinds == sorted(kinds)
    assert set(kinds) == {"memory", "tuning"}


def test_a_backend_without_rungs_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a third party's backend that offers no tuning options would fail."""
    theirs = plugins.load("backends", "torchscript")
    monkeypatch.setattr(plugins, "load", lambda group, name: theirs)
    assert options_of("theirs", TARGET, job().scheme) == []


def test_threads_decide_what_is_worth_a_try() -> None:
    """Broken: minutes would go to settings of a thread pool that is not there."""
    names = {rung.name for rung in options_of("onnxruntime", replace(TARGET, threads=1), job().scheme)}
    assert not names & {"no-spinning", "dynamic-blocks"}


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(("threads", "fewer"), [(1, []), (2, [1]), (3, [1]), (8, [4, 1])])
def test_fewer_threads_are_for_short_calls(backend: str, threads: int, fewer: list[int]) -> None:
    """Broken: a small model on many cores waits for threads that it need not wake."""
    offered = options_of(backend, replace(TARGET, threads=threads), job().scheme)
    assert [option.options["threads"] for option in offered if option.worth_a_try == "short-calls"] == fewer
    assert all(option.opening for option in offered if option.worth_a_try)


# ------------------------------------------------------------------------------------------------------ what is better


@pytest.mark.parametrize(
    ("speedup", "memory", "prefer", "kept"),
    [
        (1.10, 100e6, "latency", True),
        (1.10, 200e6, "latency", True),
        (1.01, 100e6, "latency", False),  # within the resolution
        (0.90, 100e6, "latency", False),
        (0.99, 80e6, "latency", True),  # as fast, and less memory
        (0.99, 99.5e6, "latency", False),  # less memory by less than two runs of one process differ
        (0.90, 80e6, "latency", False),
        (0.90, 80e6, "memory", True),
        (1.10, 100e6, "memory", True),
        (1.10, 110e6, "memory", False),
    ],
)
def test_a_rung_must_pay(speedup: float, memory: float, prefer: Any, kept: bool) -> None:
    """Broken: settings would be kept that do nothing, or for what the policy does not prefer."""
    found, reason = is_better(measured(speedup, memory), measured(None), replace(POLICY, prefer=prefer))
    assert found == kept, reason
    assert reason.startswith("accepted" if kept else "rejected")
    assert f"{speedup:.3f} times" in reason


def test_noise_is_no_gain() -> None:
    """Broken: on a restless machine chance would climb the ladder."""
    kept, reason = is_better(measured(1.10, noise=0.5), measured(None), POLICY)
    assert not kept, reason


def test_of_equals_the_one_with_fewer_settings_wins() -> None:
    """Broken: settings that change nothing would ship."""
    plain = candidate(job())
    tuned = candidate(tuned_job(job(), DENORMALS), 2.01)
    assert select((tuned, plain), POLICY).winner == plain.job.id
    faster = candidate(tuned_job(job(), DENORMALS), 2.2)
    assert select((faster, plain), POLICY).winner == faster.job.id


# -------------------------------------------------------------------------------------------------------- the whole way


def ladder(tuning: Tuning, *candidates: Candidate) -> tuple[OptimizationStep, ...]:
    return lay_out(tuning, candidates, select(candidates, POLICY), measured(None), POLICY)


def test_each_step_is_compared_with_the_climbed_one_before() -> None:
    """Broken: what was dropped would count, or a gain would be told twice."""
    lean = tuned_job(job("int8"), NO_ARENA)
    tuned = tuned_job(lean, DENORMALS)
    kept = [
        OptimizationStep(kind="memory", name="no-arena", job_id=lean.id, reason="accepted: ..."),
        OptimizationStep(kind="tuning", name="slow", job_id="x", accepted=False, reason="rejected: ..."),
        OptimizationStep(kind="tuning", name="denormals", job_id=tuned.id, reason="accepted: ..."),
    ]
    found = ladder(
        Tuning(base=job("int8").id, steps=tuple(kept)),
        candidate(job("int8"), 4.0),
        candidate(lean, 4.0),
        candidate(tuned, 5.0),
        candidate(job(), 2.0),
    )
    assert [step.kind for step in found] == ["original", "graph", "precision", "memory", "tuning", "tuning"]
    gains = [step.speedup for step in found]
    assert gains == [None, *(pytest.approx(gain) if gain else None for gain in (2.0, 2.0, 1.0, None, 1.25))]
    assert all(step.speedup is None or step.speedup_interval is not None for step in found)


def test_a_kept_setting_that_did_not_live_through_the_measurement_is_not_climbed() -> None:
    """Broken: the next step would be compared with one that nobody measured."""
    lean = tuned_job(job(), NO_ARENA)
    step = OptimizationStep(kind="memory", name="no-arena", job_id=lean.id, reason="accepted: ...")
    found = ladder(Tuning(base=job().id, steps=(step,)), candidate(job()), candidate(lean, None))
    assert not found[-1].accepted
    assert "not measured" in found[-1].reason


def test_the_gain_over_what_was_not_started_again_is_that_of_the_rounds_that_both_ran() -> None:
    """Broken: an option that makes the model three times as fast has no figure in the report, since only the faster of
    the two was started again."""
    lean = tuned_job(job(), NO_ARENA)
    step = OptimizationStep(kind="memory", name="no-arena", job_id=lean.id, reason="accepted: ...")
    again = measurement(timings=(timing(6.0, rounds=36),))
    found = ladder(
        Tuning(base=job().id, steps=(step,)), candidate(job(), 2.0), replace(candidate(lean), measurement=again)
    )
    assert found[-1].speedup == pytest.approx(3.0, rel=0.01)


def started(seconds: float, rounds: int, random: np.random.Generator) -> Measurement:
    """One process, which is faster or slower by 4 % than the next for as long as it lives."""
    calls = seconds * np.exp(0.04 * random.standard_normal() + 0.005 * random.standard_normal(rounds))
    return measurement(timings=(timing(None, rounds=rounds, latency_s=tuple(calls.tolist())),))


def step_of(starts: list[dict[str, Measurement]]) -> OptimizationStep:
    """The last step, from what was measured in these starts."""
    merged = merge(starts, "baseline", seed=0)
    lean = tuned_job(job(), NO_ARENA)
    step = OptimizationStep(kind="memory", name="no-arena", job_id=lean.id, reason="accepted: ...")
    both = [replace(candidate(of), measurement=merged[name]) for of, name in ((job(), "plain"), (lean, "lean"))]
    return lay_out(Tuning(base=job().id, steps=(step,)), both, select(both, POLICY), merged["baseline"], POLICY)[-1]


def test_the_interval_of_a_step_holds_the_truth_though_processes_differ() -> None:
    """Broken: three starts count as rounds of one. For two equal models whose processes differ by 4 % the interval held
    1 in 41 % of cases then, and an option that gained nothing is reported as a gain."""
    random, held, trials = np.random.default_rng(1), 0, 100
    for _ in range(trials):
        starts = [{name: started(0.01, 12, random) for name in ("baseline", "plain", "lean")} for _ in range(3)]
        low, high = step_of(starts).speedup_interval or (0.0, 0.0)
        held += low <= 1 <= high
    assert held >= 0.85 * trials


def test_a_step_over_what_was_started_once_has_room_for_what_processes_differ_by() -> None:
    """Broken: the step before was not started again, so one process of each is compared, and the rounds of these two
    are believed to a per mille. Or the 4 % that is assumed is taken, though the others show that processes hardly
    differ."""
    random = np.random.default_rng(2)
    starts = [{name: started(0.01, 12, random) for name in ("baseline", "lean")} for _ in range(3)]
    starts[0]["plain"] = started(0.03, 12, random)
    low, high = step_of(starts).speedup_interval or (0.0, 0.0)
    assert low < 3 < high
    assert high / low > 1.1
    alike = [{"baseline": measured(None), "lean": measured(2.0)} for _ in range(3)]
    alike[0]["plain"] = measured(1.0)
    low, high = step_of(alike).speedup_interval or (0.0, 0.0)
    assert high / low < 1.05


def test_without_a_lower_precision_or_a_candidate_the_ladder_says_so() -> None:
    """Broken: a step that is missing would be missing without a word."""
    stays = ladder(Tuning(base=job().id, reason="mine offers no settings"), candidate(job()))
    assert [(step.kind, step.accepted) for step in stays] == [
        ("original", True), ("graph", True), ("precision", False), ("memory", False),
    ]  # fmt: skip
    assert all(step.reason for step in stays if not step.accepted)
    nothing = lay_out(Tuning(reason="no candidate passed"), (), select((), POLICY), None, POLICY)
    assert [step.accepted for step in nothing] == [False, False]
    assert all(step.reason for step in nothing)


def test_a_budget_that_is_used_up_is_said(tmp_path: Path) -> None:
    """Broken: a ladder would go on after the run's time, or end without a word. No engine is there: nothing may
    start."""
    policy = factories.policy(POLICY, budget=Budget(minutes=0.5, measure_seconds=30))
    plan = Plan(source=factories.source(), policy=policy, jobs=(), refused=())
    run = TargetRun(run_context(tmp_path), plan, POLICY, inputs=None)  # type: ignore[arg-type]
    candidates, tuning = tune(run, [candidate(job())])
    assert [one.job.id for one in candidates] == [job().id]
    assert tuning is not None
    assert tuning.steps
    assert all("budget of 0.5 minutes" in step.reason and not step.job_id for step in tuning.steps)
    without = replace(run, policy=replace(POLICY, ladder=False))
    assert tune(without, candidates) == (candidates, None)
