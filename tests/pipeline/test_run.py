"""The pipeline's own logic, driven through whole runs by an engine without processes: order, budgets, early exits,
states."""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from factories import job, policy, run_context, source, states, target, target_policy
from fake_engine import FakeEngine, Scenario
from filelock import FileLock

from compile_stage.core.cache import Cache
from compile_stage.core.context import Context
from compile_stage.core.errors import KilledError, RegistryError, SourceError, StorageError, UsageError, WorkerError
from compile_stage.core.ports import Confinement
from compile_stage.core.records import (
    Budget,
    Candidate,
    Compliance,
    Fallback,
    Gate,
    Plan,
    Policy,
    Receipt,
    RunResult,
    Waiver,
)
from compile_stage.measure import disturbance
from compile_stage.pipeline import evaluate
from compile_stage.pipeline.cache_status import cache_status
from compile_stage.pipeline.job_workers import JobWorkers, Pair
from compile_stage.pipeline.outcome import RunOptions, RunState
from compile_stage.pipeline.run import make_plan, plan_for, run

Stage = Callable[..., RunResult]


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes' load is not what is tested here."""
    monkeypatch.setattr(disturbance, "disturbed", lambda *_, **__: False)


@pytest.fixture
def context(tmp_path: Path) -> Callable[[Scenario], Context]:
    def fresh(scenario: Scenario) -> Context:
        cache = Cache(tmp_path / f"cache-{scenario.key}")
        return run_context(tmp_path, FakeEngine(scenario), cache=cache, today=date(2026, 11, 22))

    return fresh


@pytest.fixture
def stage(context: Callable[[Scenario], Context]) -> Stage:
    def run_stage(scenario: Scenario, rules: Policy, *jobs: Any) -> RunResult:
        written: list[RunResult] = []

        def write(result: RunResult, _: Path | None) -> Mapping[str, Path]:
            written.append(result)
            return {}

        surroundings = context(scenario)
        plan = Plan(source=source(), policy=rules, jobs=jobs, refused=())
        with RunState("models:/m/1", "p.yaml", RunOptions(out=None, publish=False), write) as progress:
            progress.context, progress.policy, progress.plan = surroundings, rules, plan
            run(progress, surroundings, plan)
        return written[-1]

    return run_stage


INT8, FP32 = job("int8", native=False), job("fp32")
FAST_INT8 = {"original": 0.010, "fp32": 0.005, "int8": 0.002}


def test_the_fastest_that_holds_its_tolerance_wins(stage: Stage) -> None:
    """Broken: the order of the steps, or what one hands to the next."""
    result = stage(Scenario(latency_s=FAST_INT8), policy(), INT8, FP32)
    (cpu,) = result.targets
    assert result.status == "passed"
    assert cpu.selection.winner == INT8.id
    assert cpu.selection.states == {INT8.id: "won", FP32.id: "lost"}
    assert cpu.winner is not None
    assert cpu.winner.measurement is not None
    assert cpu.winner.measurement.timings[0].speedup == pytest.approx(5.0)


def test_only_jobs_beside_others_share_the_cores(stage: Stage) -> None:
    """Broken: threads spin on cores that other jobs need; or those that are measured, alone, give theirs up."""
    both, one = Scenario(latency_s=FAST_INT8, meeting=Barrier(2)), Scenario(latency_s=FAST_INT8)
    stage(both, policy(), INT8, FP32)
    stage(one, policy(), FP32)
    assert (both.sharing, one.sharing) == ({INT8.id, FP32.id}, set())


def test_a_second_run_finds_everything_in_the_cache(stage: Stage, context: Callable[[Scenario], Context]) -> None:
    """Broken: a run that was killed would begin anew, or `plan` would promise other than `run` does."""
    scenario = Scenario(latency_s=FAST_INT8)
    rules = policy()
    first = stage(scenario, rules, INT8, FP32)
    made = sum(scenario.calls.values())
    again = stage(scenario, rules, INT8, FP32)
    assert sum(scenario.calls.values()) == made
    assert again.targets[0].selection == first.targets[0].selection
    held = cache_status(context(scenario), Plan(source=source(), policy=rules, jobs=(INT8, FP32), refused=()))
    assert held == {
        INT8.id: ("lower", "compile", "validate", "benchmark"),
        FP32.id: ("compile", "validate", "benchmark"),
    }


def test_targets_are_independent_and_one_that_the_source_can_not_serve_is_no_others_loss(stage: Stage) -> None:
    """Broken: one target's trouble would end the run, or a winner of one would be published for another."""
    small, broken = target("small"), target("broken", threads=3)
    rules = policy(target_policy(small), target_policy(replace(broken, required=False)))
    jobs = (job("fp32", where=small), job("fp32", where=broken))
    scenario = Scenario(raises={("compile_model", "fp32"): WorkerError("crash", "it crashed")})
    result = stage(scenario, rules, *jobs)
    assert [t.selection.winner for t in result.targets] == [None, None]
    assert result.exit_code == 6
    assert "nothing could be compiled" in result.problem
    assert {t.policy.target.name: states(t.candidates) for t in result.targets} == {
        "small": {"fp32": "failed"}, "broken": {"fp32": "failed"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [
        (WorkerError("crash", "it crashed"), "failed", "compile: crashed: it crashed"),
        (WorkerError("timeout", "took over 9 s"), "failed", "compile: timed out: took over 9 s"),
        (WorkerError("out_of_memory", "took over 1 MB"), "failed", "compile: out of memory: took over 1 MB"),
        (UsageError("no such operator"), "refused", "no such operator"),
    ],
)
def test_how_a_candidate_ended_is_its_state(stage: Stage, error: Exception, state: str, words: str) -> None:
    """Broken: a crash would be told as a refusal, or would take the other candidates with it."""
    result = stage(Scenario(raises={("compile_model", "int8"): error}, latency_s=FAST_INT8), policy(), INT8, FP32)
    (cpu,) = result.targets
    assert cpu.selection.winner == FP32.id
    assert cpu.selection.states[INT8.id] == state
    assert cpu.selection.reasons[INT8.id].startswith(words)


class Broken:
    """A worker that something ended, or will end at its next call."""

    def call(self, function: str, /, **arguments: Any) -> Any:
        raise WorkerError("crash", f"ended in {function}")


@pytest.mark.parametrize("used", [True, False])
def test_a_crash_in_another_jobs_worker_is_no_candidates_fault(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, *, used: bool
) -> None:
    """Broken: what one job left behind in a worker that is kept would fail the next job."""

    class Kept(JobWorkers):
        @contextmanager
        def opened(self, job: Any) -> Iterator[Any]:
            yield Pair(lowers=Broken(), runs=Broken(), used=used)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluate, "JobWorkers", Kept)
    (cpu,) = stage(Scenario(latency_s=FAST_INT8), policy(), INT8, FP32).targets
    crashed = {INT8.id: "failed", FP32.id: "failed"}
    assert cpu.selection.states == ({INT8.id: "won", FP32.id: "lost"} if used else crashed)


@pytest.mark.parametrize("function", ["compile_model", "predict"])
def test_a_candidate_whose_worker_somebody_killed_is_evaluated_once_more(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Broken: after somebody's kill -9 the run passes without the fastest candidate, and promotes a slower one."""
    killed = WorkerError("crash", f"'{function}' was killed by signal 9 (SIGKILL)", killed=True)
    scenario = Scenario(latency_s=FAST_INT8, raises={(function, "int8"): killed})
    real, evaluations = evaluate.evaluate, 0

    def evaluated(target: Any, job: Any, options: Any) -> Any:
        nonlocal evaluations
        evaluations += job.id == INT8.id
        if options.after_a_kill:
            scenario.raises.clear()
        return real(target, job, options)

    monkeypatch.setattr(evaluate, "evaluate", evaluated)
    (cpu,) = stage(scenario, policy(), INT8, FP32).targets
    assert cpu.selection.states == {INT8.id: "won", FP32.id: "lost"}
    assert evaluations in (2, 3)  # 3 where its first worker had run the other candidate: a fresh one is tried before


def test_a_candidate_whose_worker_is_killed_each_time_fails(stage: Stage) -> None:
    """Broken: one that kills itself would be evaluated for ever."""
    killed = WorkerError("crash", "'compile_model' was killed by signal 9 (SIGKILL)", killed=True)
    scenario = Scenario(latency_s=FAST_INT8, raises={("compile_model", "int8"): killed})
    (cpu,) = stage(scenario, policy(), INT8, FP32).targets
    assert cpu.selection.states == {INT8.id: "failed", FP32.id: "won"}
    assert scenario.calls["compile_model", "int8"] == 2


class _Once(dict[Any, Any]):
    """Each of its exceptions is raised once."""

    def __getitem__(self, key: Any) -> Any:
        return self.pop(key)


@pytest.mark.parametrize(
    ("function", "victim"), [("open_served", "int8"), ("time_turn", "int8"), ("time_turn", "original")]
)
def test_all_are_measured_once_more_where_somebody_killed_one(stage: Stage, function: str, victim: str) -> None:
    """Broken: after somebody's kill -9 of a process that is timed, the run passes without the fastest candidate and
    promotes a slower one; or, of the original's process, it ends without a result."""
    killed = WorkerError("crash", f"'{function}' was killed by signal 9 (SIGKILL)", killed=True)
    scenario = Scenario(latency_s=FAST_INT8, raises=_Once({(function, victim): killed}))
    (cpu,) = stage(scenario, policy(), INT8, FP32).targets
    assert not scenario.raises
    assert cpu.selection.states == {INT8.id: "won", FP32.id: "lost"}


def test_a_winner_whose_process_somebody_killed_in_the_soak_is_soaked_once_more(stage: Stage) -> None:
    """Broken: after somebody's kill -9 in the soak a slower candidate is promoted."""
    killed = WorkerError("crash", "'soak' was killed by signal 9 (SIGKILL)", killed=True)
    scenario = Scenario(latency_s=FAST_INT8, raises=_Once({("soak", "int8"): killed}))
    rules = policy(budget=Budget(measure_seconds=0.2, soak_seconds=2.0))
    (cpu,) = stage(scenario, rules, INT8, FP32).targets
    assert scenario.calls["soak", "int8"] == 2
    assert cpu.selection.states == {INT8.id: "won", FP32.id: "lost"}


@pytest.mark.parametrize("function", ["open_served", "time_turn"])
def test_who_is_killed_in_both_measurements_fails(stage: Stage, function: str) -> None:
    """Broken: one that kills itself when it is timed would be measured for ever, or end the run for all others."""
    killed = WorkerError("crash", f"'{function}' was killed by signal 9 (SIGKILL)", killed=True)
    scenario = Scenario(latency_s=FAST_INT8, raises={(function, "int8"): killed})
    (cpu,) = stage(scenario, policy(), INT8, FP32).targets
    assert cpu.selection.states == {INT8.id: "failed", FP32.id: "won"}
    assert scenario.calls[function, "int8"] == 2


@pytest.mark.parametrize("function", ["compile_model", "warm_up"])
def test_a_full_disk_ends_the_run_and_is_no_candidates_fault(stage: Stage, function: str) -> None:
    """Broken: on a full disk another candidate than the fastest would win, and nobody would know why."""
    scenario = Scenario(latency_s=FAST_INT8, raises={(function, "int8"): StorageError("the disk is full")})
    with pytest.raises(StorageError, match="the disk is full"):
        stage(scenario, policy(), INT8, FP32)


def test_a_crash_during_benchmarking_never_wins(stage: Stage) -> None:
    """Broken: with no gate on speed, what crashed when it was measured would be shipped."""
    scenario = Scenario(latency_s=FAST_INT8, raises={("warm_up", "int8"): WorkerError("crash", "SIGSEGV")})
    (cpu,) = stage(scenario, policy(), INT8, FP32).targets
    assert cpu.selection.winner == FP32.id
    assert cpu.selection.reasons[INT8.id] == "benchmark: crashed: SIGSEGV"


def test_nodes_are_kept_in_higher_precision_until_the_tolerance_holds(stage: Stage) -> None:
    """Broken: a candidate that misses by two nodes would be lost, or the mixed one would not be measured with the
    others."""
    scenario = Scenario(
        latency_s=FAST_INT8 | {"int8-mixed": 0.003},
        errors={"int8": 0.5},
        effects={"a": 0.6, "b": 0.395, "c": 0.001, "d": 0.0},
    )
    (cpu,) = stage(scenario, policy(), INT8, FP32).targets
    mixed = next(c for c in cpu.candidates if c.job.scheme.name == "int8-mixed")
    assert cpu.selection.winner == mixed.job.id
    assert mixed.portable is not None
    assert mixed.portable.kept == {"fp32": ("a", "b")}
    missed = next(c for c in cpu.candidates if c.job == INT8)
    assert missed.state == "failed"
    assert missed.trials
    assert "2 of 4 quantised nodes" in missed.note


def test_searches_share_one_budget(stage: Stage) -> None:
    """Broken: each of ten candidates that missed would take the whole budget for itself."""
    dynamic = job("int8-dynamic", native=False)
    nodes = {f"n{i}": 0.01 for i in range(20)}
    scenario = Scenario(errors={"int8": 5.0, "int8-dynamic": 5.0}, effects=nodes)
    rules = policy(target_policy(fallback=Fallback(max_evaluations=6)))
    (cpu,) = stage(scenario, rules, INT8, dynamic).targets
    trials = [len(c.trials) for c in cpu.candidates]
    assert sum(trials) <= 6
    assert min(trials) >= 1, "the first search left nothing for the second"


def test_a_search_that_can_not_pay_is_not_made(stage: Stage) -> None:
    """Broken: minutes would go into a candidate that is slower than one that passes, before any node is kept."""
    scenario = Scenario(
        latency_s={"original": 0.01, "fp32": 0.002, "int8": 0.005}, errors={"int8": 0.5}, effects={"a": 0.9, "b": 0.1}
    )
    (cpu,) = stage(scenario, policy(), INT8, FP32).targets
    missed = next(c for c in cpu.candidates if c.job == INT8)
    assert missed.trials == ()
    assert "no search for nodes" in missed.note


def test_a_used_up_budget_ends_jobs_before_they_begin(stage: Stage) -> None:
    """Broken: a run would go on past its budget, or end without saying why."""
    result = stage(Scenario(), policy(budget=Budget(minutes=0.0)), FP32)
    (cpu,) = result.targets
    assert cpu.selection.states[FP32.id] == "failed"
    assert "not started: the budget of 0 minutes" in cpu.selection.reasons[FP32.id]
    assert result.exit_code == 6
    assert result.problem.startswith("the budget ended before anything was tried; raise budget.minutes\n")
    assert "could be compiled" not in result.problem, "nothing was asked of a compiler"


def test_a_waiver_is_applied_once_and_named(stage: Stage) -> None:
    """Broken: a waived candidate would not be measured, or would look like one that passed by itself."""
    waiver = Waiver(gate="cosine", target="cpu", reason="known", owner="me", expires="2026-12-31")
    scenario = Scenario(latency_s=FAST_INT8, errors={"int8": 0.5})
    result = stage(scenario, policy(waivers=(waiver,)), INT8, FP32)
    (cpu,) = result.targets
    assert cpu.selection.winner == INT8.id
    assert "waiver" in cpu.selection.reason
    assert [c.trials for c in cpu.candidates] == [(), ()], "what is waived needs no search"


def test_what_failed_for_good_is_asked_no_more(stage: Stage) -> None:
    """Broken: a candidate that can't pass any more would answer at every batch size, and in all calls and to all
    samples beyond the validation set; or one that a waiver lets through would not, and pass unproven."""
    sizes = policy(target_policy(target(batch_sizes=(1, 8))))
    waived = replace(
        sizes, waivers=(Waiver(gate="cosine", target="cpu", reason="known", owner="me", expires="2026-12-31"),)
    )
    expired = replace(
        sizes, waivers=(Waiver(gate="cosine", target="cpu", reason="known", owner="me", expires="2026-11-01"),)
    )
    scenario = Scenario(latency_s=FAST_INT8, errors={"int8": 0.5})
    jobs = [replace(each, target=sizes.targets[0].target) for each in (INT8, FP32)]

    def calls(rules: Policy) -> tuple[list[int | None], int]:
        scenario.calls.clear()
        (cpu,) = stage(scenario, rules, *jobs).targets
        int8 = next(c for c in cpu.candidates if c.job.id == INT8.id)
        assert int8.verdict is not None
        looked_at = [check.batch_size for check in int8.verdict.checks if check.gate.metric == "cosine"]
        return looked_at, scenario.calls["make_calls", "int8"]

    assert calls(sizes) == ([1], 0)
    assert calls(expired) == ([1], 0)
    assert calls(waived) == ([1, 8], 1), "its earlier verdict was taken from the cache"


SPEED = Gate(metric="speedup", limit=1.0, direction="at_least", unit="ratio")


def auto(**fields: Any) -> Policy:
    where = target(backends=("auto",))
    return policy(target_policy(where, performance=(SPEED,), **fields))


def test_what_is_far_slower_is_pruned_and_proven_when_it_matters(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a long proof would be paid for a sure loser; or a target would end without a winner though one was only
    pruned."""
    from compile_stage.pipeline import pruning

    monkeypatch.setattr(pruning, "WORTH_S", 0.1)
    where = target(backends=("auto",))
    slow, fast = job("bf16", where=where), job("fp32", where=where)
    slow_run = {"original": 0.01, "bf16": 0.2, "fp32": 0.005}
    (cpu,) = stage(Scenario(latency_s=slow_run), auto(), slow, fast).targets
    assert cpu.selection.winner == fast.id
    pruned = next(c for c in cpu.candidates if c.job == slow)
    assert pruned.state == "pruned"
    assert pruned.verdict is None
    assert cpu.selection.states[slow.id] == "compiled_not_validated"
    # Without a gate on speed, and with nobody else who passes, it is the best there is.
    rules = policy(target_policy(where))
    scenario = Scenario(latency_s=slow_run, errors={"fp32": 2.0})
    (alone,) = stage(scenario, rules, slow, fast).targets
    assert alone.selection.winner == slow.id
    assert any("validated after all, since no other candidate passed" in note for note in alone.notes)


@pytest.mark.parametrize("trouble", ["gate", "soak"])
def test_who_was_dropped_behind_one_that_then_failed_is_measured_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Broken: with `backends: [auto]` a target would have no winner, or a worse one, though a candidate passes every
    gate: it was only five times slower than one that failed a gate, or the soak."""
    from compile_stage.pipeline import target as module

    where = target(backends=("auto",))
    int8, fp32 = job("int8", where=where, native=False), job("fp32", where=where)
    raises: dict[tuple[str, str], BaseException] = {}
    if trouble == "soak":
        raises["soak", "int8"] = WorkerError("crash", "died in the soak")
    else:
        judge = module.judge_performance

        def misses(candidate: Candidate, *given: Any) -> Candidate:
            judged = judge(candidate, *given)
            return judged.in_state("failed", "misses a gate") if candidate.job == int8 else judged

        monkeypatch.setattr(module, "judge_performance", misses)
    scenario = Scenario(latency_s={"original": 0.010, "int8": 0.001, "fp32": 0.008}, raises=raises)
    rules = policy(target_policy(where, performance=(SPEED,)), budget=Budget(measure_seconds=0.2, soak_seconds=2.0))
    (cpu,) = stage(scenario, rules, int8, fp32).targets
    assert cpu.selection.winner == fp32.id
    assert cpu.selection.states == {int8.id: "failed", fp32.id: "won"}
    failed = next(c for c in cpu.candidates if c.job == int8)
    assert failed.measurement is not None, "what was measured of it is kept"
    assert any(f"measured again without {int8.id}, which failed" in note for note in cpu.notes)


def test_what_a_search_found_enters_the_next_competition_when_no_time_is_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: validating one that was pruned takes the last minutes, so that the mixed candidate, which won before, is
    not searched again and is gone: a slower one is published."""
    from compile_stage.core.events import EventLog
    from compile_stage.pipeline import pruning
    from compile_stage.pipeline import target as module

    monkeypatch.setattr(pruning, "WORTH_S", 0.1)
    elapsed_s, spent = EventLog.elapsed_s.fget, [0.0]  # type: ignore[attr-defined]
    monkeypatch.setattr(EventLog, "elapsed_s", property(lambda log: elapsed_s(log) + spent[0]))
    validate_pruned = module._validate_pruned

    def long(*given: Any, **named: Any) -> Any:
        found = validate_pruned(*given, **named)
        if found[1]:
            spent[0] = 60 * 60 - 10.0  # ten seconds are left
        return found

    monkeypatch.setattr(module, "_validate_pruned", long)
    where = target(backends=("auto",))
    rules = policy(target_policy(where), budget=Budget(minutes=60.0, measure_seconds=1, soak_seconds=0))
    latency_s = {"original": 0.01, "int8": 0.013, "int8-mixed": 0.013, "bf16": 0.06, "fp32": 0.03}
    effects = {"n1": 1.0, "n2": 0.0, "n3": 0.0}
    scenario = Scenario(errors={"int8": 0.5}, effects=effects, latency_s=latency_s)
    jobs = job("int8", where=where, native=False), job("bf16", where=where), job("fp32", where=where)
    (cpu,) = stage(scenario, rules, *jobs).targets
    assert spent[0], "one that was pruned was validated after all"
    assert cpu.winner is not None
    assert cpu.winner.job.scheme.name == "int8-mixed"
    searched = next(c for c in cpu.candidates if c.job == jobs[0])
    assert searched.trials


def test_a_source_that_fails_ends_the_run_as_refused_with_a_report(stage: Stage) -> None:
    """Broken: a model that can't be exported would end as a crash of a job, or without a report."""
    result = stage(Scenario(raises={("export", ""): SourceError("an operator that ONNX lacks")}), policy(), FP32)
    assert (result.status, result.exit_code) == ("refused", 5)
    assert "an operator that ONNX lacks" in result.problem
    crashed = stage(Scenario(raises={("inspect_source", ""): WorkerError("crash", "SIGSEGV")}), policy(), FP32)
    assert (crashed.status, crashed.exit_code) == ("refused", 5)


@pytest.mark.parametrize(("short", "fix"), [(False, "kill -9"), (True, "free memory")])
def test_a_source_whose_worker_was_killed_is_not_refused(
    context: Callable[[Scenario], Context], short: bool, fix: str
) -> None:
    """Broken: an administrator's kill -9, a machine's time limit, or the kernel in a container whose memory is short
    would be told as a fault of the model, and `watch` would not try again."""
    killed = WorkerError("out_of_memory" if short else "crash", "'export' was killed by signal 9 (SIGKILL)")
    killed.killed, killed.starved = not short, short
    surroundings = context(Scenario(raises={("export", ""): killed}))
    plan = Plan(source=source(), policy=policy(), jobs=(FP32,), refused=())
    state = RunState("models:/m/1", "p.yaml", RunOptions(out=None, publish=False), lambda *_: {})
    state.context, state.policy, state.plan = surroundings, plan.policy, plan
    with pytest.raises(KilledError, match=r"was killed by signal 9 \(SIGKILL\)") as caught, state:
        run(state, surroundings, plan)
    assert caught.value.exit_code == 2
    assert fix in caught.value.fix
    assert state.written is not None
    assert (state.written.status, state.written.exit_code) == ("failed", 2)


def test_an_interrupted_run_writes_what_it_knows_and_goes_on(context: Callable[[Scenario], Context]) -> None:
    """Broken: Ctrl-C would leave no report, or an exit code other than 130."""
    scenario = Scenario(raises={("compile_model", "fp32"): KeyboardInterrupt()})
    surroundings, rules = context(scenario), policy()
    plan = Plan(source=source(), policy=rules, jobs=(FP32,), refused=())
    written: list[RunResult] = []

    def write(result: RunResult, _: Path | None) -> Mapping[str, Path]:
        written.append(result)
        return {}

    progress = RunState("models:/m/1", "p.yaml", RunOptions(out=None), write)
    progress.context, progress.policy, progress.plan = surroundings, rules, plan
    with pytest.raises(KeyboardInterrupt), progress:
        run(progress, surroundings, plan)
    assert [(result.status, result.exit_code) for result in written] == [("failed", 130)]
    assert surroundings.engine.closed  # type: ignore[attr-defined]
    entry = surroundings.cache.locate("compile/1", {"beside": "another run"})
    entry.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{entry}.lock"), ThreadPoolExecutor(1) as pool:  # no thread of a job waits for another run
        waiting = pool.submit(surroundings.cache.fetch, "compile/1", {"beside": "another run"}, lambda _: None)
        assert isinstance(waiting.exception(timeout=60), WorkerError)


def test_an_error_before_the_plan_is_a_refused_run() -> None:
    """Broken: a mistyped policy would leave CI without a report that says so."""
    written: list[RunResult] = []
    progress = RunState("models:/m/1", "p.yaml", RunOptions(out=None), lambda result, _: written.append(result) or {})
    with pytest.raises(UsageError), progress:
        raise UsageError("wrong policy")
    assert [(r.status, r.exit_code, r.source.uri, r.policy.files) for r in written] == [
        ("refused", 2, "models:/m/1", ("p.yaml",))
    ]


def test_what_was_published_before_the_disk_was_full_is_named(
    context: Callable[[Scenario], Context], tmp_path: Path
) -> None:
    """Broken: a run that published and moved an alias would end in "the disk is full" alone, with no report."""
    surroundings, rules, room = context(Scenario(latency_s=FAST_INT8)), policy(), [True]

    def write(result: RunResult, _: Path | None) -> Mapping[str, Path]:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return {}

    progress = RunState("models:/m/1", "p.yaml", RunOptions(out=None, publish=False), write)
    progress.context, progress.policy = surroundings, rules
    progress.plan = Plan(source=source(), policy=rules, jobs=(FP32,), refused=())
    run(progress, surroundings, progress.plan)
    receipt = Receipt(
        uri="models:/m-compiled/1", name="m-compiled", version="1", digest="", created=True, promoted_to="a"
    )
    progress.targets = tuple(replace(target, receipt=receipt) for target in progress.targets)
    progress.folder, room[0] = tmp_path, False
    with pytest.raises(StorageError, match="models:/m-compiled/1 \\(now a\\)") as caught, progress:
        progress.write_reports()
    assert caught.value.where == str(tmp_path)


def test_reports_written_during_publication_say_so() -> None:
    """Broken: a run killed after publication would leave a report that says passed, as if the alias had been set."""
    written: list[RunResult] = []
    progress = RunState("models:/m/1", "p.yaml", RunOptions(out=None), lambda result, _: written.append(result) or {})
    list(progress.reports_when_asked())
    progress.write_reports()
    said = [any("before anything was promoted" in note for note in result.notes) for result in written]
    assert said == [True, False]


def test_each_target_keeps_its_own_samples(stage: Stage) -> None:
    """Broken: of two targets with other samples the report would name those of the last for both."""
    from compile_stage.report.result import result_document

    one, two = target("one"), target("two")
    rules = policy(target_policy(one), target_policy(two))
    result = stage(Scenario(), rules, job("fp32", where=one), job("int8", where=two, native=False))
    document = result_document(result)
    assert [sorted(entry["data"]) for entry in document["targets"]] == [["validation"], ["calibration", "validation"]]


def test_a_run_that_is_to_measure_again_measures_everything_again(
    context: Callable[[Scenario], Context],
) -> None:
    """Broken: `--remeasure` would keep the figures of a busy machine, or would compile and prove everything again."""
    scenario, rules = Scenario(latency_s=FAST_INT8), policy()
    plan = Plan(source=source(), policy=rules, jobs=(INT8, FP32), refused=())
    taken = []
    for remeasure in (False, False, True):
        surroundings = replace(context(scenario), remeasure=remeasure)
        progress = RunState("models:/m/1", "p.yaml", RunOptions(out=None, publish=False), lambda *_: {})
        progress.context, progress.policy, progress.plan = surroundings, rules, plan
        before = Counter(scenario.calls)
        run(progress, surroundings, plan)
        made = scenario.calls - before
        taken.append((made.total() > 0, any(function == "time_turn" for function, _ in made)))
        assert not (remeasure and any(function in ("compile_model", "predict") for function, _ in made))
    assert taken == [(True, True), (False, False), (True, True)]


@pytest.mark.parametrize("name", ["{model}", "fraud"])
def test_nothing_is_published_among_the_sources_own_versions(context: Callable[[Scenario], Context], name: str) -> None:
    """Broken: the source's latest version is a compiled one, and the next run compiles what was compiled."""
    with pytest.raises(UsageError, match="as versions of the source, 'fraud'"):
        plan_for(context(Scenario()), replace(policy(), publish_name=name), source(name="fraud"))


@pytest.mark.parametrize(("name", "said"), [("f" * 245, "it has 254 characters"), ("a?b", "it holds ?")])
def test_a_name_that_the_registry_does_not_take_is_said_before_anything_is_compiled(
    context: Callable[[Scenario], Context], name: str, said: str
) -> None:
    """Broken: a run compiles and measures for an hour, and then can't publish; of a `?` MLflow says that files are
    missing."""
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        plan_for(context(Scenario()), replace(policy(), publish_name="{model}-compiled"), source(name=name))
    assert "publish.name" in caught.value.fix


@pytest.mark.parametrize("complete", [True, False])
def test_a_policy_that_requires_confined_workers_is_refused_where_there_are_none(
    context: Callable[[Scenario], Context], monkeypatch: pytest.MonkeyPatch, complete: bool
) -> None:
    """Broken: strangers' code would run with the network and all files, though the policy forbids it."""
    scenario = Scenario()
    confinement = Confinement(network="seccomp filter", complete=complete)
    monkeypatch.setattr(FakeEngine, "confinement", lambda self: confinement, raising=False)
    rules = replace(policy(), compliance=Compliance(sandbox="required"))
    with pytest.raises(RegistryError if complete else UsageError) as caught:
        make_plan(context(scenario), rules, "folder:/nowhere")
    if not complete:
        assert "closed: network (seccomp filter); open: files, system calls" in str(caught.value)


# ---------------------------------------------------------------------------------------------- settings in combination


def together(options: Mapping[str, Any]) -> float:
    """No arena and no spinning each cost 10 %; together they gain 40 %."""
    settings = [options.get("memory_arena") is False, options.get("spinning") is False]
    return 0.6 if all(settings) else 1.1 if any(settings) else 1.0


def tuned(stage: Stage, scenario: Scenario, minutes: float) -> Any:
    # What the policy sets itself is not tried: three settings are left.
    said: dict[str, Any] = {"threads": 2, "affinity": False, "mapped_weights": False}
    said["config"] = {"session.disable_prepacking": "0", "session.dynamic_block_base": "0"}
    where = target(threads=2, options={"onnxruntime": said})
    rules = policy(target_policy(where, ladder=True), budget=Budget(measure_seconds=0.2, search_minutes=minutes))
    (cpu,) = stage(scenario, rules, job("fp32", where=where)).targets
    return cpu


def test_settings_that_only_help_together_are_found_proven_and_shipped(stage: Stage) -> None:
    """Broken: what a search over combinations is for; or what it finds would ship without a compilation and a proof of
    its own, or be lost on the way to the measurement of all candidates."""
    scenario = Scenario(latency_s=FAST_INT8, factor=together)
    cpu = tuned(stage, scenario, minutes=1)
    steps = {step.name: step for step in cpu.ladder}
    best = steps["no-arena+no-spinning"]
    assert best.accepted, best
    assert best.options == {"memory_arena": False, "spinning": False}
    assert best.speedup == pytest.approx(1 / 0.6)
    assert "found among" in best.reason
    assert cpu.selection.winner == best.job_id == "m-1--cpu--onnxruntime--fp32--memory-no-arena--tuned-no-spinning"
    assert scenario.calls["compile_model", "fp32+no-arena+no-spinning"] == 1
    assert scenario.calls["predict", "fp32"] >= 2  # of the plain model, and of this one
    assert "alone about 1.00 times as fast" in steps["extended"].reason
    assert not steps["extended"].job_id
    compiled = {name for (call, name), _ in scenario.calls.items() if call == "compile_model"}
    assert compiled == {"fp32", "fp32+no-arena+no-spinning"}
    assert "already set by the policy" in steps["half-threads"].reason


def test_without_time_for_a_search_settings_are_tried_one_by_one(stage: Stage) -> None:
    """Broken: `search_minutes: 0` would not be what runs did before, or a run would overrun it."""
    scenario = Scenario(latency_s=FAST_INT8, factor=together)
    cpu = tuned(stage, scenario, minutes=0)
    assert cpu.selection.winner == "m-1--cpu--onnxruntime--fp32"
    assert all(step.job_id for step in cpu.ladder if step.name == "no-arena")


def test_a_combination_that_fails_its_proof_is_not_shipped(stage: Stage) -> None:
    """Broken: settings that change the answers would ship, since a race looks at nobody's answers."""
    wrong = dict.fromkeys(("fp32+no-arena+no-spinning", "fp32+no-arena+extended+no-spinning"), 5.0)
    scenario = Scenario(latency_s=FAST_INT8, factor=together, errors=wrong)
    cpu = tuned(stage, scenario, minutes=1)
    (step,) = [step for step in cpu.ladder if step.name == "no-arena+no-spinning"]
    assert not step.accepted
    assert "cosine" in step.reason
    assert cpu.selection.winner == "m-1--cpu--onnxruntime--fp32"
