"""Signing with a key that lies in a PKCS#11 token: SoftHSM, in a folder of the test's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from signing_keys import make_certificates, make_key

from compile_stage.core.errors import IntegrityError
from compile_stage.serving.signatures import MODEL_SIGNATURE, SIGNATURE_FOLDER, verify_model
from compile_stage.serving.trust import read_trust

MODULES = (Path("/usr/lib/softhsm/libsofthsm2.so"), Path("/usr/lib64/pkcs11/libsofthsm2.so"))
MODULE = next((path for path in MODULES if path.is_file()), None)

pytest.importorskip("PyKCS11", reason="the extra pkcs11 is not installed")
pytestmark = [
    pytest.mark.skipif(
        MODULE is None or shutil.which("softhsm2-util") is None, reason="SoftHSM is not installed: apt-get softhsm2"
    ),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]


def token_with(key: Path, folder: Path) -> tuple[str, dict[str, str]]:
    """The URI of a key in a new token, and the environment in which the token is found."""
    (folder / "tokens").mkdir()
    config = folder / "softhsm2.conf"
    config.write_text(f"directories.tokendir = {folder / 'tokens'}\nobjectstore.backend = file\nlog.level = ERROR\n")
    (folder / "pin").write_text("1234")
    environment = {**os.environ, "SOFTHSM2_CONF": str(config)}
    for arguments in (
        ["--init-token", "--free", "--label", "ci", "--so-pin", "0000"],
        ["--import", str(key), "--token", "ci", "--label", "release", "--id", "a1"],
    ):
        command = ["softhsm2-util", *arguments, "--pin", "1234"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
    return f"pkcs11:token=ci;object=release?module-path={MODULE}&pin-source={folder / 'pin'}", environment


SIGN = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from compile_stage.signing.signers import signer_of
from tiny_bundle import signed_bundle
signer = signer_of({uri!r}, {chain!r})
print(signer.signed_by.keyid, signer.signed_by.name, sep="|")
signed_bundle(Path({folder!r}), signer)
"""


def sign(uri: str, environment: dict[str, str], folder: Path, chain: Path | None = None) -> list[str]:
    """Sign a bundle `folder/model`, in a process of its own: a PKCS#11 module is configured once for a process. Returns
    id and name of who signed."""
    tests = str(Path(__file__).parents[1])
    script = SIGN.format(tests=tests, uri=uri, chain=str(chain) if chain else None, folder=str(folder))
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1].split("|")


def test_a_key_in_a_token_signs_and_is_verified_like_any(tmp_path: Path) -> None:
    """Broken: a team whose key may not leave its HSM could not sign."""
    from model_signing import verifying

    key, public = make_key(tmp_path / "keys")
    keyid, name = sign(*token_with(key, tmp_path), tmp_path)
    path = tmp_path / "model"
    by = verify_model(path, read_trust([public]))
    assert (by.keyid, by.name) == (keyid, name)
    file = path / SIGNATURE_FOLDER / MODEL_SIGNATURE
    verifying.Config().use_elliptic_key_verifier(public_key=public).verify(path, file)
    statement = json.loads((path / SIGNATURE_FOLDER / "verdict.json").read_text())
    assert statement["verificationMaterial"]["publicKey"]["hint"]
    (path / "data" / "artifact" / "model.onnx").write_bytes(b"other")
    with pytest.raises(IntegrityError, match="is not what was signed"):
        verify_model(path, read_trust([public]))
    with pytest.raises(IntegrityError, match="signed by a key that is not trusted"):
        verify_model(path, read_trust([make_key(tmp_path / "keys", "stranger")[1]]))


def test_a_key_in_a_token_signs_with_its_certificate(tmp_path: Path) -> None:
    """Broken: an organisation that gives certificates to the keys of its HSM would have to hand out each of them."""
    from model_signing import verifying

    key, chain, root = make_certificates(tmp_path / "ca")
    keyid, name = sign(*token_with(key, tmp_path), tmp_path, chain)
    path = tmp_path / "model"
    by = verify_model(path, read_trust([root]))
    assert (by.keyid, by.name) == (keyid, "CN=leaf") == (keyid, name)
    file = path / SIGNATURE_FOLDER / MODEL_SIGNATURE
    verifying.Config().use_certificate_verifier(certificate_chain=[root]).verify(path, file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("token=ci", "token=other"), "other"),
        (("object=release", "object=none"), "label none"),
        ((str(MODULE), "/nowhere.so"), "nowhere"),
        (("pin-source=", "pin-value=4321&x="), "PIN"),
    ],
)
def test_a_token_that_can_not_be_used_is_said_without_its_pin(
    change: tuple[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a wrong label or PIN would end as a stack trace, or stand in a log."""
    key, _ = make_key(tmp_path / "keys")
    uri, environment = token_with(key, tmp_path)
    monkeypatch.setenv("SOFTHSM2_CONF", environment["SOFTHSM2_CONF"])
    command = [
        sys.executable, "-m", "compile_stage", "run", "folder:x", "-p", "shipped:cpu-server",
        "--signing-key", uri.replace(*change),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2, done.stderr
    assert "can't be used as a signing key" in done.stderr
    assert says in done.stderr
    assert "4321" not in done.stderr
    assert "pkcs11:token=T;object=KEY" in done.stderr


def test_a_certificate_of_another_key_is_a_mistake(tmp_path: Path) -> None:
    """Broken: the mistake would be noticed by whoever verifies, not by whoever signs."""
    key, _ = make_key(tmp_path / "keys")
    _, chain, _ = make_certificates(tmp_path / "ca")
    uri, environment = token_with(key, tmp_path)
    script = SIGN.format(tests=str(Path(__file__).parents[1]), uri=uri, chain=str(chain), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode != 0
    assert "the first certificate is not for the signing key" in done.stderr
