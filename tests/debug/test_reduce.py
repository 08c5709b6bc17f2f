"""A graph that fails becomes a small one that fails in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_stage.graph_debug.reduce import Cutter, reduce_nodes, same_failure


@settings(deadline=None)
@given(st.integers(1, 60), st.data())
def test_what_makes_it_fail_is_all_that_is_left(count: int, data: st.DataObject) -> None:
    guilty = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=3))
    if max(guilty) - min(guilty) >= 24:
        guilty = {min(guilty)}

    def fails(nodes: Sequence[int]) -> str | None:
        return "no" if guilty <= set(nodes) else None

    found = reduce_nodes(count, "no", fails, max_tries=1000)
    assert set(found.nodes) == guilty
    assert found.minimal
    assert found.of == count


def test_tries_are_a_hard_limit() -> None:
    tried: list[Sequence[int]] = []

    def fails(nodes: Sequence[int]) -> str | None:
        tried.append(nodes)
        return "no" if {40, 41} <= set(nodes) else None

    found = reduce_nodes(100, "no", fails, max_tries=7)
    assert len(tried) == found.tries == 7
    assert {40, 41} <= set(found.nodes)
    assert not found.minimal


def test_another_failure_does_not_count() -> None:
    """Half a graph may fail for reasons of its own: those are not what is looked for."""
    found = reduce_nodes(
        8, "crash: it died", lambda nodes: "crash: it died" if 5 in nodes else "an input has no type", max_tries=99
    )
    assert found.nodes == (5,)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("operator x.Foo (node 'a') is not known", "operator x.Foo (node 'b12') is not known", True),
        ("crash: died of SIGSEGV", "crash: died of SIGSEGV", True),
        ("crash: died of SIGSEGV", "timeout: took longer than 900 s", False),
    ],
)
def test_names_and_numbers_do_not_make_another_failure(a: str, b: str, same: bool) -> None:
    assert same_failure(a, b) is same


def test_any_part_of_a_graph_is_a_valid_graph(network: Any, tmp_path: Path) -> None:
    cutter = Cutter(Path(network.model.path))
    for number, part in enumerate(([0], [5, 6, 7], [3, 9], list(range(99, 107)))):
        made = cutter.write(part, tmp_path / str(number))
        assert made is not None
        onnx.checker.check_model(made.path, full_check=True)
        assert len(onnx.load(made.path).graph.node) == len(part)
        assert made.signature.inputs
        assert made.signature.outputs
