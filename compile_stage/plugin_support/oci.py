"""Folders as OCI artifacts: written as an image layout, pushed to a registry, pulled from one.

An artifact is a manifest, a config and one layer for each file, uncompressed and unarchived. So a layer has the digest
that the model's own manifest gives the file, two versions share the files that they have in common, and any OCI client
that writes layers under their title makes the very folder.

Nothing that a registry answers is believed: each manifest and layer is compared with its digest and its size, and a
layer's title must be a plain path below the folder.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from compile_stage.core.digest import digest_file
from compile_stage.core.errors import IntegrityError, InternalError, RegistryError, UsageError
from compile_stage.core.records import record

if TYPE_CHECKING:
    from oras.provider import Registry as Client
    from requests import Response

SCHEME, PLAIN_SCHEME = "oci://", "oci+http://"
"""Of a URI: over HTTPS, and over HTTP as a registry on loopback speaks it."""
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
TITLE = "org.opencontainers.image.title"

_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(?::\d+)?)/(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_TIMEOUT_S = 60  # without an answer; a transfer that goes on has no limit
_MAX_MANIFEST_BYTES = 4 * 2**20  # what registries take, by the distribution specification
_CHUNK = 1 << 20
_SIGN_IN = "docker login, or `auths` in Docker's config.json, has the credentials"


@record
class Reference:
    """Where an artifact is.

    Attributes:
        tag: Empty where a digest alone names it.
        digest: `sha256:...` of its manifest; empty where a tag alone names it.
    """

    host: str
    name: str
    tag: str
    digest: str
    plain_http: bool = False

    @classmethod
    def parse(cls, text: str, *, plain_http: bool = False) -> Reference:
        """Of `HOST[:PORT]/NAME[:TAG][@sha256:...]`, with or without its scheme; `latest` where it names neither tag nor
        digest. Raises UsageError for anything else."""
        plain_http = plain_http or text.startswith(PLAIN_SCHEME)
        bare = text.removeprefix(PLAIN_SCHEME).removeprefix(SCHEME)
        found = _REFERENCE.fullmatch(bare)
        if found is None:
            raise UsageError(
                f"{bare!r} names no OCI artifact",
                fix="write HOST[:PORT]/NAME[:TAG] or HOST[:PORT]/NAME@sha256:DIGEST, the name in lower case",
            )
        parts = {name: value or "" for name, value in found.groupdict().items()}
        if not parts["tag"] and not parts["digest"]:
            parts["tag"] = "latest"
        return cls(plain_http=plain_http, **parts)

    @property
    def uri(self) -> str:
        """With its scheme; the digest alone where it has one."""
        which = f"@{self.digest}" if self.digest else f":{self.tag}"
        return f"{PLAIN_SCHEME if self.plain_http else SCHEME}{self.host}/{self.name}{which}"

    def pinned(self, digest: str) -> Reference:
        """The same artifact by the digest of its manifest, which never means another."""
        return Reference(host=self.host, name=self.name, tag="", digest=digest, plain_http=self.plain_http)


@record
class Layer:
    """One file of an artifact.

    Attributes:
        path: Where it lies here.
        title: Relative path in the artifact.
        annotations: Beside the title.
    """

    path: Path
    title: str
    media_type: str
    annotations: Mapping[str, str]

    def descriptor(self) -> dict[str, Any]:
        """What a manifest says of it."""
        return {
            "mediaType": self.media_type,
            "digest": digest_file(self.path),
            "size": self.path.stat().st_size,
            "annotations": {TITLE: self.title, **self.annotations},
        }


# ------------------------------------------------------------------------------------------------------- image layout


def write_layout(folder: Path, manifest: Mapping[str, Any], blobs: Mapping[str, Path | bytes], tag: str) -> str:
    """Write an OCI image layout (`oci-layout`, `index.json`, `blobs/sha256/`) of one manifest.

    Args:
        blobs: Digest → file, or its bytes, of the config and of every layer.

    Returns:
        The digest of the manifest.
    """
    place = folder / "blobs" / "sha256"
    place.mkdir(parents=True, exist_ok=True)
    for digest, blob in blobs.items():
        _write_blob(place / digest.removeprefix("sha256:"), blob)
    whole = encoded(manifest)
    digest = "sha256:" + hashlib.sha256(whole).hexdigest()
    (place / digest.removeprefix("sha256:")).write_bytes(whole)
    described = {
        "mediaType": MANIFEST_TYPE,
        "artifactType": manifest["artifactType"],
        "digest": digest,
        "size": len(whole),
        "annotations": {"org.opencontainers.image.ref.name": tag},
    }
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [described]}
    (folder / "index.json").write_bytes(encoded(index))
    (folder / "oci-layout").write_bytes(encoded({"imageLayoutVersion": "1.0.0"}))
    return digest


def encoded(document: Mapping[str, Any]) -> bytes:
    """The one spelling of a document, so that the same version has the same digest wherever it is exported."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _write_blob(place: Path, blob: Path | bytes) -> None:
    if isinstance(blob, bytes):
        place.write_bytes(blob)
        return
    with blob.open("rb") as source, place.open("wb") as copy:
        while chunk := source.read(_CHUNK):
            copy.write(chunk)


# --------------------------------------------------------------------------------------------------------- registries


def push_layout(folder: Path, reference: Reference) -> tuple[Reference, int]:
    """Push an image layout of one manifest. Blobs that the registry has already are not sent again.

    Returns:
        The artifact by its digest, and how many blobs were sent.

    Raises:
        RegistryError: The registry can't be reached, or refuses.
    """
    [described] = json.loads((folder / "index.json").read_bytes())["manifests"]
    manifest_file = folder / "blobs" / "sha256" / described["digest"].removeprefix("sha256:")
    manifest = json.loads(manifest_file.read_bytes())
    session = _Session(reference)
    sent = 0
    for one in {blob["digest"]: blob for blob in (manifest["config"], *manifest["layers"])}.values():
        sent += session.send_blob(folder / "blobs" / "sha256" / one["digest"].removeprefix("sha256:"), one)
    session.send_manifest(manifest_file.read_bytes(), described["digest"])
    return reference.pinned(described["digest"]), sent


def pull_folder(reference: Reference, artifact_type: str, into: Path) -> tuple[Path, Reference]:
    """Pull an artifact: each layer is a file below the folder `into`, under its title.

    Returns:
        The folder, and the artifact by its digest.

    Raises:
        RegistryError: The registry can't be reached, has no such artifact, or it is of another type.
        IntegrityError: What the registry gave is not what the digests say, or a title leads out of the folder.
    """
    session = _Session(reference)
    content = session.manifest()
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    if reference.digest and digest != reference.digest:
        raise IntegrityError(
            f"the registry gave a manifest with the digest {digest}", fix="pull it again", where=reference.uri
        )
    pinned = reference.pinned(digest)
    layers = list(_layers(content, artifact_type, pinned.uri))
    for title, layer in layers:
        session.fetch_blob(layer, into / title)
    return into, pinned


def _layers(content: bytes, artifact_type: str, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Title and descriptor of every layer. Raises as `pull_folder`."""
    try:
        manifest = json.loads(content)
        found = manifest.get("artifactType")
        layers = [(str(layer["annotations"][TITLE]), layer) for layer in manifest["layers"]]
        sound = all(isinstance(layer["size"], int) and isinstance(layer["digest"], str) for _, layer in layers)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RegistryError("it is no artifact of files: a layer has no title", where=where) from error
    if found != artifact_type:
        raise RegistryError(f"it is an artifact of the type {found}, not {artifact_type}", where=where)
    titles = [title for title, _ in layers]
    for title in titles:
        path = PurePosixPath(title)
        plain = path.parts and not path.is_absolute() and ".." not in path.parts and "\\" not in title
        if not plain or "\0" in title or str(path) != title:
            raise IntegrityError(f"the title of a layer is no path below the folder: {title!r}", where=where)
    if not sound or len(set(titles)) != len(titles):
        raise IntegrityError("its layers have no sizes, or two have one title", where=where)
    yield from layers


class _Session:
    """Calls to one repository of a registry, through oras: with the credentials of Docker's configuration."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._client = self._open()

    def _open(self) -> Client:
        from oras.container import Container
        from oras.provider import Registry as Client

        asked = self._ask(Client(insecure=self._reference.plain_http).session, "/v2/")
        challenge = asked.headers.get("Www-Authenticate", "").lower()
        # With the wrong one of the two, oras sends no credentials at all.
        backend = "basic" if challenge.startswith("basic") else "token"
        client = Client(insecure=self._reference.plain_http, auth_backend=backend)
        client.auth.load_configs(Container(f"{self._reference.host}/{self._reference.name}"))
        if backend == "basic":
            if not hasattr(client.auth, "_basic_auth"):
                raise RegistryError(
                    f"the registry {self._reference.host} asks for a name and a password",
                    fix=_SIGN_IN,
                    where=self._reference.uri,
                )
            client.session.headers.update(client.auth.get_auth_header())  # oras sends none before it was refused
        return client

    def _ask(self, session: Any, path: str) -> Response:
        """One question without oras, whose own attempts go on for two minutes where nobody listens."""
        import requests

        try:
            answer: Response = session.get(self._url(path), timeout=_TIMEOUT_S)
        except requests.RequestException as error:
            hint = "; one without TLS needs --plain-http, or oci+http:// in its address"
            plain = "" if self._reference.plain_http else hint
            raise RegistryError(
                f"the registry {self._reference.host} can't be reached: {type(error).__name__}",
                fix=f"is it running, and is its address right{plain}?",
                where=self._reference.uri,
            ) from error
        return answer

    def _url(self, path: str) -> str:
        return f"{'http' if self._reference.plain_http else 'https'}://{self._reference.host}{path}"

    def _call(self, method: str, path: str, **named: Any) -> Response:
        """One question, through oras, which signs in. Without its own further attempts: they take two minutes, also
        where credentials are missing."""
        import requests
        from oras.provider import Registry as Client

        url = path if "://" in path else self._url(path)
        ask = getattr(Client.do_request, "__wrapped__", Client.do_request)
        for left in (2, 1, 0):
            try:
                answer: Response = ask(self._client, url, method, **named)
            except requests.ConnectionError as error:
                if not left:
                    raise self._lost(error) from error
                time.sleep(1)
            except requests.RequestException as error:
                raise self._lost(error) from error
            except Exception as error:  # oras' own errors share no base class
                raise RegistryError(
                    f"the registry {self._reference.host} lets nobody in: {error}", fix=_SIGN_IN,
                    where=self._reference.uri,
                ) from error  # fmt: skip
            else:
                return answer
        raise InternalError("the last attempt neither answered nor failed")

    def _lost(self, error: Exception) -> RegistryError:
        return RegistryError(
            f"the registry {self._reference.host} does not answer any more: {type(error).__name__}",
            fix="try again: what is there is not sent again",
            where=self._reference.uri,
        )

    def _put(self, place: str, data: Any, headers: Mapping[str, str]) -> Response:
        import requests

        url = place if "://" in place else self._url(place)
        try:
            return self._client.session.put(url, data=data, headers=dict(headers), timeout=_TIMEOUT_S)
        except requests.RequestException as error:
            raise self._lost(error) from error

    def _refused(self, answer: Response, what: str) -> RegistryError:
        return RegistryError(
            f"the registry {self._reference.host} answers {answer.status_code} to {what}",
            fix=_SIGN_IN if answer.status_code in (401, 403) else "",
            where=self._reference.uri,
        )

    def send_blob(self, file: Path, described: Mapping[str, Any]) -> bool:
        """Send a file; False where the registry has it already."""
        home, digest = f"/v2/{self._reference.name}/blobs/", described["digest"]
        if self._call("HEAD", home + digest).status_code == 200:
            return False
        begun = self._call("POST", f"{home}uploads/")
        if begun.status_code != 202:
            raise self._refused(begun, "an upload")
        place = begun.headers["Location"]
        place += f"{'&' if '?' in place else '?'}digest={digest}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(described["size"])}
        headers |= self._client.auth.get_auth_header() if getattr(self._client.auth, "token", None) else {}
        with file.open("rb") as stream:  # sent from the disk: weights may be larger than the memory
            data: Any = stream if described["size"] else b""
            # Not through oras, whose second attempt would go on where the file ended.
            answer = self._put(place, data, headers)
        if answer.status_code != 201:
            raise self._refused(answer, f"the upload of {file.name}")
        return True

    def send_manifest(self, content: bytes, digest: str) -> None:
        """Send the manifest under the reference's tag, or under its digest where it has none."""
        place = f"/v2/{self._reference.name}/manifests/{self._reference.tag or digest}"
        answer = self._call("PUT", place, data=content, headers={"Content-Type": MANIFEST_TYPE})
        if answer.status_code != 201:
            raise self._refused(answer, "the manifest")

    def manifest(self) -> bytes:
        """The manifest's bytes, as the registry gives them."""
        which = self._reference.digest or self._reference.tag
        answer = self._call(
            "GET", f"/v2/{self._reference.name}/manifests/{which}", headers={"Accept": MANIFEST_TYPE}, stream=True
        )
        if answer.status_code == 404:
            raise RegistryError("the registry has no such artifact", where=self._reference.uri)
        if answer.status_code != 200:
            raise self._refused(answer, "the manifest")
        content = answer.raw.read(_MAX_MANIFEST_BYTES + 1, decode_content=True)
        if len(content) > _MAX_MANIFEST_BYTES:
            raise IntegrityError("the manifest is larger than any real one", where=self._reference.uri)
        return bytes(content)

    def fetch_blob(self, described: Mapping[str, Any], file: Path) -> None:
        """Write a blob to a file, and compare its size and its digest."""
        file.parent.mkdir(parents=True, exist_ok=True)
        sha, left = hashlib.sha256(), int(described["size"])
        with file.open("xb") as out:
            if left:
                answer = self._call("GET", f"/v2/{self._reference.name}/blobs/{described['digest']}", stream=True)
                if answer.status_code != 200:
                    raise self._refused(answer, file.name)
                for chunk in answer.iter_content(_CHUNK):
                    left -= len(chunk)
                    if left < 0:
                        break
                    sha.update(chunk)
                    out.write(chunk)
        if left or "sha256:" + sha.hexdigest() != described["digest"]:
            raise IntegrityError(
                f"{described['annotations'][TITLE]} is not what its digest says", fix="pull it again",
                where=self._reference.uri,
            )  # fmt: skip
