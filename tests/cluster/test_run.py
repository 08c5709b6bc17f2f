"""A whole run on a cluster of three nodes, of which only one is what the target asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories import policy_text
from small_net import write_small_net

from compile_stage import api
from compile_stage.cli.main import main
from compile_stage.core.environment import hardware
from compile_stage.core.errors import UsageError
from compile_stage.core.events import Silent

_TARGET = "backends: [onnxruntime, openvino], precisions: [fp32, int8-dynamic], hardware: {fingerprint: FINGERPRINT}"
_BODY = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}"


class Seen(Silent):
    """Calls `on_compile` when the first compilation begins, and keeps what is said."""

    def __init__(self, on_compile: Any) -> None:
        self._on_compile = on_compile
        self.outcomes: list[tuple[str, str]] = []
        self.messages: list[str] = []

    def began(self, step: str, job_id: str) -> None:
        if step == "compile" and self._on_compile is not None:
            on_compile, self._on_compile = self._on_compile, None
            on_compile()

    def progressed(self, step: str, job_id: str, message: str) -> None:
        self.messages.append(message)

    def ended(self, step: str, job_id: str, seconds: float, outcome: str) -> None:
        self.outcomes.append((step, outcome))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    write_small_net(tmp_path)
    file = tmp_path / "policy.yaml"
    target = _TARGET.replace("FINGERPRINT", hardware().fingerprint)
    file.write_text(policy_text(tmp_path / "data.npz", target, _BODY))
    return file


@pytest.mark.slow
def test_a_run_on_three_nodes_is_the_run_of_one_machine(
    at_the_cluster: Any,
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Broken: a run is measured on a node of other hardware, a lost node ends it, or what is published is not what one
    machine publishes."""
    model = f"folder:{tmp_path / 'small-net'}"
    killed: list[str] = []
    seen = Seen(lambda: killed.append(at_the_cluster.kill_busy()))
    shared = at_the_cluster.shared
    result = api.run(model, policy, out=tmp_path / "out", engine="ray", reporter=seen, shared_cache=shared)
    assert (result.status, result.problem) == ("passed", "")
    assert killed in (["small-1"], ["small-2"])
    assert f"node {killed[0]} was lost; it is done again" in seen.messages
    assert ("benchmark", "done") in seen.outcomes
    (cluster,) = result.environment["cluster"]
    assert cluster["hardware"]["cores"] == hardware().cores == result.environment["hardware"]["cores"]
    (target,) = result.targets
    assert {c.artifact.hardware for c in target.candidates if c.artifact} == {hardware().fingerprint}
    assert target.bundle is not None
    assert target.receipt is not None
    assert Path(target.bundle.path) == tmp_path / "out" / "bundles" / "cpu"
    assert (tmp_path / "out" / "report.html").exists()
    assert capsys.readouterr().out == ""  # Ray's daemons complain of the node there

    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path / "of another machine"))
    local = api.run(model, policy, out=tmp_path / "local", shared_cache=shared).targets[0]
    assert local.bundle is not None
    assert local.receipt is not None
    assert (local.selection.winner, local.bundle.digest, local.receipt.uri) == (
        target.selection.winner,
        target.bundle.digest,
        target.receipt.uri,
    )


@pytest.mark.slow
def test_what_the_cluster_lacks_is_said(
    at_the_cluster: Any,
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Broken: doctor does not show the nodes, or a run starts whose nodes find nothing of each other's."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--engine", "ray", "-p", str(policy), "--json"])
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert {node["name"] for node in found["nodes"]} == {"head", "small-1", "small-2"}
    assert found["targets"] == {"cpu": ["head"]}
    assert all("onnxruntime" in node["backends"] for node in found["nodes"])

    model = f"folder:{tmp_path / 'small-net'}"
    with pytest.raises(UsageError, match="step caches of their own"):
        api.run(model, policy, engine="ray", publish=False)
