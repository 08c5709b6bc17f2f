"""A search of the whole registry from time to time, for what no delivery reported: MLflow gives a delivery up after a
few attempts, and sends none for what happened while no webhook was there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.environment import hardware
from compile_stage.core.errors import CompileStageError
from compile_stage.core.records import RegisteredVersion
from compile_stage.policy.folder import PolicyFolder
from compile_stage.service.deciding import needed
from compile_stage.service.queue import Queue
from compile_stage.service.settings import Settings

_log = logging.getLogger(__name__)


class Poller:
    """Searches the registry.

    Attributes:
        succeeded_at: Seconds since 1970, of the last search that reached the end; 0 before one did.
        problem: Why the last one did not; empty when it did.
    """

    def __init__(self, settings: Settings, queue: Queue, policies: PolicyFolder) -> None:
        self._settings, self._queue, self._policies = settings, queue, policies
        self.succeeded_at, self.problem = 0.0, ""
        self._broken: dict[Path, str] = {}

    def work(self, stop: threading.Event) -> None:
        """Until it is stopped. The first search is made at once: the service may have been down for long."""
        while not stop.is_set():
            try:
                self.poll()
            except CompileStageError as error:
                self.problem = error.problem
                _log.warning("the registry can't be searched: %s", error.problem)
            except Exception as error:  # noqa: BLE001 - the next one may succeed, and deliveries still work
                self.problem = f"{type(error).__name__}: {error}"
                _log.exception("the search of the registry failed")
            stop.wait(self._settings.poll_s if not self.problem else min(30.0, self._settings.poll_s))

    def poll(self) -> int:
        """Search once; returns how many versions are to be looked at."""
        self._log_broken_policies()
        versions = list(plugins.load("registries", self._settings.registry).versions())
        known = self._queue.known()
        if known is None:
            # What was promoted long before anybody watched is not compiled by surprise.
            before = versions if not self._settings.backlog else []
            self._queue.remember_known(map(_key, before), (_key(one) for one in before if not _is_asked_for(one)))
            known = set(map(_key, before))
        # What waited then, for an alias or for its approval, is found once it has it.
        idle = self._queue.idle()
        fresh = (one for one in versions if _key(one) not in known or (_key(one) in idle and _is_asked_for(one)))
        found = sum(map(self._look_if_new, fresh))
        self._requalify_if_due()
        self.succeeded_at, self.problem = time.time(), ""
        return found

    def _log_broken_policies(self) -> None:
        """A line for each policy that is left out, when it breaks and when its problem changes: what is meant for it
        is not compiled, and nothing else would say so in the log."""
        broken = {file.path: file.problem for file in self._policies.files() if file.problem}
        for path, problem in broken.items():
            if self._broken.get(path) != problem:
                _log.warning("%s is left out until it is fixed: %s", path.name, problem)
        self._broken = broken

    def _look_if_new(self, version: RegisteredVersion) -> bool:
        if self._queue.is_awaited(version.name, version.version):
            return False
        try:
            jobs: Iterable[tuple[str, str]] = needed(version, self._settings, self._policies)
            if all(self._queue.has(kind, version.name, version.version, subject) for kind, subject in jobs):
                return False
        except CompileStageError as error:  # one whose files are gone, say, keeps no other from being found
            _log.warning("%s can't be looked at: %s", version.uri, error.problem)
        self._queue.look_at(version.name, version.version, "poll")
        return True

    def _requalify_if_due(self) -> None:
        """One job for each period and kind of machine, whatever was restarted meanwhile: what one finds holds for its
        hardware alone, and machines may share the queue."""
        if (period_s := self._settings.requalify_s) > 0:
            due = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(_slot(period_s)))
            self._queue.add("requalify", "", "", f"{due} {hardware().fingerprint}")


def _key(version: RegisteredVersion) -> tuple[str, str]:
    return version.name, version.version


def _is_asked_for(version: RegisteredVersion) -> bool:
    """True where somebody gave a version an alias, or, of a published one, the approval that it waits for."""
    return version.tags.get(version.approval[0], "") != "" if version.published else bool(version.aliases)


def _slot(period_s: float) -> float:
    now = time.time()
    return now - now % period_s
