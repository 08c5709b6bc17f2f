"""An MLflow model directory as files: what both registries read from it and how it gets into the cache."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from compile_stage.core import alias_history
from compile_stage.core.cache import flush_tree
from compile_stage.core.cache_eviction import touch
from compile_stage.core.digest import digest_of, digest_tree
from compile_stage.core.error_codes import Code
from compile_stage.core.errors import (
    AliasMovedError,
    FilesGoneError,
    IntegrityError,
    RegistryError,
    SourceError,
    UsageError,
    first_line,
)
from compile_stage.core.file_trees import refuse_tree
from compile_stage.core.leftovers import part_folder, remove_leftovers
from compile_stage.core.records import JsonMap, Receipt, record
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.registry.descriptions import read_text
from compile_stage.serving.examples import EXAMPLE_KEYS, is_example_name
from compile_stage.serving.version_tags import DELETED

TAG = "compile_stage."
KEY_TAG = TAG + "key"
DIGEST_TAG = TAG + "digest"
FAMILY_TAG = TAG + "family_key"
AFTER_TAG = TAG + "family_after"
REPORT_TAG = TAG + "report"
DAMAGED = "damaged:"
"""Before the key of a version that a run found damaged, and published again: the key finds it no more."""
OUR_FLAVOR = "compile_stage"
DATASET_SUFFIXES = (".npz", ".parquet", ".csv")

# MLmodel carries ids and times, registered_model_meta the name under which it was downloaded: neither is the model.
NOT_PAYLOAD = ("MLmodel", "registered_model_meta")

# The parts of MLmodel that decide how the payload is read.
_DESCRIPTION = ("flavors", "signature", "saved_input_example_info")

# One model directory often lists several flavors; the first of these that is there reads it best.
_FLAVOR_ORDER = (
    "onnx",
    "pytorch",
    "transformers",
    "xgboost",
    "lightgbm",
    "catboost",
    "statsmodels",
    "sklearn",
    "keras",
    "tensorflow",
)
_GENERIC = "python_function"

_ALIAS = re.compile(r"[A-Za-z0-9_-]+")
_LONGEST_ALIAS = 255  # as MLflow has it
_VERSION_LIKE = re.compile(r"v\d+", re.IGNORECASE)
_MODEL_ID_LIKE = re.compile(r"m-[0-9a-f]*")
_NAME_FORBIDS = set("/:@'\"`\\%?")  # MLflow registers one with ?, and finds no files of models:/A?B/1
_LONGEST_NAME = 250
_RENAME = "A model that is registered so is renamed with MlflowClient().rename_registered_model(name, new_name)"


@record
class ModelFiles:
    """What `MLmodel` says.

    Attributes:
        flavor: The flavor that reads it best; `python_function` when it has no other.
        model_id: MLflow's `m-...` as written in the file; empty when there is none.
        described: Digest of what the file says of how the model is read, without ids and times.
        mlmodel: That itself, as plain JSON.
    """

    flavor: str
    signature: Signature | None
    model_id: str
    run_id: str
    described: str
    mlmodel: JsonMap


def demand_mlmodel(folder: Path, uri: str, removed: Callable[[], str | None]) -> None:
    """Raise where a published version has no `MLmodel`.

    Args:
        removed: Tells why the files were removed for good, by what the registry itself records; None where it records
            nothing of the kind, as while the disk of the files is not mounted.

    Raises:
        IntegrityError: Its other files are there.
        FilesGoneError: None is, and `removed` says why none comes back.
        RegistryError: None is.
    """
    if (folder / "MLmodel").is_file():
        return
    if (folder / "data" / "manifest.json").is_file():
        raise IntegrityError("it is not what was published: MLmodel is missing", where=uri)
    reason = removed()
    raise (RegistryError if reason is None else FilesGoneError)(
        f"the registry lists the model, but its files are not there ({reason or 'no MLmodel'})",
        fix="delete the version, and run the stage again: it publishes a new one",
        where=uri,
    )


def read_model(folder: Path, uri: str) -> ModelFiles:
    """Read `MLmodel` of a model directory.

    Raises:
        RegistryError: The folder holds no `MLmodel`: its files are gone, or were never uploaded.
        SourceError: `MLmodel` can't be parsed, or names a model that compile-stage itself published.
    """
    from mlflow.models import Model

    if not (folder / "MLmodel").is_file():
        raise RegistryError(
            "the registry lists the model, but its files are not there (no MLmodel)",
            fix="log the model again; a version stays READY even after its artifacts were deleted",
            where=uri,
        )
    try:
        read_text(folder / "MLmodel")  # raises for what would keep the next line busy
        model = Model.load(str(folder))
        flavors = list(model.flavors)
        signature = _tensor_signature(model.signature)
        content = model.to_dict()
        parts: JsonMap = json.loads(json.dumps({part: content.get(part) for part in _DESCRIPTION}, default=str))
    except Exception as error:  # a damaged file may raise whatever the YAML, JSON or schema reader likes
        raise SourceError(
            f"MLmodel can't be parsed: {first_line(error)}", fix="log the model again", where=uri
        ) from error
    if OUR_FLAVOR in flavors:
        raise SourceError(
            "this model was published by compile-stage: it is already compiled and can't be a source",
            fix="name the model that it was made from; its tag compile_stage.source says which",
            where=uri,
        )
    if (escaping := _escaping_example(content.get("saved_input_example_info"))) is not None:
        raise SourceError(
            f"MLmodel names the input example {escaping!r}, which can't be a file of the model's folder",
            fix="log the model again",
            where=uri,
        )
    if not flavors:
        raise SourceError(
            "MLmodel names no flavor, so nothing can read the model", fix="log the model again", where=uri
        )
    return ModelFiles(
        flavor=pick_flavor(flavors),
        signature=signature,
        model_id=model.model_id or "",
        run_id=model.run_id or "",
        described=digest_of([parts[part] for part in _DESCRIPTION]),
        mlmodel=parts,
    )


def _escaping_example(info: Any) -> str | None:
    """The first name of an input example that is not that of a file in the model's own folder, as MLflow writes it."""
    names = [info.get(key) for key in EXAMPLE_KEYS] if isinstance(info, Mapping) else []
    return next((str(name) for name in names if name is not None and not is_example_name(name)), None)


def pick_flavor(flavors: list[str]) -> str:
    """The flavor that reads the model best; `python_function` only when nothing else is there."""
    for known in _FLAVOR_ORDER:
        if known in flavors:
            return known
    own = [flavor for flavor in flavors if flavor != _GENERIC]
    return own[0] if own else _GENERIC


def payload_digest(folder: Path) -> str:
    """Digest of a source model's files without ids, times and registry names."""
    return digest_tree(folder, leave_out=NOT_PAYLOAD)


def keep(into: Path, uri: str, fill: Callable[[Path], Path]) -> Path:
    """Bring a model directory into the cache folder `into`, under a name that is the digest of its files.

    `fill(folder)` downloads below a temporary folder and returns the model directory in it. Safe for several
    processes at once. A folder that is already there is verified, and replaced when it does not hold.
    """
    into = into.resolve()  # MLflow answers with resolved paths
    into.mkdir(parents=True, exist_ok=True)
    remove_leftovers(into)
    with part_folder(into) as part:
        filled = fill(part)
        if not (filled / "MLmodel").is_file():
            read_model(filled, uri)  # raises with the reason
        if (reason := refuse_tree(filled)) is not None:
            raise SourceError(reason, fix="log the model again, with its own files", where=uri)
        (filled / "registered_model_meta").unlink(missing_ok=True)
        # MLmodel is part of this name, though not of the payload's digest: the same weights may be logged with another
        # signature.
        digest = digest_tree(filled)
        final = into / digest[7:]
        with FileLock(f"{final}.lock"):
            if not final.is_dir() or digest_tree(final) != digest:
                shutil.rmtree(final, ignore_errors=True)
                flush_tree(filled)
                filled.rename(final)
            touch(final)
    return final


def not_published(uri: str) -> RegistryError:
    """The error for a version that compile-stage did not publish, such as an original."""
    return RegistryError(
        "this is not a version that compile-stage published",
        fix="name one that `compile-stage run` published, or a copy of one that has its tags: MLflow's "
        "copy_model_version copies them, register_model does not. `compile-stage profile` and `debug` take an original "
        "with -p POLICY",
        where=uri,
    )


def moved_meanwhile(alias: str, now: str, where: str) -> AliasMovedError:
    """What to say of an alias that somebody else moved between a look at it and its move.

    Args:
        now: What it points to; empty for nothing.
    """
    return AliasMovedError(
        f"somebody else moved {alias!r} meanwhile: it points to {now or 'nothing'}",
        fix="look at who did, and run again",
        where=where,
    )


def check_published(folder: Path, tags: Mapping[str, str], uri: str) -> None:
    """Compare the fetched files of a version with its digest tag. Every version that compile-stage published has one.

    Raises:
        RegistryError: Neither its tags nor its files have anything of ours: it is an original.
        IntegrityError: The tag is missing, or `data/` has another digest; or a run found it damaged before.
    """
    if not any(tag.startswith(TAG) for tag in tags) and not (folder / "data" / "manifest.json").exists():
        raise not_published(uri)
    if tags.get(KEY_TAG, "").startswith(DAMAGED):
        raise IntegrityError(
            "a run found its files damaged, and published a new version in its place",
            fix="use that version; find out who changed the registry's files",
            where=uri,
        )
    published = tags.get(DIGEST_TAG)
    if not published:
        raise IntegrityError(
            f"the version has no tag {DIGEST_TAG}, so nothing says which files were published",
            fix="make a copy anew with MLflow's copy_model_version, which copies the tags (register_model does not); "
            "else publish again under a new version, and find out who removed the tag",
            where=uri,
        )
    if digest_tree(folder / "data") != published:
        raise IntegrityError(
            f"the files are not those that were published (data/ does not have the digest {published})",
            fix="publish again under a new version; find out who changed the registry's files",
            where=uri,
        )


def copy_model(source: Path, into: Path, uri: str) -> Path:
    """Copy a model directory into the folder `into`; links to its own files are followed, and compiled Python is left
    behind.

    Raises:
        SourceError: It holds a link that leads out of it, a named pipe, or a device.
    """
    if (reason := refuse_tree(source)) is not None:
        raise SourceError(reason, fix="keep only the model's own files in its folder", where=uri)
    shutil.copytree(source, into, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return into


def link_or_copy(source: str, destination: str) -> str:
    """For `shutil.copytree`: a hard link where the file system allows it, so that gigabytes of weights are not copied
    to change one small file."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)
    return destination


def check_name(name: str) -> None:
    """Raise SourceError for a model name that could be read as another kind of reference. MLflow registers some of
    these. It is no trouble of the registry's: nobody needs to ask again."""
    bad = "".join(sorted(_NAME_FORBIDS & set(name)))
    long = len(name) > _LONGEST_NAME
    if not name.strip() or bad or name.startswith(".") or long:
        reason = f": it holds {bad}" if bad else f": it has {len(name)} characters" if long else ""
        raise SourceError(
            f"{name!r} can't be used as a model name{reason}",
            fix=f"use letters, digits, blanks and . _ -; at most {_LONGEST_NAME} of them, not starting with a dot. "
            f"{_RENAME}",
        )
    if _MODEL_ID_LIKE.fullmatch(name):
        raise SourceError(
            f"{name!r} is ambiguous: it reads as the id of a logged model", fix=f"use another name. {_RENAME}"
        )


def nothing_to_roll_back(name: str, alias: str, held: Collection[str], where: str) -> RegistryError:
    """What to say where a model, whose aliases are `held`, has none that is called so."""
    return RegistryError(
        f"{name!r} has no alias {alias!r}, so there is nothing to roll back",
        fix=f"name one that it has: {', '.join(sorted(held))}"
        if held
        else "it has none; `compile-stage promote` sets one",
        where=where,
        code=Code.NOT_IN_REGISTRY,
    )


def check_alias(alias: str) -> None:
    """Raise UsageError for an alias that a registry refuses or would confuse with a version."""
    if len(alias) > _LONGEST_ALIAS:
        raise _too_long(alias, _LONGEST_ALIAS)
    if not _ALIAS.fullmatch(alias) or alias.lower() == "latest" or _VERSION_LIKE.fullmatch(alias) or alias.isdigit():
        raise UsageError(
            f"{alias!r} can't be an alias",
            fix="use letters, digits, _ and -; neither 'latest' nor a version such as 'v1' or '3'",
        )


def check_alias_to_move(alias: str) -> None:
    """The same, and raise UsageError for an alias whose history no tag can keep: it would move to a first version, and
    then neither on nor back."""
    check_alias(alias)
    if len(alias) > alias_history.LONGEST_ALIAS:
        raise _too_long(alias, alias_history.LONGEST_ALIAS)


def _too_long(alias: str, longest: int) -> UsageError:
    return UsageError(
        f"an alias of {len(alias)} characters ({alias[:20]}...) is too long", fix=f"use at most {longest} characters"
    )


def replaced(tags: Mapping[str, str]) -> bool:
    """True of a version in whose place a run published another, since it was damaged or its logged model deleted."""
    return tags.get(KEY_TAG, "").startswith((DAMAGED, DELETED))


def replaced_note(uri: str, reason: str, prefix: str = DAMAGED) -> str:
    """What the receipt of a version says that was published in another's place."""
    damaged = prefix == DAMAGED
    return (
        f"{uri}, made from the same inputs, {'is damaged in the registry' if damaged else 'will lose its files'} "
        f"({reason}), so this version was published in its place; find out who "
        + ("changed the registry's files" if damaged else "deletes logged models")
    )


def report_state(receipt: Receipt) -> str:
    """The value of REPORT_TAG once the report that holds this receipt lies with the version."""
    return f"final, promoted to {receipt.promoted_to}" if receipt.promoted_to else "final"


def has_report(tags: Mapping[str, str], receipt: Receipt) -> bool:
    """True when a version with these tags has its final report: one that says as much of its promotion as the receipt
    does."""
    held = tags.get(REPORT_TAG, "")
    return held == report_state(receipt) or (bool(held) and not receipt.promoted_to)


def latest_of_family(versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The versions that no other was made after, the newest first.

    Args:
        versions: All of a family: version → its tags.
    """
    after = {
        earlier
        for version, tags in versions.items()
        for earlier in tags.get(AFTER_TAG, "").split(", ")
        if earlier.isdecimal() and int(earlier) < int(version)
    }
    return sorted(set(versions) - after, key=int, reverse=True)


def prefixed(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags under our prefix; a tag that has it, or that is MLflow's own, stays as it is."""
    return {key if key.startswith((TAG, "mlflow.")) else TAG + key: str(value) for key, value in tags.items()}


def check_dataset_name(name: str) -> None:
    """Raise RegistryError for a data set name that would leave its folder."""
    if not name or name.startswith(".") or set(name) & set("/\\\0"):
        raise RegistryError(f"{name!r} can't be a data set's name", fix="use a plain name, without slashes")


def _tensor_signature(signature: Any) -> Signature | None:
    """MLflow's signature as tensor specs; None when it is missing or describes columns or text."""
    if signature is None or signature.inputs is None or not signature.inputs.is_tensor_spec():
        return None
    outputs = signature.outputs
    if outputs is None or not outputs.is_tensor_spec():
        return None
    return Signature(inputs=_specs(signature.inputs, "input"), outputs=_specs(outputs, "output"))


def _specs(schema: Any, unnamed: str) -> tuple[TensorSpec, ...]:
    specs = []
    for spec in schema.inputs:
        name = spec.name or unnamed  # MLflow leaves a model's only tensor without a name
        shape = tuple(_dim(name, axis, size) for axis, size in enumerate(spec.shape))
        dtype = "str" if spec.type.kind in "OUS" else spec.type.name
        specs.append(TensorSpec(name=name, dtype=dtype, shape=shape))
    return tuple(specs)


def _dim(name: str, axis: int, size: int) -> int | str:
    if size >= 0:
        return int(size)
    return "batch" if axis == 0 else f"{name}_{axis}"
