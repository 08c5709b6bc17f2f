"""A bundle that nobody vouches for whom this machine knows: checking it must not run it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compile_stage import api
from compile_stage.core import plugins
from compile_stage.core.errors import UsageError
from compile_stage.serving.manifest import sealed

pytestmark = [
    pytest.mark.usefixtures("fake_backends", "known_run"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]


@pytest.fixture
def bundle(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """A bundle for a backend, as this machine packages it; its source stays where it is."""

    def make(backend: str) -> Path:
        policy = write_policy(
            f"backends: [{backend}], precisions: [fp32]" + (", batch_sizes: [1]" if backend != "onnxruntime" else ""),
            "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0}",
        )
        out = tmp_path / "out"
        assert api.run(f"folder:{small_model}", policy, out=out, publish=False).exit_code == 0
        return Path(shutil.move(out / "bundles" / "cpu", tmp_path / "bundle"))

    return make


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all workers that are started, but for those that ask installed plug-ins for their declarations:
    nothing of a bundle runs anywhere else."""
    engine = type(plugins.load("engines", "local"))
    started: list[str] = []
    real = engine.worker

    def worker(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if not name.startswith("plug-ins of"):
            started.append(name)
        return real(self, name, *args, **kwargs)

    monkeypatch.setattr(engine, "worker", worker)
    return started


def forged(bundle: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the manifest, and seal it again, as whoever made the bundle could."""
    file = bundle / "data" / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(sealed(manifest)))
    return bundle


def test_an_executable_artifact_runs_only_where_it_was_packaged_or_is_allowed(
    bundle: Callable[..., Path], workers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: looking whether a bundle is what it says would load the shared library in it."""
    made = str(bundle("fake-executable"))
    assert api.verify(made).passed
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path / "another-machine"))
    workers.clear()
    with pytest.raises(UsageError, match="its artifact, of fake-executable, is executable") as caught:
        api.verify(made)
    assert "--allow-code" in caught.value.fix
    assert api.verify(made, revalidate=False).passed
    assert workers == []
    assert api.verify(made, allow_code=True).passed
    assert len(workers) > 1, "it must run now, or the rest shows nothing"


@pytest.mark.parametrize("role", ["samples", "metric"])
def test_a_function_that_the_manifest_names_is_not_called(
    bundle: Callable[..., Path], workers: list[str], role: str
) -> None:
    """Broken: a bundle of plain data could name any function that is installed, and have it called."""

    def name_it(manifest: dict[str, Any]) -> None:
        if role == "samples":
            manifest["data"]["spec"]["validation"]["source"] = "python:fake_functions:samples"
        else:
            gate = {**manifest["job"]["gates"][0], "metric": "python:fake_functions:metric"}
            manifest["job"]["gates"].append(gate)

    made = str(forged(bundle("onnxruntime"), name_it))
    workers.clear()
    with pytest.raises(UsageError, match="its manifest names the function python:fake_functions"):
        api.verify(made)
    assert workers == []


def test_a_bundle_of_plain_data_is_checked_wherever_it_comes_from(
    bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: whoever is sent a bundle could no longer check it without trusting it."""
    made = str(bundle("onnxruntime"))
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path / "another-machine"))
    assert api.verify(made).passed


@pytest.mark.slow
def test_a_folder_of_models_does_not_vouch_for_its_own_versions(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a model directory could come with a `compiled-models` beside it, whose artifact a run would open."""
    body = (
        "performance: {min_speedup: null}\nbudget: {measure_seconds: 2, soak_seconds: 0.2, predict_seconds: 0}\n"
        "promote: {alias: prod, max_slowdown: 1000}"
    )
    target = "backends: [fake-executable], precisions: [fp32], batch_sizes: [1]"
    assert api.run(f"folder:{small_model}", write_policy(target, body), out=tmp_path / "out").exit_code == 0
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path / "another-machine"))
    versions = small_model.parent / "compiled-models" / "small-net-compiled"
    with pytest.raises(UsageError, match="is executable"):
        api.validate(f"folder:{versions}/1")
    honest = write_policy(target.replace("fake-executable", "onnxruntime"), body)
    result = api.run(f"folder:{small_model}", honest, out=tmp_path / "out-2")
    assert result.exit_code == 3
    assert "may not be run" in result.problem
    monkeypatch.setenv("COMPILE_STAGE_FOLDER_REGISTRY", str(versions.parent))
    assert api.validate(f"folder:{versions}/1").passed
