"""A Ray cluster as a pool of nodes: a function is run on a node that has what it needs, elsewhere when that is lost.

    with Pool.connect() as pool:
        print(pool.nodes())
        done = pool.submit("compile_stage.fleet.tasks:measure", {"uri": uri}, Needs(hardware={"cpu": "Xeon"}))
        value = done.result()

`submit` takes a function's name, since every node has compile-stage installed, in the driver's version. The function is
called as `measure(node, uri=...)`: `node.reporter` hears what happens, for the driver's terminal; arguments and what it
returns are plain JSON, and files go through the step cache. It must be idempotent: when its node is lost, or its
process is killed, it is called again, on another node if there is one. What it raises is raised by `result()`, and
nothing is tried again for that.

Nodes are asked what they are, not labelled (docs/decisions/0071): a label can be wrong, and a fingerprint changes with
a driver. `close` ends what runs, with all its processes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import Any, Self

from compile_stage.cluster import remote
from compile_stage.cluster.nodes import UNBOUNDED, Bounds, Needs, Node, describe_here, lacking, refuse_version
from compile_stage.core.digest import revive
from compile_stage.core.errors import UsageError, WorkerError, first_line
from compile_stage.core.events import Reporter, Silent
from compile_stage.engine.protocol import revive_error

_ATTEMPTS = 3
_LOOK_EVERY_S = 0.25
_AT_ONCE = 64
_PROBE_S = 120.0
"""A node's first process imports compile-stage: seconds, on a slow disk many."""

WAIT_VARIABLE = "COMPILE_STAGE_RAY_WAIT"
"""Seconds to wait for a node that has what is needed; 0, the default, names at once what there is."""

# What the nodes must agree on, and what is no secret. Credentials stay in the environment of each machine.
_SETTINGS = (
    "COMPILE_STAGE_SHARED_CACHE",
    "COMPILE_STAGE_SHARED_CACHE_MODE",
    "COMPILE_STAGE_FOLDER_REGISTRY",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_REGISTRY_URI",
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Work:
    """What was submitted, and its `bounds` as times of `time.monotonic`."""

    function: str
    arguments: Mapping[str, Any]
    needs: Needs
    name: str
    bounds: Bounds


class Pool:
    """The nodes of a Ray cluster. Safe for several threads.

    Args:
        reporter: Hears what the functions report.
    """

    def __init__(self, ray: Any, reporter: Reporter | None = None) -> None:
        self._ray, self.reporter = ray, reporter or Silent()
        self._nodes: dict[str, Node] = {}
        self._taken: dict[str, int] = {}  # node → CPUs that our own work takes there
        self._refs: set[Any] = set()
        self._free = threading.Condition()
        self._asking, self._hearing = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        self._numbers = count(1)
        self._open: dict[str, dict[tuple[str, str], float]] = {}  # task that began → steps that it began
        self._threads = ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="cluster")
        self._call = ray.remote(max_retries=0)(remote.call)
        here = ray.get_runtime_context().get_node_id()
        self._mailbox = ray.remote(num_cpus=0)(remote.Mailbox).options(scheduling_strategy=self._on(here)).remote()
        self._listener = threading.Thread(target=self._listen, name="cluster-events", daemon=True)
        self._listener.start()

    @classmethod
    def connect(cls, reporter: Reporter | None = None) -> Self:
        """The cluster that `$RAY_ADDRESS` names, or that runs on this machine.

        Raises:
            UsageError: There is none.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        _quieten()
        address = os.environ.get("RAY_ADDRESS") or "auto"
        if address.startswith(("ray://", "http://", "https://")):
            raise UsageError(
                "the driver must run on a machine of the cluster",
                fix="submit the command as a Ray job (ray job submit -- compile-stage run ... --engine ray), or run "
                "it on a node",
                where=f"RAY_ADDRESS={address}",
            )
        if not ray.is_initialized():
            try:
                ray.init(
                    address=address,
                    log_to_driver=False,
                    configure_logging=False,
                    logging_level=logging.ERROR,
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UsageError(
                    f"no Ray cluster can be reached: {first_line(error)}",
                    fix="start one (ray start --head, and ray start --address=HEAD:6379 on the other machines), or "
                    f"name one in RAY_ADDRESS{_token_fix()}",
                    where=f"RAY_ADDRESS={address}",
                ) from error
        return cls(ray, reporter)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def nodes(self) -> tuple[Node, ...]:
        """Every node that is alive, asked once what it is.

        Raises:
            UsageError: One has another compile-stage or Python than the driver.
        """
        found, problem = self.all_nodes()
        if problem:
            raise UsageError(
                problem,
                fix="install the same on every node: what one of them makes, another must find in the cache",
            )
        return found

    def all_nodes(self) -> tuple[tuple[Node, ...], str]:
        """As `nodes`, and what is wrong with them, in place of an error; empty when nothing is."""
        with self._asking:
            found = self._find_out()
        return found, "; ".join(reason for node in found if (reason := refuse_version(node)) is not None)

    def _find_out(self) -> tuple[Node, ...]:
        raw = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        new = [node for name, node in raw.items() if name not in self._nodes]
        asked = {node["NodeID"]: self._ask(node["NodeID"]) for node in new}
        for name, ref in asked.items():
            try:
                answer = self._ray.get(ref, timeout=_PROBE_S)["value"]
            except self._ray.exceptions.RayError as error:
                _log.warning("node %s does not answer: %s", name[:8], error)
                continue
            self._nodes[name] = _node(raw[name], answer)
        return tuple(self._nodes[name] for name in raw if name in self._nodes)

    def ask(self, node: Node, function: str, arguments: Mapping[str, Any]) -> Any:
        """What a function that takes no time answers on this very node, whatever else runs there. Raises what it
        raises, and WorkerError where the node is lost."""
        try:
            answer = self._ray.get(self._ask(node.id, function, **arguments), timeout=_PROBE_S)
        except self._ray.exceptions.RayError as error:
            raise WorkerError("crash", f"node {node.name} does not answer: {first_line(error)}") from error
        if "error" in answer:
            raise revive_error(answer["error"])
        return answer["value"]

    def find(self, needs: Needs) -> tuple[Node, ...]:
        """The nodes that have what is needed; waits for one as long as `$COMPILE_STAGE_RAY_WAIT` says.

        Raises:
            UsageError: None has; the message lists what the cluster has.
        """
        ends = time.monotonic() + patience_s()
        while True:
            nodes = self.nodes()
            fitting = tuple(node for node in nodes if node.cpus and needs.refuse(node) is None)
            if fitting:
                return fitting
            if time.monotonic() >= ends or self._closed.is_set():
                raise UsageError(lacking(needs, nodes), fix="compile-stage doctor --engine ray shows the nodes")
            self._closed.wait(1.0)

    def submit(
        self,
        function: str,
        arguments: Mapping[str, Any],
        needs: Needs,
        name: str = "",
        bounds: Bounds = UNBOUNDED,
    ) -> Future[Any]:
        """Run a function on a node that has what is needed.

        Args:
            function: `package.module:function` of compile-stage.
            arguments: Plain JSON.
            name: For the terminal: whose step it is that waits for a node; a job's id.
            bounds: How long it may wait for a node, and take.

        Returns:
            Its result raises what the function raised; UsageError where no node has what is needed (any more), or none
            of those was free within `bounds`; and WorkerError where three nodes were lost over it, the time is up, or
            the pool was closed.
        """
        now = time.monotonic()
        work = _Work(function, dict(arguments), needs, name, Bounds(begins=now + bounds.begins, ends=now + bounds.ends))
        return self._threads.submit(self._run, work)

    def close(self) -> None:
        """End what runs. May be called twice, and from any thread."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._free:
            refs = tuple(self._refs)
            self._free.notify_all()
        for ref in refs:
            self._cancel(ref)
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._listener.join()  # a call of Ray's after its shutdown starts another Ray
        self._hear()
        self._ray.shutdown()

    def _run(self, work: _Work) -> Any:
        lost: list[str] = []
        while len(lost) < _ATTEMPTS:
            node = self._take(work, lost)
            try:
                answer = self._attempt(node, work)
            finally:
                self._give_back(node, work.needs)
            if answer is not None:
                if "error" in answer:
                    raise revive_error(answer["error"])
                return answer["value"]
            lost.append(node.id)
            work = replace(work, bounds=replace(work.bounds, begins=work.bounds.ends))  # it did begin
            self.reporter.progressed("place", work.name, f"node {node.name} was lost; it is done again")
        raise WorkerError("crash", f"{len(lost)} nodes, or the processes there, were lost while they worked on it")

    def _attempt(self, node: Node, work: _Work) -> dict[str, Any] | None:
        """What the function answered; None where the node or the process was lost."""
        needs, errors, task = work.needs, self._ray.exceptions, f"task-{next(self._numbers)}"
        settings = {key: value for key in _SETTINGS if (value := os.environ.get(key)) and "@" not in value}
        asked = self._call.options(
            num_cpus=_cpus(needs, node),
            num_gpus=node.gpus if needs.exclusive or needs.device != "cpu" else 0,
            memory=min(needs.memory_bytes, node.memory_bytes) or None,
            scheduling_strategy=self._on(node.id),
        )
        ref = asked.remote(work.function, work.arguments, settings, task, self._mailbox)
        with self._free:
            self._refs.add(ref)
        try:
            while not self._is_over(work, task):
                try:
                    answer: dict[str, Any] = self._ray.get(ref, timeout=_LOOK_EVERY_S)
                except errors.GetTimeoutError:
                    if not self._lives(node):  # its process may outlive it for minutes, and then answers nobody
                        self._cancel(ref)
                        return None
                    continue
                except errors.TaskCancelledError:
                    break
                except errors.RayTaskError:
                    raise
                except errors.RayError as error:
                    _log.info("%s was lost on %s: %s", task, node.name, first_line(error))
                    return None
                self._hear()  # so that its last step is shown before what follows from it
                return answer
            self._cancel(ref)
            raise self._ended(work, task)
        finally:
            with self._free:
                self._refs.discard(ref)
            self._end_steps(task)

    def _take(self, work: _Work, lost: list[str]) -> Node:
        """A node with room, and room taken on it."""
        needs, said = work.needs, False
        while not self._is_over(work):
            fitting = self.find(needs)
            others = [node for node in fitting if node.id not in lost] or list(fitting)
            with self._free:
                room = [node for node in others if self._has_room(node, needs)]
                if room:
                    node = min(room, key=lambda one: self._taken.get(one.id, 0) / max(1, one.cpus))
                    self._taken[node.id] = self._taken.get(node.id, 0) + _cpus(needs, node)
                    return node
                if not said:
                    self.reporter.progressed("place", work.name, "waits for a node")
                    said = True
                self._free.wait(1.0)
        raise self._ended(work)

    def _is_over(self, work: _Work, task: str = "") -> bool:
        ends = work.bounds.ends if task in self._open else min(work.bounds.begins, work.bounds.ends)
        return self._closed.is_set() or time.monotonic() > ends

    def _ended(self, work: _Work, task: str = "") -> WorkerError | UsageError:
        if self._closed.is_set():
            return WorkerError("crash", "the run was ended")
        what = work.name or work.function
        if task in self._open or time.monotonic() > work.bounds.ends:
            return WorkerError("timeout", f"the time for it was used up: {what}")
        return UsageError(
            f"no node that fits was free in time for {what}: other work holds them",
            fix=f"run again when they are free, or allow more: budget.minutes, or seconds in {WAIT_VARIABLE}",
        )

    def _has_room(self, node: Node, needs: Needs) -> bool:
        return self._taken.get(node.id, 0) + _cpus(needs, node) <= max(1, node.cpus)

    def _give_back(self, node: Node, needs: Needs) -> None:
        with self._free:
            self._taken[node.id] -= _cpus(needs, node)
            self._free.notify_all()

    def _lives(self, node: Node) -> bool:
        return any(one["NodeID"] == node.id and one["Alive"] for one in self._ray.nodes())

    def _ask(self, node: str, function: str = f"{__name__}:describe", **arguments: Any) -> Any:
        options = self._call.options(num_cpus=0, scheduling_strategy=self._on(node))
        return options.remote(function, arguments, {}, "probe", self._mailbox)

    def _on(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node_id=node, soft=False)

    def _cancel(self, ref: Any) -> None:
        """By ending the process: what waits for a thread or a process does not hear a KeyboardInterrupt. The guards of
        its workers end them."""
        try:
            self._ray.cancel(ref, force=True)
        except self._ray.exceptions.RayError:
            _log.info("a task could not be cancelled", exc_info=True)

    # ------------------------------------------------------------------------------------------------------- events

    def _listen(self) -> None:
        while not self._closed.wait(_LOOK_EVERY_S):
            try:
                self._hear()
            except self._ray.exceptions.RayError:
                return

    def _hear(self) -> None:
        """Pass on what the nodes reported, in its order."""
        with self._hearing:
            for task, events in self._ray.get(self._mailbox.take.remote()):
                began = self._open.setdefault(task, {})
                for kind, step, job_id, *rest in events:
                    if kind == remote.CALLED:
                        continue
                    if kind == "began":
                        began[step, job_id] = time.monotonic()
                    elif kind == "ended":
                        began.pop((step, job_id), None)
                    getattr(self.reporter, kind)(step, job_id, *rest)

    def _end_steps(self, task: str) -> None:
        """The steps that a lost task leaves running end here, or the terminal would show them for ever."""
        with self._hearing:
            left = self._open.pop(task, {})
        outcome = "interrupted" if self._closed.is_set() else "its node was lost"
        for (step, job_id), began in left.items():
            self.reporter.ended(step, job_id, time.monotonic() - began, outcome)


def patience_s() -> float:
    """What `$COMPILE_STAGE_RAY_WAIT` says, in seconds; 0 where it says nothing.

    Raises:
        UsageError: It is no number from 0.
    """
    text = os.environ.get(WAIT_VARIABLE, "")
    try:
        seconds = float(text) if text else 0.0
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{WAIT_VARIABLE} is {text!r}", fix="give a number of seconds, or unset it")
    return seconds


def describe(_: object) -> dict[str, Any]:
    """What a node is asked first."""
    return describe_here()


def _node(raw: Mapping[str, Any], answer: Mapping[str, Any]) -> Node:
    has = raw["Resources"]
    node: Node = revive(Node, {**answer, "id": raw["NodeID"], "name": raw.get("NodeName") or answer["name"]})
    return replace(node, cpus=int(has.get("CPU", 0)), gpus=int(has.get("GPU", 0)), memory_bytes=int(has["memory"]))


def _cpus(needs: Needs, node: Node) -> int:
    return node.cpus if needs.exclusive else min(needs.cpus, node.cpus)


def _token_fix() -> str:
    """`ray start` takes the token of ~/.ray into use by itself; a driver does for an address that is named only when it
    is asked to, and Ray's error does not say so."""
    if os.environ.get("RAY_AUTH_MODE"):
        return ""
    return "; where `ray start` said that token authentication is enabled, set RAY_AUTH_MODE=token"


def _quieten() -> None:
    """Ray prints what its daemons complain of on our standard output, where a result or a live table may be; it has no
    switch for that."""
    from ray._private import worker

    def to_log(data: Any, ignore_prefix: bool) -> None:
        del ignore_prefix
        for line in data.get("lines", ())[:1]:
            _log.info("%s", line.splitlines()[0] if line else "")

    worker.print_to_stdstream = to_log
    logging.getLogger("ray").setLevel(logging.ERROR)
