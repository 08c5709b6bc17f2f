"""Seals of shared entries by signing keys: whose hold, and whose do not."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest
from signing_keys import make_certificates, make_key

from compile_stage.core.shared_cache import NoSeal, SecretSeal
from compile_stage.core.shared_entries import RefusedError
from compile_stage.serving.trust import read_trust
from compile_stage.signing.cache_seal import SignatureSeal, seal_of
from compile_stage.signing.signers import signer_of

DIGEST = f"sha256:{'1' * 64}"


def test_a_signature_holds_for_who_trusts_its_key(tmp_path: Path) -> None:
    """Broken: a team's machines can't read what its CI wrote, or read what anybody wrote."""
    key, public = make_key(tmp_path, "ci")
    _, other = make_key(tmp_path, "other")
    writer = seal_of(signer_of(key), None)
    sealed = writer.sign(DIGEST)
    assert writer.voucher(DIGEST, sealed).startswith("sha256:"), "who writes reads it too"
    reader = seal_of(None, read_trust([public]))
    assert not reader.signs
    assert (reader.name, writer.name) == ("signed", "signed")
    assert reader.voucher(DIGEST, sealed) == writer.voucher(DIGEST, sealed)
    stranger = seal_of(None, read_trust([other]))
    for seal, digest, held in (
        (stranger, DIGEST, sealed), (reader, f"sha256:{'2' * 64}", sealed), (reader, DIGEST, None),
        (reader, DIGEST, "x"), (reader, DIGEST, {}), (reader, DIGEST, {**sealed, "dsseEnvelope": {}}),
        (reader, DIGEST, {**sealed, "verificationMaterial": {"certificate": {}}}),
        (reader, DIGEST, {**sealed, "verificationMaterial": []}),
    ):  # fmt: skip
        with pytest.raises(RefusedError):
            seal.voucher(digest, held)


def test_a_bundles_signature_is_no_seal(tmp_path: Path) -> None:
    """Broken: a statement that the same key signed about something else with that digest passes for an entry's."""
    key, public = make_key(tmp_path, "ci")
    signer = signer_of(key)
    assert signer is not None
    subject = [{"name": "data/manifest.json", "digest": {"sha256": DIGEST[7:]}}]
    other = signer.sign_statement(
        {"_type": "https://in-toto.io/Statement/v1", "subject": subject, "predicateType": "x", "predicate": {}}
    )
    with pytest.raises(RefusedError, match="something else"):
        seal_of(None, read_trust([public])).voucher(DIGEST, other)


def test_a_key_counts_on_its_days_and_until_it_is_revoked(tmp_path: Path) -> None:
    """Broken: a stolen key goes on filling the cache after it was revoked."""
    import json

    key, public = make_key(tmp_path, "ci")
    writer = signer_of(key)
    assert writer is not None
    sealed = SignatureSeal(writer, read_trust([public])).sign(DIGEST)
    yesterday = (date.today() - timedelta(days=2)).isoformat()
    for more, keys in (
        ({}, [{"path": "ci.pub", "valid_until": yesterday}]),
        ({"revoked": [writer.signed_by.keyid]}, [{"path": "ci.pub"}]),
    ):
        trust = tmp_path / "trust.json"
        trust.write_text(json.dumps({"schema": "compile-stage/trust/v1", "keys": keys, **more}))
        with pytest.raises(RefusedError):
            seal_of(None, read_trust([trust])).voucher(DIGEST, sealed)


def test_a_certificate_seals_where_its_authority_is_trusted(tmp_path: Path) -> None:
    """Broken: who signs bundles with a certificate can't share a cache."""
    key, chain, root = make_certificates(tmp_path)
    seal = seal_of(signer_of(key, chain), read_trust([root]))
    assert seal.voucher(DIGEST, seal.sign(DIGEST))


def test_the_secret_goes_first_and_nothing_is_no_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: entries carry another seal than the documentation says."""
    monkeypatch.delenv("COMPILE_STAGE_CACHE_KEY", raising=False)
    key, _ = make_key(tmp_path, "ci")
    assert isinstance(seal_of(None, None), NoSeal)
    assert isinstance(seal_of(signer_of(key), None), SignatureSeal)
    (tmp_path / "secret").write_bytes(b"s" * 32)
    monkeypatch.setenv("COMPILE_STAGE_CACHE_KEY", str(tmp_path / "secret"))
    assert isinstance(seal_of(signer_of(key), None), SecretSeal)
