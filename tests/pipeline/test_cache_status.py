"""What a plan says is in the cache."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import factories
import pytest

from compile_stage.pipeline.cache_status import _NotCachedError, _ReadOnly


def test_what_a_run_would_measure_again_is_not_said_to_be_cached(tmp_path: Path) -> None:
    """Broken: a plan promises a run of seconds, and the run measures once more what its first left open."""
    context = factories.run_context(tmp_path)
    context.cached("benchmark/1", "cpu", {}, lambda _: "measured")
    reader = _ReadOnly(**{field.name: getattr(context, field.name) for field in fields(context)})
    assert reader.cached("benchmark/1", "cpu", {}, lambda _: "").value == "measured"
    with pytest.raises(_NotCachedError):
        reader.cached("benchmark/1", "cpu", {}, lambda _: "", anew=True)
