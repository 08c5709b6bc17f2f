"""Fixed shapes and what goes through them: every size that fits gives what it would give by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_stage.core.errors import UsageError
from compile_stage.core.records import ShapeRange, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.buckets import LIMIT, Router, bucket_name, buckets, padding_note, refuse_buckets

SIGNATURE = Signature(
    inputs=(
        TensorSpec(name="ids", dtype="int64", shape=("batch", "sequence")),
        TensorSpec(name="mask", dtype="int64", shape=("batch", "sequence")),
        TensorSpec(name="image", dtype="float32", shape=("batch", 3, 4)),
    ),
    outputs=(
        TensorSpec(name="pooled", dtype="float64", shape=("batch",)),
        TensorSpec(name="each", dtype="float64", shape=("batch", "sequence")),
    ),
)


def target(sizes: tuple[int, ...] = (1, 4), low: int = 2, typical: int = 5, high: int = 9) -> Target:
    shapes = {"ids": ShapeRange(min=(1, low), typical=(1, typical), max=(1, high))}
    return Target(name="t", batch_sizes=sizes, shapes=shapes)


def model(arrays: list[Any]) -> dict[str, Any]:
    """Rows by themselves, padding told by a mask: what a bucket may be used for."""
    ids, mask, image = arrays
    shown = ids * mask
    return {"pooled": shown.sum(axis=1) / mask.sum(axis=1) + image.sum(axis=(1, 2)), "each": np.sqrt(shown + 1.0)}


def batch(rows: int, sequence: int) -> dict[str, Any]:
    random = np.random.default_rng(rows * 100 + sequence)
    return {
        "ids": random.integers(1, 50, (rows, sequence)),
        "mask": np.ones((rows, sequence), np.int64),
        "image": random.standard_normal((rows, 3, 4)).astype(np.float32),
    }


@pytest.mark.parametrize("rows", range(1, 5))
@pytest.mark.parametrize("sequence", range(1, 10))
def test_every_size_up_to_the_largest_gives_what_it_gives_by_itself(rows: int, sequence: int) -> None:
    """Broken: a batch would be answered with padding in it, without some of its rows, or from a bucket that is too
    small, at one of the boundaries."""
    router = Router("it", SIGNATURE, buckets(SIGNATURE, target()))
    asked = batch(rows, sequence)
    shapes, padded = router.fit(asked)
    assert shapes in buckets(SIGNATURE, target())
    assert [array.shape for array in padded] == list(shapes)
    found = router.cut(asked, shapes, model(padded))
    for name, right in model(list(asked.values())).items():
        np.testing.assert_allclose(found[name], right, rtol=1e-12)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
)
def test_the_smallest_bucket_that_holds_a_batch_is_taken(sizes: list[int], lengths: list[int]) -> None:
    """Broken: short requests would pay for long ones."""
    low, typical, high = sorted(lengths)
    found = buckets(SIGNATURE, target(tuple(sizes), low, typical, high))
    router = Router("it", SIGNATURE, list(reversed(found)))
    for shapes in found:
        (rows, length), *_ = shapes
        taken, padded = router.fit(batch(rows, length))
        assert taken == shapes
        assert all(np.array_equal(a, b) for a, b in zip(padded, batch(rows, length).values(), strict=True))
    assert len({bucket_name(SIGNATURE, shapes) for shapes in found}) == len(found)


def test_what_is_too_large_is_refused_with_the_largest() -> None:
    """Broken: rows would be lost without a word."""
    router = Router("it", SIGNATURE, buckets(SIGNATURE, target()))
    with pytest.raises(UsageError, match=r"up to \[4, 9\] of 'ids', and \[5, 2\] is larger"):
        router.fit(batch(5, 2))


def test_an_output_whose_size_is_its_own_is_not_cut_by_guess() -> None:
    """Broken: an output of twice the sequence would come back with half of it missing, or with padding."""
    odd = Signature(
        inputs=SIGNATURE.inputs, outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", "2*sequence")),)
    )
    router = Router("it", odd, buckets(odd, target()))
    exact = batch(1, 5)
    shapes, _ = router.fit(exact)
    assert router.cut(exact, shapes, {"y": np.zeros((1, 10))})["y"].shape == (1, 10)
    between = batch(1, 4)
    shapes, _ = router.fit(between)
    with pytest.raises(UsageError, match=r"has the size '2\*sequence', which is no input's"):
        router.cut(between, shapes, {"y": np.zeros((1, 10))})


def test_refusals_name_what_is_missing_or_too_much() -> None:
    """Broken: a compiler would be asked for a shape that nobody named, or for dozens of them."""
    assert refuse_buckets("it", SIGNATURE, target()) is None
    unknown = refuse_buckets("it", SIGNATURE, Target(name="t", batch_sizes=(1,)))
    assert unknown is not None
    assert "the size of 'sequence' in ids" in unknown
    many = refuse_buckets("it", SIGNATURE, target(tuple(range(1, LIMIT))))
    assert many is not None
    assert f"the target asks for {3 * (LIMIT - 1)} of them (batch: 1, 2" in many
    text = Signature(inputs=(TensorSpec(name="s", dtype="str", shape=("batch",)),), outputs=())
    assert refuse_buckets("it", text, target()) == "input 's' is text, and it takes numbers only"


def test_the_cost_of_padding_is_told_at_its_worst() -> None:
    """Broken: a reader would not know that a request just above a bucket pays for the next."""
    assert padding_note(SIGNATURE, buckets(SIGNATURE, target((1,), 5, 5, 5))) == ""
    said = padding_note(SIGNATURE, buckets(SIGNATURE, target((1, 8), 5, 5, 5)))
    assert (
        said == "2 shapes are compiled, and what is between two of them is padded up, at worst to 4 times the elements "
        "(batch 2 runs as 8)"
    )
