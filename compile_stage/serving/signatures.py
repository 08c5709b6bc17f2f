"""Signatures of a published model: verified before anything of it is read or run.

Beside `data/` and `code/` lies `signature/`:

    model.sig              OpenSSF model signature: an in-toto statement with the SHA-256 of every file of the model
    provenance.json        in-toto statement: SLSA provenance v1, what it was made of
    verdict.json           in-toto statement: test result v0.1, with the verdict

Each is a Sigstore bundle (v0.3) around a DSSE envelope, signed by a key pair (ECDSA), by a certificate, or keyless.
What this file needs for the first two is the package cryptography, which MLflow brings; for keyless signatures it is
the package sigstore.

A signature covers all files but those that a registry, or a later validation, writes: `MLmodel` (its fields that decide
are in the manifest, which is covered), `registered_model_meta`, `validations/` (each signed by itself), `signature/`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_stage.core.digest import digest_file, list_tree
from compile_stage.core.errors import IntegrityError, MissingDependencyError
from compile_stage.core.json_files import read_json_object
from compile_stage.core.read_errors import raise_if_disk_fails
from compile_stage.core.records import record
from compile_stage.serving.trust import Trust, keyid_of

SIGNATURE_FOLDER = "signature"
MODEL_SIGNATURE = "model.sig"
PROVENANCE = "provenance.json"
VERDICT = "verdict.json"
UNSIGNED = ("MLmodel", "registered_model_meta", "validations", SIGNATURE_FOLDER)

BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
MODEL_PREDICATE = "https://model_signing/signature/v1.0"
PROVENANCE_PREDICATE = "https://slsa.dev/provenance/v1"
TEST_PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"

_HASHES = {256: "SHA256", 384: "SHA384", 521: "SHA512"}
"""By the size of the key's curve in bits, as Sigstore's protocol buffers say it."""


@record
class SignedBy:
    """Who signed.

    Attributes:
        keyid: `sha256:...` of the public key; empty for a keyless signature.
        name: For people: the key's id, the certificate's subject, or the identity.
        periods: Of days on which what it signs is accepted: first and last ISO date, both included.
    """

    keyid: str
    name: str
    periods: tuple[tuple[str, str], ...] = (("0001-01-01", "9999-12-31"),)

    def covers(self, day: str) -> bool:
        """True for an ISO date on which what it signs is accepted."""
        return any(first <= day <= last for first, last in self.periods)


def is_signed(model_dir: Path) -> bool:
    """True when a model directory holds a signature, whoever made it."""
    return (model_dir / SIGNATURE_FOLDER / MODEL_SIGNATURE).is_file()


def verify_model(model_dir: Path, trust: Trust) -> SignedBy:
    """Verify the signature of a model directory, and that its files are those that were signed.

    Raises:
        IntegrityError: It is not signed, signed by nobody who is trusted, or a file is not what was signed.
        MissingDependencyError: A package is missing that this kind of signature needs.
    """
    folder = model_dir / SIGNATURE_FOLDER
    if not is_signed(model_dir):
        raise IntegrityError(
            "it is not signed, and a signature is required",
            fix="run the stage with a signing key: compile-stage run ... --signing-key KEY",
            where=str(model_dir),
        )
    if unknown := [name for name in list_tree(folder) if name not in (MODEL_SIGNATURE, PROVENANCE, VERDICT)]:
        raise IntegrityError(f"{unknown[0]} is no part of a signature", fix="fetch the model again", where=str(folder))
    statement, signer = _verified_file(folder / MODEL_SIGNATURE, trust, MODEL_PREDICATE)
    _compare_files(statement, model_dir)
    verdict, judge = _verified_file(folder / VERDICT, trust, TEST_PREDICATE)
    provenance, same = _verified_file(folder / PROVENANCE, trust, PROVENANCE_PREDICATE)
    for one, name in ((verdict, VERDICT), (provenance, PROVENANCE)):
        _demand_subject(one, model_dir, folder / name)
    day = str(provenance["predicate"]["runDetails"]["metadata"]["finishedOn"])[:10]
    if not signer.keyid == same.keyid == judge.keyid or not signer.covers(day):
        raise IntegrityError(
            f"it was signed on {day} by {signer.name}, which is trusted {in_words(signer.periods)}",
            fix="run the stage again with a key that is valid now",
            where=str(folder),
        )
    return signer


def offline_trust(trust: Trust, model_dir: Path) -> Trust:
    """What a process without a network needs to verify a model's signature: the same, with Sigstore's trusted root
    where the model is signed keyless and the trust file names none. Raises IntegrityError where that can't be had."""
    if trust.sigstore_roots or not trust.identities or not is_signed(model_dir):
        return trust
    material = read_json_object(model_dir / SIGNATURE_FOLDER / MODEL_SIGNATURE).get("verificationMaterial")
    if not isinstance(material, Mapping) or "certificate" not in material:
        return trust
    return replace(trust, sigstore_roots=(sigstore_root()._inner.to_json(),))  # sigstore has no other way to write it


def verify_statement(document: Mapping[str, Any], trust: Trust, where: str) -> tuple[dict[str, Any], SignedBy]:
    """The in-toto statement of a Sigstore bundle, if somebody who is trusted signed it.

    Raises:
        IntegrityError: Nobody who is trusted did, or it is none.
    """
    try:
        material, envelope = document["verificationMaterial"], document["dsseEnvelope"]
        payload, (signature,) = base64.b64decode(envelope["payload"], validate=True), envelope["signatures"]
        if document["mediaType"] != BUNDLE_TYPE or envelope["payloadType"] != PAYLOAD_TYPE:
            raise ValueError("it is another kind of document")
        signed = base64.b64decode(signature["sig"], validate=True)
        if "certificate" in material:
            signer = _keyless(document, trust, where)
        elif "x509CertificateChain" in material:
            signer = _by_certificate(material["x509CertificateChain"]["certificates"], payload, signed, trust, where)
        else:
            signer = _by_key(payload, signed, trust, where)
            _check_hints(material, signature, trust, signer)
        statement = json.loads(payload)
        if statement["_type"] != STATEMENT_TYPE:
            raise ValueError("it is no in-toto statement")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"the signature can't be read: {error}", fix="fetch the model again", where=where
        ) from error
    if signer.keyid in trust.revoked:
        raise IntegrityError(
            f"it was signed by {signer.name}, which was revoked",
            fix="run the stage again with a key in force",
            where=where,
        )
    return statement, signer


def signed_with(certificate: Any) -> SignedBy:
    """Who signs with a certificate, on its days."""
    first, last = certificate.not_valid_before_utc.date(), certificate.not_valid_after_utc.date()
    return SignedBy(
        keyid=keyid_of(certificate.public_key()),
        name=certificate.subject.rfc4514_string(),
        periods=((first.isoformat(), last.isoformat()),),
    )


def in_words(periods: Iterable[tuple[str, str]]) -> str:
    """Periods of days, for people."""
    return " and ".join(f"from {first} to {last}" for first, last in periods)


def pae(payload: bytes) -> bytes:
    """What a DSSE signature is over: the pre-authentication encoding of an in-toto payload."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def subject_of(model_dir: Path) -> list[dict[str, Any]]:
    """The subject of every statement: the manifest, which holds the digest of every other file."""
    return [{"name": "data/manifest.json", "digest": {"sha256": digest_file(model_dir / "data" / "manifest.json")[7:]}}]


def ecdsa_of(public_key: Any) -> Any:
    """The signature algorithm of an elliptic-curve key. Raises ValueError for another kind of key."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    size = getattr(getattr(public_key, "curve", None), "key_size", 0)
    if size not in _HASHES or not public_key.curve.name.startswith("secp"):
        raise ValueError("it is no key of the curves P-256, P-384 or P-521")
    return ec.ECDSA(getattr(hashes, _HASHES[size])())


# --------------------------------------------------------------------------------------------------------------- who


def _by_key(payload: bytes, signature: bytes, trust: Trust, where: str) -> SignedBy:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    for key in trust.keys:
        public = load_pem_public_key(key.pem.encode())
        if _holds(public, payload, signature):
            return SignedBy(keyid=key.keyid, name=key.keyid, periods=trust.periods(key.keyid))
    raise IntegrityError(
        "it is signed by a key that is not trusted",
        fix="name the signer's public key: compliance.trusted_keys in the policy, --trusted-key, or "
        "COMPILE_STAGE_TRUST",
        where=where,
    )


def _check_hints(material: Mapping[str, Any], signature: Mapping[str, Any], trust: Trust, signer: SignedBy) -> None:
    """Raise ValueError where a signature names another key than the one that it is of. Nothing depends on these names,
    but a file that was changed is not accepted."""
    (pem,) = {key.pem for key in trust.keys if key.keyid == signer.keyid}
    hint = hashlib.sha256(pem.encode()).hexdigest()
    if material["publicKey"].get("hint") not in (hint, None) or signature.get("keyid") not in (signer.keyid, "", None):
        raise ValueError("it names another key than it is signed by")
    if material.get("tlogEntries"):
        raise ValueError("it has entries of a log, and is signed by a key")


def _holds(public_key: Any, payload: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        public_key.verify(signature, pae(payload), ecdsa_of(public_key))
    except (InvalidSignature, ValueError):
        return False
    return True


def _by_certificate(
    chain: list[Mapping[str, str]], payload: bytes, signature: bytes, trust: Trust, where: str
) -> SignedBy:
    """Valid as of the day the certificate was issued, as OpenSSF model signing verifies it; the day of the signature
    must lie within the certificate's."""
    from cryptography import x509
    from cryptography.x509 import verification

    leaf, *between = (x509.load_der_x509_certificate(base64.b64decode(one["rawBytes"])) for one in chain)
    refused = IntegrityError(
        "it is signed by a certificate that no trusted authority issued for signatures",
        fix="name the authority's root certificate: compliance.trusted_keys in the policy, --trusted-key, or "
        "COMPILE_STAGE_TRUST",
        where=where,
    )
    roots = [x509.load_pem_x509_certificate(text.encode()) for text in trust.authorities]
    if not roots:
        raise refused
    if not hasattr(verification, "ExtensionPolicy"):
        raise MissingDependencyError(
            "certificates are verified with cryptography 45 or newer", fix="pip install -U cryptography"
        )
    leaf_policy = verification.ExtensionPolicy.permit_all().require_present(
        x509.KeyUsage, verification.Criticality.AGNOSTIC, _demand_signing
    )
    builder = verification.PolicyBuilder().store(verification.Store(roots)).time(leaf.not_valid_before_utc)
    builder = builder.extension_policies(
        ca_policy=verification.ExtensionPolicy.webpki_defaults_ca(), ee_policy=leaf_policy
    )
    try:
        builder.build_client_verifier().verify(leaf, list(between))
    except verification.VerificationError as error:
        raise refused from error
    if not _holds(leaf.public_key(), payload, signature):
        raise refused
    return signed_with(leaf)


def _demand_signing(_policy: Any, _certificate: Any, usage: Any) -> None:
    if not usage.digital_signature:
        raise ValueError("its key usage is not digital signature")


def _keyless(document: Mapping[str, Any], trust: Trust, where: str) -> SignedBy:
    """Sigstore's own verifier: certificate, transparency log and identity. Only the trusted root needs a network, where
    the trust file names none."""
    try:
        from sigstore.errors import Error, VerificationError
        from sigstore.models import Bundle
        from sigstore.verify import Verifier, policy
    except ImportError as error:
        raise MissingDependencyError(
            "it is signed keyless, which is verified with the package sigstore",
            fix='pip install "compile-stage[signing]"',
        ) from error
    try:
        bundle = Bundle.from_json(json.dumps(document))
        roots = [_trusted_root(text) for text in trust.sigstore_roots] or [sigstore_root()]
    except Error as error:
        raise ValueError(str(error)) from error
    reasons = []
    for root, trusted in ((root, identity) for root in roots for identity in trust.identities):
        try:
            wanted = policy.Identity(identity=trusted.identity, issuer=trusted.issuer)
            Verifier(trusted_root=root).verify_dsse(bundle, wanted)
        except VerificationError as error:
            reasons.append(str(error))
            continue
        return SignedBy(keyid="", name=trusted.identity)
    why = f": {reasons[0]}" if reasons else ""
    raise IntegrityError(
        f"it is signed by an identity that is not trusted{why}",
        fix="name it in a trust file (docs/signing.md)",
        where=where,
    )


def sigstore_root() -> Any:
    """The trusted root of the public Sigstore instance, asked of its servers. Raises IntegrityError where they can't be
    reached."""
    from sigstore.errors import Error
    from sigstore.models import ClientTrustConfig

    try:
        return ClientTrustConfig.production().trusted_root
    except (Error, OSError) as error:
        raise IntegrityError(
            f"it is signed keyless, and Sigstore's trusted root can't be had: {error}",
            fix="name a trusted_root.json as sigstore_trusted_root in the trust file (docs/signing.md)",
        ) from error


def _trusted_root(text: str) -> Any:
    from sigstore.models import TrustedRoot

    with tempfile.TemporaryDirectory(prefix="compile-stage-root-") as folder:
        file = Path(folder) / "trusted_root.json"
        file.write_text(text, encoding="utf-8")
        return TrustedRoot.from_file(str(file))


# -------------------------------------------------------------------------------------------------------------- what


def read_statement(file: Path, trust: Trust, predicate: str) -> dict[str, Any]:
    """The verified statement in a file of `signature/`, about the model it lies with. Raises as `verify_statement`."""
    statement, _ = _verified_file(file, trust, predicate)
    _demand_subject(statement, file.parent.parent, file)
    return statement


def _verified_file(file: Path, trust: Trust, predicate: str) -> tuple[dict[str, Any], SignedBy]:
    try:
        document = read_json_object(file)
    except (OSError, ValueError) as error:
        raise_if_disk_fails(error)
        raise IntegrityError(
            f"the signature can't be read: {error}", fix="fetch the model again", where=str(file)
        ) from error
    statement, signer = verify_statement(document, trust, str(file))
    if statement.get("predicateType") != predicate:
        raise IntegrityError(
            f"it is a statement of {statement.get('predicateType')!r}, not of {predicate!r}", where=str(file)
        )
    return statement, signer


def _demand_subject(statement: Mapping[str, Any], model_dir: Path, file: Path) -> None:
    if statement.get("subject") != subject_of(model_dir):
        raise IntegrityError("it is a statement about another model", fix="fetch the model again", where=str(file))


def _compare_files(statement: Mapping[str, Any], model_dir: Path) -> None:
    signed = dict(_signed_files(statement, model_dir))
    present = {
        name for name in list_tree(model_dir) if name.partition("/")[0] not in UNSIGNED and "__pycache__" not in name
    }
    for name in sorted(present | signed.keys()):
        if name not in present:
            raise IntegrityError(
                f"{name} was signed, and is missing", fix="fetch the model again", where=str(model_dir)
            )
        if name not in signed:
            raise IntegrityError(f"{name} was not signed", fix="fetch the model again", where=str(model_dir))
        if digest_file(model_dir / name) != f"sha256:{signed[name]}":
            raise IntegrityError(f"{name} is not what was signed", fix="fetch the model again", where=str(model_dir))


def _signed_files(statement: Mapping[str, Any], model_dir: Path) -> Iterator[tuple[str, str]]:
    """Name → SHA-256, whose digest is the statement's subject."""
    try:
        resources, (subject,) = statement["predicate"]["resources"], statement["subject"]
        whole = hashlib.sha256(b"".join(bytes.fromhex(one["digest"]) for one in resources)).hexdigest()
        if statement["predicate"]["serialization"]["method"] != "files" or subject["digest"]["sha256"] != whole:
            raise ValueError("its subject is not the digest of its files")
        for one in resources:
            if one["algorithm"] != "sha256":
                raise ValueError(f"{one['name']} has no SHA-256")
            yield one["name"], one["digest"]
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"the signature can't be read: {error}", where=str(model_dir)) from error
