"""`manifest.json`: what a published model is, what it was made from, and the digest of every file.

Vendored into every published model beside `compile_stage.flavor`. The fields:

    schema                "compile-stage/manifest/v1"
    artifact              the `Artifact` record; its path is relative to data/
    files, code           relative path → sha256:..., of the files in data/ and in the model directory's code/
    beside                the same of what else lies in the model directory, but for `MLmodel`, into which a registry writes
    digest                of all of the manifest but this: `sealed`
    key                   idempotency key of the publication
    source                {uri, name, version, flavor, digest, registry}
    policy                {name, digest, owner}
    job, target, scheme   the records; the job holds the gates
    data                  what it was proven on: {spec, samples by role}
    kept                  precision → nodes that stay in it
    hardware, fingerprint the machine that it was compiled and proven on; only compiled, where there is no verdict
    toolchain, runtime    package → version: that made it; that must be there to run it
    python                of the stage that made it
    verdict, timing       the proof, and the measured medians; verdict is null for what could not be validated where it was compiled
    performance, waivers, budget
                          what a validation elsewhere goes by
    answer                how the source's pyfunc answered (`core.ports.Exporter.answer`)
    threads               compute threads
    on_hardware_mismatch  error | warn | ignore: on another machine, or with another version of the runtime
    signature             names, types and shapes of the graph

Beside `data/`, in `validations/FINGERPRINT.json`, lies what `compile-stage validate` found on a machine
(`write_validation`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.digest import canonical_json, digest_file, digest_of, list_tree, revive
from compile_stage.core.environment import Hardware, hardware
from compile_stage.core.errors import IntegrityError
from compile_stage.core.records import Artifact

MANIFEST_SCHEMA = "compile-stage/manifest/v1"
DATA_NAME = "data"
ARTIFACT_NAME = "artifact"
MANIFEST_NAME = "manifest.json"
VALIDATIONS = "validations"
VALIDATION_SCHEMA = "compile-stage/validation/v1"


def read_manifest(model_dir: str | Path) -> dict[str, Any]:
    """The manifest of a model directory (or of its `data` folder).

    Raises:
        IntegrityError: There is none, or it can't be read, or it is of a version that this code does not know.
    """
    file = data_folder(model_dir) / MANIFEST_NAME
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise IntegrityError("it has no manifest, so it was not published by compile-stage", where=str(file)) from error
    except (OSError, ValueError) as error:
        raise IntegrityError(f"the manifest can't be read: {error}", where=str(file)) from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != MANIFEST_SCHEMA:
        raise IntegrityError(
            f"the manifest is of the schema {schema!r}, and this version of compile-stage reads {MANIFEST_SCHEMA!r}",
            fix="use the version of compile-stage that published it, or a newer one",
            where=str(file),
        )
    return dict(manifest)


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest as plain JSON values, with the digest of all else in it."""
    whole = json.loads(canonical_json({key: value for key, value in manifest.items() if key != "digest"}))
    return {**whole, "digest": digest_of(whole)}


def check_integrity(model_dir: str | Path, *, beside: bool = False) -> dict[str, Any]:
    """Compare every file of a model directory with the manifest; returns the manifest.

    Args:
        beside: Also what MLflow keeps beside the data and the code. Not asked when a model is loaded:
            `mlflow models update-pip-requirements` is no reason not to serve it.

    Raises:
        IntegrityError: A file was changed, is missing, or was added; the message names it.
    """
    data = data_folder(model_dir)
    manifest = read_manifest(data)
    if manifest != sealed(manifest):
        raise IntegrityError(
            "the manifest was changed after it was written: its own digest differs",
            fix="fetch the model again",
            where=str(data / MANIFEST_NAME),
        )
    files, code = manifest.get("files"), manifest.get("code", {})
    if not isinstance(files, Mapping) or not isinstance(code, Mapping) or not files:
        raise IntegrityError("the manifest lists no files", where=str(data / MANIFEST_NAME))
    artifact_of(manifest, data)
    present = {name: data / name for name in list_tree(data, leave_out=(MANIFEST_NAME,))}
    if code:
        inside = (name for name in list_tree(data.parent / "code") if "__pycache__" not in name)
        present |= {f"code/{name}": data.parent / "code" / name for name in inside}
    listed = {**files, **code}
    if beside and data.name == DATA_NAME:
        listed |= manifest.get("beside", {})
        present |= {name: data.parent / name for name in list_beside(data.parent)}
    for name in sorted(listed.keys() | present.keys()):
        if name not in present:
            raise IntegrityError(f"{name} is missing", fix="fetch the model again", where=str(data.parent))
        if name not in listed:
            raise IntegrityError(
                f"{name} is not among the published files", fix="fetch the model again", where=str(data.parent)
            )
        if digest_file(present[name]) != listed[name]:
            raise IntegrityError(
                f"{name} is not what was published: its digest differs",
                fix="fetch the model again",
                where=str(data.parent),
            )
    return manifest


def list_beside(model_dir: Path) -> tuple[str, ...]:
    """Files of a model directory that are neither data nor code, nor written by a registry or by
    `compile-stage validate`."""
    theirs = (DATA_NAME, "code", VALIDATIONS, "MLmodel", "registered_model_meta")
    return tuple(name for name in list_tree(model_dir) if name.partition("/")[0] not in theirs)


def data_folder(model_dir: str | Path) -> Path:
    """The `data` folder of a model directory, or the folder itself when it is one."""
    folder = Path(model_dir)
    return folder if (folder / MANIFEST_NAME).is_file() or not (folder / DATA_NAME).is_dir() else folder / DATA_NAME


def artifact_of(manifest: Mapping[str, Any], data: Path) -> Artifact:
    """The manifest's artifact, with its path below `data`."""
    try:
        artifact: Artifact = revive(Artifact, json.loads(canonical_json(manifest["artifact"])))
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"the manifest describes no artifact: {error}", where=str(data)) from error
    artifact = replace(artifact, path=str(data / ARTIFACT_NAME))
    entry = Path(artifact.entry)
    if entry.is_absolute() or ".." in entry.parts or not (data / ARTIFACT_NAME / entry).exists():
        raise IntegrityError(f"artifact/{artifact.entry} is missing", where=str(data))
    return artifact


def validations(manifest: Mapping[str, Any], model_dir: str | Path) -> list[dict[str, Any]]:
    """What was found of this very artifact on other machines, as `write_validation` wrote it. A file that was changed,
    or speaks of another artifact or of another machine than its name says, counts for nothing."""
    data = data_folder(model_dir)
    folder = data.parent / VALIDATIONS
    whole = []
    for file in sorted(folder.glob("*.json")) if data.name == DATA_NAME else ():
        try:
            validation = json.loads(file.read_text(encoding="utf-8"))
            sealed = validation.pop("digest")
            machine = revive(Hardware, validation["hardware"]).fingerprint
            sound = sealed == digest_of(validation) and validation["fingerprint"] == machine == file.stem
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        of_this = sound and validation["artifact"] == manifest["artifact"]["digest"]
        if of_this and validation["schema"] == VALIDATION_SCHEMA:
            whole.append(validation)
    return whole


def write_validation(validation: Mapping[str, Any], folder: Path) -> Path:
    """Seal a validation with the digest of what it says, as `folder/FINGERPRINT.json`."""
    whole = {"schema": VALIDATION_SCHEMA, **validation}
    whole = json.loads(canonical_json(whole))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{whole['fingerprint']}.json"
    text = json.dumps({**whole, "digest": digest_of(whole)}, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
    return file


def refuse_machine(manifest: Mapping[str, Any], model_dir: str | Path) -> str | None:
    """None when this machine and its runtime are those that the artifact was proven on, or what differs."""
    proof = _proof_here(manifest, model_dir)
    differs = _other_machine(manifest, proof)
    differs += [f"{name}: {there} there, {now} here" for name, there, now in _other_runtime(proof or manifest)]
    return "; ".join(differs) or None


def runtime_to_install(manifest: Mapping[str, Any], model_dir: str | Path) -> list[str]:
    """The requirements that bring the proven versions of the runtime; empty where they would not make this machine the
    one of the proof.

    So it is for another build of the same version: which index has it is not known here.
    """
    proof = _proof_here(manifest, model_dir)
    wanted = [(pin(name, there), pin(name, now)) for name, there, now in _other_runtime(proof or manifest)]
    if _other_machine(manifest, proof) or any(there == now for there, now in wanted):
        return []
    return [there for there, _ in wanted]


def pin(name: str, version: str) -> str:
    """A requirement without the local label of a build: of `2.13.0+cpu` the public index has `2.13.0` only, and where
    there is a choice that takes both.

    The manifest keeps the label, and `refuse_machine` tells another build when the model is loaded.
    """
    return f"{name}=={version.partition('+')[0]}"


def _proof_here(manifest: Mapping[str, Any], model_dir: str | Path) -> Mapping[str, Any] | None:
    """What `compile-stage validate` found on such a machine as this."""
    here = hardware().fingerprint
    return next((v for v in validations(manifest, model_dir) if v["fingerprint"] == here), None)


def _other_machine(manifest: Mapping[str, Any], proof: Mapping[str, Any] | None) -> list[str]:
    here = hardware()
    if proof is not None:
        return [] if proof["passed"] else ["its validation on this machine failed"]
    if "verdict" in manifest and manifest["verdict"] is None:
        return [
            f"it was compiled on {manifest.get('fingerprint')} for other hardware, and not validated on this machine"
        ]
    if manifest.get("fingerprint") == here.fingerprint:
        return []
    differs = []
    there = manifest.get("hardware", {})
    for field in fields(Hardware):
        now, then = json.loads(canonical_json(getattr(here, field.name))), there.get(field.name)
        if now != then:
            differs.append(f"{field.name}: {_shown(then)} there, {_shown(now)} here")
    return differs or [f"fingerprint: {manifest.get('fingerprint')} there, {here.fingerprint} here"]


def _other_runtime(proven: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Package, its version in what was proven, the one that is installed: of those that differ. What is not installed
    is no difference."""
    wanted: Mapping[str, str] = proven.get("runtime", {})
    installed = plugins.package_versions(*wanted)
    return [(name, there, installed[name]) for name, there in wanted.items() if installed.get(name, there) != there]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
