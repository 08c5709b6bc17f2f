"""Jobs on the nodes of a Ray cluster: each a process there that runs the stage, as on one machine.

A job that loses its node is done on another by the pool; where three were lost over it, the fleet counts one loss. When
the fleet's process is killed, Ray ends what it had begun, and the next process begins it again: what is in the cache by
then is not done twice, and a version that is published is found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from compile_stage.cluster.nodes import Needs, Node, describe_here
from compile_stage.cluster.pool import Pool
from compile_stage.cluster.remote import NodeSide
from compile_stage.core.attempt import EXIT_FILE, LOG_FILE
from compile_stage.core.environment import hardware
from compile_stage.core.errors import CompileStageError, UsageError
from compile_stage.fleet.driving import Ended, Work
from compile_stage.fleet.journal import JobRow
from compile_stage.fleet.local import LocalExecutor, ended_in
from compile_stage.fleet.scheduler import Lease

_CPUS = 2  # of a job: its process, and the worker that compiles or measures
_LOG_TAIL = 20_000  # characters


class RayExecutor(LocalExecutor):
    """Nodes of a Ray cluster.

    Args:
        places: So many jobs at once; None: one for every two CPUs of each node.
        address: Of the cluster; empty for `$RAY_ADDRESS`, or the one on this machine.
        like_here: Only nodes with this machine's hardware, whose backends have this machine's packages: what they find
            holds here.

    Raises:
        UsageError: No cluster can be reached, a node has another version of compile-stage, or none is like this
            machine, or one of its hardware has other packages.
    """

    def __init__(
        self,
        places: int | None,
        folder: Callable[[Lease], Path],
        work: Work,
        address: str = "",
        *,
        like_here: bool = False,
    ) -> None:
        if address:
            os.environ["RAY_ADDRESS"] = address
        self._pool = Pool.connect()
        self._needs = Needs(cpus=_CPUS, hardware={"fingerprint": hardware().fingerprint} if like_here else {})
        try:
            nodes = self._pool.find(self._needs)
            if like_here:
                _demand_same_packages(nodes)
        except CompileStageError:
            self._pool.close()
            raise
        super().__init__(places or sum(max(1, node.cpus // _CPUS) for node in nodes if node.cpus), folder, work)

    def has(self, wanted: Mapping[str, str]) -> bool:
        """Whether a node has what a policy's `hardware` names."""
        needs = replace(self._needs, hardware=wanted)
        return any(needs.refuse(node) is None for node in self._pool.nodes())

    def start(self, lease: Lease, row: JobRow) -> None:
        self._taken.add(lease)
        folder = self._folder(lease)
        folder.mkdir(parents=True, exist_ok=True)
        command = self._work.command(row, folder / "result")[1:]  # without the interpreter, which is the node's own
        arguments = {"folder": str(folder), "command": command}
        future = self._pool.submit(f"{__name__}:attempt", arguments, self._needs_of(row), name=str(row.id))
        future.add_done_callback(partial(self._done, lease, folder, time.monotonic()))

    def _needs_of(self, row: JobRow) -> Needs:
        """With the hardware that the job is for, so that it is proven and measured there; where no node has it, any
        node compiles what is validated later."""
        wanted = self._work.hardware(row)
        if not wanted:
            return self._needs
        try:
            return replace(self._needs, hardware=wanted) if self.has(wanted) else self._needs
        except CompileStageError:  # whoever places it says what is wrong with the nodes
            return self._needs

    def _done(self, lease: Lease, folder: Path, began: float, future: Future[Any]) -> None:
        try:
            left = future.result()
            _bring(left, folder)
        except CompileStageError as error:
            self._events.put(Ended(lease, None, time.monotonic() - began, error.problem))
        except Exception as error:  # noqa: BLE001 - whatever Ray or a disk makes of one job, the others go on
            self._events.put(Ended(lease, None, time.monotonic() - began, f"{type(error).__name__}: {error}"))
        else:
            self._events.put(ended_in(folder, lease, began, left["node"]))

    def interrupt(self) -> None:
        threading.Thread(target=self._pool.close, daemon=True).start()

    def close(self) -> None:
        """Leave the cluster."""
        self._pool.close()


def _demand_same_packages(nodes: Iterable[Node]) -> None:
    ours = describe_here()["backends"]
    for node in nodes:
        differ = sorted(name for name in {*ours, *node.backends} if ours.get(name) != node.backends.get(name))
        if differ:
            versions = ", ".join(
                f"{name} {node.backends.get(name, 'missing')} there, {ours.get(name, 'missing')} here"
                for name in differ
            )
            raise UsageError(
                f"node {node.name} has this machine's hardware and other packages: {versions}",
                fix="install the same there, or leave out --engine ray",
            )


def attempt(told: NodeSide, folder: str, command: list[str]) -> dict[str, Any]:
    """The node's side: run the stage there, unless an earlier call of this attempt has; returns what the driver needs
    of the files that it left, where the folder is not on a disk that both have."""
    import platform

    del told
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    wrapper = [sys.executable, "-m", "compile_stage.fleet.followed", str(os.getpid()), folder, sys.executable, *command]
    # A session of its own: Ray's end of this process is noticed, and passed on in order.
    subprocess.run(wrapper, stdin=subprocess.DEVNULL, start_new_session=True, check=False)  # noqa: S603
    files = {name: _text(where / name) for name in (EXIT_FILE, LOG_FILE, "result/result.json")}
    return {"node": platform.node(), "files": {name: text for name, text in files.items() if text is not None}}


def _text(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text[-_LOG_TAIL:] if path.name == LOG_FILE else text


def _bring(left: dict[str, Any], folder: Path) -> None:
    """Write down what came from a disk that this machine does not see. The exit comes last: with it, all is here."""
    for name in ("result/result.json", LOG_FILE, EXIT_FILE):
        path, text = folder / name, left["files"].get(name)
        if text is None or path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(text if name != EXIT_FILE else json.dumps(json.loads(text)), encoding="utf-8")
        part.replace(path)
