"""A published model runs no shape larger than those that were proven, and none for which its trace is not right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import target
from tiny_bundle import save_bundle

from compile_stage import flavor
from compile_stage.core.errors import UsageError
from compile_stage.core.records import PortableModel, ShapeRange
from compile_stage.core.tensors import Signature
from compile_stage.serving.shape_limits import ShapeLimits, shape_limits
from compile_stage.serving.size_conditions import SizeCondition

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own, where it is imported for the first time


SHAPES = {"ids": ShapeRange(min=(1, 4), typical=(2, 8), max=(8, 40))}


def rows(count: int) -> Any:
    return np.random.default_rng(count).random((count, 4), dtype=np.float32)


def traced_model(**limits: Any) -> PortableModel:
    signature = Signature(inputs=(), outputs=())
    return PortableModel(path="", digest="", form="onnx", opset=18, precision="fp32", signature=signature, **limits)


def test_what_is_longer_than_the_policy_promised_is_refused() -> None:
    """Broken: an answer to a length that nobody proved would be served as if it had been."""
    limits = shape_limits(target(shapes=SHAPES), {"ids": (64, 8), "feats": (64, 3)}, None)
    rule = ShapeLimits.of({**limits, "target": {"shapes": {"ids": {}}}})
    feats = np.zeros((200, 300), np.float32)  # the policy says nothing of it
    rule.demand({"ids": np.zeros((200, 40), np.int64), "feats": feats})  # batch sizes have a rule of their own
    with pytest.raises(UsageError, match="input 'ids' has 41 in dimension 1, and at most 40 was proven") as refused:
        rule.demand({"ids": np.zeros((1, 41), np.int64), "feats": feats})
    assert "max" in refused.value.fix


def test_samples_that_were_longer_count() -> None:
    """Broken: the validation samples themselves would be refused when the published model is checked."""
    assert shape_limits(target(shapes=SHAPES), {"ids": (64, 50)}, None)["largest"] == {"ids": [None, 50]}
    assert shape_limits(target(shapes=SHAPES), {}, None) == {
        "largest": {"ids": [None, 40]},
        "smallest": {},
        "conditions": [],
    }


def test_what_the_trace_is_right_for_is_a_limit_where_the_policy_has_none() -> None:
    """Broken: a network that goes another way for longer or shorter texts would answer these otherwise than the
    original."""
    traced = traced_model(
        largest={"ids": (None, 30), "feats": (None, 10, None)}, smallest={"ids": (None, 4), "feats": (None, 5, None)}
    )
    limits = shape_limits(target(shapes=SHAPES), {"feats": (64, 12, 3)}, traced)
    assert limits["largest"] == {"ids": [None, 40], "feats": [None, 12, None]}
    assert limits["smallest"] == {"ids": [None, 4], "feats": [None, 5, None]}
    assert shape_limits(target(), {"feats": (64, 3, 3)}, traced)["smallest"]["feats"] == [None, 3, None]
    rule = ShapeLimits.of({**limits, "target": {"shapes": {"ids": {}}}})
    for size in (5, 12):
        rule.demand({"feats": np.zeros((1, size, 900))})
    for size, says, fix in ((4, "at least 5: for smaller ones", "send more"), (13, "at most 12: for larger", "less")):
        with pytest.raises(UsageError, match=f"'feats' has {size} in dimension 1.* is right for {says}") as refused:
            rule.demand({"feats": np.zeros((1, size, 3))})
        assert fix in refused.value.fix
        assert "max" not in refused.value.fix  # the trace limits it, and no policy


def test_a_larger_or_smaller_request_is_answered_with_400(tmp_path: Path) -> None:
    """Broken: a client would read `unexpected error`, or an answer that nobody proved."""
    import mlflow
    from mlflow.exceptions import MlflowException

    for name, size, says in (("largest", 2, "right for at most 2"), ("smallest", 6, "right for at least 6")):
        path = save_bundle(tmp_path / name, **{name: {"x": [None, size]}})
        with pytest.raises(MlflowException, match=says) as caught:
            mlflow.pyfunc.load_model(str(path)).predict(rows(1))
        assert caught.value.get_http_status_code() == 400


def test_what_an_earlier_version_published_takes_what_it_took(tmp_path: Path) -> None:
    """Broken: models that are served today would refuse requests after an update of compile-stage."""
    with flavor.load_model(str(save_bundle(tmp_path))) as model:
        assert len(model.run({"x": rows(3)})["y"]) == 3


def test_sizes_that_break_a_condition_of_the_trace_are_refused() -> None:
    """Broken: a network that goes another way for odd lengths answers these as if they were even."""
    condition = 'size("ids", 1) % 2 == 0'
    rule = ShapeLimits.of(
        {"conditions": shape_limits(target(), {}, traced_model(conditions=(condition,)))["conditions"]}
    )
    assert rule.described() == f"`{condition}`"
    rule.demand({"ids": np.zeros((3, 8))})
    rule.demand({"other": np.zeros((3, 7))})
    with pytest.raises(UsageError, match="have 7 in dimension 1 of 'ids', and what was compiled is right where"):
        rule.demand({"ids": np.zeros((3, 7))})


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ('size("a", 1) > size("b", 2)', True),
        ('max(1, size("a", 1) // 4) == 2', True),
        ('4 < size("a", 1) < 9', True),
        ('4 < size("a", 1) < 8', False),
        ('9 < size("a", 1) < 10', False),
        ('min(size("a", 1), size("b", 2)) != 5', False),
        ('(-1)*size("a", 1) <= -9', False),
        ('size("a", 1) % (size("b", 2) // 6) == 0', False),  # divides by 0
    ],
)
def test_conditions_are_computed(text: str, holds: bool) -> None:
    """Broken: what the trace asks of sizes is not what is asked of requests."""
    assert SizeCondition(text).holds({("a", 1): 8, ("b", 2): 5}) is holds


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').getcwd()",
        "size('a', 1)",
        "size(a, 1) > 2",
        "min(3) > 2",
        "9 ** 9 > 1",
        "1 <",
        "True == 1",
        *(form.format("open('x')") for form in ("-{} == 1", "{} + 1 == 2", "1 + {} == 2", "{} == 1", "1 == {}")),
        *(
            form.format("open('x')")
            for form in ("1 < 2 < {}", "min(1, {}) > 2", "size({}, 1) > 2", "size('a', {}) > 2")
        ),
        "~1 == 1",
        "not 1 == 1",
        "min(1, key=2) > 1",
        "size('a', 1, 2) > 1",
        "size('a', 1.0) > 1",
        "1 in 2",
    ],
)
def test_what_is_no_condition_is_never_run(text: str) -> None:
    """Broken: text of a manifest is run as code."""
    with pytest.raises(UsageError, match="is no condition on sizes"):
        SizeCondition(text)
