"""Two runs side by side: what changed for each target, and whether a speed changed by more than its noise."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from compile_stage.core.digest import plain
from compile_stage.core.quantities import told_apart
from compile_stage.core.records import RunResult, record
from compile_stage.report import numbers
from compile_stage.report.reading import read_document
from compile_stage.report.result import result_document

SCHEMA = "compile-stage/comparison/v1"

Verdict = Literal["better", "worse", "unchanged"]


AS_LARGE = 1.05
"""Another winner may be so many times as large and is no regression."""


@record
class Difference:
    """What two runs were given that is not the same.

    Attributes:
        kind: `policy`, `source`, `data`, `hardware`, `package` or `toolchain`.
        what: The policy's key, the package, ...
        before, after: Plain values; None where there was none.
    """

    kind: str
    what: str
    before: Any
    after: Any


@record
class Figure:
    """One measured figure of both runs.

    Attributes:
        candidate: Backend and scheme; `openvino--int8-sym -> onnxruntime--fp32` of two winners that are not the same.
        what: `speedup`, `predict() speedup` or `size`.
        ratio: Second over first.
        interval: 95 % interval of the ratio; None of a size, which has no noise.
        verdict: `unchanged` where the interval holds 1.
    """

    candidate: str
    what: str
    before: float
    after: float
    ratio: float
    interval: tuple[float, float] | None
    verdict: Verdict


@record
class TargetComparison:
    """One target of two runs.

    Attributes:
        winners: Job ids before and after; None where there was no winner, or no such target.
        changes: A sentence for each thing that changed.
        notes: What can't be compared, and why; the batch size of the speeds, where it is not the first of both.
        figures: All that were compared, those that did not change among them.
        regressed: A winner was lost, what passed fails, or a figure of the winner is worse beyond the noise than that
            of the first run's winner.
        regressions: A sentence for each of these.
    """

    target: str
    winners: tuple[str | None, str | None]
    changes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    regressed: bool = False
    regressions: tuple[str, ...] = ()

    @property
    def unchanged_text(self) -> str:
        """What is said where nothing changed: not that speeds are alike where none could be compared."""
        compared = any(figure.interval is not None for figure in self.figures)
        return "no difference beyond noise" if compared or not self.notes else "no difference in what can be compared"


@record
class Comparison:
    """Two runs. `str()` of it is a line for each change."""

    statuses: tuple[str, str]
    targets: tuple[TargetComparison, ...]
    inputs: tuple[Difference, ...] = ()

    @property
    def changed(self) -> bool:
        """True when the outcome, a winner, a verdict or a figure is another."""
        return self.statuses[0] != self.statuses[1] or any(target.changes for target in self.targets)

    @property
    def regressed(self) -> bool:
        """True when the second run is worse in something beyond the noise."""
        failed = self.statuses[0] == "passed" != self.statuses[1]
        return failed or any(target.regressed for target in self.targets)

    def __str__(self) -> str:
        before, after = self.statuses
        lines = [f"status: {before}" if before == after else f"status: {before} -> {after}"]
        lines += map(input_text, self.inputs)
        for target in self.targets:
            lines += [f"{target.target}: {change}" for change in target.changes or (target.unchanged_text,)]
            lines += [f"{target.target}: note: {note}" for note in target.notes]
        return "\n".join(lines)


def input_text(one: Difference) -> str:
    """`policy: budget.measure_seconds: 60 -> 30`."""
    before, after = (
        "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in (one.before, one.after)
    )
    return f"{one.kind}: {one.what}: {before} -> {after}"


def comparison_document(found: Comparison) -> dict[str, Any]:
    """As plain JSON; fields are only added within `compile-stage/comparison/v1`."""
    return {"schema": SCHEMA, "changed": found.changed, "regressed": found.regressed, **plain(found)}


def compare(a: RunResult | str | os.PathLike[str], b: RunResult | str | os.PathLike[str]) -> Comparison:
    """What changed from run `a` to run `b`. Raises UsageError for a file that is no result.json."""
    before, after = _document(a), _document(b)
    old = {target["name"]: target for target in before["targets"]}
    new = {target["name"]: target for target in after["targets"]}
    return Comparison(
        statuses=(before["status"], after["status"]),
        targets=tuple(_compare(name, old.get(name), new.get(name), before, after) for name in {**old, **new}),
        inputs=tuple(_inputs(before, after)),
    )


def _inputs(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    policies = [_values(document) for document in (before, after)]
    for name in sorted(
        {target["name"] for target in before["targets"]} ^ {target["name"] for target in after["targets"]}
    ):
        counts = [_taken_out(policy, f"targets.{name}.") for policy in policies]
        yield from differences("policy", *({f"targets.{name}": f"{count} values"} if count else {} for count in counts))
    for one in differences("policy", *policies):
        # Of a list or map that is empty on one side, the entries on the other are reported: "none" would be wrong.
        if not any(key.startswith((f"{one.what}.", f"{one.what}[")) for policy in policies for key in policy):
            yield one
    yield from differences(
        "source", *({key: one["source"].get(key) for key in ("uri", "digest")} for one in (before, after))
    )
    yield from differences("data", *({role: s["digest"] for role, s in one["data"].items()} for one in (before, after)))
    places = [one["environment"] for one in (before, after)]
    yield from differences("hardware", *(place.get("hardware") or {} for place in places))
    for key in ("hardware_fingerprint", "python"):
        yield from differences("hardware" if "hard" in key else "package", *({key: p.get(key)} for p in places))
    packages = [place.get("packages") or {} for place in places]
    yield from differences("package", *packages)
    chains = [
        {name: version for t in one["targets"] for c in t["candidates"] for name, version in c["toolchain"].items()}
        for one in (before, after)
    ]
    known = packages[0].keys() | packages[1].keys()
    shared = chains[0].keys() & chains[1].keys() - known  # a backend that is new is among the candidates
    yield from differences("toolchain", *({name: chain[name] for name in shared} for chain in chains))


def _taken_out(values: dict[str, Any], beginning: str) -> int:
    """How many values lay there: of a target that one run has alone, they say nothing one by one."""
    found = [path for path in values if path.startswith(beginning)]
    for path in found:
        del values[path]
    return len(found)


def _values(document: Mapping[str, Any]) -> dict[str, Any]:
    policy = document["policy"]
    return {one["path"]: one["value"] for one in policy.get("values", ())} or {"digest": policy["digest"]}


def differences(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    """The keys whose values differ, in order."""
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield Difference(kind=kind, what=key, before=before.get(key), after=after.get(key))


def _document(given: RunResult | str | os.PathLike[str]) -> dict[str, Any]:
    if isinstance(given, RunResult):
        return result_document(given)
    return read_document(given)


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
        lost = (only,) if winners[0] is not None else ()
        return TargetComparison(target=name, winners=winners, changes=(only,), regressed=bool(lost), regressions=lost)
    changes, notes, figures, worse = [], [], [], []
    if winners[0] != winners[1]:
        changes.append(f"winner: {winners[0] or 'none'} -> {winners[1] or 'none'}")
        worse += changes if winners[1] is None else []
    if before["source"]["digest"] != after["source"]["digest"]:
        notes.append("the source models differ")
    if slowed := _slowed(old, new):
        notes.append(f"something slowed the baseline down in {slowed}: speeds over it are not compared")
    of_speeds: dict[str, list[str]] = {}
    ours = {_kind(candidate): candidate for candidate in new["candidates"]}
    pairs = [(_kind(one), one, ours.pop(_kind(one), None)) for one in old["candidates"]]
    for kind, candidate, other in (*_winners(old, new), *pairs):
        if other is None:
            changes.append(f"{kind}: not in the second run")
            continue
        moved = f"{kind}: {candidate['state']} -> {other['state']}: {other['reason']}"
        if candidate["state"] != other["state"]:
            changes.append(moved)
        if candidate["job_id"] == winners[0] and other["state"] not in ("won", "lost"):
            worse.append(moved)
        found, note = _figures(kind, candidate, other)
        if slowed:
            found = [figure for figure in found if figure.what != "speedup"]
            note = ""
        of_speeds.setdefault(note, []).append(kind)
        if candidate["job_id"] == winners[0] and other["job_id"] == winners[1]:
            through, note = _through_predict(kind, old, new, before, after)
            notes += [f"{kind}: {note}"] if note else []
            found += through
            other_winner = _kind(candidate) != _kind(other)
            of_both = [f for f in found if f.verdict == "worse" and not (other_winner and _is_as_large(f))]
            worse += map(figure_text, of_both)
        figures += found
        changes += [figure_text(figure) for figure in found if figure.verdict != "unchanged"]
    changes += [f"{kind}: new, {candidate['state']}" for kind, candidate in ours.items()]
    notes += [f"{', '.join(kinds)}: {note}" for note, kinds in of_speeds.items() if note]
    notes += _served(old, new)
    return TargetComparison(
        target=name,
        winners=winners,
        changes=tuple(changes),
        notes=tuple(notes),
        figures=tuple(figures),
        regressed=bool(worse),
        regressions=tuple(dict.fromkeys(worse)),
    )


def _slowed(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """In which runs something slowed the baseline down: `the first run`, `both runs`; empty where in none."""
    first, second = ((run.get("predict_speedup") or {}).get("contradiction") for run in (old, new))
    return "both runs" if first and second else "the first run" if first else "the second run" if second else ""


def _served(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Throughputs of two runs differ by what the machine did meanwhile, and no original was served in turns with them.
    They are shown, so that nobody takes them for equal."""
    found = [((target.get("serving") or {}).get("winner") or {}).get("throughput_per_s") for target in (old, new)]
    if all(found) and found[0] != found[1]:
        before, after = map(numbers.rate, found)
        yield f"served {before} -> {after} requests/s: loads of two runs are not compared"


def _kind(candidate: Mapping[str, Any]) -> str:
    """What a candidate is beside its model's version and target, which a job's id begins with: their names may hold two
    dashes too."""
    backend, job_id = f"--{candidate['backend']}--", str(candidate["job_id"])
    return f"{backend}{job_id.partition(backend)[2]}".removeprefix("--") if backend in job_id else job_id


def _winners(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """(both names, first winner, second winner), where they are not of one kind. The winner is what is published: where
    no candidate is slower than it was, the target still is if a slower one wins."""
    first, second = (
        next((one for one in target["candidates"] if one["job_id"] == target["winner"]), None) for target in (old, new)
    )
    if first and second and _kind(first) != _kind(second):
        yield f"{_kind(first)} -> {_kind(second)}", first, second


def _is_as_large(figure: Figure) -> bool:
    """Of another winner: which of two that tie wins is chance, and their sizes differ by some bytes."""
    return figure.what == "size" and figure.ratio <= AS_LARGE


def _figures(kind: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[Figure], str]:
    """(figures, a note on the speeds: why they can't be compared, or at which batch size they are). Speeds over the
    original are compared, each measured in turn with it: latencies of two runs also differ by what the machine did
    meanwhile."""
    found = []
    if old["size_bytes"] and new["size_bytes"]:
        sizes = float(old["size_bytes"]), float(new["size_bytes"])
        verdict: Verdict = "unchanged" if sizes[0] == sizes[1] else "better" if sizes[1] < sizes[0] else "worse"
        found.append(
            Figure(
                candidate=kind, what="size", before=sizes[0], after=sizes[1], ratio=sizes[1] / sizes[0], interval=None,
                verdict=verdict,
            )
        )  # fmt: skip
    timings = [_timings(candidate) for candidate in (old, new)]
    if not all(timings):
        return found, ""
    size = next((size for size in timings[0] if size in timings[1]), None)
    if size is None:
        measured = " -> ".join(", ".join(of) for of in timings)
        return found, f"measured at other batch sizes ({measured}): speeds are not compared"
    first, second = (of[size] for of in timings)
    if first["hardware_fingerprint"] != second["hardware_fingerprint"]:
        return found, "measured on different hardware: speeds are not compared"
    if not (first["stable"] and second["stable"]):
        return found, "an unstable measurement: speeds are not compared"
    ratio = _ratio(kind, "speedup", (first["speedup"], first["speedup_interval"]), second)
    is_first = all(next(iter(of)) == size for of in timings)
    return [*([ratio] if ratio else []), *found], "" if is_first else f"speeds are compared at batch size {size}"


def _through_predict(
    kind: str, old: Mapping[str, Any], new: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[list[Figure], str]:
    """(figures, why predict() can't be compared where nothing else says so)."""
    one, two = old.get("predict_speedup"), new.get("predict_speedup")
    places = {run["environment"].get("hardware_fingerprint") for run in (before, after)}
    if not one or not two or len(places) > 1 or not (one["stable"] and two["stable"]):
        return [], ""
    if one["rows"] != two["rows"]:
        return [], f"predict() was given other numbers of rows ({one['rows']} -> {two['rows']}): it is not compared"
    given = {"speedup": two["speedup"], "speedup_interval": two["interval"]}
    ratio = _ratio(kind, "predict() speedup", (one["speedup"], one["interval"]), given)
    return [ratio] if ratio else [], ""


def _ratio(kind: str, what: str, first: tuple[float, Any], second: Mapping[str, Any]) -> Figure | None:
    """The quotient of two speedups of two runs, which are independent: its interval is by squares of the distances to
    both intervals' ends, on the logarithm (Zou and Donner, Statistics in Medicine 27:1693, 2008)."""
    (one, ends), two, own = first, second["speedup"], second["speedup_interval"]
    if ends is None or own is None or min(ends[0], own[0]) <= 0:
        return None
    below = math.hypot(math.log(two / own[0]), math.log(ends[1] / one))
    above = math.hypot(math.log(own[1] / two), math.log(one / ends[0]))
    ratio = two / one
    low, high = ratio * math.exp(-below), ratio * math.exp(above)
    verdict: Verdict = "better" if low > 1 else "worse" if high < 1 else "unchanged"
    return Figure(candidate=kind, what=what, before=one, after=two, ratio=ratio, interval=(low, high), verdict=verdict)


def figure_text(figure: Figure) -> str:
    """A figure that changed: `openvino--fp32: slower beyond the noise: 6.52× -> 3.26× over the original, ...`."""
    if figure.interval is None:
        word = "smaller" if figure.verdict == "better" else "larger"
        return f"{figure.candidate}: {word}: {numbers.size(int(figure.before))} -> {numbers.size(int(figure.after))}"
    word = "faster" if figure.verdict == "better" else "slower"
    through = " through predict()" if figure.what.startswith("predict") else ""
    return (
        f"{figure.candidate}: {word} beyond the noise{through}: {numbers.ratio(figure.before)} -> "
        f"{numbers.ratio(figure.after)} over the original, {numbers.ratio(figure.ratio)} of before "
        f"({' to '.join(_beside_one(end) for end in figure.interval)})"
    )


def _beside_one(end: float) -> str:
    """An interval's end that two decimals would make 1 has more: that 1 lies outside is what is said."""
    text = f"{end:.2f}"
    return told_apart(end, 1)[0] if text == "1.00" else text


def _timings(candidate: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Batch size → timing, in the target's order, of those with a speedup."""
    by_batch: dict[str, dict[str, Any]] = (candidate["timing"] or {}).get("by_batch", {})
    return {size: timing for size, timing in by_batch.items() if timing["speedup"] is not None}
