"""Are the published versions that aliases point to still right on this machine? Where its hardware, its driver or the
runtime is another than what they were validated with, they are validated anew.

`compile-stage validate` does that in a process of its own, by the gates of the version's policy, and attaches what it
finds to the version.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.digest import revive
from compile_stage.core.environment import hardware
from compile_stage.core.errors import (
    EXIT_GATE,
    EXIT_INTEGRITY,
    EXIT_OK,
    EXIT_REGISTRY,
    CompileStageError,
    IntegrityError,
)
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.records import Job, RegisteredVersion
from compile_stage.service.alerts import alert
from compile_stage.service.runs import problem_of
from compile_stage.service.settings import Settings, alert_url, environment_of_runs
from compile_stage.serving.manifest import FAILED_HERE, check_integrity, refuse_machine
from compile_stage.serving.variants import for_machine

MOST_LOOKS = 3
"""Validations of one version while nothing changes: by so many a disturbed machine has had its chance, and what is at a
limit, which passes in one of twenty, would pass in the end."""

_LOOKS = "looks.txt"
UNCHANGED, ELSEWHERE, PASSED, FAILED, UNKNOWN = "unchanged", "elsewhere", "passed", "failed", "unknown"


@dataclass(frozen=True)
class Requalified:
    """What was found of one version.

    Attributes:
        outcome: `unchanged`; `elsewhere`: it is for hardware that this machine is not; `passed`: it was validated anew;
            `failed`: so, or its files are not what was published; `unknown`: it could not be validated.
        reason: What differs, or what went wrong.
    """

    uri: str
    aliases: tuple[str, ...]
    outcome: str
    reason: str = ""


def requalify(settings: Settings, say: Callable[[str], object]) -> int:
    """Look at every published version that an alias points to; returns the exit code: 3 where one failed, else 4 where
    one could not be looked at or validated, else 0.

    Args:
        say: Hears a line for each version.

    Raises:
        RegistryError: The registry can't be searched.
    """
    found: list[Requalified] = []
    versions = plugins.load("registries", settings.registry).versions()
    for version in [one for one in versions if one.published and _is_watched(one, settings)]:
        one = _requalified(version, settings)
        say(f"{one.uri} ({', '.join(one.aliases)}): {one.outcome}{f': {one.reason}' if one.reason else ''}")
        found.append(one)
    failed = [one for one in found if one.outcome == FAILED]
    unknown = [one for one in found if one.outcome == UNKNOWN]
    if (failed or unknown) and not _alerted(settings, [*failed, *unknown]):
        say("the alert was taken by nobody")
    if failed:
        return EXIT_GATE
    return EXIT_REGISTRY if unknown else EXIT_OK


def _is_watched(version: RegisteredVersion, settings: Settings) -> bool:
    return any(fnmatchcase(alias, pattern) for alias in version.aliases for pattern in settings.aliases)


def _requalified(version: RegisteredVersion, settings: Settings) -> Requalified:
    try:
        with temporary_folder("requalify") as scratch:
            folder = plugins.load("registries", settings.registry).fetch(version.uri, scratch / "version")
            manifest = for_machine(check_integrity(folder, beside=True), folder, hardware())
            differs = refuse_machine(manifest, folder)
            meant = revive(Job, manifest["job"]).target
    except IntegrityError as error:
        return Requalified(version.uri, version.aliases, FAILED, str(error).partition("\n")[0])
    except CompileStageError as error:
        return Requalified(version.uri, version.aliases, UNKNOWN, error.problem)
    if differs is None:
        return Requalified(version.uri, version.aliases, UNCHANGED)
    if (reason := hardware().refuse(dict(meant.hardware))) is not None:
        return Requalified(version.uri, version.aliases, ELSEWHERE, reason)
    looks = _looks(_folder(version, settings)) if differs == FAILED_HERE else 0
    if looks >= MOST_LOOKS:
        reason = (
            f"{differs} {looks} times, and nothing changed since; compile-stage validate {version.uri} does it again"
        )
        return Requalified(version.uri, version.aliases, FAILED, reason)
    found = _validated(version, differs, settings)
    if found.outcome in (PASSED, FAILED):
        (_folder(version, settings) / _LOOKS).write_text(str(looks + 1), encoding="utf-8")
    return found


def _folder(version: RegisteredVersion, settings: Settings) -> Path:
    return settings.state / "requalified" / f"{version.name}-{version.version}"


def _looks(folder: Path) -> int:
    """How often it was validated since anything changed; 0 where that is not known."""
    try:
        return int((folder / _LOOKS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def _validated(version: RegisteredVersion, differs: str, settings: Settings) -> Requalified:
    folder = _folder(version, settings)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("wb") as log:
        done = subprocess.run(  # noqa: S603
            [*settings.command, "validate", version.uri],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment_of_runs(),
            check=False,
        )
    if done.returncode == EXIT_OK:
        return Requalified(version.uri, version.aliases, PASSED, differs)
    # What was killed, or lacks a package or the original here, says nothing of the version.
    outcome = FAILED if done.returncode in (EXIT_GATE, EXIT_INTEGRITY) else UNKNOWN
    causes = "; ".join(_causes(folder)) or problem_of(folder, done.returncode)
    return Requalified(
        version.uri, version.aliases, outcome, f"{differs}; validate ended with {done.returncode}: {causes}"
    )


def _causes(folder: Path) -> Iterator[str]:
    """The checks that failed, as `validate` printed them."""
    for line in (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.strip().startswith(("failed", "not run", "missed")):
            yield " ".join(line.split())


def _alerted(settings: Settings, concerned: list[Requalified]) -> bool:
    """True when the alert was taken, or nobody wants one."""
    if not (url := alert_url()):
        return True
    versions = [{**asdict(one), "aliases": list(one.aliases)} for one in concerned]
    document = {"event": "requalification.failed", "machine": hardware().fingerprint, "versions": versions}
    return alert(url, settings.secrets[0] if settings.secrets else "", document)
