"""What of a published version is looked at before an alias moves to it, or away from it: real files in a folder
registry."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import factories
import pytest
import tiny_bundle
from factories import COSINE, artifact, run_context, source, target, target_policy

from compile_stage import flavor
from compile_stage.core.digest import digest_tree, plain
from compile_stage.core.environment import hardware
from compile_stage.core.errors import GateError, InternalError
from compile_stage.core.records import (
    Bundle,
    Candidate,
    Check,
    Gate,
    Outcome,
    Selection,
    SourceModel,
    TargetResult,
    Variant,
    Verdict,
    Waiver,
)
from compile_stage.registry.folder import FolderRegistry
from compile_stage.serving.trust import Trust
from compile_stage.serving.variant_writing import FamilyVersion, with_variants
from compile_stage.steps.promote import Incumbent, incumbent, lacking, promote, published_now, shipped

HERE = hardware()
SAMPLES = Gate(metric="samples", limit=32, direction="at_least")
JOB = factories.job(where=target(name="cpu", batch_sizes=(1,)))
PASSED = Verdict(
    checks=(
        Check(gate=SAMPLES, outcome=Outcome.PASS, measured=64, reason="", batch_size=1),
        Check(gate=COSINE, outcome=Outcome.PASS, measured=0.999, reason="", batch_size=1),
    )
)
MISSED = replace(PASSED, checks=(PASSED.checks[0], replace(PASSED.checks[1], measured=0.5)))

pytestmark = pytest.mark.filterwarnings("ignore:.*type hint")  # MLflow's own

Publish = Callable[..., TargetResult]


@pytest.fixture
def ours(tmp_path: Path) -> SourceModel:
    root = tmp_path / "registry"
    root.mkdir()
    return source(uri=f"folder:{root}/m/3", registry="folder")


@pytest.fixture
def publish(tmp_path: Path, ours: SourceModel, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Pushes a version and gives back what a run knows of it; `changes` are laid over its manifest."""
    monkeypatch.setenv("COMPILE_STAGE_FOLDER_REGISTRY", str(tmp_path / "registry"))

    def push(name: str, alias: str | None = None, **changes: Any) -> TargetResult:
        fields = {
            **tiny_bundle.manifest_fields(),
            "job": plain(JOB),
            "verdict": plain(PASSED),
            "source": {"uri": ours.uri, "digest": "sha256:m", "name": "m", "version": "3", "flavor": "onnx"},
            "key": f"sha256:{name}",
            **changes,
        }
        folder = tiny_bundle.save_bundle(tmp_path / "bundles", name, **fields)
        manifest = flavor.read_manifest(folder)
        bundle = Bundle(
            path=str(folder), digest=digest_tree(folder / "data"), key=manifest["key"], target="cpu", name="m-compiled",
            manifest=manifest, tags={}, metrics={}, params={}, summary="",
        )  # fmt: skip
        receipt = FolderRegistry().push(bundle, ours, {})
        if alias is not None:
            FolderRegistry().promote(receipt, alias, expected="")
        winner = Candidate(job=JOB, state="won", artifact=artifact(digest=f"sha256:{name}"), verdict=PASSED)
        return TargetResult(
            policy=target_policy(JOB.target),
            candidates=(winner,),
            selection=Selection(target="cpu", winner=JOB.id, reason="", states={}, reasons={}),
            bundle=bundle,
            receipt=receipt,
        )

    return push


def test_what_is_promoted_is_what_the_registry_gives_out(publish: Publish, ours: SourceModel, tmp_path: Path) -> None:
    """Broken: an alias moves to files that nobody looked at, or the winner of this run is measured in the place of what
    an earlier run published of the same inputs."""
    result, context = publish("one"), run_context(tmp_path)
    assert result.receipt is not None
    assert result.winner is not None
    found = shipped(context, ours, result)
    assert found.artifact == result.winner.artifact
    assert (Path(found.path) / "data" / "artifact" / "model.onnx").is_file()
    held = replace(result, receipt=replace(result.receipt, digest="sha256:of an earlier run"))
    assert shipped(context, ours, held).artifact.digest == flavor.read_manifest(found.path)["artifact"]["digest"]


@pytest.mark.parametrize("lacks", ["receipt", "bundle", "winner", "artifact"])
def test_nothing_is_promoted_where_nothing_was_published(
    lacks: str, publish: Publish, ours: SourceModel, tmp_path: Path
) -> None:
    """Broken: a run that published nothing moves an alias."""
    result = publish("one")
    (winner,) = result.candidates
    changed: dict[str, Any] = {
        "receipt": {"receipt": None},
        "bundle": {"bundle": None},
        "winner": {"selection": replace(result.selection, winner=None)},
        "artifact": {"candidates": (replace(winner, artifact=None),)},
    }
    with pytest.raises(InternalError, match="nothing was published for cpu"):
        shipped(run_context(tmp_path), ours, replace(result, **changed[lacks]))


def test_a_version_that_is_damaged_or_passes_no_more_is_not_promoted(
    publish: Publish, ours: SourceModel, tmp_path: Path
) -> None:
    """Broken: an alias moves to files that changed in the registry, to a verdict that its own measurements contradict,
    to one under a waiver that ended, or to what nobody signed though the policy asks for it."""
    context, result = run_context(tmp_path), publish("one")
    with pytest.raises(GateError, match=r"which was to be promoted, is damaged: .*signature"):
        shipped(context, ours, result, Trust(keys=()))
    missed = publish("missed", verdict=plain(MISSED))
    with pytest.raises(GateError, match="its own measurement does not: cosine"):
        shipped(context, ours, missed)
    waiver = Waiver(gate="cosine", target="cpu", reason="known", owner="me", expires="2026-06-30")
    failed = replace(MISSED.checks[1], outcome=Outcome.FAIL, waived=waiver)
    waived = publish("waived", verdict=plain(replace(MISSED, checks=(MISSED.checks[0], failed))))
    shipped(replace(context, today=date(2026, 6, 30)), ours, waived)
    with pytest.raises(GateError, match="ended on 2026-06-30"):
        shipped(replace(context, today=date(2026, 7, 1)), ours, waived)
    assert result.receipt is not None
    (weights,) = (tmp_path / "registry").glob("**/1/model/data/artifact/model.onnx")
    weights.write_bytes(weights.read_bytes() + b"x")
    with pytest.raises(GateError, match="which was to be promoted, is damaged"):
        shipped(context, ours, result)


def test_packages_that_somebody_else_named_are_not_promoted(
    publish: Publish, ours: SourceModel, tmp_path: Path
) -> None:
    """Broken: an alias moves to a version whose requirements were changed: servers install what nobody looked at."""
    result = publish("one")
    (requirements,) = (tmp_path / "registry").glob("**/1/model/requirements.txt")
    requirements.write_text(requirements.read_text() + "surely-not-ours==1.0\n")
    with pytest.raises(GateError, match="which was to be promoted, is damaged"):
        shipped(run_context(tmp_path), ours, result)


def test_each_proven_variant_passes_before_an_alias_moves(publish: Publish, ours: SourceModel, tmp_path: Path) -> None:
    """Broken: an alias moves to a version that answers wrongly on other machines than this one; or one that holds
    something that is still to be validated elsewhere can't be promoted."""
    tiny_bundle.write_onnx(tmp_path / "artifact")

    def version(key: str, verdict: Verdict | None) -> TargetResult:
        lead, other = (
            Variant(
                id=name,
                path=str(tmp_path / "artifact"),
                manifest=plain({
                    **tiny_bundle.manifest_fields(),
                    **tiny_bundle.describe(tmp_path / "artifact"),
                    "job": plain(JOB),
                    "target": {"name": name, "batch_sizes": [1]},
                    "verdict": plain(found),
                    "timing": {},
                    "key": f"sha256:{name}",
                }),
            )
            for name, found in (("lead", PASSED), ("other", verdict))
        )  # fmt: skip
        staged = tmp_path / f"{key}-staged"
        shutil.copytree(tmp_path / "artifact", staged / "artifact")
        given = FamilyVersion(family="x", key=f"sha256:{key}", variants=(lead, other), elsewhere="refuse")
        whole = with_variants(lead.manifest, given, lead.id, staged)
        return publish(key, **{field: whole[field] for field in ("family", "variants")})

    context = run_context(tmp_path)
    assert shipped(context, ours, version("drafted", None)).variant == "lead"
    assert shipped(context, ours, version("proven", PASSED)).variant in ("lead", "other")
    with pytest.raises(GateError, match="its own measurement does not: cosine"):
        shipped(context, ours, version("missed", MISSED))


def test_what_an_alias_points_to_is_compared_with_what_follows_it(
    publish: Publish, ours: SourceModel, tmp_path: Path
) -> None:
    """Broken: a slower version takes an alias, since what it points to was taken for free, for the same files, or for
    older than it is; or one that was measured on another machine counts as compared."""
    context, first = run_context(tmp_path), publish("one", alias="prod")
    assert first.receipt is not None
    second, successor = replace(first.receipt, version="2"), artifact(digest="sha256:new")
    same = artifact(digest=flavor.read_manifest(first.bundle.path)["artifact"]["digest"]) if first.bundle else None
    assert same is not None

    served = flavor.read_manifest(first.bundle.path)["threads"] if first.bundle else 0

    def now(**changed: Any) -> Incumbent:
        given = {"context": context, "source": ours, "receipt": second, "alias": "prod", "successor": successor}
        given["threads"] = served
        return incumbent(**{**given, **changed})

    found = now()
    assert found.artifact is not None
    assert (found.version, found.uri, found.obstacle, found.newer) == ("1", first.receipt.uri, "", "")
    assert now(alias="free") == Incumbent()
    assert now(receipt=first.receipt) == Incumbent(version="1")
    assert now(successor=same).artifact is None
    assert now(successor=replace(same, options={"threads": 2})).artifact is not None
    assert now(successor=same, threads=served + 1).artifact is not None
    older = replace(ours, uri=ours.uri.removesuffix("3") + "2")
    assert now(source=older).newer == f"{first.receipt.uri}, made from {ours.uri}"
    assert now(source=older).artifact is None
    another = replace(context, hardware=replace(HERE, cpu="another"))
    assert "and this machine is" in now(context=another).obstacle
    assert now(context=another).artifact is None

    beside, why = published_now(context, ours, "m-compiled", "prod", successor)
    assert beside is not None
    assert (beside.uri, why) == (first.receipt.uri, "")
    assert published_now(context, ours, "m-compiled", "free", successor) == (None, "")
    assert published_now(context, ours, "m-compiled", "prod", same) == (None, "")
    assert published_now(context, older, "m-compiled", "prod", successor)[1].startswith("'prod' points to ")
    assert "and this machine is" in published_now(another, ours, "m-compiled", "prod", successor)[1]
    (weights,) = (tmp_path / "registry").glob("**/1/model/data/artifact/model.onnx")
    weights.write_bytes(b"x")
    assert "is damaged" in now().obstacle
    shutil.rmtree(weights.parents[2])
    found = now()
    assert (found.artifact, found.obstacle, found.version) == (None, "", "1")
    assert found.gone.endswith("its files are not there (somebody deleted them)")
    shutil.rmtree(weights.parents[3])
    assert "there is no version 1" in now().gone
    assert "there is no version 1" in published_now(context, ours, "m-compiled", "prod", successor)[1]
    (tmp_path / "registry").rename(tmp_path / "unmounted")
    assert now() == Incumbent(), "nothing is read of a disk that is not there, so no alias either"


def test_an_alias_leaves_what_nobody_can_serve_any_more_and_says_so(
    publish: Publish, ours: SourceModel, tmp_path: Path
) -> None:
    """Broken: after a clean-up took away what an alias points to, each run publishes, fails, and tells to compare with
    what is not there; or the alias moves, and nobody learns that nothing was compared."""
    context, first, second = run_context(tmp_path), publish("one", alias="prod"), publish("two")
    assert first.receipt is not None
    assert second.receipt is not None
    shutil.rmtree(Path(first.receipt.uri.removeprefix("folder:")) / "model")
    before = incumbent(context, ours, second.receipt, "prod", artifact(digest="sha256:new"), 1)
    moved = promote(context, ours, second, "prod", before, None)
    now = FolderRegistry().current(second.receipt.name, "prod")
    assert now is not None
    assert (now.uri, moved.promoted_to, moved.previous) == (second.receipt.uri, "prod", "1")
    assert moved.note == (
        f"alias 'prod' moved without a comparison: {first.receipt.uri} can't be served any more: the registry lists "
        "the model, but its files are not there (somebody deleted them)"
    )


def test_batch_sizes_at_which_nothing_was_compared_are_named(
    publish: Publish, ours: SourceModel, tmp_path: Path
) -> None:
    """Broken: a version for batches of 1 takes the place of one for 1 and 8, whose requests of 8 are answered in eight
    calls from then on, and nobody is told."""
    context = run_context(tmp_path)
    first = publish("one", alias="prod", target={"name": "cpu", "device": "cpu", "batch_sizes": [1, 4, 8]})
    second = publish("two")
    assert first.receipt is not None
    assert second.receipt is not None
    before = replace(incumbent(context, ours, second.receipt, "prod", artifact(digest="sha256:new"), 1), artifact=None)
    narrow, alike = (replace(second, policy=target_policy(target(batch_sizes=sizes))) for sizes in ((1,), (8, 4, 1)))
    moved = promote(context, ours, narrow, "prod", before, None)
    assert moved.promoted_to == "prod"
    assert moved.note.startswith(
        f"nothing was compared at batch size 4 and 8, for which {first.receipt.uri} was proven"
    )
    FolderRegistry().promote(first.receipt, "prod")
    assert promote(context, ours, alike, "prod", before, None).note == ""


def test_targets_that_would_be_left_without_an_artifact_are_named() -> None:
    """Broken: an alias moves to a version without what it held for other machines of the family, and these refuse to
    load it."""
    draft, proven = {"verdict": None, "target": {"name": "arm"}}, {"verdict": {}, "target": {"name": "x86"}}
    variants: dict[str, Any] = {
        "x86--a": {"key": "k", "folder": "a", "stored": {}, "manifest": proven},
        "arm--a": {"key": "k", "folder": "a", "stored": {}, "manifest": draft},
    }
    bundle = Bundle(
        path="/nowhere", digest="", key="", target="x86", name="m", tags={}, metrics={}, params={}, summary="",
        manifest={"variants": variants},
    )  # fmt: skip
    family = replace(target_policy(target("x86")), family="cpus")
    result = TargetResult(
        policy=family,
        candidates=(),
        selection=Selection(target="x86", winner=None, reason="", states={}, reasons={}),
        bundle=bundle,
    )
    policy = factories.policy(family, families={"cpus": ("x86", "arm"), "others": ("gpu",)})
    before = Incumbent(proven=("x86", "arm", "gpu"))
    assert lacking(policy, result, before) == ("arm",)
    assert lacking(policy, result, Incumbent(proven=("x86",))) == ()
    assert lacking(policy, replace(result, bundle=replace(bundle, manifest={})), before) == ()
    assert lacking(policy, replace(result, bundle=None), before) == ()
    assert lacking(factories.policy(family), result, before) == ()
