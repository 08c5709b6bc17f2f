"""One measurement from its first start to its last: who is started, when, and what comes of all starts together.

Everybody is started once; who may win, again, until the starts agree or the time is over. What they are asked within
one start is in `interleaved`, how much time each has and how starts are merged in `restarts`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field, replace

from compile_stage.core.context import Context
from compile_stage.core.ports import WorkerLimits
from compile_stage.core.records import Artifact, Failure, Measurement, SourceModel
from compile_stage.measure import speedups, stats
from compile_stage.measure.drafts import Drafts
from compile_stage.measure.interleaved import BASELINE, Interleaved, Rounds
from compile_stage.measure.request import MeasurementRequest
from compile_stage.measure.restarts import LEAST_HALF_WIDTHS, Schedule, agree, contenders, differences, merge
from compile_stage.measure.timing import schedule


@dataclass
class ProcessStarts:
    """One measurement: who takes part, and what is asked of it.

    Attributes:
        models: By participant's name; the baseline is one.
        load_s: What the first start of each took, in seconds.
        failures: Of those that crashed.
        shares: Of a whole turn, where turns had to become shorter, by who takes part: the next start of the same
            begins with it. In a round of fewer there is time for longer turns.
        alone: So many starts load one model after the other, since load times are published.
    """

    context: Context
    request: MeasurementRequest
    models: dict[str, SourceModel | Artifact]
    schedule: Schedule
    load_s: dict[str, float] = field(default_factory=dict)
    shares: dict[frozenset[str], dict[str, float]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    alone: int = 1

    def measure(self) -> dict[str, Measurement]:
        """Everybody once, and those who may win in as many new processes as there is time for."""
        with ExitStack() as stack, self.context.alone():
            drafts = Drafts(self.context.scratch, stack)
            for name, model in self.models.items():
                if isinstance(model, Artifact):  # now: later starts take none of this time
                    drafts.of(model, self.request.baseline_target if name == BASELINE else self.request.target)
            starts = [self._start([], list(self.models), drafts)]
            again = [BASELINE, *contenders(starts[0], BASELINE)]
            self.schedule.limit(sum(self.load_s[name] for name in again))
            joining = self._joining(starts[0], drafts)
            again += joining
            half_width = 0.0
            while len(again) > 1 and len(starts) < self.schedule.starts and not half_width:
                left = [name for name in again if name not in self.failures]
                starts.append(self._start(starts, left, drafts))
                if joining and len(starts) == 2:
                    again = self._without_slow_tries(again, joining, starts[1])
                few = speedups.FEW_PROCESSES + any(name in again for name in joining)
                if len(starts) == few < self.schedule.starts:
                    half_width = self._agreed(starts, left)
                    if not half_width and self._is_open(starts, left):
                        self.schedule.more(len(starts))
        if self.request.first_look:
            return starts[0]
        for name in joining:  # who joined and failed was a try, and not one of the policy's jobs
            if self.failures.pop(name, None) is not None:
                starts = [{own: m for own, m in start.items() if own != name} for start in starts]
        measured = merge(starts, BASELINE, seed=self.request.seed, reach=math.log1p(half_width))
        restart_s, others = sum(self.load_s.get(name, 0.0) for name in again), bool(set(measured) - set(again))
        if note := self.schedule.note(restart_s, others=others):
            base = measured[BASELINE]
            measured[BASELINE] = replace(base, notes=(*base.notes, note))
        return measured

    def _agreed(self, starts: Sequence[Mapping[str, Measurement]], names: Sequence[str]) -> float:
        """How wide intervals are said to be at least, where no more starts are needed: for what is known of speedups,
        for gates, and for the calls that a percentile wants; else 0. Asked once, when each has three starts: to ask
        again and again would end where they agree by chance."""
        sizes = self.request.target.batch_sizes
        if self.request.min_calls and any(self._calls_wanted(starts, names, size) for size in sizes):
            return 0.0
        measured = merge(starts, BASELINE, seed=self.request.seed)
        known = self._may_win(measured, names)
        half_width = next((one for one in LEAST_HALF_WIDTHS if agree(measured, known, BASELINE, one)), 0.0)
        if not half_width:
            return 0.0
        wide = merge(starts, BASELINE, seed=self.request.seed, reach=math.log1p(half_width))
        return half_width if all(self.request.decided(name, wide[name]) for name in known) else 0.0

    def _is_open(self, starts: Sequence[Mapping[str, Measurement]], names: Sequence[str]) -> bool:
        """Whether a gate is open of one that would win if it held: more starts are made then before it is called too
        uncertain.

        Asked once, and nobody passes by these starts alone. So what misses its limit passes hardly more often than with
        the number of starts set before (Chen, DeMets and Lan, Statistics in Medicine 23:1023, 2004; simulated:
        docs/benchmarks.md). To go on until a gate holds would make it pass.
        """
        if self.request.starts is not None:
            return False
        measured, holds = merge(starts, BASELINE, seed=self.request.seed), self.request.holds
        timings = {name: measured[name].timings for name in self._may_win(measured, names)}
        latency_s = {name: stats.median(known[0].latency_s) for name, known in timings.items() if known}
        held = [s for n, s in latency_s.items() if holds is not None and holds(n, measured[n])]
        ahead = [name for name, seconds in latency_s.items() if seconds < min(held, default=math.inf)]
        return not all(self.request.decided(name, measured[name]) for name in ahead)

    def _may_win(self, measured: Mapping[str, Measurement], names: Sequence[str]) -> list[str]:
        """The candidates among these that miss no gate: who does can't win, and nobody is behind it."""
        known, holds = [name for name in names if name in measured and name != BASELINE], self.request.holds
        return [name for name in known if holds is None or holds(name, measured[name]) is not False]

    def _joining(self, first: Mapping[str, Measurement], drafts: Drafts) -> list[str]:
        """Who joins the later starts, after the first: a start more, so that a speedup has as many of theirs. What
        making and proving them takes is none of the time for measuring."""
        if self.request.more is None or self.request.first_look or self.schedule.starts < speedups.FEW_PROCESSES:
            return []
        began = time.monotonic()
        more, proof = self.request.more(first)
        self.request = replace(self.request, proof=proof)
        for name, artifact in more.items():
            self.models[name] = artifact
            drafts.of(artifact, self.request.target)
        self.schedule.extend(time.monotonic() - began)
        if more:
            self.schedule.one_more()
            self.alone += 1
        return list(more)

    def _without_slow_tries(
        self, names: Sequence[str], joined: Sequence[str], start: Mapping[str, Measurement]
    ) -> list[str]:
        """Who is started again after the first start of those who joined: of these the contenders, as of all others
        after theirs. Without any, the start that was added for them is not needed."""
        near = contenders(start, BASELINE)
        kept = [name for name in joined if name in near]
        if not kept:
            self.schedule.one_less()
        return [name for name in names if name in kept or name not in joined]

    def _start(
        self, earlier: Sequence[Mapping[str, Measurement]], members: Sequence[str], drafts: Drafts
    ) -> dict[str, Measurement]:
        """These in fresh processes, in turns at each batch size."""
        request, target, number = self.request, self.request.target, len(earlier)
        limits = WorkerLimits.within(request.budget, max(target.threads, request.baseline_target.threads))
        with ExitStack() as stack:
            interleaved = Interleaved(self.context, request, stack, drafts)
            interleaved.shares = self.shares.setdefault(frozenset(members), {})
            # Memory is no question: all of them are open at once in any case.
            several = number >= self.alone and self.context.engine.max_parallel(memory_bytes=1) > 1
            self._open(interleaved, self._in_order(members, number), limits, beside=several)
            leads = self._begin(interleaved) if number == 0 else None
            # A quick comparison ends by itself, after a few rounds: on a slow machine it needs all of them.
            left_s = math.inf if request.first_look else self.schedule.seconds_of(number)
            for batch_size in target.batch_sizes:
                rounds = Rounds(
                    batch_size=batch_size,
                    seconds=left_s / len(target.batch_sizes),
                    seed=request.seed + number,
                    min_calls=self._calls_wanted(earlier, members, batch_size),
                    first_look=request.first_look,
                    overtime=request.overtime,
                    starts=self.schedule.starts,
                    rough_s=self.schedule.rough_s / len(target.batch_sizes),
                    differ=differences(earlier, BASELINE, batch_size),
                    may_leave=number == 0,  # only who may win is started again, and stays
                )
                interleaved.run(rounds, leads)
                leads = None
            if isinstance(source := self.models[BASELINE], SourceModel) and not request.first_look:
                began = time.monotonic()
                interleaved.time_on_one_thread(source)
                self.schedule.extend(time.monotonic() - began)
            self.schedule.extend(interleaved.overtime_s)
            self.failures.update(interleaved.failures)
            return interleaved.measurements()

    def _open(self, interleaved: Interleaved, members: Sequence[str], limits: WorkerLimits, *, beside: bool) -> None:
        """Everybody in a fresh process.

        Args:
            beside: The original is loaded beside the others: it mostly takes as long as all of them. A start whose load
                times are published loads one after the other.
        """

        def enter(name: str) -> None:
            began = time.monotonic()
            interleaved.enter(name, self.models[name], limits)
            if not beside:
                self.load_s[name] = time.monotonic() - began

        thread = ThreadPoolExecutor(1)
        try:
            loading = thread.submit(copy_context().run, enter, BASELINE) if beside else None
            for name in members:
                if loading is None or name != BASELINE:
                    enter(name)
            if loading is not None:
                loading.result()
        finally:
            thread.shutdown(wait=False)  # where another failed, or Ctrl-C came, the original's worker is ended

    def _in_order(self, members: Sequence[str], number: int) -> list[str]:
        """Another order in each start: who is opened first may be faster or slower as long as it lives, and would be so
        in all of them. The smallest first, behind the original, where memory may not be enough for all."""
        sizes = {name: model.size_bytes for name in members if isinstance(model := self.models[name], Artifact)}
        free = self.context.free_memory_bytes()
        if free is not None and sum(sizes.values()) > free:
            return sorted(members, key=lambda name: sizes.get(name, 0))
        # Two later starts, of the same models, are a pair: an order and its mirror image.
        return list(schedule(members, number + 1, self.request.seed))

    def _calls_wanted(
        self, earlier: Sequence[Mapping[str, Measurement]], members: Sequence[str], batch_size: int
    ) -> int:
        """Of this start: its share of what the earlier ones left, since there may be fewer starts than they thought."""
        done = [sum(_calls(start, name, batch_size) for start in earlier) for name in members]
        left = max(0, self.request.min_calls - min(done, default=0))
        return math.ceil(left / max(1, self.schedule.starts - len(earlier)))

    def _begin(self, interleaved: Interleaved) -> list[str] | None:
        """The clock starts; who the others must not be far slower than."""
        self.schedule.begin(sum(self.load_s.values()), len(self.models))
        if not self.request.first_look:
            interleaved.wait_until_quiet(self.schedule.seconds)
        if self.request.drop_behind is not None:
            sizes = {name: model.size_bytes for name, model in self.models.items() if isinstance(model, Artifact)}
            return interleaved.who_hold(self.request.drop_behind, sizes)
        return [BASELINE] if self.request.first_look else None


def _calls(start: Mapping[str, Measurement], name: str, batch_size: int) -> int:
    timing = start[name].timing(batch_size) if name in start else None
    return len(timing.latency_s) if timing is not None else 0
