"""A published version of each kind that Triton runs otherwise, made by one small run; a container registry; and servers
that are no part of the development environment."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

from compile_stage import api
from compile_stage.core.context import Context
from compile_stage.core.run_context import open_context
from compile_stage.exports.version import Version, open_version

POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: exports-test
owner: tests
report:
  profile: false
targets:
  native:
    backends: [onnxruntime]
    precisions: [fp32]
    batch_sizes: [1, 8]
  scripted:                          # config.pbtxt has no place for this option
    backends: [onnxruntime]
    precisions: [fp32]
    batch_sizes: [1, 8]
    options: {onnxruntime: {config: {session.disable_prepacking: "1"}}}
performance: {min_speedup: null}     # what is tested is the way out, not the speed
budget: {measure_seconds: 0.3, soak_seconds: 0.1, predict_seconds: 0}
"""
PINS = Path(__file__).parents[2] / "requirements" / "servers.txt"


class Versions(NamedTuple):
    """URIs in a folder registry, and what the original answers to rows."""

    native: str
    scripted: str
    rows: Any
    answers: Any


@pytest.fixture(autouse=True)
def common_cache(
    isolated_home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cache for all of these tests: it notes which bundles were packaged here."""
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path_factory.getbasetemp() / "exports-cache"))


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """A perceptron with random weights, published for two targets."""
    with warnings.catch_warnings():
        # mlflow warns of the type hints of a class of its own when it is imported
        warnings.filterwarnings("ignore", message=".*Any type hint is inferred as AnyType", category=UserWarning)
        import mlflow.pyfunc
    import mlflow.onnx
    from mlflow.models import infer_signature
    from onnx import TensorProto, helper, numpy_helper

    folder, random = tmp_path_factory.mktemp("exports"), np.random.default_rng(0)
    first, second = random.normal(size=(8, 16)).astype(np.float32), random.normal(size=(16, 3)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "first"], ["hidden"], name="hidden_layer"),
            helper.make_node("Relu", ["hidden"], ["active"], name="activation"),
            helper.make_node("MatMul", ["active", "second"], ["y"], name="output_layer"),
        ],
        "perceptron",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(first, "first"), numpy_helper.from_array(second, "second")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    rows = random.normal(size=(64, 8)).astype(np.float32)
    mlflow.onnx.save_model(
        model, str(folder / "registry" / "perceptron"), input_example=rows, pip_requirements=["onnx"],
        signature=infer_signature(rows, np.zeros((64, 3), np.float32)),
    )  # fmt: skip
    (folder / "policy.yaml").write_text(POLICY, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILE_STAGE_CACHE", str(tmp_path_factory.getbasetemp() / "exports-cache"))
        result = api.run(f"folder:{folder / 'registry' / 'perceptron'}", folder / "policy.yaml", promote=False)
    uris = {target.policy.target.name: target.receipt.uri for target in result.targets if target.receipt is not None}
    assert uris.keys() == {"native", "scripted"}, result.problem
    return Versions(uris["native"], uris["scripted"], rows, np.maximum(rows @ first, 0) @ second)


@pytest.fixture
def context() -> Iterator[Context]:
    with open_context(None, "local") as opened:
        yield opened


@pytest.fixture
def native(context: Context, versions: Versions) -> Version:
    """The version whose artifact Triton's own backend runs, fetched."""
    return open_version(context, versions.native, None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_answer(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=10).close()
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):  # it listens
                return
            time.sleep(0.1)
        except OSError:
            time.sleep(0.1)
        else:
            return
    process.kill()
    pytest.fail(f"it did not start:\n{log.read_text(errors='replace')[-3000:]}")


class Registry(NamedTuple):
    """A container registry on loopback."""

    host: str
    storage: Path


def _registry(folder: Path, settings: str = "") -> Iterator[Registry]:
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("no container registry here: docker-registry is not on PATH (apt-get install docker-registry)")
    host, storage = f"127.0.0.1:{free_port()}", folder / "storage"
    configuration, log = folder / "registry.yml", folder / "registry.log"
    configuration.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {storage}}}}}\nhttp: {{addr: '{host}'}}\n"
        f"log: {{level: error, accesslog: {{disabled: true}}}}\n{settings}"
    )
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [program, "serve", configuration], stdout=stream, stderr=stream, start_new_session=True,
            env={**os.environ, "OTEL_TRACES_EXPORTER": "none"},
        )  # fmt: skip
    try:
        await_answer(f"http://{host}/v2/", process, log)
        yield Registry(host, storage)
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    yield from _registry(tmp_path_factory.mktemp("oci"))


@pytest.fixture
def closed_registry(tmp_path: Path) -> Iterator[Registry]:
    """One that asks for a name and a password: `ci` and `secret`."""
    hashed = "$2b$04$/rQSb3S7Fa6vr9S5UNrYuuStWxxW3kzF.Sq3ilUNOtpgv5GvJd9Bq"
    (tmp_path / "htpasswd").write_text(f"ci:{hashed}\n")
    yield from _registry(tmp_path, f"auth: {{htpasswd: {{realm: tests, path: {tmp_path / 'htpasswd'}}}}}\n")


@pytest.fixture(scope="session")
def server_environment() -> Callable[..., Path]:
    """Makes the environment of a server, once, in the folder that COMPILE_STAGE_ORCHESTRATORS names, with the packages
    of a bundle and those that the export names too; gives the folder of its programs."""

    def make(name: str, requirements: Path, *more: str) -> Path:
        root = os.environ.get("COMPILE_STAGE_ORCHESTRATORS")
        if root is None:
            pytest.skip(
                f"{name} is no part of the development environment: name a folder for its own, made there once "
                "from the package index, in COMPILE_STAGE_ORCHESTRATORS"
            )
        pins = re.findall(rf"^{name}\S*==\S+", PINS.read_text(encoding="utf-8"), flags=re.MULTILINE)
        folder = Path(root).absolute() / re.sub(r"[^\w.]+", "-", "-".join([pins[0], *more]))
        if not (folder / "made").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.run([*pip, *pins, *more, "-r", str(requirements)], check=True)
            (folder / "made").touch()
        return folder / "bin"

    return make


class Starter:
    """Starts servers, and ends them with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def ports(self, count: int) -> list[int]:
        return [free_port() for _ in range(count)]

    def __call__(self, command: list[str], where: Path, url: str, variables: dict[str, str]) -> None:
        log = self._folder / "server.log"
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "COMPILE_STAGE"))}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, cwd=where, stdout=stream, stderr=stream, start_new_session=True, env={**kept, **variables}
            )
        self._started.append(process)
        await_answer(url, process, log)

    def stop(self) -> None:
        for process in self._started:  # with their workers, which are sessions of their own
            with contextlib.suppress(psutil.NoSuchProcess):
                main = psutil.Process(process.pid)
                for one in (*main.children(recursive=True), main):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            process.wait(30)


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    starter.stop()
