"""What one machine of a cluster has, as it says itself; and what a piece of work asks of one."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.context import code_digest
from compile_stage.core.digest import plain
from compile_stage.core.environment import Hardware, hardware, python_version
from compile_stage.core.machine_identity import machine_identity
from compile_stage.core.records import record


@record
class Node:
    """One machine, or one part of it that is a node of its own.

    Attributes:
        id: The cluster's own name for it.
        host: Equal for nodes on one machine.
        cache: Folder of its step cache.
        shared: The shared cache that its environment names; empty for none.
        code: Digest of its compile-stage's files.
        backends: That can be used there → what they stand on.
        toolchains: Names of those that are installed there.
        cpus, gpus, memory_bytes: What the cluster gives out of it.
    """

    id: str
    name: str
    host: str
    hardware: Hardware
    version: str
    python: str
    code: str
    cache: str
    shared: str = ""
    backends: Mapping[str, str] = field(default_factory=dict)
    toolchains: tuple[str, ...] = ()
    cpus: int = 1
    gpus: int = 0
    memory_bytes: int = 0


@record
class Needs:
    """What a piece of work asks of a node.

    Attributes:
        hardware: As a policy's `hardware`: `{"fingerprint": "x86_64-1a2b3c4d5e6f7081"}`, `{"cpu": "Xeon"}`, ...; empty
            for any.
        chip: With it, only a node where a compiler sees the same as on this machine (`same_chip`).
        device: Of the target; what a compiler for `cpu` makes does not depend on a GPU.
        cpus, memory_bytes: That it takes; bounded by what the node has.
        exclusive: It takes all of the node's CPUs and GPUs, so that nothing else that the cluster places runs there
            meanwhile: for measurements.
    """

    hardware: Mapping[str, str] = field(default_factory=dict)
    chip: Hardware | None = None
    device: str = "cpu"
    cpus: int = 1
    memory_bytes: int = 0
    exclusive: bool = False

    def refuse(self, node: Node) -> str | None:
        """None when the node has it, or the first thing that it lacks."""
        if (reason := node.hardware.refuse(dict(self.hardware))) is not None:
            return reason
        if self.chip is not None and not same_chip(self.chip, node.hardware, self.device):
            return f"a compiler would not see the chip {self.chip.cpu!r} there"
        return None


@record
class Bounds:
    """How long a piece of work may take, in seconds from when it is submitted; infinite for no limit.

    Attributes:
        begins: After which it is not begun any more: it waited for a node so long.
        ends: After which it is ended wherever it is.
    """

    begins: float = math.inf
    ends: float = math.inf


UNBOUNDED = Bounds()


def same_chip(one: Hardware, other: Hardware, device: str) -> bool:
    """Whether a compiler that times nothing sees the same on both: it may look at system, CPU and instruction sets, for
    another device than `cpu` at the accelerators too, and is given the number of threads."""
    if (one.system, one.machine, one.cpu, one.features) != (other.system, other.machine, other.cpu, other.features):
        return False
    return device == "cpu" or one.accelerators == other.accelerators


def describe_here() -> dict[str, Any]:
    """This machine as plain JSON, with the keys of `Node` but those that the cluster knows."""
    from compile_stage import __version__
    from compile_stage.engine.toolchains import states

    backends = {}
    for name in plugins.names("backends"):
        backend = plugins.load("backends", name)
        if plugins.missing(backend) is None:
            held = plugins.packages_of(backend)
            backends[name] = ", ".join(f"{package} {version}" for package, version in held.items())
    return {
        "name": platform.node(),
        "host": machine_identity(),
        "hardware": plain(hardware()),
        "version": __version__,
        "python": python_version(),
        "code": code_digest(),
        "cache": str(cache_root()),
        "shared": os.environ.get("COMPILE_STAGE_SHARED_CACHE", ""),
        "backends": backends,
        "toolchains": [state.name for state in states() if state.toolchain is not None],
    }


def refuse_version(node: Node) -> str | None:
    """None when it has this compile-stage and this Python."""
    from compile_stage import __version__

    if node.python != python_version():
        theirs, ours = f"Python {node.python}", python_version()
    elif node.version != __version__:
        theirs, ours = f"compile-stage {node.version}", __version__
    elif node.code != code_digest():
        theirs, ours = f"other files of compile-stage {node.version}", "its own"
    else:
        return None
    return f"node {node.name} has {theirs}, the driver {ours}"


def lacking(needs: Needs, nodes: tuple[Node, ...]) -> str:
    """What to say where none of the nodes has what is needed."""
    wanted = " ".join(f"{key}={value}" for key, value in needs.hardware.items())
    wanted = wanted or (f"fingerprint={needs.chip.fingerprint}" if needs.chip else "anything")
    has = "; ".join(f"{node.name} {node.hardware.fingerprint} ({node.hardware.cpu})" for node in nodes)
    return f"no node of the cluster has the hardware {wanted}; there are: {has or 'none'}"
