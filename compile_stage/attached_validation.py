"""A published version validated and measured on this machine, and what was found attached to it (`validate`): of a
version that holds several artifacts, for each that is meant for this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.environment import Hardware
from compile_stage.core.errors import UsageError
from compile_stage.core.records import Check, Receipt, Verification
from compile_stage.revalidation import Revalidation, validate_here
from compile_stage.serving.manifest import plain_validation, write_validation
from compile_stage.serving.variants import PORTABLE, every_variant, holds_variants
from compile_stage.signing import statements
from compile_stage.signing.signers import KEY_VARIABLE, Signer
from compile_stage.verification import Allowed, Published, demand_vouched


def validate(
    context: Context, receipt: Receipt, published: Published, signer: Signer | None, allowed: Allowed
) -> Verification:
    """Validate and measure it on this machine, and attach what was found to its version, signed where there is a
    signer. Raises as `revalidation.validate_here`, and UsageError where it must be signed and can't be."""
    demand_signable(published, signer)
    demand_vouched(published, allow_code=allowed.code)
    version = (published.uri, published.folder)
    checks: list[Check] = []
    notes: list[str] = []
    passed = True
    for manifest in meant_for(context.hardware, published):
        validated = validate_here(context, manifest, version, published.trust, allow_pickle=allowed.pickle)
        found = attach(context, receipt, replace(published, manifest=manifest), validated, signer)
        checks, notes, passed = [*checks, *found.checks], [*notes, *found.notes], passed and found.passed
    return Verification(uri=published.uri, passed=passed, checks=tuple(checks), notes=tuple(notes))


def meant_for(machine: Hardware, published: Published) -> list[Mapping[str, Any]]:
    """The manifests of the variants whose hardware a machine is; where there are none, the one that says why."""
    if not holds_variants(published.whole):
        return [published.manifest]
    variants = [one for one in every_variant(published.whole) if one["variant"] != PORTABLE]
    meant = [one for one in variants if machine.refuse(dict(one["target"]["hardware"])) is None]
    return list(meant) or [published.manifest]


def demand_one_artifact(published: Published) -> None:
    """Raise UsageError for a version that holds several artifacts: which of them a device reached from here is handed
    is not chosen yet."""
    if holds_variants(published.whole):
        raise UsageError(
            "it holds several variants, and those are validated on the machine itself",
            fix=f"on the device: compile-stage validate {published.uri}",
            where=published.uri,
        )


def demand_signable(published: Published, signer: Signer | None) -> None:
    """Raise UsageError where a validation must be signed, and can't be."""
    if published.trust is not None:
        reason = (
            f"there is no key to sign it with ({KEY_VARIABLE})" if signer is None else signer.refuse(published.trust)
        )
        if reason is not None:
            raise UsageError(
                f"the validation would count for nothing: signatures are required, and {reason}",
                fix="--signing-key KEY, with a key that is trusted",
                where=published.uri,
            )


def attach(
    context: Context, receipt: Receipt, published: Published, validated: Revalidation, signer: Signer | None
) -> Verification:
    """Attach what was found on a machine to its version, signed where there is a signer."""
    variant = str(published.manifest.get("variant", ""))
    envelope = None
    if signer is not None:
        document = plain_validation(validated.document)
        envelope = signer.sign_statement(statements.validation(document, published.manifest, published.folder))
    file = write_validation(validated.document, context.scratch / "validation", envelope)
    word, fingerprint = "passed" if validated.passed else "failed", validated.document["fingerprint"]
    tag = f"validated.{fingerprint}" + (f".{variant}" if variant else "")
    plugins.registry_for(published.uri).attest(receipt, file, {tag: f"{word} on {validated.document['at']}"})
    by = f", signed by {signer.signed_by.name}" if signer is not None else ""
    of = f" for the variant {variant}" if variant else ""
    attached = f"attached to {receipt.uri} as the validation of {fingerprint}{of}: {word}{by}"
    return Verification(
        uri=published.uri,
        passed=validated.passed,
        checks=validated.verdict.checks,
        notes=(*validated.notes, attached),
    )
