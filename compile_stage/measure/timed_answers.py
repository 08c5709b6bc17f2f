"""Were the answers right while they were timed?

In each round all participants are given some batches in common, which nobody can tell from the others, and their
answers to these are kept. After the rounds each row of an answer is laid beside the original's: of a sample that was
not changed, beside what the original answered when the candidate was proven; of a changed one, beside what it answered
in the same round. Where the original's answer depends on the rest of the batch, all are laid beside those of the round.

A row is judged by the limits of the candidate's own gates, widened as `_LIMITS` says: a handful of rows is not the
whole validation set, and a batch that is put together otherwise, or a sample that was changed a little, may be off a
little more. What answers garbage, nothing, or something that it remembers is off by far more than that.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compile_stage.core.records import Candidate, Gate, record
from compile_stage.measure.elementwise import NotMeasurableError
from compile_stage.measure.gates import in_force
from compile_stage.measure.participant import Turn
from compile_stage.measure.predict import open_outputs
from compile_stage.measure.resemblance import FURTHEST, UNJUDGED_ROWS
from compile_stage.measure.timed_inputs import checked_batch
from compile_stage.measure.tokens import compare_tokens

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array
    from compile_stage.measure.reference import Reference

CHANGED_ROWS = 0.1
"""So many of the rows of changed samples may be off (but always one): beside a threshold of a tree, or where two
classes are equally likely, another answer is right too. It moves no median."""

_DIVERGES = 64.0  # times the limit on `token_kl`
_REFERENCE_ROWS = 64  # of the original's answers when the candidate was proven, for their range and their usual size
_FOLDER_BYTES = 500_000_000  # of kept answers; beyond it, those of a random round are dropped

F64 = NDArray[np.float64]


@record
class Proof:
    """What a timed answer is compared with.

    Attributes:
        gates: Participant → the gates that it was proven by. One that a waiver let through has the value that was
            measured as its limit.
        waived: Participants with such gates.
        reference: Output name → `.npy` file: what the original answered for all validation samples, in order.
        digest: Of these files.
        mixed: The original's answer to a sample depends on the rest of the batch, so that what it answered in another
            one says nothing.
    """

    gates: Mapping[str, tuple[Gate, ...]]
    reference: Mapping[str, str]
    digest: str
    waived: tuple[str, ...] = ()
    mixed: bool = False

    @classmethod
    def beside(cls, reference: Reference, candidates: Sequence[Candidate]) -> Proof:
        """What the candidates that passed were proven by, beside what the original answered."""
        proof = cls.of(candidates, reference.outputs, reference.digest)
        return replace(proof, mixed=bool(reference.mixed_rows))

    @classmethod
    def of(cls, candidates: Sequence[Candidate], reference: Mapping[str, str], digest: str) -> Proof:
        """The same of an original whose rows are apart."""
        passed = [candidate for candidate in candidates if candidate.has_passed]
        return cls(
            gates={candidate.job.id: tuple(_proven_by(candidate)) for candidate in passed},
            reference=reference,
            digest=digest,
            waived=tuple(c.job.id for c in passed if c.verdict is not None and c.verdict.waivers),
        )

    def and_of(self, candidates: Sequence[Candidate]) -> Proof:
        """The same with further candidates that passed."""
        more = Proof.of(candidates, self.reference, self.digest)
        return replace(self, gates={**self.gates, **more.gates}, waived=(*self.waived, *more.waived))

    def only(self, name: str) -> Proof:
        """The same for one of its participants."""
        waived = tuple(one for one in self.waived if one == name)
        return replace(self, gates={name: self.gates[name]}, waived=waived)

    def key(self) -> dict[str, Any]:
        """What of it decides a verdict, for cache keys."""
        gates = {name: [replace(gate, origin="") for gate in gates] for name, gates in self.gates.items()}
        return {"gates": gates, "reference": self.digest, "waived": self.waived, "mixed": self.mixed}


ANSWERED_OTHERWISE = "answered differently while it was timed"
"""So begins what is said of who gave other answers than it was proven to give."""


@dataclass
class AnswerLog:
    """The kept answers of the rounds at one batch size.

    Attributes:
        count: Of the validation set.
    """

    folder: Path
    count: int
    batch_size: int
    rounds: list[tuple[int, Mapping[str, Turn]]] = field(default_factory=list)
    _begun: int = 0
    _bytes: dict[int, int] = field(default_factory=dict)

    def begin_round(self) -> tuple[int, Path]:
        """The seed of the round's common batches, and a new folder for the answers to them."""
        self._begun += 1
        return secrets.randbits(48), self.folder / f"batch-{self.batch_size}-round-{self._begun}"

    def end_round(self, seed: int, folder: Path, turns: Mapping[str, Turn]) -> None:
        """Keep what the participants answered, as far as there is room."""
        self._bytes[seed] = sum(path.stat().st_size for path in folder.rglob("*.npy")) if folder.exists() else 0
        self.rounds.append((seed, turns))
        while len(self.rounds) > 2 and sum(self._bytes[s] for s, _ in self.rounds) > _FOLDER_BYTES:
            _, dropped = self.rounds.pop(secrets.randbelow(len(self.rounds)))
            for turn in dropped.values():
                for path in (path for answer in (*turn.answers, *turn.first_answers) for path in answer.values()):
                    Path(path).unlink(missing_ok=True)

    def refuse(self, name: str, baseline: str, proof: Proof) -> str:
        """Why the participant's answers are not those that were proven, as one sentence; empty when they are."""
        rows = _Rows(proof.reference)
        try:
            for seed, turns in self.rounds:
                if name in turns and baseline in turns:
                    self._add(rows, seed, turns[name], turns[baseline], mixed=proof.mixed)
            furthest = math.inf if name in proof.waived else FURTHEST
            problem = rows.refuse(proof.gates[name], furthest) or self._refuse_first(name, baseline, proof, furthest)
        except _DifferentError as different:
            problem = str(different)
        return f"{ANSWERED_OTHERWISE}: {problem} (batch {self.batch_size})" if problem else ""

    def _refuse_first(self, name: str, baseline: str, proof: Proof, furthest: float) -> str:
        """The same of a language model's answers to its prompts alone, beside the original's."""
        rows = _Rows({})
        for _, turns in self.rounds:
            if name in turns and baseline in turns:
                pairs = zip(turns[name].first_answers, turns[baseline].first_answers, strict=False)
                for answered, expected in pairs:
                    rows.add(open_outputs(answered), open_outputs(expected), None)
        problem = rows.refuse(proof.gates[name], furthest)
        return f"of the first token, {problem}" if problem else ""

    def _add(self, rows: _Rows, seed: int, own: Turn, baseline: Turn, *, mixed: bool) -> None:
        for number, (answered, expected) in enumerate(zip(own.answers, baseline.answers, strict=False)):
            batch = checked_batch(self.count, self.batch_size, seed, number)
            kept = batch.rows[batch.order]
            rows.add(open_outputs(answered), open_outputs(expected), kept if batch.plain and not mixed else None)


def _proven_by(candidate: Candidate) -> Iterator[Gate]:
    waived = [check for check in candidate.checks if check.waived is not None and check.measured is not None]
    for gate in candidate.job.gates:
        missed = [check.measured for check in waived if check.gate == gate and check.measured is not None]
        limits = [gate.limit, *missed]
        yield replace(gate, limit=max(limits) if gate.direction == "at_most" else min(limits))


class _DifferentError(Exception):
    """The answer can't even be laid beside the original's."""


class _Rows:
    """Rows of answers beside the original's, by output."""

    def __init__(self, reference: Mapping[str, str]) -> None:
        self._reference = open_outputs(reference)
        self._scales: dict[str, _Scale] = {}
        self._pairs: dict[str, list[tuple[Array, Array, bool]]] = {}

    def add(
        self, answered: Mapping[str, Array], expected: Mapping[str, Array], samples: NDArray[np.int64] | None
    ) -> None:
        """Rows of one batch; `samples` are their indices where they were not changed."""
        if set(answered) != set(expected):
            raise _DifferentError(f"it has the outputs {sorted(answered)}, and the original {sorted(expected)}")
        for name, b in expected.items():
            a, b = answered[name], np.asarray(b)
            if a.ndim != b.ndim or a.shape[1:] != b.shape[1:] or a.ndim == 0:
                raise _DifferentError(
                    f"output {name!r} has the shape {list(a.shape[1:])}, the original's {list(b.shape[1:])}"
                )
            count = min(len(a), len(b))  # of a narrower dtype more rows may be kept
            if samples is not None and name in self._reference:
                b = np.asarray(self._reference[name][samples[:count]])
                if b.shape[1:] != a.shape[1:]:
                    raise _DifferentError(
                        f"output {name!r} has the shape {list(a.shape[1:])}, and {list(b.shape[1:])} was proven"
                    )
            self._pairs.setdefault(name, []).append((np.asarray(a[:count]), b[:count], samples is not None))

    def refuse(self, gates: Sequence[Gate], furthest: float) -> str:
        """Why the rows are too far off, by the first output that is."""
        for name, pairs in self._pairs.items():
            limits = in_force(gates, name)
            for plain in (True, False):
                chosen = [(a, b) for a, b, was_plain in pairs if was_plain is plain]
                if chosen and (problem := self._off(name, limits, chosen, furthest, plain=plain)):
                    return problem
        return ""

    def _off(
        self, name: str, gates: Sequence[Gate], pairs: Sequence[tuple[Array, Array]], furthest: float, *, plain: bool
    ) -> str:
        try:
            a, b = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
        except ValueError:
            return f"the shape of output {name!r} changes from call to call"
        if (a.dtype.kind in "fc") != (b.dtype.kind in "fc"):
            return f"output {name!r} holds {a.dtype}, the original's {b.dtype}"
        if b.dtype.kind != "f":
            return _unequal(name, a, b, gates)
        divergences = [gate.limit for gate in gates if gate.metric == "token_kl" and b.ndim == 3]
        if divergences:
            off, worst = _diverges(a, b, min(divergences), furthest)
        else:
            off, worst = _far_off(a, b, gates, self._scale(name, b), furthest)
        if divergences or any(gate.metric in (*_LIMITS, "allclose") for gate in gates):
            allowed = 0 if plain else max(1, math.floor(CHANGED_ROWS * len(b)))
        else:
            allowed = math.floor(UNJUDGED_ROWS * len(b))
        if int(off.sum()) <= allowed:
            return ""
        what = "samples" if plain else "slightly changed samples"
        return f"output {name!r} is wrong for {int(off.sum())} of {len(b)} {what}, {worst}"

    def _scale(self, name: str, b: Array) -> _Scale:
        if name not in self._scales:
            whole = self._reference.get(name, b)
            rows = np.asarray(whole[:: max(1, len(whole) // _REFERENCE_ROWS)], dtype=np.float64)
            rows = np.where(np.isfinite(rows), rows, 0).reshape(len(rows), -1)
            norms = np.sqrt((rows * rows).sum(axis=1))
            self._scales[name] = _Scale(peak=float(np.abs(rows).max(initial=0)), norm=float(np.sqrt((norms**2).mean())))
        return self._scales[name]


@dataclass(frozen=True)
class _Scale:
    """Of an output of the original over the validation set: its largest absolute value, and a row's usual norm."""

    peak: float
    norm: float


@dataclass(frozen=True)
class _Distance:
    """Of each row: |a - b| at most and on average, the norms of a - b and of b, and how much a points away from b."""

    max_abs: F64
    mean_abs: F64
    apart: F64
    norm: F64
    cosine: F64
    width: int


def _far_off(
    a: Array, b: Array, gates: Sequence[Gate], scale: _Scale, furthest: float
) -> tuple[NDArray[np.bool_], str]:
    """Which rows are further off than the widened limits allow, and the worst of them in words."""
    x, y = (np.asarray(array, dtype=np.float64).reshape(len(array), -1) for array in (a, b))
    both = np.isfinite(x) & np.isfinite(y)
    strange = (~both & (x != y) & ~(np.isnan(x) & np.isnan(y))).any(axis=1)
    x, y = np.where(both, x, 0), np.where(both, y, 0)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        d = np.abs(x - y)
        norm, own = np.sqrt((y * y).sum(axis=1)), np.sqrt((x * x).sum(axis=1))
        cosine = np.where(norm * own > 0, (x * y).sum(axis=1) / (norm * own), np.where(norm == own, 1.0, 0.0))
        distance = _Distance(d.max(axis=1), d.mean(axis=1), np.sqrt((d * d).sum(axis=1)), norm, cosine, y.shape[1])
        far = distance.apart / np.maximum(np.maximum(norm, scale.norm), np.finfo(np.float64).tiny)
        off = strange | (far > furthest)
        for gate in gates:
            if gate.metric == "allclose":
                off |= (d > 2 * gate.limit * _room(gate, y)).any(axis=1)
            elif gate.metric in _LIMITS:
                off |= _LIMITS[gate.metric](distance, scale, gate.limit)
    if strange.any():
        return off, "NaN or infinite where the original is not, or the other way round"
    worst = int(np.argmax(np.where(off, far, -1)))
    return off, f"by up to {far[worst]:.3g} times the size of the original's answer"


def _diverges(a: Array, b: Array, limit: float, furthest: float) -> tuple[NDArray[np.bool_], str]:
    """Rows of logits `[rows, tokens, vocabulary]` whose distributions are further off than the mean of the validation
    set may be: 64 times, which is 8 times the error of a logit, as of any mean; and never further than a share of what
    the original's answers to other rows are. Logits that are all shifted alike are the same distribution."""
    try:
        nats = compare_tokens(a, b, None)
        others = compare_tokens(np.roll(b, 1, axis=0), b, None)
    except NotMeasurableError as error:
        return np.ones(len(b), dtype=bool), str(error)
    each, unrelated = (found.kl / np.maximum(found.count, 1) for found in (nats, others))
    off = each > _DIVERGES * limit
    if unrelated.any() and math.isfinite(furthest):
        off |= each > furthest * unrelated.mean()
    return off, f"by up to {each.max(initial=0):.3g} nats a token"


def _room(gate: Gate, y: F64) -> F64:
    return float(gate.options.get("atol", 1e-8)) + float(gate.options.get("rtol", 1e-5)) * np.abs(y)


def _noise(times: float) -> Callable[[_Distance, _Scale, float], NDArray[np.bool_]]:
    """The norm of a row's error, beside the usual norm of a row, so that rows near zero don't explode it."""

    def off(d: _Distance, scale: _Scale, decibels: float) -> NDArray[np.bool_]:
        return np.asarray(d.apart > times * 10 ** (-decibels / 20) * np.maximum(d.norm, scale.norm))

    return off


def _peak_noise(times: float) -> Callable[[_Distance, _Scale, float], NDArray[np.bool_]]:
    def off(d: _Distance, scale: _Scale, decibels: float) -> NDArray[np.bool_]:
        return np.asarray(d.apart > times * 10 ** (-decibels / 20) * scale.peak * math.sqrt(d.width))

    return off


def _angle(times: float) -> Callable[[_Distance, _Scale, float], NDArray[np.bool_]]:
    """A cosine c leaves a noise of sqrt(2 (1 - c)), so that twice the noise is four times 1 - c. The angle of a row
    that is small beside the others says little, and that of one value is its sign: there the noise is looked at, and as
    of a mean, since the gate looks at the column."""

    def off(d: _Distance, scale: _Scale, limit: float) -> NDArray[np.bool_]:
        if d.width == 1:
            return np.asarray(d.apart > 8 * math.sqrt(2 * (1 - limit)) * np.maximum(d.norm, scale.norm))
        return np.asarray((1 - d.cosine > times**2 * (1 - limit) + 1e-12) & (d.norm >= 0.1 * scale.norm))

    return off


_LIMITS: Mapping[str, Callable[[_Distance, _Scale, float], Any]] = {
    # The worst sample was within the limit when it was proven: twice that. Of a mean, a single row may be off by more.
    "max_abs": lambda d, scale, limit: d.max_abs > 2 * limit,
    "mean_abs": lambda d, scale, limit: d.mean_abs > 8 * limit,
    "max_rel": lambda d, scale, limit: d.max_abs > 2 * limit * scale.peak,
    "cosine": _angle(2),
    "mean_cosine": _angle(8),
    "snr_db": _noise(2),
    "mean_snr_db": _noise(8),
    "psnr_db": _peak_noise(2),
    "mean_psnr_db": _peak_noise(8),
}


def _unequal(name: str, a: Array, b: Array, gates: Sequence[Gate]) -> str:
    """Whole numbers, truth values and text: at most three times the share that may differ, and two more, since so few
    rows were kept."""
    share = min((1 - gate.limit for gate in gates if gate.metric == "agreement"), default=0.05)
    equal = np.asarray(a == b).reshape(len(b), -1)
    wrong, allowed = equal.size - int(equal.sum()), 2 + math.ceil(3 * share * equal.size)
    if wrong <= allowed:
        return ""
    return f"output {name!r} has {wrong} of {equal.size} values that are not the original's, and {allowed} may differ"
