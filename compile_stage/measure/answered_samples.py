"""Samples beyond those of the validation set, with the original's answers: artifacts are asked the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from compile_stage.core.errors import CompileStageError
from compile_stage.core.ports import Worker
from compile_stage.core.records import Gate, SampleSet, record
from compile_stage.measure.behaviour import refuse_call
from compile_stage.measure.predict import try_predict
from compile_stage.measure.robustness import round_samples, write_samples

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array


@record
class AnsweredSamples:
    """Some samples, and what the original says of them.

    Attributes:
        batch_size: In which it answered them.
        outputs: Output name → `.npy` file of its answers.
    """

    samples: SampleSet
    batch_size: int
    outputs: Mapping[str, str]

    def moved(self, move: Callable[[str], str]) -> AnsweredSamples:
        """With other paths."""
        samples = replace(self.samples, path=move(self.samples.path))
        return replace(self, samples=samples, outputs={name: move(path) for name, path in self.outputs.items()})

    def rounded(self, like: SampleSet) -> AnsweredSamples:
        """In the types of `like`, which artifacts take, where the original was asked in wider ones."""
        return replace(self, samples=round_samples(self.samples, like))


def ask(
    worker: Worker, batch: Mapping[str, Array], like: SampleSet, batch_size: int, samples_in: Path, answers_in: Path
) -> AnsweredSamples | None:
    """Have the original, which the worker has open, answer these samples; None where it refuses them.

    Args:
        like: Of which set they are made.
        answers_in: Not below the samples' folder: that is handed to whoever runs an artifact.
    """
    made = write_samples(batch, like, samples_in)
    outputs = try_predict(worker, made, batch_size, answers_in)
    if isinstance(outputs, CompileStageError):
        return None
    return AnsweredSamples(samples=made, batch_size=batch_size, outputs=outputs)


def are_apart(
    gates: Sequence[Gate], own: Mapping[str, Array], original: Mapping[str, Array], rows: slice, size: int, seed: int
) -> bool:
    """Whether the artifact's answers to these rows are others than the original's.

    Args:
        gates: Those that few rows without labels can be judged by.
        size: Rows of a batch, for the record.
    """
    mine, theirs = ({name: array[rows] for name, array in side.items()} for side in (own, original))
    return bool(refuse_call(gates, mine, theirs, size, seed))
