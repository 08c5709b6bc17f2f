"""Name → plug-in, by entry point, lazily.

Built-in plug-ins come through the same entry points as third-party ones, so that this door is always tested.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from compile_stage.core.capabilities import (
    SOURCE_PRECISION,
    BackendCapabilities,
    Capabilities,
    LoweringCapabilities,
    RegistryCapabilities,
    SourceCapabilities,
)
from compile_stage.core.digest import digest_file
from compile_stage.core.errors import MissingDependencyError, UsageError
from compile_stage.core.toolchains import Toolchain, lock_in_force
from compile_stage.core.toolchains import find as find_toolchain

if TYPE_CHECKING:
    from compile_stage.core.ports import Backend, Engine, Exporter, Lowering, Plugin, Registry
    from compile_stage.core.records import Scheme

Group: TypeAlias = Literal["backends", "sources", "lowerings", "registries", "engines"]

_CAPABILITIES: Mapping[Group, type[Capabilities]] = {
    "backends": BackendCapabilities,
    "sources": SourceCapabilities,
    "lowerings": LoweringCapabilities,
    "registries": RegistryCapabilities,
    "engines": Capabilities,
}
_UNKNOWN_COMPLEXITY = 100  # of a precision that a backend has natively and no lowering makes


@cache
def _entries(group: Group) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=f"compile_stage.{group}")}


def names(group: Group) -> tuple[str, ...]:
    """All plug-in names of a group, sorted, installed dependencies or not."""
    return tuple(sorted(_entries(group)))


@overload
def load(group: Literal["backends"], name: str) -> Backend: ...
@overload
def load(group: Literal["sources"], name: str) -> Exporter: ...
@overload
def load(group: Literal["lowerings"], name: str) -> Lowering: ...
@overload
def load(group: Literal["registries"], name: str) -> Registry: ...
@overload
def load(group: Literal["engines"], name: str) -> Engine: ...
def load(group: Group, name: str) -> Any:
    """An instance of the plug-in of that name.

    Raises:
        UsageError: There is no such plug-in; the nearest name is suggested.
    """
    entry = _entries(group).get(name)
    if entry is None:
        raise UsageError(f"there is no {_SINGULAR[group]} called {name!r}", fix=_suggest(name, names(group)))
    return _checked(group, entry, entry.load()())


def _checked(group: Group, entry: EntryPoint, plugin: Any) -> Any:
    """The plug-in, if it declares what it can do as this version asks for it. Raises UsageError, naming the attribute."""
    kind = _CAPABILITIES[group]
    if isinstance(getattr(plugin, "capabilities", None), kind):
        return plugin
    origin = f" (of {entry.dist.name} {entry.dist.version})" if entry.dist else ""
    raise UsageError(
        f"the {_SINGULAR[group]} {entry.name!r}{origin} has no class attribute `capabilities` that is a {kind.__name__}",
        fix=f"update or uninstall its package; its author adds capabilities = compile_stage.core.capabilities.{kind.__name__}(...)",
        where=entry.value,
    )


def is_precision(name: str) -> bool:
    """True for a precision that a policy may name (`precisions`); imports no plug-in for one that a lowering makes."""
    return name == SOURCE_PRECISION or name in names("lowerings") or name in precisions()


@cache
def precisions() -> tuple[str, ...]:
    """Every precision that a policy may name: FP32, what the installed lowerings make, and what backends have by themselves. A backend that
    can't be loaded has none."""
    known = {*names("lowerings")}
    for name in names("backends"):
        with contextlib.suppress(Exception):  # whoever uses that backend sees the reason
            known.update(load("backends", name).capabilities.precisions)
    return (SOURCE_PRECISION, *sorted(known - {SOURCE_PRECISION}))


def needs_calibration(scheme: Scheme) -> bool:
    """True when calibration samples have a say in what the scheme makes of a model: by its lowering, or inside the backend."""
    if scheme.native:
        return scheme.calibrates
    declared = _of_lowering(scheme.precision)
    return declared is not None and declared.needs_calibration


def mixes(scheme: Scheme) -> bool:
    """True when single nodes of what the scheme's lowering makes can stay in higher precision."""
    declared = None if scheme.native else _of_lowering(scheme.precision)
    return declared is not None and declared.mixes


def complexity(precision: str) -> int:
    """How much a precision changes a model (`LoweringCapabilities.complexity`), 0 for the source's own. It decides between equals."""
    if precision == SOURCE_PRECISION:
        return 0
    declared = _of_lowering(precision)
    return declared.complexity if declared is not None else _UNKNOWN_COMPLEXITY


def _of_lowering(precision: str) -> LoweringCapabilities | None:
    known = precision in names("lowerings")
    return load("lowerings", precision).capabilities if known else None


def made_by(group: Literal["backends", "sources", "lowerings"], name: str) -> Mapping[str, str]:
    """Everything of a plug-in that has a say in what it makes, for the key of a result: the packages that it names, its
    own distribution and version, and the digest of its file, since a third party's next version, or an edit of it,
    answers otherwise."""
    plugin: Any = load(group, name)
    if group == "lowerings":
        versions: Mapping[str, str] = package_versions(*plugin.requires, "numpy")
    elif group == "backends" and (home := toolchain_of(plugin)) is not None:
        versions = {"toolchain": home.digest}  # of the lock, which pins everything
    else:
        versions = plugin.packages() if group == "sources" else plugin.toolchain()
    return {**versions, **_identity(group, name)}


@cache
def _identity(group: Group, name: str) -> Mapping[str, str]:
    entry = _entries(group)[name]
    found = {"plug-in": f"{entry.dist.name} {entry.dist.version}" if entry.dist else ""}
    spec = importlib.util.find_spec(entry.module)
    if spec is not None and spec.origin is not None and spec.has_location:
        found["plug-in file"] = digest_file(spec.origin)
        origin = Path(spec.origin)  # of `tvm.py`, a part of the backend is `tvm_tuning.py` beside it
        for part in sorted(origin.parent.glob(f"{origin.stem}_*{origin.suffix}")):
            found[f"plug-in file {part.name}"] = digest_file(part)
    return found


def registry_for(uri: str) -> Registry:
    """The registry that understands the URI. Raises UsageError when none does."""
    for name in names("registries"):
        registry = load("registries", name)
        if registry.accepts(uri):
            demand(registry)
            return registry
    raise UsageError(
        f"no registry understands {uri!r}",
        fix="name a model as models:/NAME/VERSION, models:/NAME@ALIAS, models:/m-ID, runs:/RUN_ID/NAME or folder:/PATH",
    )


def missing(plugin: Plugin) -> str | None:
    """None when everything the plug-in needs is importable here or in its toolchain, or the reason with the exact command."""
    absent = _absent(plugin)
    if not absent or find_toolchain(plugin.name, lock_of(plugin.name)) is not None:
        return None
    return f"{plugin.name} needs {', '.join(absent)}, which is not installed: {pip_line(plugin)}"


def missing_for_programs(source: Exporter) -> str | None:
    """None when a source that gives PyTorch programs can give one here, or what that needs beside, with the exact command."""
    absent = [module for module in source.capabilities.program_requires if not _importable(module)]
    if not absent:
        return None
    return (
        f"a PyTorch program is made of a model of flavor {source.name} with {', '.join(absent)}, which is not installed: "
        f'pip install "compile-stage[{source.capabilities.program_extra}]"'
    )


def toolchain_of(plugin: Plugin) -> Toolchain | None:
    """The isolated environment in which a backend runs; None when its packages are in this one, or nowhere."""
    return find_toolchain(plugin.name, lock_of(plugin.name)) if _absent(plugin) else None


def interpreter_of(backend: str) -> str:
    """The Python executable that a backend's workers run; empty for this one."""
    home = toolchain_of(load("backends", backend))
    return home.interpreter if home is not None else ""


def packages_of(backend: Backend) -> Mapping[str, str]:
    """Distribution → version of what a backend compiles with, here or in its toolchain."""
    home = toolchain_of(backend)
    return home.packages if home is not None else backend.toolchain()


def lock_of(backend: str) -> Path | None:
    """The lock file of a backend's toolchain: the user's own, or `locks/NAME.txt` beside its module. None when it has no toolchain."""
    shipped = shipped_lock(backend)
    return lock_in_force(backend, shipped) if shipped is not None else None


def shipped_lock(backend: str) -> Path | None:
    """Where the backend's own lock lies, or would lie. None for a plug-in that is no backend, or is no file."""
    entry = _entries("backends").get(backend)
    spec = importlib.util.find_spec(entry.module) if entry is not None else None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "locks" / f"{backend}.txt"


def absent_to_open(backend: Backend) -> list[str]:
    """The modules that opening an artifact needs and that are not here: the backend's `opens_with`, or all that it requires."""
    needed = backend.capabilities.opens_with or backend.requires
    return [module for module in needed if not _importable(module)] + _absent_distributions(backend)


def importable(plugin: Plugin) -> bool:
    """True when everything the plug-in needs is in this environment."""
    return not _absent(plugin)


def _absent(plugin: Plugin) -> list[str]:
    return [module for module in plugin.requires if not _importable(module)] + _absent_distributions(plugin)


def _absent_distributions(plugin: Plugin) -> list[str]:
    return [name for name in plugin.capabilities.distributions if not package_versions(name)]


def demand(plugin: Plugin) -> None:
    """Raise MissingDependencyError unless everything the plug-in needs is importable."""
    if (reason := missing(plugin)) is not None:
        raise MissingDependencyError(reason.rpartition(": ")[0], fix=pip_line(plugin))


def pip_line(plugin: Plugin) -> str:
    """The command that brings what the plug-in needs."""
    if lock_of(plugin.name) is not None:
        return f"compile-stage toolchain install {plugin.name}"
    return (
        f'pip install "compile-stage[{plugin.extra}]"' if plugin.extra else f"pip install {' '.join(plugin.requires)}"
    )


def link_packages(folder: Path) -> Path:
    """Fill a folder with links to this package and to every backend's, with what makes their entry points found: on the path of another
    interpreter, it runs the very code that runs here. Returns the folder."""
    folder.mkdir(parents=True)
    for entry in _entries("backends").values():
        top = importlib.util.find_spec(entry.module.partition(".")[0])
        if top is not None and top.origin is not None:
            origin = Path(top.origin)
            _link(folder, origin.parent if top.submodule_search_locations else origin)
        described = getattr(entry.dist, "_path", None)  # the standard library has no public name for it
        if isinstance(described, Path):
            _link(folder, described)
    return folder


def _link(folder: Path, path: Path) -> None:
    link = folder / path.name
    if not link.exists():
        link.symlink_to(path.absolute(), target_is_directory=path.is_dir())


def package_versions(*distributions: str) -> dict[str, str]:
    """Distribution → version of those that are installed."""
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def did_you_mean(word: str, allowed: tuple[str, ...] | list[str]) -> str:
    """The nearest allowed word, or an empty string."""
    near = difflib.get_close_matches(word, allowed, n=1, cutoff=0.6)
    return near[0] if near else ""


def _suggest(word: str, allowed: tuple[str, ...]) -> str:
    near = did_you_mean(word, allowed)
    listed = f"one of: {', '.join(allowed)}" if allowed else "none is installed; reinstall compile-stage"
    return f"did you mean {near!r}? {listed}" if near else listed


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


_SINGULAR: dict[Group, str] = {
    "backends": "backend",
    "sources": "source",
    "lowerings": "precision lowering",
    "registries": "registry",
    "engines": "engine",
}
