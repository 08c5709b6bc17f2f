"""The program as a process of its own, which ends without taking the interpreter apart."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, sys, tempfile, threading, time
from compile_stage.cli.main import program

threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
atexit.register(print, "at exit")
folder = tempfile.TemporaryDirectory()
print("folder", folder.name)
sys.argv[1:] = {arguments!r}
program()
"""


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["lint", "no-such.yaml"], 2), (["no-such"], 2)])
def test_what_is_left_to_do_is_done_before_it_ends(arguments: list[str], code: int) -> None:
    """Broken: a thread of MLflow would be cut off while it logs, temporary folders would stay, or the last lines of the
    output would be lost in a pipe."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(arguments=arguments)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == code, ended.stderr
    assert (ended.stdout if code == 0 else ended.stderr).strip()
    assert "thread\n" in ended.stdout
    assert "at exit\n" in ended.stdout
    folder = next(line for line in ended.stdout.splitlines() if line.startswith("folder "))
    assert not Path(folder.removeprefix("folder ")).exists()


def test_a_reader_that_has_gone_changes_no_exit_code() -> None:
    """Broken: `compile-stage --help | head -1` would end with a code that means something else."""
    command = f"{sys.executable} -m compile_stage --help | head -1; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ended.returncode in (0, 141)
    assert len(ended.stdout.splitlines()) == 1
    assert "Traceback" not in ended.stderr


def test_a_command_that_takes_long_looks_for_cycles() -> None:
    """Broken: a service or a fleet's run keeps every reference cycle that it ever made."""
    program = (
        "import gc, sys, time; from compile_stage.cli import main as cli; cli._GC_BEGINS_S = 0.2\n"
        "def main():\n"
        "    began, before = time.monotonic(), gc.isenabled()\n"
        "    while not gc.isenabled() and time.monotonic() - began < 10:\n"
        "        time.sleep(0.05)\n"
        "    sys.exit(0 if gc.isenabled() and not before else 1)\n"
        "cli.main = main; cli.program()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_while_it_is_imported_is_one_like_any_other(number: signal.Signals) -> None:
    """If it failed, a scheduler that stops a run in its first moment would see a code that none of ours is, and people
    a traceback."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # which `nohup pytest` has ignored
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'click': os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from compile_stage.cli.start import start\n"
        "sys.argv[1:] = ['--version']\n"
        "start()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "\ninterrupted before anything was begun\n"
