"""`export`: a published version to the form of a server, in order: fetched and verified, written, asked, renamed to its
place, and for OCI pushed and pulled again."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from compile_stage.core.context import Context
from compile_stage.core.errors import GateError, UsageError
from compile_stage.core.records import record
from compile_stage.exports import bentoml, kserve, oci, triton
from compile_stage.exports.check import Proof, prove
from compile_stage.exports.folder import Written, copy_bundle, describe, new_folder
from compile_stage.exports.options import Exported, ExportOptions
from compile_stage.exports.version import Version, open_version, plain_name
from compile_stage.serving.trust import Trust

_WRITERS = {"triton": triton.write, "kserve": kserve.write, "oci": oci.write, "bentoml": bentoml.write}


@record
class Asked:
    """How an export is made: `functions.exports.export_version` says what each means."""

    options: ExportOptions
    check: bool | None
    force: bool
    allow_code: bool


def export(
    context: Context, uri_and_trust: tuple[str, Trust | None], to: str, out: Path | None, asked: Asked
) -> Exported:
    """Make an export. Raises as `functions.exports.export_version`."""
    version, options = open_version(context, *uri_and_trust), asked.options
    place = (out or Path("compile-stage-export") / f"{plain_name(version.name)}-{version.number}" / to).absolute()
    if place.resolve().is_relative_to(version.published.folder.resolve()):  # it would be copied into itself
        raise UsageError(
            "an export can't lie in the bundle that is exported", fix="name another folder with --out", where=str(place)
        )
    with context.events.step("export", to), new_folder(place, force=asked.force) as folder:
        written = _WRITERS[to](version, options, folder)
        proof = _proof(context, version, folder, written, asked)
        if variant := version.manifest.get("variant"):
            proof = replace(proof, said=f"{proof.said} Of its variants that is {variant}, which this machine loads.")
        describe(folder, version, to, written, {"proven": proof.proven, "said": proof.said})
    exported = Exported(
        folder=str(place),
        form=to,
        uri=version.uri,
        artifact_digest=str(version.manifest["artifact"]["digest"]),
        proven=proof.proven,
        said=proof.said,
        differs=tuple(written.differs),
        start=tuple(written.start),
    )
    return _pushed(context, version, exported, options) if options.push else exported


def _proof(context: Context, version: Version, folder: Path, written: Written, asked: Asked) -> Proof:
    if asked.check is False:
        return Proof(proven=False, said="It was not checked, as the option says.")
    if written.bundle:
        proof = prove(context, version, folder, written, allow_code=asked.allow_code)
    else:  # the layers are the files of the bundle, which is made of them again
        again = folder.with_name("unpacked")
        copy_bundle(version, again / "bundle")
        proof = prove(context, version, again, replace(written, bundle="bundle"), allow_code=asked.allow_code)
    if asked.check and not proof.proven:
        raise GateError(f"the export can't be checked: {proof.said}", fix="--no-check exports it all the same")
    return proof


def _pushed(context: Context, version: Version, exported: Exported, options: ExportOptions) -> Exported:
    reference, _ = oci.push(Path(exported.folder), options)
    with tempfile.TemporaryDirectory(dir=context.scratch) as scratch:
        oci.pull(reference, version, Path(scratch) / "pulled")
    return replace(exported, reference=reference.uri)
