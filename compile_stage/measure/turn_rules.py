"""What a participant's turns must look like from outside, for its latencies to be believed.

The worker's clock is the worker's own word. The stage's clock, and the kernel's counters of CPU time, are not, and they
bound what a turn may claim. All rules look at the median or the sum over the rounds that decide, so that one
disturbance breaks none of them. On a busy machine threads that wait for a core count like those that run, and delays
meet the original as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from compile_stage.measure.participant import Turn
from compile_stage.measure.stats import median
from compile_stage.measure.timing import SETTLE_S

CLAIMED_TOO_MUCH = 0.01
"""Share by which the latencies of a turn may exceed the stage's own time for it: none, but for the clocks' ticks."""

UNEXPLAINED_S, UNEXPLAINED_SHARE, UNEXPLAINED_CALL_S = 0.015, 0.1, 10e-6
"""What the stage's clock may see of a turn beyond the latencies, and beyond what it sees of the original's turns: a
delay on a busy machine, a share of the latencies, and at most so much for each call that the original's turns do not
have: the loop around it (1 to 4 microseconds) with its part of the message. The median of several turns is known the
better the more they are, so that the delay is over the root of their number."""

LEAST_UNEXPLAINED_S = 0.003
"""However many turns there are: processes differ in how soon they wake up, and in their message's length."""

WAKE_UPS = 2.0
"""Waits for a core around the calls of a turn, which no latency holds: the worker's when the request wakes it up, and
one before its answer is sent. Each is as long as those of the stage, which is woken up by the answer: where two busy
loops used two cores, both waited 7 to 30 ms of turns whose calls took 1 to 10 ms."""

UNCLAIMED_CPU_S = 0.002
"""CPU time of a turn outside its calls: the request is read and the answer written in 0.3 ms. A busy machine makes a
thread wait, and it computes no longer for it."""

SPARE_THREADS = 0.5
"""Runnable threads, on average, beyond those that the policy grants: the interpreter and the runtime's own."""

UNCOUNTED_CPU_S = 0.05
"""CPU time that no turn shows for certain: the kernel counts that of ended threads in hundredths of a second."""

SPINNING_THREADS = 0.5
"""More than that between its turns is no rest: one that computes on keeps a whole thread at work, or waiting for a
core. Honest runtimes were seen at up to 0.24 where two participants take turns: ONNX Runtime's threads look for work
for some milliseconds after a call."""

LOOKING_S = SETTLE_S
"""Seconds of that in all turns together that say nothing: where a participant's turns follow each other at once, a look
for work of that length is all that lies between them."""


TICK_S = 0.01
"""Of the kernel's clock. What is at rest uses nothing, and its counters stand still: honest participants were seen at 0
in all turns of the others, on a busy machine too."""

BUSY_BESIDE = 0.1
"""Threads that a participant may keep at work while another is timed: it has come to rest before. One that computes
then slows the others down, those alone that it chooses, and the original first of all."""


def refuse_disturber(name: str, turns: Mapping[str, Sequence[Turn]]) -> str:
    """Why a participant disturbed another one that was timed, as one sentence; empty where it did not.

    Args:
        turns: Of all participants, in the rounds that decide.
    """
    for other, timed in turns.items():
        wall_s, cpu_s = sum(turn.wall_s for turn in timed), sum(turn.beside_s.get(name, 0.0) for turn in timed)
        if other != name and cpu_s > BUSY_BESIDE * wall_s + TICK_S:
            return (
                f"it goes on computing after its answer: it kept {cpu_s / wall_s:.2g} threads busy while {other} was "
                "timed"
            )
    return ""


def refuse_turns(own: Sequence[Turn], baseline: Sequence[Turn], threads: int) -> str:
    """Why the turns can't be believed, as one sentence; empty when they can.

    Args:
        own: Of one participant.
        baseline: Of the original, in the same rounds.
        threads: That the policy grants.
    """
    if not own:
        return ""
    return _rest(own) or _threads(own, threads) or refuse_clock(own, baseline)


def refuse_clock(own: Sequence[Turn], baseline: Sequence[Turn]) -> str:
    """Why the clock of a participant can't be believed, as one sentence; empty when it can.

    Args:
        own, baseline: As `refuse_turns` takes them.
    """
    if not own:
        return ""
    claimed, wall = (median([value(turn) for turn in own]) for value in (_claimed, _wall))
    if any(_claimed(turn) > turn.wall_s * (1 + CLAIMED_TOO_MUCH) + 1e-3 for turn in own):
        return (
            f"its clock is wrong: its latencies add up to {claimed * 1e3:.3g} ms a turn, which took {wall * 1e3:.3g} "
            "ms by the stage's clock"
        )
    if problem := _cpu_time(own):
        return problem
    waits_s = [turn.stage_waited_s for turn in (*own, *baseline)]
    around_s = WAKE_UPS * sum(waits_s) / len(waits_s)
    seen = median([_unexplained(turn, around_s) for turn in own])
    calls = median([_calls(turn) for turn in own])
    usual = max(0.0, median([_unexplained(turn, around_s) for turn in baseline])) if baseline else 0.0
    known = median([_calls(turn) for turn in baseline]) if baseline else 0.0
    delay = max(UNEXPLAINED_S / math.sqrt(len(own)), LEAST_UNEXPLAINED_S)
    # Many calls of the original show what one takes here, and few say nothing of it.
    of_a_call_s = min(UNEXPLAINED_CALL_S, (usual + delay) / known) if known else UNEXPLAINED_CALL_S
    if seen <= delay + UNEXPLAINED_SHARE * claimed + of_a_call_s * max(0.0, calls - known) + usual:
        return ""
    return (
        f"its clock is wrong: a turn took {wall * 1e3:.3g} ms by the stage's clock, and its latencies explain "
        f"{claimed * 1e3:.3g} ms of that"
    )


def _cpu_time(own: Sequence[Turn]) -> str:
    """The thread that takes the times can't have computed for longer than its calls took, however busy the machine
    is."""
    claimed_s, cpu_s = sum(turn.claimed_s for turn in own), sum(turn.first_cpu_s for turn in own)
    around_s = len(own) * UNCLAIMED_CPU_S + UNEXPLAINED_CALL_S * sum(_calls(turn) for turn in own)
    if cpu_s <= around_s + (1 + UNEXPLAINED_SHARE) * claimed_s:
        return ""
    return (
        f"its clock is wrong: its first thread computed for {cpu_s / len(own) * 1e3:.3g} ms a turn by the kernel's "
        f"count, and its latencies explain {claimed_s / len(own) * 1e3:.3g} ms of that"
    )


def _threads(own: Sequence[Turn], threads: int) -> str:
    # Running or waiting for a core: so many threads were at work at a time, however few cores the others left them.
    wall_s, wanted_s = sum(turn.wall_s for turn in own), sum(turn.cpu_s + turn.waited_s for turn in own)
    at_work = wanted_s / wall_s if wall_s > 0 else 0.0
    if wanted_s - UNCOUNTED_CPU_S <= (threads + SPARE_THREADS) * wall_s:
        return ""
    return (
        f"it took more threads than the policy grants: {at_work:.3g} were at work at a time, and the target has "
        f"threads: {threads}"
    )


def _rest(own: Sequence[Turn]) -> str:
    idle_s, cpu_s = sum(turn.idle_s for turn in own), sum(turn.idle_cpu_s for turn in own)
    if cpu_s <= SPINNING_THREADS * idle_s + LOOKING_S + UNCOUNTED_CPU_S:
        return ""
    return f"it goes on computing after its answer: it kept {cpu_s / idle_s:.2g} threads busy while it was others' turn"


def _claimed(turn: Turn) -> float:
    return turn.claimed_s


def _wall(turn: Turn) -> float:
    return turn.wall_s


def _calls(turn: Turn) -> float:
    return float(len(turn.latency_s) + len(turn.first_s))


def _unexplained(turn: Turn, around_s: float) -> float:
    """Seconds of a turn beyond its latencies and beyond what the machine is to blame for, as far as others used its
    cores. Threads of the participant that wait for each other excuse nothing.

    What the stage itself waited for a core is taken off. What the thread that took the times waited lies anywhere in
    the turn: taken off is its share of the turn, as if it were spread evenly; or all of it, where it is no longer than
    waits around the calls are.

    Args:
        around_s: Of a turn, that the thread may have waited around its calls.
    """
    if turn.wall_s <= 0:
        return 0.0
    seconds = turn.wall_s - turn.stage_waited_s - _claimed(turn)
    waited_s = min(turn.held_up_s, turn.wall_s, turn.foreign_cores * turn.wall_s)
    return min(seconds * (1 - waited_s / turn.wall_s), seconds - min(waited_s, around_s))
