"""One random kill of the stage in every run of the suite; `kill_and_resume.py` does the full count, of the server too
(whose death during a push `tests/registry/test_mlflow.py` has)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from integration import kill_and_resume

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here
def test_after_a_kill_the_registry_shows_old_or_new_and_a_rerun_finishes(
    copy_database: Callable[[Path, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a crash would leave half a publication, workers that run for ever, or its temporary folders."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    copy_database(tmp_path, "mlflow-artifacts:/0")  # making its tables would take the server seconds
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for seen in kill_and_resume.go(moments=1, victims=("stage",), seed=7, root=tmp_path, longest=8.0).values():
        assert seen["old"] + seen["published"] + seen["new"] == 1
    assert not list(temporary.glob("compile-stage-*")), "the rerun deletes what the killed run left"
    assert not list(tmp_path.rglob(".part-*"))
