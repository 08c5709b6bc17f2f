"""`compile-stage demo`, before it trains anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_stage import demo
from compile_stage.core.errors import MissingDependencyError


def test_what_is_missing_is_said_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the demo trained for minutes and then found that skops was not installed."""
    monkeypatch.setattr(demo, "NEEDS", ("json", "skops_is_missing", "torch_is_missing"))
    monkeypatch.setattr(demo, "_train_all", lambda *_: pytest.fail("it trains"))
    with pytest.raises(MissingDependencyError) as error:
        demo.demo(tmp_path / "out")
    assert error.value.problem == "the demo needs skops_is_missing, torch_is_missing, which are not installed"
    assert error.value.fix == 'pip install "compile-stage[demo]"'
    assert not (tmp_path / "out").exists()
