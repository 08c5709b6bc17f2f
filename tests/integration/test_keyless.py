"""Keyless signatures through the whole stage, by a Sigstore of the test's own: the package sigstore verifies them, also
in the confined process that loads a version before an alias moves, which has no network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sigstore_instance import IDENTITY, ISSUER, KeylessSigner, SigstoreInstance

from compile_stage import api, flavor
from compile_stage.core.errors import IntegrityError
from compile_stage.serving import signatures
from compile_stage.serving.trust import TRUST_SCHEMA, read_trust
from compile_stage.signing import signers

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

TARGET = "backends: [onnxruntime], precisions: [fp32]"
BODY = """\
performance: {min_speedup: null}
budget: {measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}
promote: {alias: "{target}-prod"}
compliance: {require_signature: true, trusted_keys: [trust.json]}
"""
Write = Callable[..., Path]


def write_trust(folder: Path, root: SigstoreInstance | None, identity: str = IDENTITY) -> Path:
    """A trust file of one identity, with an instance's trusted root or without one."""
    document: dict[str, Any] = {"schema": TRUST_SCHEMA, "identities": [{"identity": identity, "issuer": ISSUER}]}
    if root is not None:
        root.write_root(folder / "trusted_root.json")
        document["sigstore_trusted_root"] = {"path": "trusted_root.json"}
    file = folder / "trust.json"
    file.write_text(json.dumps(document))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_what_ci_signed_keyless_is_promoted_and_loaded_without_a_network(
    named: bool, small_model: Path, write_policy: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the process that loads a version before its alias moves has no network to ask Sigstore, so nothing that
    was signed keyless could ever be promoted."""
    instance = SigstoreInstance()
    monkeypatch.setattr(signers, "SigstoreSigner", lambda: KeylessSigner(instance, tmp_path / "keys"))
    trust = write_trust(tmp_path, instance if named else None)
    if not named:  # what Sigstore's servers would answer to the stage, and only to the stage
        from sigstore.models import TrustedRoot

        root = str(instance.write_root(tmp_path / "asked.json"))
        monkeypatch.setattr(signatures, "sigstore_root", lambda: TrustedRoot.from_file(root))
    result = api.run(f"folder:{small_model}", write_policy(TARGET, BODY), out=tmp_path / "out", signing_key="sigstore")
    assert result.exit_code == 0, result.problem
    receipt = result.targets[0].receipt
    assert receipt is not None
    assert receipt.promoted_to == "cpu-prod"
    found = api.verify(receipt.uri, revalidate=False, trusted_keys=[trust])
    assert f"signed by {IDENTITY}" in found.notes
    assert api.promote(receipt.uri, "by-hand", trusted_keys=[trust]).note.startswith("MLflow loads it")

    model = Path(receipt.uri.removeprefix("folder:")) / "model"
    monkeypatch.setenv("COMPILE_STAGE_TRUST", str(write_trust(tmp_path, instance)))
    flavor.load_model(str(model)).close()
    monkeypatch.setenv("COMPILE_STAGE_TRUST", str(write_trust(tmp_path, instance, "https://github.com/stranger")))
    with pytest.raises(IntegrityError, match="signed by an identity that is not trusted"):
        flavor.load_model(str(model))
    monkeypatch.setenv("COMPILE_STAGE_TRUST", str(write_trust(tmp_path, SigstoreInstance())))
    with pytest.raises(IntegrityError, match="signed by an identity that is not trusted"):
        flavor.load_model(str(model))


def test_a_signed_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    """Broken: the identity would be looked at, and not what it signed."""
    instance = SigstoreInstance()
    trust = read_trust([write_trust(tmp_path, instance)])
    statement = {"_type": signatures.STATEMENT_TYPE, "subject": [], "predicateType": "x", "predicate": {"a": 1}}
    document = instance.sign(json.dumps(statement).encode())
    assert signatures.verify_statement(document, trust, "here")[1].name == IDENTITY
    other = instance.sign(json.dumps({**statement, "predicate": {"a": 2}}).encode())
    payload = other["dsseEnvelope"]["payload"]
    changed = {**document, "dsseEnvelope": {**document["dsseEnvelope"], "payload": payload}}
    unlogged = {**document, "verificationMaterial": {**document["verificationMaterial"], "tlogEntries": []}}
    elsewhere = {**document, "verificationMaterial": other["verificationMaterial"]}
    for forged in (changed, unlogged, elsewhere):
        with pytest.raises(IntegrityError):
            signatures.verify_statement(forged, trust, "here")


def test_without_a_root_and_without_a_network_the_message_says_what_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: whoever verifies where Sigstore can't be reached would see an error of its updater."""
    for variable in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # nothing answers there
    trust = read_trust([write_trust(tmp_path, None)])
    statement = {"_type": signatures.STATEMENT_TYPE, "subject": [], "predicateType": "x", "predicate": {}}
    document = SigstoreInstance().sign(json.dumps(statement).encode())
    with pytest.raises(IntegrityError, match="Sigstore's trusted root can't be had") as caught:
        signatures.verify_statement(document, trust, "here")
    assert "sigstore_trusted_root" in caught.value.fix


def test_the_public_instances_root_is_handed_on_as_it_is() -> None:
    """Broken: what the stage asks of Sigstore's servers could not be given to a process without a network."""
    from sigstore.models import ClientTrustConfig

    root = ClientTrustConfig.production(offline=True).trusted_root  # as the package sigstore ships it
    again = signatures._trusted_root(root._inner.to_json())
    assert [one.subject for one in again.get_fulcio_certs()] == [one.subject for one in root.get_fulcio_certs()]
