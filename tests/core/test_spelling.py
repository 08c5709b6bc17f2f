"""Which word was probably meant."""

from __future__ import annotations

import pytest

from compile_stage.core.spelling import did_you_mean


@pytest.mark.parametrize(
    ("word", "meant"),
    [("gpu", ""), ("xpu", ""), ("cup", "cpu"), ("cpus", "cpu"), ("cp", "cpu"), ("CPU-1", "cpu"), ("serve", "server")],
)
def test_only_a_word_that_is_near_is_suggested(word: str, meant: str) -> None:
    """Broken: who asks for the target `gpu` is sent to `cpu`, which is another device and no misspelling."""
    assert did_you_mean(word, ("cpu", "server")) == meant


def test_what_others_call_a_thing_is_suggested_where_it_may_be_named() -> None:
    """Broken: `gpu` is no longer `cuda`, since the two are spelled unlike."""
    assert did_you_mean("gpu", ("cpu", "cuda")) == "cuda"
