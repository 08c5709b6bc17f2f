"""One attempt at a job, as a process between who wants it (`watch`, `fleet`) and the stage.

    python -m compile_stage.core.attempt FOLDER COMMAND ...

It runs the command, writes what it prints to `FOLDER/log.txt`, and then how it ended to `FOLDER/exit.json`. When
who wants it is killed it goes on, and who is started next takes the outcome from that file: it starts the very
same attempt again, which waits on the lock until the first has ended, finds the file, and does nothing. So an attempt's
command is started once, whenever that is. Only when this process itself is killed, the file is missing;
the command, if it still runs, keeps the lock, and the next attempt follows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

EXIT_FILE = "exit.json"
LOG_FILE = "log.txt"


def main(folder: Path, command: list[str]) -> None:
    """Run the command once in the attempt's folder, or find that it was run."""
    stopped: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _: FrameType | None) -> None:
        stopped.append(number)
        for process in running:
            process.send_signal(signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with locked(folder.parent, stopped) as lock:
        if stopped or (folder / EXIT_FILE).exists():
            return
        started = time.monotonic()  # how long it took counts against a budget, and clocks are set meanwhile
        with (folder / LOG_FILE).open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(lock,))  # noqa: S603
            running.append(process)
            if stopped:
                process.send_signal(signal.SIGINT)
            code = process.wait()
        write_exit(folder, {"exit_code": code, "seconds": time.monotonic() - started, "ended_at": time.time()})


@contextlib.contextmanager
def locked(folder: Path, stopped: list[int]):  # type: ignore[no-untyped-def]
    """Hold the job's one place; given up when the process is stopped. Yields the lock's descriptor, which the
    command inherits, so that the place is taken as long as it runs."""
    import fcntl

    descriptor = os.open(folder / ".running", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not stopped:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.2)
            else:
                break
        yield descriptor
    finally:
        os.close(descriptor)


def write_exit(folder: Path, outcome: dict[str, float]) -> None:
    """Write `exit.json` whole or not at all."""
    part = folder / f"{EXIT_FILE}.part"
    with part.open("w", encoding="utf-8") as file:
        json.dump(outcome, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / EXIT_FILE)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except OSError as error:  # such as a full disk
        sys.exit(f"the attempt in {sys.argv[1]} can't go on: {error.strerror}")
