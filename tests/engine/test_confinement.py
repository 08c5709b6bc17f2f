"""What a worker can't do, seen from inside a real one on this machine's kernel."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from compile_stage.core.errors import WorkerError
from compile_stage.core.ports import Confinement, WorkerLimits
from compile_stage.core.sample_files import write_index
from compile_stage.engine import confinement, landlock, seccomp
from compile_stage.engine.confinement import environment_of
from compile_stage.engine.local import LocalEngine

LIMITS = WorkerLimits(timeout_s=60.0)
landlocked = pytest.mark.skipif(landlock.abi() < landlock.KEEPS_FILES, reason="this kernel's Landlock keeps no files")
filtered = pytest.mark.skipif(not seccomp.available(), reason="there is no seccomp filter for this machine")


@pytest.fixture
def server() -> Iterator[int]:
    """A port of this machine that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@landlocked
def test_strangers_files_and_processes_are_out_of_reach(engine: LocalEngine, tmp_path: Path) -> None:
    """Broken: a plug-in could read keys, rewrite the reference answers, or read the stage's memory with its tokens."""
    secret = tmp_path / "secret"
    secret.write_text("key")
    with engine.worker("test", LIMITS) as worker:
        stage, own = os.getpid(), worker.call("process")["pid"]
        came = worker.call("reach", files=[str(secret), str(tmp_path / "new")], ports=[], pids=[stage, own])
    assert [came[f"{action} {secret}"] for action in ("read", "write")] == ["EACCES", "EACCES"]
    assert came[f"write {tmp_path / 'new'}"] == "EACCES"
    assert {came[f"{action} {stage}"] for action in ("environment", "memory")} <= {"EACCES", "EPERM"}
    if landlock.abi() >= 6:
        assert came[f"signal {stage}"] == "EPERM"
    assert came[f"signal {own}"] == came[f"environment {own}"] == "done"
    assert came["own folder"] == came["own child"] == came["own memory"] == "done"
    assert secret.read_text() == "key"


@filtered
def test_limits_and_priorities_of_other_processes_are_out_of_reach(engine: LocalEngine) -> None:
    """Broken: a plug-in could end the stage, or another candidate, by a limit on its CPU time, which no rule on signals
    forbids; or be measured beside an original that it gave the lowest priority, and win."""
    with engine.worker("stranger", LIMITS) as stranger, engine.worker("original", LIMITS) as original:
        for pid in (original.call("process")["pid"], os.getpid()):
            came = stranger.call("meddle", pid=pid)
            for what in ("limits", "priority", "scheduling", "disk"):
                assert (came[f"{what} other"], came[f"{what} own"]) == ("EPERM", "done"), what
            assert came["priority user"] == came["priority group"] == "EPERM"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads have no names in /proc here")
def test_a_worker_names_its_threads_where_a_gpu_needs_it(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: NVIDIA's driver could not start in a worker, whose `cuInit` writes such names, and all GPU targets would
    fail with "finds no GPU that it can use"."""
    monkeypatch.setattr(confinement, "has_nvidia", lambda: True)
    with engine.worker("test", LIMITS) as worker:
        assert worker.call("name_a_thread", name="stranger") == "stranger"
        started = worker.call("in_a_process_it_starts", function="name_a_thread", name="another")
    assert started == {"answer": "another", "running": True, "code": 7}


@landlocked
def test_a_worker_can_not_have_the_kernel_forget_its_peak_memory(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: an artifact that takes 400 MB in each call would pass a limit of 350 MB."""
    monkeypatch.setattr(confinement, "has_nvidia", lambda: False)
    with engine.worker("test", LIMITS) as worker, pytest.raises(WorkerError, match="clear_refs"):
        worker.call("forget_peak")


def test_what_a_worker_starts_is_as_confined_as_it_is(engine: LocalEngine, server: int, tmp_path: Path) -> None:
    """Broken: a published model's code would be loaded with all of the user's rights, beside a worker that has none."""
    (secret := tmp_path / "secret").write_text("key")
    with engine.worker("test", LIMITS) as worker:
        tried = {"files": [str(secret)], "ports": [server], "pids": [os.getpid()]}
        own = worker.call("reach", **tried)
        started = worker.call("in_a_process_it_starts", function="reach", **tried)
    assert started["answer"] == own


def test_why_a_process_did_not_start_is_told(engine: LocalEngine) -> None:
    """Broken: the worker would wait for one that never was, or lose the process that starts others."""
    with engine.worker("test", LIMITS) as worker:
        assert "No such file" in worker.call("start_what_is_not_there")
        started = worker.call("in_a_process_it_starts", function="echo", said="still here")
    assert started["answer"] == {"said": "still here"}


def test_what_a_worker_started_ends_with_it(engine: LocalEngine) -> None:
    """Broken: a published model's server would stay behind, with its memory."""
    with engine.worker("test", LIMITS) as worker:
        pid = worker.call("start_and_leave")
        assert psutil.pid_exists(pid)
    until = time.monotonic() + 20
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


@pytest.mark.gpu
def test_cuda_starts_in_a_worker(engine: LocalEngine) -> None:
    """Broken: as above."""
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("no NVIDIA GPU here")
    with engine.worker("test", LIMITS) as worker:
        assert worker.call("start_cuda") == 0
        assert worker.call("in_a_process_it_starts", function="start_cuda")["answer"] == 0


@filtered
def test_the_network_is_out_of_reach(engine: LocalEngine, server: int) -> None:
    """Broken: a plug-in could send away the model, or fetch what it then runs. UDP counts: names are asked by it."""
    with engine.worker("test", LIMITS) as worker:
        came = worker.call("reach", files=[], ports=[server], pids=[])
        network = worker.greet().network
    assert came[f"connect {server}"] in ("ECONNREFUSED", "EAFNOSUPPORT")
    assert came[f"send {server}"] == ("done" if network == "own namespace" else "EAFNOSUPPORT")  # to its own loopback
    assert {came["mount"], came["namespace"], came["trace"]} == {"EPERM"}


@filtered
def test_without_namespaces_the_filter_closes_the_network(engine: LocalEngine, server: int) -> None:
    """Broken: in a container, where users may make no namespaces, workers would have the network."""
    engine._confined.namespaces = False
    with engine.worker("test", LIMITS) as worker:
        came = worker.call("reach", files=[], ports=[server], pids=[])
        assert worker.greet().network == "seccomp filter"
    assert (came[f"connect {server}"], came[f"send {server}"]) == ("EAFNOSUPPORT", "EAFNOSUPPORT")
    assert came["own child"] == came["own folder"] == came["own memory"] == "done"


def test_what_is_in_force_is_known_without_a_call(engine: LocalEngine) -> None:
    """Broken: `doctor` and `plan` could not say what a run's workers are kept from."""
    confinement = engine.confinement()
    assert isinstance(confinement, Confinement)
    assert confinement.complete == (landlock.abi() >= landlock.KEEPS_FILES and seccomp.available())
    if sys.platform == "linux":
        assert confinement.text.startswith("closed: ")


def test_the_environment_is_a_list_of_what_is_let_through() -> None:
    """Broken: tokens, keys and proxies would be in every worker, or thread settings and library paths in none."""
    kept = {
        "PATH": "/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "4", "KMP_AFFINITY": "compact", "CUDA_VISIBLE_DEVICES": "1",
        "LD_LIBRARY_PATH": "/opt/lib", "COMPILE_STAGE_TOOLCHAINS": "/tools", "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
    }  # fmt: skip
    dropped = {
        "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "MLFLOW_TRACKING_TOKEN": "x",
        "MLFLOW_TRACKING_URI": "x", "MLFLOW_TRACKING_PASSWORD": "x", "HTTPS_PROXY": "http://u:p@proxy",
        "GITHUB_TOKEN": "x", "SSH_AUTH_SOCK": "x", "HOME": "/root", "COMPILE_STAGE_SIGNING_PASSPHRASE": "x",
        "TF_API_TOKEN": "x", "DATABASE_URL": "x",
    }  # fmt: skip
    assert environment_of({**kept, **dropped}) == kept
    assert environment_of({"COMPILE_STAGE_WORKER_ENV": "GITHUB_TOKEN", **dropped})["GITHUB_TOKEN"] == "x"


# --------------------------------------------------------------------------------------------------- files on their way


@landlocked
def test_a_call_reads_what_it_names_and_can_not_change_it(engine: LocalEngine, tmp_path: Path) -> None:
    """Broken: a candidate could not read its model, or could write into the cache that others are compiled from."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.onnx").write_text("graph")
    (tmp_path / "model" / "weights.bin").write_text("data")
    (tmp_path / "reference.npy").write_text("answers")
    path = tmp_path / "model" / "model.onnx"
    with engine.worker("test", LIMITS) as worker:
        came = worker.call("read_path", path=str(path))
        assert (came["text"], came["beside"], came["write"]) == ("graph", ["model.onnx", "weights.bin"], "EACCES")
        path.unlink()
        path.write_text("another graph")  # a folder that is used again is seen as it is now
        assert worker.call("read_path", path=str(path))["text"] == "another graph"
        assert worker.call("reach", files=[str(tmp_path / "reference.npy")], ports=[], pids=[])[
            f"read {tmp_path / 'reference.npy'}"
        ] == "EACCES"  # fmt: skip


@landlocked
def test_of_samples_a_worker_gets_the_inputs_alone(engine: LocalEngine, tmp_path: Path) -> None:
    """Broken: a candidate could answer with the labels, or with the original's answers that lie beside its samples."""
    (tmp_path / "inputs").mkdir()
    for name in ("inputs/x.npy", "labels.npy", "groups.npy", "outputs.npy"):
        (tmp_path / name).write_text(name)
    write_index(tmp_path, {"x": "inputs/x.npy"}, labels=True, count=1)
    with engine.worker("test", LIMITS) as worker:
        came = worker.call("read_path", path=str(tmp_path / "samples.json"))
    assert came["beside"] == ["groups.npy", "inputs", "samples.json"]
    assert json.loads(came["text"]) == {"inputs": {"x": "inputs/x.npy"}, "labels": False, "count": 1}


@landlocked
def test_options_of_a_plug_in_hand_nothing_over(engine: LocalEngine, tmp_path: Path) -> None:
    """Broken: a backend that declares a scheme with the option `path` would be handed any file of the stage's."""
    (tmp_path / "secret").write_text("key")
    with engine.worker("test", LIMITS) as worker:
        came = worker.call("echo", scheme={"options": {"path": str(tmp_path / "secret")}})
    assert came == {"scheme": {"options": {"path": str(tmp_path / "secret")}}}


def test_what_a_call_writes_lies_where_the_stage_wants_it(engine: LocalEngine, tmp_path: Path) -> None:
    """Broken: results would be lost with the worker's folder, or named by paths that are gone."""
    into = tmp_path / "new" / "folder"
    with engine.worker("test", LIMITS) as worker:
        assert worker.call("write_files", into=str(into), text="one") == {"path": str(into / "a.txt")}
        worker.call("write_files", into=str(into), text="two")
    assert {path.name: path.read_text() for path in into.rglob("*.txt")} == {"a.txt": "two", "b.txt": "two"}


@landlocked
def test_a_file_that_is_kept_open_changes_nothing_later(engine: LocalEngine, tmp_path: Path) -> None:
    """Broken: a backend could let one artifact be proven, and have another published."""
    with engine.worker("test", LIMITS) as worker:
        worker.call("keep_open", into=str(tmp_path))
        time.sleep(0.4)
        worker.call("echo")
    assert (tmp_path / "late.txt").read_text() == "proven"


@landlocked
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no other disk to be had")
def test_files_cross_from_one_disk_to_another(
    isolated_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Broken: with TMPDIR in memory, or a cache on another disk, no call could read or write a file."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        monkeypatch.setattr(tempfile, "tempdir", memory)
        engine = LocalEngine(calls="deeds")
        try:
            with engine.worker("test", LIMITS) as worker:
                worker.call("write_files", into=str(tmp_path / "disk"), text="a")
                worker.call("write_files", into=f"{memory}/out", text="b")
                assert worker.call("read_path", path=str(tmp_path / "disk" / "a.txt"))["text"] == "a"
                assert worker.call("read_path", path=f"{memory}/out/a.txt")["text"] == "b"
                assert worker.call("reach", files=[], ports=[], pids=[])["own folder"] == "done"
        finally:
            engine.close()
        assert [path.name for path in Path(memory).iterdir()] == ["out"]


@landlocked
@pytest.mark.parametrize("target", ["/etc/passwd", "../../secret"])
def test_a_link_out_of_the_folder_is_refused(engine: LocalEngine, tmp_path: Path, target: str) -> None:
    """Broken: what is published would hold a file that the stage can read and the worker can't."""
    with engine.worker("test", LIMITS) as worker, pytest.raises(WorkerError, match="a link that leads out of its"):
        worker.call("write_link", into=str(tmp_path / "out"), target=target)


@landlocked
def test_an_answer_that_climbs_out_of_its_folder_is_refused(engine: LocalEngine, tmp_path: Path) -> None:
    """Broken: an artifact `../reference/answers.npy` would be handed to the worker that is judged by it."""
    with engine.worker("test", LIMITS) as worker, pytest.raises(WorkerError, match="outside of its folder"):
        worker.call("name_file", into=str(tmp_path / "out"), name="../../x")


# --------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt the orphans below it")
def test_processes_are_counted(engine: LocalEngine) -> None:
    """Broken: a plug-in that forks without end would take the whole machine."""
    limits = WorkerLimits(processes=20, timeout_s=30.0)
    with engine.worker("test", limits) as worker, pytest.raises(WorkerError, match=r"processes at once, 20 are allow"):
        worker.call("start_processes", count=60)


def test_a_file_has_a_largest_size(engine: LocalEngine) -> None:
    """Broken: a worker could fill the disk."""
    limits = WorkerLimits(disk_bytes=3_000_000, timeout_s=30.0)
    with engine.worker("test", limits) as worker, pytest.raises(WorkerError, match="File too large"):
        worker.call("fill", path="large", megabytes=10)


@landlocked
def test_shared_memory_is_the_workers_own_and_bounded(engine: LocalEngine) -> None:
    """Broken: gigabytes in /dev/shm, which no process holds, would take the machine's memory, and stay."""
    if engine.confinement().shared_memory != "own mount":
        pytest.skip("users may make no mount namespace here")
    limits = WorkerLimits(memory_bytes=400_000_000, timeout_s=30.0)
    with engine.worker("test", limits) as worker:
        with pytest.raises(WorkerError, match="its /dev/shm takes at most 100 MB"):
            worker.call("fill", path="/dev/shm/large", megabytes=200)
        assert not Path("/dev/shm/large").exists()


# ------------------------------------------------------------------------------------------- where the kernel has less


OLD_KERNEL = """
import ctypes, json, struct, sys
from pathlib import Path
from compile_stage.engine import seccomp

# As on a kernel without Landlock, in a container that forbids namespaces: these calls are refused.
line = lambda code, constant, yes=0, no=0: struct.pack("<HBBI", code, yes, no, constant)
refused = {444: 38, 445: 38, 446: 38, {"x86_64": 272, "aarch64": 97}[seccomp.platform.machine()]: 1}
code = line(0x20, 0)
for number, error in refused.items():
    code += line(0x15, number, 0, 1) + line(0x06, 0x00050000 | error)
program = seccomp._Program(length=len(code) // 8 + 1, instructions=code + line(0x06, 0x7FFF0000))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0

from compile_stage.core.digest import plain
from compile_stage.core.ports import WorkerLimits
from compile_stage.engine.local import LocalEngine

engine = LocalEngine(calls="deeds")
with engine.worker("test", WorkerLimits()) as worker:
    into, port = Path(sys.argv[1]) / "out", int(sys.argv[2])
    written = worker.call("write_files", into=str(into), text="a")
    came = worker.call("reach", files=[], ports=[port], pids=[])
    read = worker.call("read_path", path=written["path"])["text"]
    print(json.dumps({"confinement": plain(worker.greet()), "read": read, "path": written["path"], **came}))
engine.close()
"""


@filtered
def test_on_an_older_kernel_workers_work_and_what_is_open_is_said(tmp_path: Path, server: int) -> None:
    """Broken: a run in a container, or on an older kernel, would fail in every worker, or claim what is not
    there."""
    done = subprocess.run(
        [sys.executable, "-c", OLD_KERNEL, str(tmp_path), str(server)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    came = json.loads(done.stdout)
    confinement = came["confinement"]
    assert (confinement["files"], confinement["network"], confinement["complete"]) == ("", "seccomp filter", False)
    assert (came["path"], came["read"]) == (str(tmp_path / "out" / "a.txt"), "a")
    assert came[f"connect {server}"] == "EAFNOSUPPORT"
    assert came["own folder"] == came["own child"] == came["own memory"] == "done"
