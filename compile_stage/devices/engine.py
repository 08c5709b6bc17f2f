"""A device as an engine: its workers are asked what workers here are asked, and files go to and fro.

So what validates, judges and measures is the same code as for this machine; only where the model runs differs. Whatever
a step asks of an artifact of the version, the version's own loader opens there.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from compile_stage.core.capabilities import Capabilities
from compile_stage.core.digest import list_tree, plain, revive
from compile_stage.core.errors import DeviceError, IntegrityError, SourceError, UsageError
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.ports import Confinement, MeteredCall, WorkerLimits, WorkerMemory, WorkerUsage
from compile_stage.core.sample_files import inputs_alone, write_inputs_alone
from compile_stage.devices.agent import HERE
from compile_stage.devices.link import ANSWER_S, Link
from compile_stage.engine.protocol import revive_error
from compile_stage.measure.disturbance import Usage
from compile_stage.serving.manifest import read_manifest

_ALONE_S = 3600.0  # as long as this another session may measure
_LOOK_EVERY_S = 2.0


class DeviceEngine:
    """Starts workers on a device.

    Args:
        link: An open session.
        version: The model directory of the version that is validated.
        original: `module:class` of the source, where the original may be run there.
        say: Hears why it waits.
    """

    name: ClassVar[str] = "device"
    requires: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, link: Link, version: Path, *, original: str, say: Callable[[str], object]) -> None:
        self.link, self.original = link, original
        self._say = say
        self._numbers = itertools.count(1)
        self._sent: dict[str, str] = {}
        self._version = version
        self._artifact = read_manifest(version)["artifact"]["digest"]
        self._confinement = Confinement()

    @contextmanager
    def worker(self, name: str, limits: WorkerLimits) -> Iterator[RemoteWorker]:
        """Start a worker there; leaving the context ends it."""
        worker = RemoteWorker(self, f"worker-{next(self._numbers)}", limits)
        found = self.link.request("start", worker=worker.name, threads=limits.cpus, within_s=2 * ANSWER_S)
        self._confinement = revive(Confinement, found)
        try:
            yield worker
        finally:
            with contextlib.suppress(DeviceError):  # what lost the device has said so
                self.link.request("stop", worker=worker.name)

    def max_parallel(self, memory_bytes: int) -> int:
        """One after the other: a device is small."""
        return 1

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Have the device alone among sessions of ours."""
        began, said = time.monotonic(), False
        while not self.link.request("alone"):
            if time.monotonic() - began > _ALONE_S:
                raise DeviceError("another session has measured there for an hour", where=self.link.host.name)
            if not said:
                self._say("waiting: another session measures on the device")
            said = True
            time.sleep(_LOOK_EVERY_S)
        try:
            yield
        finally:
            with contextlib.suppress(DeviceError):
                self.link.request("together")

    def machine_usage(self) -> Usage:
        """What everybody used of the device so far, and what our processes did (`measure.disturbance`)."""
        usage: Usage = revive(Usage, self.link.request("machine"))
        return usage

    def confinement(self) -> Confinement:
        """Of the last worker there."""
        return self._confinement

    def close(self) -> None:
        """The session ends with its context (`open_link`)."""

    def send_folder(self, path: str) -> str:
        """What the agent calls a folder of here, which is sent when it is first named; of samples the inputs alone."""
        if path not in self._sent:
            name = f"in/{next(self._numbers)}"
            folder = Path(path)
            inputs = inputs_alone(folder)
            for file in inputs[0] if inputs is not None else list_tree(folder):
                if "__pycache__" not in file:  # another Python's, and it would be refused there
                    self.link.put(folder / file, f"{name}/{file}")
            if inputs is not None:
                with temporary_folder("index") as index:
                    write_inputs_alone(inputs[1], index)
                    for file in list_tree(index):
                        self.link.put(index / file, f"{name}/{file}")
            self._sent[path] = HERE + name
        return self._sent[path]

    def place_of(self, artifact: Mapping[str, Any]) -> str:
        """The version's folder there. Raises UsageError for another artifact than the version's."""
        if artifact["digest"] != self._artifact:
            raise UsageError("only the version's own artifact is opened on a device")
        return self.send_folder(str(self._version))

    def place_of_served(self, model: Mapping[str, Any]) -> str:
        """Of a model directory; of one with the version's artifact the version, so that its own loader opens it."""
        artifact = read_manifest(model["path"])["artifact"]
        return self.place_of(artifact) if artifact["digest"] == self._artifact else self.send_folder(model["path"])


class RemoteWorker:
    """One worker on a device; made by `DeviceEngine.worker`."""

    def __init__(self, engine: DeviceEngine, name: str, limits: WorkerLimits) -> None:
        self.name = name
        self._engine, self._limits = engine, limits
        self._outputs = itertools.count(1)

    def call(self, function: str, /, **arguments: Any) -> Any:
        """As `core.ports.Worker.call`."""
        return self.metered(function, **arguments).value

    def metered(self, function: str, /, **arguments: Any) -> MeteredCall:
        """As `core.ports.Worker.metered`: the agent's clock and the device's kernel say what it took."""
        function, given = self._translated(function, plain(arguments))
        into = given.get("into")
        there = f"work/{self.name}/out-{next(self._outputs)}"
        if into:
            given["into"] = HERE + there
        timeout_s = self._limits.timeout_s
        asked = {"worker": self.name, "function": function, "arguments": given, "timeout_s": timeout_s}
        found = self._engine.link.request("call", within_s=timeout_s + ANSWER_S, **asked)
        if "error" in found:
            raise revive_error(found["error"])
        value = found["value"]
        if into:
            self._engine.link.fetch(there, Path(into))
            self._engine.link.request("remove", path=there)
            value = _moved(value, f"{HERE}{there}/", Path(into))
        before, after = (revive(WorkerUsage, found[key]) for key in ("before", "after"))
        return MeteredCall(value=value, wall_s=float(found["wall_s"]), before=before, after=after)

    def memory(self) -> WorkerMemory:
        """As `core.ports.Worker.memory`."""
        memory: WorkerMemory = revive(WorkerMemory, self._engine.link.request("memory", worker=self.name))
        return memory

    def _translated(self, function: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The function on the device and its arguments, with what lies in folders here sent there."""
        engine = self._engine
        if function == "open_artifact":
            return "open_published", {"model": {"path": engine.place_of(given["artifact"])}}
        if function == "open_served":
            return function, {"model": {"path": engine.place_of_served(given["model"])}}
        if function == "open_source":
            source = {**given["source"], "path": engine.send_folder(given["source"]["path"])}
            return "open_original", {"plugin": engine.original, "source": source, "target": given["target"]}
        if function == "predict_whole":
            raise SourceError("the original's own predict() is not run on a device")
        return function, {name: self._sent(value) for name, value in given.items()}

    def _sent(self, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("path"), str):
            sent = {**value, "path": self._engine.send_folder(value["path"])}
            return {**sent, "has_labels": False} if "has_labels" in sent else sent
        return value


def _moved(value: Any, prefix: str, into: Path) -> Any:
    """An answer with the paths of the files as they are here now. Of names of files it may hold no others: what is read
    here is what the device sent."""
    if isinstance(value, Mapping):
        return {key: _file(item, prefix, into) for key, item in value.items()}
    if isinstance(value, list):
        return [_moved(item, prefix, into) for item in value]
    return value


def _file(value: Any, prefix: str, into: Path) -> Any:
    if not isinstance(value, str):
        return _moved(value, prefix, into)
    if value.startswith(prefix) and ".." not in value.split("/"):
        return str(into / value.removeprefix(prefix))
    if value.startswith(HERE) or Path(value).is_absolute():
        raise IntegrityError(f"the device answers with {value!r}, which is none of the files that it sent")
    return value
