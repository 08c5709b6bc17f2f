"""Samples near and between those of the policy, and beyond them: an artifact that is right on the validation set alone
is not right.

Each kind is made of the validation samples, by seed. What is continuous is moved; what is a code (whole numbers of a
narrow range, integers, truth values, text) only takes values that were seen in the same column. The original answers
them all, and whatever it has no finite answer for is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.digest import digest_file, digest_of
from compile_stage.core.records import Check, Gate, Outcome, SampleSet
from compile_stage.core.sample_files import write_index
from compile_stage.measure.elementwise import F64
from compile_stage.measure.samples import Samples, open_samples, tensor_files
from compile_stage.measure.tolerance import worst

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

ROBUSTNESS = "robustness"
"""The metric of its checks, and what a waiver calls them."""

NOISE = 0.02
"""Of `noise`: standard deviation, over the range of the column."""

BEYOND_RANGES = ("scaled", "synthetic")
"""Kinds whose activations leave the calibrated ranges, so that 8 bits clip them: the whole output is judged, not the
spread of its columns."""

USUAL_NOISE_DB = {"int8": 20.0, "fp8": 20.0}
"""Of the precisions with calibrated ranges, the noise that the shipped tolerances grant (`mean_snr_db`). Beyond these
ranges 8 bits clip, by how far the sample lies out and not by what a policy asks of samples within: int8 that holds 36
dB on the validation set had 15 dB on `scaled` samples."""

_WHOLE_OUTPUT = ("max_abs", "mean_abs", "max_rel", "allclose", "cosine", "mean_cosine", "snr_db", "mean_snr_db",
                 "psnr_db", "mean_psnr_db")  # fmt: skip

BEYOND = 1.5
"""Of `scaled`: how many times as far from the mean as it was. The samples that are farthest out leave the range."""

CODES = 12
"""A column of floats with so many different whole numbers at most holds codes, which have no values in between."""

_POOL = 1 << 22  # elements of an input that kinds are made from: all of a table, some dozens of images

_MOST_COLUMNS = 4096  # beyond these columns are pixels or audio, and nobody has codes in them


@dataclass(frozen=True)
class _Column:
    """Of one input: everything that a kind needs of its values. `low`, `high`, `mean` and `codes` are `[features]`, of
    the flattened sample.

    Attributes:
        values: `[samples, features]`.
        shape: Of a sample.
        codes: Features that only take values that were seen.
    """

    values: NDArray[Any]
    shape: tuple[int, ...]
    low: F64
    high: F64
    mean: F64
    codes: NDArray[np.bool_]


def other_samples(samples: Samples, count: int, seed: int) -> dict[str, dict[str, Array]]:
    """Kind → input name → array of about `count` / 5 rows. Kinds that would change nothing are left out.

    - `noise`: a sample with noise of 2 % of each column's range, kept within it.
    - `mixed`: between two samples; codes are those of the one or the other.
    - `scaled`: half as far from the mean, and half as far again, beyond the range.
    - `permuted`: each column from any sample (tables), or rolled along the last axes (images, sequences).
    - `synthetic`: uniform within each column's range (tables); a sample's own spectrum with random phases, within the
      range (images, sequences).
    """
    rows = max(4, count // len(_KINDS))
    width = max(int(np.prod(array.shape[1:])) for array in samples.inputs.values())
    pool = min(samples.count, max(rows, _POOL // max(width, 1)))
    inputs = {name: _column(np.asarray(array[:pool])) for name, array in samples.inputs.items()}
    made = {}
    for number, (kind, make) in enumerate(_KINDS.items()):
        chosen = np.random.default_rng([seed, number]).integers(pool, size=(2, rows))
        batch = {}
        for name, column in inputs.items():
            # Inputs of one shape get the same choices, so that a mask still fits its ids.
            random = np.random.default_rng([seed, number, *column.values.shape[1:]])
            flat = make(column, chosen, random)
            batch[name] = _as_input(flat, samples.inputs[name])
        if any(not np.array_equal(batch[name], samples.inputs[name][chosen[0]]) for name in batch):
            made[kind] = batch
    return made


def _column(array: Array) -> _Column:
    values, shape = array.reshape(len(array), -1), array.shape[1:]
    if values.dtype.kind != "f":
        none = np.zeros(values.shape[1])
        return _Column(values, shape, none, none, none, np.ones(values.shape[1], dtype=bool))
    known = np.where(np.isfinite(values), values, np.nan).astype(np.float64)
    empty = np.isnan(known).all(axis=0)
    known[:, empty] = 0
    codes: NDArray[np.bool_] = np.array(empty, dtype=bool)
    if values.shape[1] <= _MOST_COLUMNS and array.ndim <= 2:
        for feature in range(values.shape[1]):
            different = np.unique(values[:, feature])
            codes[feature] |= len(different) <= CODES and bool(np.all(different == np.floor(different)))
    low, high, mean = np.nanmin(known, axis=0), np.nanmax(known, axis=0), np.nanmean(known, axis=0)
    return _Column(values, shape, low, high, mean, codes)


def _as_input(flat: Array, like: Array) -> Array:
    return np.ascontiguousarray(flat.astype(like.dtype, copy=False).reshape(len(flat), *like.shape[1:]))


# ----------------------------------------------------------------------------------------------------------- the kinds


def _noise(column: _Column, chosen: NDArray[np.int64], random: np.random.Generator) -> Array:
    rows: NDArray[Any] = column.values[chosen[0]]
    if column.codes.all():
        return rows
    spread = NOISE * (column.high - column.low) * random.standard_normal(rows.shape)
    return np.where(column.codes, rows, np.clip(rows + spread, column.low, column.high))


def _mixed(column: _Column, chosen: NDArray[np.int64], random: np.random.Generator) -> Array:
    one, other = column.values[chosen[0]], column.values[chosen[1]]
    picked = np.where(random.random(one.shape) < 0.5, one, other)
    if column.codes.all():
        return np.asarray(picked)
    share = random.uniform(0.25, 0.75, size=(len(one), 1))
    return np.asarray(np.where(column.codes, picked, share * one + (1 - share) * other))


def _scaled(column: _Column, chosen: NDArray[np.int64], random: np.random.Generator) -> Array:
    if column.codes.all():
        return np.asarray(column.values[chosen[0]])
    rows = column.values[chosen[0]].copy()
    spread = np.where(column.high > column.low, column.high - column.low, 1)
    distance = np.nan_to_num(np.abs(column.values - column.mean) / spread).max(axis=1)
    outermost = np.argsort(-distance, kind="stable")[: len(rows) // 2]
    rows[: len(outermost)] = column.values[outermost]
    factor = np.where(np.arange(len(rows)) < len(outermost), BEYOND, 0.5)[:, None]
    return np.asarray(np.where(column.codes, rows, column.mean + factor * (rows - column.mean)))


def _permuted(column: _Column, chosen: NDArray[np.int64], random: np.random.Generator) -> Array:
    if len(column.shape) > 1:
        axes = tuple(range(-min(2, len(column.shape) - 1), 0))
        moved = [
            np.roll(row.reshape(column.shape), [int(random.integers(1, 1 + column.shape[axis])) for axis in axes], axes)
            for row in column.values[chosen[0]]
        ]
        return np.stack(moved).reshape(len(moved), -1)
    rows, features = chosen.shape[1], column.values.shape[1]
    source = random.integers(len(column.values), size=(rows, features))
    return np.asarray(column.values[source, np.arange(features)])


def _synthetic(column: _Column, chosen: NDArray[np.int64], random: np.random.Generator) -> Array:
    if column.codes.all():
        return _permuted(column, chosen, random)
    if len(column.shape) > 1:
        rows = np.nan_to_num(column.values[chosen[0]].astype(np.float64), nan=0, posinf=0, neginf=0)
        made = np.stack([_with_random_phases(row.reshape(column.shape), random) for row in rows])
        flat = np.clip(made.reshape(len(rows), -1), column.low, column.high)
        return np.where(column.codes, column.values[chosen[0]], flat)
    seen = _permuted(column, chosen, random)
    return np.where(column.codes, seen, random.uniform(column.low, column.high, size=seen.shape))


def _with_random_phases(sample: F64, random: np.random.Generator) -> F64:
    """Another sample with the same power at each frequency, and the same mean: surrogate data (Theiler and others,
    Physica D 58:77, 1992), with the same phases for all channels (Prichard and Theiler, Physical Review Letters 73:951,
    1994), so that these stay as correlated as they were.

    Independent pixels, as a uniform draw has them, are no input that a network of images was made or calibrated for:
    its first layer sees edges at every pixel, activations leave the calibrated ranges, and any 8 bits clip them.

    Args:
        sample: Of at least two axes. The frequencies are those of the two longest, or of the longest of two.
    """
    axes = tuple(sorted(range(sample.ndim), key=lambda axis: -sample.shape[axis])[: min(2, sample.ndim - 1)])
    shape = [size if axis in axes else 1 for axis, size in enumerate(sample.shape)]
    noise = np.fft.fftn(random.standard_normal(shape), axes=axes)  # of real noise, so that the answer is real
    phases = noise / np.maximum(np.abs(noise), np.finfo(np.float64).tiny)
    phases[(0,) * sample.ndim] = 1
    made: F64 = np.fft.ifftn(np.fft.fftn(sample, axes=axes) * phases, axes=axes).real
    return made


_KINDS: Mapping[str, Callable[[_Column, NDArray[np.int64], np.random.Generator], Array]] = {
    "noise": _noise,
    "mixed": _mixed,
    "scaled": _scaled,
    "permuted": _permuted,
    "synthetic": _synthetic,
}


# ----------------------------------------------------------------------------------------------------- sets and verdict


def write_samples(batch: Mapping[str, Array], like: SampleSet, into: Path) -> SampleSet:
    """One kind on disk, as workers read samples. Nothing in it tells that they are not those of the policy."""
    files = {name: f"inputs/{file}" for name, file in tensor_files(list(batch)).items()}
    (into / "inputs").mkdir(parents=True, exist_ok=True)
    for name, array in batch.items():
        np.save(into / files[name], array, allow_pickle=False)
    count = len(next(iter(batch.values())))
    write_index(into, files, labels=False, count=count)
    digest = digest_of({name: digest_file(into / file) for name, file in files.items()})
    return SampleSet(path=str(into), digest=digest, count=count, real=like.real, source=like.source)


def round_samples(made: SampleSet, like: SampleSet) -> SampleSet:
    """What was made of samples as they were given (`core.sample_files.GIVEN`), in its folder, in the types that the
    network takes, which are those of `like`."""
    types = {name: array.dtype for name, array in open_samples(like).inputs.items()}
    batch = {name: np.array(array).astype(types[name]) for name, array in open_samples(made).inputs.items()}
    return write_samples(batch, like, Path(made.path))


def answered(outputs: Mapping[str, Array]) -> NDArray[np.bool_]:
    """`[rows]`: those for which every floating output is finite throughout."""
    rows = np.ones(len(next(iter(outputs.values()))), dtype=bool)
    for array in outputs.values():
        if array.dtype.kind == "f":
            rows &= np.isfinite(array.reshape(len(array), -1)).all(axis=1)
    return rows


def moves_as_much(original: Mapping[str, Array], reference: Mapping[str, Array]) -> bool:
    """Whether the original's answers to a kind differ among each other by half of what they do on the validation set or
    more. Noise in place of an image has next to one answer, beside whose spread any error is large."""

    def spread(array: Array) -> float:
        values = array.reshape(len(array), -1).astype(np.float64)
        return float(np.sqrt(np.mean(np.var(np.where(np.isfinite(values), values, 0), axis=0))))

    floats = [name for name, array in original.items() if array.dtype.kind == "f"]
    return all(spread(original[name]) >= 0.5 * spread(reference[name]) for name in floats)


def usual_gates(gates: Sequence[Gate], kind: str, precision: str) -> tuple[Gate, ...]:
    """What samples beyond the calibrated ranges are judged by where the policy's own limits are tighter than the
    precision's usual noise; empty where nothing is clipped. Gates on what is no size of an error stay as they are."""
    if kind not in BEYOND_RANGES or precision not in USUAL_NOISE_DB:
        return ()
    limit = USUAL_NOISE_DB[precision]
    usual = Gate(metric="mean_snr_db", limit=limit, direction="at_least", unit="dB")
    return (usual, *(gate for gate in gates if gate.metric not in _WHOLE_OUTPUT))


def judge_kind(kind: str, checks: Sequence[Check], factor: float, rows: int) -> Check:
    """One check of a kind, from the gates' own checks on its samples: how many times its tolerance was used at most."""
    used, check = worst(checks)
    gate = Gate(metric=ROBUSTNESS, limit=factor, direction="at_most", unit="times", options={"samples": kind})
    outcome = Outcome.PASS if used <= factor else Outcome.FAIL
    times = f"{used:.3g} times its tolerance is used" if used < np.inf else "nothing of the baseline's answer is left"
    reason = f"{kind} samples ({rows}): {times}, at most {factor:g} times is allowed: {check.reason}"
    return Check(gate=gate, outcome=outcome, measured=used, reason=reason, output=check.output, samples=rows)


def refused_kind(kind: str, factor: float, rows: int, problem: str) -> Check:
    """The check of a kind that the original answers, and the artifact does not."""
    gate = Gate(metric=ROBUSTNESS, limit=factor, direction="at_most", unit="times", options={"samples": kind})
    reason = f"{kind} samples ({rows}): the original answers them, the artifact does not: {problem}"
    return Check(gate=gate, outcome=Outcome.FAIL, measured=None, reason=reason, samples=rows)
