"""Which samples the original is asked with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import factories
import numpy as np

from compile_stage.core.errors import SourceError
from compile_stage.core.records import Check, Data, DataSpec, Gate, Outcome, PortableModel, SampleSet
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.measure.reference import Reference
from compile_stage.steps.reference import copies_notes, reference, rounding_notes
from compile_stage.steps.validate import _name_rounding

SIGNATURE = Signature(inputs=(TensorSpec(name="X", dtype="float32", shape=("batch", 2)),), outputs=())


class Original:
    """A worker with an original that sums its columns; of a wider type than float32 if it `takes` that."""

    def __init__(self, *, takes: bool) -> None:
        self.takes, self.opened = takes, ""

    def call(self, function: str, /, **given: Any) -> Any:
        if function.startswith("open_"):
            self.opened = function
        elif function == "predict":
            rows = np.load(Path(given["samples"].path) / "inputs" / "X.npy")
            assert rows.dtype == (np.float64 if self.opened == "open_as_given" else np.float32)
            if self.opened == "open_as_given" and not self.takes:
                raise SourceError("float32 alone")
            Path(given["into"]).mkdir(exist_ok=True)
            np.save(file := Path(given["into"]) / "y.npy", (rows[:, 1] - rows[0, 1]).astype(np.float32))
            return {"y": str(file)}
        elif function == "find_rounded":
            return [{"column": "'time'", "samples": 5}]
        return {"predict_corners": [], "quick_turn": [0.1]}.get(function)


def asked(tmp_path: Path, worker: Any) -> tuple[Reference, SampleSet]:
    np.savez(tmp_path / "data.npz", size=np.linspace(0, 1, 8), time=1.7e9 + np.arange(8.0) * 7)
    spec = DataSpec(source=f"file:{tmp_path / 'data.npz'}")
    made = factories.prepare(spec, SIGNATURE, tmp_path / "samples", seed=0, keep_given=True)
    data = replace(Data(validation=spec, calibration=spec), min_samples=16)  # no other calls are made
    context = factories.run_context(tmp_path)
    exported = PortableModel(path="", digest="", form="onnx", opset=18, precision="fp32", signature=SIGNATURE)
    original = factories.source(flavor="sklearn")
    return reference(context, worker, original, exported, made, data, factories.target()), made


def test_the_baseline_is_the_answers_to_the_samples_as_they_are(tmp_path: Path) -> None:
    """Broken: artifacts are compared with what the original answers to rounded samples, which nobody sends."""
    found, _ = asked(tmp_path, Original(takes=True))
    np.testing.assert_array_equal(np.load(found.outputs["y"]), np.arange(8) * 7)
    assert found.rounded is not None
    assert np.any(np.load(found.rounded["y"]) != np.arange(8) * 7)
    (note,) = rounding_notes(found)
    assert "by the rounding of 'time' (5)" in note


def test_a_report_says_that_most_samples_are_copies(tmp_path: Path) -> None:
    """Broken: 300 rows that are 30 samples ten times have the intervals of 300, and only a check's reason says so."""
    found, _ = asked(tmp_path, Original(takes=True))
    samples = SampleSet(path="", digest="", count=300, real=True, source="")
    few, half = replace(found, distinct=30), replace(found, distinct=150)
    (note,) = copies_notes(samples, few)
    assert note.startswith("Of the 300 validation samples only 30 differ")
    assert copies_notes(samples, half) == copies_notes(replace(samples, groups=30), few) == ()


def test_an_original_that_refuses_the_wider_type_is_asked_with_rounded_samples(tmp_path: Path) -> None:
    """Broken: a model that takes float32 alone can't be compiled, or its further calls go to a session that refuses
    them."""
    worker = Original(takes=False)
    found, _ = asked(tmp_path, worker)
    assert found.rounded is None
    assert rounding_notes(found) == ()
    assert worker.opened == "open_source"
    assert np.load(found.outputs["y"])[-1] != 49


def test_a_missed_gate_says_whether_rounding_is_its_cause() -> None:
    """Broken: a reader looks for an error of the compiler where the samples lose digits; or is told of rounding where
    it is the compiler's."""

    def check(metric: str, outcome: Outcome) -> Check:
        gate = Gate(metric=metric, limit=0.1, direction="at_most")
        return Check(gate=gate, outcome=outcome, measured=1.0, reason="off", output="y")

    metrics = ("max_rel", "max_abs", "mean_abs")
    found = _name_rounding(
        (*(check(metric, Outcome.FAIL) for metric in metrics), check("cosine", Outcome.PASS)),
        (check("max_rel", Outcome.PASS), check("max_abs", Outcome.FAIL), check("mean_abs", Outcome.FAIL)),
        (check("max_rel", Outcome.FAIL), check("max_abs", Outcome.FAIL), check("mean_abs", Outcome.PASS)),
        "5 of 8 samples are answered otherwise",
    )
    sure, may, other, held = (one.reason for one in found)
    assert "; the cause is rounding: " in sure
    assert "5 of 8 samples" in sure
    assert "; rounding may be the cause: " in may
    assert (other, held) == ("off", "off")
