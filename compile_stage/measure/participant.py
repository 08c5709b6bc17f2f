"""One model of an interleaved measurement in its process, and what the stage sees of its turns from outside."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from compile_stage.core.errors import InternalError, WorkerError
from compile_stage.core.ports import MeteredCall, Worker, WorkerMemory, WorkerUsage
from compile_stage.core.records import SampleSet, Timing, record
from compile_stage.measure import timing

WARM_UP_S = 1.5
"""At most so long until the latencies are steady; most models need a few calls."""

MEASURING_BYTES = 64_000_000
"""What the process of a participant may grow by while it is measured, beside the inputs of its turns: answers that are
kept, and memory that an allocator holds on to."""

_RAN_SHARE = 0.1  # a thread ran in a turn when it had so much of the CPU time of the one that had most


@record
class Turn:
    """One turn: what the worker says of it, and what the stage saw.

    Attributes:
        latency_s: Seconds of each call, by the worker's clock.
        wall_s: Of the call that made them, by the stage's.
        stage_waited_s: The part of `wall_s` in which the stage was ready to take the answer, and waited for a core.
        took_s: Of the round: from the end of the turn before it until it is over. Its inputs are made meanwhile, and
            those of the turn after it while it comes to rest.
        cpu_s: CPU time of the process and all that it started, meanwhile.
        waited_s: Time that their threads waited for a core meanwhile.
        held_up_s: The part of `waited_s` that first threads of processes waited: one of these calls the model, and
            takes the times.
        first_cpu_s: CPU time meanwhile of the first thread of a process that had most of these.
        threads: How many threads ran meanwhile.
        foreign_cores: Cores that other processes than the stage's used in its round.
        idle_s: From the end of its turn before, at rest, to the beginning of this one; 0 for the first.
        idle_cpu_s: CPU time that it used meanwhile, or waited for a core to use.
        beside_s: Of each other participant: CPU time that it used while this one was timed, where the engine tells.
        answers: By number of the checked batch: output name → `.npy` file.
        first_s: Of a language model: seconds of each call for the first token alone, by the worker's clock, made in
            turns with those of `latency_s`.
        first_answers: To these, as `answers`.
    """

    latency_s: tuple[float, ...]
    wall_s: float = 0.0
    stage_waited_s: float = 0.0
    took_s: float = 0.0
    cpu_s: float = 0.0
    waited_s: float = 0.0
    held_up_s: float = 0.0
    first_cpu_s: float = 0.0
    threads: int = 0
    foreign_cores: float = 0.0
    idle_s: float = 0.0
    idle_cpu_s: float = 0.0
    beside_s: Mapping[str, float] = field(default_factory=dict)
    answers: tuple[Mapping[str, str], ...] = ()
    first_s: tuple[float, ...] = ()
    first_answers: tuple[Mapping[str, str], ...] = ()

    @property
    def claimed_s(self) -> float:
        """All latencies of the turn."""
        return sum(self.latency_s) + sum(self.first_s)


@dataclass
class Participant:
    """A worker with its model open.

    Attributes:
        memory: What it held when it had run once at each batch size.
        grown_bytes: What its own process took beyond that in later calls, and measuring does not explain.
        calls: Of a turn, at the batch size that is measured.
        share: Of a whole turn's calls: less than 1 where turns had to become shorter (`rounds.Pace`).
        writes_tokens: It is a language model.
    """

    worker: Worker
    load_s: float
    memory: WorkerMemory
    calls: int = 1
    share: float = 1.0
    writes_tokens: bool = False
    grown_bytes: int = 0
    timings: list[Timing] = field(default_factory=list)
    _rested: WorkerUsage | None = None
    _prepared: MeteredCall | None = None
    _timed: MeteredCall | None = None

    @property
    def peak_memory_bytes(self) -> int:
        """The process's own peak, what it took since then, and what those that it started hold."""
        return self.memory.peak_bytes + self.grown_bytes + self.memory.others_bytes

    def warm_up(self, samples: SampleSet, batch_size: int) -> None:
        """Call until it is steady, and see how many calls fill a turn."""
        warmed = self.worker.call("warm_up", samples=samples, batch_size=batch_size, seconds=WARM_UP_S)
        self.calls = max(1, round(self.share * timing.calls_of_a_turn(warmed["latency_s"])))
        self._rested = None

    def shorten(self, calls: int) -> None:
        """So many calls a turn from now on, and as small a share of those at the batch sizes to come: it's the same
        machine."""
        self.share *= calls / self.calls
        self.calls = calls

    def prepare(self, samples: SampleSet, batch_size: int, checked_seed: int | None) -> None:
        """Make the inputs of the next turn. Another participant may come to rest meanwhile: nothing is timed.

        Args:
            checked_seed: Chooses the batches whose answers are kept (`timed_inputs`); None for none.
        """
        self._prepared = self.worker.metered(
            "prepare_turn", samples=samples, batch_size=batch_size, calls=self.calls, seed=secrets.randbits(48),
            checked_seed=checked_seed,
        )  # fmt: skip

    def time(self, longest_s: float = timing.LONGEST_TURN_S) -> None:
        """Make the timed calls of the turn that was prepared, when everybody else is at rest.

        Args:
            longest_s: It ends after so long, with fewer calls, but for the first.
        """
        self.worker.call("call_untimed", seconds=self.share * timing.UNTIMED_S)  # shorter where turns are
        self._timed = self.worker.metered("time_turn", seconds=longest_s)

    def rest(self, into: Path | None) -> Turn:
        """Keep the answers of the turn that was timed, and come to rest.

        Args:
            into: Folder for the kept answers; None for none.
        """
        if into is not None:
            into.mkdir(parents=True)
        prepared, timed, folder = self._prepared, self._timed, str(into) if into else None
        if prepared is None or timed is None:
            raise InternalError("no turn of this participant was timed")
        first = self.worker.call("first_tokens", into=folder) if self.writes_tokens else {}
        ended = self.worker.metered("end_turn", into=folder)
        first_s = tuple(first.get("latency_s", ()))
        if self.writes_tokens and len(first_s) != len(timed.value):
            problem = f"it timed {len(first_s)} first tokens beside {len(timed.value)} generations"
            raise WorkerError("exception", problem)
        rested, self._rested = self._rested, ended.after
        self._prepared = self._timed = None
        return Turn(
            latency_s=tuple(timed.value),
            wall_s=timed.wall_s,
            stage_waited_s=timed.stage_waited_s,
            cpu_s=timed.after.cpu_s - timed.before.cpu_s,
            waited_s=waited_between(timed.before, timed.after),
            held_up_s=waited_between(timed.before, timed.after, first_only=True),
            first_cpu_s=first_threads_cpu(timed.before, timed.after),
            threads=threads_that_ran(timed.before.threads, timed.after.threads),
            idle_s=prepared.before.at_s - rested.at_s if rested else 0.0,
            idle_cpu_s=_wanted(rested, prepared.before) if rested else 0.0,
            answers=tuple(ended.value),
            first_s=first_s,
            first_answers=tuple(first.get("answers", ())),
        )

    def cpu_s(self) -> float | None:
        """CPU time that it has used so far; None where the engine does not tell without a call."""
        usage: Callable[[], WorkerUsage] | None = getattr(self.worker, "usage", None)
        return usage().cpu_s if usage is not None else None

    def look_at_memory(self, room: Callable[[], tuple[int, int]]) -> None:
        """Count what processes that it started since then hold, and by what its own grew in later calls: what leaks, or
        keeps every answer.

        Args:
            room: Bytes of its own that measuring may have taken, and those of the files with the samples. Asked where
                it grew.
        """
        now = self.worker.memory()
        if now.others_bytes > self.memory.others_bytes:
            self.memory = replace(self.memory, others_bytes=now.others_bytes, others=now.others)
        peak, held = now.peak_bytes - self.memory.peak_bytes, now.held_bytes - self.memory.held_bytes
        if max(peak, held) > MEASURING_BYTES:
            own, files = room()
            self.grown_bytes = max(self.grown_bytes, held - own, peak - own - files)


def _wanted(before: WorkerUsage, after: WorkerUsage) -> float:
    """CPU seconds that were used, or waited for."""
    return after.cpu_s - before.cpu_s + waited_between(before, after)


def waited_between(before: WorkerUsage, after: WorkerUsage, *, first_only: bool = False) -> float:
    """Seconds that threads waited for a core between two readings; those that ended since are left out.

    The kernel adds a wait when it is over, the part before the first reading too. A thread can't have waited longer
    than from one reading to the other, less what it ran: a machine that held a thread back for 200 ms between two turns
    would otherwise make five threads of it in a turn of 40 ms.

    Args:
        first_only: Of the first thread of each process alone, whose number is the process's.
    """
    between_s = after.at_s - before.at_s
    waited_s = 0.0
    for thread, wait_s in after.waits.items():
        if first_only and not _is_first(thread):
            continue
        ran_s = after.threads.get(thread, 0.0) - before.threads.get(thread, 0.0)
        waited_s += min(wait_s - before.waits.get(thread, 0.0), max(0.0, between_s - ran_s))
    return waited_s


def first_threads_cpu(before: WorkerUsage, after: WorkerUsage) -> float:
    """CPU seconds between two readings of the first thread of a process that had most; 0 where no thread is counted."""
    used = (ran_s - before.threads.get(name, 0.0) for name, ran_s in after.threads.items() if _is_first(name))
    return max(used, default=0.0)


def _is_first(thread: str) -> bool:
    """Of `process:thread`: the first thread of a process has its number."""
    return len(set(thread.split(":"))) == 1


def threads_that_ran(before: Mapping[str, float], after: Mapping[str, float]) -> int:
    """Threads with at least a tenth of the CPU time of the one that had most, between two readings; one, when that is
    too little to be counted."""
    used = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
    most = max(used, default=0.0)
    return sum(seconds >= _RAN_SHARE * most for seconds in used) if most > 0 else 1


def latencies(turns: Sequence[Turn]) -> list[list[float]]:
    """Of each turn, as the statistics take them."""
    return [list(turn.latency_s) for turn in turns]
