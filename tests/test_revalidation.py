"""A published model validated again: what it is said to have passed was looked at."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import factories
import pytest

from compile_stage import revalidation
from compile_stage.core.digest import plain
from compile_stage.core.records import Budget, Check, Gate, Measurement, Outcome, SampleSet, Verdict
from compile_stage.measure.recompute import refuse_verdict
from compile_stage.measure.request import MeasurementRequest
from compile_stage.measure.timed_answers import Proof
from compile_stage.steps.benchmark import BASELINE, Measured

SPEEDUP = Gate(metric="speedup", limit=1.0, direction="at_least", unit="ratio")
SERVED = (
    Gate(metric="throughput_at_p99", limit=100, direction="at_least", unit="requests/s"),
    Gate(metric="cost_per_million", limit=2, direction="at_most"),
)


def validated() -> revalidation.Validated:
    """Its tolerances hold, and it is twice as fast as the original."""
    candidate = factories.passed(factories.job(), 2.0)
    samples = Gate(metric="samples", limit=1, direction="at_least")
    first = Check(gate=samples, outcome=Outcome.PASS, measured=64.0, reason="", batch_size=1)
    assert candidate.verdict is not None
    held = (replace(check, batch_size=1) for check in candidate.verdict.checks)
    assert candidate.artifact is not None
    return revalidation.Validated(
        candidate=replace(candidate, verdict=Verdict(checks=(first, *held))),
        artifact=candidate.artifact,
        source=factories.source(),
        samples=SampleSet(path="", digest="sha256:v", count=64, real=True, source="file:v"),
        data=factories.policy().data,
        proof=Proof(gates={}, reference={}, digest=""),
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The validation's measurement under these gates, of a manifest with these fields."""

    def measure(
        *gates: Gate, baseline: Measurement | None = None, **manifest: Any
    ) -> tuple[revalidation.Validated, tuple[str, ...]]:
        before = validated()
        measurements: dict[str, Any] = {before.candidate.job.id: before.candidate.measurement}
        measurements |= {BASELINE: baseline} if baseline is not None else {}
        found = Measured(measurements=measurements, failures={}, cached=False)
        monkeypatch.setattr(revalidation, "benchmark", lambda *_: found)
        whole = {"performance": plain(gates), "verdict": None, "waivers": [], "fingerprint": "x", **manifest}
        return revalidation.measure(factories.run_context(tmp_path), whole, Budget(), before)

    return measure


def test_a_gate_that_was_not_looked_at_is_not_passed(measured: Any) -> None:
    """Broken: `validate` says passed where it measured nothing of what the policy limits, and promotion refuses it."""
    job, today = factories.job(), date(2026, 1, 1)
    plainly, _ = measured(SPEEDUP)
    assert plainly.verdict.passed
    assert refuse_verdict(plainly.verdict, job, (SPEEDUP,), today) is None
    with_served, _ = measured(SPEEDUP, *SERVED)
    assert not with_served.verdict.passed
    left = [check for check in with_served.verdict.checks if check.outcome is Outcome.NOT_RUN]
    assert [check.gate for check in left] == list(SERVED)
    assert all("starts no server: run the stage on this hardware" in check.reason for check in left)
    assert refuse_verdict(with_served.verdict, job, (SPEEDUP, *SERVED), today) == "its verdict did not pass"


@pytest.mark.parametrize(("alone_s", "passes"), [((), True), ((0.009,), True), ((0.001,), False)])
def test_a_speedup_over_a_baseline_that_its_threads_held_up_passes_no_validation(
    measured: Any, alone_s: tuple[float, ...], passes: bool
) -> None:
    """Broken: on a busy machine the original takes 10 ms with two threads and 1 ms with one, and a validation says that
    `min_speedup` holds."""
    timing = replace(factories.timing(1.0, 10, 1), latency_s=(0.01,) * 10, one_thread_s=alone_s)
    found, notes = measured(SPEEDUP, baseline=factories.measurement(timings=(timing,)))
    assert found.verdict.passed == passes
    assert bool(notes) != passes
    if not passes:
        assert "the baseline took 10 ms with " in notes[0]
        assert [check.outcome for check in found.verdict.checks if check.gate == SPEEDUP] == [Outcome.NOT_RUN]


def test_a_model_is_not_made_unfit_for_the_machine_that_its_run_measured_it_on(measured: Any, tmp_path: Path) -> None:
    """Broken: a validation of a version on its own machine, for a new driver say, fails whatever it finds, and the
    version is not loaded there any more."""
    machine = factories.run_context(tmp_path).hardware.fingerprint
    published = plain(Verdict(checks=()))
    here, notes = measured(SPEEDUP, *SERVED, verdict=published, fingerprint=machine)
    assert here.verdict.passed
    assert notes == ("throughput_at_p99 and cost_per_million: as its run measured, not measured again",)
    elsewhere, notes = measured(SPEEDUP, *SERVED, verdict=published, fingerprint="another")
    assert (elsewhere.verdict.passed, notes) == (False, ())


def test_an_open_gate_is_measured_as_long_as_in_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Broken: a version proven anew on a noisier machine fails as too uncertain after three starts, where the run
    that published it would have made more."""
    requests: list[MeasurementRequest] = []

    def benchmark(*arguments: Any) -> Measured:
        requests.append(arguments[-1])
        return Measured(measurements={}, failures={}, cached=False)

    monkeypatch.setattr(revalidation, "benchmark", benchmark)
    before = validated()
    measured = before.candidate.measurement
    assert measured is not None
    manifest = {"performance": plain((SPEEDUP,)), "verdict": None, "waivers": [], "fingerprint": "x"}
    for interval in ((0.9, 1.2), (1.9, 2.1)):
        timing = replace(measured.timings[0], speedup=1.05, speedup_interval=interval)
        for baseline in (None, before.artifact):
            revalidation.measure(factories.run_context(tmp_path), manifest, Budget(), before, baseline)
            decided = requests.pop().decided("", replace(measured, timings=(timing,)))
            assert decided == (interval[0] > 1 or baseline is not None), "beside itself nothing is faster"
