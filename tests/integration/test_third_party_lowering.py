"""A third party's lowering: installed by its entry point, named in a policy, and from there on like any of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compile_stage import api, flavor
from compile_stage.core.errors import CompileStageError

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

Write = Callable[..., Path]
TARGET = "backends: [onnxruntime, torchscript], precisions: [fp16-weights]"
BODY = """
tolerances: {fp16-weights: {max_rel: 0.01}}
performance: {min_speedup: null}
select: {prefer: size}
budget: {measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}
"""


@pytest.mark.usefixtures("fake_backends")
def test_its_precision_is_proven_and_published(small_model: Path, write_policy: Write) -> None:
    """Broken: a policy could name our precisions only, or a backend that compiles any graph would refuse theirs as one
    that it lacks."""
    policy = write_policy(TARGET, BODY)
    result = api.run(f"folder:{small_model}", policy, out=policy.parent / "out")
    (target,) = result.targets
    refused = {one.backend for one in result.refused}
    assert "torchscript" in refused, "a program is no graph that a lowering works on"
    assert result.exit_code == 0
    by_precision = {one.job.scheme.precision: one for one in target.candidates if one.artifact is not None}
    theirs, ours = by_precision["fp16-weights"].artifact, by_precision["fp32"].artifact
    assert theirs is not None
    assert ours is not None
    assert theirs.size_bytes < 0.8 * ours.size_bytes
    assert by_precision["fp16-weights"].verdict is not None
    assert by_precision["fp16-weights"].verdict.passed
    assert target.winner is not None
    assert target.winner.job.id.endswith("--onnxruntime--fp16-weights")
    assert target.receipt is not None
    (published,) = (policy.parent / "out" / "bundles").rglob("MLmodel")
    with flavor.load_model(str(published.parent), on_hardware_mismatch="ignore") as model:
        assert model.run({"x": np.ones((2, 8), np.float32)})["y"].shape == (2, 4)


def test_its_precision_is_unknown_where_it_is_not_installed(small_model: Path, write_policy: Write) -> None:
    """Broken: a policy would be accepted on a machine without the plug-in, and the job be missing there without a
    word."""
    policy = write_policy(TARGET, BODY)
    with pytest.raises(CompileStageError, match="fp16-weights"):
        api.run(f"folder:{small_model}", policy, out=policy.parent / "out")
