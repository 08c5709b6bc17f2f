"""The set that is found passes, is as small as it can be, and costs no more than was allowed."""

from __future__ import annotations

from collections.abc import Callable, Collection

from hypothesis import given, settings
from hypothesis import strategies as st

from compile_stage.graph_debug.graphs import INPUT_OP, Node
from compile_stage.graph_debug.keep import smallest_kept
from compile_stage.graph_debug.trace import Trace, judge


def chain(snrs: list[float]) -> Trace:
    """Convolutions one after the other, with these errors."""
    nodes = [Node(name="x", op=INPUT_OP, inputs=(), outputs=("t-1",))]
    nodes += [Node(name=f"n{i}", op="Conv", inputs=(f"t{i - 1}",), outputs=(f"t{i}",)) for i in range(len(snrs))]
    measured = {f"t{i}": (snr, snr, 0.0) for i, snr in enumerate(snrs)} | {"t-1": (99.0, 99.0, 0.0)}
    return judge(nodes, measured, {}, samples=1, precision="int8")


def needs(guilty: Collection[str], calls: list[tuple[str, ...]]) -> Callable[[tuple[str, ...]], tuple[bool, str]]:
    def evaluate(kept: tuple[str, ...]) -> tuple[bool, str]:
        calls.append(kept)
        return set(guilty) <= set(kept), "measured"

    return evaluate


@settings(deadline=None)
@given(st.lists(st.floats(1, 35), min_size=1, max_size=40), st.data())
def test_the_smallest_set_is_found_within_the_evaluations(snrs: list[float], data: st.DataObject) -> None:
    trace = chain(sorted(snrs, reverse=True))
    guilty = data.draw(st.sets(st.sampled_from([f"n{i}" for i in range(len(snrs))]), min_size=1, max_size=3))
    calls: list[tuple[str, ...]] = []
    found = smallest_kept(trace, needs(guilty, calls), max_evaluations=500, out_of_time=lambda: False)
    if found.nodes is not None:  # a node that adds no error is never suspected
        assert set(found.nodes) == guilty
        assert found.minimal
    assert len(calls) == len(set(calls)) == len(found.trials)


@settings(deadline=None)
@given(st.integers(1, 12))
def test_evaluations_are_a_hard_limit_and_the_answer_was_seen_to_pass(most: int) -> None:
    calls: list[tuple[str, ...]] = []
    trace = chain([35 - i for i in range(30)])
    found = smallest_kept(trace, needs({"n3", "n20"}, calls), max_evaluations=most, out_of_time=lambda: False)
    assert len(calls) <= most
    if found.nodes is None:
        assert found.note
    else:
        assert {"n3", "n20"} <= set(found.nodes)
        assert any(trial.passed and set(trial.kept) == set(found.nodes) for trial in found.trials)


def test_what_nothing_helps_is_said() -> None:
    found = smallest_kept(chain([30, 20, 10]), lambda _: (False, "no"), max_evaluations=50, out_of_time=lambda: False)
    assert found.nodes is None
    assert "even with all" in found.note


def test_time_is_a_hard_limit() -> None:
    found = smallest_kept(chain([30, 20, 10]), lambda _: (False, "no"), max_evaluations=50, out_of_time=lambda: True)
    assert found.trials == ()
    assert "time" in found.note


def test_an_exact_candidate_has_nothing_to_keep() -> None:
    found = smallest_kept(chain([99.0]), lambda _: (True, ""), max_evaluations=5, out_of_time=lambda: False)
    assert found.nodes is None
    assert found.trials == ()
