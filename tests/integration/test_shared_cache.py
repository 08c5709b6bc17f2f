"""Two users with a disk each and one S3 cache between them, through the command line; and who writes to the bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3, s3_server
from signing_keys import make_key

from compile_stage.core.shared_store import open_store

BODY = """\
performance: {min_speedup: null}
budget: {measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3_server() as started:
        yield started


@pytest.fixture
def user(
    server: S3, small_model: Path, write_policy: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Runs the command line as somebody with an empty disk; returns result.json."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", BODY)
    url = f"s3://{server.bucket()}/team"
    for name, value in {**server.environment, "COMPILE_STAGE_SHARED_CACHE": url}.items():
        monkeypatch.setenv(name, value)

    def run(name: str, *options: str, **environment: str) -> dict[str, Any]:
        own = {"COMPILE_STAGE_CACHE": str(tmp_path / name), "COMPILE_STAGE_MACHINE_ID": name}
        command = ["run", f"folder:{small_model}", "-p", str(policy), "--no-publish", "--json", *options]
        done = subprocess.run(
            [sys.executable, "-m", "compile_stage", *command, "--out", str(tmp_path / f"out-{name}")],
            capture_output=True, text=True, check=False, env={**os.environ, **own, **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        result["stderr"] = done.stderr
        return result

    return run


def from_the_cache(result: dict[str, Any]) -> dict[str, bool]:
    return {event["step"]: event["cached"] for event in result["events"]}


def proven(result: dict[str, Any]) -> Any:
    """What was decided, without what was measured."""
    (target,) = result["targets"]
    (candidate,) = target["candidates"]
    return candidate["artifact_digest"], candidate["verdict"]["checks"]


@pytest.mark.slow
def test_the_second_user_compiles_nothing_and_a_poisoned_bucket_changes_nothing(
    user: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Broken: a team compiles again what it has, believes another machine's times, or publishes what a stranger put
    into its bucket."""
    key, public = make_key(tmp_path, "ci")
    first = user("first", "--signing-key", str(key))
    assert not any(from_the_cache(first).values())

    second = user("second", COMPILE_STAGE_TRUST=str(public), COMPILE_STAGE_SHARED_CACHE_MODE="read")
    made = {step for step, cached in from_the_cache(second).items() if not cached}
    assert {"inspect", "export", "sample", "reference", "compile", "validate"}.isdisjoint(made)
    assert "benchmark" in made, "times are of this machine"
    assert proven(second) == proven(first)
    assert any("taken" in note for note in second["notes"])

    store = open_store(os.environ["COMPILE_STAGE_SHARED_CACHE"])
    objects = [found.path for found in store.list()]
    assert {path.split("/")[2] for path in objects} >= {"export", "sample", "reference", "compile", "validate"}
    for number, path in enumerate(objects):
        content = store.read(path, 0, 10**7)
        at = (len(content) * (number + 1)) // (len(objects) + 1)
        (tmp_path / "poisoned").write_bytes(content[:at] + bytes([content[at] ^ 2]) + content[at + 1 :])
        store.write(tmp_path / "poisoned", path, replace=True)
    third = user("third", COMPILE_STAGE_TRUST=str(public))
    assert {step for step, cached in from_the_cache(third).items() if cached} == set()
    assert "was refused, and is made anew" in third["stderr"]
    assert any(f"{len(objects)} refused" in n or f"{len(objects) - 1} refused" in n for n in third["notes"])
    assert proven(third) == proven(first)
