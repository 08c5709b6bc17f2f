"""Limits that one and the same answer to all samples would hold: they prove nothing of an output.

`policy.weak_limits` warns of numbers that hold whatever is answered. Whether `max_abs: 1000` is one of them depends on
what the original answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from compile_stage.core.quantities import quantity
from compile_stage.core.records import Gate, Job, Outcome
from compile_stage.measure.gates import in_force, suits
from compile_stage.measure.metrics import SINGLE_CALL, check_outputs
from compile_stage.measure.structure import STRUCTURE
from compile_stage.measure.tokens import TEXT_METRICS, TOKEN_METRICS

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

_ROWS, _BYTES = 256, 64_000_000  # of an output that are looked at, at most


def constant_notes(jobs: Iterable[Job], outputs: Mapping[str, Array]) -> tuple[str, ...]:
    """A sentence for each output whose limits hold where its mean over the samples is the answer to each.

    Left out are outputs that a task metric, an own one or one of language models may judge, and those that hold no
    floats: of labels one value may be most of the truth.

    Args:
        outputs: Output name → the original's answers, axis 0 being the sample.
    """
    precisions: dict[tuple[str, str], list[str]] = {}
    for precision, gates in {job.scheme.precision: job.gates for job in jobs}.items():
        if any("drop" in gate.options or gate.metric.startswith("python:") for gate in gates if gate.output is None):
            continue
        for name, output in outputs.items():
            if limits := _that_hold(gates, name, output):
                precisions.setdefault((name, limits), []).append(precision)
    return tuple(
        f"{', '.join(which)}: the limits on output {name!r} ({limits}) hold too where every sample gets one and the "
        "same answer, so they prove nothing of it on these samples: set them by how much its answers differ, or add "
        "column_nrmse or cosine"
        for (name, limits), which in precisions.items()
    )


def _that_hold(gates: Iterable[Gate], name: str, output: Array) -> str:
    """The limits on an output, in words, where its mean holds all of them; else empty."""
    mine = [gate for gate in in_force(tuple(gates), name) if suits(gate, output)]
    own = ("python:", *TOKEN_METRICS, *TEXT_METRICS)
    if not mine or output.dtype.kind != "f" or not output.ndim or len(output) < 2:
        return ""
    if any("drop" in gate.options or gate.metric.startswith(own) for gate in mine):
        return ""
    rows = max(2, min(_ROWS, _BYTES // max(1, output[:1].nbytes)))
    some = np.asarray(output[:rows])
    mean = np.broadcast_to(some.mean(axis=0, dtype=np.float64).astype(some.dtype), some.shape)
    checks = check_outputs(mine, {name: mean}, {name: some}, SINGLE_CALL, batch_size=0, seed=0)
    if any(check.outcome is not Outcome.PASS for check in checks if check.gate.metric not in STRUCTURE):
        return ""
    return ", ".join(dict.fromkeys(f"{gate.metric} {quantity(gate.limit)}" for gate in mine))
