"""No attempt of a backend on what judges it has an effect: each mode of examples/liar_backend's intruder, installed as
any plug-in is and driven through the command line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_stage.engine import landlock, seccomp

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
    pytest.mark.skipif(landlock.abi() < landlock.KEEPS_FILES, reason="this kernel's Landlock keeps no files"),
    pytest.mark.skipif(not seccomp.available(), reason="there is no seccomp filter for this machine"),
]

SECRET = "hunter2"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Whoever waits for what a plug-in sends."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.2)
        yield listening


@pytest.mark.slow
@pytest.mark.usefixtures("known_original")
def test_no_attempt_on_what_judges_it_has_an_effect(
    small_model: Path,
    write_policy: Callable[..., Path],
    tmp_path: Path,
    install_example: Callable[[str], dict[str, str]],
    server: socket.socket,
) -> None:
    """Broken: a plug-in that is imported, compiles or is validated could pass with wrong answers, read the stage's
    token, reach the network, leave files behind, or end the run."""
    (tmp_path / "key").write_text(SECRET)
    aims = {
        "reads_secrets": tmp_path / "key",
        "opens_network": server.getsockname()[1],
        "writes_elsewhere": tmp_path / "planted",
        "kills_the_stage": 0,
        "rewrites_reference": os.environ["COMPILE_STAGE_CACHE"],
        "patches_the_judge": 0,
    }
    listed = ", ".join(f"{mode}: '{aim}'" for mode, aim in aims.items())
    policy = write_policy(
        f"backends: [intruder], options: {{intruder: {{mode: [{', '.join(aims)}], aim: {{{listed}}}}}}}",
        "performance: {min_speedup: null}\nbudget: {measure_seconds: 1, soak_seconds: 0.2, predict_seconds: 0}\n"
        "compliance: {sandbox: required}",
    )
    command = ["run", f"folder:{small_model}", "-p", str(policy), "--no-publish", "--out", str(tmp_path / "out")]
    environment = {**install_example("liar_backend"), "MLFLOW_TRACKING_TOKEN": SECRET}
    done = subprocess.run(
        [sys.executable, "-m", "compile_stage", *command], capture_output=True, text=True, env=environment, check=False
    )
    assert (tmp_path / "out" / "result.json").exists(), done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    found = {c["scheme"]: c for c in result["targets"][0]["candidates"]}

    for mode in ("rewrites_reference", "patches_the_judge"):
        assert found[mode]["state"] == "failed", found[mode]
        assert "max_rel of output 'y' is 1" in found[mode]["reason"], mode
    notes = {mode: note_of(found[mode], mode) for mode in aims}
    assert notes["reads_secrets"] == "read []"
    assert notes["opens_network"] in ("ConnectionRefusedError", "OSError")
    assert notes["writes_elsewhere"] == "PermissionError"
    assert notes["kills_the_stage"] == "killed []"
    assert notes["rewrites_reference"] == "changed 0"
    with pytest.raises(TimeoutError):
        server.accept()
    assert not (tmp_path / "planted").exists()
    assert SECRET not in (tmp_path / "out" / "result.json").read_text() + done.stdout + done.stderr
    assert result["environment"]["confinement"]["complete"] is True
    honest = [found[mode] for mode in aims if mode not in ("rewrites_reference", "patches_the_judge")]
    assert [candidate["error"] for candidate in honest] == [
        None
    ] * 4  # what only tries, and answers rightly, harms nobody


def note_of(candidate: dict[str, Any], mode: str) -> str:
    """What the attempt came to, as the artifact's note tells."""
    (note,) = (note for note in candidate["notes"] if note.startswith(f"{mode}: "))
    return note.partition(": ")[2]
