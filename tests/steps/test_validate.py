"""The order of a validation: what is compared, when it ends, and which verdicts are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import COSINE, SIGNATURE, artifact, job, run_context, source, target
from fake_engine import FakeWorker, Scenario

from compile_stage.core.errors import IntegrityError
from compile_stage.core.records import Artifact, Check, Data, DataSpec, Gate, Job, Outcome, PortableModel
from compile_stage.measure.reference import Reference
from compile_stage.steps.reference import reference
from compile_stage.steps.validate import Validated, ValidationSet, validate

WHERE = target(batch_sizes=(1, 8))
JOB = job(where=WHERE, gates=(COSINE,))
ARTIFACT = artifact(JOB, options={"scheme": "fp32", "error": 0.0})
SPEC = DataSpec(source="input_example")
DATA = Data(validation=SPEC, calibration=SPEC)
MODEL = PortableModel(
    path="", digest="sha256:g", form="onnx", opset=17, precision="fp32", kept={}, signature=SIGNATURE, made_from=""
)
CORNERS = ("min (x 1x4)", "max (x 8x4)")
# What is looked at beyond the validation samples.
OTHER_CALLS = {"permuted_batch", "repeatable", "input_unchanged", "answer_kept", "missing_numbers", "taken_values"}


class Answering(FakeWorker):
    """An artifact whose answers are off in some batch sizes, or at some corners.

    Attributes:
        off: Batch size, or label of a corner → noise over signal.
        silent: Corners that it does not answer.
        on_predict: Called with each batch size.
        on_corners: Called before it answers at the corners.
    """

    def __init__(self) -> None:
        super().__init__(Scenario())
        self.off: dict[Any, float] = {}
        self.silent: tuple[str, ...] = ()
        self.predicted: list[int] = []
        self.on_predict: Callable[[], None] = lambda: None
        self.on_corners: Callable[[], None] = lambda: None

    def _predict(self, into: str, batch_size: int = 0, **rest: Any) -> Any:
        self.predicted.append(batch_size)
        self.on_predict()
        self._error = self.off.get(batch_size, 0.0)
        return super()._predict(into, **rest)

    def _predict_corners(self, into: str, **_: Any) -> Any:
        self.on_corners()
        answers = []
        for place, label in enumerate(label for label in CORNERS if label not in self.silent):
            self._error = self.off.get(label, 0.0)
            answers.append({"label": label, "outputs": super()._predict(str(Path(into) / f"corner-{place}"))})
        return answers


class Bench:
    """One artifact beside the original."""

    def __init__(self, folder: Path) -> None:
        self.worker, self.context = Answering(), run_context(folder / "cache")
        self.samples = self.worker._prepare_samples(str(folder / "samples"))
        self.reference: Reference = reference(self.context, self.worker, source(), MODEL, self.samples, DATA, WHERE)
        self.worker.predicted.clear()

    def validated(self, *, waived: frozenset[str] = frozenset(), of: Job = JOB, made: Artifact = ARTIFACT) -> Validated:
        known = ValidationSet(samples=self.samples, reference=self.reference, data=DATA, waived=waived)
        return validate(self.context, self.worker, of, made, known)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "cache").mkdir()
    return Bench(tmp_path)


def bad(found: Validated) -> list[Check]:
    return [check for check in found.verdict.checks if check.outcome is not Outcome.PASS]


def test_equal_answers_pass_at_every_batch_size_and_corner(bench: Bench) -> None:
    """Broken: nothing would pass, or something that was not looked at."""
    found = bench.validated()
    assert bad(found) == []
    assert found.verdict.passed
    assert bench.worker.predicted == [1, 8]
    looked_at = [c for c in found.verdict.checks if c.gate.metric == "cosine"]
    assert [c.batch_size for c in looked_at] == [1, 8, None, None]
    assert [label for label in CORNERS if any(f"at the shape corner {label}:" in c.reason for c in looked_at)] == [
        *CORNERS
    ]
    assert [errors.output for errors in found.errors] == ["y"]
    assert {check.gate.metric for check in found.verdict.checks} >= {"claimed_precision", *OTHER_CALLS}


def test_a_batch_size_whose_answers_are_off_fails(bench: Bench) -> None:
    """Broken: an artifact that is right for one sample and wrong for eight would be served for eight."""
    bench.worker.off = {8: 1.0}
    found = bench.validated()
    assert not found.verdict.passed
    assert {check.batch_size for check in bad(found)} == {8}
    assert "cosine" in {check.gate.metric for check in bad(found)}


@pytest.mark.parametrize("label", CORNERS)
def test_a_corner_whose_answers_are_off_fails(bench: Bench, label: str) -> None:
    """Broken: the smallest or largest shapes that the policy promises would be answered wrongly."""
    bench.worker.off = {label: 1.0}
    found = bench.validated()
    assert not found.verdict.passed
    assert any(c.outcome is Outcome.FAIL and f"at the shape corner {label}:" in c.reason for c in bad(found))


def test_a_failure_ends_the_validation_unless_it_is_waived(bench: Bench) -> None:
    """Broken: minutes are spent on what has failed, or a waiver of one limit hides what else is wrong."""
    bench.worker.off = {1: 1.0, 8: 1.0}
    assert {check.batch_size for check in bad(bench.validated())} == {1}
    assert bench.worker.predicted == [1]
    bench.worker.predicted.clear()
    waived = bench.validated(waived=frozenset({"cosine"}))
    assert bench.worker.predicted[0] == 1
    assert {check.gate.metric for check in bad(waived) if check.batch_size == 1} >= {"cosine"}
    bench.worker.off = {1: 1.0, CORNERS[1]: 1.0}
    int8 = replace(JOB, scheme=replace(JOB.scheme, precision="int8"))
    whole = bench.validated(waived=frozenset({"cosine"}), of=int8)
    assert [c.batch_size for c in whole.verdict.checks if c.gate.metric == "cosine"] == [1, 8, None, None]
    assert {check.gate.metric for check in whole.verdict.checks} >= OTHER_CALLS


def test_what_could_not_be_looked_at_does_not_pass_and_is_asked_again(bench: Bench) -> None:
    """Broken: a corner without an answer passes, or a trouble of one day fails the artifact in each later run."""
    bench.worker.silent = CORNERS[1:]
    found = bench.validated()
    assert not found.verdict.passed
    silent = [c for c in bad(found) if "no answer at the shape corner" in c.reason]
    assert silent
    assert {c.outcome for c in silent} == {Outcome.NOT_RUN}
    bench.worker.silent = ()
    again = bench.validated()
    assert again.verdict.passed
    assert not again.cached
    bench.worker.predicted.clear()
    kept = bench.validated()
    assert (kept.cached, kept.verdict) == (True, again.verdict)
    assert bench.worker.predicted == []


@pytest.mark.parametrize("when", ["on_predict", "on_corners"])
@pytest.mark.parametrize("which", ["samples", "reference"])
def test_files_that_are_changed_during_the_comparison_prove_nothing(bench: Bench, which: str, when: str) -> None:
    """Broken: an artifact that overwrites the samples or the original's answers with its own would pass."""
    path = Path((bench.samples if which == "samples" else bench.reference).path)

    def change() -> None:
        file = next(file for file in sorted(path.rglob("*.npy")))
        array = np.load(file)
        file.chmod(0o644)
        np.save(file, array + 1)

    setattr(bench.worker, when, change)
    with pytest.raises(IntegrityError, match="were changed while candidates were compared"):
        bench.validated()


def test_a_verdict_of_the_cache_is_the_one_that_was_made(bench: Bench) -> None:
    """Broken: a failure of the cache would come back as a pass, or without its reason."""
    bench.worker.off = {8: 1.0}
    first = bench.validated()
    bench.worker.off = {}
    again = bench.validated()
    assert (first.cached, again.cached) == (False, True)
    assert again.verdict == first.verdict
    assert not again.verdict.passed


def test_limits_keep_the_place_where_the_policy_wrote_them(bench: Bench) -> None:
    """Broken: a verdict of the cache would name the line of an older policy."""
    known = ValidationSet(samples=bench.samples, reference=bench.reference, data=DATA)
    for origin in ("a.yaml:3", "b.yaml:7"):
        gates = (replace(COSINE, origin=origin),)
        found = validate(bench.context, bench.worker, replace(JOB, gates=gates), ARTIFACT, known)
        assert {c.gate.origin for c in found.verdict.checks if c.gate.metric == "cosine"} == {origin}


def test_a_verdict_is_not_that_of_other_gates_settings_or_waivers(bench: Bench) -> None:
    """Broken: what passed under a loose limit passes under a strict one; or what was proven of an artifact on one
    thread is said of the same file on two."""
    bench.worker.off = {8: 1.0}
    loose = replace(JOB, gates=(replace(COSINE, limit=0.5),))
    first = bench.validated(of=loose, waived=frozenset({"claim"}))
    strict = bench.validated(waived=frozenset({"claim"}))
    assert not strict.cached
    assert COSINE.limit in {check.gate.limit for check in bad(strict)}
    assert COSINE.limit not in {check.gate.limit for check in first.verdict.checks}
    other = replace(ARTIFACT, options={**ARTIFACT.options, "threads": 2})
    assert not bench.validated(made=other, waived=frozenset({"claim"})).cached
    assert not bench.validated(waived=frozenset({"cosine"})).cached
    assert bench.validated(waived=frozenset({"cosine"})).cached


def test_an_own_metric_is_asked_each_time(bench: Bench) -> None:
    """Broken: a function of the user's that changed, or what it reads, is taken for what it said before."""
    own = Gate(metric="python:fake_engine:mean_off", limit=1.0, direction="at_most")
    of = replace(JOB, gates=(COSINE, own))
    for _ in range(2):
        found = bench.validated(of=of)
        assert own.metric in {check.gate.metric for check in found.verdict.checks}
        assert not found.cached
