"""Pruning: which candidates are dropped before their proof, and which are proven after all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import factories
import pytest
from factories import artifact, measurement, passed, run_context, target, target_policy, timing

from compile_stage.core import plugins
from compile_stage.core.errors import SourceError, WorkerError
from compile_stage.core.records import Candidate, Gate, Job, Measurement, SampleSet, Waiver
from compile_stage.measure.reference import Reference
from compile_stage.measure.timing import FAR_SLOWER
from compile_stage.pipeline import pruning
from compile_stage.pipeline.inputs import TargetRun
from compile_stage.pipeline.option_tuning import Tuning, lay_out
from compile_stage.pipeline.pruning import WORTH_S, quick_comparison, to_validate
from compile_stage.steps.select import select

TARGET = target(backends=("auto",), batch_sizes=(2, 8))
POLICY = target_policy(TARGET)
SAMPLES = SampleSet(path="", digest="d", count=100, real=True, source="")
SAMPLE_S = 0.01
FAR_SLOWER_S = FAR_SLOWER * SAMPLE_S * TARGET.batch_sizes[0]
"""Seconds of a call from which on a candidate is suspected."""


def job(backend: str = "onnxruntime") -> Job:
    return factories.job(backend=backend, where=TARGET)


def measured(latency_s: float, dropped: str = "") -> Measurement:
    calls = (latency_s, latency_s * 1.1)
    times = timing(0.1, rounds=2, batch_size=2, latency_s=calls, stable=False, speedup_interval=(0.05, 0.2))
    return measurement(timings=(times,), stopped_early=dropped)


class Answering:
    """A worker whose calls take as long as one says, or end as one says."""

    def __init__(self, latency_s: float, error: Exception | None = None) -> None:
        self.latency_s, self.error, self.calls = latency_s, error, 0

    def call(self, function: str, /, **arguments: Any) -> Any:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return [self.latency_s] if function == "quick_turn" else {}


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Measurement | None]:
    reference = Reference(
        outputs={},
        corners=(),
        digest="",
        path="",
        batch_size=1,
        sample_s=SAMPLE_S,
        distinct=1,
        extra=None,
    )
    inputs: Any = SimpleNamespace(source=factories.source(), validation=SAMPLES, reference=reference)
    run = TargetRun(run_context(tmp_path), plan=None, policy=POLICY, inputs=inputs)  # type: ignore[arg-type]

    def compared(worker: Answering, race: Callable[[], Measurement | None]) -> Measurement | None:
        monkeypatch.setattr(pruning, "_measure_beside_original", lambda *_: race())
        return quick_comparison(run, worker, job(), artifact(job()))

    return compared


def no_race() -> Measurement | None:
    raise AssertionError("nobody is suspected, and the machine was asked for alone")


def test_what_is_far_slower_and_takes_long_to_prove_is_dropped_with_the_reason_and_once(
    compare: Callable[..., Measurement | None],
) -> None:
    """Broken: minutes of proof would be paid for what loses anyway, or each further run would look again."""
    slow, races = Answering(2.0), []

    def race() -> Measurement:
        races.append(1)
        return measured(1.8, "dropped after 2 rounds: its latency was at least 90 times that of the original in each")

    found = compare(slow, race)
    assert found is not None
    # 100 samples at two batch sizes, 0.9 s each.
    assert found.stopped_early == (
        "dropped after 2 rounds: its latency was at least 90 times that of the original in each, so it was not "
        "validated, which would have taken about 3 minutes; to have it validated, list the backends by name instead of "
        "auto"
    )
    assert compare(Answering(0.0), no_race) == found
    assert races == [1]


def test_who_was_dropped_beside_an_original_of_other_packages_is_looked_at_again(
    compare: Callable[..., Measurement | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: after an update of PyTorch with which the original is slower, or faster, candidates would be dropped, and
    their speedups told, by how fast it was before."""

    def race() -> Measurement:
        return measured(1.8, "dropped after 2 rounds")

    assert compare(Answering(2.0), race) is not None
    before = plugins.cache_identity
    updated = {"torch": "updated"}
    monkeypatch.setattr(
        plugins, "cache_identity", lambda group, name: updated if group == "sources" else before(group, name)
    )
    assert compare(Answering(0.0), no_race) is None


@pytest.mark.parametrize("latency_s", [FAR_SLOWER_S * 0.99, WORTH_S / 200 * TARGET.batch_sizes[0] * 0.99])
def test_who_is_fast_enough_or_quickly_proven_is_not_suspected(
    latency_s: float, compare: Callable[..., Measurement | None]
) -> None:
    """Broken: what might win would be dropped, or each candidate would wait for the machine to be free of all
    others."""
    assert compare(Answering(latency_s), no_race) is None


@pytest.mark.parametrize("alone", [measured(2.0), measured(0.1, "dropped after 2 rounds"), None])
def test_a_suspicion_that_does_not_hold_alone_on_the_machine_drops_nobody(
    alone: Measurement | None, compare: Callable[..., Measurement | None]
) -> None:
    """Broken: whoever met a busy machine at its first call would be dropped for it."""
    assert compare(Answering(5.0), lambda: alone) is None


def test_what_can_not_be_timed_is_left_to_its_proof(compare: Callable[..., Measurement | None]) -> None:
    """Broken: a check that would say what is wrong would be lost, or a crash would be taken for slowness."""
    assert compare(Answering(5.0, WorkerError("exception", "no such batch size")), no_race) is None

    def broken() -> Measurement:
        raise SourceError("the original could not be opened again")

    assert compare(Answering(5.0), broken) is None


def test_a_worker_that_is_gone_ends_the_job(compare: Callable[..., Measurement | None]) -> None:
    """Broken: the job would end with 'takes no more calls' instead of how its worker died."""
    with pytest.raises(WorkerError, match="died"):
        compare(Answering(5.0, WorkerError("crash", "it died")), no_race)


def dropped_and_winner(winner_s: float) -> tuple[Candidate, Candidate]:
    slow, reason = job("slow"), "dropped: by far"
    dropped = Candidate(job=slow, artifact=artifact(slow), measurement=measured(1.0, reason)).in_state("pruned", reason)
    return dropped, passed(job(), measurement=measured(winner_s))


@pytest.mark.parametrize(("winner_s", "again"), [(1.0 / FAR_SLOWER * 0.9, False), (1.0 / FAR_SLOWER * 1.1, True)])
def test_it_is_proven_after_all_unless_the_winner_is_far_ahead(winner_s: float, again: bool) -> None:
    """Broken: a comparison with the original would decide between two candidates that are both slower than it."""
    dropped, winner = dropped_and_winner(winner_s)
    assert to_validate([dropped, winner], POLICY, (), winner) == ([dropped] if again else [])
    assert to_validate([dropped, winner], POLICY, (), None) == [dropped]
    assert to_validate([winner], POLICY, (), None) == []


@pytest.mark.parametrize(
    ("limit", "waived_for", "again"),
    [(None, None, True), (0.4, None, True), (1.0, None, False), (1.0, "cpu", True), (1.0, "other", False)],
)
def test_without_a_winner_what_can_not_hold_the_limit_on_speed_is_not_proven_for_nothing(
    limit: float | None, waived_for: str | None, again: bool
) -> None:
    """Broken: a run that fails on speed would pay for the proof of what is slower still; or what a waiver lets through
    would stay dropped."""
    dropped, _ = dropped_and_winner(1.0)  # a tenth of the original's speed
    gates = () if limit is None else (Gate(metric="speedup", limit=limit, direction="at_least", unit="ratio"),)
    waivers = () if waived_for is None else (
        Waiver(gate="speedup", target=waived_for, reason="r", owner="o", expires="2099-01-01"),
    )  # fmt: skip
    assert to_validate([dropped], replace(POLICY, performance=gates), waivers, None) == ([dropped] if again else [])


def test_what_was_dropped_before_its_proof_wins_nothing_and_is_neither_passed_nor_failed() -> None:
    """Broken: an artifact that nobody compared with anything would be shipped, or blamed; or the ladder would lay a
    figure of another run beside its own."""
    dropped, winner = dropped_and_winner(2.0)
    beside = select([dropped, winner], POLICY)
    assert beside.winner == winner.job.id
    assert beside.states[dropped.job.id] == "compiled_not_validated"
    assert beside.reasons[dropped.job.id] == "dropped: by far"
    alone = select([dropped], POLICY)
    assert alone.winner is None
    assert alone.reason == "no candidate passed every gate: 1 compiled but not validated"
    steps = lay_out(Tuning(base=dropped.job.id), (dropped, winner), beside, measured(3.0), POLICY)
    (graph,) = [step for step in steps if step.job_id == dropped.job.id]
    assert not graph.accepted
    assert graph.reason == "dropped: by far"


@pytest.mark.parametrize(
    ("backends", "prefer", "drops"),
    [
        (("auto",), "latency", True), (("auto",), "throughput", False), (("auto",), "memory", False),
        (("auto",), "size", False), (("onnxruntime", "tvm"), "latency", False), (("tvm",), "latency", False),
    ],
)  # fmt: skip
def test_only_auto_that_prefers_latency_drops_anybody(backends: tuple[str, ...], prefer: Any, drops: bool) -> None:
    """Broken: what a policy names would not be measured to the end, or what is small would be dropped for being
    slow."""
    policy = replace(POLICY, target=replace(TARGET, backends=backends), prefer=prefer)
    assert policy.prunes_slow is drops
