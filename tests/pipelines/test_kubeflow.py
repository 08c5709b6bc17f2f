"""The Kubeflow components: compiled by the kfp SDK, and run by kfp's own local runner."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "pipelines" / "kubeflow"


@pytest.fixture
def components() -> ModuleType:
    spec = importlib.util.spec_from_file_location("component", FOLDER / "component.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def local_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """kfp runs components here, in processes of this interpreter; yields where it keeps what they wrote."""
    from kfp import local
    from kfp.local import config

    before = config.LocalExecutionConfig.instance
    root = tmp_path / "kfp"
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root))
    yield root
    config.LocalExecutionConfig.instance = before


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The example pipeline, as `python pipelines/kubeflow/pipeline.py FILE` writes it."""
    written = tmp_path / "pipeline.yaml"
    monkeypatch.setattr(sys, "argv", ["pipeline.py", str(written)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(FOLDER / "pipeline.py"), run_name="__main__")
    return yaml.safe_load(written.read_text(encoding="utf-8"))


def test_the_example_promotes_only_what_passed(example):
    """The promotion is a task of the conditional part, and the condition is the status of the compilation."""
    tasks = example["root"]["dag"]["tasks"]
    assert set(tasks) == {"compile-model", "condition-1"}
    condition = tasks["condition-1"]["triggerPolicy"]["condition"]
    assert "compile-model-status" in condition
    assert "== 'passed'" in condition
    inner = example["components"]["comp-condition-1"]["dag"]["tasks"]
    assert set(inner) == {"promote-model"}


def test_the_stage_keeps_its_own_cache(example):
    """KFP's cache knows nothing of hardware or drivers: a timing from it would be another machine's."""
    assert not example["root"]["dag"]["tasks"]["compile-model"]["cachingOptions"].get("enableCache", False)


def test_an_image_that_has_everything_installs_nothing(components):
    built = components.component(components.compile_model, packages=[], image="registry.example/compile-stage:1")
    container = built.component_spec.implementation.container
    assert container.image == "registry.example/compile-stage:1"
    assert not any("pip install" in part for part in container.command)


def compile_locally(components: ModuleType, uri: str, policy: str, **more: Any) -> Any:
    compile_op = components.component(components.compile_model, packages=[])
    inputs = {"targets": [], "arguments": ["--no-publish"], "tracking_uri": ""} | more
    return compile_op(model_uri=uri, policy=policy, **inputs)


def test_a_wrong_policy_fails_the_step(components, local_runs, capfd, tmp_path, monkeypatch, hostile):
    """Only a failed gate is a result that a pipeline may branch on; and a model's name can't run a command."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="FAILURE"):
        compile_locally(components, hostile, "kind: Nonsense\n", targets=[hostile])
    said = capfd.readouterr()
    assert "compile-stage ended with exit code 2" in said.out + said.err
    assert not (tmp_path / "pwned").exists()


def test_a_local_run_compiles_a_real_model(components, local_runs, registered):
    task = compile_locally(components, registered.uri, registered.policy.read_text(encoding="utf-8"))
    assert task.outputs["status"] == "passed"
    assert task.outputs["exit_code"] == 0
    assert list(task.outputs["winners"]) == ["small"]
    assert task.outputs["published"] == {"small": None}
    result = json.loads(Path(task.outputs["result"].path).read_text(encoding="utf-8"))
    assert result["targets"][0]["winner"] == task.outputs["winners"]["small"]
    assert "<html" in Path(task.outputs["report"].path).read_text(encoding="utf-8")
    [winner] = [one for one in result["targets"][0]["candidates"] if one["state"] == "won"]
    by_batch = winner["timing"]["by_batch"]
    assert task.outputs["metrics"].metadata == {
        f"small.speedup_batch_{size}": timing["speedup"] for size, timing in by_batch.items() if timing["stable"]
    }


def test_a_failed_gate_is_an_output(components, local_runs, registered):
    """So that a pipeline can branch on it."""
    task = compile_locally(components, registered.uri, registered.unreachable.read_text(encoding="utf-8"))
    assert (task.outputs["status"], task.outputs["exit_code"]) == ("failed", 3)
    assert task.outputs["winners"] == {"small": None}
