"""Several models measured in turns, on a machine that they have alone.

Each participant is a fresh process that did not compile: its load time and peak memory are those of a serving process.
A round holds one turn of each, in an order that changes from round to round, so that a machine that slows down slows
all alike. Rounds in which other processes used the cores are dropped and repeated, as long as the time lasts.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.environment import available_cores
from compile_stage.core.errors import CompileStageError, StorageError, WorkerError
from compile_stage.core.ports import WorkerLimits
from compile_stage.core.records import (
    Artifact,
    Failure,
    Gate,
    Measurement,
    Outcome,
    SourceModel,
    Timing,
    record,
)
from compile_stage.measure import disturbance, speedups, timing
from compile_stage.measure.deciding_rounds import MeasuredRounds, Round, first_look, timing_of, with_ratio
from compile_stage.measure.drafts import Drafts
from compile_stage.measure.leaving import leaving, one_process
from compile_stage.measure.one_thread import may_be_held_up, time_on_one_thread
from compile_stage.measure.participant import MEASURING_BYTES, Participant, Turn, latencies
from compile_stage.measure.performance import check_performance
from compile_stage.measure.request import MeasurementRequest
from compile_stage.measure.rounds import OVERTIME, Pace
from compile_stage.measure.samples import open_samples
from compile_stage.measure.timed_answers import AnswerLog
from compile_stage.measure.timed_inputs import turn_bytes
from compile_stage.measure.turn_rules import refuse_clock, refuse_disturber, refuse_turns

T = TypeVar("T")

BASELINE = "baseline"
"""Name of the participant that all others are compared with."""

_ROOM_BYTES = 500_000_000  # of a process beside a model's weights: packages, and what it computes with
_ONE_THREAD_SHARE = 0.05  # of the time of a batch size


@record
class Rounds:
    """What rounds are wanted at one batch size.

    Attributes:
        seconds: For all of them, and twice as much again while there are too few; warm-up comes on top.
        seed: For the order of turns and the intervals.
        min_calls: So many calls of each participant are wanted even where the ratios are known sooner.
        first_look: A first pair of undisturbed rounds, or a few more of any kind, is all that is wanted.
        overtime: Times `seconds` at most, where there are too few rounds.
        starts: Of the measurement that these are a part of.
        rough_s: After so long, ratios that are known roughly are enough (`timing.enough`).
        differ: By what ratios differed between the starts before (`restarts.differences`).
        may_leave: Who can neither win nor has an open gate leaves the rounds (`measure.leaving`), where the request
            says what gates there are.
    """

    batch_size: int
    seconds: float
    seed: int
    min_calls: int = 0
    first_look: bool = False
    overtime: float = OVERTIME
    starts: int = 1
    rough_s: float = math.inf
    differ: Mapping[str, float] = field(default_factory=dict)
    may_leave: bool = False


class Interleaved:
    """The participants of one interleaved measurement.

    Args:
        stack: Keeps the workers; they end with it.
        drafts: Artifacts are opened from these, as they will be served.

    Attributes:
        failures: Of those that crashed. Who was killed by somebody else is no failure: the error is raised, unless the
            measurement is begun again after such a kill.
        overtime_s: By how much rounds took longer than they were given.
        shares: Of a whole turn that each has, where turns had to become shorter. The next start begins with it.
    """

    def __init__(self, context: Context, request: MeasurementRequest, stack: ExitStack, drafts: Drafts) -> None:
        self._context = context
        self._request = request
        self._samples = request.samples
        self._target = request.target
        self._threads = request.target.threads
        self._stack = stack
        self._drafts = drafts
        self._proof = request.proof
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="timed-", dir=context.scratch)))
        self._runners: dict[str, Participant] = {}
        self._own: dict[str, ExitStack] = {}  # keeps the worker of one of them
        self._dropped: dict[str, tuple[Participant, str]] = {}
        self._left: dict[str, str] = {}  # the rounds of this batch size, since it is behind whom
        self._notes: dict[str, tuple[str, ...]] = {}
        self._in_doubt_s: dict[int, float] = {}  # by batch size: for the baseline with one thread
        self._load = disturbance.Load()
        # A device's engine reads what everybody uses there (`compile_stage.devices`).
        self._usage_there: Callable[[], disturbance.Usage] | None = getattr(context.engine, "machine_usage", None)
        self._cores = context.hardware.cores if self._usage_there is not None else None
        self._side_by_side = self._usage_there is None and available_cores() > 1  # a device answers one at a time
        self._meanwhile = ThreadPoolExecutor(1)
        stack.callback(self._meanwhile.shutdown, wait=False)  # its call ends with the workers
        self.failures: dict[str, Failure] = {}
        self.overtime_s = 0.0
        self.shares: dict[str, float] = {}

    def enter(self, name: str, model: SourceModel | Artifact, limits: WorkerLimits) -> None:
        """Open the model in a fresh process, run it once at each batch size, and note load time and peak memory."""
        self._progress(f"loading {name}")
        target = self._request.baseline_target if name == BASELINE else self._target
        draft = self._drafts.of(model, target) if isinstance(model, Artifact) else None
        try:
            if isinstance(model, Artifact):
                self._demand_room(model)
                limits = replace(limits, interpreter=plugins.interpreter_of(model.backend))
            else:
                interpreter = plugins.interpreter_of_source(model.flavor)
                limits = replace(limits, reads=(model.path,), interpreter=interpreter)
            own = self._own[name] = self._stack.enter_context(ExitStack())
            worker = own.enter_context(self._context.engine.worker(f"measure--{name}", limits))
            if draft is not None:
                opened = worker.call("open_served", model=draft)
            else:
                opened = worker.call("open_source", source=model, target=self._target)
            for batch_size in self._target.batch_sizes:
                worker.call("warm_up", samples=self._samples, batch_size=batch_size, seconds=0.0)
            share = self.shares.get(name, 1.0)
            writes = bool(opened.get("writes_tokens"))
            self._runners[name] = Participant(
                worker, opened["load_s"], worker.memory(), share=share, writes_tokens=writes
            )
        except CompileStageError as error:
            self._drop(name, error)

    def _demand_room(self, artifact: Artifact) -> None:
        """All participants are open at once: one more must not have the kernel kill those that are there.

        Raises:
            WorkerError: Less memory is free than its files have, and `_ROOM_BYTES`.
        """
        free, needed = self._context.free_memory_bytes(), artifact.size_bytes + _ROOM_BYTES
        if free is not None and free < needed:
            raise WorkerError(
                "out_of_memory",
                f"not measured: {free / 1e9:.2g} GB of memory are free beside the others, which are open at the same "
                f"time, and its files and its process need {needed / 1e9:.2g} GB; name fewer backends or precisions, "
                "or take a machine with more memory",
            )

    def who_hold(self, gates: Sequence[Gate], sizes: Mapping[str, int]) -> list[str]:
        """The participants that hold gates on what is known before the first round: size and memory."""
        holding = []
        for name, runner in self._runners.items():
            known = Measurement(timings=(), load_s=runner.load_s, peak_memory_bytes=runner.peak_memory_bytes)
            if name != BASELINE and all(
                check.outcome is Outcome.PASS for check in check_performance(gates, known, sizes[name])
            ):
                holding.append(name)
        return holding

    def wait_until_quiet(self, seconds: float) -> float:
        """Wait a part of the time for measuring, if other processes use the cores; returns the seconds waited."""

        def on_wait(foreign: float) -> None:
            cores = self._cores or available_cores()
            self._progress(f"waiting: other processes use {foreign:.1f} of {cores} cores")

        longest = min(disturbance.WAIT_SHARE * seconds, disturbance.WAIT_S)
        return disturbance.wait_until_quiet(
            self._threads, longest, on_wait=on_wait, read=self._usage_there, cores=self._cores
        )

    def run(self, wanted: Rounds, leads: Sequence[str] | None = None) -> None:
        """Rounds at one batch size, until every ratio's interval is narrow enough or the time is up.

        Args:
            leads: Where given, who is far slower than one of these after a first pair of undisturbed rounds, or a few
                more of any kind, is dropped.
        """
        for name in list(self._runners):
            self._guarded(name, partial(Participant.warm_up, samples=self._samples, batch_size=wanted.batch_size))
        folder = Path(tempfile.mkdtemp(dir=self._folder))  # rounds may be measured again
        answers = AnswerLog(folder, self._samples.count, wanted.batch_size)
        measured, self._left = MeasuredRounds(), {}
        pace = Pace(wanted.seconds, time.monotonic(), wanted.min_calls, wanted.overtime)
        while BASELINE in self._runners:
            last, quiet = self._round(
                len(measured.rounds), wanted, answers, longest_s=pace.longest_turn_s(len(measured.rounds))
            )
            now_s = time.monotonic()
            if self._shorten(pace, last, len(measured.rounds) + 1, now_s):
                measured = MeasuredRounds()
                continue
            measured.rounds.append(last)
            measured.quiet.append(quiet)
            late = self._is_over(pace, measured, now_s, wanted.seed)
            if leads is not None and (first := first_look(measured, late=late)):
                here = [name for name in leads if name in self._runners]
                self._drop_far_slower(first, here, wanted)
                leads = None
                late = late or wanted.first_look
            if wanted.may_leave:
                self._let_go(measured, wanted)
            known = partial(
                timing.enough,
                baseline=BASELINE,
                seed=wanted.seed,
                min_calls=wanted.min_calls,
                starts=wanted.starts,
                differ=wanted.differ,
                rough=now_s - pace.began_s >= wanted.rough_s,
            )
            if (late or known(self._by_name(measured.clean))) and not self._in_doubt(measured):
                break
            message = f"batch {wanted.batch_size}, round {len(measured.rounds)}"
            self._progress(f"{message}, {measured.disturbed} disturbed" if measured.disturbed else message)
        self.overtime_s += pace.overtime_s(time.monotonic())
        if self._refuse_turns(measured.deciding, answers) and len(self._runners) > 1:
            # What others showed beside one that kept the cores busy is no measurement of theirs.
            self._progress(f"batch {wanted.batch_size} is measured again, without who disturbed it")
            self.run(wanted)
            return
        if may_be_held_up(self._target, self._turns(measured.deciding)[BASELINE]):
            self._in_doubt_s[wanted.batch_size] = _ONE_THREAD_SHARE * wanted.seconds
        for name, runner in self._runners.items():
            summary = self._summary(name, self._turns(measured.deciding), wanted)
            runner.timings.append(replace(summary, disturbed=measured.dropped))
            if (leader := self._left.get(name)) is not None:
                note = (
                    f"at batch {wanted.batch_size} it was measured in {summary.rounds} of {len(measured.deciding)} "
                    f"rounds, since it is slower than {leader} beyond doubt and no gate is open"
                )
                self._notes[name] = (*self._notes.get(name, ()), note)

    def _is_over(self, pace: Pace, measured: MeasuredRounds, now_s: float, seed: int) -> bool:
        def known() -> bool:
            return timing.roughly_known(self._by_name(measured.deciding), BASELINE, seed=seed)

        return pace.is_over(len(measured.rounds), now_s, known)

    def _in_doubt(self, measured: MeasuredRounds) -> bool:
        """Whether somebody would be refused for its clock by few turns. Of two, one that the machine delayed is
        enough for that; of six their median is not moved by it."""
        if len(measured.rounds) >= timing.MIN_ROUNDS:
            return False
        turns = self._turns(measured.deciding)
        return any(refuse_clock(own, turns[BASELINE]) for name, own in turns.items() if name != BASELINE)

    def _let_go(self, measured: MeasuredRounds, wanted: Rounds) -> None:
        """Whoever is slower than the leader beyond doubt, and of whose gates none is open, leaves the rounds of this
        batch size. Looked at after each whole pair of rounds, like what ends them."""
        holds, rounds, number = self._request.holds, measured.deciding, len(measured.rounds)
        if holds is None or len(rounds) < timing.MIN_ROUNDS or number % 2:
            return
        here = {name: turns for name, turns in self._by_name(rounds).items() if name != BASELINE}
        hold = lambda name: holds(name, self._so_far(name, rounds, wanted))  # noqa: E731
        others = len(self._runners) - 1
        for name, leader in leaving(here, hold, candidates=others, seed=wanted.seed).items():
            measured.all_count = measured.all_count or rounds is measured.rounds
            self._left[name] = leader
            self._progress(f"{name} left the rounds of batch {wanted.batch_size} after {number}: it is behind {leader}")

    def _so_far(self, name: str, rounds: Sequence[Round], wanted: Rounds) -> Measurement:
        """What is known of it by these rounds, with room for what rounds of one process can't show."""
        turns, runner = self._turns(rounds), self._runners[name]
        others = len(self._runners) - 1
        ratio = one_process(latencies(turns[BASELINE]), latencies(turns[name]), others, wanted.seed)
        return Measurement(
            timings=(*runner.timings, with_ratio(self._timing(turns[name], wanted), ratio)),
            load_s=runner.load_s,
            peak_memory_bytes=runner.peak_memory_bytes,
        )

    def _shorten(self, pace: Pace, last: Round, rounds: int, now_s: float) -> bool:
        """Shorter turns from now on, where enough rounds would not fit otherwise; those before don't count then."""
        turns = {name: turn for name, turn in last.items() if name in self._runners}
        shorter = pace.shorter_turns({name: self._runners[name].calls for name in turns}, turns, rounds, now_s)
        for name, calls in shorter.items():
            self._runners[name].shorten(calls)
            self.shares[name] = self._runners[name].share
        return bool(shorter)

    def _refuse_turns(self, rounds: Sequence[Round], answers: AnswerLog) -> bool:
        """Drop whose latencies can't be believed, or whose answers were others than those that were proven. True where
        one of these disturbed the others."""
        turns = self._turns(rounds)
        named = {"the original" if name == BASELINE else name: own for name, own in turns.items()}
        room, disturbed = partial(self._room, answers.batch_size), False
        for name in list(self._runners):
            self._guarded(name, partial(Participant.look_at_memory, room=room))
            if name == BASELINE or name not in self._runners:
                continue
            problem = ""
            if self._proof is not None and name in self._proof.gates:
                problem = answers.refuse(name, BASELINE, self._proof)
            beside = refuse_disturber(name, named)
            disturbed = disturbed or bool(beside)
            problem = problem or beside
            if problem := problem or refuse_turns(turns[name], turns[BASELINE][: len(turns[name])], self._threads):
                self._drop(name, WorkerError("exception", problem))
        return disturbed

    def _room(self, batch_size: int) -> tuple[int, int]:
        """As `Participant.look_at_memory` asks. The inputs of two turns may lie in memory, each with what they were
        made by."""
        samples = open_samples(self._samples)
        files = sum(array.nbytes for array in samples.inputs.values())
        return MEASURING_BYTES + 4 * turn_bytes(samples, batch_size), files

    def _drop_far_slower(self, first: Sequence[Round], leads: Sequence[str], wanted: Rounds) -> None:
        rounds = self._turns(first)
        compared = {name: latencies(turns) for name, turns in rounds.items() if name != BASELINE or name in leads}
        for name, (leader, times) in timing.far_slower(compared, leads).items():
            runner = self._runners.pop(name)
            runner.timings.append(self._summary(name, rounds, wanted))
            whose = "the original" if leader == BASELINE else leader
            why = (
                f"dropped after {len(rounds[name])} rounds: "
                f"its latency was at least {times:.3g} times that of {whose} in each"
            )
            self._dropped[name] = (runner, why)
            self._end(name)
            self._progress(f"{name} {why}")

    def _round(self, number: int, wanted: Rounds, answers: AnswerLog, longest_s: float) -> tuple[Round, bool]:
        """One turn for each, of `longest_s` at most, and whether other processes left us the cores meanwhile."""
        before, turns = self._usage(), {}
        names = tuple(name for name in self._runners if name not in self._left)
        checked_seed, folder = answers.begin_round() if self._proof is not None else (None, None)
        prepare = partial(
            Participant.prepare, samples=self._samples, batch_size=wanted.batch_size, checked_seed=checked_seed
        )
        order = timing.schedule(names, number, wanted.seed)
        began_s = time.monotonic()
        self._guarded(order[0], prepare)
        for place, name in enumerate(order):
            others = {other: runner.cpu_s() for other, runner in self._runners.items() if other != name}
            self._guarded(name, partial(Participant.time, longest_s=longest_s))
            beside = {
                other: max(0.0, (self._runners[other].cpu_s() or used) - used)
                for other, used in others.items()
                if used is not None and other in self._runners
            }
            rest = partial(Participant.rest, into=folder / str(place) if folder is not None else None)
            if (turn := self._rest_beside(name, rest, order[place + 1 : place + 2], prepare)) is not None:
                ended_s = time.monotonic()
                turns[name] = replace(turn, took_s=ended_s - began_s, beside_s=beside)
                began_s = ended_s
        after = self._usage()
        foreign = disturbance.foreign_cores(before, after)
        turns = {name: replace(turn, foreign_cores=foreign) for name, turn in turns.items()}
        if checked_seed is not None and folder is not None:
            answers.end_round(checked_seed, folder, turns)
        if len(turns) == len(names):  # what a process has used is not counted any more when it has ended
            self._load.add(before, after)
        return turns, not disturbance.disturbed(before, after, self._threads, self._cores)

    def _rest_beside(
        self, name: str, rest: Callable[[Participant], Turn], following: Sequence[str], prepare: Callable[..., None]
    ) -> Turn | None:
        """A turn's end, and meanwhile the inputs of the turn that follows it, where the machine has a core for each: a
        runtime's threads look for work for up to 55 ms before they sleep, which is longer than the turn."""
        if not following or not self._side_by_side:
            turn = self._guarded(name, rest)
            for other in following:
                self._guarded(other, prepare)
            return turn
        preparing = self._meanwhile.submit(copy_context().run, self._guarded, following[0], prepare)
        turn = self._guarded(name, rest)
        preparing.result()
        return turn

    def _usage(self) -> disturbance.Usage:
        return self._usage_there() if self._usage_there is not None else disturbance.usage()

    def _turns(self, rounds: Sequence[Round]) -> dict[str, list[Turn]]:
        """Of each participant; of one that left early those of the first rounds."""
        return {name: [turns[name] for turns in rounds if name in turns] for name in self._runners}

    def _by_name(self, rounds: Sequence[Round]) -> dict[str, list[list[float]]]:
        """Of those that are still in the rounds."""
        return {name: latencies(turns) for name, turns in self._turns(rounds).items() if name not in self._left}

    def time_on_one_thread(self, source: SourceModel) -> None:
        """The baseline with one thread, at the batch sizes at which its threads waited for cores. Its process is asked
        nothing after that."""
        if not self._in_doubt_s:
            return
        self._progress("timing the original with one thread")
        base = self._runners[BASELINE]
        alone = time_on_one_thread(base.worker, source, self._target, self._samples, self._in_doubt_s)
        base.timings = [replace(known, one_thread_s=alone.get(known.batch_size, ())) for known in base.timings]

    def measurements(self) -> dict[str, Measurement]:
        """By participant. The baseline's notes tell of all of them."""
        busy = self._load.note(self._threads, self._cores)
        notes = tuple(filter(None, (busy, self._load.limit_note())))
        everybody = {name: (runner, "") for name, runner in self._runners.items()} | self._dropped
        return {
            name: Measurement(
                timings=tuple(runner.timings),
                load_s=runner.load_s,
                peak_memory_bytes=runner.peak_memory_bytes,
                stopped_early=dropped,
                busy=bool(busy),
                notes=notes if name == BASELINE else (*_notes(runner), *self._notes.get(name, ())),
            )
            for name, (runner, dropped) in everybody.items()
        }

    def _guarded(self, name: str, act: Callable[[Participant], T]) -> T | None:
        """What it answers; None when the participant crashed, and is dropped, or was dropped before."""
        if name not in self._runners:
            return None
        try:
            return act(self._runners[name])
        except CompileStageError as error:
            self._drop(name, error)
            return None

    def _drop(self, name: str, error: CompileStageError) -> None:
        if name == BASELINE or isinstance(error, StorageError):
            raise error  # without the baseline no ratio means anything; for a full disk nobody is to blame
        if isinstance(error, WorkerError) and error.killed and not self._request.after_a_kill:
            raise error
        self._runners.pop(name, None)
        self._end(name)
        self.failures[name] = Failure(
            kind=error.kind if isinstance(error, WorkerError) else "exception",
            step="benchmark",
            problem=error.problem,
            detail=error.detail if isinstance(error, WorkerError) else "",
        )

    def _end(self, name: str) -> None:
        """End its process. It may go on computing as long as it lives, and who takes no turns is not watched."""
        if name in self._own:  # it failed before its process was started otherwise
            self._own[name].close()

    def _summary(self, name: str, rounds: Mapping[str, list[Turn]], wanted: Rounds) -> Timing:
        timed = self._timing(rounds[name], wanted)
        if name == BASELINE:
            return timed
        base, own = latencies(rounds[BASELINE]), latencies(rounds[name])
        return with_ratio(timed, speedups.ratio_interval(base, own, seed=wanted.seed))

    def _timing(self, turns: Sequence[Turn], wanted: Rounds) -> Timing:
        new_tokens = self._target.generation.new_tokens
        return timing_of(turns, wanted.batch_size, self._context.hardware.fingerprint, new_tokens)

    def _progress(self, message: str) -> None:
        self._context.events.progress("benchmark", self._request.label, message)


def _notes(runner: Participant) -> tuple[str, ...]:
    memory = runner.memory
    grown: tuple[str, ...] = ()
    if runner.grown_bytes:
        grown = (f"{runner.grown_bytes / 1e6:.3g} MB of its peak memory it took in later calls than the first",)
    if not memory.others_bytes:
        return grown
    others = "another process" if memory.others == 1 else f"{memory.others} other processes"
    return (
        *grown,
        f"{memory.others_bytes / 1e6:.3g} MB of its peak memory are of {others} that it started",
    )
