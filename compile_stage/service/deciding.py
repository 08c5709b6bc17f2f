"""What a version needs, looked at as it is now: runs of the policies that are meant for it, or a promotion that was
waiting for its approval.

A delivery only says where to look. So a forged or an old one could cause no work that the registry itself does not ask
for, and the poll, which has no delivery, decides by the same rules.
"""

from __future__ import annotations

import logging
import threading
from fnmatch import fnmatchcase

from compile_stage.core import alias_history, plugins
from compile_stage.core.errors import CompileStageError, RegistryError
from compile_stage.core.records import RegisteredVersion
from compile_stage.policy.folder import PolicyFolder
from compile_stage.service.queue import Job, Look, Queue
from compile_stage.service.settings import Settings

_log = logging.getLogger(__name__)
_IDLE_S = 2.0  # what was postponed is looked at after this at the latest


def needed(
    version: RegisteredVersion, settings: Settings, policies: PolicyFolder, alias: str = ""
) -> list[tuple[str, str]]:
    """The jobs of a version, by kind and subject.

    Args:
        alias: One that a delivery reported, though it may have moved on since.

    Raises:
        CompileStageError: The registry does not say it: the files of this version may be gone.
    """
    if version.published:
        tag, asked = version.approval
        value = version.tags.get(tag, "") if tag else ""
        waits = bool(value and asked) and not _had_alias(version, asked, settings)
        return [("promote", f"{asked}:{value}"[:600])] if waits else []
    aliases = {*version.aliases, alias} - {""}
    promoted = any(fnmatchcase(one, pattern) for one in aliases for pattern in settings.aliases)
    if not (promoted or settings.every_version):
        return []
    registry = plugins.load("registries", settings.registry)
    meant = policies.meant_for(version, lambda: registry.flavor(version.uri))
    return [("run", file.policy.name) for file in meant if file.policy is not None]


def is_needed(job: Job, settings: Settings, policies: PolicyFolder) -> bool:
    """Whether a promotion is still asked for: while it waited for its turn or its retry, somebody may have promoted the
    version by hand, gone back from it, or taken the approval away. True where the registry can't be asked, so that the
    attempt itself says why."""
    try:
        version = plugins.load("registries", settings.registry).version(job.name, job.version)
        return version is not None and (job.kind, job.subject) in needed(version, settings, policies)
    except CompileStageError:
        return True


def _had_alias(version: RegisteredVersion, alias: str, settings: Settings) -> bool:
    """True where the alias points to the version, or did: somebody promoted it by hand and moved on, or went back."""
    if alias in version.aliases or alias_history.previous_tag(alias) in version.tags:
        return True
    now = plugins.load("registries", settings.registry).current(version.name, alias)
    return (
        now is not None
        and version.version in alias_history.parse(now.tags.get(alias_history.previous_tag(alias))).versions
    )


class Decider:
    """Looks at the versions that wait for it, one after the other."""

    def __init__(self, settings: Settings, queue: Queue, policies: PolicyFolder) -> None:
        self._settings, self._queue, self._policies = settings, queue, policies

    def work(self, stop: threading.Event) -> None:
        """Until it is stopped."""
        while not stop.is_set():
            if (look := self._queue.next_look()) is not None:
                self.decide(look)
                continue
            with self._queue.changed:
                self._queue.changed.wait(_IDLE_S)

    def decide(self, look: Look) -> None:
        """Add what one version needs, or come back to it later."""
        registry = plugins.load("registries", self._settings.registry)
        try:
            version = registry.version(look.name, look.version)
            jobs = needed(version, self._settings, self._policies, look.alias) if version is not None else []
        except RegistryError as error:
            _log.warning("models:/%s/%s can't be looked at: %s", look.name, look.version, error.problem)
            self._queue.postpone(look, error.problem)
            return
        except CompileStageError as error:
            _log.warning("models:/%s/%s is not looked at: %s", look.name, look.version, error.problem)
            self._queue.looked(look, [])
            return
        except Exception as error:  # noqa: BLE001 - it would be the oldest for ever, and no other be looked at
            _log.exception("models:/%s/%s can't be looked at", look.name, look.version)
            self._queue.postpone(look, f"{type(error).__name__}: {error}")
            return
        if self._queue.looked(look, jobs):
            _log.info("models:/%s/%s: %s", look.name, look.version, ", ".join(f"{kind} {of}" for kind, of in jobs))
