"""The page of the service: the queue, the runs with their reports and logs, policies, and what was refused.

It is made on the server and has no script. Names and messages come from others and are escaped by the template engine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage import __version__
from compile_stage.core.attempt import LOG_FILE
from compile_stage.core.redaction import redacted
from compile_stage.policy.folder import PolicyFile

if TYPE_CHECKING:
    from jinja2 import Environment

PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
REPORT_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
"""Of a report: it shows names out of models, and gets neither scripts nor this page's address."""
REPORT = "report.html"
_LOG_BYTES = 512 * 1024


def overview(
    jobs: Sequence[Mapping[str, Any]],
    looks: Sequence[Mapping[str, Any]],
    refusals: Sequence[Mapping[str, Any]],
    policies: Sequence[PolicyFile],
    poll: Mapping[str, Any],
) -> str:
    """The page.

    Args:
        jobs: Rows of the table, each with `report` and `log`, whether there are such files.
    """
    now = time.time()
    return (
        _environment()
        .get_template("watch.html.j2")
        .render(
            jobs=jobs,
            running=sum(job["state"] == "running" for job in jobs),
            queued=sum(job["state"] == "queued" for job in jobs),
            looks=looks,
            refusals=refusals,
            policies=[(file, redacted(file.problem)) for file in policies],
            poll=poll,
            now=now,
            version=__version__,
        )
    )


def log_of(folder: Path, attempt: int) -> str | None:
    """The end of an attempt's log, without secrets of addresses; None where there is none."""
    try:
        with (folder / str(attempt) / LOG_FILE).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    left_out = f"(the first {size - _LOG_BYTES} bytes are left out)\n" if size > _LOG_BYTES else ""
    return left_out + redacted(text)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("compile_stage.service"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"moment": _moment, "ago": _ago}
    return environment


def _moment(seconds: float | None) -> str:
    """`2026-11-23 20:04:28 UTC`."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if seconds else ""


def _ago(seconds: float | None, now: float) -> str:
    """`3 min ago`, `in 40 s`; empty for none."""
    if not seconds:
        return ""
    span = abs(now - seconds)
    size, unit = next((s, u) for s, u in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")) if span >= s or s == 1)
    return f"in {span / size:.0f} {unit}" if seconds > now else f"{span / size:.0f} {unit} ago"
