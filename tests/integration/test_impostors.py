"""No source and no lowering of a third party has an effect beyond its own word: those of examples/liar_backend,
installed as any plug-in is and driven through the command line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from compile_stage import api
from compile_stage.core import plugins
from compile_stage.core.errors import UsageError
from compile_stage.engine import landlock, seccomp

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

SECRET = "hunter2"
FAST = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.5, soak_seconds: 0, predict_seconds: 0}"
Run = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def run(
    small_model: Path,
    write_policy: Callable[..., Path],
    tmp_path: Path,
    install_example: Callable[[str], dict[str, str]],
) -> Run:
    def command(target: str, body: str, modes: dict[str, Any] | None = None) -> tuple[int, dict[str, Any], str]:
        if modes is not None:
            flavors = {"impostor": {"data": "model.onnx", "modes": modes}}
            (small_model / "MLmodel").write_text(yaml.safe_dump({"flavors": flavors}))
        policy = write_policy(target, body)
        arguments = ["run", f"folder:{small_model}", "-p", str(policy), "--no-publish", "--out", str(tmp_path / "out")]
        done = subprocess.run(
            [sys.executable, "-m", "compile_stage", *arguments], capture_output=True, text=True, check=False,
            env={**install_example("liar_backend"), "MLFLOW_TRACKING_TOKEN": SECRET},
        )  # fmt: skip
        assert (tmp_path / "out" / "result.json").exists(), done.stderr
        return done.returncode, json.loads((tmp_path / "out" / "result.json").read_text()), done.stdout + done.stderr

    return command


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Whoever waits for what a plug-in sends."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.2)
        yield listening


LOWERINGS = {
    "impostor-other-network": "max_rel of output 'y' is",
    "impostor-patches-worker": "max_rel of output 'y' is",
    "impostor-reads-outside": "keeps weights outside its folder",
    "impostor-links-outside": "a link that leads out of",
    "impostor-names-other-file": "which is no file that was written for it",
}


@pytest.mark.slow
def test_no_forged_graph_passes(run: Run) -> None:
    """Broken: a third party's lowering could have another network proven, by what it patches in the process that runs
    it or under the digest of the right one; take a file of the machine into an artifact; or end the run of all others:
    one whose only gate is missed did, with exit code 70."""
    limits = ", ".join(f"{name}: {{max_rel: 0.01}}" for name in LOWERINGS)
    code, result, printed = run(
        f"backends: [onnxruntime], precisions: [{', '.join(LOWERINGS)}]", f"{FAST}\ntolerances: {{{limits}}}"
    )
    assert code == 0, printed
    found = {c["precision"]: c for c in result["targets"][0]["candidates"]}
    for name, words in LOWERINGS.items():
        assert found[name]["state"] == "failed", (name, found[name])
        assert words in found[name]["reason"], (name, found[name]["reason"])
    assert found["fp32"]["state"] == "won", found["fp32"]["reason"]


@pytest.mark.slow
@pytest.mark.skipif(landlock.abi() < landlock.KEEPS_FILES, reason="this kernel's Landlock keeps no files")
@pytest.mark.skipif(not seccomp.available(), reason="there is no seccomp filter for this machine")
def test_a_source_reaches_nothing_but_its_model(run: Run, tmp_path: Path, server: socket.socket) -> None:
    """Broken: a third party's source could choose the samples that its model is judged on, read the stage's token,
    reach the network, leave files behind, have the judge patched, or write markup into the terminal and the reports."""
    (tmp_path / "key").write_text(SECRET)
    modes = {
        "swaps_samples": "",
        "reads_secrets": str(tmp_path / "key"),
        "opens_network": server.getsockname()[1],
        "writes_elsewhere": str(tmp_path / "planted"),
        "false_digest": "",
    }
    code, result, printed = run("backends: [onnxruntime], precisions: [fp32]", FAST, modes)
    assert code == 0, printed
    (candidate,) = result["targets"][0]["candidates"]
    notes = dict(note.split(": ", 1) for note in candidate["notes"] if ": " in note)
    assert notes["swaps_samples"] == "forged"
    assert notes["reads_secrets"] == "read []"
    assert notes["opens_network"] in ("ConnectionRefusedError", "OSError")
    assert notes["writes_elsewhere"] == "PermissionError"
    with pytest.raises(TimeoutError):
        server.accept()
    assert not (tmp_path / "planted").exists()
    (taken,) = Path(os.environ["COMPILE_STAGE_CACHE"]).glob("sample/**/x.npy")
    np.testing.assert_array_equal(np.load(taken), np.load(tmp_path / "data.npz")["x"])
    reports = [path.read_text() for path in (tmp_path / "out").glob("*") if path.suffix in (".html", ".md", ".xml")]
    assert reports
    assert not any("<script>alert" in text for text in reports)
    assert not any("\x1b[2J" in text for text in (*reports, printed))
    assert any("is the word of a third party's source (compile-stage-liar 1.0)" in note for note in result["notes"])


def test_a_source_that_names_a_file_of_the_machine_is_refused(run: Run) -> None:
    """Broken: a file that no source wrote would be compiled and published as its model, or the run would end with a
    traceback."""
    code, result, printed = run(
        "backends: [onnxruntime], precisions: [fp32]", FAST, {"names_other_file": "/etc/passwd"}
    )
    assert code == 5, printed
    assert "which is no file that was written for it" in printed
    assert not result["targets"]


TOOLCHAIN = """\
from dataclasses import replace
from pathlib import Path

from compile_stage.backends.onnxruntime import OnnxRuntime


class Backend(OnnxRuntime):
    name = "brings-python"
    requires = ("no_module_of_this_name",)
    capabilities = replace(OnnxRuntime.capabilities, toolchain=str(Path(__file__).parent / "own"))
"""


@pytest.fixture
def brings_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution whose backend names a toolchain in its own folder. Gives the file that its interpreter writes."""
    site, ran = tmp_path / "site", tmp_path / "ran"
    site.mkdir()
    (site / "brings_python.py").write_text(TOOLCHAIN)
    (site / "own.txt").write_text("# a lock\n")
    home = site / f"own-{sha256(b'# a lock' + bytes([10])).hexdigest()[:12]}"
    (home / "bin").mkdir(parents=True)
    (home / "toolchain.json").write_text('{"packages": {}}')
    (home / "bin" / "python").write_text(f"#!/bin/sh\necho ran > {ran}\n")
    (home / "bin" / "python").chmod(0o755)
    info = site / "brings_python-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brings-python\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[compile_stage.backends]\nbrings-python = brings_python:Backend\n")
    monkeypatch.syspath_prepend(str(site))
    plugins.refresh()
    yield ran
    plugins.refresh()


def test_no_plug_in_brings_the_interpreter_that_runs_it(
    small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, brings_python: Path
) -> None:
    """Broken: an interpreter starts before anything confines it, so a path in place of a toolchain's name ran a
    plug-in's own program with all of the user's rights."""
    policy = write_policy("backends: [brings-python, onnxruntime], precisions: [fp32]", FAST)
    with pytest.raises(UsageError, match="which is no plain name"):
        api.run(f"folder:{small_model}", policy, out=tmp_path / "out", publish=False)
    assert not brings_python.exists()
