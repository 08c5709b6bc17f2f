"""Is an answer of the precision that it claims? A number that was once in 16 bits shows it: its other bits are 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from compile_stage.core.records import Check, Gate, Outcome
from compile_stage.measure.elementwise import BLOCK, release
from compile_stage.measure.structure import CLAIMED

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

_BITS = {"fp16": 11, "bf16": 8}
"""Significant bits, with the one that is not stored; float32 has 24."""

_ENOUGH = 16
"""So few numbers can have so many zero bits by chance: once in 2^208."""


def check_claim(candidate: Mapping[str, Array], baseline: Mapping[str, Array], batch_size: int) -> Check:
    """That no output of a candidate in fp32 has only numbers that a float of 16 bits holds, where the baseline has
    others."""
    gate = Gate(metric=CLAIMED, limit=0.0, direction="at_most")
    wrong = []
    for name, expected in baseline.items():
        own = candidate.get(name)
        # Of any floating type: float16 shows by its type alone, and float64 holds what was once in 16 bits too.
        if own is None or own.dtype.kind != "f" or expected.dtype.kind != "f" or own.size < _ENOUGH:
            continue
        bits, original = significant_bits(own), significant_bits(expected)
        kind = next((kind for kind in ("bf16", "fp16") if bits <= _BITS[kind] < original), None)
        if kind is not None:
            wrong.append(f"every number of output {name!r} has {bits} significant bits at most, as {kind} has")
    count = len(next(iter(baseline.values()))) if baseline else 0
    if wrong:
        reason = f"{'; '.join(wrong)}, and fp32 is claimed"
        return Check(
            gate=gate,
            outcome=Outcome.FAIL,
            measured=float(len(wrong)),
            reason=reason,
            batch_size=batch_size,
            samples=count,
        )
    reason = "answers have more bits than a float of 16 bits, or as few as the baseline's"
    return Check(gate=gate, outcome=Outcome.PASS, measured=0.0, reason=reason, batch_size=batch_size, samples=count)


def significant_bits(array: Array) -> int:
    """The most that any finite number of an array of floats needs, as float32; 0 when all are zero."""
    flat, bits = array.reshape(-1), 0
    for start in range(0, len(flat), BLOCK):
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, and is left out
            piece = np.asarray(flat[start : start + BLOCK]).astype(np.float32, copy=False)
        stored = piece[np.isfinite(piece) & (piece != 0)].view(np.uint32) & np.uint32(0x7FFFFF)
        if stored.size:
            # The lowest bit that is set in any of them: x & -x of their union.
            union = int(np.bitwise_or.reduce(stored))
            bits = max(bits, 24 - ((union & -union).bit_length() - 1) if union else 1)
        release(array)
    return bits
