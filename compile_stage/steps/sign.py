"""Bundle → the same bundle, signed: after it is packaged, and before anybody can fetch it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compile_stage.core.context import Context
from compile_stage.core.errors import UsageError
from compile_stage.core.records import Bundle, Policy, TargetResult
from compile_stage.serving.signatures import MODEL_SIGNATURE, PROVENANCE, SIGNATURE_FOLDER, VERDICT
from compile_stage.serving.trust import TRUST_VARIABLE, Trust
from compile_stage.signing.signers import KEY_VARIABLE, Signer
from compile_stage.signing.statements import provenance, verdict


def refuse_signing(policy: Policy, signer: Signer | None, trust: Trust | None) -> None:
    """Raise UsageError where the policy requires signatures and this run could not make one that is accepted: before
    hours are spent."""
    if not policy.compliance.require_signature:
        return
    if signer is None:
        raise UsageError(
            "the policy requires signatures (compliance.require_signature), and there is no key to sign with",
            fix=f"--signing-key KEY, or {KEY_VARIABLE}",
        )
    if trust is None:
        raise UsageError(
            "the policy requires signatures (compliance.require_signature), and nothing says whose are trusted",
            fix=f"compliance.trusted_keys in the policy, or {TRUST_VARIABLE}",
        )
    if (reason := signer.refuse(trust)) is not None:
        raise UsageError(
            f"{reason}, so what this run signs would be refused",
            fix=f"sign with a trusted key, or add this one to compliance.trusted_keys or {TRUST_VARIABLE}",
        )


def sign(context: Context, policy: Policy, target: TargetResult, signer: Signer) -> None:
    """Sign a target's bundles in place: the model, its provenance and its verdict, in `signature/`.

    Raises:
        UsageError: There is no identity to sign with.
    """
    bundles = [target.bundle, *(one.bundle for one in target.unvalidated)]
    for bundle in bundles:
        if bundle is not None:
            with context.events.step("sign", bundle.target):
                _sign(bundle, policy, signer)


def _sign(bundle: Bundle, policy: Policy, signer: Signer) -> None:
    model_dir = Path(bundle.path)
    folder = model_dir / SIGNATURE_FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    manifest: Mapping[str, Any] = bundle.manifest
    _write(folder / PROVENANCE, signer.sign_statement(provenance(manifest, model_dir, policy.files)))
    _write(folder / VERDICT, signer.sign_statement(verdict(manifest, model_dir)))
    signer.sign_model(model_dir, folder / MODEL_SIGNATURE)


def _write(file: Path, document: Mapping[str, Any]) -> None:
    file.write_text(
        json.dumps(document, indent=2, sort_keys=True), encoding="utf-8"
    )  # no byte of it is without meaning
