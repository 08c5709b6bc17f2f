"""Metrics whose library is not there are refused by the plan, with the command that brings it."""

from __future__ import annotations

import pytest

from compile_stage.core.metric_packages import PACKAGES, missing_package
from compile_stage.core.records import Gate


@pytest.mark.parametrize("metric", PACKAGES)
def test_a_missing_library_is_named_with_its_command(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a run would compile for an hour and then find that nothing can be judged."""
    gate = Gate(metric=metric, limit=0.01, direction="at_most")

    monkeypatch.setattr("compile_stage.core.metric_packages.find_spec", lambda name: None)
    assert missing_package([gate]) == (
        f'{metric} needs {PACKAGES[metric]}, which is not installed: pip install "compile-stage[metrics]"'
    )
    assert missing_package([Gate(metric="accuracy", limit=0.01, direction="at_most")]) is None
