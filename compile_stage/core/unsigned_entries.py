"""What an entry of a shared cache must be where nobody signed it: lowered graphs and compiled artifacts that say of
themselves what is true."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.digest import revive
from compile_stage.core.environment import Hardware
from compile_stage.core.records import Artifact, PortableModel


def refuse_unsigned(step: str, key: Mapping[str, Any], value: Any, files: str, names: Mapping[str, int]) -> str | None:
    """None when an entry that nobody signed may be used: it says of its files what is true, and opening them runs no
    code that stands in them.

    Args:
        value: The step's answer, of any content.
        files: Digest of the files.
        names: Their names and sizes in bytes.
    """
    name = step.partition("/")[0]
    try:
        if name == "compile":
            artifact: Artifact = revive(Artifact, value["artifact"])
            if float(value["compile_s"]) < 0 or artifact.path != ".":
                return "it says of itself what no compilation says"
            if artifact.backend != key["backend"]:
                return f"it is an artifact of {artifact.backend[:80]!r}"
            if plugins.load("backends", artifact.backend).capabilities.artifact_is_code:
                return f"nobody signed it, and an artifact of {artifact.backend} is executable"
            said = (artifact.digest, artifact.size_bytes, artifact.precision)
            true = (files, sum(names.values()), key["scheme"]["precision"])
            if (reason := _refuse_path(artifact.entry, names) or _refuse_origin(artifact, key)) is not None:
                return reason
            return "its files are others" if said != true else None
        if name == "lower":
            model: PortableModel = revive(PortableModel, value)
            lowered = (model.digest, model.made_from, model.precision)
            asked = (files, key["model"], key["scheme"]["precision"])
            return _refuse_path(model.path, names) or ("its files are others" if lowered != asked else None)
    except (KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
        return f"it can't be read: {type(error).__name__}"
    return None if name == "tuning" else "nobody signed it"


def _refuse_origin(artifact: Artifact, key: Mapping[str, Any]) -> str | None:
    """The versions are published as requirements, which pip installs where the model is served; and what can't be run
    is not validated."""
    if artifact.not_runnable_here:
        return "nobody signed it, and it says that it can't be run here, so it would not be validated"
    if dict(artifact.toolchain) != _versions(artifact):
        return "it names other packages than those that compile here"
    machine: Hardware = revive(Hardware, key["hardware"])
    return None if artifact.hardware == machine.fingerprint else "it names another machine than its key"


def _versions(artifact: Artifact) -> dict[str, str]:
    """Package → version of what compiles here, as an artifact of that backend names it. Of a toolchain that is not
    imported here: what it holds of the packages that the artifact names."""
    backend = plugins.load("backends", artifact.backend)
    if (home := plugins.toolchain_of(backend)) is None:
        return dict(backend.toolchain())
    held = {_normalised(name): version for name, version in home.packages.items()}
    return {name: held[_normalised(name)] for name in artifact.toolchain if _normalised(name) in held}


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _refuse_path(path: str, names: Mapping[str, int]) -> str | None:
    """An entry may be a folder."""
    if any(PurePosixPath(name).is_relative_to(path) for name in names) and ".." not in path and path[:1] != "/":
        return None
    return f"it names {path!r}, which is no file of it"
