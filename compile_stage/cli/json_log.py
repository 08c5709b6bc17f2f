"""A run's log for programs: one JSON object a line on standard error."""

from __future__ import annotations

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.redaction import redacted

if TYPE_CHECKING:
    from compile_stage.cli.next_step import Asked
    from compile_stage.core.errors import CompileStageError
    from compile_stage.core.records import Plan, RunResult

# What each line has: `time` (UTC, ISO 8601) and `event`; `job` is empty for steps of the whole run.


class JsonLog:
    """A `core.events.Reporter` and what ends a run, with the methods that `run` calls of a `Display`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def planned(self, plan: Plan) -> None:
        self._write(
            "planned",
            source=plan.source.uri,
            policy=plan.policy.name,
            jobs=[job.id for job in plan.jobs],
            refused=[{"job": refusal.job_id, "reason": refusal.reason} for refusal in plan.refused],
        )

    def began(self, step: str, job_id: str) -> None:
        self._write("began", step=step, job=job_id)

    def progressed(self, step: str, job_id: str, message: str) -> None:
        self._write("progress", step=step, job=job_id, message=message)

    def ended(self, step: str, job_id: str, seconds: float, outcome: str) -> None:
        known = outcome if outcome in ("done", "cached") else "failed"
        more = {} if known == outcome else {"message": outcome}
        self._write("ended", step=step, job=job_id, seconds=round(seconds, 3), outcome=known, **more)

    def close(self) -> None:
        """Every line was written when it was said."""

    def show_result(self, result: RunResult, folder: Path, asked: Asked | None = None) -> None:
        """The last line: how it ended, the winners, and where the report is."""
        self._write(
            "result",
            status=result.status,
            exit_code=result.exit_code,
            problem=result.problem,
            winners={target.policy.target.name: target.selection.winner for target in result.targets},
            published=[target.receipt.uri for target in result.targets if target.receipt is not None],
            report=str(folder / "report.html"),
        )

    def show_error(self, error: CompileStageError) -> None:
        """What ended the command before it had a result."""
        self._write(
            "error",
            code=str(error.code),
            exit_code=error.exit_code,
            where=error.where,
            problem=error.problem,
            fix=error.fix,
            problems=list(getattr(error, "problems", ())),
        )

    def show_log(self, record: logging.LogRecord) -> None:
        """A line of a library's own log."""
        self._write("log", level=record.levelname.lower(), logger=record.name, message=record.getMessage())

    def _write(self, event: str, **fields: Any) -> None:
        said = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **_redacted(fields)}
        with self._lock:
            sys.stderr.write(json.dumps(said) + "\n")
            sys.stderr.flush()


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {key: _redacted(one) for key, one in value.items()}
    return [_redacted(one) for one in value] if isinstance(value, list) else value


class JsonHandler(logging.Handler):
    """Libraries' logs as lines of the same log."""

    def __init__(self, log: JsonLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write it."""
        self._log.show_log(record)
