"""What is said of a bundle in other tools' formats: a CycloneDX bill of materials, SLSA provenance, a test result."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import factories
import pytest
from tiny_bundle import save_bundle

from compile_stage.core.digest import plain
from compile_stage.core.records import Check, Outcome, SampleSet, Verdict, Waiver
from compile_stage.flavor import read_manifest
from compile_stage.signing.mlbom import mlbom
from compile_stage.signing.statements import provenance, verdict

pytestmark = [  # MLflow's own
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),
]


def fields(**changes: Any) -> dict[str, Any]:
    """What a run's manifest has beside what loading needs."""
    job = factories.job()
    samples = SampleSet(path="", digest="sha256:ab", count=64, real=True, source="file:val.npz")
    return {
        "key": "sha256:1",
        "source": {"uri": "models:/m/1", "digest": "sha256:cd", "name": "m", "version": "1", "flavor": "onnx"},
        "policy": {"name": "p", "digest": "sha256:ef", "owner": "me"},
        "data": {"samples": {"validation": plain(samples)}, "spec": {}},
        "toolchain": {"onnxruntime": "1.31.1", "torch": "2.13.0+cpu"},
        "job": plain(job),
        "scheme": plain(job.scheme),
        "verdict": plain(factories.verdict()),
        "python": "3.11.7",
        **changes,
    }


@pytest.mark.parametrize("recorded", [plain(factories.verdict()), None])
def test_the_bill_of_materials_is_valid_cyclonedx(tmp_path: Path, recorded: dict[str, Any] | None) -> None:
    """Broken: inventories and scanners would refuse it, or find neither the model nor its packages in it."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    path = save_bundle(tmp_path, **fields(verdict=recorded))
    manifest = read_manifest(path)
    text = mlbom(manifest, "m-compiled", path / "data")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert text == mlbom(manifest, "m-compiled", path / "data")  # the same publication has the same bytes
    document = json.loads(text)
    model = document["metadata"]["component"]
    assert (model["type"], model["name"]) == ("machine-learning-model", "m-compiled")
    assert [file["name"] for file in model["components"]] == ["data/artifact/model.onnx"]
    purls = {part.get("purl") for part in document["components"]}
    # The runtime is the one that the artifact was proven with, which is installed here.
    assert {f"pkg:pypi/onnxruntime@{version('onnxruntime')}", "pkg:pypi/torch@2.13.0%2Bcpu"} <= purls
    measured = model["modelCard"].get("quantitativeAnalysis", {}).get("performanceMetrics", [])
    assert [one["type"] for one in measured] == (["cosine"] if recorded is not None else [])


def test_provenance_names_every_material(tmp_path: Path) -> None:
    """Broken: what a model was made of could not be traced, or the policy's commit would be claimed for a changed
    file."""
    path = save_bundle(tmp_path, **fields())
    policy = tmp_path / "repository" / "policy.yaml"
    policy.parent.mkdir()
    policy.write_text("name: p\n")
    git = ["git", "-C", str(policy.parent), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "policy"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()

    def statement() -> dict[str, Any]:
        return provenance(read_manifest(path), path, ("shipped", str(policy)))

    said = statement()
    assert said["predicateType"] == "https://slsa.dev/provenance/v1"
    assert [subject["name"] for subject in said["subject"]] == ["data/manifest.json"]
    definition = said["predicate"]["buildDefinition"]
    materials = {one["name"]: one for one in definition["resolvedDependencies"]}
    assert materials["source"]["digest"] == {"compileStageTree": "cd"}
    assert materials["policy"]["digest"] == {"compileStageValues": "ef", "gitCommit": commit}
    assert materials["samples/validation"]["annotations"] == {"count": 64, "real": True}
    assert materials["toolchain/onnxruntime"]["uri"] == "pkg:pypi/onnxruntime@1.31.1"
    assert definition["internalParameters"]["fingerprint"]
    policy.write_text("name: changed\n")
    changed = {one["name"]: one for one in statement()["predicate"]["buildDefinition"]["resolvedDependencies"]}
    assert changed["policy"]["digest"] == {"compileStageValues": "ef"}


def test_the_verdict_is_a_test_result(tmp_path: Path) -> None:
    """Broken: a gate that was waived, or never looked at, would read as passed to whoever reads test results."""
    waiver = Waiver(gate="cosine", target="cpu", reason="known", owner="me", expires="2999-01-01")
    missed = Check(gate=factories.COSINE, outcome=Outcome.FAIL, measured=0.9, reason="", output="y", batch_size=1)
    waived = plain(Verdict(checks=(replace(missed, waived=waiver),)))
    cases = {
        "PASSED": (plain(factories.verdict()), ["cosine"], []),
        "WARNED": (waived, [], ["cosine.y.batch_1"]),
        "FAILED": (plain(Verdict(checks=(missed,))), [], ["cosine.y.batch_1"]),
    }
    for number, (result, (recorded, passed, failed)) in enumerate(cases.items()):
        path = save_bundle(tmp_path, f"model-{number}", **fields(verdict=recorded))
        predicate = verdict(read_manifest(path), path)["predicate"]
        assert (predicate["result"], predicate["passedTests"], predicate["failedTests"]) == (result, passed, failed)
        assert predicate["verdict"] == read_manifest(path)["verdict"]
