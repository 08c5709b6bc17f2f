"""What runs now, as a table that a terminal redraws while the run prints above it.

Two locks, always taken in this order, so that no two threads can wait for each other:

1. `LiveConsole` holds its own while anything is written or drawn; whatever Rich locks is locked inside of it.
2. `ProgressBoard` holds its own while it copies a few values. Who holds it calls nothing else, least of all Rich.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live

REFRESHES_PER_SECOND = 8


class LiveConsole(Console):
    """A console that one thread at a time writes to, and whose reader may leave: a run that is piped into `head` goes
    on to its end.

    Rich computes how far the cursor must go up before it writes, and lets go of its lock in between. A line from
    another thread in that gap would be drawn over.
    """

    def __init__(self, **settings: Any) -> None:
        self.drawing = threading.RLock()
        super().__init__(**settings)

    def __enter__(self) -> Self:
        """Rich enters its console around every output, of a live table too."""
        self.drawing.acquire()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, value, trace)
        finally:
            self.drawing.release()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


@dataclass(frozen=True, slots=True)
class JobProgress:
    """One job, or the run itself (job id empty), at one moment.

    Attributes:
        running: How many of its steps run now.
        began: When the first of these began, of `time.monotonic`.
        seconds: Of the steps that ended.
    """

    job_id: str
    step: str = ""
    message: str = ""
    outcome: str = ""
    running: int = 0
    began: float = 0.0
    seconds: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Time in the running step and in all before it."""
        return self.seconds + (time.monotonic() - self.began if self.running else 0.0)


class ProgressBoard:
    """What every job does at the moment. Any thread may write, any may ask."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobProgress] = {}
        self._lock = threading.Lock()

    def planned(self, job_ids: Iterable[str]) -> None:
        """These jobs, and the run itself, are what is shown from now on."""
        new = {job_id: JobProgress(job_id) for job_id in job_ids}
        with self._lock:
            self._jobs = {"": self._jobs.get("", JobProgress(""))} | new

    def began(self, step: str, job_id: str) -> None:
        """A step of a job runs."""
        now = time.monotonic()
        with self._lock:
            job = self._of(job_id)
            self._jobs[job_id] = replace(
                job, step=step, message="", outcome="", running=job.running + 1, began=job.began if job.running else now
            )

    def progressed(self, step: str, job_id: str, message: str) -> None:
        """How far a step is."""
        with self._lock:
            self._jobs[job_id] = replace(self._of(job_id), step=step, message=message)

    def ended(self, step: str, job_id: str, seconds: float, outcome: str) -> None:
        """A step of a job has ended."""
        with self._lock:
            job = self._of(job_id)
            self._jobs[job_id] = replace(
                job, step=step, message="", outcome=outcome, running=max(0, job.running - 1),
                seconds=job.seconds + seconds,
            )  # fmt: skip

    def snapshot(self) -> tuple[JobProgress, ...]:
        """Every job as it is now; later events change nothing of it."""
        with self._lock:
            return tuple(self._jobs.values())

    def _of(self, job_id: str) -> JobProgress:
        return self._jobs.get(job_id) or JobProgress(job_id)


class LiveTable:
    """A table at the end of a terminal's text, drawn again several times a second until it is taken away."""

    def __init__(self, console: LiveConsole, table: Callable[[], RenderableType]) -> None:
        """Args:
        table: The table as it should look now; called with the console's lock held, so it may wait for nothing.
        """
        self._console = console
        self._table = table
        self._live: Live | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Draw it from now on; calling it twice does no harm."""
        with self._console.drawing:
            if self._live is not None:
                return
            # Rich's own refresh thread takes Rich's lock before ours: the drawing is done by a thread that doesn't.
            self._live = Live(
                get_renderable=self._table,
                console=self._console,
                auto_refresh=False,
                transient=True,
                # What is sent to a file (`2> log`) must get there.
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start(refresh=True)
            self._stop = threading.Event()
            threading.Thread(
                target=self._refresh, args=(self._live, self._stop), name="live-table", daemon=True
            ).start()

    def stop(self) -> None:
        """Take it away; calling it twice does no harm."""
        with self._console.drawing:
            live, self._live = self._live, None
            self._stop.set()  # its thread looks at this with the lock held, and need not be waited for
            if live is not None:
                live.stop()

    def _refresh(self, live: Live, stop: threading.Event) -> None:
        while not stop.wait(1 / REFRESHES_PER_SECOND):
            with self._console.drawing:
                if stop.is_set():
                    return
                try:
                    live.refresh()
                except OSError:
                    return  # the terminal has gone; whoever prints next hears of it
