"""A published model runs no shape larger than those that were proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import target
from tiny_bundle import save_bundle

from compile_stage import flavor
from compile_stage.core.errors import UsageError
from compile_stage.core.records import ShapeRange
from compile_stage.serving.largest import LargestShapes, largest_shapes

SHAPES = {"ids": ShapeRange(min=(1, 4), typical=(2, 8), max=(8, 40))}


def rows(count: int) -> Any:
    return np.random.default_rng(count).random((count, 4), dtype=np.float32)


def test_what_is_longer_than_the_policy_promised_is_refused() -> None:
    """Broken: an answer to a length that nobody proved would be served as if it had been."""
    rule = LargestShapes(largest_shapes(target(shapes=SHAPES), {"ids": (64, 8), "feats": (64, 3)}, {}))
    feats = np.zeros((200, 300), np.float32)  # the policy says nothing of it
    rule.demand({"ids": np.zeros((200, 40), np.int64), "feats": feats})  # batch sizes have a rule of their own
    with pytest.raises(UsageError, match="input 'ids' has 41 in dimension 1, and at most 40 was proven") as refused:
        rule.demand({"ids": np.zeros((1, 41), np.int64), "feats": feats})
    assert "max" in refused.value.fix


def test_samples_that_were_longer_count() -> None:
    """Broken: the validation samples themselves would be refused when the published model is checked."""
    assert largest_shapes(target(shapes=SHAPES), {"ids": (64, 50)}, {}) == {"ids": [None, 50]}
    assert largest_shapes(target(shapes=SHAPES), {}, {}) == {"ids": [None, 40]}


def test_what_the_trace_is_right_for_is_a_limit_where_the_policy_has_none() -> None:
    """Broken: a network that goes another way for longer texts would answer these otherwise than the original."""
    traced = {"ids": (None, 30), "feats": (None, 10, None)}
    found = largest_shapes(target(shapes=SHAPES), {"feats": (64, 12, 3)}, traced)
    assert found == {"ids": [None, 40], "feats": [None, 12, None]}


def test_a_larger_request_is_answered_with_400(tmp_path: Path) -> None:
    """Broken: a client would read `unexpected error`, or an answer that nobody proved."""
    import mlflow
    from mlflow.exceptions import MlflowException

    path = save_bundle(tmp_path, largest={"x": [None, 2]})
    with pytest.raises(MlflowException, match="at most 2 was proven") as caught:
        mlflow.pyfunc.load_model(str(path)).predict(rows(1))
    assert caught.value.get_http_status_code() == 400


def test_what_an_earlier_version_published_takes_what_it_took(tmp_path: Path) -> None:
    """Broken: models that are served today would refuse requests after an update of compile-stage."""
    with flavor.load_model(str(save_bundle(tmp_path))) as model:
        assert len(model.run({"x": rows(3)})["y"]) == 3
