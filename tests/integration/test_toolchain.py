"""A backend whose packages are not here, in an environment of its own: made from its lock, and used by a whole run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile_stage import api
from compile_stage.core import plugins
from compile_stage.core.errors import MissingDependencyError
from compile_stage.core.toolchains import Toolchain, toolchains_root
from compile_stage.engine import toolchains
from compile_stage.installation import examine

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # MLflow's own deprecations


@pytest.fixture
def iree(toolchain: Callable[[str, Any], Toolchain]) -> Toolchain:
    """IREE's toolchain, in the folder that COMPILE_STAGE_TOOLCHAINS names; made there at the first time."""
    return toolchain("iree", plugins.load("backends", "iree"))


def test_a_run_compiles_proves_and_measures_in_the_toolchain(
    iree: Toolchain, small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Broken: a backend would be offered and then fail for want of its packages, or of ours in its environment; or its
    artifact would be cached and published without what made it."""
    policy = write_policy(
        "backends: [iree, onnxruntime], precisions: [fp32], batch_sizes: [1, 8]",
        "performance: {min_speedup: null}\nbudget: {measure_seconds: 1, soak_seconds: 0.2, predict_seconds: 0}",
    )
    result = api.run(f"folder:{small_model}", policy, out=tmp_path / "out")
    (target,) = result.targets
    by_backend = {candidate.job.backend: candidate for candidate in target.candidates}
    made = by_backend["iree"]
    assert made.failure is None, made.failure
    assert made.artifact is not None
    assert made.verdict is not None
    assert made.verdict.passed
    assert made.measurement is not None
    assert made.artifact.toolchain["iree-base-compiler"] == iree.packages["iree-base-compiler"]
    assert made.artifact.toolchain["numpy"] == iree.packages["numpy"]
    assert plugins.cache_identity("backends", "iree")["toolchain"] == iree.digest
    assert target.winner is not None
    (entry,) = (entry for entry in examine().entries if (entry.kind, entry.name) == ("backend", "iree"))
    assert entry.ready
    assert str(toolchains_root()) in entry.version


def test_a_run_takes_openvinos_provider_in_its_toolchain(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path
) -> None:
    """Compiled, proven and measured on the provider, whose nodes are read back; beside the plain runtime in one run."""
    if "COMPILE_STAGE_TOOLCHAINS" not in os.environ:
        pytest.skip(
            "making a toolchain takes a minute and the network: name a folder for it in COMPILE_STAGE_TOOLCHAINS"
        )
    try:
        home = toolchains.install("onnxruntime-openvino")
    except MissingDependencyError as error:
        pytest.skip(f"its packages can't be had: {str(error).splitlines()[-1]}")
    policy = write_policy(
        "backends: [onnxruntime-openvino, onnxruntime], precisions: [fp32], batch_sizes: [1, 8]",
        "performance: {min_speedup: null}\nbudget: {measure_seconds: 1, soak_seconds: 0.2, predict_seconds: 0}",
    )
    result = api.run(f"folder:{small_model}", policy, out=tmp_path / "out")
    (target,) = result.targets
    made = {candidate.job.backend: candidate for candidate in target.candidates}["onnxruntime-openvino"]
    assert made.failure is None, made.failure
    assert made.artifact is not None
    assert set(made.artifact.executed["providers"]) == {"OpenVINOExecutionProvider"}
    assert made.artifact.executed["share"] == 1.0
    assert made.artifact.toolchain["onnxruntime-openvino"] == home.packages["onnxruntime-openvino"]
    assert made.verdict is not None
    assert made.verdict.passed
    assert target.winner is not None
