"""Third-party plug-ins as the stage sees them: what they declare and answer comes from a worker.

Importing a plug-in runs its code, and code that runs in the stage's own process can change how the stage judges. So
backends, sources and lowerings of other distributions are imported in workers only. The stage asks such a worker, one
for each distribution; an answer is kept until `release`, and no such worker lives while something is measured
(`ended`). What arrives is plain JSON, and has the type that the port names or is refused.

Registries and engines are part of the stage: they hold its credentials and start its workers.
"""

from __future__ import annotations

import base64
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from compile_stage.core.capabilities import BackendCapabilities, LoweringCapabilities, SourceCapabilities
from compile_stage.core.digest import canonical_json, plain, revive
from compile_stage.core.errors import CompileStageError, InternalError, UsageError, WorkerError
from compile_stage.core.ports.engine import Engine, Worker, WorkerLimits
from compile_stage.core.records import (
    Budget,
    Compliance,
    PortableModel,
    Scheme,
    SourceModel,
    Target,
    TuningOption,
)

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

IN_WORKER = "COMPILE_STAGE_IN_WORKER"
"""Environment variable of workers. There, and in what they start, plug-ins are imported."""

_LIMITS = WorkerLimits(timeout_s=60.0, memory_bytes=4_000_000_000, light=True)
_MAX_BYTES = 32_000_000  # of an argument: a message of 64 MB holds it in base64

_NAMES = tuple[str, ...]
_REASON = str | None
_DECLARED: Mapping[str, Mapping[str, Any]] = {
    "backends": {"name": str, "requires": _NAMES, "extra": str, "capabilities": BackendCapabilities},
    "sources": {"name": str, "requires": _NAMES, "extra": str, "capabilities": SourceCapabilities, "framework": str},
    "lowerings": {"name": str, "requires": _NAMES, "extra": str, "capabilities": LoweringCapabilities},
}
# Method → types of its arguments, type of its answer, as the ports have them.
_ANSWERED: Mapping[str, Mapping[str, tuple[tuple[Any, ...], Any]]] = {
    "backends": {
        "capabilities_for": ((Target,), BackendCapabilities),
        "toolchain": ((), Mapping[str, str]),
        "refuse_target": ((Target,), _REASON),
        "schemes": ((Target, str), tuple[Scheme, ...]),
        "refuse": ((PortableModel, Target), _REASON),
        "tuning_options": ((Target, Scheme), tuple[TuningOption, ...]),
        "budget_options": ((Budget,), Mapping[str, Any]),
        "records_key": ((Target, Mapping[str, str]), _REASON),
        "refuse_record": ((str, bytes), _REASON),
    },
    "sources": {
        "refuse": ((SourceModel, Compliance), _REASON),
        "packages": ((), Mapping[str, str]),
        "prediction_format": ((SourceModel,), Mapping[str, Any]),
        "keeps_cache": ((SourceModel,), bool),
    },
    "lowerings": {"refuse": ((PortableModel, Scheme), _REASON)},
}


def is_remote(group: str, entry: EntryPoint) -> bool:
    """True for a plug-in that this process must not import: another distribution's, of a group that runs in workers."""
    if group not in _ANSWERED or os.environ.get(IN_WORKER):
        return False
    return not is_ours(entry)


def is_ours(entry: EntryPoint) -> bool:
    """True for a plug-in of compile-stage's own distribution. One without a distribution was not installed: whoever
    made it runs in this process already."""
    return entry.dist is None or _is_our_own(entry.dist)


@cache
def _is_our_own(distribution: Distribution) -> bool:
    # Its name parses its whole METADATA anew each time, and all its plug-ins share one object.
    return distribution.name.lower().replace("_", "-") == "compile-stage"


class RemotePlugin:
    """A plug-in that lives in a worker: its declarations as attributes, its answers as methods. It neither compiles nor
    opens anything; that is asked of the workers of a run."""

    def __init__(self, group: str, entry: EntryPoint, engine: Callable[[], Engine]) -> None:
        """Raises UsageError when what it declares is not what this version asks for, or when it can't be imported.

        Args:
            engine: Makes the engine that its worker runs on.
        """
        self._group, self._entry, self._engine = group, entry, engine
        answer = _ask(self._entry, engine, "describe_plugin", group=group, name=entry.name)
        for attribute, kind in _DECLARED[group].items():
            setattr(self, attribute, self._typed(attribute, kind, answer.get(attribute)))
        if answer["name"] != entry.name:
            raise UsageError(
                f"the plug-in {entry.name!r} calls itself {answer['name']!r}", fix="update it", where=entry.value
            )

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_") or method not in _ANSWERED[self._group]:
            raise AttributeError(f"{method!r} of the plug-in {self._entry.name!r} can be used in a worker only")
        kinds, kind = _ANSWERED[self._group][method]

        def ask(*arguments: Any) -> Any:
            if len(arguments) != len(kinds):
                raise TypeError(f"{method} takes {len(kinds)} arguments")
            answer = _ask(
                self._entry,
                self._engine,
                "ask_plugin",
                group=self._group,
                name=self._entry.name,
                method=method,
                values=[_as_text(value) if isinstance(value, bytes) else value for value in arguments],
            )
            return self._typed(method, kind, answer)

        return ask

    def _typed(self, member: str, kind: Any, value: Any) -> Any:
        try:
            return revive(kind, value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{member!r} of the plug-in {self._entry.name!r} is not what it is to be: {error}",
                fix="update or uninstall its package",
                where=self._entry.value,
            ) from error


def describe(group: str, plugin: Any) -> dict[str, Any]:
    """What a plug-in declares, in the worker that has imported it."""
    return {attribute: plain(getattr(plugin, attribute, None)) for attribute in _DECLARED[group]}


def answer(group: str, plugin: Any, method: str, values: list[Any]) -> Any:
    """What a plug-in answers, in the worker that has imported it."""
    kinds, _ = _ANSWERED[group][method]
    arguments = (
        base64.b64decode(value) if kind is bytes else revive(kind, value)
        for kind, value in zip(kinds, values, strict=True)
    )
    return getattr(plugin, method)(*arguments)


def release() -> None:
    """End the workers, and forget what they answered: at the end of a run, so that the next one sees what is installed
    then."""
    with _lock:
        _answers.clear()
        _end_hosts()


@contextmanager
def ended() -> Iterator[None]:
    """No worker of a plug-in's lives on meanwhile, for a measurement. Its code could compute beside what is timed: only
    those that are measured are watched for that, and to the rest of the measurement it is a part of the stage. What was
    answered stays known; who asks something new is given a worker for that question alone. May be entered by several
    threads."""
    global _measurements
    with _lock:
        _measurements += 1
        _end_hosts()
    try:
        yield
    finally:
        with _lock:
            _measurements -= 1


@dataclass
class _Host:
    """One distribution's worker."""

    worker: Worker
    stack: ExitStack


_hosts: dict[str, _Host] = {}
_answers: defaultdict[str, dict[str, Any]] = defaultdict(dict)  # by distribution
_measurements = 0
_lock = threading.RLock()


def _ask(entry: EntryPoint, engine: Callable[[], Engine], function: str, /, **arguments: Any) -> Any:
    question = canonical_json([function, arguments])
    with _lock:
        answers = _answers[_origin(entry)]
        if question not in answers:
            host = _host(entry, engine)
            try:
                answers[question] = host.worker.call(function, **arguments)
            except BaseException as error:
                # It may be gone; the next question starts it anew.
                _hosts.pop(_origin(entry), None)
                host.stack.close()
                if isinstance(error, (WorkerError, InternalError)):  # no job's, and no fault of ours
                    raise _unusable(entry, error) from error
                raise
            if _measurements:
                _end_hosts()
        return answers[question]


def _unusable(entry: EntryPoint, error: CompileStageError) -> UsageError:
    return UsageError(
        f"the plug-in {entry.name!r} of {_origin(entry)} can't be used: {error.problem}",
        fix="update or uninstall that package, install what it needs, or leave the plug-in out of the policy",
        where=entry.value,
    )


def _end_hosts() -> None:
    hosts = list(_hosts.values())
    _hosts.clear()
    for host in hosts:
        host.stack.close()


def _host(entry: EntryPoint, engine: Callable[[], Engine]) -> _Host:
    origin = _origin(entry)
    if origin not in _hosts:
        with ExitStack() as starting:
            runner = engine()
            starting.callback(runner.close)
            worker = starting.enter_context(runner.worker(f"plug-ins of {origin}", _LIMITS))
            _hosts[origin] = _Host(worker, starting.pop_all())
    return _hosts[origin]


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def _as_text(content: bytes) -> str:
    if len(content) > _MAX_BYTES:
        raise UsageError(f"{len(content)} bytes are more than a plug-in is asked about")
    return base64.b64encode(content).decode()
