"""Jobs as processes of this machine, some at once. Timing is exclusive by the machine's lock, so more of them compile
side by side and measure one after the other.

Each runs below `core.attempt`: when the fleet's own process is killed, it goes on, and the fleet that is started next
takes up its outcome.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from compile_stage.core.attempt import EXIT_FILE, LOG_FILE
from compile_stage.core.redaction import redacted
from compile_stage.fleet.driving import Ended, Executor, Looked, Work
from compile_stage.fleet.journal import JobRow
from compile_stage.fleet.scheduler import Lease

NODE = "local"
_KILL_S = 60.0  # what was interrupted and has not ended by then is killed
_TAIL = 4000  # bytes of a log


class LocalExecutor(Executor):
    """Processes of this machine.

    Args:
        places: So many jobs at once.
        folder: Gives the folder of an attempt.
    """

    def __init__(self, places: int, folder: Callable[[Lease], Path], work: Work) -> None:
        self._places, self._folder, self._work = places, folder, work
        self._events: queue.SimpleQueue[Looked | Ended] = queue.SimpleQueue()
        self._taken: set[Lease] = set()
        self._processes: dict[Lease, subprocess.Popen[bytes]] = {}

    def now(self) -> float:
        return time.time()

    def free(self) -> Iterable[str]:
        return [NODE] * max(0, self._places - len(self._taken))

    def look(self, lease: Lease, row: JobRow) -> None:
        self._taken.add(lease)
        threading.Thread(target=self._look, args=(lease, row), daemon=True).start()

    def _look(self, lease: Lease, row: JobRow) -> None:
        self._events.put(Looked(lease, self._work.content(row)))

    def start(self, lease: Lease, row: JobRow) -> None:
        self._taken.add(lease)
        folder = self._folder(lease)
        folder.mkdir(parents=True, exist_ok=True)
        command = self._work.command(row, folder / "result")
        wrapper = [sys.executable, "-m", "compile_stage.core.attempt", str(folder), *command]
        # A session of its own: Ctrl-C at the terminal is the fleet's, which then interrupts its jobs.
        process = subprocess.Popen(wrapper, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603
        self._processes[lease] = process
        threading.Thread(target=self._watch, args=(lease, process, folder), daemon=True).start()

    def _watch(self, lease: Lease, process: subprocess.Popen[bytes], folder: Path) -> None:
        began = time.monotonic()
        process.wait()
        self._events.put(ended_in(folder, lease, began))

    def drop(self, lease: Lease) -> None:
        self._taken.discard(lease)

    def wait(self, seconds: float) -> list[Looked | Ended]:
        try:
            found = [self._events.get(timeout=seconds)]
        except queue.Empty:
            return []
        while not self._events.empty():
            found.append(self._events.get())
        for event in found:
            if isinstance(event, Ended):
                self._taken.discard(event.lease)
                self._processes.pop(event.lease, None)
        return found

    def alive(self) -> Iterable[Lease]:
        return list(self._taken)

    def interrupt(self) -> None:
        for process in list(self._processes.values()):
            process.send_signal(signal.SIGINT)
        killer = threading.Timer(_KILL_S, self._kill)
        killer.daemon = True
        killer.start()

    def _kill(self) -> None:
        for process in list(self._processes.values()):
            process.kill()


def ended_in(folder: Path, lease: Lease, began: float, node: str = "") -> Ended:
    """How an attempt ended, by the file that it left; `began` is of `time.monotonic`."""
    try:
        left = json.loads((folder / EXIT_FILE).read_text(encoding="utf-8"))
        code, seconds = int(left["exit_code"]), float(left["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return Ended(lease, None, time.monotonic() - began, "its process was killed", node)
    if code < 0:
        return Ended(lease, None, seconds, f"its process was ended by signal {-code}", node)
    return Ended(lease, code, seconds, problem_of(folder), node)


def problem_of(folder: Path) -> str:
    """The error that an attempt's log ends with."""
    try:
        with (folder / LOG_FILE).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in redacted(text).splitlines() if line.strip()]
    error = next((at for at in reversed(range(len(lines))) if lines[at].startswith("error:")), None)
    return " ".join(lines[error : error + 2]) if error is not None else " ".join(lines[-1:])
