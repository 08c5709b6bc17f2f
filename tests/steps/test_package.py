"""What a published version is known by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import job, passed, policy, source, target, target_policy

from compile_stage.core.records import Candidate, Plan, TargetResult
from compile_stage.serving.manifest import MANIFEST_NAME, MANIFEST_SCHEMA
from compile_stage.steps.package import publication_key, remove_bundles
from compile_stage.steps.select import select

PLAN = Plan(source=source(), policy=policy(), jobs=(), refused=())


def key(winner: Candidate) -> str:
    rules = target_policy()
    found = TargetResult(policy=rules, candidates=(winner,), selection=select((winner,), rules))
    return publication_key(PLAN, found, winner, "x86_64-0")


@pytest.mark.parametrize("changed", [{"options": {"intra_op_threads": 1}}, {"digest": "sha256:" + "1" * 64}])
def test_the_same_file_opened_otherwise_is_another_version(changed: dict[str, Any]) -> None:
    """Broken: where a run finds that the artifact is faster on half the threads, the registry would go on with the
    version that it has, and the report would tell of another."""
    plain = passed(job("int8", native=False))
    assert plain.artifact is not None
    assert key(plain) == key(replace(plain))
    assert key(replace(plain, artifact=replace(plain.artifact, **changed))) != key(plain)


def write_bundle(folder: Path, target: str, *others: str) -> None:
    """A bundle of one target, or the one of a family that holds a variant of each."""
    (folder / "data").mkdir(parents=True)
    manifest: dict[str, Any] = {"schema": MANIFEST_SCHEMA, "target": {"name": target}}
    if others:
        variants = {other: {"key": "", "folder": "", "stored": {}, "manifest": {"target": {"name": other}}}
                    for other in others}  # fmt: skip
        manifest["variants"] = {target: {"key": "", "folder": "", "stored": {}, "manifest": None}, **variants}
    (folder / "data" / MANIFEST_NAME).write_text(json.dumps(manifest))


def test_only_what_holds_something_of_the_targets_is_removed(tmp_path: Path) -> None:
    """Broken: what an earlier run proved would stay as the winner of a run that has none; or `-t` would cost the other
    targets theirs."""
    bundles = tmp_path / "bundles"
    write_bundle(bundles / "cpu", "cpu")
    write_bundle(bundles / "m-1--cpu--tensorrt--fp16", "cpu")  # compiled for other hardware
    write_bundle(bundles / "servers", "big", "cpu")  # a family
    write_bundle(bundles / "big", "big")
    write_bundle(bundles / "m-1--big--tensorrt--fp16", "big")
    (bundles / "notes").mkdir()
    remove_bundles(tmp_path, [target_policy(target("cpu"))])
    assert {path.name for path in bundles.iterdir()} == {"big", "m-1--big--tensorrt--fp16", "notes"}
    remove_bundles(tmp_path, [target_policy(target("big"), family="notes")])
    assert not bundles.exists()


def test_nothing_is_removed_where_nothing_was_packaged(tmp_path: Path) -> None:
    """Broken: the first run into a folder would fail."""
    remove_bundles(tmp_path, [target_policy()])
    assert not list(tmp_path.iterdir())
