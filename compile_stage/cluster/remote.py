"""The node's side: a function of compile-stage is called there, and what happens meanwhile goes to the driver."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compile_stage.core.digest import plain
from compile_stage.core.environment import hardware
from compile_stage.core.errors import UsageError
from compile_stage.core.records import Plan
from compile_stage.engine.protocol import describe_error

_FLUSH_EVERY_S = 0.2

CALLED = "called"
"""The first of a task's events: a process has taken it up."""


@dataclass(frozen=True)
class NodeSide:
    """What a function that runs on a node is given beside its arguments.

    Attributes:
        reporter: Tells the driver what happens: a `core.events.Reporter`.
    """

    reporter: Teller


class Mailbox:
    """An actor on the driver's node: what the nodes report, until the driver fetches it."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, list[Any]]] = []

    def put(self, task: str, events: list[Any]) -> None:
        """A task's events, in order."""
        self._kept.append((task, events))

    def take(self) -> list[tuple[str, list[Any]]]:
        """All that was not fetched yet."""
        kept, self._kept = self._kept, []
        return kept


class Teller:
    """A reporter whose events go to the mailbox, several times a second, and all of them before `close` returns."""

    def __init__(self, mailbox: Any, task: str) -> None:
        self._mailbox, self._task = mailbox, task
        self._events: list[Any] = [(CALLED, "", "")]
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tell-driver", daemon=True)
        self._thread.start()

    def began(self, step: str, job_id: str) -> None:
        self._say("began", step, job_id)

    def progressed(self, step: str, job_id: str, message: str) -> None:
        self._say("progressed", step, job_id, message)

    def ended(self, step: str, job_id: str, seconds: float, outcome: str) -> None:
        self._say("ended", step, job_id, seconds, outcome)

    def planned(self, plan: Plan) -> None:
        """The driver knows the plan."""

    def close(self) -> None:
        """Tell the rest."""
        self._stop.set()
        self._thread.join()
        self._flush(wait=True)

    def _say(self, *event: Any) -> None:
        with self._lock:
            self._events.append(event)

    def _run(self) -> None:
        while not self._stop.wait(_FLUSH_EVERY_S):
            self._flush()

    def _flush(self, *, wait: bool = False) -> None:
        import ray

        with self._lock:
            events, self._events = self._events, []
        if events:
            sent = self._mailbox.put.remote(self._task, events)
            if wait:
                ray.get(sent)


def call(function: str, arguments: Mapping[str, Any], settings: Mapping[str, str], task: str, mailbox: Any) -> Any:
    """Run `package.module:function` here; what it returns, or the error that it raised, as plain JSON.

    Args:
        settings: Environment variables of the driver that hold here too.
    """
    os.environ.update(settings)
    # Ray sets it by the CPUs that a task takes. Threads are the policy's to say.
    os.environ.pop("OMP_NUM_THREADS", None)
    module, _, name = function.partition(":")
    teller = Teller(mailbox, task)
    try:
        found = getattr(importlib.import_module(module), name)
        return {"value": plain(found(NodeSide(teller), **arguments))}
    except Exception as error:  # noqa: BLE001 - whatever it is, the driver raises it; only a lost node is tried again
        return {"error": describe_error(error)}
    finally:
        teller.close()


def demand_fingerprint(wanted: str) -> None:
    """Raise UsageError where this machine is not the one that the driver saw here."""
    if (here := hardware().fingerprint) != wanted:
        raise UsageError(
            f"a node that was {wanted} is now {here}: its cores or its GPU's driver changed",
            fix="run again; keep the CPUs that Ray's processes may use on a node the same (taskset, cgroups)",
        )
