"""Two runs side by side: what changed for each target, and whether a speed changed by more than its noise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from compile_stage.core.errors import UsageError
from compile_stage.core.json_files import read_json_object
from compile_stage.core.records import RunResult, record
from compile_stage.report import numbers
from compile_stage.report.result import SCHEMA, result_document, result_json_schema


@record
class TargetComparison:
    """One target of two runs.

    Attributes:
        winners: Job ids before and after; None where there was no winner, or no such target.
        changes: A sentence for each thing that changed.
        notes: What can't be compared, and why.
    """

    target: str
    winners: tuple[str | None, str | None]
    changes: tuple[str, ...]
    notes: tuple[str, ...] = ()


@record
class Comparison:
    """Two runs. `str()` of it is a line for each change."""

    statuses: tuple[str, str]
    targets: tuple[TargetComparison, ...]

    @property
    def changed(self) -> bool:
        """True when the outcome, a winner, a verdict or a speed is another."""
        return self.statuses[0] != self.statuses[1] or any(target.changes for target in self.targets)

    def __str__(self) -> str:
        before, after = self.statuses
        lines = [f"status: {before}" if before == after else f"status: {before} -> {after}"]
        for target in self.targets:
            lines += [f"{target.target}: {change}" for change in target.changes or ("no change",)]
            lines += [f"{target.target}: note: {note}" for note in target.notes]
        return "\n".join(lines)


def compare(a: RunResult | str | os.PathLike[str], b: RunResult | str | os.PathLike[str]) -> Comparison:
    """What changed from run `a` to run `b`. Raises UsageError for a file that is no result.json."""
    before, after = _document(a), _document(b)
    old = {target["name"]: target for target in before["targets"]}
    new = {target["name"]: target for target in after["targets"]}
    return Comparison(
        statuses=(before["status"], after["status"]),
        targets=tuple(_compare(name, old.get(name), new.get(name), before, after) for name in {**old, **new}),
    )


def _document(given: RunResult | str | os.PathLike[str]) -> dict[str, Any]:
    if isinstance(given, RunResult):
        return result_document(given)
    path = Path(given)
    path = path / "result.json" if path.is_dir() else path
    try:
        document = read_json_object(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"it can't be read: {error}", where=str(path), fix="name a result.json of a run") from error
    if document.get("schema") != SCHEMA:
        raise UsageError(f"it is no {SCHEMA}", where=str(path), fix="name a result.json of a run")
    if (mistake := best_match(Draft202012Validator(result_json_schema()).iter_errors(document))) is not None:
        problem = f"it does not hold to {SCHEMA}: {mistake.json_path}: {mistake.message[:200]}"
        raise UsageError(problem, where=str(path), fix="name a result.json as a run wrote it")
    return document


def _compare(
    name: str,
    old: Mapping[str, Any] | None,
    new: Mapping[str, Any] | None,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> TargetComparison:
    winners = (old["winner"] if old else None, new["winner"] if new else None)
    if old is None or new is None:
        only = "only in the second run" if old is None else "only in the first run"
        return TargetComparison(target=name, winners=winners, changes=(only,))
    changes, notes = [], []
    if winners[0] != winners[1]:
        changes.append(f"winner: {winners[0] or 'none'} -> {winners[1] or 'none'}")
    if before["source"]["digest"] != after["source"]["digest"]:
        notes.append("the source models differ")
    ours = {_kind(candidate): candidate for candidate in new["candidates"]}
    for kind, candidate in ((_kind(candidate), candidate) for candidate in old["candidates"]):
        if (other := ours.pop(kind, None)) is None:
            changes.append(f"{kind}: not in the second run")
            continue
        if candidate["state"] != other["state"]:
            changes.append(f"{kind}: {candidate['state']} -> {other['state']}: {other['reason']}")
        change, note = _speed(candidate, other)
        changes += [f"{kind}: {change}"] if change else []
        notes += [f"{kind}: {note}"] if note else []
    changes += [f"{kind}: new, {candidate['state']}" for kind, candidate in ours.items()]
    return TargetComparison(target=name, winners=winners, changes=tuple(changes), notes=tuple(notes))


def _kind(candidate: Mapping[str, Any]) -> str:
    """What a candidate is beside its model's version, which a job's id begins with."""
    return str(candidate["job_id"]).partition("--")[2].partition("--")[2] or str(candidate["job_id"])


def _speed(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str]:
    """(what changed, why it can't be said). Speeds over the original are compared, each measured in turn with it:
    latencies of two runs also differ by what the machine did meanwhile."""
    first, second = (_first_timing(candidate) for candidate in (old, new))
    if first is None or second is None:
        return "", ""
    if first["hardware_fingerprint"] != second["hardware_fingerprint"]:
        return "", "measured on different hardware: speeds are not compared"
    if not (first["stable"] and second["stable"]):
        return "", "an unstable measurement: speeds are not compared"
    one, two = first["speedup_interval"], second["speedup_interval"]
    if one is None or two is None or not (one[1] < two[0] or two[1] < one[0]):
        return "", ""
    word = "faster" if two[0] > one[1] else "slower"
    return (
        f"{word} beyond the noise: {numbers.ratio(first['speedup'])} ({numbers.span(tuple(one))}) -> "
        f"{numbers.ratio(second['speedup'])} ({numbers.span(tuple(two))}) over the original, median "
        f"{numbers.duration(first['p50_s'])} -> {numbers.duration(second['p50_s'])}"
    ), ""


def _first_timing(candidate: Mapping[str, Any]) -> dict[str, Any] | None:
    by_batch: dict[str, dict[str, Any]] = (candidate["timing"] or {}).get("by_batch", {})
    return next((timing for timing in by_batch.values() if timing["speedup"] is not None), None)
