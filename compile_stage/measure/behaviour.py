"""How a model behaves from call to call: other rows beside a sample, other batch sizes, the same call again, what
becomes of the arrays.

The original makes the same calls. What it does itself, such as answers that depend on the rest of the batch, is no
fault of an artifact: answers are compared call by call, by the gates of the policy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.ports import Session
from compile_stage.core.records import Check, Gate, Outcome
from compile_stage.measure.metrics import SINGLE_CALL, check_outputs
from compile_stage.measure.predict import open_outputs, plain_array
from compile_stage.measure.samples import tensor_files
from compile_stage.measure.structure import BEHAVIOUR
from compile_stage.measure.tolerance import times_text, worst
from compile_stage.serving.batches import ProvenBatches

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch
    from compile_stage.measure.samples import Samples

SAME, OTHER, LARGER, REPEATABLE, INPUT_UNCHANGED, ANSWER_KEPT = BEHAVIOUR

CALL_FACTOR = 2.0
"""Times its tolerance that a gate may use in one call: a mean over few rows varies more than over all."""

_ROWS_OF_LABELS = 3
"""Of so many rows not all may have another label, though two rows may, and twice that in one call."""

_REMAINDER = 2
"""Rows of the larger batch beyond the largest: where the policy names no batch of 2, they are filled up."""

_MORE_CALLS, _MORE_S = 32, 0.25
"""At most so many calls, and seconds, after the others: a runtime may answer in a few buffers by turns, and write to
the first again only then."""

REPEAT_LIMIT = 0.01
"""Root mean square of what two equal calls may differ by, over that of the answer: sums in another order, and a value
of 8 bits that is rounded to the other side by them."""


MIXED_LIMIT = 1e-4
"""Root mean square of what the rest of a batch may change an answer by, over that of the answer: sums in another order
change it by a hundredth of that, and a tenth of what is allowed of fp32 while it is timed shows in no verdict."""


def calls_to_compare(count: int, batch_sizes: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """The calls as `{"check", "rows"}`, rows being numbers of samples: the largest batch in another order; then sizes
    below it that are not among `batch_sizes`, so many that a request of any size is at most doubled to be one of them:
    powers of two, the middle, and one below the largest; and a batch larger than all, which an artifact answers in
    parts (`parts_of`)."""
    largest = max(batch_sizes)
    order = np.random.default_rng(seed).permutation(largest)
    if largest > 1 and bool(np.all(order == np.arange(largest))):
        order = order[::-1]
    calls = [{"check": SAME, "rows": [int(row) % count for row in order]}]
    between = {2**power for power in range(largest.bit_length())} | {(1 + largest) // 2, largest - 1}
    sizes = sorted(size for size in between if 0 < size < largest and size not in batch_sizes)
    calls += [{"check": OTHER, "rows": [row % count for row in range(size)]} for size in sizes]
    return [*calls, {"check": LARGER, "rows": [row % count for row in range(largest + _REMAINDER)]}]


def parts_of(calls: Sequence[Mapping[str, Any]], batch_sizes: Sequence[int]) -> list[dict[str, Any]]:
    """The calls as an artifact makes them: the one that is larger than all in batches of these sizes, as a published
    model does (`serving.batches`). The original answers all its rows at once."""
    return [{**call, "parts": list(batch_sizes)} if call["check"] == LARGER else dict(call) for call in calls]


# -------------------------------------------------------------------------------------------------- in the worker


def make_calls(session: Session, samples: Samples, calls: Sequence[Mapping[str, Any]], into: Path) -> dict[str, Any]:
    """Make the calls with the open model, and the first twice more after all others, the last time from another thread,
    as servers do.

    Returns:
        `answers`: for each call the outputs' files below `into`, or None where the model refused the call, then
        `refusals` says why. `repeated`: output → how far the first call's second answer is from its first
        (`REPEAT_LIMIT`). `other_thread`: the same of the call from another thread (`repeated`), and why that was
        refused (`refusal`). `changed_inputs` and `changed_answers`: names of arrays that a call changed: its own
        inputs, or the answers of the call before it or of the first one.
    """
    made = _Calls(session)
    answers: list[dict[str, str] | None] = []
    refusals: dict[str, str] = {}
    one: Mapping[str, Array] = {}
    for number, call in enumerate(calls):
        outputs, refusal = _attempt(made, _batch(samples, call["rows"]), call.get("parts", ()))
        one = one if number else outputs
        answers.append(save_answers(outputs, into / str(number)) if not refusal else None)
        refusals |= {str(number): refusal} if refusal else {}
    other, _ = _attempt(made, _batch(samples, calls[0]["rows"]))
    with ThreadPoolExecutor(1, thread_name_prefix="another") as pool:
        elsewhere, refusal = pool.submit(_attempt, made, _batch(samples, calls[0]["rows"])).result()
    following = _batch(samples, [(row + 1) % samples.count for row in calls[0]["rows"]])  # as large, and not the same
    ends = time.monotonic() + _MORE_S
    for _ in range(_MORE_CALLS):
        if time.monotonic() >= ends or _attempt(made, following)[1]:
            break
    made.look_at_first()
    return {
        "answers": answers,
        "refusals": refusals,
        "repeated": all_apart(one, other),
        "other_thread": {"repeated": all_apart(one, elsewhere), "refusal": refusal},
        "changed_inputs": sorted(made.changed_inputs),
        "changed_answers": sorted(made.changed_answers),
    }


def _attempt(made: _Calls, batch: Batch, parts: Sequence[int] = ()) -> tuple[Mapping[str, Array], str]:
    """The answer, or why there is none."""
    try:
        return made.run(batch, parts), ""
    except Exception as error:  # noqa: BLE001 - whatever a runtime raises for a size that it does not take
        return {}, f"{type(error).__name__}: {error}"[:300]


class _Calls:
    """Calls of one session, and what each changed that was not its own."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._answer: Mapping[str, Array] = {}
        self._copy: Mapping[str, Array] = {}
        self._first: tuple[Mapping[str, Array], Mapping[str, Array]] | None = None  # as the two
        self.changed_inputs: set[str] = set()
        self.changed_answers: set[str] = set()

    def run(self, batch: Batch, parts: Sequence[int] = ()) -> Mapping[str, Array]:
        """A copy of the answer; with `parts`, in batches of these sizes."""
        given = {name: array.copy() for name, array in batch.items()}
        run = self._session.run
        answered = ProvenBatches(parts, splits=True).run(run, given) if parts else run(given)
        answer = {name: np.asarray(array) for name, array in answered.items()}
        answer = {name: plain_array(name, array) for name, array in answer.items()}
        copy = {name: array.copy() for name, array in answer.items()}
        self.changed_inputs |= {name for name, array in given.items() if not _equal(array, batch[name])}
        self.changed_answers |= _changed(self._answer, self._copy)
        self._answer, self._copy = answer, copy
        self._first = self._first or (answer, copy)
        return copy

    def look_at_first(self) -> None:
        """Whether a call since then changed the answer to the first one."""
        if self._first is not None:
            self.changed_answers |= _changed(*self._first)


def _changed(answer: Mapping[str, Array], copy: Mapping[str, Array]) -> set[str]:
    return {name for name, array in answer.items() if not _equal(array, copy[name])}


def _batch(samples: Samples, rows: Sequence[int]) -> Batch:
    return {name: np.ascontiguousarray(array[list(rows)]) for name, array in samples.inputs.items()}


def _equal(one: Array, other: Array) -> bool:
    """NaN equals NaN."""
    if one.shape != other.shape:
        return False
    equal = np.asarray(one == other)
    if one.dtype.kind == "f":
        equal |= np.isnan(one) & np.isnan(other)
    return bool(equal.all())


def all_apart(one: Mapping[str, Array], other: Mapping[str, Array]) -> dict[str, float]:
    """How far two answers to the same call are apart, by output (`REPEAT_LIMIT`)."""
    return {name: _apart(one[name], other[name]) for name in one.keys() & other.keys()}


def _apart(one: Array, other: Array) -> float:
    if one.shape != other.shape:
        return float("inf")
    if one.dtype.kind != "f":
        return float(np.mean(np.asarray(one != other))) if one.size else 0.0
    a, b = (np.nan_to_num(side.astype(np.float64), nan=0, posinf=0, neginf=0) for side in (one, other))
    if not _equal(np.isfinite(one), np.isfinite(other)):
        return float("inf")
    size = float(np.sqrt(np.mean(a * a))) if a.size else 0.0
    apart = float(np.sqrt(np.mean((a - b) ** 2))) if a.size else 0.0
    return apart / size if size > 0 else (0.0 if apart == 0 else float("inf"))


def save_answers(outputs: Mapping[str, Array], into: Path) -> dict[str, str]:
    """Write the answers of one call into the folder; output name → `.npy` file."""
    into.mkdir(parents=True, exist_ok=True)
    files = tensor_files(list(outputs))
    for name, array in outputs.items():
        np.save(into / files[name], array, allow_pickle=False)
    return {name: str(into / file) for name, file in files.items()}


# ------------------------------------------------------------------------------------------------- in the parent


def judge_calls(
    gates: Sequence[Gate],
    calls: Sequence[Mapping[str, Any]],
    own: Mapping[str, Any],
    original: Mapping[str, Any],
    seed: int,
    mixed: str = "",
) -> list[Check]:
    """One check for each name of `BEHAVIOUR` that can be looked at.

    Args:
        gates: Those that few rows without labels can be judged by.
        own, original: What `make_calls` says of the artifact and of the original. A call that the original refused is
            not looked at, and an artifact may refuse a batch size that the policy does not name.
        mixed: Why an answer of the original is not shown to depend on its own row alone (`measure.graph_rows`).
    """
    checks = []
    for name in (SAME, OTHER, LARGER):
        wrong, refused, held = [], [], []
        for number, call in enumerate(calls):
            if call["check"] != name or original["answers"][number] is None:
                continue
            size = len(call["rows"])
            if own["answers"][number] is None:
                refused.append(f"a batch of {size} is refused ({own['refusals'].get(str(number), 'no answer')})")
            elif problem := refuse_call(
                gates, open_outputs(own["answers"][number]), open_outputs(original["answers"][number]), size, seed
            ):
                wrong.append(f"in a batch of {size}: {problem}")
            else:
                held.append(size)
        if name == SAME:
            checks.append(_check(name, [*wrong, *refused], "rows in another order have the same answers"))
        elif wrong or refused or held:
            fine = [f"right in batches of {', '.join(map(str, held))}"] if held else []
            check = _check(name, wrong, "; ".join([*fine, *refused]))
            checks.append(
                replace(check, batch_sizes=tuple(held)) if name == OTHER else _in_parts(held, wrong, refused, mixed)
            )
    checks.append(_repeatable(own, original))
    for name, key, what in (
        (INPUT_UNCHANGED, "changed_inputs", "a call changes its input"),
        (ANSWER_KEPT, "changed_answers", "a later call overwrites an earlier answer: output"),
    ):
        changed = [n for n in own[key] if n not in original[key]]
        wrong = [f"{what} {', '.join(map(repr, changed))}"] if changed else []
        checks.append(_check(name, wrong, "arrays that were handed in or out stay as they are"))
    return checks


def _in_parts(held: Sequence[int], wrong: Sequence[str], refused: Sequence[str], mixed: str) -> Check:
    """It never fails: that the original's answers depend on the rest of the batch is no fault of an artifact, and what
    is published then refuses the sizes that were not proven."""
    if held and mixed:
        why = f"that an answer depends on its own row alone is not shown, since in the original's graph {mixed}"
        return _check(LARGER, [], f"the published model refuses batch sizes that were not proven: {why}")
    if held:
        return replace(_check(LARGER, [], f"a batch of {held[0]}, run in parts, is right"), batch_sizes=tuple(held))
    why = "; ".join([*wrong, *refused])
    return _check(LARGER, [], f"the published model refuses batch sizes that were not proven: run in parts, {why}")


def mixed_rows(calls: Sequence[Mapping[str, Any]], answers: Mapping[str, Any], outputs: Mapping[str, Array]) -> str:
    """Which output of a model depends on the rest of the batch, such as `output 'y' in a batch of 6 differs by 0.9 of
    its size`; empty where none does beyond rounding (`MIXED_LIMIT`).

    Args:
        calls, answers: Those that `make_calls` made with it, and what it says of them.
        outputs: Output name → its answers to all samples, in batches of another size or order.
    """
    found: dict[str, tuple[float, int]] = {}
    for call, answered in zip(calls, answers["answers"], strict=True):
        for name, rows in open_outputs(answered or {}).items():
            apart = _apart(np.asarray(outputs[name][list(call["rows"])]), rows) if name in outputs else 0.0
            if not apart <= MIXED_LIMIT and not apart <= found.get(name, (0.0, 0))[0]:
                found[name] = apart, len(call["rows"])
    return "; ".join(
        f"output {name!r} in a batch of {size} differs by {apart:.2g} of its size"
        for name, (apart, size) in found.items()
    )


def not_repeated(answers: Mapping[str, Any]) -> str:
    """Which outputs of a model two equal calls answered otherwise, such as `output 'y' of two equal calls differs by
    1.4 of its size`; empty where they are the same but for rounding (`REPEAT_LIMIT`).

    Args:
        answers: What `make_calls` says of it.
    """
    apart = {name: float(value) for name, value in answers["repeated"].items()}
    return "; ".join(_differs(name, value) for name, value in apart.items() if not value <= REPEAT_LIMIT)


def _differs(name: str, value: float) -> str:
    return f"output {name!r} of two equal calls differs by {value:.2g} of its size"


def refuse_call(
    gates: Sequence[Gate], own: Mapping[str, Array], original: Mapping[str, Array], size: int, seed: int
) -> str:
    """Why the answers of one call are not those of the original; empty where they are. Each gate may use `CALL_FACTOR`
    times its tolerance.

    Args:
        gates: Those that few rows without labels can be judged by.
        own, original: Output name → array, axis 0 being the row.
        size: Rows that the call was made with, for the record.
    """
    checks = check_outputs(gates, own, original, SINGLE_CALL, batch_size=size, seed=seed)
    for check in checks:
        if check.gate.metric == "agreement" and check.measured == 0 and check.samples >= _ROWS_OF_LABELS:
            return check.reason
    used, check = worst(checks)
    return f"{check.reason}{times_text(used)}" if used > CALL_FACTOR else ""


def _repeatable(own: Mapping[str, Any], original: Mapping[str, Any]) -> Check:
    """Args: as `judge_calls`."""
    limit = REPEAT_LIMIT + 2 * min(max(map(float, original["repeated"].values()), default=0.0), 1e6)
    apart = {name: float(value) for name, value in own["repeated"].items()}
    wrong = [_differs(name, value) for name, value in apart.items() if not value <= limit]
    if not wrong:
        far, refusal = _wrong_elsewhere(own.get("other_thread", {}), original.get("other_thread", {}), limit)
        wrong = [f"{_differs(name, value)}, one of them from another thread" for name, value in far.items()]
        wrong += [f"a call from another thread is refused ({refusal})"] if refusal else []
        apart |= far
    check = _check(REPEATABLE, wrong, "two equal calls have the same answer, also from another thread")
    return replace(check, measured=max(apart.values(), default=0.0), gate=replace(check.gate, limit=limit))


def _wrong_elsewhere(own: Mapping[str, Any], original: Mapping[str, Any], limit: float) -> tuple[dict[str, float], str]:
    """Of the call from another thread: which outputs are how far off, and why it was refused. What the original does
    there too is no fault. Either is empty where it was cached before such a call was made."""
    if original.get("refusal"):
        return {}, ""
    usual = original.get("repeated", {})
    apart = {name: float(value) for name, value in own.get("repeated", {}).items()}
    far = {name: value for name, value in apart.items() if not value <= limit + 2 * float(usual.get(name, 0.0))}
    return far, str(own.get("refusal", ""))


def _check(name: str, wrong: Sequence[str], held: str) -> Check:
    gate = Gate(metric=name, limit=0.0, direction="at_most")
    outcome = Outcome.FAIL if wrong else Outcome.PASS
    return Check(gate=gate, outcome=outcome, measured=float(len(wrong)), reason="; ".join(wrong) or held)
