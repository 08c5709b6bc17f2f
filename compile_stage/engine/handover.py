"""Files on their way to a worker and back, where a worker can read and write nothing but what it is handed.

A call names files by their paths, in arguments and in answers. What a call reads is linked (or, where it is another
owner's or lies on another disk, copied) into a folder that the worker can only read, and the call is given that path.
What it writes (`into`) it writes into a folder of its own, from where the files are copied to where the stage wants
them: a copy, since a worker may keep a file open and write into it after the answer. Answers and errors name the
stage's paths again.

So a worker never sees what its calls do not name: other candidates, reference answers, labels, the cache.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from compile_stage.core import tuning_records
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.errors import InternalError, WorkerError
from compile_stage.core.leftovers import remove_leftovers, temporary_folder
from compile_stage.core.sample_files import inputs_alone, write_inputs_alone

_INPUTS = frozenset(("path", "dataset", "reference", "candidate", "graph"))
_OUTPUT = "into"
# What plug-ins and users may write in: a path in it is not one that the stage hands over.
_OPAQUE = frozenset(("options", "facts", "executed", "toolchain", "notes", "kept"))

_COPY_BYTES = 1 << 20

_Signature = tuple[tuple[str, int, int, int], ...]


class Handover:
    """The files of one worker.

    Attributes:
        inputs: Folders that the worker may only read.
        outputs: Folders that the worker may write to.
        cache: What the worker sees as the cache folder; it holds tuning records.
    """

    def __init__(self, folder: Path, readable: Sequence[str]) -> None:
        """Args:
        folder: The worker's own.
        readable: What it may read in place.
        """
        root = cache_root()
        nearest = next(place for place in (root, *root.parents) if place.exists())
        self._stack = ExitStack()
        # Below the cache too: a link can't cross from one disk to another.
        self._homes = [folder / "files"]
        if nearest.stat().st_dev != folder.stat().st_dev:
            (root / "workers").mkdir(parents=True, exist_ok=True)
            remove_leftovers(root / "workers")
            self._homes.append(self._stack.enter_context(temporary_folder("worker", root / "workers")))
        for home in self._homes:
            for part in ("in", "out"):
                (home / part).mkdir(parents=True)
        self.inputs = [str(home / "in") for home in self._homes]
        self.outputs = [str(home / "out") for home in self._homes]
        self.cache = folder / "own" / "cache"
        self.cache.mkdir(parents=True)
        self._readable = [Path(path).resolve() for path in readable]
        self._staged: dict[Path, tuple[Path, _Signature]] = {}
        self._names: dict[str, str] = {}  # a worker's path → the stage's
        self._expected: list[tuple[Path, Path]] = []  # of the call under way: the worker's folder, the stage's
        self._number = 0

    @property
    def folders(self) -> list[str]:
        """What is to be removed when the worker ends, beside its own folder."""
        return [str(home) for home in self._homes[1:]]

    def remove(self) -> None:
        """Delete these folders."""
        self._stack.close()

    def inward(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call, plain JSON, with the worker's paths."""
        self._expected.clear()
        return {key: self._inward(key, value) for key, value in arguments.items()}

    def outward(self, answer: Any) -> Any:
        """An answer with the stage's paths, after what the call wrote was brought there.

        Raises:
            WorkerError: It wrote a link that leads elsewhere, or something that is no file; or it names a file outside
                of the folder that it was given.
        """
        for source, destination in self._expected:
            _bring(source, destination)
        return self._outward("", answer)

    def bring_records(self) -> None:
        """Copy this machine's tuning records to where the worker looks for them."""
        for path, name in _records(cache_root()):
            here = self.cache / name
            if not here.exists():
                here.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, here)

    def take_records(self) -> None:
        """Keep the tuning records that the worker wrote. Each must have the content that it is named after."""
        for path, name in _records(self.cache):
            place = cache_root() / name
            if not place.exists() and (content := _record_content(path)) is not None:
                with contextlib.suppress(InternalError):  # no key of tuning records
                    folder = tuning_records.folder_of(name.parent.relative_to("tuning").as_posix())
                    tuning_records.write(folder, path.name, content)

    def _inward(self, key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: item if name in _OPAQUE else self._inward(name, item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._inward("", item) for item in value]
        if isinstance(value, str) and Path(value).is_absolute():
            if key == _OUTPUT:
                return self._output(Path(value))
            if key in _INPUTS and Path(value).exists():
                return self._input(Path(value))
        return value

    def _outward(self, key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: self._outward(name, item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._outward(key, item) for item in value]
        if not isinstance(value, str):
            return value
        for theirs, ours in self._names.items():
            if theirs in value:
                if key == "path" and ".." in Path(value).parts:
                    raise WorkerError("exception", f"the answer names a file outside of its folder: {value}")
                value = value.replace(theirs, ours)
        return value

    def _input(self, path: Path) -> str:
        """Where the worker finds a file or folder; of a file, what lies beside it too: external data does."""
        resolved = path.resolve()
        if any(resolved.is_relative_to(place) for place in self._readable):
            return str(path)
        folder = path if path.is_dir() else path.parent
        signature = tuple(_signature(folder))
        staged = self._staged.get(folder)
        if staged is None or staged[1] != signature:
            staged = self._next("in", folder), signature
            _link_input(folder, staged[0])
            self._staged[folder] = staged
            self._names[str(staged[0])] = str(folder)
        return str(staged[0]) if folder == path else str(staged[0] / path.name)

    def _output(self, path: Path) -> str:
        place = self._next("out", path)
        self._expected.append((place, path))
        self._names[str(place)] = str(path)
        return str(place)

    def _next(self, part: str, near: Path) -> Path:
        """A new folder, on the same disk as `near` if there is one."""
        self._number += 1
        while not near.exists():
            near = near.parent
        device = near.stat().st_dev
        home = next((home for home in self._homes if home.stat().st_dev == device), self._homes[0])
        # The end is fixed, so that no path is the beginning of another.
        place = home / part / f"{self._number}.{part}"
        place.mkdir()
        return place


def _signature(folder: Path) -> Iterator[tuple[str, int, int, int]]:
    for path in sorted(folder.rglob("*")):
        seen = path.lstat()
        yield str(path), seen.st_ino, seen.st_size, seen.st_mtime_ns


def _link_input(source: Path, into: Path) -> None:
    """Link what a call needs of a folder: of samples the inputs and nothing else, such as labels or somebody's
    answers."""
    samples = inputs_alone(source)
    if samples is None:
        _link_tree(source, into)
        return
    files, index = samples
    write_inputs_alone(index, into)
    for file in files:
        (into / file).parent.mkdir(parents=True, exist_ok=True)
        _link(source / file, into / file)


def _link_tree(source: Path, into: Path) -> None:
    """A folder with the same files. Links stay links: one that leads elsewhere leads nowhere for the worker."""
    for entry in os.scandir(source):
        place = into / entry.name
        if entry.is_symlink():
            place.symlink_to(Path(entry.path).readlink())
        elif entry.is_dir():
            place.mkdir()
            _link_tree(Path(entry.path), place)
        elif entry.is_file():
            _link(Path(entry.path), place)


def _link(file: Path, place: Path) -> None:
    if file.stat().st_uid == os.geteuid():
        try:
            os.link(file, place)
        except OSError:  # another disk, or one without links
            pass
        else:
            return
    shutil.copyfile(file, place)


def _bring(source: Path, destination: Path) -> None:
    """Copy what a call wrote to where the stage wants it, and free the space.

    The worker still lives, and may put a link in place of a folder or file at any moment: everything is opened by its
    name in an open folder, and no link is followed.
    """
    folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _bring_folder(folder, destination)
    finally:
        os.close(folder)


def _bring_folder(folder: int, destination: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(folder):
        place = destination / name
        mode = os.lstat(name, dir_fd=folder).st_mode
        if stat.S_ISLNK(mode):
            _bring_link(os.readlink(name, dir_fd=folder), place)
            os.unlink(name, dir_fd=folder)
        elif stat.S_ISDIR(mode):
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            try:
                _bring_folder(inner, place)
            finally:
                os.close(inner)
        else:
            with _open_regular(name, folder) as file:
                place.unlink(missing_ok=True)
                try:
                    with open(place, "xb") as copied:
                        shutil.copyfileobj(file, copied, _COPY_BYTES)
                except OSError as error:  # the kernel names no file that can't be written on
                    error.filename = error.filename or str(place)
                    raise
                place.chmod(stat.S_IMODE(mode) & 0o755)
            os.unlink(name, dir_fd=folder)


def _open_regular(name: str, folder: int) -> BinaryIO:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)  # a pipe would block
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise WorkerError("exception", f"it wrote something that is no file into its folder: {name}")
    return open(descriptor, "rb")


def _bring_link(target: str, place: Path) -> None:
    if Path(target).is_absolute() or ".." in Path(target).parts:
        raise WorkerError("exception", f"it wrote a link that leads out of its folder: {place.name} -> {target}")
    place.unlink(missing_ok=True)
    place.symlink_to(target)


def _records(root: Path) -> Iterator[tuple[Path, Path]]:
    """Every tuning record below a cache folder, and its path in it."""
    for folder, _, names in os.walk(root / "tuning"):
        for name in names:
            path = Path(folder) / name
            yield path, path.relative_to(root)


def _record_content(path: Path) -> bytes | None:
    """The content of a record that a worker wrote; None for what is none."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            with _open_regular(path.name, folder) as file:
                content = file.read(tuning_records.MAX_BYTES + 1)
        finally:
            os.close(folder)
    except (OSError, WorkerError):
        return None
    return content if tuning_records.refuse(path.name, content) is None else None
