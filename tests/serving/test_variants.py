"""Which of a version's artifacts a machine loads."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import factories
import numpy as np
import pytest
import tiny_bundle

from compile_stage import flavor
from compile_stage.core.digest import plain
from compile_stage.core.environment import Hardware, hardware
from compile_stage.core.errors import IntegrityError, UsageError
from compile_stage.core.records import Outcome, Target, Variant, Verdict, Waiver
from compile_stage.serving.manifest import passed_here, plain_validation, refuse_machine, sealed, write_validation
from compile_stage.serving.variant_writing import FamilyVersion, with_variants
from compile_stage.serving.variants import choose, for_machine, proven_targets
from compile_stage.serving.version_tags import check_tags, waivers_of

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own, where it is imported for the first time

HERE = hardware()
GPU = replace(HERE, accelerators=("NVIDIA H200 (driver 580.1)",))


def entry(folder: Path, name: str, latency_s: float, machine: Hardware = HERE, **changes: Any) -> Variant:
    fields = {
        **tiny_bundle.manifest_fields(),
        **tiny_bundle.describe(folder / "artifact"),
        "hardware": machine,
        "fingerprint": machine.fingerprint,
        "key": f"sha256:{name}",
        "target": Target(name=name, **changes.pop("target", {})),
        "timing": {"1": {"p50_s": latency_s}},
        **changes,
    }
    manifest = plain(fields)
    return Variant(
        id=name,
        manifest={**manifest, "artifact": {**manifest["artifact"], "path": "artifact"}},
        path=str(folder / "artifact"),
    )


@pytest.fixture
def family(tmp_path: Path) -> Any:
    """Writes a version with these variants, the first as its lead; all have the same files."""

    def save(*variants: Variant, elsewhere: str = "refuse") -> Path:
        staged = tmp_path / "staged"
        shutil.copytree(tmp_path / "artifact", staged / "artifact")
        lead = variants[0]
        given = FamilyVersion(family="x", key="sha256:f", variants=variants, elsewhere=elsewhere)
        manifest = with_variants(lead.manifest, given, lead.id, staged)
        flavor.save_model(staged, tmp_path / "model", manifest=manifest)
        return tmp_path / "model"

    tiny_bundle.write_onnx(tmp_path / "artifact")
    return save


def test_the_fastest_that_is_proven_here_is_loaded_and_says_why(family: Any, tmp_path: Path) -> None:
    """Broken: a machine would load a slower artifact than it may, or one that is proven for another machine."""
    other = replace(HERE, features=("sse4_2",))
    model_dir = family(
        entry(tmp_path, "slow", 2e-3),
        entry(tmp_path, "fast", 1e-3, replace(HERE, cpu="of the same kind", cores=HERE.cores + 3)),
        entry(tmp_path, "elsewhere", 1e-4, other),
        entry(tmp_path, "not-meant", 1e-4, target={"hardware": {"without": " ".join(HERE.features)}}),
        entry(tmp_path, "old", 1e-4, runtime={"onnxruntime": "1.2.3"}),
    )
    assert not (model_dir / "data" / "variants").exists()  # one graph, stored once
    with flavor.load_model(str(model_dir)) as model:
        assert model.variant == "fast"
        assert model.variant_reason.startswith("the fastest of 2 that are proven here: proven on ")
        assert "median 1 ms at batch 1" in model.variant_reason
        for passed_over in ("elsewhere (features: sse4_2 there", "not-meant (the target wants a machine without"):
            assert passed_over in model.variant_reason
        assert f"old (onnxruntime: 1.2.3 there, {version('onnxruntime')} here)" in model.variant_reason
        answer = model.run({"x": np.ones((2, 4), np.float32)})["y"]
        np.testing.assert_allclose(answer, np.ones((2, 4), np.float32) @ tiny_bundle.WEIGHTS)
        folder = Path(model._data.parent)
    assert sorted(path.name for path in (folder / "data").iterdir()) == ["artifact", "manifest.json"]
    with flavor.load_model(str(model_dir), variant="slow") as model:
        assert (model.variant, model.variant_reason) == ("slow", "it was asked for by name")
    with pytest.raises(IntegrityError, match="the variant elsewhere is not proven for this machine"):
        flavor.load_model(str(model_dir), variant="elsewhere")


def test_a_gpus_driver_counts_for_the_gpus_variant_alone(family: Any, tmp_path: Path) -> None:
    """Broken: a new driver would take the CPU's artifact away, or leave the GPU's its proof."""
    gpu = entry(tmp_path, "gpu", 1e-4, GPU, target={"device": "cuda"})
    model_dir = family(entry(tmp_path, "cpu", 1e-3), gpu)
    whole = flavor.read_manifest(model_dir)
    updated = replace(GPU, accelerators=("NVIDIA H200 (driver 590.2)",))
    assert choose(whole, model_dir, machine=GPU).manifest["variant"] == "gpu"
    assert choose(whole, model_dir, machine=updated).manifest["variant"] == "cpu"


def test_a_validation_of_this_machine_proves_its_variant_and_no_other(family: Any, tmp_path: Path) -> None:
    """Broken: what failed here would be loaded, or what passed here would be refused; one artifact's proof would be
    taken for another's."""
    model_dir = family(entry(tmp_path, "lead", 1e-3), entry(tmp_path, "draft", 1e-4, verdict=None))
    whole = flavor.read_manifest(model_dir)

    def attach(variant: str, *, passed: bool, p50_s: float) -> None:
        found = {
            "key": f"sha256:{variant}",
            "variant": variant,
            "artifact": whole["artifact"]["digest"],
            "hardware": plain(HERE),
            "fingerprint": HERE.fingerprint,
            "passed": passed,
            "timing": {"1": {"p50_s": p50_s}},
            "runtime": {},
        }
        write_validation(plain_validation(found), model_dir / "validations")

    def loaded() -> str:
        return str(choose(whole, model_dir).manifest["variant"])

    assert loaded() == "lead"
    attach("draft", passed=True, p50_s=1e-4)
    assert loaded() == "draft"
    attach("draft", passed=True, p50_s=1e-2)  # slower here than the lead
    assert loaded() == "lead"
    attach("lead", passed=False, p50_s=1e-3)
    assert loaded() == "draft"
    attach("draft", passed=False, p50_s=1e-4)
    with pytest.raises(IntegrityError, match="its validation on this machine failed"):
        choose(whole, model_dir)
    attach("draft", passed=True, p50_s=1e-4)
    (file,) = model_dir.glob("validations/*--draft.json")
    said = json.loads(file.read_text())
    of_another_policy = {name: value for name, value in said.items() if name != "digest"} | {"key": "sha256:other"}
    write_validation(of_another_policy, file.parent)
    with pytest.raises(IntegrityError, match="not validated on this machine"):
        choose(whole, model_dir)
    attach("draft", passed=True, p50_s=1e-4)
    file.rename(file.with_name(f"{HERE.fingerprint}.json"))
    with pytest.raises(IntegrityError, match="not validated on this machine"):
        choose(whole, model_dir)


@pytest.mark.parametrize("passed", [True, False])
def test_a_trial_of_another_runtime_takes_nothing_from_what_its_run_proved(tmp_path: Path, passed: bool) -> None:
    """Broken: who validates a version with the runtime's next release, on a machine of the kind that serves it, takes
    the version from every server that still has the release it was published with."""
    model_dir = tiny_bundle.save_bundle(tmp_path, **tiny_bundle.manifest_fields())
    manifest = flavor.read_manifest(model_dir)
    found = {
        "key": "sha256:1", "artifact": manifest["artifact"]["digest"], "hardware": plain(HERE),
        "fingerprint": HERE.fingerprint, "passed": passed, "runtime": {"onnxruntime": "1.2.3"},
    }  # fmt: skip
    write_validation(plain_validation(found), model_dir / "validations")
    assert refuse_machine(manifest, model_dir) is None
    assert passed_here(manifest, model_dir, None, HERE) is None
    flavor.load_model(str(model_dir)).close()
    elsewhere = {**manifest, "runtime": {"onnxruntime": "4.5.6"}}
    assert "onnxruntime: 1.2.3 there" in str(refuse_machine(elsewhere, model_dir)), "then it says what was found last"
    write_validation(plain_validation({**found, "runtime": manifest["runtime"]}), model_dir / "validations")
    refused = refuse_machine(manifest, model_dir)
    assert refused == (None if passed else "its validation on this machine failed"), "with the same runtime it counts"


@pytest.mark.parametrize("place", ["../../code/compile_stage/__init__.py", "/etc/hostname", "artifact/absent.onnx"])
def test_no_file_is_put_together_from_outside_of_the_listed_ones(family: Any, tmp_path: Path, place: str) -> None:
    """Broken: a manifest could have a file loaded that no digest covers."""
    model_dir = family(entry(tmp_path, "lead", 1e-3), entry(tmp_path, "second", 1e-4))
    file = model_dir / "data" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["variants"]["second"]["stored"]["model.onnx"] = place
    file.write_text(json.dumps(sealed(manifest)))
    with pytest.raises(IntegrityError, match=r"a file outside of the model|is missing"):
        flavor.check_integrity(model_dir)


def test_a_waiver_of_any_variant_is_the_versions(family: Any, tmp_path: Path) -> None:
    """Broken: a version would be called passed, though what some machines load passed under a waiver."""
    waiver = Waiver(gate="cosine", target="second", reason="new sensor", owner="me", expires="2027-01-31")
    (check,) = factories.verdict().checks
    missed = Verdict(checks=(replace(check, outcome=Outcome.FAIL, waived=waiver),))
    model_dir = family(entry(tmp_path, "lead", 1e-3), entry(tmp_path, "second", 1e-3, verdict=missed))
    whole = flavor.read_manifest(model_dir)
    assert waivers_of(whole) == (waiver,)
    check_tags(whole, {"compile_stage.verdict": "passed under waivers", "compile_stage.variants": "lead, second"}, "m")
    with pytest.raises(IntegrityError, match=r"the tag compile_stage.verdict says 'passed'"):
        check_tags(whole, {"compile_stage.verdict": "passed"}, "m")


ELSEWHERE = replace(HERE, features=("sse4_2",))


def test_targets_are_proven_by_their_run_or_by_a_validation_that_passed(family: Any, tmp_path: Path) -> None:
    """Broken: an alias moves to a version that is proven for fewer machines than the one that it pointed to."""
    model_dir = family(
        entry(tmp_path, "lead", 1e-3), entry(tmp_path, "draft", 1e-4, verdict=None), entry(tmp_path, "portable", 1e-4)
    )
    whole = flavor.read_manifest(model_dir)
    assert proven_targets(whole, model_dir) == ("lead",)
    for passed, proven in ((False, ("lead",)), (True, ("draft", "lead"))):
        found = {
            "key": "sha256:draft", "variant": "draft", "artifact": whole["artifact"]["digest"],
            "hardware": plain(HERE), "fingerprint": HERE.fingerprint, "passed": passed, "timing": {}, "runtime": {},
        }  # fmt: skip
        write_validation(plain_validation(found), model_dir / "validations")
        assert proven_targets(whole, model_dir) == proven
    alone = tiny_bundle.save_bundle(tmp_path / "alone", **tiny_bundle.manifest_fields())
    single = flavor.read_manifest(alone)
    assert proven_targets(single, alone) == ("cpu",)
    assert for_machine(single, alone, ELSEWHERE) is single


def test_where_none_is_proven_only_who_says_so_gets_one_and_is_given_the_doubt(family: Any, tmp_path: Path) -> None:
    """Broken: a machine loads what was never proven for its kind without a word; or, where that is wanted, one that is
    slower, or that is meant for another kind of machine."""
    model_dir = family(
        entry(tmp_path, "slow", 2e-3, ELSEWHERE),
        entry(tmp_path, "fast", 1e-3, ELSEWHERE),
        entry(tmp_path, "not-meant", 1e-4, ELSEWHERE, target={"hardware": {"without": " ".join(HERE.features)}}),
    )
    whole = flavor.read_manifest(model_dir)
    with pytest.raises(IntegrityError, match="none of its variants is proven for this machine"):
        choose(whole, model_dir, machine=HERE)
    for mode in ("warn", "ignore"):
        chosen = choose(whole, model_dir, mode=mode, machine=HERE)
        assert chosen.manifest["variant"] == "fast"
        assert "none of its variants is proven for this machine" in chosen.doubt
    named = choose(whole, model_dir, mode="warn", wanted="slow", machine=HERE)
    assert (named.manifest["variant"], bool(named.doubt)) == ("slow", True)
    assert choose(whole, model_dir, wanted="slow", machine=ELSEWHERE).doubt == ""
    with pytest.raises(UsageError, match="there are: fast, not-meant, slow"):
        choose(whole, model_dir, wanted="other", machine=HERE)
    assert for_machine(whole, model_dir, HERE)["variant"] == "slow", "the lead, where none is loaded"


def test_the_portable_variant_is_for_machines_that_none_is_proven_for(family: Any, tmp_path: Path) -> None:
    """Broken: a machine that an artifact is proven for loads the portable one, which is slower; or one that none is
    proven for loads nothing, against the policy."""
    variants = (entry(tmp_path, "lead", 1e-3, ELSEWHERE), entry(tmp_path, "portable", 1e-5))
    model_dir = family(*variants, elsewhere="portable-fp32")
    whole = flavor.read_manifest(model_dir)
    chosen = choose(whole, model_dir, machine=HERE)
    assert chosen.manifest["variant"] == "portable"
    assert "the policy says portable-fp32" in chosen.reason
    assert "none of its variants is proven" in chosen.doubt
    there = choose(whole, model_dir, machine=ELSEWHERE)
    assert (there.manifest["variant"], there.doubt) == ("lead", "")
    assert there.reason.startswith("the only one proven here: proven on this machine, median 1 ms")
    alike = choose(whole, model_dir, machine=replace(ELSEWHERE, cpu="another of its kind"))
    assert f"proven on {ELSEWHERE.fingerprint}, which has the same instruction sets" in alike.reason


def test_without_the_policys_word_the_portable_variant_is_not_loaded(family: Any, tmp_path: Path) -> None:
    """Broken: `elsewhere: refuse` serves what nobody measured."""
    model_dir = family(entry(tmp_path, "lead", 1e-3, ELSEWHERE), entry(tmp_path, "portable", 1e-5))
    with pytest.raises(IntegrityError, match="none of its variants is proven"):
        choose(flavor.read_manifest(model_dir), model_dir, machine=HERE)
