"""Making and removing the isolated environments of backends and sources.

An environment is made from a lock file, which pins every distribution of it, and in place: a virtual environment can't
be moved. It counts once its last file is written (`core.toolchains.READY`), so one whose making was interrupted is no
environment, and is made anew.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.machinery
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from compile_stage.core import plugins, toolchains
from compile_stage.core.digest import digest_file, tree_size
from compile_stage.core.errors import MissingDependencyError, StorageError, UsageError
from compile_stage.core.records import record
from compile_stage.core.spelling import did_you_mean
from compile_stage.core.toolchains import Toolchain

Say = Callable[[str], None]

_LIST = """\
import importlib.metadata, json
print(json.dumps({d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}))
"""
_IMPORT = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
_REPORTED_LINES = 12


@record
class State:
    """What there is of one toolchain.

    Attributes:
        here: The packages of all that would run in it are in this environment, where they then run.
        toolchain: The environment, where they run otherwise; None when it is not made.
        size_bytes: Of that on disk.
        lock: The lock file in force.
    """

    name: str
    here: bool
    toolchain: Toolchain | None
    size_bytes: int
    lock: str


def states() -> tuple[State, ...]:
    """Every toolchain that a backend or source can run in."""
    listed = []
    for name, users in plugins.users_of_toolchains().items():
        lock = _lock(name)
        home = toolchains.find(name, lock)
        listed.append(
            State(
                name=name,
                here=all(map(plugins.importable, users)),
                toolchain=home,
                size_bytes=tree_size(Path(home.folder)) if home else 0,
                lock=str(lock),
            )
        )
    return tuple(listed)


def install(name: str, say: Say = lambda _: None) -> Toolchain:
    """The environment of that name, or of the source of that name, made if it is not there.

    Raises:
        UsageError: There is no such toolchain.
        MissingDependencyError: It can't be made: a package can't be had or imported.
        StorageError: Where it would lie can't be written, or is full.
    """
    name = _name(name)
    lock = _lock(name)
    folder = toolchains.place(name, lock)
    with _alone(folder, name, say) as held:
        if (existing := toolchains.find(name, lock)) is not None:
            say(f"{name} is there: {existing.folder}")
            return existing
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _make(name, lock, folder, say, held)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    installed = toolchains.find(name, lock)
    if installed is None:
        raise MissingDependencyError(f"the toolchain {name} was changed while it was made", where=str(folder))
    say(f"{name} is there: {installed.folder}")
    return installed


def remove(name: str) -> tuple[str, ...]:
    """Delete every environment of that name, of former locks too. Returns their folders."""
    name = _name(name)
    gone = []
    ours = re.compile(rf"{re.escape(name)}-[0-9a-f]{{12}}")  # another backend's name may begin with this one's
    for folder in sorted(toolchains.toolchains_root().glob(f"{name}-*")):
        if folder.is_dir() and ours.fullmatch(folder.name):
            with FileLock(f"{folder}.lock"):
                (folder / toolchains.READY).unlink(missing_ok=True)  # first, so that no run starts in a half of it
                shutil.rmtree(folder)
            gone.append(str(folder))
            Path(f"{folder}.lock").unlink(missing_ok=True)
    return tuple(gone)


def lock(name: str, out: Path | None = None, say: Say = lambda _: None) -> Path:
    """Pin the newest distributions that the toolchain's requirements allow, as the lock file `out`; by default the
    user's own, which is in force from then on.

    Raises:
        UsageError: There is no such toolchain.
        MissingDependencyError: The requirements can't be resolved.
    """
    name = _name(name, made=False)
    wanted = plugins.shipped_lock(name)  # which need not be there: this is how a backend's first one is made
    wanted = wanted.with_suffix(".in") if wanted is not None else None
    if wanted is None or not wanted.is_file():
        raise UsageError(f"{name} ships no {name}.in with its requirements, so there is nothing to pin from")
    with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
        report = Path(scratch) / "report.json"
        say(f"resolving {wanted.name}")
        options = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report), "-r", str(wanted)]
        _run([sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *options], f"the toolchain {name}")
        chosen = json.loads(report.read_text(encoding="utf-8"))["install"]
    lines = sorted(f"{one['metadata']['name']}=={one['metadata']['version']}" for one in chosen)
    target = out or toolchains.users_lock(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    part.write_text("\n".join([f"# Made by `compile-stage toolchain lock {name}`.", *lines]) + "\n", encoding="utf-8")
    part.replace(target)
    return target


# --------------------------------------------------------------------------------------------------------------- within


def _name(asked: str, *, made: bool = True) -> str:
    """The toolchain that is meant: a source's flavor stands for the one that it runs in. Raises UsageError for a name
    that is none.

    Args:
        made: There must be a lock to make it from.
    """
    users = plugins.users_of_toolchains()
    if asked in users:
        return asked
    if asked in plugins.names("sources") and (name := plugins.load("sources", asked).capabilities.toolchain):
        return name
    have = f"those that have one: {', '.join(users) or 'none'}"
    if asked not in plugins.names("backends"):
        near = did_you_mean(asked, list(users))
        problem = f"no backend or source called {asked!r} has a toolchain of its own"
        raise UsageError(problem, fix=f"did you mean {near}?" if near else have)
    if made:
        raise UsageError(f"the backend {asked} has no toolchain of its own", fix=have)
    return asked


def _lock(name: str) -> Path:
    lock = plugins.lock_of(name)
    if lock is None:
        raise UsageError(f"the toolchain {name} has no lock file any more", fix="reinstall compile-stage")
    return lock


@contextlib.contextmanager
def _alone(folder: Path, name: str, say: Say) -> Iterator[int]:
    """While nobody else makes the environment. Yields the lock's descriptor: who inherits it holds the lock too, so
    that an installer whose parent was killed is waited for, and does not write into what is made anew."""
    descriptors: list[int] = []
    lock = FileLock(f"{folder}.lock", on_acquired=descriptors.append)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"another process makes {folder}; waiting for it")
            lock.acquire()
    except OSError as error:
        raise StorageError(
            f"the toolchain {name} can't be made in {folder.parent}: {error.strerror or error}",
            fix="name a folder that can be written with COMPILE_STAGE_TOOLCHAINS",
        ) from error
    try:
        yield descriptors[-1]
    finally:
        lock.release()


def _make(name: str, lock: Path, folder: Path, say: Say, held: int) -> None:
    say(f"making {folder}")
    uv = shutil.which("uv")
    # uv does not see every index that pip is set up for; then pip has the last word.
    if uv is None or not _tried(_with_uv(uv, lock, folder), say, held):
        shutil.rmtree(folder, ignore_errors=True)
        for command in _with_pip(lock, folder):
            _run(command, f"the toolchain {name}", held)
    python = str(toolchains.interpreter_in(folder))
    say("importing what it holds")
    needed = [module for user in plugins.users_of_toolchains()[name] for module in user.requires]
    _run([python, "-P", "-c", _IMPORT, *dict.fromkeys(needed)], f"the toolchain {name}")
    packages = json.loads(_run([python, "-P", "-c", _LIST], f"the toolchain {name}"))
    ready = {"lock": digest_file(lock), "packages": dict(sorted(packages.items()))}
    part = folder / f"{toolchains.READY}.part"
    part.write_text(json.dumps(ready, indent=2) + "\n", encoding="utf-8")
    part.rename(folder / toolchains.READY)


def _with_pip(lock: Path, folder: Path) -> list[list[str]]:
    python = str(toolchains.interpreter_in(folder))
    options = ["install", "--disable-pip-version-check", "--no-input", "--quiet", "--no-deps", "-r", str(lock)]
    make = [sys.executable, "-m", "venv"]
    # Not importlib.util.find_spec: asked for pip, setuptools takes distutils from what is imported, and warns of it.
    if importlib.machinery.PathFinder.find_spec("pip") is None:
        return [[*make, str(folder)], [python, "-m", "pip", *options]]
    # By the pip that is here, so that the environment holds what the lock says and nothing of this Python's own.
    return [[*make, "--without-pip", str(folder)], [sys.executable, "-m", "pip", "--python", python, *options]]


def _with_uv(uv: str, lock: Path, folder: Path) -> list[list[str]]:
    python = str(toolchains.interpreter_in(folder))
    return [
        [uv, "venv", "--quiet", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "--quiet", "--no-deps", "--python", python, "-r", str(lock)],
    ]


def _tried(commands: Sequence[Sequence[str]], say: Say, held: int) -> bool:
    try:
        for command in commands:
            _run(command, "uv", held)
    except MissingDependencyError:
        say("uv can't; going on with pip")
        return False
    return True


def _ended(
    command: Sequence[str], environment: Mapping[str, str], kept: Sequence[int]
) -> subprocess.CompletedProcess[str]:
    """Run it to its end. Where this process is interrupted meanwhile, all that the command started ends too: pip
    installs in a process of its own, which would go on, and write into what is made anew."""
    with subprocess.Popen(  # noqa: S603 - our own commands
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=environment,
        pass_fds=kept,
        start_new_session=True,
    ) as process:
        try:
            said, complained = process.communicate()
        except BaseException:
            if os.name == "posix":
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, said, complained)


def _run(command: Sequence[str], what: str, held: int = -1) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    kept = (held,) if held >= 0 and os.name == "posix" else ()
    try:
        done = _ended(command, environment, kept)
    except OSError as error:
        raise MissingDependencyError(f"{what}: {command[0]} can't be run: {error.strerror}") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        relevant = [line for line in lines if not line.startswith("WARNING: ")] or lines  # they may hide the error
        report = "\n".join(relevant[-_REPORTED_LINES:])
        if os.strerror(errno.ENOSPC) in report:
            raise StorageError(
                f"{what} can't be made, since the disk is full:\n{report}",
                fix="make room, or name a folder on another disk with COMPILE_STAGE_TOOLCHAINS (or TMPDIR, where pip "
                "unpacks)",
            )
        raise MissingDependencyError(
            f"{what} can't be made:\n{report}",
            fix="see what pip says above; a proxy or index is set in pip's own configuration",
        )
    return done.stdout
