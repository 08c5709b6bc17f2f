"""What only the folder registry has: plain model directories, its root, its crashes."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile_stage.core.errors import IntegrityError, RegistryError
from compile_stage.core.records import SourceModel
from compile_stage.registry import folder
from compile_stage.registry.folder import FolderRegistry
from compile_stage.registry.model_files import copy_model

MakeBundle = Callable[..., Any]


@pytest.fixture
def registry() -> FolderRegistry:
    return FolderRegistry()


@pytest.fixture
def source(registry: FolderRegistry, tmp_path: Path) -> SourceModel:
    folder = tmp_path / "models" / "net"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "model.onnx").write_bytes(b"weights")
    (folder / "MLmodel").write_text("flavors:\n  onnx:\n    data: data/model.onnx\n")
    return registry.resolve(f"folder:{folder}", tmp_path / "sources")


def test_a_plain_model_directory_is_a_source(source: SourceModel, tmp_path: Path) -> None:
    assert source.uri == f"folder:{tmp_path}/models/net#{source.digest}"
    assert (source.name, source.version, source.flavor, source.registry) == ("net", "", "onnx", "folder")


def test_it_is_published_beside_the_directory_or_where_the_environment_says(
    registry: FolderRegistry,
    source: SourceModel,
    make_bundle: MakeBundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = registry.push(make_bundle("net-compiled"), source, {})
    assert beside.uri == f"folder:{tmp_path}/models/compiled-models/net-compiled/1"
    monkeypatch.setenv("COMPILE_STAGE_FOLDER_REGISTRY", str(tmp_path / "registry"))
    named = registry.push(make_bundle("net-compiled"), source, {})
    assert named.uri == f"folder:{tmp_path}/registry/net-compiled/1"
    assert registry.find("net-compiled", make_bundle("x").key) == replace(named, created=False)


def test_a_bare_name_needs_a_root(registry: FolderRegistry) -> None:
    with pytest.raises(RegistryError, match="does not say in which folder") as caught:
        registry.current("net-compiled", "prod")
    assert "COMPILE_STAGE_FOLDER_REGISTRY" in caught.value.fix


def test_files_lie_beside_the_model(
    registry: FolderRegistry, source: SourceModel, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    """Broken: a published version does not say what it was made from, or for which target."""
    (tmp_path / "r.md").write_text("# Report")
    receipt = registry.push(make_bundle("net-compiled"), source, {"report.md": tmp_path / "r.md"})
    home = Path(receipt.uri.removeprefix("folder:"))
    assert (home / "files" / "report.md").read_text() == "# Report"
    described = json.loads((home / "version.json").read_text())
    assert described["metrics"] == {"speedup.batch_1": 2.5, "max_abs.y.batch_1": 0.001}
    bundle = make_bundle("net-compiled")
    assert described["params"] == bundle.params
    assert described["description"] == bundle.summary
    assert described["tags"] == {
        "compile_stage.source": source.uri,
        "compile_stage.source_digest": source.digest,
        "compile_stage.target": "cpu-server",
        "compile_stage.policy": "fast",
        "compile_stage.policy_digest": "sha256:0",
        "compile_stage.precision": "int8",
        "compile_stage.key": bundle.key,
        "compile_stage.digest": bundle.digest,
    }


def test_a_promotion_that_is_killed_moves_no_alias_without_the_way_back(
    registry: FolderRegistry, source: SourceModel, make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: killed between its two files, a promotion leaves an alias that no rollback leads back from."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    one, two = (registry.push(make_bundle("net", key), source, {}) for key in "ab")
    registry.promote(one, "prod")
    for file in ("_remember", "_set_alias"):
        with monkeypatch.context() as patched:
            patched.setattr(folder, file, killed)
            with pytest.raises(KeyboardInterrupt):
                registry.promote(two, "prod")
        now = registry.current(one.name, "prod")
        assert now is not None
        assert now.version == "1"
    registry.promote(two, "prod")
    assert registry.rollback(one.name, "prod").version == "1"


def test_a_report_can_not_be_put_beside_the_version(
    registry: FolderRegistry, source: SourceModel, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    """Broken: the name of a report leads to another version's record, which is written over."""
    receipt = registry.push(make_bundle("net"), source, {})
    (tmp_path / "r.md").write_text("# Report")
    with pytest.raises(RegistryError, match="leads out of the version's folder"):
        registry.attach(receipt, {"../version.json": tmp_path / "r.md"})
    assert registry.published(receipt.uri) == replace(receipt, created=False)


def test_what_the_disk_changed_is_not_published(
    registry: FolderRegistry, source: SourceModel, make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a full or faulty disk makes a version of other bytes than were proven, and it is promoted."""

    def faulty(bundle: Path, into: Path, uri: str) -> Path:
        copied = copy_model(bundle, into, uri)
        (into / "data" / "artifact" / "model.bin").unlink()  # it may be a hard link
        (into / "data" / "artifact" / "model.bin").write_text("Compiled")
        return copied

    with monkeypatch.context() as disk:
        disk.setattr(folder, "copy_model", faulty)
        with pytest.raises(RegistryError, match=r"other bytes than were written: data/artifact/model\.bin"):
            registry.push(make_bundle("net"), source, {})
    assert registry.push(make_bundle("net"), source, {}).version == "1", "a version was left of it"


def test_whoever_may_read_the_registry_may_read_a_version(
    registry: FolderRegistry, source: SourceModel, make_bundle: MakeBundle
) -> None:
    """Broken: a version belongs to the account that published it, and no server can load it."""
    version = Path(registry.push(make_bundle("net"), source, {}).uri.removeprefix("folder:"))
    assert stat.S_IMODE(version.stat().st_mode) == 0o755


def test_what_a_dead_writer_left_is_cleared_away_and_never_seen(
    registry: FolderRegistry,
    source: SourceModel,
    make_bundle: MakeBundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broken: what a killed run left fills the disk, or counts as a version."""
    # Threads that other tests of this process left waiting for a server keep the files that say who owns a folder.
    monkeypatch.setattr("compile_stage.core.leftovers._left_alone", [])
    home = tmp_path / "models" / "compiled-models" / "net-compiled"
    (home / ".part-dead" / "model").mkdir(parents=True)
    assert registry.find(f"folder:{home}", make_bundle("x").key) is None
    receipt = registry.push(make_bundle("net-compiled"), source, {})
    assert receipt.version == "1"
    assert not list(home.glob(".part-*"))


def _push(number: int, bundle: Any, source: SourceModel, answers: Any) -> None:
    answers.put(FolderRegistry().push(bundle, source, {}).created)


def test_four_processes_that_push_the_same_make_one_version(
    source: SourceModel, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    answers, bundle = context.Queue(), make_bundle("net-compiled")
    writers = [context.Process(target=_push, args=(n, bundle, source, answers)) for n in range(4)]
    for writer in writers:
        writer.start()
    created = [answers.get(timeout=60) for _ in writers]
    for writer in writers:
        writer.join(60)
    assert sorted(created) == [False, False, False, True]
    home = tmp_path / "models" / "compiled-models" / "net-compiled"
    assert [p.name for p in home.iterdir() if p.name.isdigit()] == ["1"]


def test_the_number_of_a_deleted_version_is_not_given_again_while_an_alias_leads_there(
    registry: FolderRegistry, source: SourceModel, make_bundle: MakeBundle
) -> None:
    """Broken: whoever deletes a bad version has the next one, which nobody promoted, take its alias; or a rollback goes
    to it."""
    first, second, third = (registry.push(make_bundle("net", key), source, {}) for key in "abc")
    for receipt in (first, third, second):
        registry.promote(receipt, "prod")
    shutil.rmtree(third.uri.removeprefix("folder:"))
    fourth = registry.push(make_bundle("net", "d"), source, {})
    assert fourth.version == "4", "a rollback of version 2 leads to version 3"
    registry.promote(fourth, "prod")
    shutil.rmtree(fourth.uri.removeprefix("folder:"))
    assert registry.push(make_bundle("net", "e"), source, {}).version == "5"
    now = registry.current(first.name, "prod")
    assert now is not None
    assert now.version == "4", "it is gone, and the alias still says so"


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("folder:{root}/nothing", "there is no model"),
        ("folder:{root}/models/net@prod", "no alias 'prod'"),
        ("folder:{root}/models/other/latest", "has no version"),
        ("folder:{root}/models/other/3", "there is no version 3"),
    ],
)
def test_what_is_not_there_is_said_in_words(
    registry: FolderRegistry, source: SourceModel, tmp_path: Path, uri: str, words: str
) -> None:
    with pytest.raises(RegistryError, match=words) as caught:
        registry.resolve(uri.format(root=tmp_path), tmp_path / "sources")
    assert caught.value.fix


def test_a_published_version_without_its_mlmodel_is_damaged_and_one_without_files_is_gone(
    registry: FolderRegistry, source: SourceModel, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    """Broken: `verify` of a version whose `MLmodel` somebody deleted ends as registry trouble (4), which a pipeline
    tries again, and not as a failed integrity check (7)."""
    receipt = registry.push(make_bundle("net-compiled"), source, {})
    files = next(Path(receipt.uri.removeprefix("folder:")).rglob("MLmodel")).parent
    (files / "MLmodel").unlink()
    with pytest.raises(IntegrityError, match="MLmodel is missing"):
        registry.fetch(receipt.uri, tmp_path / "fetched")
    shutil.rmtree(files / "data")
    with pytest.raises(RegistryError, match="its files are not there") as caught:
        registry.fetch(receipt.uri, tmp_path / "fetched")
    assert "delete the version" in str(caught.value.fix)
    shutil.rmtree(receipt.uri.removeprefix("folder:"))  # as the advice says
    again = registry.push(make_bundle("net-compiled"), source, {})
    registry.fetch(again.uri, tmp_path / "fetched-again")


def test_a_damaged_record_is_said_in_words(
    registry: FolderRegistry, source: SourceModel, make_bundle: MakeBundle
) -> None:
    receipt = registry.push(make_bundle("net-compiled"), source, {})
    (Path(receipt.uri.removeprefix("folder:")) / "version.json").write_text("{")
    with pytest.raises(RegistryError, match="record can't be read"):
        registry.find(receipt.name, "sha256:x")


def test_a_data_set_lies_beside_the_model(registry: FolderRegistry, source: SourceModel, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "datasets"
    folder.mkdir()
    (folder / "val.csv").write_text("a\n1\n")
    assert registry.dataset(source, "val", tmp_path / "into").read_text() == "a\n1\n"
    with pytest.raises(RegistryError, match="no data set called 'cal'") as caught:
        registry.dataset(source, "cal", tmp_path / "into")
    assert str(folder / "cal.npz") in caught.value.fix


@pytest.mark.parametrize(
    ("tag", "alias", "says"),
    [
        (1, 2, ""),
        ("1 none", 2, ""),
        (["1"], "2", "there is no version|no longer there"),
        ("1 none", "../other/2", "points to '../other/2', which is no version"),
        ("1 none", None, "points to 'null', which is no version"),
    ],
)
def test_records_that_somebody_edited_by_hand_are_read_or_refused(
    tmp_path: Path, tag: object, alias: object, says: str
) -> None:
    """Broken: a number without quotes in a record is reported as a bug of ours, or an alias leads to another model."""
    home = tmp_path / "m"
    for version in "12":
        (home / version).mkdir(parents=True)
        tags = {"compile_stage.previous.prod": tag} if version == "2" else {}
        (home / version / "version.json").write_text(json.dumps({"tags": tags}))
    (home / "aliases.json").write_text(json.dumps({"prod": alias}))
    if says:
        with pytest.raises(RegistryError, match=says):
            FolderRegistry().rollback(f"folder:{home}", "prod")
    else:
        assert FolderRegistry().rollback(f"folder:{home}", "prod").version == "1"
