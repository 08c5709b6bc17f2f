"""What the cache holds of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import factories
import numpy as np

from compile_stage.core.digest import plain
from compile_stage.core.records import DataSpec, SampleSet
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.measure.readers import SampleRequest
from compile_stage.steps.sample import sample

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 4)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", 2)),),
)


class CountingWorker:
    """Makes a sample set, and counts how often."""

    def __init__(self) -> None:
        self.made = 0

    def call(self, function: str, /, **arguments: Any) -> Any:
        assert function == "prepare_samples"
        self.made += 1
        return plain(SampleSet(path=arguments["into"], source="file", count=4, digest="sha256:0", real=True))


def test_another_model_makes_its_own_samples_of_the_same_file(tmp_path: Path) -> None:
    """Broken: a text model would be proven on the token numbers of another model's tokenizer, for as long as both have
    inputs of the same names and shapes."""
    file = tmp_path / "texts.npz"
    np.savez(file, x=np.zeros((4, 4), np.float32))
    spec = DataSpec(source=f"file:{file}")
    context = factories.run_context(tmp_path)
    worker: Any = CountingWorker()
    one, other = factories.source(digest="sha256:a"), factories.source(digest="sha256:b")
    for source in (one, one, other):
        sample(context, worker, source, "validation", SampleRequest(spec=spec, signature=SIGNATURE, seed=0))
    assert worker.made == 2


def test_the_samples_of_a_file_are_known_wherever_it_lies(tmp_path: Path) -> None:
    """Broken: each job of a CI, whose checkout lies in a folder of its own, would make the samples anew; or a report
    would name the file of another job; or a file that is read in another way would have the samples of the first."""
    context = factories.run_context(tmp_path)
    worker: Any = CountingWorker()
    for place, made in (("a/x.npz", 1), ("b/x.npz", 1), ("b/x.csv", 2)):
        file = tmp_path / place
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"the same")
        spec = DataSpec(source=f"file:{file}")
        request = SampleRequest(spec=spec, signature=SIGNATURE, seed=0)
        assert sample(context, worker, factories.source(), "validation", request).source == spec.source
        assert worker.made == made
