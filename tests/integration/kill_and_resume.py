"""kill -9 the stage, or the registry's server, at random moments; the registry must show the old state or the new one.

    python tests/integration/kill_and_resume.py --moments 20            # the full count of each, about twenty minutes
    python tests/integration/kill_and_resume.py --moments 20 --victim server

Each moment: a new model is registered, `compile-stage run` starts, and after a random time the victim gets SIGKILL.
Then the registry is looked at: every published version must be whole (its files load and hold their digests), and the
alias must point to a whole version or to none. Then the stage runs again and must finish, leaving exactly one version
for the model. The suite runs a few moments of each (`test_kill.py`).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

VICTIMS = ("stage", "server")
POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: kill
owner: tests
report:
  profile: false
data:
  validation: {{source: "file:{data}", max_samples: 64}}
  calibration: {{source: "file:{data}", max_samples: 32}}
  min_samples: 32
targets:
  cpu: {{device: cpu, backends: [onnxruntime], precisions: [fp32], batch_sizes: [1], threads: 1}}
performance: {{min_speedup: null}}
budget: {{measure_seconds: 0.5, soak_seconds: 0.2, predict_seconds: 0}}
promote: {{alias: "{{target}}-prod"}}
"""


@dataclass
class Server:
    """A real `mlflow server` on sqlite, which can be killed and started again on the same data."""

    root: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        if not self.port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
        with open(self.root / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port),
                 "--workers", "1", "--backend-store-uri", f"sqlite:///{self.root}/mlflow.db",
                 "--artifacts-destination", str(self.root / "artifacts")],
                stdout=log, stderr=log, start_new_session=True, cwd=self.root,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # saves it eight more processes
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=10):
                return
            time.sleep(0.2)
        raise RuntimeError(f"the server did not start: {(self.root / 'server.log').read_text()[-2000:]}")

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@dataclass
class Trial:
    """A server, a policy, and models to take through it."""

    root: Path
    server: Server
    seed: int
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        data = self.root / "data.npz"
        np.savez(data, x=np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32))
        self.policy = self.root / "policy.yaml"
        self.policy.write_text(POLICY.format(data=data))
        self.environment = {
            **os.environ,
            "MLFLOW_TRACKING_URI": self.server.uri,
            "COMPILE_STAGE_CACHE": str(self.root / "cache"),
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        }

    def register(self, name: str, seed: int) -> None:
        """A small network of its own weights, so that nothing of an earlier moment is found in the cache."""
        import mlflow
        import onnx
        from onnx import TensorProto, helper, numpy_helper

        rng = np.random.default_rng(seed)
        weights = {
            "w1": rng.standard_normal((8, 16)).astype(np.float32),
            "w2": rng.standard_normal((16, 4)).astype(np.float32),
        }
        graph = helper.make_graph(
            [
                helper.make_node("MatMul", ["x", "w1"], ["h"], name="fc1"),
                helper.make_node("Relu", ["h"], ["r"], name="act"),
                helper.make_node("MatMul", ["r", "w2"], ["y"], name="fc2"),
            ],
            "net",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
            [numpy_helper.from_array(value, name) for name, value in weights.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        with mlflow.start_run(experiment_id="0"):
            mlflow.onnx.log_model(
                onnx.shape_inference.infer_shapes(model),
                name="net",
                registered_model_name=name,
                input_example=np.zeros((2, 8), np.float32),
                pip_requirements=["onnx"],
            )

    def stage(self, name: str) -> subprocess.Popen[bytes]:
        with open(self.root / "stage.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "compile_stage", "run", f"models:/{name}/1", "-p", str(self.policy), "--out",
                 str(self.root / "out" / name)],
                env=self.environment, stdout=log, stderr=log, cwd=self.root,
            )  # fmt: skip

    def look(self, name: str) -> str:
        """`old` or `new`; AssertionError for anything between."""
        import mlflow
        from mlflow import MlflowClient

        client = MlflowClient(self.server.uri)
        versions = client.search_model_versions(f"name='{name}-compiled'")
        for version in versions:
            with tempfile.TemporaryDirectory() as folder:
                path = mlflow.artifacts.download_artifacts(f"models:/{version.name}/{version.version}", dst_path=folder)
                from compile_stage.flavor import check_integrity

                check_integrity(Path(path))
            assert version.tags.get("compile_stage.key"), f"version {version.version} has no key: {version.tags}"
            assert version.tags.get("compile_stage.verdict") == "passed", version.tags
        aliases = client.get_registered_model(f"{name}-compiled").aliases if versions else {}
        assert set(aliases) <= {"cpu-prod"}, aliases
        assert all(str(v) in {str(version.version) for version in versions} for v in aliases.values()), aliases
        assert len({v.tags["compile_stage.key"] for v in versions}) == len(versions), "one key was published twice"
        return "new" if aliases else ("published" if versions else "old")

    def moment(self, number: int, victim: str, longest: float) -> bool:
        """One kill, one look, one resumption. False when the stage had ended before its moment came."""
        name = f"net-{victim}-{number}"
        self.register(name, seed=self.seed * 1000 + number)
        delay = self.random.uniform(0, longest)
        stage = self.stage(name)
        time.sleep(delay)
        late = stage.poll() is not None
        if victim == "stage":
            stage.kill()
            stage.wait()
        else:
            self.server.kill()
            first = stage.wait(timeout=280)
            assert first in (0, 4), f"with a dead server the stage ended with {first}"
            self.server.start()
        seen = self.look(name)
        again = self.stage(name).wait(timeout=280)
        assert again == 0, f"running again ended with {again}: {(self.root / 'stage.log').read_text()[-3000:]}"
        assert self.look(name) == "new"
        self.outcomes["after its end" if late else seen] += 1
        print(f"{victim} killed after {delay:5.2f} s: the registry showed {seen!r}; running again finished", flush=True)
        return not late


def orphans(marker: str) -> list[int]:
    """Processes of ours that outlived their stage."""
    import psutil

    found = []
    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        with suppress(psutil.Error):
            command = " ".join(process.info["cmdline"] or ())
            if "compile_stage.engine.worker" in command and marker in str(
                (process.info["environ"] or {}).get("COMPILE_STAGE_CACHE")
            ):
                found.append(process.info["pid"])
    return found


def go(
    moments: int, victims: Sequence[str], seed: int, root: Path, longest: float | None = None
) -> dict[str, Counter[str]]:
    """Run `moments` kills of each victim below `root`. Returns for each how often which state was seen; a stage that
    ended before its moment came is counted apart.

    Args:
        longest: Seconds within which the kills fall; by default as long as a run takes here.
    """
    server = Server(root)
    server.start()
    # In the environment, not by `mlflow.set_tracking_uri`: that would outlive this server in a test session's process.
    os.environ |= {"MLFLOW_TRACKING_URI": server.uri, "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}
    try:
        trial = Trial(root, server, seed)
        if longest is None:
            for number in range(2):  # the first run of all also waits for the disk and the server
                name = f"warm-up-{number}"
                trial.register(name, seed=seed * 1000 + 900 + number)
                began = time.monotonic()
                assert trial.stage(name).wait(timeout=300) == 0, (root / "stage.log").read_text()[-3000:]
                longest = time.monotonic() - began
        seen = {}
        for victim in victims:
            trial.outcomes = Counter()
            number = within = 0
            while within < moments:
                within += trial.moment(number, victim, longest)
                number += 1
            seen[victim] = trial.outcomes
        time.sleep(1)
        assert not orphans(str(root)), "workers outlived their stage"
        return seen
    finally:
        server.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--victim", choices=VICTIMS, action="append", help="default: one after the other")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for victim, seen in go(chosen.moments, chosen.victim or VICTIMS, chosen.seed, Path(folder)).items():
            print(victim, dict(seen))
