"""Signs with a key that stays in a token: an HSM, a smart card, or a cloud's key service, by its PKCS#11 module.

model-signing has the signer; the key is named by a PKCS#11 URI (RFC 7512):

    pkcs11:token=ci;object=release?module-path=/usr/lib/softhsm/libsofthsm2.so&pin-source=/run/secrets/pin
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

from compile_stage.core.errors import MissingDependencyError, UsageError
from compile_stage.core.json_files import read_json_object
from compile_stage.serving.signatures import SignedBy, ecdsa_of, signed_with
from compile_stage.serving.trust import Trust, keyid_of
from compile_stage.signing.signers import (
    Signer,
    chain_material,
    refuse_certificate,
    refuse_key,
    signing_config,
    write_signature,
)

SCHEME = "pkcs11:"


class Pkcs11Signer(Signer):
    """Signs with an elliptic-curve key of a PKCS#11 token, and the certificate of it where there is one.

    Args:
        uri: Of the private key; its public key lies beside it under the same label or id.
        chain: The key's certificate, and after it those up to an authority's; empty for a bare key.

    Raises:
        UsageError: The token, the key or the module can't be used.
        MissingDependencyError: The extra `pkcs11` is not installed.
    """

    def __init__(self, uri: str, chain: Sequence[Any] = ()) -> None:
        try:
            from PyKCS11 import PyKCS11Error
        except ImportError as error:
            raise MissingDependencyError(
                "keys of PKCS#11 tokens are used with the package PyKCS11, which is not installed",
                fix='pip install "compile-stage[pkcs11]"',
            ) from error
        named, _, attributes = uri.partition("?")  # the latter may be a PIN
        try:
            _demand_module(attributes)
            # One signer for everything: a token takes one login of a process.
            self._config = signing_config().use_pkcs11_signer(pkcs11_uri=uri)
            self._signer: Any = self._config._signer
            public = self._signer.public_key()
            ecdsa_of(public)
        except (PyKCS11Error, ValueError, OSError) as error:
            raise UsageError(
                f"it can't be used as a signing key: {error}",
                fix=f"name token, object and module: {SCHEME}token=T;object=KEY?module-path=/FILE.so&pin-source=/FILE "
                "(docs/signing.md)",
                where=named,
            ) from error
        if chain and chain[0].public_key() != public:
            raise UsageError(
                "the first certificate is not for the signing key",
                fix="put the key's own certificate first",
                where=named,
            )
        self._chain, keyid = chain, keyid_of(public)
        self.signed_by = signed_with(chain[0]) if chain else SignedBy(keyid=keyid, name=keyid)

    def sign_model(self, model_dir: Path, file: Path) -> None:
        write_signature(self._config, model_dir, file)
        file.write_text(json.dumps(self._with_chain(read_json_object(file))), encoding="utf-8")

    def sign_statement(self, statement: Mapping[str, Any]) -> dict[str, Any]:
        from google.protobuf import json_format  # type: ignore[import-untyped]
        from in_toto_attestation.v1 import statement_pb2

        payload = json_format.ParseDict(dict(statement), statement_pb2.Statement())
        signature = self._signer.sign(SimpleNamespace(statement=SimpleNamespace(pb=payload)))
        return self._with_chain(json.loads(signature.bundle.to_json()))

    def refuse(self, trust: Trust) -> str | None:
        return refuse_certificate(self.signed_by, trust) if self._chain else refuse_key(self.signed_by.keyid, trust)

    def _with_chain(self, document: dict[str, Any]) -> dict[str, Any]:
        """With the certificates in place of the bare key. model-signing 1.1.1's own signer of a token's key with its
        certificate fails: it gives the bytes of a certificate where text is asked for."""
        if not self._chain:
            return document
        return {**document, "verificationMaterial": {**chain_material(self._chain), "tlogEntries": []}}


def _demand_module(attributes: str) -> None:
    """Raise FileNotFoundError where the module is none: PyKCS11 has no words for it."""
    for name, _, value in (part.partition("=") for part in attributes.split("&")):
        if name == "module-path" and not Path(unquote(value)).is_file():
            raise FileNotFoundError(f"there is no module {unquote(value)}")
