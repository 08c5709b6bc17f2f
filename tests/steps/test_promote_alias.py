"""When an alias moves to a published version. The registry is a real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from factories import run_context, target_policy
from small_versions import bundle_of, write_model

from compile_stage.core.errors import AliasMovedError
from compile_stage.core.records import Promotion, Receipt, Selection, SourceModel, TargetResult
from compile_stage.registry.folder import FolderRegistry
from compile_stage.steps.promote import Incumbent, promote

REGISTRY = FolderRegistry()
Move = Callable[..., Receipt]


@pytest.fixture
def ours(tmp_path: Path) -> SourceModel:
    return REGISTRY.resolve(
        f"folder:{write_model(tmp_path / 'models' / 'net', 'weights', 'onnx')}", tmp_path / "sources"
    )


@pytest.fixture
def versions(ours: SourceModel, tmp_path: Path) -> list[Receipt]:
    """Three published versions; the alias `prod` points to the first."""
    made = [REGISTRY.push(bundle_of(tmp_path, "compiled", key), ours, {}) for key in "abc"]
    REGISTRY.promote(made[0], "prod")
    return made


@pytest.fixture
def move(ours: SourceModel, tmp_path: Path) -> Move:
    """`promote` with the policy's rules and what the alias pointed to when it was looked at."""

    def promoted(receipt: Receipt, before: Incumbent, rules: Promotion | None = None) -> Receipt:
        (tmp_path / "scratch").mkdir(exist_ok=True)
        target = TargetResult(
            policy=target_policy(promote=rules or Promotion(alias="prod")),
            candidates=(),
            selection=Selection(target="cpu", winner=None, reason="", reasons={}, states={}),
            receipt=receipt,
        )
        return promote(run_context(tmp_path / "scratch"), ours, target, "prod", before, None)

    return promoted


def at(receipt: Receipt) -> str:
    """The version that `prod` points to now."""
    now = REGISTRY.current(receipt.name, "prod")
    assert now is not None
    return now.version


def test_it_moves_from_what_it_was_compared_with(versions: list[Receipt], move: Move) -> None:
    """Broken: another stage moved the alias meanwhile, and its version is replaced by one that was compared with an
    older one."""
    one, two, three = versions
    REGISTRY.promote(three, "prod")
    with pytest.raises(AliasMovedError):
        move(two, Incumbent(version=one.version))
    assert at(one) == "3"
    moved = move(two, Incumbent(version=three.version))
    assert (moved.promoted_to, moved.previous, at(one)) == ("prod", "3", "2")


def test_machines_that_would_be_left_without_an_artifact_keep_it(versions: list[Receipt], move: Move) -> None:
    """Broken: a version that is proven for one kind of machine takes the alias of all, and the others' servers load
    what nothing is proven for."""
    one, two, _ = versions
    kept = move(two, Incumbent(version=one.version, uri=one.uri, lacking=("gpu", "edge")))
    assert kept.promoted_to is None
    assert f"stays at {one.uri}, which is proven for gpu and edge" in kept.note
    assert at(one) == "1"


def test_it_waits_for_who_must_approve(versions: list[Receipt], move: Move) -> None:
    """Broken: nobody approved, and production follows; or somebody did, and it waits for ever."""
    rules = Promotion(alias="prod", approval="compile_stage.approved_by", approvers=("ada",))
    one, two, _ = versions
    waiting = move(two, Incumbent(version=one.version), rules)
    assert waiting.promoted_to is None
    assert f"set the tag compile_stage.approved_by=ada on {two.uri}; then: compile-stage promote" in waiting.note
    assert at(one) == "1"
    record = Path(two.uri.removeprefix("folder:")) / "version.json"
    written = json.loads(record.read_text())
    record.write_text(json.dumps({**written, "tags": {**written["tags"], "compile_stage.approved_by": "ada"}}))
    assert move(two, Incumbent(version=one.version), rules).promoted_to == "prod"
    assert at(one) == "2"


def test_where_it_already_is_nobody_is_asked(versions: list[Receipt], move: Move) -> None:
    """Broken: a run that was made again says that it waits for an approval of what is served."""
    one = versions[0]
    rules = Promotion(alias="prod", approval="compile_stage.approved_by")
    again = move(replace(one, created=False), Incumbent(version=one.version), rules)
    assert (again.promoted_to, again.note) == ("prod", "the alias was already there")
