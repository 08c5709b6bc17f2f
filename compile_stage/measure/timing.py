"""The parts of an interleaved measurement.

`warm_up` and `turn` run in a worker, beside the model. The rest is pure: who runs when (`schedule`) and when it is
enough (`enough`), so that both can be tested with machines that drift as one likes.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.measure.quantiles import GATED, effective_calls
from compile_stage.measure.speedups import (
    ASSUMED_SPREAD,
    FEW_PROCESSES,
    RESOLUTION,
    is_within,
    outlast_memory,
    ratio_interval,
)
from compile_stage.measure.stats import Interval, median

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

MIN_ROUNDS = 6
"""Fewer rounds are never enough, however well they agree: with so few, agreement may be luck."""

STEADY_WITHIN = 0.05
"""Warm when the medians of three successive windows lie within 5 % of each other (perf_analyzer asks for 10 %)."""

SETTLE_S = 0.25
"""At most so long until a process is at rest after its turn."""

FAR_SLOWER = 5.0
"""A participant with so many times another's latency, in each round of a first pair, need not be measured further. Two
rounds are known to a few per cent on a quiet machine and to a factor of two on a busy one, so that five leaves no
doubt."""

TURN_S = 0.04
"""Length of one turn, at least one call. Long enough for hundreds of calls of a small model; short enough that a round
of ten small participants takes half a second, so that drift slower than that hits all alike, and there are many rounds
to resample."""

UNTIMED_S = TURN_S
"""At most so long calls are made before those that are timed, until the threads have a core each. After a rest the
kernel may have them share one for 10 to 30 ms: on two cores every second turn of a small model began so, and was half
over before they parted. Where turns had to become shorter this becomes as much shorter: on a busy machine threads wait
for others, whom no call sends away."""

MOST_CALLS = 20_000
"""Calls of one turn at most, that of a model of 2 microseconds: an input is made for each."""

LONGEST_TURN_S = 10 * TURN_S
"""A turn in which other processes slow the model down ends after so long, with fewer calls than the others."""

WIDEST = 0.2
"""Each start is known to ±20 % at least, however much the starts differ."""

ROUGHLY = 2 * ASSUMED_SPREAD.log_sd
"""A start that is known to ±8 % is known as well as one start shows it, where processes differ by 4 %."""

_APART_S = 0.005  # a window of untimed calls, in which waiting for a core shows
_WAITED_SHARE = 0.1  # of such a window, by all threads together; what a thread waits for when it is woken is less
_TASKS = Path("/proc/self/task")

_WINDOWS = 3
_WINDOW_S = 0.02
_WINDOW_CALLS = 5


def warm_up(call: Callable[[], Any], *, max_seconds: float) -> dict[str, Any]:
    """Call until the latencies are steady: caches filled, kernels chosen, clocks up. At least one call is made.

    Args:
        call: One call of the model.
        max_seconds: Give up after so long; a slow or unsteady model is then timed as it is.

    Returns:
        `{"calls": how many, "seconds": how long, "steady": whether it got there, "latency_s": seconds of a call when
        nothing disturbs it}`.
    """
    began = time.perf_counter()
    windows: list[float] = []
    calls = 0
    while True:
        latencies: list[float] = []
        opened = time.perf_counter()
        while len(latencies) < _WINDOW_CALLS or time.perf_counter() - opened < _WINDOW_S:
            before = time.perf_counter()
            call()
            latencies.append(time.perf_counter() - before)
            if (seconds := time.perf_counter() - began) >= max_seconds:
                settle()
                latency_s = min((*windows, median(latencies)))
                return {
                    "calls": calls + len(latencies),
                    "seconds": seconds,
                    "steady": steady(windows),
                    "latency_s": latency_s,
                }
        calls += len(latencies)
        windows.append(median(latencies))
        if steady(windows):
            seconds = time.perf_counter() - began
            settle()
            return {"calls": calls, "seconds": seconds, "steady": True, "latency_s": min(windows)}


def steady(windows: Sequence[float]) -> bool:
    """True when the last windows' medians agree, which rules out that they still fall."""
    last = windows[-_WINDOWS:]
    return len(last) == _WINDOWS and max(last) <= min(last) * (1 + STEADY_WITHIN)


def calls_of_a_turn(latency_s: float) -> int:
    """Calls that fill a turn of a model with that latency.

    Every turn of a participant has this many, however long they take. Were turns equally long instead, a round in which
    the model is slow would hold few calls and one in which it is fast many, so the median over all calls would be that
    of the fast rounds alone.
    """
    return min(MOST_CALLS, max(1, round(TURN_S / latency_s))) if latency_s > 0 else 1


def turn(
    run: Callable[[Batch], Batch],
    batches: Iterable[Batch],
    *,
    seconds: float,
    keep: Callable[[int, Batch], object] = lambda place, answer: None,
) -> list[float]:
    """One turn: seconds of each call, for all batches, or for about `seconds` where these are not enough.

    What is timed ends when the answer is there as arrays (`require_arrays`). Python's garbage collector waits
    meanwhile, as in `timeit`. The caller makes calls before it that are not timed (`spread`): the others' turns have
    emptied the caches, and each would pay for that with its first call, the one with the fewest calls per turn the
    most.

    Args:
        batches: At least one; an endless iterator ends with the time.
        keep: Given each answer, with its place in the turn, outside of the clock.
    """
    return turn_of_each((run,), batches, seconds=seconds, keep=(keep,))[0]


def turn_of_each(
    runs: Sequence[Callable[[Batch], Batch]],
    batches: Iterable[Batch],
    *,
    seconds: float,
    keep: Sequence[Callable[[int, Batch], object]],
) -> list[list[float]]:
    """The same of several ways to call a model: each batch by each of them, in one order and then in the other, so that
    what is warm after a call favours none.

    Returns:
        Of each way, seconds of each call; as many of all.
    """
    from compile_stage.measure.predict import require_arrays

    latencies: list[list[float]] = [[] for _ in runs]
    ways = list(zip(runs, latencies, keep, strict=True))
    orders = ways, ways[::-1]
    collecting = gc.isenabled()
    gc.disable()
    try:
        ends = time.perf_counter() + seconds
        for place, batch in enumerate(batches):
            if place and time.perf_counter() >= ends:
                break
            for run, taken, kept in orders[place % 2]:
                before = time.perf_counter()
                answer = run(batch)
                require_arrays(answer)
                taken.append(time.perf_counter() - before)
                kept(place, answer)
                del answer  # its memory is freed here, not within the next call's time
    finally:
        if collecting:
            gc.enable()
    return latencies


def spread(call: Callable[[], Any], max_seconds: float = UNTIMED_S) -> None:
    """Call until no thread of this process waits for a core that another has, for about `max_seconds`; at least
    once."""
    ends = time.perf_counter() + max_seconds
    while True:
        began, waited_s = time.perf_counter(), _waited_s()
        call()
        while time.perf_counter() - began < min(_APART_S, max_seconds):
            call()
        now = time.perf_counter()
        if now >= ends or _waited_s() - waited_s <= _WAITED_SHARE * (now - began):
            return


def _waited_s() -> float:
    """Seconds that the threads of this process have waited for a core; 0 where the kernel does not count them."""
    waited = 0
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread ended meanwhile
            waited += int((task / "schedstat").read_text(encoding="utf-8").split()[1])
    return waited / 1e9


def settle() -> None:
    """Wait until no thread of this process computes any more, or waits for a core to compute on; at most `SETTLE_S`.

    The threads of a runtime wait for the next call in a busy loop: those of ONNX Runtime for about 55 ms, longer than a
    turn, and an OpenMP runtime's for up to 200 ms. On a busy machine such a thread may get no core for a while: it uses
    no CPU time then, and is not at rest.
    """
    ends = time.perf_counter() + SETTLE_S
    while time.perf_counter() < ends:
        began, used = time.perf_counter(), time.process_time()
        time.sleep(0.002)
        uses_little = time.process_time() - used < 0.2 * (time.perf_counter() - began)
        if uses_little and not _others_want_a_core():
            return


def _others_want_a_core() -> bool:
    """Whether another thread of this process runs, or is ready to; False where the kernel does not say."""
    own = str(threading.get_native_id())
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with contextlib.suppress(OSError, IndexError):  # the thread ended meanwhile
            if task.name != own and (task / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"R":
                return True
    return False


def schedule(names: Sequence[str], round_number: int, seed: int) -> tuple[str, ...]:
    """The order of one round: rounds come in pairs, a shuffled order and then its mirror image (A B C, C B A).

    Over such a pair everybody's average position in time is the same, so a steady drift cancels; shuffling anew for
    each pair breaks up what is periodic.
    """
    order = sorted(names)
    random.Random(f"{seed}:{round_number // 2}").shuffle(order)  # noqa: S311  (a schedule, not a secret)
    return tuple(order if round_number % 2 == 0 else reversed(order))


def far_slower(
    rounds: Mapping[str, Sequence[Sequence[float]]], leaders: Collection[str]
) -> dict[str, tuple[str, float]]:
    """Who takes at least `FAR_SLOWER` times as long as one of `leaders` in every round.

    Returns:
        Participant → that leader (the one furthest ahead), and how many times as long in the round where it was
        nearest.
    """
    slower: dict[str, tuple[str, float]] = {}
    for name, turns in rounds.items():
        behind = {
            leader: min(median(own) / median(ahead) for own, ahead in zip(turns, rounds[leader], strict=True))
            for leader in leaders
            if leader != name
        }
        if behind and max(behind.values()) >= FAR_SLOWER:
            slower[name] = max(behind.items(), key=lambda item: (item[1], item[0]))
    return slower


def enough(
    rounds: Mapping[str, Sequence[Sequence[float]]],
    baseline: str,
    *,
    seed: int,
    min_calls: int = 0,
    starts: int = 1,
    differ: Mapping[str, float] | None = None,
    rough: bool = False,
) -> bool:
    """True when every ratio to the baseline is known narrowly enough to stop: to ±2 %, and of several starts, since
    their mean counts, to that times the root of their number.

    The rule looks at the intervals' width and the rounds' memory only, never at where they lie, so that stopping does
    not favour an answer.

    Args:
        rounds: Participant → latencies of each of its rounds so far. The budget is the caller's to watch.
        min_calls: So many independent calls must each participant have made, for a percentile that a gate looks at
            (`quantiles.calls_wanted`).
        starts: Of the whole measurement, each of which ends by this rule.
        differ: By what a participant's ratio differed between the starts before this one (`restarts.differences`). A
            start need not be known more narrowly than that.
        rough: Ratios need only be known to ±8 % (`ROUGHLY`), however long the rounds' memory is: other starts follow,
            and the interval comes from how they differ.
    """
    if min_calls and any(effective_calls(turns, GATED) < min_calls for turns in rounds.values()):
        return False
    done = min((len(turns) for turns in rounds.values()), default=0)
    if done < MIN_ROUNDS or done % 2:  # a half pair of mirrored rounds leans to one side
        return False
    others = [name for name in rounds if name != baseline]
    ratio_of = cache(lambda name: ratio_interval(rounds[baseline], rounds[name], seed=seed))
    if rough and all(is_within(ratio_of(name), ROUGHLY) for name in others):
        return True
    wanted = RESOLUTION * math.sqrt(starts if starts >= FEW_PROCESSES else 1)
    widths = {name: max(wanted, min((differ or {}).get(name, 0.0), WIDEST)) for name in rounds}
    return all(_is_known(ratio_of(name), rounds[baseline], rounds[name], widths[name]) for name in others)


def roughly_known(rounds: Mapping[str, Sequence[Sequence[float]]], baseline: str, *, seed: int) -> bool:
    """True when every ratio to the baseline is known to a factor of two. Less is no measurement, and worth more time
    than was given. The rule looks at widths only, as `enough` does."""
    others = (turns for name, turns in rounds.items() if name != baseline)
    ratios = (ratio_interval(rounds[baseline], turns, seed=seed) for turns in others)
    return all(ratio.low >= ratio.value / 2 and ratio.high <= 2 * ratio.value for ratio in ratios)


def _is_known(
    ratio: Interval, base: Sequence[Sequence[float]], own: Sequence[Sequence[float]], half_width: float
) -> bool:
    """By more rounds than one state of the machine lasts; rounds that agree to half a per cent are enough however long
    it does."""
    return is_within(ratio, RESOLUTION / 4) or (is_within(ratio, half_width) and outlast_memory(base, own))
