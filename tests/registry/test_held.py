"""What a store of local files is taken to hold."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_bundle

from compile_stage.core.digest import digest_tree, list_tree
from compile_stage.core.errors import RegistryError
from compile_stage.core.records import Bundle
from compile_stage.registry import held_files
from compile_stage.registry.held_files import GONE, HeldFiles, differing, refuse_folder, refuse_held
from compile_stage.registry.mlflow_held import _demand_there
from compile_stage.registry.model_files import DIGEST_TAG


def test_a_disk_that_is_not_mounted_has_lost_no_version(tmp_path: Path) -> None:
    """Broken: a run on a machine without the store's disk would mark every version that it finds as damaged, and
    publish it anew beside it."""
    artifacts = tmp_path / "store" / "1" / "models" / "m-1" / "artifacts"
    with pytest.raises(RegistryError, match="models is not there"):
        _demand_there(artifacts, "models:/a/1")
    artifacts.parents[1].mkdir(parents=True)
    _demand_there(artifacts, "models:/a/1")  # other models are there, this one is gone


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with its loader's code, and a signature beside it."""
    path = tiny_bundle.save_bundle(tmp_path_factory.mktemp("bundle"), **tiny_bundle.manifest_fields())
    (path / "signature").mkdir()
    (path / "signature" / "statement.json").write_text("{}")
    manifest = json.loads((path / "data" / "manifest.json").read_text())
    return Bundle(
        path=str(path), digest=digest_tree(path / "data"), key="k", target="cpu", name="m", manifest=manifest, tags={},
        metrics={}, params={}, summary="",
    )  # fmt: skip


Look = Callable[[Path, Bundle], str | None]


def in_a_folder(folder: Path, bundle: Bundle) -> str | None:
    return refuse_folder(folder, {DIGEST_TAG: bundle.digest}, bundle)


def behind_a_server(folder: Path, bundle: Bundle) -> str | None:
    sizes = {name: (folder / name).stat().st_size for name in list_tree(folder)}
    held = HeldFiles(sizes=sizes, path=lambda name: folder / name, here=False)
    return refuse_held(held, {DIGEST_TAG: bundle.digest}, bundle)


def every_file(bundle: Bundle) -> list[str]:
    names = [name for name in list_tree(Path(bundle.path)) if "__pycache__" not in name]
    assert {name.partition("/")[0] for name in names} >= {"MLmodel", "data", "code", "signature"}
    return names


@pytest.mark.parametrize("look", [in_a_folder, behind_a_server])
def test_any_file_that_is_missing_longer_or_too_many_is_found(look: Look, published: Bundle, tmp_path: Path) -> None:
    """Broken: a version that lost a file, or was given another one, is taken for what was published, and a run that
    would publish it again says that it is there."""
    there = Path(shutil.copytree(published.path, tmp_path / "there"))
    assert look(there, published) is None
    names = every_file(published)
    for name in names:
        kept = (there / name).read_bytes()
        (there / name).unlink()
        assert name in (look(there, published) or ""), f"without {name}"
        (there / name).write_bytes(kept + b" ")
        # A server is asked for the sizes alone of what lies beside data/, and whoever promotes compares all digests.
        trusted = name in ("MLmodel",) or name.startswith("signature/")
        assert trusted or look(there, published), f"{name} with a byte more"
        (there / name).write_bytes(kept)
    for name in ("data/more.bin", "data/artifact/more.bin", "code/more.py", "more.txt"):
        (there / name).write_text("x")
        assert f"{name} is not among the published files" in (look(there, published) or "")
        (there / name).unlink()
    for name in ("validations/a.json", "registered_model_meta", "code/__pycache__/a.pyc"):
        (there / name).parent.mkdir(exist_ok=True)
        (there / name).write_text("x")
        assert look(there, published) is None, f"{name} is added by others"


def test_any_byte_that_was_changed_is_found_in_a_folder(published: Bundle, tmp_path: Path) -> None:
    """Broken: weights, a manifest or a loader that somebody changed are published once more as what was proven."""
    there = Path(shutil.copytree(published.path, tmp_path / "there"))
    for name in every_file(published):
        if name == "MLmodel" or name.startswith("signature/"):  # held to the manifest, and to the keys, when it is read
            continue
        kept, times = (there / name).read_bytes(), (there / name).stat()
        (there / name).write_bytes(bytes([kept[0] ^ 1]) + kept[1:])
        os.utime(there / name, ns=(times.st_atime_ns, times.st_mtime_ns))  # as of a disk's error
        assert in_a_folder(there, published) is not None, name
        assert not name.startswith("data/") or behind_a_server(there, published) is not None, name
        assert differing(Path(published.path), there) == [name]
        (there / name).write_bytes(kept)
        os.utime(there / name, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert differing(Path(published.path), there) == []


@pytest.mark.parametrize("look", [in_a_folder, behind_a_server])
def test_a_large_file_is_held_to_its_size_in_this_run(
    look: Look, published: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: large weights that were cut off on the way are not seen, or gigabytes are read for each run."""
    monkeypatch.setattr(held_files, "_LARGE_BYTES", 10)
    monkeypatch.setattr(held_files, "_LARGE_REMOTE_BYTES", 10)
    read: list[str] = []
    digest_file = held_files.digest_file
    monkeypatch.setattr(held_files, "digest_file", lambda file: read.append(Path(file).name) or digest_file(file))
    there = Path(shutil.copytree(published.path, tmp_path / "there"))
    weights = there / "data" / "artifact" / "model.onnx"
    assert look(there, published) is None
    assert "model.onnx" not in read
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "data/artifact/model.onnx has" in (look(there, published) or "")


def test_a_version_without_files_is_gone(published: Bundle, tmp_path: Path) -> None:
    """Broken: a folder that was emptied counts as published."""
    assert in_a_folder(tmp_path / "nowhere", published) == GONE
    (tmp_path / "empty").mkdir()
    assert in_a_folder(tmp_path / "empty", published) == GONE
    wrong: Any = refuse_folder(Path(published.path), {}, published)
    assert "does not have the digest that was published" in wrong


def test_a_link_in_the_place_of_a_file_is_refused(published: Bundle, tmp_path: Path) -> None:
    """Broken: a version whose weights are a link to a file of its writer passes, and answers as that file is changed
    to."""
    there = Path(shutil.copytree(published.path, tmp_path / "there"))
    weights = there / "data" / "artifact" / "model.onnx"
    shutil.move(weights, tmp_path / "elsewhere.onnx")
    weights.symlink_to(tmp_path / "elsewhere.onnx")
    assert "model.onnx" in (in_a_folder(there, published) or "")


@pytest.mark.parametrize("look", [in_a_folder, behind_a_server])
def test_an_mlmodel_that_names_other_code_is_refused(look: Look, published: Bundle, tmp_path: Path) -> None:
    """Broken: what MLflow imports when it loads the version was changed, and the next run takes it for published."""
    there = Path(shutil.copytree(published.path, tmp_path / "there"))
    text = (there / "MLmodel").read_text()
    assert "loader_module: " in text
    (there / "MLmodel").write_text(text.replace("loader_module: ", "loader_module: other."))
    assert look(there, published)


def test_what_lies_here_is_read_up_to_its_own_limit(
    published: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: weights of some megabytes are held to their size alone also where reading them takes 0.05 s; or a large
    file that this run did not write ends the run."""
    monkeypatch.setattr(held_files, "_LARGE_REMOTE_BYTES", 10)
    there = Path(shutil.copytree(published.path, tmp_path / "there"))
    weights = there / "data" / "artifact" / "model.onnx"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    assert "data/artifact/model.onnx is not what was published" in (in_a_folder(there, published) or "")
    weights.write_bytes(kept)
    other = Path(shutil.copytree(published.path, tmp_path / "other"))
    (other / "data" / "artifact" / "model.onnx").unlink()
    assert behind_a_server(there, replace(published, path=str(other))) is None
