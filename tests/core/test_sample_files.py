"""Samples on disk are found by the tensor's name, whatever file names can hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from factories import prepare

from compile_stage.core.errors import IntegrityError
from compile_stage.core.records import DataSpec, SampleSet
from compile_stage.core.sample_files import read_batches, read_index
from compile_stage.core.tensors import Dim, Signature, TensorSpec

NAME = "serving_default/x:0"


def signature(batch: Dim) -> Signature:
    return Signature(inputs=(TensorSpec(name=NAME, dtype="float32", shape=(batch, 3)),), outputs=())


@pytest.fixture
def samples(tmp_path: Path) -> SampleSet:
    arrays = {NAME: np.arange(15, dtype=np.float32).reshape(5, 3)}
    return prepare(DataSpec(source="input_example"), signature("batch"), tmp_path / "samples", seed=0, example=arrays)


def test_an_input_whose_name_is_no_file_name_is_calibrated_on(samples: SampleSet) -> None:
    """Broken: quantisation of every model that came from TensorFlow would die for want of a file."""
    found = list(read_batches(samples, signature("batch")))
    assert [batch[NAME].tolist() for batch in found] == [
        [[0, 1, 2]],
        [[3, 4, 5]],
        [[6, 7, 8]],
        [[9, 10, 11]],
        [[12, 13, 14]],
    ]


def test_a_fixed_batch_is_filled_or_left_out(samples: SampleSet) -> None:
    assert [batch[NAME].shape for batch in read_batches(samples, signature(2))] == [(2, 3), (2, 3)]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"inputs": [], "labels": false}'])
def test_a_damaged_index_is_said(samples: SampleSet, text: str) -> None:
    (Path(samples.path) / "samples.json").write_text(text)
    with pytest.raises(IntegrityError, match="can't be read back"):
        read_index(samples)
