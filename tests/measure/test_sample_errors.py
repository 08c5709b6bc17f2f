"""Errors of single samples, and their previews: what a report shows beside the verdict."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from compile_stage.core.records import SampleSet
from compile_stage.core.sample_files import digest_of_samples, write_index
from compile_stage.measure.previews import SIDE, png, previews_of, worst_samples
from compile_stage.measure.sample_errors import MOST_ELEMENTS, errors_of


def test_errors_are_relative_norms_and_the_worst_are_named() -> None:
    """Broken: a report shows another error than |a - b| / |b|, or other samples than the worst."""
    original = np.array([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0], [5.0, 0.0]], np.float32)
    own = original.copy()
    own[0] += [0.0, 0.5]
    own[2] = [2.0, 2.0]
    own[3, 0] = np.nan
    (found,) = errors_of({"logits": own}, {"logits": original})
    assert found.errors == (0.1, 0.0, 1.0, float("inf"))
    assert [worst.sample for worst in found.worst] == [3, 2, 0]
    assert (found.worst[1].original, found.worst[1].candidate) == ("largest at 1: 2", "largest at 0: 2")


def test_whole_numbers_count_what_differs_and_other_shapes_are_left_out() -> None:
    """Broken: token ids get a norm, or an output of another shape ends the validation."""
    ids = np.array([[1, 2], [3, 4]])
    found = errors_of({"ids": np.array([[1, 2], [3, 9]]), "other": np.zeros((2, 3))}, {"ids": ids, "other": ids})
    assert [(output.output, output.errors) for output in found] == [("ids", (0.0, 0.5))]
    big = np.broadcast_to(np.float32(1), (MOST_ELEMENTS + 1, 1))
    assert errors_of({"big": big}, {"big": big}) == ()


@pytest.fixture
def pictures(tmp_path: Path) -> SampleSet:
    (tmp_path / "inputs").mkdir()
    made = np.zeros((4, 3, 200, 100), np.float32)
    made[2, 0, :, 50:] = 7
    np.save(tmp_path / "inputs/image.npy", made)
    np.save(tmp_path / "labels.npy", np.array([5, 6, 7, 8]))
    write_index(tmp_path, {"image": "inputs/image.npy"}, labels=True, count=4)
    samples = SampleSet(path=str(tmp_path), digest="", count=4, real=True, source="file:x", has_labels=True)
    return dataclasses.replace(samples, digest=digest_of_samples(samples))


def test_a_picture_is_a_small_png(pictures: SampleSet) -> None:
    """Broken: a report holds whole pictures, or others than the samples named."""
    import base64

    (shown,) = previews_of(pictures, [2])
    data = base64.b64decode(shown.content)
    width, height = struct.unpack(">II", data[16:24])
    assert (shown.kind, shown.label, data[:4], width, height) == ("picture", "7", b"\x89PNG", 25, 50)
    assert max(width, height) <= SIDE
    rows = np.frombuffer(zlib.decompress(data[41 : data.index(b"IEND") - 8]), np.uint8).reshape(50, -1)[:, 1:]
    assert rows[0, 0] == 0
    assert rows[0, -3:].tolist() == [255, 0, 0]


def test_what_is_no_picture_is_words(tmp_path: Path) -> None:
    """Broken: a row of a table, or tokens, are shown as a picture, or whole."""
    (tmp_path / "inputs").mkdir()
    np.save(tmp_path / "inputs/x.npy", np.arange(60).reshape(2, 30))
    write_index(tmp_path, {"x": "inputs/x.npy"}, labels=False, count=2)
    samples = SampleSet(path=str(tmp_path), digest="", count=2, real=True, source="file:x")
    (shown,) = previews_of(samples, [1])
    assert (shown.kind, shown.label) == ("values", "")
    assert shown.content == f"x: {', '.join(map(str, range(30, 42)))}, ... (30 values)"


def test_nothing_is_shown_of_exact_answers() -> None:
    """Broken: samples without any error are called the worst."""
    same = np.ones((3, 2), np.float32)
    assert errors_of({"y": same}, {"y": same})[0].worst == ()
    assert worst_samples((), None) == ()
    assert png(np.zeros((1, 1, 1), np.uint8)).startswith(b"\x89PNG")
