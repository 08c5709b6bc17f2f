"""What every registry must do, run against MLflow (a server, and an embedded database) and the plain folder."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile_stage.core import alias_history
from compile_stage.core.errors import AliasMovedError, IntegrityError, RegistryError, SourceError, UsageError
from compile_stage.registry import folder
from compile_stage.registry.mlflow import MLflowRegistry

Case = MakeBundle = Any  # conftest.Case and the fixture `make_bundle`

# For what our own code decides of answers that other tests here get from a server too.
without_server = pytest.mark.parametrize("case", ["embedded", "folder"], indirect=True)


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


@without_server
def test_the_versions_of_a_family_that_none_was_made_after_are_found(
    case: Case, tmp_path: Path, make_bundle: MakeBundle
) -> None:
    """Broken: a second machine would not find what the first one proved, and publish a version without it; or what
    two machines published side by side would be forgotten, all but the newest."""
    source = case.resolve(tmp_path / "sources")
    name = case.registry.publication_name(source, f"{case.base}-compiled")
    assert case.registry.find_family(name, "sha256:f") == ()
    for key, family, after in (("one", "f", ""), ("two", "f", "1"), ("three", "g", ""), ("four", "f", "1, 4, 5")):
        bundle = make_bundle(f"{case.base}-compiled", key)
        tags = {**bundle.tags, "compile_stage.family_key": f"sha256:{family}"}
        tags |= {"compile_stage.family_after": after} if after else {}
        pushed = case.registry.push(replace(bundle, name=name, tags=tags), source, {})
    assert pushed.version == "4"
    assert [found.version for found in case.registry.find_family(name, "sha256:f")] == ["4", "2"]


def test_the_final_reports_replace_those_of_the_publication(
    case: Case, tmp_path: Path, make_bundle: MakeBundle
) -> None:
    """Broken: every report in the registry would say "Not published in this run", and its result.json would hold no
    receipt."""
    report = tmp_path / "report.md"
    report.write_text("not published in this run")
    receipt = case.publish(tmp_path, make_bundle, files={"report.md": report})
    assert case.reports(receipt, tmp_path / "before") == {"report.md": "not published in this run"}

    report.write_text("published")
    (tmp_path / "page.html").write_text("<p>published")
    files = {"report.md": report, "report.html": tmp_path / "page.html"}
    case.registry.attach(receipt, files)
    assert case.reports(receipt, tmp_path / "after") == {"report.md": "published", "report.html": "<p>published"}

    report.write_text("of a later run that changed nothing")
    case.registry.attach(replace(receipt, created=False), files)
    assert case.reports(receipt, tmp_path / "same")["report.md"] == "published"

    report.write_text("published and promoted")
    case.registry.attach(case.registry.promote(receipt, "prod"), files)
    assert case.reports(receipt, tmp_path / "promoted")["report.md"] == "published and promoted"
    report.write_text("of a later run that promoted nothing")
    case.registry.attach(receipt, files)
    assert case.reports(receipt, tmp_path / "kept")["report.md"] == "published and promoted"
    assert case.registry.fetch(receipt.uri, tmp_path / "fetched")  # the model's own files are as they were


def test_a_version_that_is_gone_gets_no_reports(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    """Broken: the folder registry would make a version of reports alone, where somebody had deleted the model."""
    receipt = case.publish(tmp_path, make_bundle)
    gone = replace(receipt, version="77", uri=receipt.uri.rpartition("/")[0] + "/77")
    (tmp_path / "report.md").write_text("published")
    with pytest.raises(RegistryError, match="there is no version"):
        case.registry.attach(gone, {"report.md": tmp_path / "report.md"})
    assert case.registry.find(receipt.name, make_bundle("x").key) == replace(receipt, created=False)


def test_a_version_is_described_in_one_line(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    """Broken: whoever browses the registry would see versions without a word on what they are, how fast and how
    exact."""
    described = case.described(case.publish(tmp_path, make_bundle))
    assert described.startswith("net 1 compiled by onnxruntime to int8 for cpu-server; median 0.4 ms at batch 1.")
    assert "\n" not in described


def test_push_leaves_the_bundle_as_it_is(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    source = case.resolve(tmp_path / "sources")
    bundle = replace(make_bundle("x"), name=case.registry.publication_name(source, f"{case.base}-compiled"))
    before = (Path(bundle.path) / "MLmodel").read_bytes()
    case.registry.push(bundle, source, {})
    assert (Path(bundle.path) / "MLmodel").read_bytes() == before


@without_server
def test_a_validation_is_attached_with_its_tags(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    """Broken: a validation that passed elsewhere lies with the version, and no list of versions says so."""
    receipt = case.publish(tmp_path, make_bundle)
    (tmp_path / "x86_64-1.json").write_text("{}")
    case.registry.attest(receipt, tmp_path / "x86_64-1.json", {"validated.x86_64-1": "passed"})
    tags = case.registry.published(receipt.uri).tags
    assert tags == {**receipt.tags, "compile_stage.validated.x86_64-1": "passed"}
    fetched = case.registry.fetch(receipt.uri, tmp_path / "fetched")
    assert (fetched / "validations" / "x86_64-1.json").read_text() == "{}"


def test_promote_and_roll_back(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    """Broken: an alias goes where nobody sent it, or over what another stage put there meanwhile; or no way leads
    back."""
    registry = case.registry
    one = case.publish(tmp_path, make_bundle, key="one")
    two = case.publish(tmp_path, make_bundle, key="two")
    three = case.publish(tmp_path, make_bundle, key="three")
    assert registry.current(one.name, "cpu-prod") is None
    assert registry.promote(one, "cpu-prod").previous is None
    assert registry.promote(two, "cpu-prod").previous == "1"
    for other in ("1", "", "3"):  # it was compared with what somebody else replaced meanwhile
        with pytest.raises(AliasMovedError):
            registry.promote(three, "cpu-prod", expected=other)
    promoted = registry.promote(three, "cpu-prod", expected="2")
    assert (promoted.promoted_to, promoted.previous) == ("cpu-prod", "2")
    assert registry.promote(three, "cpu-prod").note  # nothing moves, and the record of what was before stays
    for other in ("1", "", "3"):  # not the one that comes before
        with pytest.raises(AliasMovedError):
            registry.rollback(one.name, "cpu-prod", expected=other)
    assert registry.rollback(one.name, "cpu-prod", expected="2").version == "2"
    assert registry.rollback(one.name, "cpu-prod").version == "1"
    now = registry.current(one.name, "cpu-prod")
    assert now is not None
    assert now.uri == one.uri
    with pytest.raises(RegistryError, match="no version is recorded"):
        registry.rollback(one.name, "cpu-prod")
    with pytest.raises(RegistryError, match="nothing to roll back") as caught:
        registry.rollback(one.name, "other")
    assert caught.value.fix == "name one that it has: cpu-prod", "broken: who mistyped it is left without advice"


@without_server
def test_rollbacks_go_one_back_each_though_a_version_came_twice(
    case: Case, tmp_path: Path, make_bundle: MakeBundle
) -> None:
    """Broken: after 1, 2, 3 and 2 again, rollbacks go 3, 2, 3, 2 and never to version 1, the last that was good."""
    registry = case.registry
    one, two, three = (case.publish(tmp_path, make_bundle, key=key) for key in ("one", "two", "three"))
    for receipt in (one, two, three, two):
        registry.promote(receipt, "cpu-prod")
    assert registry.promote(two, "cpu-prod").previous == "3"  # nothing moves
    assert [registry.rollback(one.name, "cpu-prod").version for _ in range(3)] == ["3", "2", "1"]
    with pytest.raises(RegistryError, match="no version is recorded"):
        registry.rollback(one.name, "cpu-prod")
    # From here on it is as if the alias were new.
    registry.promote(three, "cpu-prod")
    assert registry.rollback(one.name, "cpu-prod").version == "1"
    with pytest.raises(RegistryError, match="no version is recorded"):
        registry.rollback(one.name, "cpu-prod")


@pytest.mark.slow
def test_a_version_that_an_early_release_promoted_comes_again(
    case: Case, tmp_path: Path, make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: after an update, the first promotion of a version that had the alias before makes rollbacks go from 3 to
    2 and from 2 to 3 for ever, and never to version 1."""
    registry = case.registry
    one, two, three = (case.publish(tmp_path, make_bundle, key=key) for key in ("one", "two", "three"))
    with monkeypatch.context() as patched:
        patched.setattr(alias_history, "write", lambda history: history.previous)
        for receipt in (one, two, three):
            registry.promote(receipt, "cpu-prod")
    registry.promote(two, "cpu-prod")
    assert [registry.rollback(one.name, "cpu-prod").version for _ in range(3)] == ["3", "2", "1"]
    with pytest.raises(RegistryError, match="no version is recorded"):
        registry.rollback(one.name, "cpu-prod")


@without_server
def test_a_promotion_that_was_killed_changes_no_history(
    case: Case, tmp_path: Path, make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: killed between the tag and the alias, a promotion of an earlier version leaves a tag there that leads
    forth again: rollbacks go from 3 to 2 and back to 3."""
    registry = case.registry
    one, two, three = (case.publish(tmp_path, make_bundle, key=key) for key in ("one", "two", "three"))
    for receipt in (one, two, three):
        registry.promote(receipt, "cpu-prod")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(MLflowRegistry, "_move", killed)
        patched.setattr(folder, "_set_alias", killed)
        with pytest.raises(KeyboardInterrupt):
            registry.promote(two, "cpu-prod")
        with pytest.raises(KeyboardInterrupt):
            registry.rollback(one.name, "cpu-prod")
    assert [registry.rollback(one.name, "cpu-prod").version for _ in range(2)] == ["2", "1"]


def test_an_alias_that_reads_as_something_else_is_refused(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    receipt = case.publish(tmp_path, make_bundle)
    for alias in ("latest", "v1", "3", "a b", "a/b", ""):
        with pytest.raises(UsageError, match="can't be an alias"):
            case.registry.promote(receipt, alias)


def test_an_alias_moves_on_and_back_up_to_the_longest_name(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    """Broken: an alias of 228 characters moves to a first version, and then neither on nor back, since MLflow refuses
    the tag that says what it pointed to."""
    one, two = (case.publish(tmp_path, make_bundle, key=key) for key in ("one", "two"))
    longest = "p" * alias_history.LONGEST_ALIAS
    for receipt in (one, two):
        case.registry.promote(receipt, longest)
    assert case.registry.rollback(one.name, longest).version == one.version
    with pytest.raises(UsageError, match="at most 227"):
        case.registry.promote(one, longest + "p")
    assert case.registry.current(one.name, longest + "p") is None


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


def test_a_version_without_its_digest_is_not_fetched(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    """Broken: whoever may write tags could take the digest away, and then change the files unseen."""
    receipt = case.publish(tmp_path, make_bundle)
    case.untag(receipt, "compile_stage.digest")
    with pytest.raises(IntegrityError, match=r"has no tag compile_stage\.digest"):
        case.registry.fetch(receipt.uri, tmp_path / "fetched")


def test_an_original_is_not_called_a_damaged_version(case: Case, tmp_path: Path) -> None:
    """Broken: `verify` and `export` of an original would say that somebody took its tags away."""
    with pytest.raises(RegistryError, match="not a version that compile-stage published") as caught:
        case.registry.fetch(case.source_uri, tmp_path / "fetched")
    assert "compile-stage run" in caught.value.fix


def test_our_own_publication_is_no_source(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    receipt = case.publish(tmp_path, make_bundle)
    with pytest.raises(SourceError, match="already compiled") as caught:
        case.registry.resolve(receipt.uri, tmp_path / "sources")
    assert case.source_uri in caught.value.fix


def damage(file: Path) -> None:
    """Flip a bit, which changes no size."""
    content = file.read_bytes()
    file.unlink()  # it may be a hard link
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])


@pytest.mark.parametrize("how", ["changed", "removed", "all removed", "added"])
def test_a_version_that_was_damaged_is_published_again_under_a_new_one(
    case: Case, tmp_path: Path, make_bundle: MakeBundle, how: str
) -> None:
    """Broken: `run` would say "already published, unchanged" of files that were changed or are gone, and no later run
    would mend it."""
    first = case.publish(tmp_path, make_bundle)
    model = case.stored(first) / "data" / "artifact" / "model.bin"
    if how == "changed":
        damage(model)
    elif how == "removed":
        model.unlink()
    elif how == "added":
        (model.parent / "more.bin").write_text("x")
    else:
        shutil.rmtree(case.stored(first))
    again = case.publish(tmp_path, make_bundle, content="measured again")
    assert (again.created, again.version) == (True, "2")
    assert f"{first.uri}, made from the same inputs, is damaged" in again.note
    assert ("its files are gone" if how == "all removed" else "data/") in again.note
    assert case.registry.fetch(again.uri, tmp_path / "fetched")
    assert case.registry.find(first.name, make_bundle("x").key) == replace(again, created=False, note="")
    third = case.publish(tmp_path, make_bundle)
    assert (third.created, third.version, third.note) == (False, "2", "")
    with pytest.raises((IntegrityError, RegistryError)):
        case.registry.fetch(first.uri, tmp_path / "first")
    if how != "all removed":  # it is still there, and still known as one of ours
        assert case.registry.published(first.uri).version == "1"


def test_a_version_whose_loader_is_gone_is_published_again(case: Case, tmp_path: Path, make_bundle: MakeBundle) -> None:
    """Broken: a version without MLmodel, which nothing can load, would be called unchanged."""
    first = case.publish(tmp_path, make_bundle)
    (case.stored(first) / "MLmodel").unlink()
    again = case.publish(tmp_path, make_bundle)
    assert again.version == "2"
    assert "MLmodel is missing" in again.note
