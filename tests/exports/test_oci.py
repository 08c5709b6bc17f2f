"""OCI artifacts: pushed to a registry on loopback, pulled, verified; and what a registry can't pass off as one."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from exports_of import exported

from compile_stage import api
from compile_stage.core.digest import digest_file, list_tree
from compile_stage.core.errors import IntegrityError, RegistryError, SourceError, UsageError
from compile_stage.core.plugins import registry_for
from compile_stage.exports.oci import ARTIFACT_TYPE, LAYOUT
from compile_stage.plugin_support.oci import Layer, Reference, push_layout, write_layout

pytestmark = [  # what MLflow says of its own type hints, and its queries
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),
]


def options(host: str, name: str = "models/perceptron:1") -> api.ExportOptions:
    return api.ExportOptions(push=f"{host}/{name}", plain_http=True)


@pytest.mark.slow
def test_an_artifact_is_pushed_pulled_and_verified(versions: Any, registry: Any, tmp_path: Path) -> None:
    """Broken: what a cluster pulls would not be what was proven, or nobody could tell."""
    made = exported(versions.native, "oci", tmp_path / "one", options=options(registry.host))
    assert made.reference.startswith(f"oci+http://{registry.host}/models/perceptron@sha256:")
    assert made.proven
    assert api.verify(made.reference, revalidate=False).passed
    folder = registry_for(made.reference).fetch(made.reference, tmp_path / "pulled")
    model = Path(versions.native.removeprefix("folder:")) / "model"
    assert {name: digest_file(folder / name) for name in list_tree(folder)} == {
        name: digest_file(model / name) for name in list_tree(model)
    }
    again = exported(made.reference, "oci", tmp_path / "again", check=False)  # from there to another form
    assert again.artifact_digest == made.artifact_digest


def test_the_layout_is_modelpacks_and_the_same_wherever_it_is_made(versions: Any, tmp_path: Path) -> None:
    """Broken: tools that read ModelPack would find no model, or one version have another digest with each export."""
    for name in ("one", "two"):
        exported(versions.native, "oci", tmp_path / name, check=False)
    index = json.loads((tmp_path / "one" / LAYOUT / "index.json").read_text())
    assert index == json.loads((tmp_path / "two" / LAYOUT / "index.json").read_text())
    [described] = index["manifests"]
    blobs = tmp_path / "one" / LAYOUT / "blobs" / "sha256"
    for blob in blobs.iterdir():
        assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
    manifest = json.loads((blobs / described["digest"][7:]).read_text())
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    kinds = {layer["annotations"]["org.cncf.model.filepath"]: layer["mediaType"] for layer in manifest["layers"]}
    assert kinds["data/artifact/model.onnx"] == "application/vnd.cncf.model.weight.v1.raw"
    assert kinds["data/manifest.json"] == "application/vnd.cncf.model.weight.config.v1.raw"
    assert kinds["code/compile_stage/flavor.py"] == "application/vnd.cncf.model.code.v1.raw"
    assert kinds["input_example.json"] == "application/vnd.cncf.model.dataset.v1.raw"
    config = json.loads((blobs / manifest["config"]["digest"][7:]).read_text())
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    assert (config["config"]["format"], config["config"]["precision"]) == ("onnx", "fp32")
    assert config["modelfs"] == {"type": "layers", "diffIds": [layer["digest"] for layer in manifest["layers"]]}
    assert manifest["annotations"]["compile_stage.version"] == versions.native


def test_layers_that_are_there_are_not_sent_again(versions: Any, registry: Any, tmp_path: Path) -> None:
    """Broken: each version would send gigabytes that the registry has."""
    made = [exported(uri, "oci", tmp_path / str(n), check=False) for n, uri in enumerate(versions[:2])]
    sent = [
        push_layout(Path(one.folder) / LAYOUT, Reference.parse(f"{registry.host}/reused:{n}", plain_http=True))[1]
        for n, one in enumerate([made[0], made[0], made[1]])
    ]
    assert sent[0] > 30
    assert sent[1] == 0
    assert 0 < sent[2] < 10  # manifest, bill of materials, MLmodel, config


def test_a_registry_that_asks_for_a_password_gets_dockers(
    versions: Any, closed_registry: Any, isolated_home: Path, tmp_path: Path
) -> None:
    """Broken: only open registries could be pushed to, or credentials would have to be given on the command line."""
    exported(versions.native, "oci", tmp_path / "one", check=False)
    reference = Reference.parse(f"{closed_registry.host}/m:1", plain_http=True)
    with pytest.raises(RegistryError, match="asks for a name and a password"):
        push_layout(tmp_path / "one" / LAYOUT, reference)
    (isolated_home / ".docker").mkdir()
    auth = base64.b64encode(b"ci:secret").decode()
    (isolated_home / ".docker" / "config.json").write_text(
        json.dumps({"auths": {closed_registry.host: {"auth": auth}}})
    )
    pinned, sent = push_layout(tmp_path / "one" / LAYOUT, reference)
    assert sent > 30
    assert registry_for(pinned.uri).fetch(pinned.uri, tmp_path / "pulled").is_dir()


# --------------------------------------------------------------------------------------------- what is not believed


def artifact(folder: Path, titles: dict[str, bytes], **changes: Any) -> Path:
    """A layout with these files as its layers."""
    layers = []
    for number, (title, content) in enumerate(titles.items()):
        (folder / str(number)).write_bytes(content)
        layers.append(Layer(path=folder / str(number), title=title, media_type="text/plain", annotations={}))
    described = [{**layer.descriptor(), **changes} for layer in layers]
    config = "sha256:" + hashlib.sha256(b"{}").hexdigest()
    manifest = {
        "schemaVersion": 2, "artifactType": ARTIFACT_TYPE, "layers": described,
        "config": {"mediaType": "application/vnd.cncf.model.config.v1+json", "digest": config, "size": 2},
    }  # fmt: skip
    blobs: dict[str, Any] = {layer.descriptor()["digest"]: layer.path for layer in layers}
    write_layout(folder / "layout", manifest, {**blobs, config: b"{}"}, "1")
    return folder / "layout"


def test_what_a_registry_gives_out_is_compared(registry: Any, tmp_path: Path) -> None:
    """Broken: whoever can write to the registry's disk could replace a layer, or the manifest that a digest names."""
    layout = artifact(tmp_path, {"a.txt": b"weights", "empty": b""})
    pinned, _ = push_layout(layout, Reference.parse(f"{registry.host}/compared:1", plain_http=True))
    pulled = registry_for(pinned.uri).fetch(pinned.uri, tmp_path / "pulled")
    assert (pulled / "a.txt").read_bytes() == b"weights"
    assert (pulled / "empty").read_bytes() == b""
    stored = {path.parent.name: path for path in (registry.storage / "docker/registry/v2/blobs").rglob("data")}
    stored[hashlib.sha256(b"weights").hexdigest()].write_bytes(b"WEIGHTS")
    with pytest.raises(IntegrityError, match=r"a\.txt is not what its digest says"):
        registry_for(pinned.uri).fetch(pinned.uri, tmp_path / "again")


@pytest.mark.parametrize("title", ["../out.txt", "/out.txt", "a/../../out.txt", "a//b", "./a", "a\\b", ""])
def test_a_title_that_leads_out_of_the_folder_is_refused(registry: Any, tmp_path: Path, title: str) -> None:
    """Broken: pulling an artifact could write anywhere, as into a home's start-up files."""
    layout = artifact(tmp_path, {title: b"x"})
    pinned, _ = push_layout(layout, Reference.parse(f"{registry.host}/titles:1", plain_http=True))
    with pytest.raises(IntegrityError, match="no path below the folder"):
        registry_for(pinned.uri).fetch(pinned.uri, tmp_path / "pulled" / "deep")
    assert not list(tmp_path.rglob("out.txt"))


def test_another_kind_of_artifact_and_a_size_that_is_wrong_are_refused(registry: Any, tmp_path: Path) -> None:
    """Broken: a container image would be taken for a model, or an endless layer fill the disk."""
    (tmp_path / "sizes").mkdir()
    wrong = push_layout(
        artifact(tmp_path / "sizes", {"a": b"abc"}, size=2), Reference.parse(f"{registry.host}/s:1", plain_http=True)
    )[0]
    with pytest.raises(IntegrityError, match="a is not what its digest says"):
        registry_for(wrong.uri).fetch(wrong.uri, tmp_path / "pulled")
    layout = artifact(tmp_path, {"a": b"abc"}, annotations={})
    untitled = push_layout(layout, Reference.parse(f"{registry.host}/u:1", plain_http=True))[0]
    with pytest.raises(RegistryError, match="a layer has no title"):
        registry_for(untitled.uri).fetch(untitled.uri, tmp_path / "untitled")


def test_where_nobody_listens_is_said_at_once(versions: Any, tmp_path: Path) -> None:
    """Broken: a mistyped host would take two minutes, or end in a traceback."""
    with pytest.raises(RegistryError, match=r"127\.0\.0\.1:9 can't be reached") as caught:
        exported(versions.native, "oci", tmp_path / "one", check=False, options=options("127.0.0.1:9"))
    assert "--plain-http" not in caught.value.fix
    assert (tmp_path / "one" / "export.json").is_file()  # it can be pushed by another tool


def test_references_are_those_of_registries() -> None:
    """Broken: a port would be taken for a tag, or a name that no registry takes be sent to one."""
    whole = Reference.parse("oci+http://localhost:5000/team/model:v1.2")
    assert (whole.host, whole.name, whole.tag, whole.plain_http) == ("localhost:5000", "team/model", "v1.2", True)
    assert Reference.parse("a.example/m").tag == "latest"
    digest = "sha256:" + "0" * 64
    assert Reference.parse(f"oci://a.example/m:1@{digest}").uri == f"oci://a.example/m@{digest}"
    for wrong in ("m", "a.example/Model:1", "a.example/m:", "a.example/m@sha256:12", "https://a.example/m", "a/../m:1"):
        with pytest.raises(UsageError, match="names no OCI artifact"):
            Reference.parse(wrong)


def test_an_artifact_is_no_source_and_has_no_aliases(tmp_path: Path) -> None:
    """Broken: a traceback, where somebody compiles or promotes what lies in a container registry."""
    registry = registry_for("oci://a.example/m:1")
    with pytest.raises(SourceError, match="is no source"):
        registry.resolve("oci://a.example/m:1", tmp_path)
    with pytest.raises(RegistryError, match="has no aliases"):
        registry.current("oci://a.example/m", "prod")
    with pytest.raises(RegistryError, match="has no version"):
        api.promote("oci://a.example/m:1", "prod")
    assert not registry.is_configured("oci://a.example/m:1")
