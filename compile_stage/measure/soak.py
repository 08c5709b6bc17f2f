"""Many calls in a row, of which some answers are kept: what drifts, or is right for the first thousand calls only, is
not what was proven."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.ports import Session
from compile_stage.core.records import Check, Gate, Outcome
from compile_stage.measure.behaviour import refuse_call, save_answers
from compile_stage.measure.metrics import SINGLE_CALL, check_outputs
from compile_stage.measure.predict import open_outputs, plain_array
from compile_stage.measure.resemblance import RESEMBLES
from compile_stage.measure.structure import SOAK

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array
    from compile_stage.measure.samples import Samples

KEPT = 16
"""So many answers are kept, each call of the soak being as likely as any other, and the last beside them."""

_BATCHES = 64
"""So many different batches are prepared at most, of `_BYTES` together."""

_BYTES = 64_000_000


def run_soak(
    session: Session,
    samples: Samples,
    batch_size: int,
    seconds: float,
    seed: int,
    into: Path,
    *,
    in_order: bool = False,
) -> dict[str, Any]:
    """Call the open model on batches of random samples for about `seconds`, at least once; in the second half of them
    from another thread than the one that opened it.

    Args:
        in_order: The batches are those of all samples in order, since an answer depends on the rest of its batch.

    Returns:
        `calls`: how many there were; `kept`: `{"call", "rows", "outputs"}` each, rows being numbers of samples and
        outputs files below `into`.
    """
    random = np.random.default_rng(seed)
    size = sum(array.nbytes // max(len(array), 1) for array in samples.inputs.values()) * batch_size
    count = max(1, min(_BATCHES, _BYTES // max(size, 1)))
    rows = random.integers(samples.count, size=(count, batch_size))
    if in_order:
        first = random.integers(max(1, samples.count // batch_size), size=(count, 1)) * batch_size
        rows = (first + np.arange(batch_size)) % samples.count
    batches = [{name: np.ascontiguousarray(array[row]) for name, array in samples.inputs.items()} for row in rows]
    kept: dict[int, tuple[int, int, Mapping[str, Array]]] = {}
    calls, began = 0, time.monotonic()

    def make_call(ends: float) -> bool:
        nonlocal calls
        number = int(random.integers(count))
        answer = session.run({name: array.copy() for name, array in batches[number].items()})
        place = calls if calls < KEPT else int(random.integers(calls + 1))
        is_last = time.monotonic() >= ends
        if place < KEPT or is_last:  # a reservoir: each call is kept with the same probability
            kept[KEPT if is_last else place] = calls, number, {n: np.array(a, copy=True) for n, a in answer.items()}
        calls += 1
        return is_last

    def go_on() -> None:
        while not make_call(began + seconds):
            pass

    while time.monotonic() < began + seconds / 2:
        make_call(math.inf)
    with ThreadPoolExecutor(1, thread_name_prefix="soak") as pool:  # in servers too, another thread calls than opened
        pool.submit(go_on).result()
    recorded = [
        {
            "call": call,
            "rows": rows[number].tolist(),
            "outputs": save_answers({n: plain_array(n, a) for n, a in answer.items()}, into / str(place)),
        }
        for place, (call, number, answer) in sorted(kept.items())
    ]
    return {"calls": calls, "kept": recorded}


def judge_soak(
    gates: Sequence[Gate], recorded: Mapping[str, Any], reference: Mapping[str, Array], seed: int, seconds: float
) -> Check:
    """Whether the kept answers are those that the original gave for the same samples.

    Args:
        gates: Those that few rows without labels can be judged by; as `measure.behaviour.refuse_call`.
        recorded: What `run_soak` says.
        reference: Output name → the original's answers, axis 0 being the sample.
    """
    gate = Gate(metric=SOAK, limit=0.0, direction="at_most")
    wrong, first = 0, ""
    kept = sorted(recorded["kept"], key=lambda answer: int(answer["call"]))
    for answer in kept:
        rows = np.asarray(answer["rows"])
        expected = {name: np.asarray(array[rows]) for name, array in reference.items()}
        own = open_outputs(answer["outputs"])
        if problem := refuse_call(gates, own, expected, len(rows), seed):
            wrong += 1
            first = first or f"in call {int(answer['call']) + 1:,}: {problem}"
    if kept and not wrong and any(gate.metric == RESEMBLES for gate in gates):
        # A share of few rows says nothing: of all.
        every = np.concatenate([np.asarray(answer["rows"]) for answer in kept])
        answers = [open_outputs(answer["outputs"]) for answer in kept]
        own_rows = {name: np.concatenate([answer[name] for answer in answers]) for name in reference}
        expected = {name: np.asarray(array[every]) for name, array in reference.items()}
        checks = check_outputs(gates, own_rows, expected, SINGLE_CALL, batch_size=len(every), seed=seed)
        off = [c for c in checks if c.gate.metric == RESEMBLES and c.outcome is Outcome.FAIL]
        wrong, first = (len(kept), off[0].reason) if off else (0, "")
    calls = f"{recorded['calls']:,} calls in {seconds:g} s, {len(kept)} answers looked at"
    reason = f"{calls}: {wrong} are wrong, the first {first}" if wrong else f"{calls}: all are the original's"
    outcome = Outcome.FAIL if wrong else Outcome.PASS
    return Check(gate=gate, outcome=outcome, measured=float(wrong), reason=reason, samples=len(kept))
