"""The smallest set of nodes that, kept in FP32, makes a candidate pass: a bounded search over real lowerings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compile_stage.core.records import record
from compile_stage.graph_debug.graphs import INPUT_OP
from compile_stage.graph_debug.trace import HANDS_ON, NodeError, Trace, rank

_FURTHEST = 6  # nodes between a tensor and the one that computed it


@record
class Trial:
    """One lowering that was tried."""

    kept: tuple[str, ...]
    passed: bool
    reason: str


@record
class Kept:
    """What a search found.

    Attributes:
        nodes: The smallest set that passed; None when none did.
        minimal: Every node of it was tried to be given back, and none could.
    """

    nodes: tuple[str, ...] | None
    minimal: bool
    trials: tuple[Trial, ...]
    note: str = ""


Evaluate = Callable[[tuple[str, ...]], tuple[bool, str]]
"""Nodes to keep, in the order of the graph → whether every gate holds, and one sentence about it."""


def smallest_kept(trace: Trace, evaluate: Evaluate, *, max_evaluations: int, out_of_time: Callable[[], bool]) -> Kept:
    """Bisection over the ranking of the trace, then every node is tried to be given back.

    Bisection supposes that a longer part of the ranking never does worse than a shorter one. Where that is wrong, the set is still one that was seen to pass, only perhaps
    not the smallest.
    """
    search = _Search(trace, evaluate, max_evaluations, out_of_time)
    units = [_unit(trace, error) for error in rank(trace)]
    if not units:
        return Kept(
            nodes=None, minimal=False, trials=(), note="no node adds error that keeping it in fp32 would take away"
        )
    passing = search.shortest_prefix(units)
    if passing is None:
        return Kept(nodes=None, minimal=False, trials=tuple(search.trials), note=search.why_not())
    kept, complete = search.give_back(passing)
    note = "" if complete else f"not every node was tried to be given back: {search.ended_by()}"
    return Kept(nodes=kept, minimal=complete, trials=tuple(search.trials), note=note)


class _Search:
    def __init__(self, trace: Trace, evaluate: Evaluate, most: int, out_of_time: Callable[[], bool]) -> None:
        self._order = {name: error.position for error in trace.nodes for name in (error.node, *error.merged)}
        self._evaluate, self._most, self._late = evaluate, most, out_of_time
        self.trials: list[Trial] = []

    @property
    def over(self) -> bool:
        return len(self.trials) >= self._most or self._late()

    def ended_by(self) -> str:
        return (
            f"the {self._most} evaluations were used up" if len(self.trials) >= self._most else "the time was used up"
        )

    def why_not(self) -> str:
        if self.over:
            return f"{self.ended_by()} before a set was found that passes"
        return "even with all of the nodes that add error kept in fp32 it does not pass"

    def passes(self, nodes: Sequence[str]) -> bool:
        kept = self._sorted(nodes)
        if known := next((trial for trial in self.trials if trial.kept == kept), None):
            return known.passed
        if self.over:
            return False
        passed, reason = self._evaluate(kept)
        self.trials.append(Trial(kept=kept, passed=passed, reason=reason))
        return passed

    def shortest_prefix(self, units: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
        """1, 2, 4, 8 ... units until one passes, then bisection down to the shortest that does."""

        def prefix(count: int) -> list[str]:
            return [name for unit in units[:count] for name in unit]

        low, high = 0, 1
        while not self.passes(prefix(high)):
            if high == len(units) or self.over:
                return None
            low, high = high, min(2 * high, len(units))
        while high - low > 1:
            middle = (low + high) // 2
            if self.passes(prefix(middle)):
                high = middle
            else:
                low = middle
        return tuple(dict.fromkeys(prefix(high)))

    def give_back(self, kept: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
        """Without each node in turn, the least suspicious first; (what is left, whether all were tried)."""
        for name in reversed(kept):
            rest = tuple(other for other in kept if other != name)
            if not rest:
                continue
            if self.over and all(trial.kept != self._sorted(rest) for trial in self.trials):
                return self._sorted(kept), False
            if self.passes(rest):
                kept = rest
        return self._sorted(kept), True

    def _sorted(self, nodes: Sequence[str]) -> tuple[str, ...]:
        return tuple(sorted(dict.fromkeys(nodes), key=lambda name: (self._order.get(name, -1), name)))


def _unit(trace: Trace, error: NodeError) -> tuple[str, ...]:
    """The nodes that have to stay in FP32 together for this error to go away.

    A tensor is quantised for the sake of the nodes on both of its sides. So with the node go those that wrote what it reads, up to the next one that computes
    something of its own; and where the quantisation of its output is to blame, those that read it.
    """
    found = [] if error.op == INPUT_OP else [error.node]
    if error.kind != "computation" or error.op == INPUT_OP:
        found += [reader for name in (error.node, *error.merged) for reader in trace.consumers.get(name, ())]
    ops = {other.node: other.op for other in trace.nodes}
    pending = list(trace.producers.get(error.node, ()))
    for _ in range(_FURTHEST):
        found += pending
        pending = [up for name in pending if ops.get(name, "Relu") in HANDS_ON for up in trace.producers.get(name, ())]
    found += error.merged
    return tuple(dict.fromkeys(found))
