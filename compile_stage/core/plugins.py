"""Name → plug-in, by entry point, lazily.

Built-in plug-ins come through the same entry points as third-party ones, so that this door is always tested. The
stage's own process imports built-in ones only (`core.remote_plugins`).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from compile_stage.core import distributions
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
from compile_stage.core.remote_plugins import RemotePlugin, is_ours, is_remote, release
from compile_stage.core.spelling import did_you_mean
from compile_stage.core.toolchains import Toolchain, is_toolchain_name, lock_in_force
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
_WITH_TOOLCHAINS: tuple[Group, ...] = ("backends", "sources")
_UNKNOWN_COMPLEXITY = 100  # of a precision that a backend has natively and no lowering makes


_installed = cache(entry_points)  # each call reads the metadata of all that is installed, whichever group it asks for


@cache
def _entries(group: Group) -> dict[str, EntryPoint]:
    found = sorted(_installed().select(group=f"compile_stage.{group}"), key=is_ours)  # of two with one name, ours
    return {entry.name: entry for entry in found}


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
    """An instance of the plug-in of that name. Of a third party's backend, source or lowering it is one that asks a
    worker; in workers it is the plug-in itself.

    Raises:
        UsageError: There is no such plug-in (the nearest name is suggested), or a third party's can't be imported.
    """
    entry = _entry(group, name)
    if is_remote(group, entry):
        return RemotePlugin(group, entry, _local_engine)
    return _checked(group, entry, entry.load()())


def load_here(group: Group, name: str) -> Any:
    """The plug-in of that name itself, imported into this process whoever wrote it: for serving processes and for a
    plug-in's own tests. Raises UsageError as `load`."""
    entry = _entry(group, name)
    return _checked(group, entry, entry.load()())


def _entry(group: Group, name: str) -> EntryPoint:
    entry = _entries(group).get(name)
    if entry is None:
        raise UsageError(f"there is no {_SINGULAR[group]} called {name!r}", fix=_suggest(name, names(group)))
    return entry


def _local_engine() -> Engine:
    return load("engines", "local")


def refresh() -> None:
    """Look anew at what is installed; the workers that third parties' plug-ins answer from end."""
    for known in (_installed, _entries, precisions, _identity):
        known.cache_clear()
    release()


def _checked(group: Group, entry: EntryPoint, plugin: Any) -> Any:
    """The plug-in, if it declares what it can do as this version asks for it. Raises UsageError, naming the
    attribute."""
    kind = _CAPABILITIES[group]
    if isinstance(getattr(plugin, "capabilities", None), kind):
        return plugin
    origin = f" (of {entry.dist.name} {entry.dist.version})" if entry.dist else ""
    raise UsageError(
        f"the {_SINGULAR[group]} {entry.name!r}{origin} has no class attribute `capabilities` that is a "
        f"{kind.__name__}",
        fix="update or uninstall its package; its author adds capabilities = "
        f"compile_stage.core.capabilities.{kind.__name__}(...)",
        where=entry.value,
    )


def is_precision(name: str) -> bool:
    """True for a precision that a policy may name (`precisions`); imports no plug-in for one that a lowering makes."""
    return name == SOURCE_PRECISION or name in names("lowerings") or name in precisions()


@cache
def precisions() -> tuple[str, ...]:
    """Every precision that a policy may name: FP32, what the installed lowerings make, and what backends have by
    themselves. A backend that can't be loaded has none.

    Raises:
        UsageError: Not even ours are there, since no package says what it brings.
    """
    known = {*names("lowerings")}
    if not known:
        raise UsageError(
            "compile-stage is on Python's path and is not installed: none of its precisions and backends is known",
            fix="pip install compile-stage, or in a checkout pip install -e .",
        )
    for name in names("backends"):
        with contextlib.suppress(Exception):  # whoever uses that backend sees the reason
            known.update(load("backends", name).capabilities.precisions)
    return (SOURCE_PRECISION, *sorted(known - {SOURCE_PRECISION}))


def needs_calibration(scheme: Scheme) -> bool:
    """True when calibration samples have a say in what the scheme makes of a model: by its lowering, or inside the
    backend."""
    if scheme.native:
        return scheme.calibrates
    declared = _of_lowering(scheme.precision)
    return declared is not None and declared.needs_calibration


def mixes(scheme: Scheme) -> bool:
    """True when single nodes of what the scheme's lowering makes can stay in higher precision."""
    declared = None if scheme.native else _of_lowering(scheme.precision)
    return declared is not None and declared.mixes


def complexity(precision: str) -> int:
    """How much a precision changes a model (`LoweringCapabilities.complexity`), 0 for the source's own. It decides
    between equals."""
    if precision == SOURCE_PRECISION:
        return 0
    declared = _of_lowering(precision)
    return declared.complexity if declared is not None else _UNKNOWN_COMPLEXITY


def _of_lowering(precision: str) -> LoweringCapabilities | None:
    known = precision in names("lowerings")
    return load("lowerings", precision).capabilities if known else None


def cache_identity(group: Literal["backends", "sources", "lowerings"], name: str) -> Mapping[str, str]:
    """Everything of a plug-in that has a say in what it makes, for the key of a result: the packages that it names, its
    own distribution and version, and the digest of its file, of a third party's all files of its distribution, since a
    next version, or an edit of any module, answers otherwise."""
    plugin: Any = load(group, name)
    if group == "lowerings":
        versions: Mapping[str, str] = package_versions(*plugin.requires, "numpy")
    elif (home := toolchain_of(plugin)) is not None:
        versions = {"toolchain": home.digest}  # of the lock, which pins everything
    else:
        versions = plugin.packages() if group == "sources" else plugin.toolchain()
    return {**versions, **_identity(group, name)}


@cache
def _identity(group: Group, name: str) -> Mapping[str, str]:
    entry = _entries(group)[name]
    found = {"plug-in": f"{entry.dist.name} {entry.dist.version}" if entry.dist else ""}
    if not is_ours(entry):  # of ours, the version says what the other modules are
        found["distribution"] = distributions.distribution_digest(entry)
    spec = _find_spec(entry.module)
    if spec is not None and spec.origin is not None and spec.has_location:
        found["plug-in file"] = digest_file(spec.origin)
        origin = Path(spec.origin)  # of `tvm.py`, a part of the backend is `tvm_tuning.py` beside it
        for part in sorted(origin.parent.glob(f"{origin.stem}_*{origin.suffix}")):
            found[f"plug-in file {part.name}"] = digest_file(part)
    return found


def source_files(group: Group, name: str) -> tuple[Path, ...]:
    """The Python files of the distribution that a plug-in comes with."""
    entry = _entries(group).get(name)
    return distributions.source_files(entry) if entry is not None else ()


def third_party(group: Group, name: str) -> dict[str, str]:
    """Distribution → version of what a third party's plug-in comes with; empty for one of ours, and for one that was
    never installed."""
    entry = _entries(group).get(name)
    if entry is None or entry.dist is None or is_ours(entry):
        return {}
    return {entry.dist.name: entry.dist.version}


def registry_for(uri: str) -> Registry:
    """The registry that understands the URI. Raises UsageError when none does."""
    for name in sorted(names("registries"), key=lambda name: not is_ours(_entries("registries")[name])):
        registry = load("registries", name)
        if registry.accepts(uri):
            demand(registry)
            return registry
    if uri and Path(uri).exists():
        raise UsageError(f"{uri!r} is a path, and no model's URI", fix=f"write folder:{uri}")
    raise UsageError(
        f"no registry understands {uri!r}",
        fix="name a model as models:/NAME/VERSION, models:/NAME@ALIAS, models:/m-ID, runs:/RUN_ID/NAME or "
        "folder:/PATH; write a path that begins with a word and a colon as ./PATH",
    )


def missing(plugin: Plugin) -> str | None:
    """None when everything the plug-in needs is importable here or in its toolchain, or the reason with the exact
    command."""
    absent = _absent(plugin)
    if not absent or toolchain_of(plugin) is not None:
        return None
    return f"{plugin.name} needs {_not_installed(absent)}: {pip_line(plugin)}"


def _not_installed(modules: Sequence[str]) -> str:
    return f"{', '.join(modules)}, which {'is' if len(modules) == 1 else 'are'} not installed"


def missing_for_programs(source: Exporter) -> str | None:
    """None when a source that gives PyTorch programs can give one here, or what that needs beside, with the exact
    command."""
    absent = [module for module in source.capabilities.program_requires if not _importable(module)]
    if not absent:
        return None
    return (
        f"a PyTorch program is made of a model of flavor {source.name} with {_not_installed(absent)}: "
        f'pip install "compile-stage[{source.capabilities.program_extra}]"'
    )


def missing_for_form(backend: Backend, form: str) -> str | None:
    """None when what a backend needs for models in a form is in this environment, or the reason with the exact
    command."""
    needed = backend.capabilities.form_requires.get(form, ())
    elsewhere = bool(needed) and toolchain_of(backend) is not None
    absent = [module for module in needed if elsewhere or not _importable(module)]
    if not absent:
        return None
    lacked = f"{', '.join(absent)}, which its toolchain does not hold" if elsewhere else _not_installed(absent)
    line = f'pip install "compile-stage[{backend.extra}]"' if backend.extra else f"pip install {' '.join(absent)}"
    return f"{backend.name} takes {form} with {lacked}: {line}"


def toolchain_name(plugin: Plugin) -> str:
    """What the toolchain of a backend or source is called: the one that it names, or of a backend its own name. Empty
    for what has none, whether or not there is a lock file.

    Raises:
        UsageError: It is no plain name. A path would name an interpreter that the plug-in itself brought, and an
            interpreter starts before anything confines it.
    """
    declared = plugin.capabilities
    if isinstance(declared, BackendCapabilities):
        name = declared.toolchain or plugin.name
    else:
        name = declared.toolchain if isinstance(declared, SourceCapabilities) else ""
    if name and not is_toolchain_name(name):
        raise UsageError(
            f"the plug-in {plugin.name!r} names a toolchain {name!r}, which is no plain name",
            fix="update or uninstall its package; letters, digits, '.', '_' and '-' make a name",
        )
    return name


def has_toolchain(plugin: Plugin) -> bool:
    """True for a backend or source that can run in an environment of its own, made or not."""
    name = toolchain_name(plugin)
    return bool(name) and lock_of(name) is not None


def toolchain_of(plugin: Plugin) -> Toolchain | None:
    """The isolated environment in which a backend or source runs; None when its packages are in this one, or
    nowhere."""
    name = toolchain_name(plugin)
    return find_toolchain(name, lock_of(name)) if name and _absent(plugin) else None


def users_of_toolchains() -> dict[str, list[Plugin]]:
    """Toolchain → the backends and sources that can run in it, sorted; of those that have a lock file. A plug-in that
    can't be loaded runs nowhere."""
    users: dict[str, list[Plugin]] = {}
    for group in _WITH_TOOLCHAINS:
        for name in names(group):
            with contextlib.suppress(Exception):  # whoever uses that plug-in sees the reason
                plugin: Plugin = load(group, name)
                if has_toolchain(plugin):
                    users.setdefault(toolchain_name(plugin), []).append(plugin)
    return dict(sorted(users.items()))


def interpreter_of(backend: str) -> str:
    """The Python executable that a backend's workers run; empty for this one."""
    home = toolchain_of(load("backends", backend))
    return home.interpreter if home is not None else ""


def interpreter_of_source(flavor: str) -> str:
    """The Python executable that runs the originals of a flavor; empty for this one."""
    home = toolchain_of(load("sources", flavor)) if flavor in names("sources") else None
    return home.interpreter if home is not None else ""


def packages_of(backend: Backend) -> Mapping[str, str]:
    """Distribution → version of what a backend compiles with, here or in its toolchain."""
    home = toolchain_of(backend)
    return home.packages if home is not None else backend.toolchain()


def source_toolchain(flavor: str) -> dict[str, str]:
    """Name, digest of the lock, and versions of the environment that runs the originals of a flavor; empty where that
    is this one."""
    if flavor not in names("sources"):
        return {}
    source = load("sources", flavor)
    home = toolchain_of(source)
    if home is None:
        return {}
    held = {package.lower().replace("_", "-"): version for package, version in home.packages.items()}
    modules = [module.partition(".")[0].replace("_", "-") for module in source.requires]
    versions = {name: held[name] for module in modules for name in (module, f"{module}-cpu") if name in held}
    return {"name": home.name, "lock": home.digest, **versions}


def lock_of(toolchain: str) -> Path | None:
    """The lock file of a toolchain: the user's own, or `locks/NAME.txt` beside the module of a backend or source. None
    when there is none."""
    shipped = shipped_lock(toolchain)
    return lock_in_force(toolchain, shipped) if shipped is not None else None


def shipped_lock(toolchain: str) -> Path | None:
    """Where the lock of a toolchain lies, or would lie beside its requirements, `NAME.in`. None where no plug-in ships
    either."""
    places = [_lock_beside(entry, toolchain) for group in _WITH_TOOLCHAINS for entry in _entries(group).values()]
    there = (file for file in places if file is not None and (file.is_file() or file.with_suffix(".in").is_file()))
    return next(there, None)


def _lock_beside(entry: EntryPoint, toolchain: str) -> Path | None:
    spec = _find_spec(entry.module)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "locks" / f"{toolchain}.txt"


def absent_to_open(backend: Backend) -> list[str]:
    """The modules that opening an artifact needs and that are not here: the backend's `opens_with`, or all that it
    requires."""
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
    if has_toolchain(plugin):
        return f"compile-stage toolchain install {toolchain_name(plugin)}"
    return (
        f'pip install "compile-stage[{plugin.extra}]"' if plugin.extra else f"pip install {' '.join(plugin.requires)}"
    )


def link_packages(folder: Path) -> Path:
    """Fill a folder with links to this package and to every backend's and source's, with what makes their entry points
    found: on the path of another interpreter, it runs the very code that runs here. Returns the folder."""
    folder.mkdir(parents=True)
    for entry in [entry for group in _WITH_TOOLCHAINS for entry in _entries(group).values()]:
        top = importlib.util.find_spec(entry.module.partition(".")[0])
        if top is not None and top.origin is not None:
            origin = Path(top.origin)
            _link(folder, origin.parent if top.submodule_search_locations else origin)
        described = getattr(entry.dist, "_path", None)  # the standard library has no public name for it
        if isinstance(described, Path):
            _link(folder, described)
    return folder


def folders_of_packages() -> list[str]:
    """The folders of all plug-ins' packages, which an editable install may have anywhere."""
    tops = {entry.module.partition(".")[0] for group in _CAPABILITIES for entry in _entries(group).values()}
    specs = (importlib.util.find_spec(top) for top in sorted(tops))
    places = [[*(spec.submodule_search_locations or ()), spec.origin or ""] for spec in specs if spec is not None]
    return [place for several in places for place in several if Path(place).is_absolute()]


def _link(folder: Path, path: Path) -> None:
    link = folder / path.name
    if not link.exists():
        link.symlink_to(path.absolute(), target_is_directory=path.is_dir())


def package_versions(*distributions: str) -> dict[str, str]:
    """Distribution → version of those that are installed."""
    found = {}
    for name in distributions:
        try:
            found[name] = _version(distribution(name))
        except PackageNotFoundError:
            continue
    return found


def _version(installed: Distribution) -> str:
    """Read once from each state of its metadata: a run asks for some packages a hundred times, and parsing takes
    milliseconds."""
    described = getattr(installed, "_path", None)  # the standard library has no public name for it
    try:
        changed = (described / "METADATA").stat().st_mtime_ns if isinstance(described, Path) else None
    except OSError:  # an egg's, or in an archive
        changed = None
    return installed.version if changed is None else _version_in(str(described), changed)


@cache
def _version_in(described: str, changed: int) -> str:
    """Args:
    described: The folder of the metadata.
    changed: When its file was written, in nanoseconds; another time is another state.
    """
    return Distribution.at(described).version


def _suggest(word: str, allowed: tuple[str, ...]) -> str:
    near = did_you_mean(word, allowed)
    listed = f"one of: {', '.join(allowed)}" if allowed else "none is installed; reinstall compile-stage"
    return f"did you mean {near!r}? {listed}" if near else listed


def _importable(module: str) -> bool:
    try:
        return _find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _find_spec(module: str) -> ModuleSpec | None:
    """As `importlib.util.find_spec`, which imports the packages that a module lies in; nothing is imported here."""
    name, *rest = module.split(".")
    spec = importlib.util.find_spec(name)
    for part in rest:
        places = spec.submodule_search_locations if spec is not None else None
        if places is None:
            return None
        name = f"{name}.{part}"
        # A namespace package's own list asks for the imported parent.
        spec = PathFinder.find_spec(name, list(getattr(places, "_path", places)))
    return spec


_SINGULAR: dict[Group, str] = {
    "backends": "backend",
    "sources": "source",
    "lowerings": "precision lowering",
    "registries": "registry",
    "engines": "engine",
}
