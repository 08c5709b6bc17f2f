"""Registries of the four kinds, with models in them. The servers themselves are in `tests/conftest.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compile_stage.core.digest import digest_of, digest_tree
from compile_stage.core.records import Bundle, Receipt, SourceModel
from compile_stage.registry.folder import FolderRegistry
from compile_stage.registry.mlflow import MLflowRegistry

MakeBundle = Callable[..., Bundle]
LogModel = Callable[..., str]


@pytest.fixture(autouse=True)
def quiet_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    # `connect` sets what is not set; a test must not inherit it from the one before.
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "COMPILE_STAGE_FOLDER_REGISTRY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> str:
    """A model name of this test's own: the server is shared."""
    return f"net-{digest_of([request.node.nodeid, time.time_ns()])[7:15]}"


def write_model(folder: Path, weights: float = 1.0) -> Path:
    """A model directory such as `mlflow.onnx` writes, as far as a registry looks at it."""
    from mlflow.models import Model, infer_signature

    x = np.zeros((2, 4), np.float32)
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "model.onnx").write_bytes(np.full(64, weights, np.float32).tobytes())
    model = Model(signature=infer_signature({"x": x}, {"y": x}))
    model.add_flavor("python_function", loader_module="mlflow.onnx")
    model.add_flavor("onnx", data="data/model.onnx")
    model.save(str(folder / "MLmodel"))
    return folder


@pytest.fixture
def log_model(tmp_path: Path) -> LogModel:
    """Log and register a model as a user's training run does; returns `models:/m-...`."""

    def log(name: str, weights: float = 1.0, register: bool = True) -> str:
        from mlflow import MlflowClient

        client = MlflowClient()
        run = client.create_run("0", run_name="train")
        model = client.create_logged_model("0", name=name, source_run_id=run.info.run_id)
        folder = write_model(tmp_path / f"logged-{model.model_id}", weights)
        client.log_model_artifacts(model.model_id, str(folder))
        client.finalize_logged_model(model.model_id, "READY")
        client.set_terminated(run.info.run_id)
        if register:
            if not client.search_registered_models(f"name = '{name}'"):
                client.create_registered_model(name)
            client.create_model_version(
                name,
                f"models:/{model.model_id}",
                run_id=run.info.run_id,
                model_id=model.model_id,
                tags={"task": "test"},
            )
        return f"models:/{model.model_id}"

    return log


@pytest.fixture
def registry(embedded: str) -> MLflowRegistry:
    """An embedded MLflow of the test's own."""
    return MLflowRegistry()


@pytest.fixture
def source(registry: MLflowRegistry, log_model: LogModel, tmp_path: Path) -> SourceModel:
    """`models:/net/1` with its files here: what is compiled and published."""
    log_model("net")
    return registry.resolve("models:/net/1", tmp_path / "sources")


def write_bundle(folder: Path, name: str, key: str, content: str = "compiled") -> Bundle:
    from mlflow.models import Model

    path = folder / f"bundle-{digest_of([key, content, time.time_ns()])[7:19]}"
    (path / "data" / "artifact").mkdir(parents=True)
    (path / "data" / "artifact" / "model.bin").write_text(content)
    (path / "data" / "manifest.json").write_text("{}")
    (path / "code").mkdir()
    (path / "code" / "loader.py").write_text("# the loader\n")
    model = Model()
    model.add_flavor("compile_stage", data="data")
    model.save(str(path / "MLmodel"))
    return Bundle(
        path=str(path),
        digest=digest_tree(path / "data"),
        key=digest_of(key),
        target="cpu-server",
        name=name,
        manifest={},
        tags={"compile_stage.policy": "fast", "compile_stage.policy_digest": "sha256:0", "precision": "int8"},
        metrics={"speedup.batch_1": 2.5, "max_abs.y.batch_1": 0.001},
        params={"precision": "int8", "backend": "onnxruntime"},
        summary="net 1 compiled by onnxruntime to int8 for cpu-server; median 0.4 ms at batch 1.",
    )


@pytest.fixture
def make_bundle(tmp_path: Path) -> MakeBundle:
    def make(name: str, key: str = "k", content: str = "compiled") -> Bundle:
        return write_bundle(tmp_path, name, key, content)

    return make


class Case:
    """One registry with one source model in it, for the conformance tests."""

    def __init__(self, registry: MLflowRegistry | FolderRegistry, source_uri: str, base: str, missing: str) -> None:
        self.artifacts = Path()  # of the server's store
        self.registry = registry
        self.source_uri = source_uri
        self.base = base
        self.missing = missing

    def resolve(self, into: Path) -> SourceModel:
        return self.registry.resolve(self.source_uri, into)

    def publish(
        self,
        tmp_path: Path,
        make_bundle: MakeBundle,
        key: str = "k",
        content: str = "compiled",
        files: Mapping[str, Path] | None = None,
    ) -> Receipt:
        source = self.resolve(tmp_path / "sources")
        name = self.registry.publication_name(source, f"{self.base}-compiled")
        bundle = replace(make_bundle(f"{self.base}-compiled", key, content), name=name)
        return self.registry.push(bundle, source, files or {})

    def reports(self, receipt: Receipt, into: Path) -> dict[str, str]:
        """Name → content of the reports that lie with a published version."""
        if self.registry.name == "folder":
            folder = Path(receipt.uri.removeprefix("folder:")) / "files"
        else:
            from mlflow import MlflowClient

            client = MlflowClient()
            into.mkdir(parents=True)
            run = client.get_model_version(receipt.name, receipt.version).run_id
            folder = Path(client.download_artifacts(run, "", str(into)))
        return {path.name: path.read_text() for path in folder.iterdir()}

    def untag(self, receipt: Receipt, tag: str) -> None:
        """Take a tag of a published version away, as a writer of the registry can."""
        if self.registry.name == "folder":
            file = Path(receipt.uri.removeprefix("folder:")) / "version.json"
            record = json.loads(file.read_text())
            del record["tags"][tag]
            file.write_text(json.dumps(record))
        else:
            from mlflow import MlflowClient

            MlflowClient().delete_model_version_tag(receipt.name, receipt.version, tag)

    def described(self, receipt: Receipt) -> str:
        """The description of a published version."""
        if self.registry.name == "folder":
            home = Path(receipt.uri.removeprefix("folder:"))
            return str(json.loads((home / "version.json").read_text())["description"])
        from mlflow import MlflowClient

        return str(MlflowClient().get_model_version(receipt.name, receipt.version).description)

    def stored(self, receipt: Receipt) -> Path:
        """The registry's own folder of a published version."""
        if self.registry.name == "folder":
            return Path(receipt.uri.removeprefix("folder:")) / "model"
        from mlflow import MlflowClient

        client = MlflowClient()
        version = client.get_model_version(receipt.name, receipt.version)
        location = client.get_logged_model(version.source.removeprefix("models:/")).artifact_location
        if location.startswith("mlflow-artifacts:/"):
            return self.artifacts / location.removeprefix("mlflow-artifacts:/")
        return Path(location)


@pytest.fixture(params=["server", "embedded", "folder"])
def case(request: pytest.FixtureRequest, unique: str, tmp_path: Path) -> Case:
    if request.param == "folder":
        root = tmp_path / "registry"
        write_model(root / unique / "1" / "model")
        return Case(FolderRegistry(), f"folder:{root}/{unique}/1", unique, f"folder:{root}/{unique}/9")
    request.getfixturevalue(request.param)
    request.getfixturevalue("log_model")(unique)
    made = Case(MLflowRegistry(), f"models:/{unique}/1", unique, f"models:/{unique}/9")
    if request.param == "server":
        made.artifacts = request.getfixturevalue("shared_server").log.parent / "artifacts"
    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # MLflow's own: its queries use what SQLAlchemy 2.1 deprecates, and importing mlflow.pyfunc warns of its own type
    # hints.
    known = (
        "ignore:The ``noload`` loader strategy:DeprecationWarning",
        "ignore:.*Any type hint is inferred as AnyType:UserWarning",
    )
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in known:
                item.add_marker(pytest.mark.filterwarnings(warning))
