"""One random kill of the stage in every run of the suite; `kill_and_resume.py` does the full count, of the server too (whose death during a push
`tests/registry/test_mlflow.py` has)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _script() -> ModuleType:
    path = Path(__file__).with_name("kill_and_resume.py")
    spec = importlib.util.spec_from_file_location("kill_and_resume", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kill_and_resume"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here
def test_after_a_kill_the_registry_shows_old_or_new_and_a_rerun_finishes(
    copy_database: Callable[[Path, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a crash would leave half a publication, or workers that run for ever."""
    copy_database(tmp_path, "mlflow-artifacts:/0")  # making its tables would take the server seconds
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for seen in _script().go(moments=1, victims=("stage",), seed=7, root=tmp_path, longest=8.0).values():
        assert seen["old"] + seen["published"] + seen["new"] == 1
