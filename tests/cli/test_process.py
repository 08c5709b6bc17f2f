"""The program as a process: what it imports, and how it ends when its reader or its user goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from factories import POLICY_TEXT

HEAVY = {"mlflow", "onnx", "onnxruntime", "numpy", "torch", "sklearn", "pandas", "openvino", "jinja2", "scipy"}

# Runs the command line and then tells, on standard error, which heavy modules came in.
PROBE = """
import json, sys
from compile_stage.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""

# `nohup pytest` has it ignored, and what it starts too.
HEEDS_SIGHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"

# A run that says where it is and then waits, so that the test can end it.
SLOW = """
import sys, time
import compile_stage.api as api
from compile_stage.cli.main import main

def run(*arguments, reporter, **named):
    reporter.began("compile", "job")
    reporter.ended("compile", "job", 0.1, "done")
    sys.stdout.flush()
    time.sleep(600)

api.run = run
main(sys.argv[1:])
"""

# A run that goes on printing after its reader left, then ends with the code of a missed gate.
TALKATIVE = """
import sys
import compile_stage.api as api
import compile_stage.cli.render
from compile_stage.cli.main import main

class Gate:
    exit_code = 3
    source = policy = None

def run(*arguments, reporter, **named):
    for number in range(3000):
        reporter.ended("compile", f"job-{number}", 0.1, "done")
    return Gate()

api.run = run
compile_stage.cli.render.Display.show_result = lambda *arguments: None
api.default_out = lambda *arguments: None
main(sys.argv[1:])
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY_TEXT)
    return path


@pytest.mark.parametrize(
    "line", [["--help"], ["run", "--help"], ["lint", "POLICY"], ["explain", "POLICY"], ["schema"], ["version"]]
)
def test_quick_commands_import_nothing_heavy(line: list[str], policy: Path) -> None:
    """These must answer at once, in an editor and in every CI job."""
    arguments = [str(policy) if word == "POLICY" else word for word in line]
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(json.loads(done.stderr.splitlines()[-1]))


def test_python_m_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "compile_stage", "rnu"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "did you mean 'run'?" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_with_130(number: signal.Signals, policy: Path) -> None:
    """A scheduler's SIGTERM, and SIGHUP of a terminal that is closed, are no different from Ctrl-C: a sentence, no
    traceback. Broken for SIGHUP: the run would be gone without a word, and its temporary folders would stay."""
    command = [sys.executable, "-c", HEEDS_SIGHUP + SLOW, "run", "models:/m/1", "-p", str(policy)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "compile" in process.stdout.readline()
        process.send_signal(number)
        try:
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()  # one that ignores the signal must not hold the suite until its ten minutes are over
    assert process.returncode == 130
    assert "interrupted: kept what is finished; run again to resume" in errors
    assert "Traceback" not in errors


def test_a_run_under_nohup_outlives_its_terminal(policy: Path) -> None:
    """Broken: `nohup compile-stage run ...` would end when somebody logs out."""
    ignores = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    program = f"{ignores}from compile_stage.cli.main import main\ntry: main(['rnu'])\nexcept SystemExit: pass\n"
    program += "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


def test_pytest_in_the_background_interrupts_runs() -> None:
    """Broken: in `pytest &` of a script, SIGINT is ignored, and no test that interrupts a process could pass."""
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_a_run_whose_reader_left_goes_on_and_keeps_its_exit_code(policy: Path) -> None:
    """`compile-stage run ... | head` must not publish half, nor look like a success."""
    command = [sys.executable, "-c", TALKATIVE, "run", "models:/m/1", "-p", str(policy)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
        process.wait(timeout=120)
    assert process.returncode == 3, said
    assert said == ""


@pytest.mark.parametrize("line", [["--help"], ["schema", "result"], ["schema"]])
def test_output_that_nobody_reads_is_no_mistake(line: list[str]) -> None:
    command = [sys.executable, "-m", "compile_stage", *line]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        process.wait(timeout=120)
    assert (process.returncode, said) == (0, "")


def test_a_wrong_policy_whose_mistakes_nobody_reads_is_still_wrong(policy: Path) -> None:
    """Broken: `compile-stage lint ... 2>&1 | head -1` with `pipefail` would let a wrong policy through."""
    policy.write_text(POLICY_TEXT.replace("precisions", "precision"))
    command = [sys.executable, "-m", "compile_stage", "lint", str(policy), str(policy)]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=pipe, check=False)
    assert done.returncode == 2


def test_a_command_whose_terminal_was_closed_keeps_its_exit_code(policy: Path) -> None:
    """Broken: a run in the background of a session that ended (`disown`) would publish, and end with 120."""
    for text, code in ((POLICY_TEXT, 0), (POLICY_TEXT.replace("precisions", "precision"), 2)):
        policy.write_text(text)
        terminal, process_side = os.openpty()
        os.close(terminal)
        with os.fdopen(process_side, "wb") as closed:
            command = [sys.executable, "-m", "compile_stage", "lint", str(policy)]
            done = subprocess.run(command, stdout=closed, stderr=closed, check=False)
        assert done.returncode == code


@pytest.mark.parametrize("command", ["lint", "explain"])
def test_a_terminal_that_lacks_a_letter_does_not_end_a_command(command: str, policy: Path) -> None:
    """A model's or a file's name must not end a run with an encoding error."""
    named = policy.rename(policy.with_name("größe-模型.yaml"))
    done = subprocess.run(
        [sys.executable, "-m", "compile_stage", command, str(named)],
        capture_output=True,
        check=False,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_stream_is_no_bug_of_ours(closed: str, policy: Path) -> None:
    """Broken: a scheduler that gives a job no standard output would be told of a bug, and a file could take its
    number."""
    line = f"exec {sys.executable} -m compile_stage lint {policy} {closed}"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("streams", "said"),
    [(">/dev/full", "standard output: the disk is full [CS0220]\nfix: free space there, or"), (">/dev/full 2>&1", "")],
)
def test_a_log_on_a_full_disk_is_named_and_ends_with_a_code_of_ours(streams: str, said: str, policy: Path) -> None:
    """Broken: a job whose log's disk is full would end with 120, which stands in no table, and whoever reads the error
    would look for room in the cache, or name another `--out`."""
    line = f"exec {sys.executable} -m compile_stage lint {policy} --format json {streams}"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (2, True, False)


def test_warnings_of_libraries_end_no_command() -> None:
    """Broken: where a CI system sets PYTHONWARNINGS=error for all its commands, a run ended as a bug of ours after it
    had compiled, since MLflow warns while it is imported; workers refused models for the same."""
    code = (
        "import os, warnings; from compile_stage.cli import start; start._let_libraries_warn(); "
        "warnings.warn('of a library'); print(os.environ['PYTHONWARNINGS'])"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error,ignore::ImportWarning,e::UserWarning"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "ignore::ImportWarning"), done.stderr
