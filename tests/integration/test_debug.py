"""A compiler that dies of a graph is survived while the graph is made small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from compile_stage import api

pytestmark = [
    pytest.mark.usefixtures("fake_backends"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]


def test_a_crash_is_reduced_in_workers_that_may_die(small_model: Path, tmp_path: Path) -> None:
    """This compiler dies of anything, so one node is enough; none of the crashes reaches us."""
    found = api.debug(str(small_model / "model.onnx"), backend="fake-segfault", out=tmp_path / "out")
    assert found.failed is not None
    assert found.failed.problem.startswith("crash:")
    assert found.failed.reduced is not None
    assert found.failed.reduced.of == 4
    assert len(found.failed.nodes) == 1
    assert len(onnx.load(Path(found.bundle) / "model" / "model.onnx").graph.node) == 1


def test_a_job_whose_compiler_crashes_is_reduced(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    policy = write_policy("backends: [fake-segfault, onnxruntime], precisions: [fp32]")
    found = api.debug(f"folder:{small_model}", policy_path=policy, out=tmp_path / "out")
    assert "fake-segfault" in found.title
    assert found.failed is not None
    assert found.failed.step == "compile"
    assert len(found.failed.nodes) == 1


def test_a_limit_narrower_than_the_precision_is_reported(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: below an output that missed its limit stood that both answer the same, without a bundle; where another
    gate could not be checked, that there is no quantised node."""
    held = np.load(tmp_path / "data.npz")
    np.savez(tmp_path / "data.npz", x=held["x"], label=np.arange(64) % 4)
    limits = "outputs: {y: {cosine: 1.0, accuracy: 0.001}}"
    policy = write_policy("backends: [onnxruntime], precisions: [int8]", f"tolerances: {{int8: {{{limits}}}}}")
    sets = ["data.validation.labels=label"]
    found = api.debug(f"folder:{small_model}", policy_path=policy, sets=sets, out=tmp_path / "out")
    assert found.misses
    assert not [note for note in found.notes if "the same" in note], found.notes
    assert found.kept is None, found.kept
    assert "accuracy could not be checked" in " ".join(found.notes)
    assert (Path(found.bundle) / "reproduce.py").is_file()
