"""In-toto statements about a published model: what it was made of, and what was measured of it.

Provenance is SLSA's v1 predicate, the verdict in-toto's test result v0.1 with the whole verdict in the field `verdict`.
The subject of each is `data/manifest.json`, which holds the digest of every other file.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.environment import python_version
from compile_stage.serving.signatures import PROVENANCE_PREDICATE, STATEMENT_TYPE, TEST_PREDICATE, subject_of

BUILD_TYPE = "urn:compile-stage:compilation:v1"
BUILDER_ID = "urn:compile-stage"
TREE = "compileStageTree"
"""Name of our digest of a folder in a digest set: SHA-256 over the names and SHA-256 of its files
(`core.digest.digest_tree`). `sha256` alone would be that of one file's bytes."""
VALUES = "compileStageValues"
"""Name of our digest of resolved values: SHA-256 of their canonical JSON."""


def provenance(manifest: Mapping[str, Any], model_dir: Path, policy_files: Sequence[str]) -> dict[str, Any]:
    """What a bundle was made of, and when it was finished.

    Args:
        policy_files: Of the policy, the last being its own; the git commit is that of its folder.
    """
    source, policy, artifact = manifest["source"], manifest["policy"], manifest["artifact"]
    materials = [
        {"name": "source", "uri": source["uri"], "digest": _set(TREE, source["digest"])},
        {"name": "policy", "digest": {**_set(VALUES, policy["digest"]), **_commit(policy_files)}},
    ]
    for role, samples in sorted(manifest["data"]["samples"].items()):
        described = {"count": samples["count"], "real": samples["real"]}
        materials.append(
            {"name": f"samples/{role}", "digest": _set(VALUES, samples["digest"]), "annotations": described}
        )
    materials += [
        {"name": f"toolchain/{name}", "uri": f"pkg:pypi/{name}@{version}"}
        for name, version in sorted(manifest["toolchain"].items())
    ]
    made_by = plugins.cache_identity("backends", artifact["backend"])
    definition = {
        "buildType": BUILD_TYPE,
        "externalParameters": {
            "model": source["uri"],
            "policy": policy["name"],
            "target": manifest["target"]["name"],
            "job": manifest["job"]["id"],
        },
        "internalParameters": {
            "scheme": manifest["scheme"],
            "hardware": manifest["hardware"],
            "fingerprint": manifest["fingerprint"],
            "plugin": dict(made_by),
        },
        "resolvedDependencies": materials,
    }
    versions = {**plugins.package_versions("compile-stage", "mlflow", "onnx", "numpy"), "python": python_version()}
    run = {
        "builder": {"id": BUILDER_ID, "version": versions},
        "metadata": {"invocationId": manifest["key"], "finishedOn": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")},
    }
    return _statement(model_dir, PROVENANCE_PREDICATE, {"buildDefinition": definition, "runDetails": run})


def verdict(manifest: Mapping[str, Any], model_dir: Path) -> dict[str, Any]:
    """What was measured of a bundle, with every check. Of one that could not be validated where it was compiled, the
    result is WARNED, and there are no tests."""
    return _statement(
        model_dir, TEST_PREDICATE, {**_tests(manifest, manifest["verdict"]), "verdict": manifest["verdict"]}
    )


def validation(document: Mapping[str, Any], manifest: Mapping[str, Any], model_dir: Path) -> dict[str, Any]:
    """What a machine found of a published model (`serving.manifest.plain_validation`)."""
    return _statement(
        model_dir, TEST_PREDICATE, {**_tests(manifest, document["verdict"]), "validation": dict(document)}
    )


def _tests(manifest: Mapping[str, Any], recorded: Mapping[str, Any] | None) -> dict[str, Any]:
    checks = recorded["checks"] if recorded is not None else []
    passed = [_name(check) for check in checks if check["outcome"] == "pass"]
    failed = [_name(check) for check in checks if check["outcome"] != "pass"]
    waived = all(check["waived"] is not None for check in checks if check["outcome"] != "pass")
    result = "WARNED" if not checks or (failed and waived) else "FAILED" if failed else "PASSED"
    policy = manifest["policy"]
    return {
        "result": result,
        "configuration": [{"name": f"policy {policy['name']}", "digest": _set(VALUES, policy["digest"])}],
        "passedTests": passed,
        "failedTests": failed,
    }


def _name(check: Mapping[str, Any]) -> str:
    parts = (
        check["gate"]["metric"],
        check["output"] or "",
        f"batch_{check['batch_size']}" if check["batch_size"] else "",
    )
    return ".".join(part for part in parts if part)


def _statement(model_dir: Path, predicate_type: str, predicate: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "_type": STATEMENT_TYPE,
        "subject": subject_of(model_dir),
        "predicateType": predicate_type,
        "predicate": dict(predicate),
    }


def _set(name: str, digest: str) -> dict[str, str]:
    return {name: digest.removeprefix("sha256:")}


def _commit(policy_files: Sequence[str]) -> dict[str, str]:
    """The commit that the policy's folder is at, where the file is as committed: a changed one has none."""
    file = Path(policy_files[-1]) if policy_files else Path()
    if not file.is_file():
        return {}
    folder = file.absolute().parent
    if _git(folder, "status", "--porcelain", "--", file.name) != "":
        return {}
    commit = _git(folder, "rev-parse", "HEAD")
    return {"gitCommit": commit} if commit else {}


def _git(folder: Path, *arguments: str) -> str | None:
    """What git answers; None where there is no git, or no repository."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed words and a file's own name
            ["git", "-C", str(folder), *arguments],  # noqa: S607 - the user's own git
            capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
