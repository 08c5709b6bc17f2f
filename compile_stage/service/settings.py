"""How the service is set up, and what of it is secret."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from compile_stage.core.errors import UsageError
from compile_stage.core.machine_identity import machine_identity

SECRET_VARIABLE = "COMPILE_STAGE_WATCH_SECRET"  # noqa: S105 - the variable's name
DATABASE_VARIABLE = "COMPILE_STAGE_WATCH_DATABASE"
ALERT_VARIABLE = "COMPILE_STAGE_WATCH_ALERT_URL"
PRIVATE_VARIABLES = (SECRET_VARIABLE, DATABASE_VARIABLE, ALERT_VARIABLE)
"""What runs do not inherit: they open models that others wrote."""
_LEAST_SECRET = 16  # characters; a shorter one can be guessed


@dataclass(frozen=True)
class Settings:
    """What the service was started with.

    Attributes:
        policies: Folder of policy files.
        state: Folder of the queue and of the runs' logs and results, absolute.
        secrets: Any of which may have signed a delivery; empty only with `--insecure-no-signature`.
        database: SQLAlchemy URL; empty for `queue.db` in `state`.
        aliases: Patterns; a version that has such an alias is compiled.
        every_version: Versions without an alias are compiled too.
        backlog: What the registry held before the first start is compiled too.
        runs: So many at once. Timing wants a quiet machine, so more than one wait for each other while they measure.
        max_age_s: How old, or how far in the future, a delivery's time may be.
        poll_s: Seconds between two searches of the registry.
        drain_s: Seconds that a running run has to end by itself when the service is stopped.
        requalify_s: Seconds between two requalifications; 0: none.
        retry_s: Seconds before the first retry after registry trouble; each further one waits four times as long.
        registry: The plug-in that is watched.
        command: What runs the stage. Only tests have another.
    """

    policies: Path
    state: Path
    secrets: tuple[str, ...] = ()
    database: str = ""
    aliases: tuple[str, ...] = ("*",)
    every_version: bool = False
    backlog: bool = False
    runs: int = 1
    max_age_s: float = 300.0
    poll_s: float = 300.0
    drain_s: float = 600.0
    requalify_s: float = 0.0
    retry_s: float = 30.0
    registry: str = "mlflow"
    command: tuple[str, ...] = (sys.executable, "-m", "compile_stage")

    @property
    def database_url(self) -> str:
        """Where the queue is."""
        return self.database or f"sqlite:///{self.state / 'queue.db'}"

    @property
    def owner(self) -> str:
        """Who has taken a job: this machine and state folder, also after a restart of the service. After one of the
        machine its jobs are free as another's are (`queue.LOST_S`)."""
        return f"{machine_identity()}:{self.state}"

    def run_folder(self, job: int) -> Path:
        """Where the logs and the results of a job are."""
        return self.state / "runs" / str(job)


def read_secrets(file: Path | None, *, insecure: bool, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The webhook's secrets: the lines of the file, or the variable's value.

    Args:
        file: One secret a line; two while one replaces the other.
        insecure: None is needed, and none may be given.

    Raises:
        UsageError: There is none, or it is too short, or the file can't be read.
    """
    lines = [environment.get(SECRET_VARIABLE, "")]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the secret can't be read: {error}", where=str(file)) from error
    secrets = tuple(line.strip() for line in lines if line.strip())
    if insecure and secrets:
        raise UsageError("a secret is given, and --insecure-no-signature says that none is checked", fix="drop one")
    if not secrets and not insecure:
        raise UsageError(
            "there is no secret to check the webhook's signatures with, so anybody could start runs",
            fix=f"put the webhook's secret into {SECRET_VARIABLE} or a file (--secret-file)",
        )
    if short := [secret for secret in secrets if len(secret) < _LEAST_SECRET]:
        raise UsageError(
            f"a secret of {len(short[0])} characters can be guessed",
            fix=f"use {_LEAST_SECRET} characters or more: openssl rand -hex 32",
        )
    return secrets


def alert_url(environment: Mapping[str, str] = os.environ) -> str:
    """Where alerts go; empty where nobody wants any.

    Raises:
        UsageError: It is no http or https URL. Nobody would know that no alert can arrive.
    """
    url = environment.get(ALERT_VARIABLE, "").strip()
    try:
        split = urlsplit(url)
        is_web = split.scheme in ("http", "https") and bool(split.hostname)
    except ValueError:  # brackets that hold no address
        is_web = False
    if url and not is_web:
        raise UsageError(
            f"{ALERT_VARIABLE} is no http or https URL, so no alert would arrive",
            fix="write it with its scheme (https://alerts.example.com/hook), or unset it",
        )
    return url


def environment_of_runs(*, alerts_as: str | None = None) -> dict[str, str]:
    """What a run inherits.

    Args:
        alerts_as: The secret that it signs alerts with; with it, it may send some. None for what opens models.
    """
    kept = {name: value for name, value in os.environ.items() if name not in PRIVATE_VARIABLES}
    if alerts_as is not None and ALERT_VARIABLE in os.environ:
        kept |= {ALERT_VARIABLE: os.environ[ALERT_VARIABLE], SECRET_VARIABLE: alerts_as}
    return kept
