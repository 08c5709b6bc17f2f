"""What passed before and fails now: in the last fleet of the same state folder, or in the version that serves."""

from __future__ import annotations

import logging
from typing import Any

from compile_stage.core.errors import CompileStageError
from compile_stage.core.records import Policy
from compile_stage.fleet.journal import Journal
from compile_stage.policy.load import load_policy

_log = logging.getLogger(__name__)


def note_regressions(journal: Journal, fleet: int, registry: Any) -> None:
    """Note them in the journal. Only targets that failed are looked at, so the registry is asked little."""
    policies: dict[str, Policy | None] = {}
    for job, name, policy, target in journal.failures(fleet):
        before = journal.before(fleet, name, policy, target)
        if before is not None and before[1] == "passed":
            journal.regressed(job, target, f"{before[0]} passed in the last fleet")
            continue
        path = journal.job(job).planned.policy_path
        if path not in policies:
            policies[path] = _load(path)
        if (held := policies[path]) is not None and (serves := _serving(registry, held, name, target)):
            journal.regressed(job, target, serves)


def _load(path: str) -> Policy | None:
    try:
        return load_policy(path) if path else None
    except CompileStageError:  # it was changed while the fleet ran
        return None


def _serving(registry: Any, policy: Policy, name: str, target: str) -> str:
    """The version that the target's alias points to, in words; empty where there is none, or nobody can tell."""
    alias = next((one.alias for one in policy.targets if one.target.name == target), None)
    if not alias:
        return ""
    try:
        now = registry.current(policy.publish_name.replace("{model}", name), alias)
    except CompileStageError as error:
        _log.warning("what %r of %s points to is not known: %s", alias, name, error.problem)
        return ""
    return f"{now.uri} passed, and serves as {alias!r}" if now is not None else ""
