"""Stages that promote different models to one alias: the newest source wins, and a loser's exit code says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import policy_text

from compile_stage import api
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.records import Receipt, RunResult
from compile_stage.registry.mlflow import MLflowRegistry

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

# Any successor is fast enough: what is tested is who may replace whom.
BODY = (
    "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.5, soak_seconds: 0.2, predict_seconds: 0}\n"
    'promote: {alias: "{target}-prod", max_slowdown: 1000}'
)


TARGET = "backends: [onnxruntime], precisions: [fp32], batch_sizes: [1]"


@pytest.fixture
def policy(write_policy: Callable[..., Path]) -> Path:
    return write_policy(TARGET, BODY)


@pytest.fixture(scope="module")
def two_versions(
    small_net: Path, copy_database: Callable[[Path, str], str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with a registry, `mlflow.db`, of two versions of `net`, and the cache of a run of each that published
    nothing."""
    folder = tmp_path_factory.mktemp("two-versions")
    policy = folder / "policy.yaml"
    policy.write_text(policy_text(small_net / "data.npz", TARGET, BODY))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOME", str(folder))
        environment.setenv("COMPILE_STAGE_CACHE", str(folder / "cache"))
        environment.setenv("MLFLOW_TRACKING_URI", copy_database(folder, str(folder / "mlruns" / "0")))
        environment.chdir(folder)
        register(small_net / "small-net", 2)
        for version in (1, 2):
            result = run(version, policy, folder, publish=False)
            assert result.exit_code == 0, result.problem
    return folder


@pytest.fixture
def two_known_versions(
    two_versions: Path, small_net: Path, tmp_path: Path, isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry of the test's own with two versions of `net`, which were compiled, proven and measured: a run of one
    begins with what it publishes."""
    shutil.copyfile(two_versions / "mlflow.db", tmp_path / "mlflow.db")
    shutil.copytree(two_versions / "cache", cache_root(), dirs_exist_ok=True)
    shutil.copy(small_net / "data.npz", tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)


def register(small_model: Path, count: int) -> None:
    """Versions of `net` whose weights differ."""
    import mlflow
    import onnx
    from onnx import numpy_helper

    for number in range(1, count + 1):
        graph = onnx.load(small_model / "model.onnx")
        weight = graph.graph.initializer[0]
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * number, weight.name))
        with mlflow.start_run():
            mlflow.onnx.log_model(graph, name="net", registered_model_name="net", pip_requirements=["onnx"])


def source_of_alias() -> str:
    import mlflow

    version = mlflow.MlflowClient().get_model_version_by_alias("net-compiled", "cpu-prod")
    return str(version.tags["compile_stage.source"])


def run(version: int, policy: Path, tmp_path: Path, **options: Any) -> RunResult:
    return api.run(f"models:/net/{version}", policy, out=tmp_path / f"out-{version}", **options)


def receipt_of(result: RunResult) -> Receipt:
    receipt = result.targets[0].receipt
    assert receipt is not None
    return receipt


@pytest.mark.slow
def test_a_run_of_an_older_source_leaves_the_alias_to_the_newer(
    two_known_versions: None, policy: Path, tmp_path: Path
) -> None:
    """Broken: of two pipelines the slower one would decide what is served, whatever it was started for."""
    assert receipt_of(run(2, policy, tmp_path)).promoted_to == "cpu-prod"
    older = run(1, policy, tmp_path)
    assert (older.status, older.exit_code) == ("passed", 0), older.problem
    assert receipt_of(older).promoted_to is None
    assert "made from models:/net/2, which is newer than models:/net/1" in receipt_of(older).note
    assert source_of_alias() == "models:/net/2"
    api.promote(receipt_of(older).uri, "cpu-prod")  # on purpose, by hand
    assert source_of_alias() == "models:/net/1"


@pytest.mark.slow
@pytest.mark.parametrize("ours", [1, 2])
def test_a_run_whose_alias_moved_while_it_measured_looks_again(
    two_known_versions: None, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: int
) -> None:
    """Broken: a run would end with 4 because another was faster, or replace what it was never compared with."""
    others = receipt_of(run(3 - ours, policy, tmp_path, promote=False))
    real, asked = MLflowRegistry.promote, []

    def late(self: MLflowRegistry, receipt: Receipt, alias: str, *, expected: str | None = None) -> Receipt:
        if not asked:
            real(self, others, alias)  # another stage, between our look and our move
        asked.append(expected)
        return real(self, receipt, alias, expected=expected)

    monkeypatch.setattr(MLflowRegistry, "promote", late)
    result = run(ours, policy, tmp_path)
    assert (result.status, result.exit_code) == ("passed", 0), result.problem
    assert source_of_alias() == "models:/net/2"
    assert asked == (["", others.version] if ours == 2 else [""])
    assert receipt_of(result).promoted_to == ("cpu-prod" if ours == 2 else None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_three_stages_at_once_the_newest_source_has_the_alias(
    server: Any, small_model: Path, policy: Path, tmp_path: Path
) -> None:
    """Broken: three pipelines on three machines would end with 4, and chance would say what is served."""
    register(small_model, 3)

    def start(version: int) -> subprocess.Popen[str]:
        command = ["run", f"models:/net/{version}", "-p", str(policy), "--json", "--out", str(tmp_path / f"{version}")]
        return subprocess.Popen(
            [sys.executable, "-m", "compile_stage", *command],
            env={**os.environ, "COMPILE_STAGE_CACHE": str(tmp_path / f"cache-{version}")},  # no lock in common
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        )  # fmt: skip

    stages = [start(version) for version in (3, 2, 1)]
    answers = [stage.communicate(timeout=500) for stage in stages]
    assert [stage.returncode for stage in stages] == [0] * 3, [err[-2000:] for _, err in answers]
    assert source_of_alias() == "models:/net/3"
    receipts = [json.loads(out)["targets"][0]["receipt"] for out, _ in answers]
    assert receipts[0]["alias"] == "cpu-prod"
