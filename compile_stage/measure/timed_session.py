"""The open model of a worker, timed: warm-up, quick turns, and the three calls of a turn in a measurement."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.errors import UsageError
from compile_stage.measure import timing
from compile_stage.measure.predict import require_arrays
from compile_stage.measure.samples import open_samples
from compile_stage.measure.timed_inputs import KeptAnswers, TimedInputs, TurnInputs

if TYPE_CHECKING:
    from compile_stage.core.ports import Session
    from compile_stage.core.records import SampleSet
    from compile_stage.core.tensors import Batch

_WARM_UP_BATCHES = 256  # at most, and as many as a turn holds


class TimedSession:
    """A session, with the inputs for its timed calls in memory, so that no disk is timed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._inputs: TimedInputs | None = None
        self._inputs_of: tuple[str, int] | None = None
        self._turn: tuple[TurnInputs, KeptAnswers] | None = None
        self._first: Callable[[Batch], Batch] | None = getattr(session, "first", None)
        self._first_tokens: tuple[list[float], KeptAnswers] | None = None

    @property
    def writes_tokens(self) -> bool:
        """It is a language model's: each call of a turn is made for its first token alone too."""
        return self._first is not None

    def warm_up(self, samples: SampleSet, batch_size: int, seconds: float) -> dict[str, Any]:
        """Call until it is steady (at most `seconds`), as `timing.warm_up` says. With no seconds, one call: no further
        input lies in memory then."""
        run = self._session.run
        batches = cycle(self._inputs_for(samples, batch_size).some(_WARM_UP_BATCHES if seconds else 1, seed=0))
        return timing.warm_up(lambda: require_arrays(run(next(batches))), max_seconds=seconds)

    def quick_turn(self, samples: SampleSet, batch_size: int, seconds: float) -> list[float]:
        """Seconds of each call for about `seconds`, at least one, after some that are not timed."""
        batches = self._inputs_for(samples, batch_size).some(_WARM_UP_BATCHES if seconds else 2, seed=1)
        timing.spread(lambda: self._session.run(batches[-1]))
        latencies = timing.turn(self._session.run, cycle(batches), seconds=seconds)
        timing.settle()
        return latencies

    def prepare(self, samples: SampleSet, batch_size: int, calls: int, seed: int, checked_seed: int | None) -> int:
        """Make the inputs of a turn; returns how many calls will be timed (`TimedInputs.turn`)."""
        inputs = self._inputs_for(samples, batch_size)
        turn = inputs.turn(calls, seed, checked_seed)
        self._turn = turn, KeptAnswers(inputs, turn, checked_seed or 0)
        return len(turn.batches)

    def call_untimed(self, seconds: float) -> None:
        """The calls of the prepared turn that are not timed, just before those that are, for at most about `seconds`
        (`timing.spread`)."""
        turn, _ = self._prepared()
        timing.spread(lambda: self._session.run(turn.first), seconds)

    def run(self, seconds: float) -> list[float]:
        """Seconds of each call of the prepared turn, which ends after about `seconds`. It does nothing else, so that
        the stage's own clock can tell whether they are true."""
        turn, kept = self._prepared()
        if self._first is None:
            return timing.turn(self._session.run, turn.batches, seconds=seconds, keep=kept.keep)
        first = kept.of_same_turn()
        runs, keeps = (self._session.run, self._first), (kept.keep, first.keep)
        latencies, first_s = timing.turn_of_each(runs, turn.batches, seconds=seconds, keep=keeps)
        self._first_tokens = first_s, first
        return latencies

    def first_tokens(self, into: Path | None) -> dict[str, Any]:
        """Of the turn that was timed: seconds of each call for the first token alone (`latency_s`), and what they
        answered (`answers`, as `end` says of the others)."""
        if self._first_tokens is None:
            raise UsageError("no turn of a language model was timed in this worker")
        (latency_s, kept), self._first_tokens = self._first_tokens, None
        return {"latency_s": latency_s, "answers": _written(kept, into, "first-")}

    def end(self, into: Path | None) -> list[dict[str, str]]:
        """Write the answers that were kept into the folder, and come to rest.

        Returns, by number of the checked batch, output name → `.npy` file.
        """
        _, kept = self._prepared()
        self._turn = None
        written = _written(kept, into)
        timing.settle()
        return written

    def _inputs_for(self, samples: SampleSet, batch_size: int) -> TimedInputs:
        if self._inputs is None or self._inputs_of != (samples.digest, batch_size):
            self._inputs = TimedInputs(open_samples(samples), batch_size)
            self._inputs_of = samples.digest, batch_size
        return self._inputs

    def _prepared(self) -> tuple[TurnInputs, KeptAnswers]:
        if self._turn is None:
            raise UsageError("no turn was prepared in this worker")
        return self._turn


def _written(kept: KeptAnswers, into: Path | None, prefix: str = "") -> list[dict[str, str]]:
    """By number of the checked batch: output name → `.npy` file."""
    written: list[dict[str, str]] = []
    for number, answer in enumerate(kept.arrays() if into is not None else ()):
        files = {name: Path(into or "") / f"{prefix}{number}-{place}.npy" for place, name in enumerate(answer)}
        for name, path in files.items():
            np.save(path, answer[name], allow_pickle=False)
        written.append({name: str(path) for name, path in files.items()})
    return written
