"""Who may sign: public keys, certificate authorities and Sigstore identities, and what was revoked.

They are named by the policy (`compliance.trusted_keys`), by `--trusted-key`, and by `$COMPILE_STAGE_TRUST`, which holds
paths, separated as in PATH. A path is a PEM file of public keys or of root certificates, or a trust file:

    {"schema": "compile-stage/trust/v1",
     "keys": [{"path": "ci-2026.pub", "valid_from": "2026-01-01", "valid_until": "2026-12-31"}, {"pem": "-----BEGIN
     ..."}], "certificate_authorities": [{"path": "root.pem"}], "identities": [{"identity":
     "https://github.com/org/repo/.github/workflows/compile.yml@refs/heads/main",
                     "issuer": "https://token.actions.githubusercontent.com"}],
     "sigstore_trusted_root": {"path": "trusted_root.json"}, "revoked": ["sha256:..."]}

Sigstore's trusted root (its authorities' certificates and its logs' keys) lets keyless signatures be verified without a
network; without it Sigstore's servers are asked for it. A key's id is the SHA-256 of its public key in DER form
(`openssl pkey -pubin -in FILE -outform DER | sha256sum`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from compile_stage.core.errors import MissingDependencyError, UsageError
from compile_stage.core.json_files import read_json_object
from compile_stage.core.records import record

TRUST_VARIABLE = "COMPILE_STAGE_TRUST"
TRUST_SCHEMA = "compile-stage/trust/v1"
_MAX_BYTES = 2**20
_DAYS = ("valid_from", "valid_until")
_FIELDS = {
    "keys": {"path", "pem", *_DAYS},
    "certificate_authorities": {"path", "pem"},
    "identities": {"identity", "issuer"},
}
"""What an entry of each list of a trust file can have."""


@record
class TrustedKey:
    """A public key in PEM form, and the days (ISO dates, both included) on which what it signs is accepted."""

    keyid: str
    pem: str
    valid_from: str = "0001-01-01"
    valid_until: str = "9999-12-31"


@record
class Identity:
    """Of Sigstore's keyless signing: who, by the word of which OpenID Connect issuer."""

    identity: str
    issuer: str


@record
class Trust:
    """Whose signatures are accepted.

    Attributes:
        authorities: Root certificates in PEM form.
        sigstore_roots: Trusted roots of Sigstore instances, as JSON; none: that of the public instance, by network.
        revoked: Ids of keys, of certificates' keys too, of which nothing is accepted, whenever it was signed.
    """

    keys: tuple[TrustedKey, ...] = ()
    authorities: tuple[str, ...] = ()
    identities: tuple[Identity, ...] = ()
    revoked: tuple[str, ...] = ()
    sigstore_roots: tuple[str, ...] = ()

    def merged(self, other: Trust) -> Trust:
        """Both: what either trusts, without what either revokes."""
        return Trust(
            keys=(*self.keys, *other.keys),
            authorities=(*self.authorities, *other.authorities),
            identities=(*self.identities, *other.identities),
            revoked=(*self.revoked, *other.revoked),
            sigstore_roots=tuple(dict.fromkeys((*self.sigstore_roots, *other.sigstore_roots))),
        )

    def periods(self, keyid: str) -> tuple[tuple[str, str], ...]:
        """First and last day of each entry of a key: it may be named twice, such as by the policy and by an option."""
        return tuple(dict.fromkeys((key.valid_from, key.valid_until) for key in self.keys if key.keyid == keyid))


def trust_of_environment() -> Trust | None:
    """What `$COMPILE_STAGE_TRUST` names; None where it is not set. Raises as `read_trust`."""
    named = os.environ.get(TRUST_VARIABLE, "")
    return read_trust(path for path in named.split(os.pathsep) if path) if named.strip(os.pathsep) else None


def read_trust(paths: Iterable[str | os.PathLike[str]]) -> Trust:
    """What these files name.

    Raises:
        UsageError: A file can't be read, or names nobody.
        MissingDependencyError: The package cryptography is not installed.
    """
    trust = Trust()
    for path in paths:
        trust = trust.merged(_read(Path(path).expanduser()))
    return trust


def merged_trust(paths: Iterable[str | os.PathLike[str]], named: Trust | None) -> Trust | None:
    """What these files name, and `named`; None where there is neither. Raises as `read_trust`."""
    files = tuple(paths)
    if not files:
        return named
    return read_trust(files) if named is None else read_trust(files).merged(named)


def trust_document(trust: Trust) -> dict[str, Any]:
    """A trust file that says the same, with every key in it."""
    roots: dict[str, Any] = {}
    if trust.sigstore_roots:  # a loader that was published before this field refuses it
        roots["sigstore_trusted_root"] = [json.loads(text) for text in trust.sigstore_roots]
    return {
        "schema": TRUST_SCHEMA,
        **roots,
        "keys": [{"pem": key.pem, "valid_from": key.valid_from, "valid_until": key.valid_until} for key in trust.keys],
        "certificate_authorities": [{"pem": text} for text in trust.authorities],
        "identities": [{"identity": one.identity, "issuer": one.issuer} for one in trust.identities],
        "revoked": list(trust.revoked),
    }


def keyid_of(public_key: Any) -> str:
    """`sha256:...` of a public key (of the package cryptography) in DER form."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    der = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return f"sha256:{hashlib.sha256(der).hexdigest()}"


def demand_cryptography() -> None:
    """Raise MissingDependencyError where signatures can't be verified."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "signatures are verified with the package cryptography, which is not installed",
            fix="pip install cryptography",
        ) from error


def _read(file: Path) -> Trust:
    demand_cryptography()
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MiB")
        text = file.read_text(encoding="utf-8-sig")  # Windows' editors write a mark before the text
        trust = _of_document(file) if text.lstrip().startswith("{") else _of_text(text, {}, file)
    except UsageError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"no trusted keys can be read from it: {error}",
            fix="name a PEM file of public keys or root certificates, or a trust file (docs/signing.md)",
            where=str(file),
        ) from error
    return trust


def _of_document(file: Path) -> Trust:
    document = read_json_object(file, _MAX_BYTES)
    if document.get("schema") != TRUST_SCHEMA:
        raise ValueError(f"its schema is {document.get('schema')!r}, not {TRUST_SCHEMA!r}")
    known = {"schema", "keys", "certificate_authorities", "identities", "revoked", "sigstore_trusted_root"}
    if unknown := sorted(document.keys() - known):
        raise ValueError(f"it has the field {unknown[0]!r}; it can have {', '.join(sorted(known))}")
    trust = Trust(
        identities=tuple(
            Identity(identity=str(i["identity"]), issuer=str(i["issuer"])) for i in _entries(document, "identities")
        ),
        revoked=tuple(map(_checked_id, _list(document, "revoked"))),
        sigstore_roots=_sigstore_roots(document.get("sigstore_trusted_root"), file),
    )
    for entry in (*_entries(document, "keys"), *_entries(document, "certificate_authorities")):
        text = entry["pem"] if "pem" in entry else (file.parent / entry["path"]).read_text(encoding="utf-8-sig")
        trust = trust.merged(_of_text(text, entry, file))
    return trust


def _sigstore_roots(value: Any, file: Path) -> tuple[str, ...]:
    """Of `{"path": ...}`, of a trusted root itself, or of a list of these."""
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(root for one in value for root in _sigstore_roots(one, file))
    root = read_json_object(file.parent / value["path"], _MAX_BYTES) if value.keys() == {"path"} else value
    if not str(root["mediaType"]).startswith("application/vnd.dev.sigstore.trustedroot"):
        raise ValueError(f"sigstore_trusted_root is a {root['mediaType']!r}")
    return (json.dumps(root, sort_keys=True),)


def _list(document: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = document.get(name, [])
    if not isinstance(value, list):
        raise TypeError(f"{name} is no list")
    return value


def _entries(document: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    """A typo in a day must not go unnoticed: the key would stay trusted after it."""
    for entry in (entries := _list(document, name)):
        if unknown := sorted(entry.keys() - _FIELDS[name]):
            raise ValueError(
                f"an entry of {name} has the field {unknown[0]!r}; it can have {', '.join(sorted(_FIELDS[name]))}"
            )
    return entries


def _checked_id(keyid: object) -> str:
    """A typo in a revocation must not go unnoticed: what it names would stay trusted."""
    text = str(keyid)
    if not text.startswith("sha256:") or len(text) != 71 or set(text[7:]) - set("0123456789abcdef"):
        raise ValueError(f"{text!r} is no key id; it is sha256: and 64 hexadecimal digits")
    return text


def _of_text(text: str, entry: Mapping[str, Any], file: Path) -> Trust:
    """The keys and certificates of a PEM text."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if "PRIVATE KEY-----" in text:
        raise UsageError(
            "it is a private key; who verifies needs the public one",
            fix=f"openssl pkey -in {file.name} -pubout -out {file.stem}.pub",
            where=str(file),
        )
    days = {name: date.fromisoformat(entry[name]).isoformat() for name in _DAYS if name in entry}
    keys = tuple(_key(load_pem_public_key(block.encode()), days) for block in _blocks(text, "PUBLIC KEY"))
    authorities = tuple(_blocks(text, "CERTIFICATE"))
    if not keys and not authorities:
        raise ValueError("it holds neither a public key nor a certificate")
    if authorities and days:
        raise ValueError(
            f"{next(iter(days))} is for public keys, and it holds a certificate, which has days of its own"
        )
    return Trust(keys=keys, authorities=authorities)


def _key(public: Any, days: Mapping[str, str]) -> TrustedKey:
    """The key in the one form of PEM that signers hash, whatever line ends and indents the file has."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    return TrustedKey(keyid=keyid_of(public), pem=pem, **days)


def _blocks(text: str, label: str) -> list[str]:
    begin, end = f"-----BEGIN {label}-----", f"-----END {label}-----"
    parts = text.split(begin)[1:]
    return [f"{begin}{part.partition(end)[0]}{end}\n" for part in parts]
