"""What happens during a run, reported to whoever listens: a live table, plain lines, a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from compile_stage.core.records import Event, Plan
from compile_stage.core.storage import storage_error


class Reporter(Protocol):
    """Receives events, from any thread. `job_id` is empty for steps of the whole run."""

    def began(self, step: str, job_id: str) -> None: ...

    def progressed(self, step: str, job_id: str, message: str) -> None: ...

    def ended(self, step: str, job_id: str, seconds: float, outcome: str) -> None:
        """`outcome` is `done`, `cached`, or one sentence that says what went wrong."""

    def planned(self, plan: Plan) -> None:
        """What will run, said before anything does."""


class Silent:
    """Listens to nothing."""

    def began(self, step: str, job_id: str) -> None: ...

    def progressed(self, step: str, job_id: str, message: str) -> None: ...

    def ended(self, step: str, job_id: str, seconds: float, outcome: str) -> None: ...

    def planned(self, plan: Plan) -> None: ...


class Mark:
    """What a step says of itself while it runs."""

    def __init__(self) -> None:
        self.cached = False
        self.problem = ""


class EventLog:
    """Passes events on to a reporter and keeps them as records."""

    def __init__(self, reporter: Reporter | None = None, *, elapsed_s: float = 0.0) -> None:
        """Args:
        elapsed_s: For how long the run has been under way, elsewhere.
        """
        self.reporter: Reporter = reporter or Silent()
        self._started = time.monotonic() - elapsed_s
        self._lock = threading.Lock()
        self._events: list[Event] = []

    @property
    def events(self) -> tuple[Event, ...]:
        """All ended steps, by the time at which they began."""
        with self._lock:
            return tuple(sorted(self._events, key=lambda event: (event.started_s, event.step, event.job_id)))

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    @contextmanager
    def step(self, step: str, job_id: str = "") -> Iterator[Mark]:
        """Mark a step as running; an exception ends it with its sentence and goes on."""
        began, mark = self.elapsed_s, Mark()
        self.reporter.began(step, job_id)
        try:
            yield mark
        except BaseException as error:
            # Of a tree that could not be copied, Python's own error is a list of all its files.
            said = (isinstance(error, OSError) and storage_error(error)) or error
            mark.problem = str(getattr(said, "problem", "") or said or type(said).__name__)
            raise
        finally:
            ended = self.elapsed_s
            with self._lock:
                self._events.append(Event(step=step, job_id=job_id, started_s=began, ended_s=ended, cached=mark.cached))
            outcome = mark.problem or ("cached" if mark.cached else "done")
            self.reporter.ended(step, job_id, ended - began, outcome)

    def add(self, events: Iterable[Event]) -> None:
        """Keep what happened elsewhere, and was reported already."""
        with self._lock:
            self._events += events

    def progress(self, step: str, job_id: str, message: str) -> None:
        """Say how far a running step is."""
        self.reporter.progressed(step, job_id, message)

    def planned(self, plan: Plan) -> None:
        """Say what will run."""
        self.reporter.planned(plan)
