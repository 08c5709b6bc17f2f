"""Which nodes stay in higher precision: a bounded search that always holds its best result, and knows nothing of
models.

It gets the nodes in the order in which keeping them pays (`order`), and a function that evaluates a set of kept nodes
for real. First the shortest prefix of that order that passes is found by doubling and bisection, in fp32, until it is
too slow to be of use; then the same for other float types, where what is kept costs less; then nodes are returned to
the low precision in ever smaller groups. Nothing in it is random: the same evaluations give the same search.

The samples that judge a trial judge all of them, so one of many that miss their limit by little passes by luck. The
order of the trials does not come from these samples. So the last part is a fixed sequence of tests (Maurer, Hothorn and
Lehmacher, 1995): it ends with the first trial that misses for its interval alone, and then the limit of what was
found holds as often as a single trial's (decision 0139).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from compile_stage.core.records import Check, Outcome, Sensitivity, Trial, record
from compile_stage.measure.gates import holds

Evaluate = Callable[[tuple[str, ...], str], Trial]
"""(kept nodes, float type) → what became of them, measured for real."""

NOISE = 0.05
"""Two quick latencies closer than this are equal, and then the set with fewer nodes is the better."""

_COST_FLOOR = 0.01  # of the model's multiplications: what any node costs, since its tensors change type around it


@record
class Limits:
    """What a search may cost.

    Attributes:
        evaluations: Never more than so many calls of `evaluate`.
        seconds: None is begun later than this; a call under way is the caller's to end.
        ceiling_s: Latency of what passes already: what is slower can't be of use, nor can what keeps more than it.
    """

    evaluations: int
    seconds: float
    ceiling_s: float | None = None


@record
class Found:
    """What a search ended with.

    Attributes:
        best: The best passing trial; None when none passed.
        trials: All of them, in order: the proof of what was tried.
        exhausted: The budget ended the search, not the search itself.
        too_slow: For each float type that was given up for its latency: the trial that missed, and was slower than what
            passes already. Fewer nodes miss too, and more are slower.
    """

    best: Trial | None
    trials: tuple[Trial, ...]
    exhausted: bool
    too_slow: tuple[Trial, ...] = ()
    undecided: Trial | None = None

    @property
    def closest(self) -> Trial | None:
        """The best passing trial, or the one that missed by least."""
        return self.best or max(self.trials, key=lambda trial: margin(trial.decisive), default=None)


def order(sensitivities: Sequence[Sensitivity]) -> tuple[str, ...]:
    """Nodes by what keeping them gains (error) over what it costs (multiplications), best first."""
    total = sum(s.cost for s in sensitivities) or 1.0

    def worth(position: int) -> tuple[float, int]:
        sensitivity = sensitivities[position]
        return -sensitivity.effect / (sensitivity.cost / total + _COST_FLOOR), position

    return tuple(sensitivities[position].node for position in sorted(range(len(sensitivities)), key=worth))


def margin(check: Check | None) -> float:
    """By how much a check holds (negative: misses) its limit at the interval's worse end, relative to the limit, or to
    what is left up to 1 for a share such as a cosine; -inf if unknown."""
    if check is None or check.measured is None or check.outcome is Outcome.NOT_RUN:
        return -math.inf
    upward = check.gate.direction == "at_least"
    low, high = check.interval or (check.measured, check.measured)
    gap = low - check.gate.limit if upward else check.gate.limit - high
    limit = check.gate.limit
    scale = 1 - limit if upward and not check.gate.unit and 0 < limit < 1 else abs(limit)
    return -math.inf if math.isnan(gap) else gap / max(scale, 1e-12)


def is_open(check: Check | None) -> bool:
    """Whether a check misses its limit for its interval alone: the value holds it."""
    if check is None or check.measured is None or check.outcome is Outcome.PASS or check.gate.confidence is None:
        return False
    return holds(check.gate, check.measured)


def better(trial: Trial, than: Trial | None) -> bool:
    """True when `trial` is the better answer: it passes, is faster by more than the noise, or as fast with fewer nodes
    kept."""
    if than is None or not trial.passed or not than.passed:
        return trial.passed
    if trial.latency_s is not None and than.latency_s is not None:
        if trial.latency_s < than.latency_s * (1 - NOISE):
            return True
        if trial.latency_s > than.latency_s * (1 + NOISE):
            return False
    return len(trial.kept) < len(than.kept)


def search(
    ranked: Sequence[str],
    evaluate: Evaluate,
    limits: Limits,
    *,
    float_types: Sequence[str] = (),
    costs: Mapping[str, float] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Find a set of nodes that, kept in higher precision, passes while it stays as fast as possible.

    Args:
        ranked: Nodes, those first whose keeping pays most.
        float_types: Beside fp32, in what the kept nodes may run.
        costs: Of nodes; those that cost most are returned to the low precision first.
    """
    run = _Search(tuple(ranked), evaluate, limits, costs or {}, clock)
    try:
        run.all(tuple(float_types))
    except _BudgetEndedError:
        return run.found(exhausted=True)
    return run.found(exhausted=False)


class _BudgetEndedError(Exception):
    pass


class _Search:
    def __init__(
        self,
        ranked: tuple[str, ...],
        evaluate: Evaluate,
        limits: Limits,
        costs: Mapping[str, float],
        clock: Callable[[], float],
    ) -> None:
        self._ranked, self._evaluate, self._costs = ranked, evaluate, costs
        self._limits, self._ends, self._clock = limits, clock() + limits.seconds, clock
        self._known: dict[tuple[frozenset[str], str], Trial] = {}
        self.trials: list[Trial] = []
        self.best: Trial | None = None
        self._too_slow: list[Trial] = []
        self._undecided: Trial | None = None

    def found(self, *, exhausted: bool) -> Found:
        return Found(
            best=self.best,
            trials=tuple(self.trials),
            exhausted=exhausted,
            too_slow=tuple(self._too_slow),
            undecided=self._undecided,
        )

    def all(self, float_types: tuple[str, ...]) -> None:
        shortest = self._prefix("fp32", 0)
        if shortest is not None:
            failing, step = shortest - 1, 1
        elif self._too_slow:
            # What costs less may still be fast enough. The doubling goes on, so that lengths which miss are few.
            failing = len(self._too_slow[-1].kept)
            step = failing + 1
        else:
            return  # another float type is less exact: it would not pass either
        for float_type in float_types:
            # What rounds more needs at least as many nodes.
            self._prefix(float_type, failing, step)
        if self.best is not None:
            self._give_back(self.best)

    def _prefix(self, float_type: str, failing: int, step: int = 1) -> int | None:
        """Length of the shortest passing prefix, by doubling from one that is known to fail, then bisection; None where
        none passes, or none that is fast enough (then the trial that showed it is in `_too_slow`). All nodes at once
        are not tried: that is the float model itself, a candidate of its own."""
        most, passing = len(self._ranked) - 1, None
        while passing is None and failing < most:
            length = min(failing + step, most)
            trial = self._try(self._ranked[:length], float_type)
            if trial.passed:
                passing = length
            elif self._is_too_slow(trial):
                self._too_slow.append(trial)
                return None
            else:
                failing, step = length, step * 2
        while passing is not None and passing - failing > 1:
            middle = (failing + passing) // 2
            if self._try(self._ranked[:middle], float_type).passed:
                passing = middle
            else:
                failing = middle
        return passing

    def _give_back(self, start: Trial) -> None:
        """Quantise again what is not needed: groups of half the set, then smaller, down to single nodes; no further
        than to the first trial that misses for its interval alone. A miss by the value itself ends nothing: hardly any
        of those pass by luck."""
        held, size = start, (len(start.kept) + 1) // 2
        while size >= 1 and len(held.kept) > 1:
            groups = self._groups(held.kept, size)
            for group in groups:
                fewer = tuple(node for node in held.kept if node not in group)
                if not fewer or len(fewer) == len(held.kept):
                    continue
                trial = self._try(fewer, held.float_type)
                if is_open(trial.decisive):
                    self._undecided = trial
                    return
                if better(trial, held):
                    held = trial
            size = size // 2

    def _groups(self, kept: tuple[str, ...], size: int) -> list[frozenset[str]]:
        place = {node: position for position, node in enumerate(self._ranked)}
        costly = sorted(kept, key=lambda node: (-self._costs.get(node, 0.0), -place[node]))
        return [frozenset(costly[start : start + size]) for start in range(0, len(costly), size)]

    def _is_too_slow(self, trial: Trial) -> bool:
        ceiling_s = self._limits.ceiling_s
        return ceiling_s is not None and trial.latency_s is not None and trial.latency_s > ceiling_s * (1 + NOISE)

    def _try(self, kept: tuple[str, ...], float_type: str) -> Trial:
        key = (frozenset(kept), float_type)
        if key in self._known:
            return self._known[key]
        if len(self.trials) >= self._limits.evaluations or self._clock() >= self._ends:
            raise _BudgetEndedError
        trial = self._known[key] = self._evaluate(kept, float_type)
        self.trials.append(trial)
        if better(trial, self.best):
            self.best = trial
        return trial
