"""The live table on a real terminal: no thread waits for another for ever, and what is printed meanwhile stays
whole."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import rich.console

from compile_stage.cli.live import ProgressBoard, Work, left_text
from compile_stage.cli.render import Display
from compile_stage.core.records import Plan, RunResult

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a pseudo-terminal is a Unix thing")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def plan_of(result: RunResult) -> Plan:
    jobs = tuple(c.job for target in result.targets for c in target.candidates)
    return Plan(source=result.source, policy=result.policy, jobs=jobs, refused=result.refused, notes=("a note",))


def test_events_never_wait_for_the_terminal(result: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: one of ten runs at a terminal hung for ever. The thread that printed the plan held our lock and waited
    for Rich's; the thread that redrew the table held Rich's and waited for ours. So: while anything is printed, another
    thread can report an event and draw the table."""
    monkeypatch.setenv("TERM", "xterm-256color")
    display = Display(Terminal(), width=80)
    real, waited = rich.console.Console.print, list[bool]()

    def redrawn() -> None:
        display.progressed("resolve", "", "half of it")
        display._table()

    def print_beside_another_thread(self: rich.console.Console, *objects: object, **named: object) -> None:
        if not waited:
            other = threading.Thread(target=redrawn, daemon=True)
            other.start()
            other.join(60)
            waited.append(other.is_alive())
        real(self, *objects, **named)  # type: ignore[arg-type]

    display.began("resolve", "")
    monkeypatch.setattr(rich.console.Console, "print", print_beside_another_thread)
    display.planned(plan_of(result))
    display.close()
    assert waited == [False]


def test_the_table_is_redrawn_with_one_order_of_locks(result: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: Rich's own refresh thread takes Rich's lock first and the console's second, a thread that prints the
    other way around."""
    monkeypatch.setenv("TERM", "xterm-256color")
    display = Display(Terminal(), width=80)
    display.began("resolve", "")
    live = display._live._live
    assert live is not None
    assert not live.auto_refresh
    with display.console.drawing:  # what a thread that prints holds while it asks for Rich's lock
        time.sleep(0.3)  # time for several redraws
        free = threading.Thread(target=lambda: live._lock.acquire() and live._lock.release(), daemon=True)
        free.start()
        free.join(60)
        assert not free.is_alive()
    display.close()


def board_of(*jobs: str, foreseeable: bool = True) -> ProgressBoard:
    board = ProgressBoard()
    board.planned(Work(dict.fromkeys(jobs, "cpu"), measure_s=60.0, foreseeable=foreseeable))
    return board


def validated(board: ProgressBoard, job: str, seconds: float, outcome: str = "done") -> None:
    board.began("validate", job)
    board.ended("validate", job, seconds, outcome)


def test_the_rest_is_estimated_from_the_jobs_that_ended_and_the_budget() -> None:
    """Broken: nothing said how long a run goes on, or a guess from a single job, or from what the cache held, did."""
    board = board_of("a", "b", "c", "d")
    assert board.left_s() is None
    validated(board, "a", 0.01, "cached")
    validated(board, "b", 30.0)
    assert board.left_s() is None  # of two that ended, one was only read
    validated(board, "c", 50.0)
    assert board.counted() == (3, 4)
    assert board.left_s() == pytest.approx(40.0 + 60.0)  # the fourth job, and the measurement of the target
    assert left_text(board.left_s()) == "about 2 min left"
    validated(board, "d", 10.0, "the worker died")
    assert board.counted() == (4, 4)
    assert board.left_s() == pytest.approx(60.0)
    board.began("benchmark", "cpu")
    assert 0 < (board.left_s() or 0) <= 60.0
    board.ended("benchmark", "cpu", 55.0, "done")
    assert board.left_s() is None
    assert left_text(None) == ""
    assert left_text(20.0) == "less than a minute left"


def test_no_estimate_where_it_would_be_a_guess() -> None:
    """Broken: "less than a minute left" while a search of unknown length runs, a job takes many times as long as the
    others, or a measurement is over its budget."""

    def ready(*more: str, **named: bool) -> ProgressBoard:
        board = board_of("a", "b", *more, **named)
        validated(board, "a", 30.0)
        validated(board, "b", 30.0)
        return board

    compiled = ProgressBoard()
    compiled.planned(Work({"a": "cpu", "b": "arm"}, compiled_only=frozenset("b")))
    for job in ("a", "b"):
        compiled.ended("compile", job, 1.0, "done")
    assert compiled.counted() == (1, 2)  # b is not validated here
    assert ready().left_s() == pytest.approx(60.0)
    assert ready(foreseeable=False).left_s() is None
    searching = ready()
    searching.began("search", "a")
    assert searching.left_s() is None
    overdue = ready("c")
    overdue.ended("compile", "c", 200.0, "done")
    assert overdue.left_s() is None
    late = ready()
    late.ended("benchmark", "cpu", 70.0, "done")
    late.began("benchmark", "cpu")  # once more, of what was left out at first
    assert late.left_s() is None


COLOURS = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from report import factory
from compile_stage.cli.render import Display
Display(sys.stdout).show_result(factory.make_result(), Path("out"))
"""


@pytest.mark.parametrize(
    ("terminal", "variables", "coloured"),
    [(True, {}, True), (True, {"NO_COLOR": "1"}, False), (False, {}, False), (False, {"FORCE_COLOR": "1"}, True)],
)
def test_colours_follow_no_color_and_force_color(terminal: bool, variables: dict[str, str], coloured: bool) -> None:
    """Broken: escape sequences in a log that asked for none, or no colours in a CI system that asked for them."""
    command = [sys.executable, "-c", COLOURS, str(Path(__file__).parents[1])]
    if terminal:
        shown = run_in_terminal(command, 100, variables=variables)
    else:
        known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        environment = {**known, "TERM": "xterm-256color", **variables}
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "passed: " in shown
    assert (re.search(r"\x1b\[[0-9;]*32m", shown) is not None) == coloured  # green: it passed


CHILD = """
import logging, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from report import factory
from compile_stage.cli.options import display as make_display
from compile_stage.core.records import Plan

result = factory.make_result()
jobs = tuple(c.job for target in result.targets for c in target.candidates)
plan = Plan(source=result.source, policy=result.policy, jobs=jobs, refused=result.refused, notes=())

def one_run(display, number):
    display.began("resolve", "")
    time.sleep(0.13)  # the table is redrawn 8 times a second
    display.ended("resolve", "", 0.1, "done")
    for _ in range(12):
        display.planned(plan)
    def work(thread):
        for line in range(15):
            display.began("compile", f"extra-{number}-{thread}-{line}")  # the table grows while lines are printed
            display.console.print(f"run {number} thread {thread} line {line} end")
            time.sleep(0.005)
        logging.getLogger("someone").warning("of run %s thread %s", number, thread)
    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    display.close()

for number in range(3):
    with make_display(False, 0, 0) as display:
        one_run(display, number)
        if number == 2:
            display.show_result(result, Path("out"))
"""


@pytest.mark.parametrize("columns", [80, 160])
def test_a_real_terminal(columns: int) -> None:
    """Broken: runs at a terminal hung; and lines of several threads were drawn over each other and over the table."""
    shown = Screen()
    shown.feed(run_in_terminal([sys.executable, "-c", CHILD, str(Path(__file__).parents[1])], columns))
    text = "\n".join(shown.rows)
    for number in range(3):
        for thread in range(4):
            lines = re.findall(rf"^run {number} thread {thread} line (\d+) end$", text, re.MULTILINE)
            assert lines == [str(line) for line in range(15)], text
            assert f"\nWARNING someone: of run {number} thread {thread}\n" in text
    assert text.count("target cpu-server") == 36
    assert "running" not in text  # the table is gone
    assert shown.rows[-1].startswith("report: ") or not shown.rows[-1]


def run_in_terminal(
    command: list[str], columns: int, limit_s: float = 240, variables: Mapping[str, str] | None = None
) -> str:
    """What a program writes to a terminal of so many columns; one that doesn't end is killed, and that is a failure."""
    # Not `pty.fork`: this process has threads of other tests' libraries, and a fork of it may crash before its `exec`.
    descriptor, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    environment = {**known, "TERM": "xterm-256color", **(variables or {})}
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    os.close(slave)
    written, deadline = bytearray(), time.monotonic() + limit_s
    try:
        while True:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"it hangs; so far: {written.decode(errors='replace')[-2000:]}"
            try:
                data = os.read(descriptor, 65536)
            except OSError:  # Linux's way to say that the other end is closed
                data = b""
            if not data:
                break
            written += data
    except BaseException:
        process.kill()
        raise
    finally:
        status = process.wait()
        os.close(descriptor)
    assert status == 0, written.decode(errors="replace")
    return written.decode()


class Screen:
    """As much of a terminal as Rich asks for: lines, carriage return, cursor up, erase line; styles are dropped."""

    def __init__(self) -> None:
        self.rows = [""]
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        for control, parameter, letter, character in re.findall(r"(\x1b\[([?0-9;]*)([A-Za-z]))|(.|\n)", text):
            if not control:
                self._write(character)
            elif letter == "A":
                self.row = max(0, self.row - int(parameter or 1))
            elif letter == "K":
                assert parameter == "2"
                self.rows[self.row] = ""
            else:
                assert letter in "mhl", control

    def _write(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row += 1
            if self.row == len(self.rows):
                self.rows.append("")
        else:
            line = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1
