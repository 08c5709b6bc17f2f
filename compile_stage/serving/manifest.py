"""`manifest.json`: what a published model is, what it was made from, and the digest of every file.

Vendored into every published model beside `compile_stage.flavor`. The fields:

    schema                "compile-stage/manifest/v1"
    artifact              the `Artifact` record; its path is relative to data/
    files, code           relative path → sha256:..., of the files in data/ and in the model directory's code/
    beside                the same of what else lies in the model directory, but for `MLmodel`, which a registry changes
    mlmodel               what of `MLmodel` decides what is served (`compile_stage.serving.mlmodel`)
    digest                of all of the manifest but this: `sealed`
    key                   idempotency key of the publication
    source                {uri, name, version, flavor, digest, registry}, and toolchain where the original ran in one:
                          its name, the digest of its lock, package → version
    policy                {name, digest, owner}
    job, target, scheme   the records; the job holds the gates
    data                  what it was validated on: {spec, samples by role}
    kept                  precision → nodes that stay in it
    hardware, fingerprint the machine that it was compiled and validated on; only compiled, where there is no verdict
    toolchain, runtime    package → version: that made it; that must be there to run it
    python                of the stage that made it
    made_by               what else has a say in the bytes: versions and digests of plug-ins and of our code
                          (`verify --rebuild`)
    verdict, timing       the validation, and the measured medians; verdict is null for what was not validated where
                          it was compiled
    performance, waivers, budget
                          what a validation elsewhere goes by
    answer                how the source's pyfunc answered (`core.ports.Exporter.prediction_format`); `text` in it says
                          how texts become inputs and outputs answers (`compile_stage.serving.text`), `media` the same
                          of pictures and recordings (`compile_stage.serving.media`)
    threads               compute threads
    batches               the batch sizes that were proven (`serving.batches`); missing in those of earlier versions
    missing               where a NaN is refused (`serving.missing_numbers`); null for what was not validated,
                          missing in those of earlier versions: then it is refused nowhere
    taken_values          which whole numbers and categories are taken (`serving.taken_values`); null for what was not
                          validated, missing in those of earlier versions: then all are
    largest               the largest shape of each input that `shapes` of the policy names, or the trace of the
                          original limits (`serving.shape_limits`); missing in those of earlier versions
    smallest              the smallest that the trace leaves; missing in those of earlier versions
    conditions            what else sizes must hold (`serving.size_conditions`); missing in those of earlier versions
    on_hardware_mismatch  error | warn | ignore: on another machine, or with another version of the runtime
    signature_required    the policy asks for signatures: without a trusted one it is not loaded
    signature             names, types and shapes of the graph
    family, variants      of a version with several artifacts (`compile_stage.serving.variants`)

Beside `data/`, in `validations/FINGERPRINT.json` (of a variant `FINGERPRINT--ID.json`), lies what `compile-stage
validate` found on a machine (`write_validation`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.digest import canonical_json, digest_file, digest_of, list_tree, revive
from compile_stage.core.environment import Hardware, hardware
from compile_stage.core.errors import IntegrityError
from compile_stage.core.json_files import read_json_object
from compile_stage.core.read_errors import raise_if_disk_fails
from compile_stage.core.records import Artifact
from compile_stage.serving.batches import ProvenBatches
from compile_stage.serving.bytecode import refuse_bytecode
from compile_stage.serving.mlmodel import MLMODEL, check_mlmodel
from compile_stage.serving.refused_values import RefusedValues
from compile_stage.serving.signatures import SIGNATURE_FOLDER, TEST_PREDICATE, subject_of, verify_statement
from compile_stage.serving.trust import Trust
from compile_stage.serving.variant_files import demand_inside, kept_together, put_together, shares_files

MANIFEST_SCHEMA = "compile-stage/manifest/v1"
DATA_NAME = "data"
ARTIFACT_NAME = "artifact"
MANIFEST_NAME = "manifest.json"
VALIDATIONS = "validations"
VALIDATION_SCHEMA = "compile-stage/validation/v1"
ENVIRONMENT_FILES = ("conda.yaml", "python_env.yaml", "requirements.txt")
"""What MLflow makes an environment from, and has a command to change."""


def read_manifest(model_dir: str | Path) -> dict[str, Any]:
    """The manifest of a model directory (or of its `data` folder).

    Raises:
        IntegrityError: There is none, or it can't be read, or it is of a version that this code does not know.
        OSError: The disk fails (EIO), which says nothing of the file.
    """
    file = data_folder(model_dir) / MANIFEST_NAME
    try:
        manifest = read_json_object(file)
    except FileNotFoundError as error:
        raise IntegrityError(
            "it has no manifest, so it was not published by compile-stage",
            fix="name a published version, or a bundle: the folder bundles/TARGET beside a run's result.json",
            where=str(file),
        ) from error
    except (OSError, ValueError) as error:
        raise_if_disk_fails(error)
        raise IntegrityError(f"the manifest can't be read: {error}", where=str(file)) from error
    schema = manifest.get("schema")
    if schema != MANIFEST_SCHEMA:
        raise IntegrityError(
            f"the manifest is of the schema {schema!r}, and this version of compile-stage reads {MANIFEST_SCHEMA!r}",
            fix="use the version of compile-stage that published it, or a newer one",
            where=str(file),
        )
    return manifest


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest as plain JSON values, with the digest of all else in it."""
    whole = json.loads(canonical_json({key: value for key, value in manifest.items() if key != "digest"}))
    return {**whole, "digest": digest_of(whole)}


def check_integrity(model_dir: str | Path, *, beside: bool = False) -> dict[str, Any]:
    """Compare every file of a model directory with the manifest; returns the manifest.

    Everything that decides what is served is looked at: data, code and compiled code, the fields of `MLmodel` but ids
    and times, and what lies beside them.

    Args:
        beside: Also the contents of the files that an environment is made from, and compiled code of other versions of
            Python. Not asked when a model is loaded: `mlflow models update-pip-requirements` is no reason not to serve
            it.

    Raises:
        IntegrityError: A file was changed, is missing, or was added; the message names it.
    """
    data = data_folder(model_dir)
    manifest = read_manifest(data)
    if "digest" not in manifest:
        raise IntegrityError(
            "the manifest has no digest: it was removed, or an early version of compile-stage published the model",
            fix="publish the model anew",
            where=str(data / MANIFEST_NAME),
        )
    if manifest != sealed(manifest):
        raise IntegrityError(
            "the manifest was changed after it was written: its own digest differs",
            fix="fetch the model again",
            where=str(data / MANIFEST_NAME),
        )
    files, code = manifest.get("files"), manifest.get("code", {})
    if not isinstance(files, Mapping) or not isinstance(code, Mapping) or not files:
        raise IntegrityError("the manifest lists no files", where=str(data / MANIFEST_NAME))
    _demand_artifacts(manifest, data)
    present = {name: data / name for name in list_tree(data, leave_out=(MANIFEST_NAME,))}
    if code:
        inside = (name for name in list_tree(data.parent / "code") if "__pycache__" not in name)
        present |= {f"code/{name}": data.parent / "code" / name for name in inside}
    listed = {**files, **code}
    if data.name == DATA_NAME and "mlmodel" in manifest and not (data.parent / MLMODEL).exists():
        # Without it, nothing would be said of what lies beside `data/` and `code/` either.
        raise IntegrityError(f"{MLMODEL} is missing", fix="fetch the model again", where=str(data.parent))
    if data.name == DATA_NAME and (data.parent / MLMODEL).exists():
        _check_model_dir(manifest, data.parent, strictly=beside)
        if "beside" in manifest:
            listed |= manifest["beside"]
            present |= {name: data.parent / name for name in list_beside(data.parent)}
    free = () if beside else ENVIRONMENT_FILES
    _compare(listed, present, data.parent, free=free)
    return manifest


def _check_model_dir(manifest: Mapping[str, Any], model_dir: Path, *, strictly: bool) -> None:
    # What lies in a folder elsewhere is not listed, and Python would import it.
    if linked := sorted(path for path in model_dir.rglob("*") if path.is_symlink() and path.is_dir()):
        name = linked[0].relative_to(model_dir).as_posix()
        raise IntegrityError(f"{name} is a link to a folder", fix="fetch the model again", where=str(model_dir))
    check_mlmodel(manifest, model_dir)
    if (reason := refuse_bytecode(model_dir / "code", other_pythons=strictly)) is not None:
        raise IntegrityError(
            reason, fix="remove the __pycache__ folders, or fetch the model again", where=str(model_dir)
        )


def _compare(listed: Mapping[str, str], present: Mapping[str, Path], where: Path, free: Collection[str]) -> None:
    """Raise IntegrityError unless exactly the listed files are there; the contents of `free` may differ."""
    for name in sorted(listed.keys() | present.keys()):
        if name not in present:
            raise IntegrityError(f"{name} is missing", fix="fetch the model again", where=str(where))
        if name not in listed:
            raise IntegrityError(
                f"{name} is not among the published files", fix="fetch the model again", where=str(where)
            )
        if name not in free and digest_file(present[name]) != listed[name]:
            raise IntegrityError(
                f"{name} is not what was published: its digest differs",
                fix="fetch the model again",
                where=str(where),
            )


def list_beside(model_dir: Path) -> tuple[str, ...]:
    """Files of a model directory that are neither data nor code, nor a signature, nor written by a registry or by
    `compile-stage validate`."""
    theirs = (DATA_NAME, "code", VALIDATIONS, SIGNATURE_FOLDER, "MLmodel", "registered_model_meta")
    return tuple(name for name in list_tree(model_dir) if name.partition("/")[0] not in theirs)


def data_folder(model_dir: str | Path) -> Path:
    """The `data` folder of a model directory, or the folder itself when it is one."""
    folder = Path(model_dir)
    return folder if (folder / MANIFEST_NAME).is_file() or not (folder / DATA_NAME).is_dir() else folder / DATA_NAME


def artifact_of(manifest: Mapping[str, Any], data: Path, into: Path | None = None) -> Artifact:
    """The manifest's artifact, with its path below `data`; of a variant that shares files with another, in the folder
    `into`, or, without one, in a temporary folder that ends with the process."""
    folder, stored = str(manifest.get("folder", ARTIFACT_NAME)), manifest.get("stored") or {}
    artifact = replace(_described(manifest, data), path=str(data / folder))
    if shares_files(folder, stored):
        demand_inside(stored, data)
        together = put_together(data, stored, into) if into is not None else None
        artifact = replace(
            artifact, path=str(together or kept_together(data.absolute(), tuple(sorted(stored.items()))))
        )
    _demand_entry(artifact, folder, data)
    return artifact


def _described(manifest: Mapping[str, Any], data: Path) -> Artifact:
    try:
        artifact: Artifact = revive(Artifact, json.loads(canonical_json(manifest["artifact"])))
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"the manifest describes no artifact: {error}", where=str(data)) from error
    return artifact


def _demand_entry(artifact: Artifact, folder: str, data: Path) -> None:
    entry = Path(artifact.entry)
    if entry.is_absolute() or ".." in entry.parts or not _exists(Path(artifact.path) / entry):
        raise IntegrityError(f"{folder}/{artifact.entry} is missing", where=str(data))


def _demand_artifacts(manifest: Mapping[str, Any], data: Path) -> None:
    """Raise IntegrityError for an artifact that is not described, or lacks a file; nothing is put together for that."""
    artifact_of({**manifest, "folder": ARTIFACT_NAME, "stored": {}}, data)
    for name, entry in manifest.get("variants", {}).items():
        if entry["manifest"] is None:
            continue
        stored = entry["stored"]
        demand_inside(stored, data)
        described = _described(entry["manifest"], data)
        place = stored.get(described.entry)
        lacking = [there for there in stored.values() if there not in manifest["files"]]
        # An entry may be a folder, of which the files are listed.
        whole = place is not None or any(file.startswith(f"{described.entry}/") for file in stored)
        if not whole or lacking:
            missing = lacking[0] if lacking else f"{entry['folder']}/{described.entry}"
            raise IntegrityError(f"{missing}, of the variant {name}, is missing", where=str(data))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that no file can have
        return False


def validations(manifest: Mapping[str, Any], model_dir: str | Path, trust: Trust | None = None) -> list[dict[str, Any]]:
    """What was found of this very publication on other machines, as `write_validation` wrote it. A file that was
    changed, or speaks of another artifact, of another publication's key (another policy or source) or of another
    machine than its name says, counts for nothing.

    Args:
        trust: With it, only what somebody signed whom it names counts.
    """
    data = data_folder(model_dir)
    folder = data.parent / VALIDATIONS
    whole = []
    for file in sorted(folder.glob("*.json")) if data.name == DATA_NAME else ():
        try:
            validation = read_json_object(file)
            sealed, envelope = validation.pop("digest"), validation.get("envelope")
            machine = revive(Hardware, validation["hardware"]).fingerprint
            sound = sealed == digest_of(validation) and validation["fingerprint"] == machine
            sound = sound and _name_of(validation) == file.name
            validation.pop("envelope", None)
            sound = sound and (trust is None or _is_signed(validation, envelope, data.parent, trust))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        of_this = sound and validation["artifact"] == manifest["artifact"]["digest"]
        # The same artifact, under another policy or of another source, is another publication.
        of_this = of_this and validation.get("key") == manifest.get("key")
        of_this = of_this and validation.get("variant", "") == manifest.get("variant", "")
        if of_this and validation["schema"] == VALIDATION_SCHEMA:
            whole.append(validation)
    return whole


def _is_signed(validation: Mapping[str, Any], envelope: Any, model_dir: Path, trust: Trust) -> bool:
    if not isinstance(envelope, Mapping):
        return False
    try:
        statement, signer = verify_statement(envelope, trust, str(model_dir))
    except IntegrityError:
        return False
    of_this = statement.get("predicateType") == TEST_PREDICATE and statement.get("subject") == subject_of(model_dir)
    in_time = signer.covers(str(validation["at"])[:10])
    return of_this and in_time and statement["predicate"]["validation"] == validation


def _name_of(validation: Mapping[str, Any]) -> str:
    """A machine has one validation of an artifact: of each variant of a version that holds several."""
    variant = validation.get("variant", "")
    return f"{validation['fingerprint']}{f'--{variant}' if variant else ''}.json"


def plain_validation(validation: Mapping[str, Any]) -> dict[str, Any]:
    """A validation as plain JSON values, with its schema."""
    whole: dict[str, Any] = json.loads(canonical_json({"schema": VALIDATION_SCHEMA, **validation}))
    return whole


def write_validation(validation: Mapping[str, Any], folder: Path, envelope: Mapping[str, Any] | None = None) -> Path:
    """Seal a validation with the digest of what it says, as `folder/FINGERPRINT.json`, or `FINGERPRINT--VARIANT.json`.

    Args:
        envelope: The signed statement that holds it (`plain_validation`).
    """
    whole = plain_validation(validation)
    if envelope is not None:
        whole["envelope"] = dict(envelope)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _name_of(whole)
    text = json.dumps({**whole, "digest": digest_of(whole)}, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
    return file


def batches_of(manifest: Mapping[str, Any], model_dir: str | Path, trust: Trust | None = None) -> ProvenBatches | None:
    """The batch sizes that were proven on such a machine as this, else those that the manifest names; None where it
    names none. `trust` as in `validations`."""
    validation = _attached_here(manifest, model_dir, trust)
    proven = ProvenBatches.of(validation) if validation is not None else None
    return proven or ProvenBatches.of(manifest)


def refused_values_of(manifest: Mapping[str, Any], model_dir: str | Path, trust: Trust | None = None) -> RefusedValues:
    """Which values are refused, by what was found on such a machine as this, else by the manifest. `trust` as in
    `validations`."""
    return RefusedValues.of(manifest, _attached_here(manifest, model_dir, trust))


def _attached_here(manifest: Mapping[str, Any], model_dir: str | Path, trust: Trust | None) -> Mapping[str, Any] | None:
    """The validation that was attached for such a machine as this; None where there is none. This machine is not looked
    at where nothing is attached."""
    attached = (data_folder(model_dir).parent / VALIDATIONS).is_dir()
    return passed_here(manifest, model_dir, trust, hardware()) if attached else None


FAILED_HERE = "its validation on this machine failed"
"""All that differs where it was validated here as it is now, and did not pass."""


def refuse_machine(
    manifest: Mapping[str, Any], model_dir: str | Path, trust: Trust | None = None, machine: Hardware | None = None
) -> str | None:
    """None when this machine and its runtime are those that the artifact was validated on, or what differs. `trust` as
    in `validations`; of a variant, machines of one kind count as one (`Hardware.kind_for`)."""
    machine = machine or hardware()
    validation = _validation_here(manifest, model_dir, trust, machine)
    differs = _other_machine(manifest, validation, machine)
    differs += [f"{name}: {there} there, {now} here" for name, there, now in _other_runtime(validation or manifest)]
    return "; ".join(differs) or None


def passed_here(
    manifest: Mapping[str, Any], model_dir: str | Path, trust: Trust | None, machine: Hardware
) -> Mapping[str, Any] | None:
    """The validation on that very machine, where there is one that passed."""
    validation = _validation_here(manifest, model_dir, trust, machine)
    return validation if validation is not None and validation["passed"] else None


def runtime_to_install(
    manifest: Mapping[str, Any], model_dir: str | Path, trust: Trust | None = None, machine: Hardware | None = None
) -> list[str]:
    """The requirements that bring the validated versions of the runtime; empty where they would not make this machine
    the one of the validation.

    So it is for another build of the same version: which index has it is not known here.
    """
    machine = machine or hardware()
    validation = _validation_here(manifest, model_dir, trust, machine)
    wanted = [(pin(name, there), pin(name, now)) for name, there, now in _other_runtime(validation or manifest)]
    if _other_machine(manifest, validation, machine) or any(there == now for there, now in wanted):
        return []
    return [there for there, _ in wanted]


def pin(name: str, version: str) -> str:
    """A requirement without the local label of a build: of `2.13.0+cpu` the public index has `2.13.0` only, and where
    there is a choice that takes both.

    The manifest keeps the label, and `refuse_machine` tells another build when the model is loaded.
    """
    return f"{name}=={version.partition('+')[0]}"


def _validation_here(
    manifest: Mapping[str, Any], model_dir: str | Path, trust: Trust | None, here: Hardware
) -> Mapping[str, Any] | None:
    """What `compile-stage validate` found on such a machine as this.

    None also where it was found with another runtime than is installed, and the run proved the artifact on such a
    machine with this one: a validation in a second environment, such as a trial of the runtime's next version, says
    nothing of the first.
    """
    found = validations(manifest, model_dir, trust)
    validation = next((one for one in found if one["fingerprint"] == here.fingerprint), None)
    if validation is None or not _other_runtime(validation):
        return validation
    by_its_run = not _other_machine(manifest, None, here) and not _other_runtime(manifest)
    return None if by_its_run else validation


def _other_machine(manifest: Mapping[str, Any], validation: Mapping[str, Any] | None, here: Hardware) -> list[str]:
    if validation is not None:
        return [] if validation["passed"] else [FAILED_HERE]
    if "verdict" in manifest and manifest["verdict"] is None:
        return [
            f"it was compiled on {manifest.get('fingerprint')} for other hardware, and not validated on this machine"
        ]
    if "family" in manifest and (meant := here.refuse(dict(manifest["target"].get("hardware", {})))) is not None:
        return [meant]
    if manifest.get("fingerprint") == here.fingerprint:
        return []
    there = manifest.get("hardware", {})
    kinds_count = "family" in manifest
    if kinds_count:
        device, proven = manifest["target"]["device"], revive(Hardware, there)
        if proven.kind_for(device) == here.kind_for(device):
            return []
    differs = []
    for field in fields(Hardware):
        now, then = json.loads(canonical_json(getattr(here, field.name))), there.get(field.name)
        if now != then and not (kinds_count and field.name in ("cpu", "cores")):
            differs.append(f"{field.name}: {_shown(then)} there, {_shown(now)} here")
    return differs or [f"fingerprint: {manifest.get('fingerprint')} there, {here.fingerprint} here"]


def _other_runtime(validated: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Package, its version in what was validated, the one that is installed: of those that differ. What is not
    installed is no difference."""
    wanted: Mapping[str, str] = validated.get("runtime", {})
    installed = plugins.package_versions(*wanted)
    return [(name, there, installed[name]) for name, there in wanted.items() if installed.get(name, there) != there]


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
