"""A little of each campaign of `benchmarks/faults.py`; kills are in `test_kill.py`."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script of benchmarks/ or of this folder, which are no packages."""
    for folder in (Path(__file__).parents[2] / "benchmarks", Path(__file__).parent):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here
def test_a_run_ends_well_though_a_fifth_of_the_requests_fails(
    script: Callable[[str], ModuleType],
    copy_database: Callable[[Path, str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broken: a proxy that cuts one answer of twenty off would end most runs with 4, or leave runs RUNNING."""
    copy_database(tmp_path, "mlflow-artifacts:/0")
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    assert script("faults").network(1, seed=1, root=tmp_path) == {"ended with 0, new": 1}


def test_a_damaged_cache_entry_is_made_anew(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """Broken: one character edited in an entry would turn a failed check into a passed one."""
    fuzz, chance = script("fuzz"), random.Random(0)
    assert [fuzz.fuzz_cache(tmp_path, chance) for _ in range(150)] == [""] * 150
