"""An embedded MLflow with versions to report, a folder of policies, and the service as a process."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from factories import POLICY_TEXT

from compile_stage.service.deliveries import signature

SERVING = Path(__file__).with_name("serving_recorded.py")
SECRET = "0123456789abcdef0123456789abcdef"
PATIENCE_S = 180  # of whatever a process does; the machine is shared


@pytest.fixture
def register(embedded: str, tmp_path: Path) -> Callable[..., None]:
    """Register so many versions of a model, which hold nothing."""

    def make(name: str, count: int, **tags: str) -> None:
        from mlflow import MlflowClient

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow's database layer uses what SQLAlchemy deprecates
            client = MlflowClient()
            client.create_registered_model(name)
            for _ in range(count):
                client.create_model_version(name, f"{tmp_path}/none", tags=tags, await_creation_for=0)

    return make


@pytest.fixture
def policies(tmp_path: Path) -> Path:
    """A folder with one policy, `cpu-server`, that is meant for every model."""
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "cpu.yaml").write_text(POLICY_TEXT)
    return folder


class Running:
    """The service as a process that can be killed and started again on the same state and port."""

    def __init__(self, folder: Path, port: int, drain_s: float = 30) -> None:
        self.folder, self.port, self.drain_s = folder, port, drain_s
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, str(SERVING), str(self.folder), str(self.port), str(self.drain_s)]
        with (self.folder / "service.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if (answer := self.ask("GET", "/healthz")) is not None and answer[0] == 200:
                return
            time.sleep(0.05)
        pytest.fail(f"the service did not start:\n{self.log[-3000:]}")

    @property
    def log(self) -> str:
        return (self.folder / "service.log").read_text()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], str] | None:
        """Status, headers and body of an answer; None where nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def deliver(
        self, version: int, *, secret: str = SECRET, age_s: int = 0, delivery: str = "", name: str = "m"
    ) -> int | None:
        """Report that a version got the alias `go`, as MLflow does; the answer's status."""
        data = {"name": name, "alias": "go", "version": str(version)}
        document = {"entity": "model_version_alias", "action": "created", "timestamp": "", "data": data}
        body, stamp = json.dumps(document).encode(), str(int(time.time()) - age_s)
        delivery = delivery or str(uuid.uuid4())
        headers = {"X-MLflow-Delivery-Id": delivery, "X-MLflow-Timestamp": stamp}
        headers["X-MLflow-Signature"] = signature(secret, delivery, stamp, body)
        answer = self.ask("POST", "/webhook", body, headers)
        return answer[0] if answer is not None else None

    def recorded(self) -> list[list[str]]:
        """The arguments of every run so far."""
        file = self.folder / "runs.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            if time.monotonic() > deadline:
                pytest.fail(f"it took longer than {PATIENCE_S} s:\n{self.log[-3000:]}")
            time.sleep(0.1)


@pytest.fixture
def service(tmp_path: Path, policies: Path, free_port: int, embedded: str) -> Iterator[Running]:
    running = Running(tmp_path, free_port)
    yield running
    if running.process is not None and running.process.poll() is None:
        running.process.kill()
        running.process.wait()
