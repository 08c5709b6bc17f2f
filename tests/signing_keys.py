"""Keys and certificates for tests, made when they are asked for."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any


def make_key(folder: Path, name: str = "ci", curve: str = "SECP256R1") -> tuple[Path, Path]:
    """A private key and its public one, as `openssl genpkey` and `openssl pkey -pubout` write them."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    folder.mkdir(parents=True, exist_ok=True)
    private = ec.generate_private_key(getattr(ec, curve)())
    key, public = folder / f"{name}.pem", folder / f"{name}.pub"
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return key, public


def make_certificates(folder: Path, *, between: bool = True, signs: bool = True) -> tuple[Path, Path, Path]:
    """A private key, the certificates of it up to the root's (without the root), and the root.

    Args:
        between: An authority stands between the root and the key.
        signs: The key's certificate is for digital signatures.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    keys = {name: make_key(folder, name)[0] for name in ("root", "between", "leaf")}
    private = {name: load_pem_private_key(path.read_bytes(), None) for name, path in keys.items()}
    root = _certificate("root", private["root"], "root", private["root"], authority=True)
    issuer = "between" if between else "root"
    middle = _certificate("between", private["between"], "root", private["root"], authority=True)
    leaf = _certificate("leaf", private["leaf"], issuer, private[issuer], authority=False, signs=signs)
    chain = [leaf, middle] if between else [leaf]
    (folder / "chain.pem").write_bytes(b"".join(one.public_bytes(Encoding.PEM) for one in chain))
    (folder / "root.crt").write_bytes(root.public_bytes(Encoding.PEM))
    return keys["leaf"], folder / "chain.pem", folder / "root.crt"


def _certificate(name: str, private: Any, issuer: str, signer: Any, *, authority: bool, signs: bool = True) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = dt.datetime.now(dt.UTC)
    usage = x509.KeyUsage(
        digital_signature=signs and not authority, key_cert_sign=authority, crl_sign=authority,
        content_commitment=not signs, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    public = private.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
