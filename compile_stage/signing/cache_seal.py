"""Seals of a shared cache's entries, by the key that signs bundles."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from compile_stage.core.cache import cache_secret
from compile_stage.core.errors import CompileStageError
from compile_stage.core.shared_cache import NoSeal, Seal, SecretSeal
from compile_stage.core.shared_entries import RefusedError
from compile_stage.serving.signatures import STATEMENT_TYPE, verify_statement
from compile_stage.serving.trust import Trust
from compile_stage.signing.signers import Signer, SigstoreSigner

PREDICATE = "urn:compile-stage:cache-entry:v1"


class SignatureSeal:
    """A statement about an entry's digest, signed as a bundle's statements are (docs/signing.md).

    Args:
        signer: None where others' entries are read and none are written.
        trust: Whose signatures hold.
    """

    name = "signed"

    def __init__(self, signer: Signer | None, trust: Trust) -> None:
        self._signer, self._trust, self.signs = signer, trust, signer is not None

    def sign(self, digest: str) -> Any:
        """The statement, signed. Raises CompileStageError where the signer can't."""
        if self._signer is None:
            raise AssertionError("there is no signer")
        subject = [{"name": "entry", "digest": {"sha256": digest.removeprefix("sha256:")}}]
        return self._signer.sign_statement(
            {"_type": STATEMENT_TYPE, "subject": subject, "predicateType": PREDICATE, "predicate": {}}
        )

    def voucher(self, digest: str, seal: Any) -> str:
        """The id of the key, if it is trusted today."""
        try:
            if not isinstance(seal, dict):
                raise RefusedError("it is not signed")
            if "certificate" in seal.get("verificationMaterial", {}):
                raise RefusedError("it is signed keyless, which takes a network to verify")
            statement, by = verify_statement(seal, self._trust, "the shared cache")
            (subject,) = statement["subject"]
            named = statement["predicateType"], subject["digest"]["sha256"]
        except CompileStageError as error:
            raise RefusedError(error.problem) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RefusedError(f"its signature can't be read: {type(error).__name__}") from error
        if named != (PREDICATE, digest.removeprefix("sha256:")):
            raise RefusedError("its signature is of something else")
        if not by.covers(datetime.now(UTC).date().isoformat()):
            raise RefusedError(f"the key {by.name} that signed it is not in force today")
        return by.keyid or by.name


def seal_of(signer: Signer | None, trust: Trust | None) -> Seal:
    """What vouches for entries of a shared cache: the secret of `$COMPILE_STAGE_CACHE_KEY` where there is one, else the
    key that signs bundles and the keys that are trusted, else nothing. Raises UsageError as `cache_secret`.

    Keyless signing is no seal: each entry would be an entry of a public log.
    """
    secret = cache_secret()
    if secret is not None:
        return SecretSeal(secret)
    by = None if isinstance(signer, SigstoreSigner) else signer
    own = by.own_trust() if by is not None else Trust()
    trusted = own if trust is None else trust.merged(own)
    if by is None and not trusted.keys and not trusted.authorities:
        return NoSeal()
    return SignatureSeal(by, trusted)
