"""The folder of policies: read again when a file changes; a broken one is reported and keeps no other from working."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from compile_stage.core.errors import CompileStageError, PolicyError, UsageError
from compile_stage.core.records import Policy, RegisteredVersion
from compile_stage.policy.load import load_policy

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class PolicyFile:
    """One file of the folder.

    Attributes:
        policy: None where it is broken, or only a base that others extend.
        problem: Why it is broken; empty where it is not.
        mistakes: The same, one located line for each mistake, where these are known.
    """

    path: Path
    policy: Policy | None
    problem: str = ""
    mistakes: tuple[str, ...] = ()


@dataclass
class _Read:
    file: PolicyFile
    of: tuple[object, ...] = field(default_factory=tuple)


class PolicyFolder:
    """The policies of a folder, as they are now. Methods may be called from any thread.

    Raises:
        UsageError: There is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError("there is no such folder of policies", where=str(folder), fix="name one with --policies")
        self._folder, self._read, self._lock = folder, dict[Path, _Read](), threading.Lock()

    def files(self) -> list[PolicyFile]:
        """Every policy file, in order of names; those that changed are read again."""
        with self._lock:
            there = sorted(path for path in self._folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
            self._read = {path: self._current(path) for path in there}
            return _without_doubles(read.file for read in self._read.values())

    def meant_for(self, version: RegisteredVersion, flavor: Callable[[], str]) -> list[PolicyFile]:
        """The policies whose `applies_to` takes a version in.

        Args:
            flavor: Gives the version's flavor; asked only where a policy names some.
        """
        return [file for file in self.files() if file.policy is not None and applies(file.policy, version, flavor)]

    def named(self, name: str) -> PolicyFile | None:
        """The file of the policy of that name."""
        return next((file for file in self.files() if file.policy is not None and file.policy.name == name), None)

    def _current(self, path: Path) -> _Read:
        held = self._read.get(path)
        if held is not None and held.of == _state_of(path, held.file.policy):
            return held
        file = _load(path)
        return _Read(file, _state_of(path, file.policy))


def _load(path: Path) -> PolicyFile:
    try:
        policy = load_policy(path, base=True)
    except CompileStageError as error:
        return PolicyFile(path, None, str(error), error.problems if isinstance(error, PolicyError) else ())
    except Exception as error:  # noqa: BLE001 - whatever a file makes of its reader, the others are served
        return PolicyFile(path, None, f"it can't be read: {type(error).__name__}: {error}")
    return PolicyFile(path, policy if policy.targets else None)


def _state_of(path: Path, policy: Policy | None) -> tuple[object, ...]:
    """What changes when a policy may have changed: its files, those that it extends, and the day, by which waivers
    end. Of a broken one nobody knows what it extends, so it is read each time that it is older than a minute."""
    today: date = datetime.now(UTC).date()
    files: Iterable[str | Path] = policy.files if policy is not None else (path,)
    extra = () if policy is not None else (datetime.now(UTC).replace(second=0, microsecond=0),)
    return (today, *extra, *(_stamp(Path(file)) for file in (path, *files)))


def _stamp(file: Path) -> tuple[str, int, int, int]:
    try:
        found = file.stat()
    except OSError:
        return str(file), 0, 0, 0
    return str(file), found.st_mtime_ns, found.st_size, found.st_ino


def _without_doubles(files: Iterable[PolicyFile]) -> list[PolicyFile]:
    """Of two policies with one name the later is broken: a version is compiled once for each name."""
    kept: list[PolicyFile] = []
    names: dict[str, Path] = {}
    for file in files:
        name = file.policy.name if file.policy is not None else ""
        if name in names:
            problem = f"its name {name!r} is that of {names[name].name}; each policy needs its own"
            file = PolicyFile(file.path, None, problem)
        elif name:
            names[name] = file.path
        kept.append(file)
    return kept


def applies(policy: Policy, version: RegisteredVersion, flavor: Callable[[], str]) -> bool:
    """True where a policy's `applies_to` takes a version in. `flavor` as in `meant_for`."""
    rules = policy.applies_to
    named = not rules.names or any(fnmatchcase(version.name, pattern) for pattern in rules.names)
    tagged = all(version.tags.get(key) == value for key, value in rules.tags.items())
    return named and tagged and (not rules.flavors or flavor() in rules.flavors)
