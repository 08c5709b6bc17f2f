"""What a worker does, and every way in which it can go wrong: each is named, and none harms a neighbour."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import factories
import psutil
import pytest

from compile_stage.core import plugins
from compile_stage.core.control_groups import cores_to_fill
from compile_stage.core.errors import (
    CompileStageError,
    InternalError,
    PolicyError,
    SourceError,
    StorageError,
    UsageError,
    WorkerError,
)
from compile_stage.core.ports import WorkerLimits
from compile_stage.core.records import Gate
from compile_stage.engine import handover, local, watch
from compile_stage.engine.local import LocalEngine
from compile_stage.pipeline.inputs import source_errors

LIMITS = WorkerLimits(timeout_s=60.0)


def fail(engine: LocalEngine, function: str, /, limits: WorkerLimits = LIMITS, **arguments: Any) -> WorkerError:
    """The WorkerError that a call ends with."""
    with engine.worker("test", limits) as worker, pytest.raises(WorkerError) as caught:
        worker.call(function, **arguments)
    return caught.value


# ----------------------------------------------------------------------------------------------------- when all is well


def test_found_by_its_entry_point() -> None:
    assert isinstance(plugins.load("engines", "local"), LocalEngine)


def test_records_go_as_plain_json(engine: LocalEngine) -> None:
    with engine.worker("test", LIMITS) as worker:
        gate = Gate(metric="cosine", limit=0.99, direction="at_least")
        answer = worker.call("echo", gate=gate, folder=Path("/tmp"), nan=float("nan"), text="ü😀\n")
    assert answer["gate"]["limit"] == 0.99
    assert answer["folder"] == "/tmp"
    assert answer["nan"] == "NaN"
    assert answer["text"] == "ü😀\n"


def test_many_calls_one_process(engine: LocalEngine) -> None:
    """Start-up is paid once per job."""
    with engine.worker("test", LIMITS) as worker:
        pids = {worker.call("process")["pid"] for _ in range(5)}
        assert [worker.call("echo", n=n)["n"] for n in range(100)] == list(range(100))
    assert len(pids) == 1


def test_big_arguments_and_results(engine: LocalEngine) -> None:
    """Larger than any pipe's buffer, both ways: neither side may wait for the other for ever."""
    with engine.worker("test", LIMITS) as worker:
        text = "é" * 1_000_000
        assert worker.call("echo", text=text) == {"text": text}
        assert len(worker.call("big", size=10_000_000)) == 10_000_000


def test_threads_of_a_worker_beside_others_do_not_spin(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: threads of OpenMP wait for each other on the core that one of them needs, and a validation takes four
    times as long; or calls that are measured alone are slower; or what the user has set is overruled."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("KMP_BLOCKTIME", "200")
    found = []
    for shares in (False, True):
        with engine.worker("test", WorkerLimits(shares_cores=shares)) as worker:
            environment = worker.call("process")["environment"]
            found.append((environment.get("OMP_WAIT_POLICY"), environment.get("KMP_BLOCKTIME")))
    assert found == [(None, "200"), ("PASSIVE", "200")]


def test_surroundings(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads as needed, a fixed hash seed, private folders that go away, of the environment what is listed, nothing
    heavy loaded."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    monkeypatch.setenv("COMPILE_STAGE_SIGNING_KEY", "secret")
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    monkeypatch.setenv("LICENSE_SERVER", "here")
    monkeypatch.setenv("COMPILE_STAGE_WORKER_ENV", "OTHER, LICENSE_SERVER")
    with engine.worker("test", WorkerLimits(cpus=3)) as worker:
        found = worker.call("process")
        folder = Path(found["cwd"])
        assert folder.is_dir()
    environment = found["environment"]
    assert {environment[f"{name}_NUM_THREADS"] for name in ("OMP", "OPENBLAS", "MKL", "TVM")} == {"3"}
    assert environment["PYTHONHASHSEED"] == "0"
    assert not [name for name, value in environment.items() if value == "secret"]
    assert (environment["KMP_AFFINITY"], environment["LICENSE_SERVER"]) == ("compact", "here")
    assert Path(environment["TMPDIR"]).parent == Path(environment["HOME"]).parent == folder
    assert not folder.exists()
    assert found["executable"] == sys.executable
    heavy = {"numpy", "mlflow", "torch", "onnx", "onnxruntime", "psutil", "pandas", "compile_stage.core.records"}
    assert not heavy & set(found["modules"])


def test_printing_does_not_garble_answers(engine: LocalEngine, tmp_path: Path) -> None:
    """Compilers print to standard output from Python, from C and from children; even what looks like an answer is
    none."""
    logged = LocalEngine(calls="deeds", logs=tmp_path / "logs")
    with logged.worker("digits--cpu/int8", LIMITS) as worker:
        assert worker.call("print_everywhere") == "the answer"
        assert worker.call("echo", n=1) == {"n": 1}
    text = (tmp_path / "logs" / "digits--cpu_int8.log").read_text()
    assert "from Python" in text
    assert "from C" in text
    assert "from a child" in text


def test_who_was_killed_for_want_of_memory_between_two_calls_is_named_so(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: where all models of a measurement are open and the container's memory runs out, the kernel may end one
    that waits for its turn, and the error said that memory was not short."""
    kills = [0]
    monkeypatch.setattr(local, "kernel_oom_kills", lambda: kills[0])
    with engine.worker("waits", LIMITS) as worker:
        assert worker.call("echo", n=1) == {"n": 1}
        for process in psutil.Process(worker.pid).children():
            process.kill()
            process.wait()
        kills[0] += 1
        with pytest.raises(WorkerError) as raised:
            worker.call("echo", n=2)
    assert (raised.value.kind, raised.value.killed, raised.value.starved) == ("out_of_memory", False, True)


def test_there_is_room_for_what_memory_holds(engine: LocalEngine) -> None:
    """Broken: compilations side by side would push each other out of memory, or none would begin."""
    assert engine.max_parallel(10**18) == 1
    assert engine.max_parallel(1) == cores_to_fill()


def test_two_workers_at_once(engine: LocalEngine) -> None:
    """Compilations run side by side, each driven by its own thread: the calls overlap in time."""
    ready = threading.Barrier(2, timeout=30)

    def job(n: int) -> list[float]:
        with engine.worker(f"job-{n}", LIMITS) as worker:
            worker.call("echo")
            ready.wait()
            times: list[float] = worker.call("note_times", seconds=0.3)
            return times

    with ThreadPoolExecutor(2) as pool:
        (began, ended), (other_began, other_ended) = pool.map(job, range(2))
    assert max(began, other_began) < min(ended, other_ended)


# --------------------------------------------------------------------------------------------------- when it goes wrong


def test_segfault(engine: LocalEngine) -> None:
    error = fail(engine, "segfault")
    assert error.kind == "crash"
    assert error.problem == "'segfault' was killed by signal 11 (SIGSEGV)"
    assert "deeds.py" in error.detail  # where it happened


def test_exit_code(engine: LocalEngine) -> None:
    error = fail(engine, "exit", status=3)
    assert (error.kind, error.problem) == ("crash", "'exit' ended the process with exit code 3")


def test_silent_exit_is_a_crash(engine: LocalEngine) -> None:
    """Exit code 0 without an answer is no success."""
    error = fail(engine, "exit", status=0)
    assert (error.kind, error.problem) == ("crash", "'exit' ended the process with exit code 0")


def test_killed_by_somebody_else(engine: LocalEngine) -> None:
    error = fail(engine, "kill")
    assert (error.kind, error.problem) == ("crash", "'kill' was killed by signal 9 (SIGKILL)")


def test_native_stack_overflow(engine: LocalEngine) -> None:
    assert fail(engine, "recurse_native").kind == "crash"


@pytest.mark.parametrize("loop", ["spin", "spin_native"])
def test_endless_loop(engine: LocalEngine, loop: str) -> None:
    """In Python, and in native code that never lets go of the interpreter's lock."""
    began = time.monotonic()
    error = fail(engine, loop, WorkerLimits(timeout_s=0.4))
    assert (error.kind, error.problem) == ("timeout", f"{loop!r} took longer than 0.4 s")
    assert time.monotonic() - began < 60  # by its limit, not by the end of the loop, which never comes


def test_all_calls_of_a_worker_end_with_its_time(engine: LocalEngine) -> None:
    """Broken: a search of so many minutes would go on in each call for as long again."""
    began = time.monotonic()
    with engine.worker("test", WorkerLimits(timeout_s=60.0, total_s=4.0)) as worker:
        worker.call("echo")
        with pytest.raises(WorkerError) as caught:
            worker.call("spin")
    assert caught.value.kind == "timeout"
    assert time.monotonic() - began < 60


def test_gradual_allocation(engine: LocalEngine) -> None:
    """50 GB in small pieces: ended at its limit, long before the machine suffers."""
    error = fail(engine, "allocate", WorkerLimits(memory_bytes=200_000_000), chunk_mb=10, chunks=5000)
    assert error.kind == "out_of_memory"
    assert error.problem.endswith("MB of memory, 200 MB are allowed")


def test_gradual_allocation_in_a_child(engine: LocalEngine) -> None:
    """A compiler's own process counts too."""
    error = fail(engine, "allocate_in_child", WorkerLimits(memory_bytes=200_000_000), chunk_mb=5, chunks=10000)
    assert error.kind == "out_of_memory"


def test_allocation_at_once(engine: LocalEngine) -> None:
    """More than the machine has, in one piece: the allocator refuses, and the worker lives on."""
    with engine.worker("test", LIMITS) as worker:
        with pytest.raises(WorkerError) as caught:
            worker.call("allocate", chunk_mb=10**9, chunks=1)
        assert caught.value.kind == "out_of_memory"
        assert worker.call("echo", n=1) == {"n": 1}


def test_mapped_file_is_not_held_memory(engine: LocalEngine, tmp_path: Path) -> None:
    """Samples are mapped from disk; their pages are the kernel's to drop, and must not count against the limit."""
    path = tmp_path / "samples.bin"
    with path.open("wb") as out:
        for _ in range(300):
            out.write(b"\x01" * 1_000_000)
    with engine.worker("test", WorkerLimits(memory_bytes=200_000_000)) as worker:
        assert worker.call("map_file", path=str(path)) > 0


@pytest.mark.parametrize(
    ("function", "arguments"),
    [("fail_with", {"kind": "bad_alloc"}), ("fail_with", {"kind": "from_memory"}), ("abort_bad_alloc", {})],
)
def test_native_code_without_memory(engine: LocalEngine, function: str, arguments: dict[str, str]) -> None:
    """std::bad_alloc as an exception, as the cause of one, and uncaught."""
    assert fail(engine, function, **arguments).kind == "out_of_memory"


@pytest.mark.parametrize("text", ["garbage\n", "garbage", '{"id": 99, "result": 1}\n', '{"id": 1}\n', "\x00\n\n"])
def test_garbage_on_the_protocol(engine: LocalEngine, text: str) -> None:
    """A plug-in that finds the answer pipe and writes into it: whatever it says is not taken for an answer."""
    with engine.worker("test", LIMITS) as worker:
        assert worker.call("echo", n=1) == {"n": 1}
        with pytest.raises(WorkerError, match="the worker answered with something that is not a message") as caught:
            worker.call("garbage_on_protocol", text=text)
    assert caught.value.kind == "crash"


def test_pipe_closed(engine: LocalEngine) -> None:
    """A plug-in that closes descriptors that are not its own must not be waited for until the time limit."""
    error = fail(engine, "close_everything")
    assert (error.kind, "closed the worker's answer pipe" in error.problem) == ("crash", True)


@pytest.mark.parametrize(
    ("function", "why"), [("unfit", "set can't travel"), ("raw", "bytes can't travel"), ("cyclic", "in a circle")]
)
def test_result_that_is_not_json(engine: LocalEngine, function: str, why: str) -> None:
    error = fail(engine, function)
    assert error.kind == "exception"
    assert error.problem.startswith(f"{function!r} answered with something that is not JSON")
    assert why in error.problem


def test_result_that_is_too_big(engine: LocalEngine) -> None:
    """Arrays belong in files; a careless plug-in must not fill the stage's memory."""
    error = fail(engine, "big", size=64_000_001)
    assert (error.kind, "at most 64 MB can travel" in error.problem) == ("exception", True)
    assert "file" in error.fix


def test_exception(engine: LocalEngine) -> None:
    """Any language, any length: one sentence, the traceback as detail, and the worker lives on."""
    with engine.worker("test", LIMITS) as worker:
        with pytest.raises(WorkerError) as caught:
            worker.call("fail", text="größer als erwartet: 数\n" + "x" * 50_000)
        error = caught.value
        assert error.kind == "exception"
        assert error.problem.startswith("ValueError: größer als erwartet: 数 xxx")
        assert len(error.problem) <= 400
        assert "deeds.py" in error.detail
        assert worker.call("echo", n=1) == {"n": 1}


@pytest.mark.parametrize(("kind", "problem"), [("mute", "MuteError"), ("3", "SystemExit: 3")])
def test_strange_exceptions(engine: LocalEngine, kind: str, problem: str) -> None:
    """One that can't print itself, and a compiler's main() that calls sys.exit."""
    error = fail(engine, "fail_with", kind=kind)
    assert (error.kind, error.problem) == ("exception", problem)


def test_deep_recursion(engine: LocalEngine) -> None:
    error = fail(engine, "recurse")
    assert error.kind == "exception"
    assert error.problem.startswith("RecursionError")


def test_errors_for_people_keep_their_class(engine: LocalEngine) -> None:
    """A refused source is not a worker's failure: it has its own exit code, fix and place."""
    with engine.worker("test", LIMITS) as worker:
        with pytest.raises(SourceError) as source:
            worker.call("fail_with", kind="source")
        with pytest.raises(PolicyError) as policy:
            worker.call("fail_with", kind="policy")
    assert type(source.value) is SourceError
    assert (source.value.problem, source.value.fix, source.value.where) == (
        "the model is frozen",
        "thaw it",
        "models:/m/1",
    )
    assert policy.value.problems == ("a.yaml:1:1: one", "a.yaml:2:1: two")


def test_unknown_function(engine: LocalEngine) -> None:
    with (
        engine.worker("test", LIMITS) as worker,
        pytest.raises(InternalError, match=r"no function 'ecco'; it has: .*echo"),
    ):
        worker.call("ecco")


def test_argument_that_is_not_json(engine: LocalEngine) -> None:
    """The caller's mistake is told to the caller, and the worker never hears of it."""
    with engine.worker("test", LIMITS) as worker:
        with pytest.raises(TypeError, match="set can't travel"):
            worker.call("echo", names={"a"})
        assert worker.call("echo", n=1) == {"n": 1}


def test_log_of_the_call_is_the_detail(engine: LocalEngine) -> None:
    """The compiler's last words explain its exception; those of earlier calls do not."""
    with engine.worker("test", LIMITS) as worker:
        worker.call("print_everywhere")
        with pytest.raises(WorkerError) as caught:
            worker.call("exit", status=1)
    assert "from C" not in caught.value.detail


def test_a_disk_that_is_full_where_a_calls_files_go_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: "the disk is full" without a word of which one, where the cache's disk is the smaller one."""
    written, wanted = tmp_path / "written", tmp_path / "wanted"
    written.mkdir()
    (written / "x.npy").write_bytes(b"1")

    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(handover.shutil, "copyfileobj", fill)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        handover._bring(written, wanted)
    assert caught.value.filename == str(wanted / "x.npy")


def test_which_disk_is_full_is_said_where_the_kernel_names_no_file(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: "the disk is full", and the cache, TMPDIR and the results may be on three."""
    real = shutil.disk_usage
    monkeypatch.setattr(watch.shutil, "disk_usage", lambda folder: real(folder)._replace(free=4096))
    with engine.worker("test", LIMITS) as worker, pytest.raises(StorageError, match="the disk is full") as caught:
        worker.call("fail_with", kind="full")
    assert "compile-stage-worker" in caught.value.where


@pytest.mark.parametrize(
    ("function", "arguments"),
    [("fail", {"text": "Protobuf serialization failed."}), ("recurse_native", {})],
    ids=["raised", "crashed"],
)
def test_a_call_that_fails_while_a_disk_is_full_is_the_disks_fault(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, function: str, arguments: dict[str, Any]
) -> None:
    """Broken: with TMPDIR full, what a compiler or a runtime makes of it would be a candidate's failure, and the run's
    verdict that nothing could be compiled, or that another candidate won."""
    real = shutil.disk_usage
    full = threading.Event()
    monkeypatch.setattr(
        watch.shutil, "disk_usage", lambda folder: real(folder)._replace(free=4096 if full.is_set() else 10**10)
    )
    with engine.worker("test", LIMITS) as worker:
        full.set()
        assert worker.call("echo", text="a") == {"text": "a"}
        full.clear()  # what was full before the call has no say
        with pytest.raises(WorkerError):
            worker.call(function, **arguments)
    full.set()
    with engine.worker("test", LIMITS) as worker, pytest.raises(StorageError, match="the disk is full"):
        worker.call(function, **arguments)
    limits = WorkerLimits(timeout_s=1.0)
    assert fail(engine, "spin", limits).kind == "timeout"


def test_endless_printing_does_not_fill_the_disk(engine: LocalEngine, tmp_path: Path) -> None:
    logged = LocalEngine(calls="deeds", logs=tmp_path)
    assert fail(logged, "print_for_ever", WorkerLimits(timeout_s=0.5)).kind == "timeout"
    assert (tmp_path / "test.log").stat().st_size < 1_000_000_000


def test_call_after_death(engine: LocalEngine) -> None:
    with engine.worker("test", LIMITS) as worker:
        with pytest.raises(WorkerError):
            worker.call("exit", status=3)
        with pytest.raises(
            WorkerError, match="worker 'test' takes no more calls: 'exit' ended the process with exit code 3"
        ):
            worker.call("echo")


def test_neighbours_are_unharmed(engine: LocalEngine) -> None:
    """One job crashes, one hangs, one eats memory, one talks nonsense; the fifth never notices."""
    bad = [
        ("segfault", LIMITS, {}, "crash"),
        ("spin", WorkerLimits(timeout_s=0.5), {}, "timeout"),
        ("allocate", WorkerLimits(memory_bytes=150_000_000), {"chunk_mb": 10, "chunks": 5000}, "out_of_memory"),
        ("unfit", LIMITS, {}, "exception"),
    ]
    with engine.worker("good", LIMITS) as good, ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(fail, engine, function, limits, **arguments) for function, limits, arguments, _ in bad]
        answers = 0
        while not all(end.done() for end in ends):
            answers += good.call("echo", n=1) == {"n": 1}
            time.sleep(0.01)
        assert [end.result().kind for end in ends] == [kind for *_, kind in bad]
        assert answers > 0


# ------------------------------------------------------------------------------------------------------ start and close


@pytest.mark.parametrize("wrong", ["missing", "not executable"])
def test_an_interpreter_that_can_not_be_run_is_no_fault_of_the_model(
    engine: LocalEngine, tmp_path: Path, wrong: str
) -> None:
    """Broken: where a toolchain belongs to another user, the original is refused with "load and run it in its own
    framework first"."""
    python = tmp_path / "python"
    if wrong == "not executable":
        python.write_text("#!/bin/sh\n")
    with (
        pytest.raises(UsageError, match=f"{python}.* can't be run: ") as caught,
        source_errors(factories.source()),
        engine.worker("test", WorkerLimits(interpreter=str(python))),
    ):
        pass
    assert "toolchain remove" in caught.value.fix


def test_an_original_that_crashes_is_named_with_the_place_where_it_did(engine: LocalEngine) -> None:
    """Broken: the refusal's reason is the line of all extension modules, 2,800 characters with pandas loaded."""
    with (
        engine.worker("test", LIMITS) as worker,
        pytest.raises(SourceError) as caught,
        source_errors(factories.source()),
    ):
        worker.call("segfault")
    assert re.search(
        r"signal 11 \(SIGSEGV\): Fatal Python error: Segmentation fault, in File \".*\", line \d+ in \w+$",
        caught.value.problem,
    )


def test_no_further_process_is_the_machines_limit(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: under `ulimit -n 12` a command ends as a bug of ours, or blames the model."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("compile_stage.engine.local.subprocess.Popen", refuse)
    with (
        pytest.raises(UsageError, match="starts no further process: Too many open files") as caught,
        engine.worker("test", LIMITS) as worker,
    ):
        worker.call("echo")
    assert "ulimit -n" in str(caught.value.fix)


def test_interpreter_without_our_package(engine: LocalEngine, tmp_path: Path) -> None:
    """A toolchain that was built wrongly: the reason is in the detail."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    error = fail(engine, "echo", WorkerLimits(interpreter=str(python)))
    assert (error.kind, error.problem) == ("crash", "starting the worker ended the process with exit code 1")
    assert "compile_stage" in error.detail


def test_close_twice_and_then_ask(engine: LocalEngine) -> None:
    with engine.worker("test", LIMITS) as worker:
        worker.call("echo")
        engine.close()
        engine.close()
        with pytest.raises(CompileStageError):
            worker.call("echo")
    with pytest.raises(InternalError, match="closed"), engine.worker("late", LIMITS):
        pass


def test_close_ends_calls_under_way(engine: LocalEngine) -> None:
    """Ctrl-C reaches the main thread while others wait in calls: these must come back at once."""
    started = threading.Event()

    def job() -> WorkerError:
        with engine.worker("test", LIMITS) as worker:
            worker.call("echo")
            started.set()
            with pytest.raises(WorkerError) as caught:
                worker.call("spin")
        return caught.value

    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(job)
        started.wait(30)
        time.sleep(0.05)
        began = time.monotonic()
        engine.close()
        error = end.result(60)
    assert error.problem == "'spin' was stopped, since the stage ended the worker"
    assert time.monotonic() - began < 60
