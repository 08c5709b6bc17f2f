"""The suite runs without a network, without the user's home, and with fixed seeds. Servers are real, on loopback
ports."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import settings as hypothesis_settings

from compile_stage.core.records import RunResult

# Other processes share the machine: how long an example takes says nothing of the code. The same examples in each run:
# one that chance finds in CI says nothing of the change that CI looks at. `--hypothesis-profile=search` looks for more.
hypothesis_settings.register_profile("compile-stage", deadline=None, derandomize=True)
hypothesis_settings.register_profile("search", deadline=None)
hypothesis_settings.load_profile("compile-stage")

# A shell without job control starts `pytest &` with SIGINT ignored, and every process below inherits that: a stage that
# a test sends SIGINT would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports a runtime: two cores are shared by several test processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("MLFLOW_REGISTRY_URI", None)  # fixtures of a module or a session would register models there


def _is_valid_syntax(term: str, value: str) -> bool:
    """`rfc3987_syntax.is_valid_syntax`, which it is from the first call on."""
    if sys.modules.get("rfc3987_syntax") is _parsers_of_iris:
        del sys.modules["rfc3987_syntax"]
    return bool(importlib.import_module("rfc3987_syntax").is_valid_syntax(term, value))


# jsonschema imports it for the formats `iri` and `iri-reference`, and it makes 38 parsers when it is imported: 1.4 CPU
# seconds in each test process. They are made when a format is first checked.
_parsers_of_iris = ModuleType("rfc3987_syntax")
_parsers_of_iris.is_valid_syntax = _is_valid_syntax  # type: ignore[attr-defined]
if "rfc3987_syntax" not in sys.modules and (spec := importlib.util.find_spec("rfc3987_syntax")) is not None:
    _parsers_of_iris.__spec__ = spec
    sys.modules["rfc3987_syntax"] = _parsers_of_iris


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compilers", action="store_true", help="also run what builds with a slow compiler, for minutes")
    parser.addoption("--slow", action="store_true", help="also run what takes ten seconds and more, half of all time")


LEFT_OUT = {
    "compilers": "builds with a slow compiler: run pytest --compilers, as CI does in a job of its own",
    "slow": "takes ten seconds and more: run pytest --slow, as CI does",
}
"""Marker, and option → why its tests are skipped without it."""

# What takes long: stages that measure, which would disturb each other; servers, each started once for all of these, and
# kills; compilers. A test belongs to the last that names it.
SLOW_GROUPS = (
    ("integration", "pipelines", "debug"),
    (
        "test_serve_elsewhere",
        "test_kill",
        "test_fleets",
        "test_two_stages",
        "test_alias_race",
        "test_tampering",
        "registry",
        "test_toolchains",
    ),
    ("conformance", "examples", "backends", "sources", "test_light_models", "test_program_backends"),
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports and collected tests stay until the end: the garbage collector never looks through them, which took a
    third of the time of collecting (16 s to 10 s of CPU in each test process)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each process begins with a group of what is slow, and goes on with what is fast, so that none is left alone with
    a slow test at the end. The scheduler (`--dist worksteal`) gives out equal runs of the list."""
    workers = min(len(SLOW_GROUPS), getattr(config, "workerinput", {}).get("workercount", 1))
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    fast: list[pytest.Item] = []
    for item in items:
        names = {item.path.parent.name, item.path.stem}
        chosen = [at for at, group in enumerate(SLOW_GROUPS) if names & set(group)]
        (shares[chosen[-1] % workers] if chosen else fast).append(item)
    ordered: list[pytest.Item] = []
    for number, share in enumerate(shares, start=1):
        room = max(0, len(items) * number // workers - len(ordered) - len(share))
        ordered += [*share, *fast[:room]]
        fast = fast[room:]
    items[:] = [*ordered, *fast]
    for marker, reason in LEFT_OUT.items():
        if not config.getoption(f"--{marker}"):
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def isolated_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home, a cache and a registry of its own for every test, so that none can pass because of another's
    leftovers."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(home / "cache" / "compile-stage"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home}/mlflow.db")
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    # A published model that MLflow loads puts its own code on the path, and the processes that later tests start would
    # take that for ours.
    monkeypatch.setattr(sys, "path", list(sys.path))
    return home


# ------------------------------------------------------------------------------------- plug-ins of the examples


@pytest.fixture(scope="session")
def install_example(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """Gives the environment of a process in which a package below `examples/` is installed, by pip, from a copy of
    it."""
    folders: dict[str, Path] = {}

    def install(name: str) -> dict[str, str]:
        if name not in folders:
            home = tmp_path_factory.mktemp("installed")
            source = shutil.copytree(
                Path(__file__).parents[1] / "examples" / name, tmp_path_factory.mktemp(name) / name
            )
            options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(home)]
            command = [sys.executable, "-m", "pip", "install", *options, str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            folders[name] = home
        path = os.pathsep.join([str(folders[name]), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, "PYTHONPATH": path}

    return install


# ------------------------------------------------------------------------------------- a model for int8


@pytest.fixture(scope="session")
def outlier_net() -> Any:
    """A depthwise-separable CNN with a residual, Conv-BN-Relu6, free height and width, and one channel of the depthwise
    layer 60 times as large as the others: int8 rounds the rest of its output away."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {"low": np.float32(0), "high": np.float32(600)}
    nodes = []

    def block(name: str, before: str, after: str, shape: tuple[int, ...], groups: int = 1) -> None:
        size, out = shape[-1], shape[0]
        weights[f"{name}.w"] = rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
        weights.update({f"{name}.scale": np.ones(out), f"{name}.shift": 0.1 * rng.standard_normal(out)})
        weights.update({f"{name}.mean": np.zeros(out), f"{name}.var": np.ones(out)})
        parameters = [f"{name}.{part}" for part in ("scale", "shift", "mean", "var")]
        nodes.extend(
            [
                helper.make_node(
                    "Conv", [before, f"{name}.w"], [f"{name}.c"], name=name, pads=[size // 2] * 4, group=groups
                ),
                helper.make_node("BatchNormalization", [f"{name}.c", *parameters], [f"{name}.n"], name=f"{name}.bn"),
                helper.make_node("Clip", [f"{name}.n", "low", "high"], [after], name=f"{name}.clip"),
            ]
        )

    block("stem", "x", "a", (16, 3, 3, 3))
    block("depthwise", "a", "b", (16, 1, 3, 3), groups=16)
    weights["depthwise.scale"][3] = 60
    block("pointwise", "b", "c", (16, 16, 1, 1))
    weights["pointwise.w"][:, 3] /= 60
    nodes.append(helper.make_node("Add", ["a", "c"], ["r"], name="residual"))
    block("last", "r", "d", (32, 16, 3, 3))
    nodes.append(helper.make_node("GlobalAveragePool", ["d"], ["p"], name="pool"))
    nodes.append(helper.make_node("Flatten", ["p"], ["f"], name="flatten"))
    weights |= {"fc.w": 0.2 * rng.standard_normal((32, 10)), "fc.b": np.zeros(10)}
    nodes.append(helper.make_node("Gemm", ["f", "fc.w", "fc.b"], ["y"], name="fc"))
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, "height", "width"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in weights.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(proto)
    return proto


# ---------------------------------------------------------------------------------------- hand-made runs


@pytest.fixture(scope="session")
def factory() -> ModuleType:
    return importlib.import_module("report.factory")  # `tests` is on the path


@pytest.fixture
def result(factory: ModuleType) -> RunResult:
    made: RunResult = factory.make_result()
    return made


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare a text with `tests/golden/NAME`; with UPDATE_GOLDENS=1 in the environment it is written instead."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if os.environ.get("UPDATE_GOLDENS"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{name} changed; look at it, then UPDATE_GOLDENS=1"

    return compare


# ---------------------------------------------------------------------------------------- real servers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def free_port() -> int:
    """A loopback port that nobody listens on now."""
    return _free_port()


class Server:
    """An `mlflow server` in a process group of its own."""

    def __init__(self, store: str, folder: Path, workers: int = 1) -> None:
        self.port = _free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self._command = [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--backend-store-uri", store, "--artifacts-destination", str(folder / "artifacts")),
            *("--workers", str(workers)),
        ]
        # uvicorn kills a worker that is silent for 5 s, and on a busy machine importing MLflow takes longer.
        if workers > 1:
            self._command += ["--uvicorn-opts", "--timeout-worker-healthcheck=120"]
        self._folder = folder
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # saves it three more processes
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, start_new_session=True, cwd=self._folder, env=environment
            )
        self._wait()

    @property
    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=20) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _wait(self) -> None:
        deadline = time.monotonic() + 120  # it starts in 5 s, but beside 12 busy processes in a minute
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=10) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            time.sleep(0.1)
        self.stop()
        pytest.fail(f"mlflow server did not start:\n{self.log.read_text(errors='replace')[-3000:]}")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture(scope="session")
def quick_databases() -> None:
    """SQLite databases of this process don't wait for the disk at each commit, of which a publication has 30: no test
    cuts the power."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def connected(connection: Any, _: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            with contextlib.suppress(sqlite3.DatabaseError):  # a file that is no database: the first statement says so
                connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", connected)


@pytest.fixture(scope="session")
def database(quick_databases: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database: making its tables takes seconds, copying the file does not. It is made once for all
    test processes, and only read."""
    from mlflow import MlflowClient

    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # of all processes of this session
    file, part = folder / "template.db", folder / "template.part"
    with FileLock(folder / "template.lock"):
        if not file.exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # MLflow's database layer uses what SQLAlchemy deprecates
                MlflowClient(f"sqlite:///{part}").search_experiments(max_results=1)
            part.rename(file)
    return file


@pytest.fixture(scope="session")
def copy_database(database: Path) -> Callable[[Path, str], str]:
    """Put an empty database of its own into a folder, artifacts going where it is told; returns its URI."""

    def copy(folder: Path, artifacts: str) -> str:
        file = shutil.copyfile(database, folder / "mlflow.db")
        connection = sqlite3.connect(file)
        with connection:
            connection.execute("UPDATE experiments SET artifact_location = ?", (artifacts,))
        connection.close()
        return f"sqlite:///{file}"

    return copy


@pytest.fixture
def embedded(copy_database: Callable[[Path, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An embedded MLflow in the test's folder, which is the current one; returns its URI."""
    uri = copy_database(tmp_path, str(tmp_path / "mlruns" / "0"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    return uri


@pytest.fixture(scope="session")
def shared_server(
    copy_database: Callable[[Path, str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    server = Server(copy_database(folder, "mlflow-artifacts:/0"), folder)
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    if not shared_server.answers:  # one that an earlier test's load brought down must not fail the tests after it
        shared_server.stop()
        shared_server.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared_server.uri)
    monkeypatch.chdir(tmp_path)
    return shared_server


def _postgres_programs() -> Path:
    """The folder of `initdb`, or skip with the reason."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    program = shutil.which("initdb") or (str(found[-1]) if found else None)
    if program is None:
        pytest.skip("no PostgreSQL server here: initdb is neither on PATH nor in /usr/lib/postgresql/*/bin")
    if importlib.util.find_spec("psycopg2") is None:
        pytest.skip('psycopg2 is not installed: pip install "compile-stage[dev]"')
    return Path(program).parent


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL server of our own in a temporary folder, on a free loopback port; yields its URL."""
    programs = _postgres_programs()
    # The server refuses to run as root, and the temporary folders of pytest are private to their owner.
    folder = Path(tempfile.mkdtemp(prefix="compile-stage-pg-"))
    user: str | None = None
    if os.geteuid() == 0:
        user = next((name for name in ("postgres", "nobody") if _has_user(name)), None)
        if user is None:
            pytest.skip("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")
        shutil.chown(folder, user)
    port = _free_port()
    common = {"user": user, "cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    data = folder / "data"
    made = subprocess.run(
        [programs / "initdb", "-D", data, "-U", "mlflow", "-A", "trust", "-E", "UTF8", "--no-sync", "--locale=C"],
        check=False, **common,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout
    settings = [f"-c{s}" for s in (f"port={port}", "listen_addresses=127.0.0.1", "fsync=off", "max_connections=200")]
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        server = subprocess.Popen(
            [programs / "postgres", "-D", data, "-k", folder, *settings],
            start_new_session=True, **{**common, "stdout": log},
        )  # fmt: skip
    try:
        url = f"postgresql://mlflow@127.0.0.1:{port}/postgres"
        _wait_for_postgres(url, server)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGQUIT)
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)
        Path(log.name).unlink()


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _wait_for_postgres(url: str, server: subprocess.Popen[bytes]) -> None:
    import psycopg2

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            psycopg2.connect(url).close()
            return
        except psycopg2.OperationalError:
            assert server.poll() is None, "PostgreSQL ended"
            time.sleep(0.1)
    pytest.fail("PostgreSQL did not start")


@pytest.fixture(scope="session")
def shared_postgres_server(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # The driver is named: which one a bare postgresql:// means depends on the version of SQLAlchemy.
    store = postgres.replace("postgresql:", "postgresql+psycopg2:")
    server = Server(store, tmp_path_factory.mktemp("pg-server"), workers=4)
    yield server
    server.stop()


@pytest.fixture
def postgres_server(shared_postgres_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    """An `mlflow server` with four workers on PostgreSQL."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared_postgres_server.uri)
    monkeypatch.chdir(tmp_path)
    return shared_postgres_server
