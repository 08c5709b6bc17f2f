"""The workers: each takes a job, starts it as a process of its own, and records how that ended."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from compile_stage.core.attempt import EXIT_FILE, LOG_FILE
from compile_stage.core.error_codes import PASSING
from compile_stage.core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from compile_stage.core.redaction import redacted
from compile_stage.policy.folder import PolicyFolder
from compile_stage.service.deciding import is_needed
from compile_stage.service.queue import LOST_S, Job, Queue
from compile_stage.service.settings import Settings, environment_of_runs

_log = logging.getLogger(__name__)
_IDLE_S = 2.0  # what waits for its retry begins after this at the latest
_BEAT_S = LOST_S / 6
_STEP_S = 0.5  # how soon a stop is noticed
_KILL_S = 60.0  # what was interrupted and has not ended by then is killed
_TAIL = 2000  # bytes of a log, for the problem that is shown


class Worker:
    """Takes jobs of some kinds, one after the other.

    Args:
        after: Called with the job, its folder and its end when an attempt ended.
        outage: True while the service can't search the registry.

    Attributes:
        first: What is taken before anything else: what was running when the service was killed.
        interrupt: Set to end what runs.
    """

    def __init__(
        self,
        settings: Settings,
        queue: Queue,
        policies: PolicyFolder,
        kinds: tuple[str, ...],
        after: Callable[[Job, Path, float], object] = lambda *_: None,
        outage: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings, self._queue, self._policies, self._after = settings, queue, policies, after
        self._outage = outage
        self.kinds = kinds
        self.first: list[Job] = []
        self.interrupt = threading.Event()

    def work(self, stop: threading.Event) -> None:
        """Until it is stopped: the running job is then waited for, until `interrupt` is set too."""
        while not stop.is_set():
            if not self.first and (job := self._queue.claim(self.kinds)) is not None:
                self.first.append(job)
            if self.first:
                self._attempt(self.first[0])
                self.first.pop(0)  # not before it is recorded: if the database fails, `work` is called again
                continue
            with self._queue.changed:
                self._queue.changed.wait(_IDLE_S)

    def _attempt(self, job: Job) -> None:
        folder = self._settings.run_folder(job.id) / str(job.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            command = command_of(job, self._settings, self._policies)
        except LookupError as error:
            # It may be there in a moment: its file is being written, or fetched anew.
            self._queue.ended(job, EXIT_USAGE, 0.0, str(error), may_pass=True)
            return
        if job.kind == "promote" and not is_needed(job, self._settings, self._policies):
            _log.info("job %d: the promotion is not asked for any more", job.id)
            self._queue.ended(job, EXIT_OK, 0.0, "not asked for any more: promoted by hand, or no longer approved")
            return
        _log.info("job %d, attempt %d: %s", job.id, job.attempt, " ".join(command))
        started = time.monotonic()
        # A session of its own: Ctrl-C at the terminal is the service's, which then stops it in its own way.
        wrapper = [sys.executable, "-m", "compile_stage.core.attempt", str(folder), *command]
        alerts_as = next(iter(self._settings.secrets), "") if job.kind == "requalify" else None
        environment = environment_of_runs(alerts_as=alerts_as)
        process = subprocess.Popen(wrapper, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)  # noqa: S603
        self._wait(process, job)
        self._record(job, folder, started)

    def _wait(self, process: subprocess.Popen[bytes], job: Job) -> None:
        """Until the attempt has ended. It is interrupted when the service is stopped, and where another service has
        begun the job again, so that two do not go on with it."""
        beat, interrupted_at, lost = time.monotonic(), 0.0, False
        while True:
            try:
                process.wait(_STEP_S)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                if now - beat > _BEAT_S:
                    beat = now
                    lost = lost or self._is_lost(job)
                if (lost or self.interrupt.is_set()) and not interrupted_at:
                    interrupted_at = now
                    process.send_signal(signal.SIGINT)
                elif interrupted_at and now - interrupted_at > _KILL_S:
                    with suppress(ProcessLookupError):  # the command too, or it would go on and keep the job's place
                        os.killpg(process.pid, signal.SIGKILL)
            else:
                return

    def _is_lost(self, job: Job) -> bool:
        """Give a sign of life; True where it comes too late. A database that can't be reached for a while ends no
        run."""
        try:
            if self._queue.beat(job):
                return False
        except Exception:  # noqa: BLE001 - of any database; the next sign may arrive
            _log.exception("job %d: no sign of life could be written", job.id)
            return False
        _log.warning("job %d, attempt %d is interrupted: another service has begun the job", job.id, job.attempt)
        return True

    def _record(self, job: Job, folder: Path, started: float) -> None:
        try:
            outcome = json.loads((folder / EXIT_FILE).read_text(encoding="utf-8"))
            code, seconds = int(outcome["exit_code"]), outcome["seconds"]
            ended_at = outcome["ended_at"]
        except (OSError, ValueError, KeyError, TypeError):
            code, seconds, ended_at = None, time.monotonic() - started, time.time()
        if self.interrupt.is_set() and code in (EXIT_INTERRUPTED, -signal.SIGINT, None):
            self._queue.release(job)
            return
        problem = remarks_of(folder.parent / "result") if code == 0 else problem_of(folder, code)
        self._queue.ended(job, code, seconds, problem, may_pass=may_pass(problem), outage=self._outage())
        _log.info("job %d ended with %s after %.0f s", job.id, "no exit code" if code is None else code, seconds)
        try:
            self._after(job, folder.parent / "result", ended_at)
        except Exception:  # noqa: BLE001 - what follows a run is for those who look on
            _log.exception("after job %d", job.id)


def command_of(job: Job, settings: Settings, policies: PolicyFolder) -> list[str]:
    """What a job runs. Raises LookupError when its policy is gone."""
    command = [*settings.command]
    if job.kind == "requalify":
        return [*command, "watch", "--requalify", "--once", "--state", str(settings.run_folder(job.id) / "result")]
    if job.kind == "promote":
        return [*command, "promote", job.uri, "--alias", job.subject.partition(":")[0]]
    if (file := policies.named(job.subject)) is None:
        raise LookupError(f"the folder has no policy {job.subject!r} any more, or it is broken")
    out = settings.run_folder(job.id) / "result"
    return [*command, "run", job.uri, "-p", str(file.path), "--out", str(out)]


def remarks_of(result: Path) -> str:
    """What a run that ended well says of what it published, such as an approval that it waits for."""
    try:
        targets = json.loads((result / "result.json").read_text(encoding="utf-8"))["targets"]
        return "; ".join(target["receipt"]["note"] for target in targets if (target.get("receipt") or {}).get("note"))
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def may_pass(problem: str) -> bool:
    """True for an error that ends with the code of trouble that may be over later."""
    return any(f"[{code}]" in problem for code in PASSING)


def problem_of(folder: Path, code: int | None) -> str:
    """Why an attempt failed: the error that the log ends with."""
    if code is None:
        return "its process was killed before it could say how it ended"
    with_signal = f"ended by signal {-code}" if code < 0 else ""
    try:
        with (folder / LOG_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        text = ""
    lines = [line.strip() for line in redacted(text).splitlines() if line.strip()]
    error = next((at for at in reversed(range(len(lines))) if lines[at].startswith("error:")), None)
    told = " ".join(lines[error : error + 2]) if error is not None else " ".join(lines[-1:])
    return " ".join(filter(None, (with_signal, told)))
