"""What is asked of one interleaved measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from compile_stage.core.records import Artifact, Budget, Gate, Measurement, SampleSet, Target, record
from compile_stage.measure.rounds import OVERTIME
from compile_stage.measure.timed_answers import Proof

MOST_TRIES = 3
"""So many runs measure what leaves a limit open, while nothing changes. Each lets pass about one in twenty of what is
just at its limit, so who ran until it passed would get it through. Fewer would refuse a good artifact for a neighbour's
work."""


def _any(name: str, measured: Measurement) -> bool:
    return True


@record
class MeasurementRequest:
    """On what, for how long, and what of it must be sure.

    Attributes:
        label: Whose measurement it is, for events.
        samples: The batches are made of these.
        target: Its batch sizes, threads and device.
        budget: Its `measure_seconds` is for the rounds over all batch sizes, and `overtime` times that where a start
            has fewer than 6 of them (`measure.rounds`); warm-up and loading come on top.
        seed: For the order of turns and the intervals.
        min_calls: So many calls of each are wanted even where the ratios are known sooner.
        decided: False for a participant and its measurement that came out too unsteady to answer what is asked of it.
            The next run, which may find a quieter machine, measures such a one again, `MOST_TRIES` times in all.
        each_time: What is open is measured each time, and so is who answered wrongly before: a validation has no
            `--remeasure`, and who repeats one by itself counts how often (`service.requalification`).
        drop_behind: Where given, whoever is far slower than another that holds these gates (on size and memory) is
            dropped after a first pair of rounds, and its measurement says so.
        overtime: Times the seconds that rounds may take where there are too few of them.
        left_s: Seconds for the rounds, where `budget.minutes` leaves less than the above. How many they are is another
            number in each run, and such a measurement is kept all the same.
        holds: Where given, whether a candidate's gates hold by the last timing of what is known of it, None while one
            is open: who is slower beyond doubt than one whose gates hold leaves the rounds when its own are decided
            (`measure.leaving`). None where everybody stays to the end.
        starts: So many processes of each participant at most; None for as many as `measure.restarts` finds time for.
        more: Where given, asked between the first start and the later ones, with what the first showed: artifacts that
            join the later starts, and the proof with theirs. They have one start less than the others.
        first_look: That pair is all that is wanted, and the baseline is the one to be slower than.
        baseline_threads: Of a baseline that is an artifact with threads of its own; None for the target's.
        proof: What answers are compared with that are given while they are timed; who is not among its gates is not
            judged by them. None where the baseline is not the original, whose artifacts were compared with it in a
            measurement before.
        after_a_kill: It is made once more, since somebody killed the process of a participant: who is killed now has
            failed.
    """

    label: str
    samples: SampleSet
    target: Target
    budget: Budget
    seed: int
    min_calls: int = 0
    decided: Callable[[str, Measurement], bool] = _any
    drop_behind: tuple[Gate, ...] | None = None
    overtime: float = OVERTIME
    left_s: float | None = None
    holds: Callable[[str, Measurement], bool | None] | None = None
    starts: int | None = None
    more: Callable[[Mapping[str, Measurement]], tuple[Mapping[str, Artifact], Proof | None]] | None = None
    each_time: bool = False
    first_look: bool = False
    baseline_threads: int | None = None
    proof: Proof | None = None
    after_a_kill: bool = False

    @property
    def baseline_target(self) -> Target:
        """The target as the baseline is opened for it."""
        return self.target if self.baseline_threads is None else replace(self.target, threads=self.baseline_threads)
