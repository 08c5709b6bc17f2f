"""Where a runner keeps files between builds, reports of an earlier build are never taken for this one's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines import test_azure, test_github, test_gitlab, test_jenkins

REPORTS = ("result.json", "report.html", "report.md", "junit.xml")


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: test_azure.run_script(folder, modelUri="models:/m/1", policy="p.yaml", arguments="--nope"),
        lambda folder: test_github.run_script(
            folder, "run.sh", MODEL_URI="models:/m/1", POLICY="p.yaml", OUT="compile-stage-out", ARGS="--nope"
        )[0],
        lambda folder: test_gitlab.run_script(folder, **{"model-uri": "models:/m/1", "args": "--nope"}),
        lambda folder: test_jenkins.run_script(folder, MODEL_URI="models:/m/1", POLICY="p.yaml", ARGUMENTS="--nope"),
    ],
    ids=["azure", "github", "gitlab", "jenkins"],
)
def test_a_call_that_writes_no_report_leaves_none_of_an_earlier_one(
    tmp_path: Path, call: Callable[[Path], Any]
) -> None:
    """Broken: an option that the command line does not know ends the step before anything is written, and the build
    shows the passed report of the build before."""
    out = tmp_path / "compile-stage-out"
    out.mkdir()
    for name in REPORTS:
        (out / name).write_text("of an earlier build", encoding="utf-8")
    done = call(tmp_path)
    assert done.returncode == 2, done.stderr
    assert "--nope" in done.stderr
    assert [name for name in REPORTS if (out / name).exists()] == []
