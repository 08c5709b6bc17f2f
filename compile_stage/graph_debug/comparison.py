"""Two model files, and the samples on which they are compared."""

from __future__ import annotations

from compile_stage.core.records import SampleSet, record


@record
class Comparison:
    """Two model files that are run side by side.

    Attributes:
        title: For people: a job's id, or the names of the files.
        hint: What OpenVINO executes a `.xml` in.
        precision: Of the candidate; empty where it is read from the file.
        worst: Indices of the samples that the validation found worst, worst first: they are looked at first.
    """

    title: str
    reference: str
    candidate: str
    samples: SampleSet
    precision: str = ""
    hint: str = "f32"
    threads: int = 2
    worst: tuple[int, ...] = ()

    def order(self, count: int) -> list[int]:
        """`count` samples of the set, by index: the worst ones, then the others as they lie."""
        every = dict.fromkeys([*self.worst, *range(self.samples.count)])
        return [index for index in every if index < self.samples.count][:count]
