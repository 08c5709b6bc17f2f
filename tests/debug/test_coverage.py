"""A calibration set that does not show what the model will see is named, and one that does is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from factories import prepare

from compile_stage.core.ports import WorkerLimits
from compile_stage.core.records import DataSpec, SampleSet
from compile_stage.core.run_context import open_context
from compile_stage.graph_debug.coverage import _float_tensors, coverage, coverage_note, noted_share, overlap_note
from compile_stage.measure.samples import overlap
from compile_stage.precision.peaks import measure_peaks
from compile_stage.steps.sample import compare_samples
from compile_stage.testing import models


@pytest.fixture
def samples(tmp_path: Path) -> Any:
    """Sets of images in the range of a factor."""
    model, _ = models.conv_net(tmp_path / "model")

    def make(name: str, seed: int, count: int, factor: float = 1.0) -> SampleSet:
        images = np.random.default_rng(seed).standard_normal((count, 3, 16, 16)) * factor
        np.savez(tmp_path / f"{name}.npz", image=images.astype(np.float32))
        spec = DataSpec(source=f"file:{tmp_path / name}.npz", max_samples=count)
        return prepare(spec, model.signature, tmp_path / name, seed=0)

    return model, make


def test_samples_of_one_distribution_cover_each_other(samples: Any) -> None:
    model, make = samples
    found = coverage(model, make("a", 1, 64), make("b", 2, 64))
    assert coverage_note(found) is None
    assert found.looked_at > 3


def test_larger_images_than_were_calibrated_are_noted_with_the_tensor(samples: Any) -> None:
    model, make = samples
    found = coverage(model, make("dark", 1, 64, 0.2), make("bright", 2, 64))
    share = {clipped.tensor: clipped.share for clipped in found.tensors}
    calibrated = np.load(Path(make("dark", 1, 64, 0.2).path) / "inputs" / "image.npy")
    seen = np.load(Path(make("bright", 2, 64).path) / "inputs" / "image.npy")
    outside = np.mean((seen < calibrated.min()) | (seen > calibrated.max()))
    assert share["image"] == pytest.approx(outside, abs=1e-4)
    note = coverage_note(found)
    assert note is not None
    assert "(an input)" in note or "(node" in note


def test_what_no_runtime_rounds_is_not_looked_at(tmp_path: Path) -> None:
    """Broken: each product before a Relu would be computed apart from it and reduced, half of all the time; or one that
    something else reads, or that is an output, would be missed."""
    graph = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]> g (float[N, 3] x) => (float[N, 3] last) {
            before = Neg(x)
            after = Relu(before)
            also_read = Abs(after)
            limited = Relu(also_read)
            turned = Transpose(limited)
            back = Transpose(turned)
            summed = Add(back, also_read)
            last = Exp(summed)
            unused = Relu(last)
        }""")
    assert set(_float_tensors(graph)) == {"x", "after", "also_read", "limited", "summed", "last", "unused"}


def test_one_clipped_sample_among_few_is_chance() -> None:
    assert noted_share(63) == pytest.approx(6 / 64)
    assert noted_share(10_000) == 0.01


def test_so_few_samples_that_nothing_can_be_told_are_said_to_be(samples: Any) -> None:
    """Chance alone may leave everything outside of one sample's range, so that its note never came, however little it
    showed."""
    model, make = samples
    found = coverage(model, make("one", 1, 1, 0.1), make("all", 2, 32))
    assert found.limit >= 1
    assert found.tensors[0].share > 0.5
    note = coverage_note(found)
    assert note is not None
    assert note.startswith("1 calibration sample is too few to tell")
    assert f"up to {100 * found.tensors[0].share:.1f} %" in note
    assert "6 calibration samples" not in (coverage_note(coverage(model, make("six", 1, 6), make("all", 2, 32))) or "")


def test_tensors_that_are_only_declared_are_not_looked_at(samples: Any, tmp_path: Path) -> None:
    """Quantizers and optimisers leave declarations of tensors behind that are gone; to ask for one ended the
    comparison."""
    model, make = samples
    graph = onnx.load(model.path)
    graph.graph.value_info.append(onnx.helper.make_tensor_value_info("gone", onnx.TensorProto.FLOAT, [1]))
    onnx.save(graph, tmp_path / "stale.onnx")
    stale = replace(model, path=str(tmp_path / "stale.onnx"))
    sets = make("a", 1, 8), make("b", 2, 8)
    assert coverage(stale, *sets).looked_at == coverage(model, *sets).looked_at
    batch = {"image": np.ones((1, 3, 16, 16), np.float32)}
    assert "gone" not in measure_peaks(graph, [batch])


def test_samples_in_both_sets_are_counted(samples: Any) -> None:
    _, make = samples
    a = make("a", 1, 8)
    same = replace(a, source="file:other.npz")
    assert overlap(a, same) == 8
    note = overlap_note(overlap(a, same), a.count, same.count)
    assert note is not None
    assert note.startswith("Calibration and validation share 8 samples")
    assert overlap_note(overlap(a, make("b", 2, 8)), 8, 8) is None


def test_a_run_notes_both_and_looks_only_once(samples: Any) -> None:
    """The step behind `notes` of a result."""
    model, make = samples
    sets = {"calibration": make("dark", 1, 32, 0.2), "validation": make("bright", 1, 32)}
    with open_context(None, "local") as context:
        [uncovered] = compare_samples(context, WorkerLimits(), model, sets)
        assert "do not cover" in uncovered
        assert compare_samples(context, WorkerLimits(), model, sets) == (uncovered,)
        assert [event.cached for event in context.events.events] == [False, True]
        [shared] = compare_samples(context, WorkerLimits(), model, {**sets, "calibration": sets["validation"]})
        assert shared.startswith("Calibration and validation share 32 samples")
        assert compare_samples(context, WorkerLimits(), model, {"validation": sets["validation"]}) == ()
        # Broken: of a graph that can't be looked into, as a PyTorch program is, nobody hears of shared samples either.
        program = replace(model, form="torch-export", digest="sha256:program")
        [shared] = compare_samples(context, WorkerLimits(), program, {**sets, "calibration": sets["validation"]})
        assert shared.startswith("Calibration and validation share 32 samples")


def test_a_model_that_cannot_be_looked_into_costs_a_note_and_no_more(samples: Any, tmp_path: Path) -> None:
    model, make = samples
    broken = replace(model, path=str(tmp_path / "absent.onnx"), digest="sha256:other")
    sets = {"calibration": make("a", 1, 8), "validation": make("b", 2, 8)}
    with open_context(None, "local") as context:
        [note] = compare_samples(context, WorkerLimits(), broken, sets)
    assert "is not known" in note
