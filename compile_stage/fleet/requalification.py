"""Which published versions are to be proven anew, and in which order.

Due is a version that an alias points to and that was validated with another runtime, driver or machine than this one:
what its loader would complain about (`refuse_machine`). The first is the one with the least room between what was
measured and its limits, as a share of the limit's own scale: where a new toolchain moves the numbers a little, it is
the first that fails. Of two with the same room, the one whose proof is older comes first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from compile_stage.core.attempt import LOG_FILE
from compile_stage.core.digest import revive
from compile_stage.core.environment import hardware
from compile_stage.core.errors import EXIT_GATE, EXIT_OK, CompileStageError, IntegrityError
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.records import Job, RegisteredVersion
from compile_stage.fleet.driving import Ended
from compile_stage.fleet.journal import PlannedJob
from compile_stage.fleet.outcomes import FAILED, PASSED, UNKNOWN, JobOutcome, TargetOutcome
from compile_stage.fleet.selection import Skipped
from compile_stage.serving.manifest import check_integrity, refuse_machine
from compile_stage.serving.variants import for_machine

_NO_ROOM = -1.0  # of what can't be read: it comes before all others
_SAMPLES = "samples"  # the check of how many there are
_OLD = 1e-12  # how much a second of age counts, so that it only decides between equal rooms


def due(registry: Any, pattern: str, aliases: Iterable[str], skipped: Skipped) -> Iterator[PlannedJob]:
    """The versions to validate anew.

    Args:
        skipped: `published` counts those that need nothing.

    Raises:
        RegistryError: The registry can't be searched.
    """
    globs = list(aliases)
    for version in registry.search(pattern, "*"):
        held = [alias for alias in version.aliases if any(fnmatchcase(alias, glob) for glob in globs)]
        if not version.published or not held:
            continue
        job = _job(registry, version, held)
        if job is None:
            skipped.published += 1
        else:
            yield job


def room(manifest: Mapping[str, Any]) -> float:
    """The least room of a manifest's checks: |measured - limit| / max(|limit|, 1 - |limit| for shares). 0: at the
    limit; negative: nothing is known, or it failed. Checks that only hold or don't (a limit of 0 that is met) have
    none: each version has some, and all would be at their limit."""
    verdict = manifest.get("verdict")
    checks = verdict.get("checks", []) if isinstance(verdict, Mapping) else []
    rooms = [found for check in checks if (found := _room(check)) is not None]
    return min(rooms, default=_NO_ROOM)


def _room(check: Mapping[str, Any]) -> float | None:
    try:
        gate = check["gate"]
        if gate["metric"] == _SAMPLES:  # no toolchain changes how many there are
            return None
        limit, measured = float(gate["limit"]), float(check["measured"])
        left = measured - limit if gate["direction"] == "at_least" else limit - measured
    except (KeyError, TypeError, ValueError):
        return None
    if not math.isfinite(left):
        return None
    # A cosine's limit of 0.99 leaves 0.01 to lose; of a latency's limit, all of it may be left.
    scale = 1 - limit if gate["direction"] == "at_least" and 0 < limit < 1 else abs(limit)
    if not scale:
        return left if left < 0 else None
    return left / scale


def _job(registry: Any, version: RegisteredVersion, aliases: list[str]) -> PlannedJob | None:
    """None where nothing changed, or where it is for other hardware than this."""
    target = version.tags.get("compile_stage.target", "")
    try:
        with temporary_folder("requalify") as scratch:
            folder = registry.fetch(version.uri, Path(scratch) / "version")
            manifest = for_machine(check_integrity(folder, beside=True), folder, hardware())
            why = refuse_machine(manifest, folder)
            meant = revive(Job, manifest["job"]).target
            made = _made_at(folder)
    except IntegrityError as error:
        return _planned(version, aliases, target, _NO_ROOM, f"its files do not hold: {error.problem}")
    except CompileStageError as error:
        return _planned(version, aliases, target, _NO_ROOM, f"it could not be looked at: {error.problem}")
    if why is None or hardware().refuse(dict(meant.hardware)) is not None:
        return None
    return _planned(version, aliases, meant.name, room(manifest) + made * _OLD, why)


def _made_at(folder: Path) -> float:
    """When the version was made, in seconds since 1970; 0 where it does not say."""
    found = re.search(r"^utc_time_created:\s*'?([^'\n]+)'?\s*$", (folder / "MLmodel").read_text("utf-8"), re.MULTILINE)
    try:
        return datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp() if found else 0.0
    except ValueError:
        return 0.0


def _planned(version: RegisteredVersion, aliases: list[str], target: str, priority: float, why: str) -> PlannedJob:
    return PlannedJob(
        uri=version.uri,
        name=version.name,
        version=version.version,
        policy=version.tags.get("compile_stage.policy", ""),
        policy_path="",
        policy_digest=version.tags.get("compile_stage.policy_digest", ""),
        targets=((target or ", ".join(aliases), True),),
        owner="",  # one queue: the worst comes first, whosever it is
        location=version.location,
        priority=priority,
        why=f"{', '.join(aliases)}: {why}",
    )


def outcome_of_validation(targets: tuple[tuple[str, bool], ...], ended: Ended, folder: Path) -> JobOutcome:
    """The end of `compile-stage validate`, by its exit code and what it printed."""
    code = ended.exit_code if ended.exit_code is not None else EXIT_GATE
    passed = code == EXIT_OK
    reason = "" if passed else "; ".join(_causes(folder / LOG_FILE)) or ended.problem
    outcome = PASSED if passed else FAILED if code in (EXIT_GATE, 7) else UNKNOWN
    return JobOutcome(
        passed=passed, conclusive=False, exit_code=code, problem=reason, seconds=ended.seconds,
        targets=tuple(
            TargetOutcome(target=name, required=required, outcome=outcome, reason=reason) for name, required in targets
        ),
        steps={},
    )  # fmt: skip


def _causes(log: Path) -> Iterator[str]:
    """The checks that failed, as `validate` printed them."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        if line.strip().startswith(("failed", "not run", "missed")):
            yield " ".join(line.split())
