"""What a published version is known by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import job, measurement, passed, policy, run_context, source, target, target_policy, timing
from tiny_bundle import describe, save_bundle

from compile_stage.core.records import Bundle, Candidate, Origin, Plan, PredictSpeedup, TargetResult
from compile_stage.serving.manifest import MANIFEST_NAME, MANIFEST_SCHEMA
from compile_stage.steps.package import package, publication_key, remove_bundles
from compile_stage.steps.select import select, without_speed

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


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_the_figures_of_a_bundle_hold_no_speedup_over_a_baseline_that_was_slowed_down(tmp_path: Path) -> None:
    """Broken: the reports say that the speedup is not known, and the registry shows it as a metric, or describes the
    version by it."""
    original, compiled = save_bundle(tmp_path, "m"), tmp_path / "m-data" / "artifact"
    made = replace(describe(compiled)["artifact"], path=str(compiled))
    times = timing(speedup=22.6, speedup_interval=(22.1, 23.1), stable=True)
    winner = passed(artifact=made, measurement=measurement(timings=(times,)))
    rules, origin = target_policy(), Origin(framework="", prediction_format={"kind": "array", "outputs": ["y"]})
    plan = Plan(source=source(registry="mlflow", path=str(original)), policy=policy(), jobs=(), refused=())

    def packaged(contradiction: str) -> Bundle:
        compared = PredictSpeedup(speedup=3.0, contradiction=contradiction)
        found = TargetResult(
            policy=rules, candidates=(winner,), selection=select((winner,), rules), predict_speedup=compared
        )
        told = without_speed(found) if contradiction else found
        bundle = package(run_context(tmp_path), plan, told, origin, tmp_path / "out").bundle
        assert bundle is not None
        return bundle

    plain, slowed = packaged(""), packaged("the baseline took 50 ms")
    assert plain.metrics["speedup.batch_1"] == 22.6
    assert "22.60 times the original's speed" in plain.summary
    assert not [name for name in slowed.metrics if name.startswith("speedup")]
    assert "22.6" not in slowed.summary
    assert "how many times the original's speed is not known (something slowed the original down)" in slowed.summary
