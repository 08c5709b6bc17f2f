"""Validation samples made small for a report: pictures as PNG files of at most 64 pixels, other inputs in words."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.records import Candidate, SamplePreview, SampleSet
from compile_stage.measure.samples import open_samples

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

MOST = 3
"""Samples of a target."""

SIDE = 64
"""Pixels of a picture's longer side at most."""

_LEAST_SIDE = 4  # a smaller "picture" is a table
_SHOWN = 12  # values of an input that is no picture


def worst_samples(candidates: Sequence[Candidate], winner: str | None) -> tuple[int, ...]:
    """The samples with the largest errors of the winner; without a winner, of the candidates in their order."""
    chosen = [c for c in candidates if c.job.id == winner] or candidates
    answers = [worst for c in chosen for output in c.errors for worst in output.worst]
    ordered = sorted(answers, key=lambda worst: -worst.error)
    return tuple(dict.fromkeys(worst.sample for worst in ordered))[:MOST]


def previews_of(samples: SampleSet, indices: Sequence[int]) -> tuple[SamplePreview, ...]:
    """The samples at these indices, with their labels where there are some."""
    opened = open_samples(samples)
    inputs, labels = opened.inputs, opened.labels
    return tuple(_preview(inputs, at, "" if labels is None else _words(np.asarray(labels[at]))) for at in indices)


def _preview(inputs: Mapping[str, Array], at: int, label: str) -> SamplePreview:
    for array in inputs.values():
        if (pixels := _as_picture(np.asarray(array[at]))) is not None:
            return SamplePreview(
                sample=at, kind="picture", content=base64.b64encode(png(pixels)).decode("ascii"), label=label
            )
    words = "; ".join(f"{name}: {_words(np.asarray(array[at]))}" for name, array in inputs.items())
    return SamplePreview(sample=at, kind="values", content=words, label=label)


def _words(value: Array) -> str:
    flat = value.reshape(-1)
    shown = ", ".join(f"{v:.4g}" if flat.dtype.kind == "f" else str(v)[:200] for v in flat[:_SHOWN].tolist())
    return f"{shown}, ... ({len(flat):,} values)" if len(flat) > _SHOWN else shown


def _as_picture(sample: Array) -> NDArray[np.uint8] | None:
    """`[height, width, 1 or 3]` of an input `[channels, height, width]` or `[height, width, channels]`, stretched from
    its own smallest to its largest value; None for any other input."""
    if sample.ndim != 3 or sample.dtype.kind not in "fui":
        return None
    if sample.shape[0] in (1, 3) and min(sample.shape[1:]) >= _LEAST_SIDE:
        sample = np.moveaxis(sample, 0, -1)
    elif sample.shape[2] not in (1, 3) or min(sample.shape[:2]) < _LEAST_SIDE:
        return None
    step = max(1, -(-max(sample.shape[:2]) // SIDE))
    values = np.nan_to_num(_shrunk(sample, step), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = values.min(), values.max()
    return np.asarray(np.rint((values - low) / (high - low or 1.0) * 255), dtype=np.uint8)


def _shrunk(picture: Array, step: int) -> NDArray[np.float64]:
    """Each pixel the mean of `step` times `step`; what does not fill the last ones is left out."""
    height, width = (side // step * step for side in picture.shape[:2])
    blocks = np.asarray(picture[:height, :width], dtype=np.float64)
    shaped = blocks.reshape(height // step, step, width // step, step, picture.shape[2])
    shrunk: NDArray[np.float64] = shaped.mean(axis=(1, 3))
    return shrunk


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file of `[height, width, 1 or 3]`: grey, or red, green and blue."""
    height, width, channels = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
