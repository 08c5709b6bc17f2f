"""A published version validated on a device over a real sshd, in a Python that has numpy and the runtime alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loopback_device import Device
from loopback_device import device as device
from loopback_device import device_python as device_python
from loopback_device import sshd as sshd

from compile_stage import api
from compile_stage.core import run_context
from compile_stage.core.environment import hardware
from compile_stage.core.errors import GateError
from compile_stage.core.plugins import registry_for
from compile_stage.core.records import Verification

pytestmark = [pytest.mark.usefixtures("fake_backends", "known_original"), pytest.mark.filterwarnings("ignore")]

HERE = hardware()
BODY = (
    "performance: {min_speedup: %s, max_memory_mb: 4000}\n"
    "budget: {measure_seconds: 0.5, soak_seconds: 0, predict_seconds: 0}\n"
    'promote: {alias: "{target}-prod"}'
)
WRONG = """
import onnxruntime

class Session(onnxruntime.InferenceSession):
    def run(self, *arguments):
        return [-array for array in super().run(*arguments)]

onnxruntime.InferenceSession = Session
"""
FAKES = Path(__file__).parents[1] / "fake_backends"
Write = Callable[..., Path]


@pytest.fixture
def draft(small_model: Path, write_policy: Write, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Publishes what was compiled for this machine on another one, so that nobody validated it; gives its URI."""

    def publish(min_speedup: str) -> str:
        wanted = f"backends: [fake-cross], precisions: [fp32], hardware: {{fingerprint: {HERE.fingerprint}}}"
        policy = write_policy(wanted, BODY % min_speedup)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(run_context, "hardware", lambda: replace(HERE, cpu="a build machine's"))
            (found,) = api.run(f"folder:{small_model}", policy, out=policy.parent / "out").targets[0].unvalidated
        assert found.receipt is not None
        return found.receipt.uri

    return publish


@pytest.fixture
def with_fakes(device: Device) -> Device:
    """The device with the third party's backend installed, as its user would."""
    (device.site / "fakes.pth").write_text(f"{FAKES}\n")
    return device


def unmet(found: Verification) -> list[str]:
    return [*(check.reason for check in found.checks if check.outcome != "pass"), *found.notes]


def attached(uri: str, into: Path) -> list[dict[str, Any]]:
    folder = registry_for(uri).fetch(uri, into)
    return [json.loads(file.read_text()) for file in sorted((folder / "validations").glob("*.json"))]


@pytest.mark.slow
def test_what_a_device_answers_and_how_fast_it_is_makes_a_version_promotable(
    draft: Callable[[str], str], with_fakes: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: what was compiled for a device could not be proven on it without a registry there, or an artifact that
    nobody proved would be promoted."""
    uri = draft("null")
    found = api.validate_on(uri, "board", hosts=with_fakes.hosts)
    assert found.passed, unmet(found)
    assert {"cosine", "served", "memory_mb"} <= {check.gate.metric for check in found.checks}
    assert with_fakes.left() == []
    (said,) = attached(uri, tmp_path / "fetched")
    assert said["fingerprint"] == HERE.fingerprint
    assert said["device"]["host"] == "board"
    assert said["baseline"]["kind"] == "original"
    assert said["passed"] is True
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(run_context, "hardware", lambda: replace(HERE, cpu="a build machine's"))
        receipt = api.promote(uri, "edge")
    assert receipt.promoted_to == "edge"
    assert "loaded where it was validated" in receipt.note


@pytest.mark.slow
def test_wrong_answers_fail_and_a_speedup_is_over_what_the_hosts_file_says(
    draft: Callable[[str], str], with_fakes: Device, tmp_path: Path
) -> None:
    """Broken: a device's own word would count; a speedup that nobody measured would pass, or one over another baseline
    would seem one over the original."""
    uri = draft("0.001")
    (with_fakes.site / "wrong_runtime.py").write_text(WRONG)
    (with_fakes.site / "wrong_runtime.pth").write_text("import wrong_runtime\n")
    wrong = api.validate_on(uri, "board", hosts=with_fakes.hosts)
    (with_fakes.site / "wrong_runtime.pth").unlink()
    assert not wrong.passed
    assert "cosine" in {check.gate.metric for check in wrong.checks if check.outcome == "fail"}
    assert [one["passed"] for one in attached(uri, tmp_path / "wrong")] == [False]
    text = with_fakes.hosts.read_text()
    with_fakes.hosts.write_text(text.replace("{ssh:", "{baseline: none, ssh:"))
    without = api.validate_on(uri, "board", hosts=with_fakes.hosts)
    assert not without.passed
    (check,) = [check for check in without.checks if check.gate.metric == "speedup"]
    assert check.outcome == "not_run"
    assert "baseline: none" in check.reason
    with pytest.raises(GateError):
        api.promote(uri, "edge")
    with_fakes.hosts.write_text(text.replace("{ssh:", "{baseline: fp32, ssh:"))
    over_fp32 = api.validate_on(uri, "board", hosts=with_fakes.hosts)
    assert over_fp32.passed, unmet(over_fp32)
    (check,) = [check for check in over_fp32.checks if check.gate.metric == "speedup"]
    assert "fp32 on ONNX Runtime there" in check.reason
    assert attached(uri, tmp_path / "fetched")[0]["baseline"]["kind"] == "fp32"
