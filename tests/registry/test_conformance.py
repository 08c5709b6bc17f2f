"""What every registry must do, run against MLflow (a server, and an embedded database) and the plain folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile_stage.core.errors import IntegrityError, RegistryError, SourceError

Case = MakeBundle = Any  # conftest.Case and the fixture `make_bundle`


def test_resolve_pins_and_copies_into_a_folder_named_by_digest(case: Case, tmp_path: Path) -> None:
    source = case.resolve(tmp_path / "sources")
    again = case.resolve(tmp_path / "sources")
    assert source == again
    assert source.uri == case.source_uri
    assert (source.name, source.version, source.flavor) == (case.base, "1", "onnx")
    assert Path(source.path).parent == tmp_path / "sources"
    assert sorted(p.name for p in Path(source.path).iterdir()) == ["MLmodel", "data"]
    assert source.signature is not None
    assert str(source.signature.inputs[0]) == "x: float32[batch, 4]"
    assert not list((tmp_path / "sources").glob(".part-*"))


def test_a_source_damaged_in_the_cache_is_fetched_again(case: Case, tmp_path: Path) -> None:
    source = case.resolve(tmp_path / "sources")
    (Path(source.path) / "data" / "model.onnx").write_bytes(b"rot")
    assert case.resolve(tmp_path / "sources").digest == source.digest
    assert (Path(source.path) / "data" / "model.onnx").stat().st_size == 256


def test_a_missing_version_is_named(case: Case, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="there is no") as caught:
        case.registry.resolve(case.missing, tmp_path)
    assert caught.value.fix


def test_push_publishes_once(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    first = case.publish(tmp_path, make_bundle)
    again = case.publish(tmp_path, make_bundle, content="measured again, so other bytes")
    assert (first.created, again.created) == (True, False)
    assert again == replace(first, created=False)
    found = case.registry.find(first.name, make_bundle("x").key)
    assert found == again
    assert case.registry.find(first.name, "sha256:unknown") is None


def test_another_key_is_another_version(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    one = case.publish(tmp_path, make_bundle, key="one")
    two = case.publish(tmp_path, make_bundle, key="two")
    assert (one.version, two.version) == ("1", "2")


def test_push_leaves_the_bundle_as_it_is(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    source = case.resolve(tmp_path / "sources")
    bundle = replace(make_bundle("x"), name=case.registry.publication_name(source, f"{case.base}-compiled"))
    before = (Path(bundle.path) / "MLmodel").read_bytes()
    case.registry.push(bundle, source, {})
    assert (Path(bundle.path) / "MLmodel").read_bytes() == before


def test_promote_and_roll_back(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    registry = case.registry
    one = case.publish(tmp_path, make_bundle, key="one")
    two = case.publish(tmp_path, make_bundle, key="two")
    three = case.publish(tmp_path, make_bundle, key="three")
    assert registry.current(one.name, "cpu-prod") is None
    assert registry.promote(one, "cpu-prod").previous is None
    assert registry.promote(two, "cpu-prod").previous == "1"
    promoted = registry.promote(three, "cpu-prod")
    assert (promoted.promoted_to, promoted.previous) == ("cpu-prod", "2")
    assert registry.promote(three, "cpu-prod").note  # nothing moves, and the record of what was before stays
    assert registry.rollback(one.name, "cpu-prod").version == "2"
    assert registry.rollback(one.name, "cpu-prod").version == "1"
    now = registry.current(one.name, "cpu-prod")
    assert now is not None
    assert now.uri == one.uri
    with pytest.raises(RegistryError, match="no version is recorded"):
        registry.rollback(one.name, "cpu-prod")
    with pytest.raises(RegistryError, match="nothing to roll back"):
        registry.rollback(one.name, "other")


def test_an_alias_that_reads_as_something_else_is_refused(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    receipt = case.publish(tmp_path, make_bundle)
    for alias in ("latest", "v1", "3", "a b", "a/b", ""):
        with pytest.raises(RegistryError, match="can't be an alias"):
            case.registry.promote(receipt, alias)


def test_promote_of_a_version_that_is_gone(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    receipt = case.publish(tmp_path, make_bundle)
    gone = replace(receipt, version="77", uri=receipt.uri.rpartition("/")[0] + "/77")
    with pytest.raises(RegistryError, match="there is no version"):
        case.registry.promote(gone, "prod")
    assert case.registry.current(receipt.name, "prod") is None


def test_fetch_gives_what_was_published(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    receipt = case.publish(tmp_path, make_bundle)
    case.registry.promote(receipt, "prod")
    for uri in (receipt.uri, f"{receipt.uri.rpartition('/')[0]}@prod", f"{receipt.uri.rpartition('/')[0]}/latest"):
        folder = case.registry.fetch(uri, tmp_path / "fetched")
        assert (folder / "data" / "artifact" / "model.bin").read_text() == "compiled"
        assert (folder / "MLmodel").is_file()


def test_fetch_notices_files_that_were_changed_in_the_registry(
    case: Case, tmp_path: Path, make_bundle: MakeBundle
) -> None:
    receipt = case.publish(tmp_path, make_bundle)
    (case.stored(receipt) / "data" / "artifact" / "model.bin").write_text("tampered")
    with pytest.raises(IntegrityError, match="not those that were published"):
        case.registry.fetch(receipt.uri, tmp_path / "fetched")


def test_our_own_publication_is_no_source(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    receipt = case.publish(tmp_path, make_bundle)
    with pytest.raises(SourceError, match="already compiled") as caught:
        case.registry.resolve(receipt.uri, tmp_path / "sources")
    assert case.source_uri in caught.value.fix
