"""The product's voice on one page: `tests/golden/messages.txt`, for whoever reviews the sentences that users see.

All of it is produced by the code that produces it in a run; nothing here is a copy.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compile_stage.cli import exits
from compile_stage.cli.render import Display
from compile_stage.core.records import (
    Candidate,
    Check,
    Failure,
    Gate,
    Outcome,
    Plan,
    Receipt,
    RunResult,
    TargetResult,
    Verdict,
    Verification,
)
from compile_stage.report import summary
from compile_stage.steps.judge import judge_performance, judge_tolerances
from compile_stage.steps.select import select


class Log(io.StringIO):
    encoding = "utf-8"


def test_what_users_read(factory: ModuleType, result: RunResult, golden: Callable[[str, str], None]) -> None:
    """A sentence that changes shows here, in the words in which it is printed."""
    sections = {
        "How a run ends": endings(result, factory),
        "Why a candidate is in its state": reasons(factory),
        "Without a winner": without_winner(factory, result),
        "What a check says": checks(factory),
        "What a plan says of a job": jobs(factory, result),
        "How verify ends": verifications(factory),
        "What an exit code means": (f"{code}: {meaning}" for code, meaning in exits.MEANINGS.items()),
    }
    text = "\n".join(f"{title}\n" + "".join(f"  {line}\n" for line in lines) for title, lines in sections.items())
    golden("messages.txt", text)


def printed(show: Callable[[Display], object], *, quiet: bool = False) -> list[str]:
    stream = Log()
    show(Display(stream, width=200, quiet=quiet))
    return [line.rstrip() for line in stream.getvalue().splitlines() if line.strip()]


def endings(result: RunResult, factory: ModuleType) -> Iterator[str]:
    winner = result.targets[0].candidates[0]
    timing = winner.measurement.timings[0]
    again = dataclasses.replace(
        result.targets[0].receipt, created=False, promoted_to="", note="not promoted to 'prod': 1.100 times as slow"
    )
    for ending in (
        result,
        with_first(result, candidate=with_timing(winner, dataclasses.replace(timing, stable=False))),
        with_first(result, candidate=with_timing(winner, dataclasses.replace(timing, speedup=40.0))),
        with_first(result, receipt=again),
        factory.make_result(factory.no_winner(), status="failed", exit_code=3),
        dataclasses.replace(
            result,
            status="refused",
            exit_code=5,
            targets=(),
            problem="the source is refused: pickled models execute code when loaded",
        ),
        dataclasses.replace(result, status="failed", exit_code=130, problem="interrupted; run again to resume"),
        dataclasses.replace(result, targets=()),
    ):
        yield from printed(lambda display, ending=ending: display.show_result(ending, Path("out")), quiet=True)


def with_first(result: RunResult, candidate: Any = None, receipt: Receipt | None = None) -> RunResult:
    target = result.targets[0]
    if candidate is not None:
        target = dataclasses.replace(target, candidates=(candidate, *target.candidates[1:]))
    if receipt is not None:
        target = dataclasses.replace(target, receipt=receipt)
    return dataclasses.replace(result, targets=(target,))


def with_timing(candidate: Any, timing: Any) -> Any:
    rest = candidate.measurement.timings[1:]
    return dataclasses.replace(
        candidate, measurement=dataclasses.replace(candidate.measurement, timings=(timing, *rest))
    )


def every_candidate(factory: ModuleType) -> list[Any]:
    """One of every way in which a candidate ends."""
    policy, today = factory.cpu_server(), date(2026, 1, 1)
    good, measured = factory.good_checks(0.999), factory.measurement

    def job(scheme: str) -> Any:
        return factory.job("onnxruntime", "fp32", scheme, policy.target)

    def judged(scheme: str, checks: tuple[Check, ...], timings: Any = None) -> Any:
        candidate = judge_tolerances(Candidate(job=job(scheme)), checks, (), today)
        candidate = dataclasses.replace(
            candidate, artifact=factory.candidate(job(scheme)).artifact, measurement=timings
        )
        return judge_performance(candidate, policy, (), today)

    missed = dataclasses.replace(
        good[0], outcome=Outcome.FAIL, measured=0.941, reason="0.941 < 0.99 on the worst of 360 samples"
    )
    not_run = dataclasses.replace(good[2], outcome=Outcome.NOT_RUN, measured=None, reason="the data has no labels")
    return [
        judged("won", good, measured(0.00031, 6.52)),
        judged("slower", good, measured(0.00062, 3.26)),
        *(
            Candidate(job=job(kind)).failed(Failure(kind=kind, step=step, problem=problem, detail=""))
            for kind, step, problem in (
                ("crash", "compile", "the worker ended by signal 11 (SIGSEGV)"),
                ("out_of_memory", "compile", "12,000 MB were not enough"),
                ("timeout", "validate", "15 minutes were not enough"),
                ("exception", "lower", "operator Foo is not supported"),
            )
        ),
        judged("missed", (missed, *good[1:]), measured(0.0004, 5.0)),
        judged("missed-two", (missed, good[1], not_run)),
        judged("not-run", (*good[:2], not_run)),
        judged("nothing-checked", ()),
        judged("not-measured", good),
        judged("slower-than-the-original", good, measured(0.004, 0.5)),
        Candidate(job=job("refused")).in_state("refused", "onnxruntime has no fp8 on cpu"),
    ]


def reasons(factory: ModuleType) -> Iterator[str]:
    selection = select(every_candidate(factory), factory.cpu_server())
    for job_id, state in selection.states.items():
        yield f"{job_id.rpartition('--')[2]} [{summary.STATE_WORDS[state]}]: {selection.reasons[job_id]}"


def without_winner(factory: ModuleType, result: RunResult) -> Iterator[str]:
    policy, losers = factory.cpu_server(), every_candidate(factory)[2:]
    for candidates in (losers, losers[4:5], losers[-1:], ()):
        target = TargetResult(policy=policy, candidates=tuple(candidates), selection=select(candidates, policy))
        yield summary.no_winner(result, target)
        if gate := summary.deciding_gate(target):
            yield f"  {gate}"


def checks(factory: ModuleType) -> Iterator[str]:
    waiver = factory.every_ending().candidates[0].verdict.waivers[0]
    good = factory.good_checks(0.999)
    failed = dataclasses.replace(good[0], outcome=Outcome.FAIL, measured=0.941, reason="0.941 < 0.99 over 360 samples")
    shown: tuple[Check, ...] = (
        good[0],
        good[2],
        failed,
        dataclasses.replace(failed, waived=waiver),
        dataclasses.replace(failed, outcome=Outcome.NOT_RUN, measured=None, reason="the data has no labels"),
    )
    for check in shown:
        yield f"{summary.outcome_word(check)}: {summary.error_text(check)}, {summary.limit_text(check)}: {check.reason}"
    yield summary.outcome_counts(Verdict(checks=shown).checks)


def jobs(factory: ModuleType, result: RunResult) -> list[str]:
    planned = tuple(candidate.job for candidate in result.targets[0].candidates)[:3]
    planned = (*planned[:2], dataclasses.replace(planned[2], not_runnable_here="it is compiled for aarch64"))
    steps = ("lower", "compile", "validate", "benchmark")
    held = {planned[0].id: steps, planned[1].id: steps[1:2]}
    plan = Plan(source=result.source, policy=result.policy, jobs=planned, refused=result.refused, cached_steps=held)
    return printed(lambda display: display.show_plan(plan))


def verifications(factory: ModuleType) -> Iterator[str]:
    for passed, word in ((True, "verified"), (False, "verified"), (True, "validated here"), (False, "validated here")):
        ended = Verification(uri="models:/fraud-compiled/3", passed=passed, checks=(), notes=())
        yield from printed(lambda display, ended=ended, word=word: display.show_verification(ended, word))


def test_what_is_only_too_uncertain_is_said_once(factory: ModuleType) -> None:
    """Broken: eight candidates of a busy machine, and eight times the same advice; or the last line of a run says that
    a speedup of 10 is less than 1."""
    policy = factory.cpu_server()
    jobs = [factory.job("openvino", "int8", scheme, policy.target) for scheme in ("int8-sym", "int8-u8", "int8-nncf")]
    unsure = dataclasses.replace(factory.timing(0.001, 3.0), speedup_interval=(0.4, 20.0), stable=False, rounds=5)
    measured = dataclasses.replace(factory.measurement(0.001, 3.0), timings=(unsure,))
    judged = [
        judge_performance(
            dataclasses.replace(factory.candidate(job, factory.good_checks(0.999), measured), state="passed"),
            policy, (), date(2026, 11, 23),
        )
        for job in jobs
    ]  # fmt: skip
    target = TargetResult(policy=policy, candidates=tuple(judged), selection=select(judged, policy))
    result = factory.make_result(target, status="failed", exit_code=3)
    sentence = (
        "3 candidates held every tolerance and are too uncertain in speed to pass, with 5 rounds in 1 process of each: "
        "run again when the machine is quieter, or with a larger budget.measure_seconds"
    )
    assert summary.deciding_gate(target) == sentence
    names = "openvino int8-sym, openvino int8-u8, openvino int8-nncf"
    rows = summary.rows(result, target)
    (told, reason), *_ = summary.grouped_reasons(target, [row for row in rows if row.state == "failed"])
    assert set(told.split(", ")) == set(names.split(", "))
    assert reason == "its speed at batch size 1 is too uncertain to pass"
    stream = Log()
    Display(stream, width=80).show_result(result, Path("out"))
    text = " ".join(stream.getvalue().split())
    assert text.count("run again when the machine is quieter") == 1
    assert text.count("too uncertain") == 2


@pytest.mark.parametrize(
    ("tries", "advice"),
    [
        (2, "in 1 process of each, in the last of 2 measurements: run again when"),
        (3, "in 1 process of each, in the last of 3 measurements: run again with --remeasure when"),
    ],
)
def test_what_three_runs_left_open_is_measured_again_only_by_the_option(
    factory: ModuleType, tries: int, advice: str
) -> None:
    """Broken: who runs again as advised reads the same figures from the cache."""
    policy = factory.cpu_server()
    unsure = dataclasses.replace(factory.timing(0.001, 3.0), speedup_interval=(0.4, 20.0), stable=False)
    measured = dataclasses.replace(factory.measurement(0.001, 3.0), timings=(unsure,), tries=tries)
    job = factory.job("openvino", "int8", "int8-sym", policy.target)
    candidate = dataclasses.replace(factory.candidate(job, factory.good_checks(0.999), measured), state="passed")
    judged = (judge_performance(candidate, policy, (), date(2026, 11, 23)),)
    target = TargetResult(policy=policy, candidates=judged, selection=select(judged, policy))
    assert advice in summary.too_uncertain(target)


@pytest.mark.parametrize(("interval", "is_unsure"), [((436.0, 991.0), True), ((436.0, 490.0), False)])
def test_what_is_too_uncertain_under_load_is_served_for_longer(
    factory: ModuleType, interval: tuple[float, float], is_unsure: bool
) -> None:
    """If it failed, who has a throughput between 436 and 991 where 500 is asked for would raise
    `budget.measure_seconds`, which no load is measured with, and read the same figure from the cache for ever."""
    gate = Gate(metric="throughput_at_p99", limit=500.0, direction="at_least", unit="requests/s")
    check = dataclasses.replace(factory.check(gate, Outcome.FAIL, 480.0, "too uncertain"), interval=interval)
    target: TargetResult = factory.no_winner()
    missed = dataclasses.replace(target.candidates[0], verdict=Verdict(checks=(check,)), failure=None)
    target = dataclasses.replace(target, candidates=(missed,))
    expected = (
        "1 candidate held every tolerance and is too uncertain under load to pass: run again with --remeasure when "
        "the machine is quieter, or with a larger serving.seconds"
    )
    assert summary.too_uncertain(target) == (expected if is_unsure else "")
    told = summary.grouped_reasons(target, summary.rows(factory.make_result(target), target))
    assert any(reason == "what it serves under load is too uncertain to pass" for _, reason in told) == is_unsure


def test_what_misses_its_limit_by_little_does_not_seem_to_hold_it(factory: ModuleType) -> None:
    """Broken: a table, or a test in CI, says "failed: cosine 0.99, at least 0.99"."""
    good = factory.good_checks(0.999)[0]
    gate = dataclasses.replace(good.gate, limit=0.99)
    for measured, outcome, shown in (
        (0.98996, Outcome.FAIL, ("0.98996", "at least 0.99")),
        (0.989999, Outcome.FAIL, ("0.989999", "at least 0.99")),
        (0.99, Outcome.PASS, ("0.99", "at least 0.99")),
        (0.9991, Outcome.PASS, ("0.9991", "at least 0.99")),
        (None, Outcome.NOT_RUN, ("not measured", "at least 0.99")),
    ):
        check = dataclasses.replace(good, gate=gate, measured=measured, outcome=outcome)
        assert (summary.measured_text(check), summary.limit_text(check)) == shown
    fine = dataclasses.replace(good, gate=dataclasses.replace(gate, limit=0.123456), measured=0.123454)
    assert (summary.measured_text(fine), summary.limit_text(fine)) == ("0.12345", "at least 0.12346")


def test_processes_are_counted_of_the_fewest_to_the_most(factory: ModuleType) -> None:
    """If it failed, the head of a report would say "1 process of each" where one candidate of two was started again."""
    policy = factory.cpu_server()
    judged = []
    for scheme, processes in (("int8-sym", (0,) * 5), ("int8-u8", (0, 0, 0, 1, 1))):
        unsure = dataclasses.replace(
            factory.timing(0.001, 3.0), speedup_interval=(0.4, 20.0), stable=False, rounds=5, processes=processes
        )
        measured = dataclasses.replace(factory.measurement(0.001, 3.0), timings=(unsure,))
        job = factory.job("openvino", "int8", scheme, policy.target)
        passed = dataclasses.replace(factory.candidate(job, factory.good_checks(0.999), measured), state="passed")
        judged.append(judge_performance(passed, policy, (), date(2026, 11, 23)))
    target = TargetResult(policy=policy, candidates=tuple(judged), selection=select(judged, policy))
    assert "with 5 rounds in 1 to 2 processes of each: " in summary.too_uncertain(target)


def test_too_few_samples_are_what_is_said_first(factory: ModuleType) -> None:
    """Broken: the last line of a run said "cosine is 1 - 9e-14, at least 0.9999 is required" where the cosine held and
    36 samples were missing."""
    policy = factory.cpu_server()
    few = "64 real samples are fewer than the 100 that the policy asks for (data.min_samples)"
    samples = Gate(metric="samples", limit=100.0, direction="at_least")
    checks = (
        *(
            dataclasses.replace(check, outcome=Outcome.NOT_RUN, reason=f"it would pass: {check.reason}; but {few}")
            for check in factory.good_checks(0.999)
        ),
        factory.check(samples, Outcome.NOT_RUN, 64.0, few),
    )
    job = factory.job("openvino", "int8", "int8-sym", policy.target)
    judged = dataclasses.replace(factory.candidate(job, checks, None), state="failed")
    target = TargetResult(policy=policy, candidates=(judged,), selection=select([judged], policy))
    assert summary.deciding_gate(target) == f"openvino int8-sym: {few}"


def test_the_candidate_nearest_to_the_limit_is_named(factory: ModuleType) -> None:
    """Broken: of three candidates that missed the same limit, the last line of a run named the farthest from it."""
    policy = factory.cpu_server()
    gate = Gate(metric="p95_latency_ms", limit=1.0, direction="at_most")
    judged = []
    for scheme, measured in (("int8-sym", 1.7), ("int8-u8", 1.2), ("int8-nncf", 2.0)):
        missed = factory.check(gate, Outcome.FAIL, measured, "too slow")
        job = factory.job("openvino", "int8", scheme, policy.target)
        candidate = factory.candidate(job, (*factory.good_checks(0.999), missed), None)
        judged.append(dataclasses.replace(candidate, state="failed"))
    target = TargetResult(policy=policy, candidates=tuple(judged), selection=select(judged, policy))
    assert summary.deciding_gate(target).startswith("openvino int8-u8: p95_latency_ms 1.2 > 1")


def test_a_check_is_named_by_what_it_measured(factory: ModuleType) -> None:
    """Broken: five rows `robustness` that only differ in their samples, and an `accuracy` of 0.002, at most 0.01."""
    made = {
        "accuracy drop": Gate(metric="accuracy", limit=0.01, direction="at_most", options={"drop": "absolute"}),
        "robustness (noise)": Gate(metric="robustness", limit=5.0, direction="at_most", options={"samples": "noise"}),
        "cosine": Gate(metric="cosine", limit=0.99, direction="at_least"),
    }
    for name, gate in made.items():
        assert summary.check_name(factory.check(gate, Outcome.PASS, 0.1, "")) == name
