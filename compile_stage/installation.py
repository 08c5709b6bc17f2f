"""What this machine can do, what is missing, and the command that brings it."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, TypeAlias

from compile_stage.core import plugins
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.control_groups import cpu_limit
from compile_stage.core.environment import hardware, python_version
from compile_stage.core.errors import CompileStageError
from compile_stage.core.records import record

Kind: TypeAlias = Literal["backend", "source", "precision", "engine", "registry"]

_GROUPS: tuple[tuple[Kind, plugins.Group], ...] = (
    ("backend", "backends"),
    ("source", "sources"),
    ("precision", "lowerings"),
    ("engine", "engines"),
    ("registry", "registries"),
)


@record
class DoctorEntry:
    """One plug-in.

    Attributes:
        version: Package and version of what it stands on, and where a registry is; empty when unknown or missing.
        reason: Why it can't be used; empty when it can.
        fix: The command that fixes it; empty when there is none.
    """

    kind: Kind
    name: str
    ready: bool
    version: str = ""
    reason: str = ""
    fix: str = ""


@record
class DoctorReport:
    """The machine, and every plug-in by kind and name.

    Attributes:
        machine: What a human calls it → what it is, in reading order.
        cache: Folder of the step cache, and what is wrong with it.
    """

    machine: Mapping[str, str]
    hardware_fingerprint: str
    entries: tuple[DoctorEntry, ...]
    cache: str


def examine() -> DoctorReport:
    """Look at the machine and at every plug-in; ask each registry whether it can be reached."""
    from compile_stage import __version__

    this_machine = hardware()
    machine = {
        "compile-stage": __version__,
        "python": python_version(),
        "system": f"{this_machine.system} {this_machine.machine}",
        "cpu": this_machine.cpu,
        "cores": str(this_machine.cores),
        **({} if math.isinf(limit := cpu_limit()) else {"CPU limit": f"{limit:.3g} cores, of this container or group"}),
        "instruction sets": " ".join(this_machine.features) or "none that matter",
        "accelerators": ", ".join(this_machine.accelerators) or "none",
        "fingerprint": this_machine.fingerprint,
        "confinement": _confinement(),
    }
    entries = tuple(_examine(kind, group, name) for kind, group in _GROUPS for name in plugins.names(group))
    return DoctorReport(machine=machine, hardware_fingerprint=this_machine.fingerprint, entries=entries, cache=_cache())


def _examine(kind: Kind, group: plugins.Group, name: str) -> DoctorEntry:
    try:
        plugin: Any = plugins.load(group, name)
    except Exception as error:  # noqa: BLE001 - a third party's plug-in that can't be imported is a finding, not our end
        return DoctorEntry(
            kind=kind, name=name, ready=False, reason=f"can't be loaded: {type(error).__name__}: {error}"
        )
    if (reason := plugins.missing(plugin)) is not None:
        return DoctorEntry(
            kind=kind, name=name, ready=False, reason=reason.rpartition(": ")[0], fix=plugins.pip_line(plugin)
        )
    facts = list(_versions(plugin))
    if (home := plugins.toolchain_of(plugin)) is not None:
        told = plugin.capabilities.runtime if kind == "backend" else plugin.requires
        facts = [f"{module} {home.packages[module]}" for module in told if module in home.packages]
        facts += [f"in {home.folder}"]
    if kind == "source" and (reason := plugins.missing_for_programs(plugin)) is not None:
        facts += [f"as ONNX only ({reason})"]
        reason = None
    if kind == "registry":
        reason = _registry_problem(plugin)
        facts += [f"at {plugin.place()}"] if plugin.capabilities.has_place else []
    return DoctorEntry(kind=kind, name=name, ready=reason is None, version=", ".join(facts), reason=reason or "")


def _confinement() -> str:
    """What keeps the workers of the local engine from the rest of this machine: one is started and asked."""
    try:
        with contextlib.closing(plugins.load("engines", "local")) as engine:
            return engine.confinement().text
    except CompileStageError as error:
        return f"not known: {error.problem}"
    except OSError as error:  # no room for a worker's folder
        return f"not known: {error.strerror}"


def _cache() -> str:
    """The folder, and whether it can be used. It is not made here."""
    folder = cache_root()
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return str(folder)
    return f"{folder} can't be written; COMPILE_STAGE_CACHE names another"


def _registry_problem(registry: Any) -> str | None:
    try:
        answer: str | None = registry.check()
    except CompileStageError as error:
        return error.problem
    except Exception as error:  # noqa: BLE001 - whatever a registry's client raises is the reason why it can't be used
        return f"{type(error).__name__}: {error}"
    return answer


@cache
def _owners() -> Mapping[str, list[str]]:
    """Module → the distributions that bring it. Reads the file list of everything that is installed, which takes a
    third of a second."""
    from importlib.metadata import packages_distributions

    return packages_distributions()


def _versions(plugin: Any) -> Iterator[str]:
    """`onnxruntime 1.31.0`, of the distributions that bring the modules it requires."""
    owners, wanted = _owners(), dict[str, None]()
    for module in plugin.requires:
        top = module.partition(".")[0]
        held = owners.get(top, [])
        # Several distributions may share a package (mlflow, mlflow-skinny): the one of its name speaks for all.
        wanted |= dict.fromkeys([top] if top in held else held[:1])
    for name, version in plugins.package_versions(*wanted).items():
        yield f"{name} {version}"
