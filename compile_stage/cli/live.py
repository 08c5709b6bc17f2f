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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
        worked: One of them did not come from the cache.
        ended: All that it does on its own: it was validated, or failed.
    """

    job_id: str
    step: str = ""
    message: str = ""
    outcome: str = ""
    running: int = 0
    began: float = 0.0
    seconds: float = 0.0
    worked: bool = False
    ended: bool = False

    @property
    def elapsed_s(self) -> float:
        """Time in the running step and in all before it."""
        return self.seconds + (time.monotonic() - self.began if self.running else 0.0)


_LAST = "validate"  # what comes then, the measurement, all jobs of a target share
_MEASURED = "benchmark"
_UNKNOWN_LENGTH = frozenset({"search"})
_FEWEST = 2  # jobs that ended with work of their own, before the others are guessed to take as long
_OVERDUE = 3.0  # times the mean: a job that takes longer shows that the guess is none


@dataclass(frozen=True, slots=True)
class Work:
    """What a run has to do, as far as that is known beforehand.

    Attributes:
        jobs: Job id → its target.
        measure_s: Seconds that the measurement of one target may take (`budget.measure_seconds`).
        compiled_only: Jobs that are not validated here.
        foreseeable: False where a policy asks for more that nobody knows the length of.
    """

    jobs: Mapping[str, str] = field(default_factory=dict)
    measure_s: float = 0.0
    compiled_only: frozenset[str] = frozenset()
    foreseeable: bool = False


class ProgressBoard:
    """What every job does at the moment. Any thread may write, any may ask."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobProgress] = {}
        self._work = Work()
        self._lanes = 1
        self._lock = threading.Lock()

    def planned(self, work: Work) -> None:
        """These jobs, and the run itself, are what is shown from now on."""
        new = {job_id: JobProgress(job_id) for job_id in work.jobs}
        with self._lock:
            self._jobs = {"": self._jobs.get("", JobProgress(""))} | new
            self._work, self._lanes = work, 1

    def began(self, step: str, job_id: str) -> None:
        """A step of a job runs."""
        now = time.monotonic()
        with self._lock:
            job = self._of(job_id)
            self._jobs[job_id] = replace(
                job, step=step, message="", outcome="", running=job.running + 1, began=job.began if job.running else now
            )
            at_once = sum(self._jobs[name].running > 0 for name in self._work.jobs)
            self._lanes = max(self._lanes, at_once)

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
                seconds=job.seconds + seconds, worked=job.worked or outcome == "done",
                ended=job.ended or step == self._last_step(job_id) or outcome not in ("done", "cached"),
            )  # fmt: skip

    def snapshot(self) -> tuple[JobProgress, ...]:
        """Every job as it is now; later events change nothing of it."""
        with self._lock:
            return tuple(self._jobs.values())

    def counted(self) -> tuple[int, int]:
        """How many of the plan's jobs ended, and how many there are."""
        with self._lock:
            return sum(self._has_ended(name) for name in self._work.jobs), len(self._work.jobs)

    def left_s(self) -> float | None:
        """Seconds until the last target is measured, if the other jobs take as long as those that ended; None where
        that would be a guess: too few ended, one is overdue, or a search of unknown length runs."""
        with self._lock:
            work, jobs = self._work, dict(self._jobs)
            ended = {name: self._has_ended(name) for name in work.jobs}
            lanes = self._lanes
        took = [jobs[name].seconds for name, has in ended.items() if has and jobs[name].worked]
        unknown = any(job.running and job.step in _UNKNOWN_LENGTH for job in jobs.values())
        if not work.foreseeable or unknown or len(took) < _FEWEST:
            return None
        mean = sum(took) / len(took)
        spent = [jobs[name].elapsed_s for name, has in ended.items() if not has]
        measuring = [jobs.get(target, JobProgress(target)) for target in dict.fromkeys(work.jobs.values())]
        to_measure = [work.measure_s - one.elapsed_s for one in measuring if not _is_measured(one)]
        if any(seconds > _OVERDUE * mean for seconds in spent) or any(seconds <= 0 for seconds in to_measure):
            return None
        if not spent and not to_measure:
            return None
        return sum(max(0.0, mean - seconds) for seconds in spent) / lanes + sum(to_measure)

    def _last_step(self, job_id: str) -> str:
        return "compile" if job_id in self._work.compiled_only else _LAST

    def _has_ended(self, job_id: str) -> bool:
        """With the lock held."""
        target = self._jobs.get(self._work.jobs[job_id])
        return self._of(job_id).ended or (target is not None and (_is_measured(target) or target.step == _MEASURED))

    def _of(self, job_id: str) -> JobProgress:
        return self._jobs.get(job_id) or JobProgress(job_id)


def _is_measured(target: JobProgress) -> bool:
    """Whether a target's own row is past its measurement."""
    return bool(target.step) and not (target.running and target.step == _MEASURED)


def left_text(seconds: float | None) -> str:
    """`about 2 min left`, `less than a minute left`; empty for None."""
    if seconds is None:
        return ""
    minutes = round(seconds / 60)
    return f"about {minutes} min left" if minutes else "less than a minute left"


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
