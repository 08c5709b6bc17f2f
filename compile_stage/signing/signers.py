"""Who signs: a key pair, a certificate, a key of a PKCS#11 token, or an identity that Sigstore vouches for.

The model's signature is OpenSSF model-signing's own; statements are the same kind of document (a Sigstore bundle around
a DSSE envelope) from the same key, so that one verifier reads both (`compile_stage.serving.signatures`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from compile_stage.core.errors import MissingDependencyError, UsageError
from compile_stage.serving.signatures import (
    BUNDLE_TYPE,
    PAYLOAD_TYPE,
    UNSIGNED,
    SignedBy,
    ecdsa_of,
    in_words,
    pae,
    signed_with,
)
from compile_stage.serving.trust import Trust, TrustedKey, keyid_of

KEY_VARIABLE = "COMPILE_STAGE_SIGNING_KEY"
PASSWORD_VARIABLE = "COMPILE_STAGE_SIGNING_PASSWORD"  # noqa: S105 - the variable's name
CERTIFICATE_VARIABLE = "COMPILE_STAGE_SIGNING_CERTIFICATE"
SIGSTORE = "sigstore"
"""In place of a key's path: keyless, with the identity that the CI system vouches for."""


class Signer(ABC):
    """Signs with one identity.

    Attributes:
        signed_by: Who that is.
    """

    signed_by: SignedBy

    @abstractmethod
    def sign_model(self, model_dir: Path, file: Path) -> None:
        """Write the signature of all files of a model directory but those that a registry writes."""

    @abstractmethod
    def sign_statement(self, statement: Mapping[str, Any]) -> dict[str, Any]:
        """An in-toto statement, signed: a Sigstore bundle as plain JSON."""

    def refuse(self, trust: Trust) -> str | None:
        """None when what is signed now would be accepted, or why not."""
        return None

    def own_trust(self) -> Trust:
        """Trust in this signer's own public key; in nobody where others vouch for it."""
        return Trust()


def signer_of(
    key: str | os.PathLike[str] | None = None, certificate: str | os.PathLike[str] | None = None
) -> Signer | None:
    """The signer that the arguments name, or `$COMPILE_STAGE_SIGNING_KEY` and `$COMPILE_STAGE_SIGNING_CERTIFICATE`;
    None when nothing does.

    Args:
        key: A PEM file with an elliptic-curve private key, the PKCS#11 URI of one, or `sigstore`.
        certificate: A PEM file with the key's certificate, and after it those up to an authority's.

    Raises:
        UsageError: A file can't be read, or is no such key, or a token can't be used.
        MissingDependencyError: The extra `signing`, for a token `pkcs11`, is not installed.
    """
    named = os.fspath(key) if key is not None else os.environ.get(KEY_VARIABLE, "")
    chain = os.fspath(certificate) if certificate is not None else os.environ.get(CERTIFICATE_VARIABLE, "")
    if not named:
        return None
    _demand_packages()
    if named == SIGSTORE:
        return SigstoreSigner()
    if named.startswith("pkcs11:"):
        from compile_stage.signing.pkcs11 import Pkcs11Signer

        return Pkcs11Signer(named, read_chain(Path(chain).expanduser()) if chain else ())
    path = Path(named).expanduser()
    private = _private_key(path)
    return (
        CertificateSigner(path, private, _chain_of(Path(chain).expanduser(), private))
        if chain
        else KeySigner(path, private)
    )


class KeySigner(Signer):
    """Signs with an elliptic-curve key (P-256, P-384, P-521)."""

    def __init__(self, path: Path, private: Any) -> None:
        self._path, self._private = path, private
        keyid = keyid_of(private.public_key())
        self.signed_by = SignedBy(keyid=keyid, name=keyid)

    def sign_model(self, model_dir: Path, file: Path) -> None:
        config = signing_config().use_elliptic_key_signer(private_key=self._path, password=_password())
        write_signature(config, model_dir, file)

    def sign_statement(self, statement: Mapping[str, Any]) -> dict[str, Any]:
        payload = json.dumps(statement, sort_keys=True, ensure_ascii=False).encode()
        signature = self._private.sign(pae(payload), ecdsa_of(self._private.public_key()))
        return {
            "mediaType": BUNDLE_TYPE,
            "verificationMaterial": {**self._material(), "tlogEntries": []},
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": self.signed_by.keyid}],
            },
        }

    def refuse(self, trust: Trust) -> str | None:
        return refuse_key(self.signed_by.keyid, trust)

    def own_trust(self) -> Trust:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        pem = self._private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return Trust(keys=(TrustedKey(keyid=self.signed_by.keyid, pem=pem.decode()),))

    def _material(self) -> dict[str, Any]:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        pem = self._private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return {"publicKey": {"hint": hashlib.sha256(pem).hexdigest()}}


class CertificateSigner(KeySigner):
    """Signs with a key that an authority issued a certificate for."""

    def __init__(self, path: Path, private: Any, chain: Sequence[Any]) -> None:
        super().__init__(path, private)
        self._chain = chain
        self.signed_by = signed_with(chain[0])

    def sign_model(self, model_dir: Path, file: Path) -> None:
        import tempfile

        from cryptography.hazmat.primitives.serialization import Encoding

        with tempfile.TemporaryDirectory(prefix="compile-stage-chain-") as folder:
            files = [Path(folder) / f"{number}.pem" for number in range(len(self._chain))]
            for path, certificate in zip(files, self._chain, strict=True):
                path.write_bytes(certificate.public_bytes(Encoding.PEM))
            above = files[1:] or files[:1]  # it reads no empty chain
            config = signing_config().use_certificate_signer(
                private_key=self._path, signing_certificate=files[0], certificate_chain=above
            )
            write_signature(config, model_dir, file)

    def refuse(self, trust: Trust) -> str | None:
        return refuse_certificate(self.signed_by, trust)

    def own_trust(self) -> Trust:
        return Trust()

    def _material(self) -> dict[str, Any]:
        return chain_material(self._chain)


class SigstoreSigner(Signer):
    """Signs keyless: a certificate of minutes for the identity of the CI job, and an entry in Sigstore's public log.

    Written against model-signing 1.1 and sigstore 4.5, and never run: it needs Sigstore's servers and a CI job's
    identity.
    """

    def __init__(self) -> None:
        self.signed_by = SignedBy(keyid="", name="sigstore")

    def sign_model(self, model_dir: Path, file: Path) -> None:
        write_signature(signing_config().use_sigstore_signer(use_ambient_credentials=True), model_dir, file)

    def sign_statement(self, statement: Mapping[str, Any]) -> dict[str, Any]:
        from sigstore.dsse import Statement
        from sigstore.models import ClientTrustConfig
        from sigstore.oidc import IdentityToken, detect_credential
        from sigstore.sign import SigningContext

        token = detect_credential()
        if token is None:
            raise UsageError(
                "there is no identity to sign with: the CI system offers no OpenID Connect token",
                fix="give the job the permission id-token: write, or sign with a key",
            )
        context = SigningContext.from_trust_config(ClientTrustConfig.production())
        with context.signer(IdentityToken(token)) as signer:
            bundle = signer.sign_dsse(Statement(json.dumps(statement, sort_keys=True).encode()))
        signed: dict[str, Any] = json.loads(bundle.to_json())
        return signed

    def refuse(self, trust: Trust) -> str | None:
        return None if trust.identities else "no Sigstore identity is trusted"


def _demand_packages() -> None:
    try:
        import model_signing  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "bundles are signed with the package model-signing, which is not installed",
            fix='pip install "compile-stage[signing]"',
        ) from error


def refuse_key(keyid: str, trust: Trust) -> str | None:
    """None when what a key signs now would be accepted, or why not."""
    if keyid in trust.revoked:
        return f"the signing key {keyid} was revoked"
    if not (periods := trust.periods(keyid)):
        return f"the signing key {keyid} is not trusted"
    if SignedBy(keyid=keyid, name=keyid, periods=periods).covers(_today()):
        return None
    return f"the signing key {keyid} is not trusted today, only {in_words(periods)}"


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def refuse_certificate(signer: SignedBy, trust: Trust) -> str | None:
    """The same of a key that signs with a certificate."""
    if signer.keyid in trust.revoked:
        return f"the key of the signing certificate, {signer.keyid}, was revoked"
    if not trust.authorities:
        return "no certificate authority is trusted"
    if signer.covers(_today()):
        return None
    return f"the signing certificate of {signer.name} does not hold today, only {in_words(signer.periods)}"


def chain_material(chain: Sequence[Any]) -> dict[str, Any]:
    """The certificates as a Sigstore bundle has them."""
    from cryptography.hazmat.primitives.serialization import Encoding

    ders = [certificate.public_bytes(Encoding.DER) for certificate in chain]
    return {"x509CertificateChain": {"certificates": [{"rawBytes": base64.b64encode(der).decode()} for der in ders]}}


def signing_config() -> Any:
    """model-signing's, of all files of a model directory but those that a registry writes; without a signer yet."""
    from model_signing import hashing, signing

    hashed = hashing.Config().set_ignored_paths(paths=UNSIGNED, ignore_git_paths=False)
    return signing.Config().set_hashing_config(hashed)


def write_signature(config: Any, model_dir: Path, file: Path) -> None:
    """Have model-signing sign a model directory."""
    file.parent.mkdir(parents=True, exist_ok=True)
    config.sign(model_dir, file)


def _password() -> str | None:
    return os.environ.get(PASSWORD_VARIABLE) or None


def _private_key(path: Path) -> Any:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    password = _password()
    try:
        private = load_pem_private_key(path.read_bytes(), password.encode() if password else None)
        ecdsa_of(private.public_key())
    except (OSError, ValueError, TypeError) as error:
        encrypted = " (it is encrypted; set COMPILE_STAGE_SIGNING_PASSWORD)" if "encrypted" in str(error) else ""
        raise UsageError(
            f"it can't be used as a signing key: {error}{encrypted}", fix=_fix_of_key(path), where=str(path)
        ) from error
    return private


def _fix_of_key(path: Path) -> str:
    """What to do about a file that is no private key; no command in it writes over a file."""
    command = "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out"
    if not path.exists():
        return f"{command} {shlex.quote(str(path))}"
    try:
        is_public = b"PUBLIC KEY-----" in path.read_bytes()
    except OSError:
        return "name a PEM file that can be read, with an elliptic-curve private key"
    if is_public:
        return "it holds a public key: name the file of the private key that belongs to it"
    new = next(name for number in count(1) if not (name := path.with_name(f"signing-key-{number}.pem")).exists())
    return f"name a PEM file with an elliptic-curve private key, or make one: {command} {shlex.quote(str(new))}"


def read_chain(path: Path) -> Sequence[Any]:
    """The certificates of a PEM file, in order. Raises UsageError where there are none."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"no certificates can be read from it: {error}", where=str(path)) from error


def _chain_of(path: Path, private: Any) -> Sequence[Any]:
    chain = read_chain(path)
    if chain[0].public_key() != private.public_key():
        raise UsageError(
            "its first certificate is not for the signing key",
            fix="put the key's own certificate first",
            where=str(path),
        )
    return chain
