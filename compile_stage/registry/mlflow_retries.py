"""MLflow's calls made again where the network, a gateway or a busy server failed them.

MLflow's own HTTP layer repeats refused connections and answers such as 503. It does not repeat an answer that was cut
off, and it gives up after a few attempts. So calls that change nothing when they are made again are repeated here; and
those that make something are repeated with the whole operation around them, which finds what was made before.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from operator import attrgetter
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from compile_stage.core.error_codes import Code
from compile_stage.core.errors import RegistryError
from compile_stage.core.leftovers import leave_alone
from compile_stage.core.storage import with_causes
from compile_stage.registry.mlflow_stores import store_trouble

P = ParamSpec("P")
R = TypeVar("R")

_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)
_PATIENCE_S = 20.0  # a server that is down is said within a minute; one that restarts is back by then
_LEAST_ATTEMPTS = 3
"""Of an operation, also where the first took longer than the patience: it may have failed in its last call."""
_REPEATED = "The call was repeated, and failed each time."
_SAME_WHEN_REPEATED = ("get_", "search_", "list_", "set_", "log_", "finalize_", "update_", "download_")
_TROUBLE = (
    "Max retries exceeded",
    "failed with exception",
    "Connection broken",
    "IncompleteRead",
    "occurred while",
    "not in a valid JSON format",  # cut off where the server gave no length
)
_BOTH_WROTE = ("IntegrityError", "UniqueViolation")  # of SQLAlchemy and psycopg2, which MLflow tells as BAD_REQUEST
_ANSWER_S = 150.0  # for a whole answer; a server that is alive answers within seconds, a loaded one within a minute
_TRANSFER_S = 300.0  # for files, beside what follows from their size
_FILE_S = 10.0  # for each file that is there: a server may take as long for a small one as for a large one
_SLOWEST_BYTES_PER_S = 50_000
_FOLDER_OF = {"log_artifact": 1, "log_artifacts": 1, "log_model_artifacts": 1, "download_artifacts": 2}
"""Calls that move files → which of their arguments names the files of this machine."""
_NAMED_BY = {
    "create_logged_model": attrgetter("model_id"),
    "create_model_version": attrgetter("version"),
    "create_registered_model": attrgetter("name"),
    "create_run": attrgetter("info.run_id"),
    "get_experiment_by_name": attrgetter("experiment_id"),
    "get_logged_model": attrgetter("model_id"),
    "get_model_version": attrgetter("version"),
    "get_registered_model": attrgetter("name"),
    "get_run": attrgetter("info.run_id"),
}
"""Calls that answer one thing → what it is called. MLflow reads an empty body as a thing without name, aliases and
tags."""


class UnreachableError(RegistryError):
    """The network, a gateway or the server failed the call: the same call may succeed in a moment."""

    code = Code.REGISTRY_UNREACHABLE


class NoAnswerError(UnreachableError):
    """A call was given up after its time."""


class RetryingClient:
    """An `MlflowClient` whose repeatable calls are repeated, and whose calls end.

    Args:
        bounded: The client speaks to a server: a call is given up after `_ANSWER_S`, one that moves files after what
            `transfer_limit` allows. MLflow's own time-out is for the pause between two bytes, and starts anew with each
            of its attempts.
    """

    def __init__(self, client: Any, *, bounded: bool = False) -> None:
        self._client, self._bounded = client, bounded

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name in _NAMED_BY:
            call = partial(_demand_named, name, call)
        if self._bounded:
            call = partial(_bounded, _FOLDER_OF.get(name), call)
        return partial(repeated_call, call) if name.startswith(_SAME_WHEN_REPEATED) else call


def answer_limit_s() -> float:
    """How long a call that moves no files may take, for `within`."""
    return _ANSWER_S


def _bounded(folder_at: int | None, call: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    limit_s = transfer_limit(Path(args[folder_at])) if folder_at is not None else answer_limit_s
    return within(partial(call, *args, **kwargs), limit_s)


def _demand_named(name: str, call: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    answer = call(*args, **kwargs)
    if answer is not None and not _NAMED_BY[name](answer):
        raise UnreachableError(
            f"the server's answer to {name} is empty",
            fix="look at what is in front of the server (a proxy, a gateway), then run again",
        )
    return answer


def transfer_limit(files: Path) -> Callable[[], float]:
    """How long a transfer may take in seconds, for `within`: it grows with what `files`, a file or a folder, holds at
    the time. A download that moves on so has more time than one that does not."""

    def limit_s() -> float:
        sizes: list[int] = []
        for path in (files, *files.rglob("*")):
            with suppress(OSError):  # renamed meanwhile
                sizes += [path.stat().st_size] if path.is_file() else []
        return _TRANSFER_S + len(sizes) * _FILE_S + sum(sizes) / _SLOWEST_BYTES_PER_S

    return limit_s


def within(call: Callable[[], R], limit_s: Callable[[], float]) -> R:
    """`call()` in a thread of its own, which is left to itself when the time is over.

    Args:
        limit_s: Seconds; asked anew every second.

    Raises:
        NoAnswerError: It was left. What it asked for may still happen.
    """
    answers: list[R] = []
    errors: list[BaseException] = []

    def answer() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is waited for
            errors.append(error)

    thread = threading.Thread(target=answer, daemon=True, name="registry call")
    started = time.monotonic()
    thread.start()
    try:
        while thread.is_alive() and time.monotonic() - started < limit_s():
            thread.join(timeout=1.0)
    finally:  # also when Ctrl-C ends the waiting
        if thread.is_alive():
            leave_alone(thread)
    if errors:
        raise errors[0]
    if not answers:
        raise NoAnswerError(
            f"the server gave no whole answer within {limit_s():.0f} s",
            fix="look at the server and at what is in front of it, then run again; what is finished is kept",
        )
    return answers[0]


def repeated_call(call: Callable[..., R], *args: Any, patience_s: float = _PATIENCE_S, **kwargs: Any) -> R:
    """Make a call of MLflow that changes nothing when it is made again, until the network lets it through.

    Args:
        patience_s: No further attempt is begun after it.
    """
    return _repeated(partial(call, *args, **kwargs), failed_on_the_way, patience_s)


def repeatable(operation: Callable[P, R]) -> Callable[P, R]:
    """Decorate an operation of the registry that finds what an earlier attempt left: it is repeated as a whole."""

    @wraps(operation)
    def repeated(*args: P.args, **kwargs: P.kwargs) -> R:
        return _repeated(
            partial(operation, *args, **kwargs),
            lambda error: isinstance(error, UnreachableError),
            _PATIENCE_S,
            least=_LEAST_ATTEMPTS,
        )

    return repeated


def failed_on_the_way(error: Exception) -> bool:
    """True for an error of the network, a gateway (500, 502, 503, 504, a 404 of its own), a store of files or a server
    that was too busy,
    and where two clients set a tag for the first time at once: MLflow inserts both, and the database refuses the later.
    False where the registry itself answered."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, UnreachableError | json.JSONDecodeError):  # given up, or cut off
        return True
    if (store := store_trouble(error)) is not None:
        return not store.refused
    if not isinstance(error, MlflowException):
        return refused_with(error) is None and type(error).__module__.partition(".")[0] in ("requests", "urllib3")
    if error.error_code == "TEMPORARILY_UNAVAILABLE" or is_foreign_404(error):
        return True
    if any(word in str(error) for word in _BOTH_WROTE):
        return True
    return error.error_code == "INTERNAL_ERROR" and any(word in str(error) for word in _TROUBLE)


def refused_with(error: Exception) -> int | None:
    """The status that a file's upload or download was refused with for good; None for all else."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if status in (401, 403, 413) else None


def is_foreign_404(error: Exception) -> bool:
    """True for a 404 that is not MLflow's: of a gateway that has no server behind it at the moment, or of a server that
    has MLflow under another path. MLflow itself says RESOURCE_DOES_NOT_EXIST of what it lacks."""
    return getattr(error, "error_code", None) == "ENDPOINT_NOT_FOUND"


def _repeated(call: Callable[[], R], may_pass: Callable[[Exception], bool], patience_s: float, *, least: int = 1) -> R:
    """Args: `least`: So many attempts may be made whatever time they take, as long as the server answers, and unless
    the call that failed was itself repeated for as long."""
    ends = time.monotonic() + patience_s
    for attempt, pause_s in enumerate((*_PAUSES_S, None), start=1):
        try:
            return call()
        except Exception as error:
            is_last = attempt >= least or isinstance(error, NoAnswerError) or _was_repeated(error)
            if not may_pass(error):
                raise
            if pause_s is None or (is_last and time.monotonic() > ends):
                error.add_note(_REPEATED)
                raise
        time.sleep(pause_s * (1 + secrets.randbelow(100) / 100))  # so that those who met do not meet again
    raise AssertionError


def _was_repeated(error: Exception) -> bool:
    """True where a call within the failed one was repeated in vain until its patience was over: a store of files that
    is down would be asked for three times that long, and each of those with its client's own attempts."""
    return any(_REPEATED in getattr(one, "__notes__", ()) for one in with_causes(error))
