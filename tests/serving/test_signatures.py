"""Who signed what: verified by our own reader of OpenSSF model signatures, and by model-signing itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from signing_keys import make_certificates, make_key
from tiny_bundle import WEIGHTS, save_bundle, signed_bundle

from compile_stage import flavor
from compile_stage.core.errors import IntegrityError, UsageError
from compile_stage.serving.signatures import MODEL_SIGNATURE, SIGNATURE_FOLDER, UNSIGNED, verify_model
from compile_stage.serving.trust import Trust, read_trust
from compile_stage.signing import signers
from compile_stage.signing.signers import Signer, signer_of

pytestmark = [  # MLflow's own
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),
]


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Signer, Trust]:
    key, public = make_key(tmp_path / "keys")
    signer = signer_of(key)
    assert signer is not None
    return signer, read_trust([public])


def test_model_signing_itself_accepts_what_we_sign(tmp_path: Path) -> None:
    """Broken: what we call an OpenSSF model signature would be one for nobody but us."""
    from model_signing import verifying

    key, public = make_key(tmp_path / "keys")
    signer = signer_of(key)
    assert signer is not None
    path = signed_bundle(tmp_path, signer)
    file = path / SIGNATURE_FOLDER / MODEL_SIGNATURE
    verifying.Config().use_elliptic_key_verifier(public_key=public).verify(path, file)
    (path / "data" / "artifact" / "model.onnx").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"artifact/model\.onnx"):
        verifying.Config().use_elliptic_key_verifier(public_key=public).verify(path, file)


def test_we_accept_what_model_signing_itself_signs(tmp_path: Path, keys: tuple[Signer, Trust]) -> None:
    """Broken: a bundle signed by the tool's own command line, as a team may do it, could not be verified."""
    signer, trust = keys
    path = signed_bundle(tmp_path, signer)
    file = path / SIGNATURE_FOLDER / MODEL_SIGNATURE
    file.unlink()
    ignored = [part for name in UNSIGNED for part in ("--ignore-paths", str(path / name))]
    command = ["sign", "key", str(path), "--private_key", str(tmp_path / "keys" / "ci.pem"), "--signature", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "model_signing", *command, *ignored], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert verify_model(path, trust).keyid == signer.signed_by.keyid


@pytest.mark.parametrize("curve", ["SECP256R1", "SECP384R1", "SECP521R1"])
def test_every_curve_signs_and_verifies(tmp_path: Path, curve: str) -> None:
    """Broken: a team whose keys are of another curve could not sign."""
    key, public = make_key(tmp_path / "keys", curve=curve)
    signer = signer_of(key)
    assert signer is not None
    assert verify_model(signed_bundle(tmp_path, signer), read_trust([public])) == signer.signed_by


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: (p / "data" / "artifact" / "model.onnx").write_bytes(b"other"), "is not what was signed"),
        (lambda p: (p / "code" / "compile_stage" / "flavor.py").write_text("x = 1"), "is not what was signed"),
        (lambda p: (p / "requirements.txt").write_text("evil"), "is not what was signed"),
        (lambda p: (p / "conda.yaml").unlink(), "was signed, and is missing"),
        (lambda p: (p / "more.txt").write_text("x"), "was not signed"),
        (lambda p: (p / SIGNATURE_FOLDER / MODEL_SIGNATURE).unlink(), "it is not signed"),
        (lambda p: (p / SIGNATURE_FOLDER / "provenance.json").unlink(), "the signature can't be read"),
    ],
)
def test_what_is_not_as_it_was_signed_is_refused(
    tmp_path: Path, keys: tuple[Signer, Trust], change: Callable[[Path], object], says: str
) -> None:
    """Broken: a file could be changed, added or taken away with its signature in place."""
    signer, trust = keys
    path = signed_bundle(tmp_path, signer)
    change(path)
    with pytest.raises(IntegrityError, match=says):
        verify_model(path, trust)


def test_a_manifest_sealed_again_by_a_stranger_is_not_loaded(
    tmp_path: Path, keys: tuple[Signer, Trust], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: who may write to the registry could negate a model and seal it with digests of his own."""
    from compile_stage.serving.manifest import sealed

    signer, _ = keys
    path = signed_bundle(tmp_path, signer)
    monkeypatch.setenv("COMPILE_STAGE_TRUST", str(tmp_path / "keys" / "ci.pub"))
    flavor.load_model(str(path)).close()
    file = path / "data" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(sealed({**manifest, "on_hardware_mismatch": "ignore"})))
    with pytest.raises(IntegrityError, match=r"data/manifest\.json is not what was signed"):
        flavor.load_model(str(path))
    stranger = signer_of(make_key(tmp_path / "keys", "stranger")[0])
    assert stranger is not None
    again = signed_bundle(tmp_path, stranger, "again")
    with pytest.raises(IntegrityError, match="signed by a key that is not trusted"):
        flavor.load_model(str(again))
    unsigned = save_bundle(tmp_path, "unsigned")
    with pytest.raises(IntegrityError, match="it is not signed"):
        flavor.load_model(str(unsigned))


def test_mlflow_serves_a_signed_model_to_who_trusts_its_signer(tmp_path: Path) -> None:
    """Broken: a signed model could not be served, or would be served without a look at its signature."""
    key, public = make_key(tmp_path / "keys")
    signer = signer_of(key)
    assert signer is not None
    path = signed_bundle(tmp_path, signer, signature_required=True)
    script = f"""
import mlflow, numpy as np
try:
    print(mlflow.pyfunc.load_model({str(path)!r}).predict(np.ones((1, 4), np.float32)).tolist())
except Exception as error:
    print(type(error).__name__, error)
"""

    def load(**environment: str) -> str:
        import os

        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True, text=True, cwd=tmp_path, check=False, env={**os.environ, **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(load(COMPILE_STAGE_TRUST=str(public))) == (np.ones((1, 4)) @ WEIGHTS).tolist()
    assert "requires a signature, and nothing here says whose is trusted" in load()


def test_statements_of_another_model_do_not_count(tmp_path: Path, keys: tuple[Signer, Trust]) -> None:
    """Broken: the provenance of a good build, signed, could be laid beside another one."""
    signer, trust = keys
    one, other = signed_bundle(tmp_path, signer), signed_bundle(tmp_path, signer, "other", threads=2)
    provenance = Path(SIGNATURE_FOLDER) / "provenance.json"
    (one / provenance).write_text((other / provenance).read_text())
    with pytest.raises(IntegrityError, match="a statement about another model"):
        verify_model(one, trust)


# ---------------------------------------------------------------------------------------------- rotation and revocation


def test_a_key_signs_within_its_days_and_a_revoked_one_never(tmp_path: Path, keys: tuple[Signer, Trust]) -> None:
    """Broken: a key that was rotated out could go on signing, or one that was stolen would still be believed."""
    signer, _ = keys
    path = signed_bundle(tmp_path, signer)
    (tmp_path / "keys" / "next.pub").write_bytes(make_key(tmp_path / "keys", "next")[1].read_bytes())

    def trust(**fields: Any) -> Trust:
        keys = [{"path": "next.pub"}, {"path": "ci.pub", **fields.pop("days", {})}]
        file = tmp_path / "keys" / "trust.json"
        file.write_text(json.dumps({"schema": "compile-stage/trust/v1", "keys": keys, **fields}))
        return read_trust([file])

    assert verify_model(path, trust(days={"valid_from": "2020-01-01"})).keyid == signer.signed_by.keyid
    with pytest.raises(IntegrityError, match="trusted from 0001-01-01 to 2020-12-31"):
        verify_model(path, trust(days={"valid_until": "2020-12-31"}))
    with pytest.raises(IntegrityError, match="was revoked"):
        verify_model(path, trust(revoked=[signer.signed_by.keyid]))
    assert signer.refuse(trust(revoked=[signer.signed_by.keyid])) is not None
    with pytest.raises(UsageError, match="is no key id"):
        trust(revoked=["sha256:typo"])


def test_who_signs_out_of_its_days_is_told_before_anything_is_compiled(
    tmp_path: Path, keys: tuple[Signer, Trust], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a run compiles and publishes for hours with a key whose last day is over, and no alias may move then."""
    signer, trust = keys
    over = Trust(keys=tuple(replace(key, valid_until="2020-12-31") for key in trust.keys))
    assert "is not trusted today, only from 0001-01-01 to 2020-12-31" in str(signer.refuse(over))
    assert signer.refuse(over.merged(trust)) is None
    key, chain, root = make_certificates(tmp_path / "certificates")
    certified = signer_of(key, chain)
    assert certified is not None
    assert certified.refuse(read_trust([root])) is None
    monkeypatch.setattr(signers, "_today", lambda: "2999-01-01")
    assert "the signing certificate of CN=leaf does not hold today" in str(certified.refuse(read_trust([root])))


def test_a_key_named_twice_counts_in_either_of_its_periods(tmp_path: Path, keys: tuple[Signer, Trust]) -> None:
    """Broken: what a key signed that came back after a pause, or that policy and option name, is refused or accepted by
    which of the two was read first."""
    signer, _ = keys
    path = signed_bundle(tmp_path, signer)
    file = tmp_path / "keys" / "trust.json"
    past, now = {"path": "ci.pub", "valid_until": "2020-12-31"}, {"path": "ci.pub", "valid_from": "2021-06-01"}
    for named in ([past, now], [now, past]):
        file.write_text(json.dumps({"schema": "compile-stage/trust/v1", "keys": named}))
        assert verify_model(path, read_trust([file])).keyid == signer.signed_by.keyid
    file.write_text(
        json.dumps({"schema": "compile-stage/trust/v1", "keys": [past, {**past, "valid_from": "2020-01-01"}]})
    )
    with pytest.raises(IntegrityError, match="from 0001-01-01 to 2020-12-31 and from 2020-01-01 to 2020-12-31"):
        verify_model(path, read_trust([file]))


@pytest.mark.parametrize(
    "written",
    [
        lambda pem: pem.replace("\n", "\r\n"),
        lambda pem: "\n".join(f"  {line}" for line in pem.splitlines()),
        lambda pem: f"# who publishes\n{pem}",
        lambda pem: f"\ufeff{pem}",
    ],
    ids=["Windows' line ends", "an indent", "a comment", "a byte order mark"],
)
def test_a_key_is_the_same_however_its_file_is_written(
    tmp_path: Path, keys: tuple[Signer, Trust], written: Callable[[str], str]
) -> None:
    """Broken: what was rightly signed is refused, since somebody's editor wrote the public key otherwise."""
    signer, _ = keys
    path = signed_bundle(tmp_path, signer)
    public = tmp_path / "keys" / "ci.pub"
    again, file = tmp_path / "keys" / "again.pub", tmp_path / "keys" / "trust.json"
    again.write_bytes(written(public.read_text()).encode())
    entry = {"pem": written(public.read_text())}
    file.write_text(json.dumps({"schema": "compile-stage/trust/v1", "keys": [entry]}))
    for named in ([again], [file], [public, again, file]):
        assert verify_model(path, read_trust(named)).keyid == signer.signed_by.keyid


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"schema": "compile-stage/trust/v2"}', "its schema is"),
        ('{"schema": "compile-stage/trust/v1", "revokd": []}', "it has the field 'revokd'"),
        ('{"schema": "compile-stage/trust/v1", "keys": [{"path": "none.pub"}]}', r"none\.pub"),
        (
            '{"schema": "compile-stage/trust/v1", "keys": [{"path": "ci.pub", "valid_til": "2025-12-31"}]}',
            "'valid_til'",
        ),
        (
            '{"schema": "compile-stage/trust/v1", "certificate_authorities": [{"path": "r", "valid_until": "x"}]}',
            "an entry of certificate_authorities has the field 'valid_until'",
        ),
        (
            '{"schema": "compile-stage/trust/v1", "identities": [{"identity": "i", "valid_until": "x"}]}',
            "an entry of identities has the field 'valid_until'",
        ),
        (
            '{"schema": "compile-stage/trust/v1", "keys": [{"pem": "-----BEGIN CERTIFICATE-----\\nx\\n'
            '-----END CERTIFICATE-----", "valid_until": "2025-12-31"}]}',
            "which has days of its own",
        ),
        ("-----BEGIN PUBLIC KEY-----\nx\n-----END PUBLIC KEY-----\n", "no trusted keys can be read"),
        ("not a key", "no trusted keys can be read"),
    ],
)
def test_a_trust_file_with_a_mistake_trusts_nobody(tmp_path: Path, content: str, says: str) -> None:
    """Broken: a typo would leave a revoked key trusted, one whose days are over, or everybody."""
    file = tmp_path / "trust.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=says):
        read_trust([file])


def test_a_private_key_is_not_named_as_a_trusted_one(tmp_path: Path) -> None:
    """Broken: people would copy their private key to every machine that verifies."""
    with pytest.raises(UsageError, match="it is a private key") as caught:
        read_trust([make_key(tmp_path)[0]])
    assert "openssl pkey" in caught.value.fix


# --------------------------------------------------------------------------------------------------------- certificates


@pytest.mark.parametrize("between", [True, False])
def test_a_certificate_of_a_trusted_authority_signs(tmp_path: Path, between: bool) -> None:
    """Broken: an organisation with its own authority would have to hand out every signer's key."""
    from model_signing import verifying

    key, chain, root = make_certificates(tmp_path / "ca", between=between)
    signer = signer_of(key, chain)
    assert signer is not None
    path, trust = signed_bundle(tmp_path, signer), read_trust([root])
    by = verify_model(path, trust)
    assert (by.keyid, by.name) == (signer.signed_by.keyid, "CN=leaf")
    file = path / SIGNATURE_FOLDER / MODEL_SIGNATURE
    verifying.Config().use_certificate_verifier(certificate_chain=[root]).verify(path, file)
    with pytest.raises(IntegrityError, match="was revoked"):
        verify_model(path, replace(trust, revoked=(by.keyid,)))
    _, _, stranger = make_certificates(tmp_path / "stranger")
    with pytest.raises(IntegrityError, match="no trusted authority issued"):
        verify_model(path, read_trust([stranger]))


def test_a_certificate_that_is_not_for_signatures_signs_nothing(tmp_path: Path) -> None:
    """Broken: any certificate of the authority, of a web server say, could sign models."""
    key, chain, root = make_certificates(tmp_path / "ca", signs=False)
    signer = signer_of(key, chain)
    assert signer is not None
    with pytest.raises(IntegrityError, match="no trusted authority issued for signatures"):
        verify_model(signed_bundle(tmp_path, signer), read_trust([root]))


def test_a_certificate_of_another_key_is_a_mistake(tmp_path: Path) -> None:
    """Broken: the mistake would be noticed by whoever verifies, not by whoever signs."""
    _, chain, _ = make_certificates(tmp_path / "ca")
    with pytest.raises(UsageError, match="not for the signing key"):
        signer_of(make_key(tmp_path, "other")[0], chain)


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\n"])
def test_what_is_no_key_says_how_to_make_one(tmp_path: Path, content: bytes) -> None:
    """Broken: a wrong path would end as a stack trace after hours of compiling."""
    file = tmp_path / "key.pem"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="can't be used as a signing key") as caught:
        signer_of(file)
    assert "openssl genpkey -algorithm EC" in caught.value.fix
    assert "key.pem" not in caught.value.fix.replace("signing-key-1.pem", "")
    file.unlink()
    with pytest.raises(UsageError, match="No such file") as caught:
        signer_of(file)
    assert caught.value.fix.endswith(f" -out {file}")


def test_the_advice_on_a_public_key_does_not_overwrite_it(tmp_path: Path) -> None:
    """Broken: who names the public key by mistake copies a command that replaces it, and nobody can verify with it what
    was signed before."""
    _, public = make_key(tmp_path, "ci")
    with pytest.raises(UsageError, match="can't be used as a signing key") as caught:
        signer_of(public)
    assert caught.value.fix == "it holds a public key: name the file of the private key that belongs to it"
