"""A Sigstore of a test's own: an authority that issues certificates of minutes for identities, a log of certificates,
a log of signatures, and the trusted root that names them. What it signs, the package sigstore verifies without a
network.

Formats: certificates and SCTs by RFC 6962, entries and checkpoints of the log as Rekor v1 writes them, all in a
Sigstore bundle v0.3.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier
from signing_keys import make_key

from compile_stage.serving.signatures import BUNDLE_TYPE, PAYLOAD_TYPE, pae
from compile_stage.signing.signers import SigstoreSigner, signer_of

IDENTITY = "https://github.com/org/repo/.github/workflows/compile.yml@refs/heads/main"
ISSUER = "https://token.actions.githubusercontent.com"
_FORMER_ISSUER_OID = ObjectIdentifier("1.3.6.1.4.1.57264.1.1")  # the same as bare bytes, as Fulcio still writes it too
_ISSUER_OID = ObjectIdentifier("1.3.6.1.4.1.57264.1.8")  # the issuer's extension, a DER string
_SCT_OID = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")


class SigstoreInstance:
    """Signs statements as the identity `IDENTITY`."""

    def __init__(self, identity: str = IDENTITY) -> None:
        self.identity = identity
        self._authority, self._certificates, self._entries = (ec.generate_private_key(ec.SECP256R1()) for _ in "123")
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sigstore of a test")])
        now = dt.datetime.now(dt.UTC)
        public = self._authority.public_key()
        self._root = (
            x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._authority, hashes.SHA256())
        )  # fmt: skip

    def write_root(self, file: Path) -> Path:
        """Write what verifiers trust: `trusted_root.json`."""
        since = {"start": "2020-01-01T00:00:00Z"}

        def log(key: Any, url: str) -> dict[str, Any]:
            public = {"rawBytes": _b64(_der(key)), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": since}
            identified = {"keyId": _b64(hashlib.sha256(_der(key)).digest())}
            return {"baseUrl": url, "hashAlgorithm": "SHA2_256", "publicKey": public, "logId": identified}

        chain = {"certificates": [{"rawBytes": _b64(self._root.public_bytes(Encoding.DER))}]}
        authority = {"subject": {"commonName": "sigstore of a test", "organization": ""}, "uri": "https://ca.invalid"}
        document = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(self._entries, "https://log.invalid")],
            "certificateAuthorities": [{**authority, "certChain": chain, "validFor": since}],
            "ctlogs": [log(self._certificates, "https://ct.invalid")],
            "timestampAuthorities": [],
        }
        file.write_text(json.dumps(document))
        return file

    def sign(self, payload: bytes) -> dict[str, Any]:
        """A Sigstore bundle around a DSSE envelope of an in-toto payload."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._issue(key.public_key())
        signature = key.sign(pae(payload), ec.ECDSA(hashes.SHA256()))
        return {
            "mediaType": BUNDLE_TYPE,
            "verificationMaterial": {
                "certificate": {"rawBytes": _b64(certificate.public_bytes(Encoding.DER))},
                "tlogEntries": [self._entry(payload, signature, certificate)],
            },
            "dsseEnvelope": {
                "payload": _b64(payload), "payloadType": PAYLOAD_TYPE, "signatures": [{"sig": _b64(signature)}],
            },
        }  # fmt: skip

    def _issue(self, public: Any) -> Any:
        now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        builder = (
            x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(self._root.subject).public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=1)).not_valid_after(now + dt.timedelta(minutes=10))
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._authority.public_key()), critical=False
            )
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(self.identity)]), critical=True
            )
            .add_extension(x509.UnrecognizedExtension(_FORMER_ISSUER_OID, ISSUER.encode()), critical=False)
            .add_extension(
                x509.UnrecognizedExtension(_ISSUER_OID, b"\x0c" + bytes([len(ISSUER)]) + ISSUER.encode()),
                critical=False,
            )
        )  # fmt: skip

        def with_sct(signature: bytes) -> Any:
            milliseconds = int(now.timestamp() * 1000)
            log = hashlib.sha256(_der(self._certificates)).digest()
            sct = struct.pack("!B32sQHBBH", 0, log, milliseconds, 0, 4, 3, len(signature)) + signature
            listed = struct.pack("!HH", len(sct) + 2, len(sct)) + sct
            value = b"\x04" + _length(len(listed)) + listed
            whole = builder.add_extension(x509.UnrecognizedExtension(_SCT_OID, value), critical=False)
            return whole.sign(self._authority, hashes.SHA256()), milliseconds

        draft, milliseconds = with_sct(bytes(70))
        tbs = draft.tbs_precertificate_bytes  # without the SCT, so the same whatever it is
        issuer = hashlib.sha256(_der(self._authority)).digest()
        signed = struct.pack("!BBQH32s", 0, 0, milliseconds, 1, issuer) + len(tbs).to_bytes(3, "big") + tbs + b"\0\0"
        certificate, _ = with_sct(self._certificates.sign(signed, ec.ECDSA(hashes.SHA256())))
        return certificate

    def _entry(self, payload: bytes, signature: bytes, certificate: Any) -> dict[str, Any]:
        pem = certificate.public_bytes(Encoding.PEM)
        digests = {
            "envelopeHash": {"algorithm": "sha256", "value": hashlib.sha256(payload + signature).hexdigest()},
            "payloadHash": {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()},
        }
        signed = [{"signature": _b64(signature), "verifier": _b64(pem)}]
        body = _canonical({"apiVersion": "0.0.1", "kind": "dsse", "spec": {**digests, "signatures": signed}})
        key_id, integrated = hashlib.sha256(_der(self._entries)).digest(), int(time.time())
        promised = _canonical({"body": _b64(body), "integratedTime": integrated, "logID": key_id.hex(), "logIndex": 0})
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"log of a test - 1\n1\n{_b64(root)}\n"
        checked = self._entries.sign(note.encode(), ec.ECDSA(hashes.SHA256()))
        checkpoint = f"{note}\n— log.invalid {_b64(key_id[:4] + checked)}\n"
        return {
            "logIndex": "0",
            "logId": {"keyId": _b64(key_id)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(integrated),
            "inclusionPromise": {
                "signedEntryTimestamp": _b64(self._entries.sign(promised, ec.ECDSA(hashes.SHA256())))
            },
            "inclusionProof": {
                "logIndex": "0", "rootHash": _b64(root), "treeSize": "1", "hashes": [],
                "checkpoint": {"envelope": checkpoint},
            },
            "canonicalizedBody": _b64(body),
        }  # fmt: skip


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=signs, key_cert_sign=not signs, crl_sign=not signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _length(size: int) -> bytes:
    """Of a DER value, up to 255 bytes."""
    return bytes([size]) if size < 128 else bytes([0x81, size])


def _der(private: Any) -> bytes:
    public: bytes = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return public


def _b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _canonical(document: Mapping[str, Any]) -> bytes:
    """RFC 8785, for what stands in these documents."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


class KeylessSigner(SigstoreSigner):
    """Signs as a CI job does by Sigstore's servers, with an instance of a test's own in their place."""

    def __init__(self, instance: SigstoreInstance, folder: Path) -> None:
        super().__init__()
        self._instance = instance
        key = make_key(folder, "payloads")[0]
        payloads = signer_of(key)  # makes the statement that model-signing makes
        assert payloads is not None
        self._payloads = payloads

    def sign_model(self, model_dir: Path, file: Path) -> None:
        self._payloads.sign_model(model_dir, file)
        payload = base64.b64decode(json.loads(file.read_text())["dsseEnvelope"]["payload"])
        file.write_text(json.dumps(self._instance.sign(payload)))

    def sign_statement(self, statement: Mapping[str, Any]) -> dict[str, Any]:
        return self._instance.sign(json.dumps(statement, sort_keys=True).encode())
