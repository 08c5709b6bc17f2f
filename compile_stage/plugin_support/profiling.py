"""What profilers of several runtimes share: the calls that are profiled, the ranking of kernels, and the trace file."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.records import GraphNode, Operator, Profile
from compile_stage.core.records.profile import MOST_LISTED, MOST_OPERATORS

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

WARM_UP_CALLS = 3
"""Runtimes allocate, pack weights and look for kernels in their first calls."""

_HELD_UP_S, _HELD_UP_TIMES = 1e-3, 10.0
"""A run that takes longer than both, the second of the kernel's median, was held up. A scheduler takes a core away for
a millisecond and more: one such run of 50 made a softmax of 5 µs 88 % of a network."""

_SECONDS, _MOST_CALLS, _FEWEST_CALLS = 0.25, 50, 2
TRACE = "trace.json"
_TRACE_BYTES = 2_000_000  # some ten thousand kernels; a browser opens it at once


@dataclass(frozen=True)
class ProfileRequest:
    """What is to be profiled, and on what.

    Attributes:
        threads: Of the runtime.
        device: Of the target.
        batches: Real samples, at least one; they are used in turn.
        batch_size: Their rows.
        into: A folder for `trace.json`.
    """

    threads: int
    device: str
    batches: Sequence[Batch]
    batch_size: int
    into: Path


@dataclass(frozen=True)
class Kernel:
    """One run of one kernel, in seconds; `start_s` is since any fixed moment."""

    name: str
    kind: str
    start_s: float
    seconds: float
    implementation: str = ""


def warm_up(run: Callable[[Batch], Any], batches: Sequence[Batch]) -> None:
    """Make the first calls, which no profile counts."""
    for batch in itertools.islice(itertools.cycle(batches), WARM_UP_CALLS):
        run(batch)


def call_repeatedly(
    run: Callable[[Batch], Any], batches: Sequence[Batch], most_calls: int = _MOST_CALLS
) -> list[float]:
    """Call for a quarter of a second, 2 to 50 times, or to `most_calls` where these are fewer; the seconds of each
    call."""
    taken: list[float] = []
    for batch in itertools.islice(itertools.cycle(batches), min(max(most_calls, _FEWEST_CALLS), _MOST_CALLS)):
        began = time.perf_counter()
        run(batch)
        taken.append(time.perf_counter() - began)
        if sum(taken) > _SECONDS and len(taken) >= _FEWEST_CALLS:
            break
    return taken


def undisturbed(seconds: Sequence[float]) -> list[float]:
    """The same, each run that was held up (`_HELD_UP_S`, `_HELD_UP_TIMES` the median) as long as the median: another
    process had the core meanwhile."""
    usual = statistics.median(seconds) if seconds else 0.0
    longest = max(_HELD_UP_S, _HELD_UP_TIMES * usual)
    return [one if one <= longest else usual for one in seconds]


def rank(kernels: Iterable[Kernel], sources: Mapping[str, Sequence[GraphNode]] | None = None) -> tuple[Operator, ...]:
    """Kernels of the same name and kind as one operator each, the one with the most time first. Runs that were held up
    count as long as the kernel's median.

    Args:
        sources: Kernel's name → the nodes that it computes.
    """
    runs: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        runs[kernel.name, kernel.kind, kernel.implementation].append(kernel.seconds)
    runs = {kernel: undisturbed(taken) for kernel, taken in runs.items()}
    everything = sum(map(sum, runs.values()))
    operators = [
        Operator(
            name=name,
            kind=kind,
            calls=len(taken),
            total_s=sum(taken),
            mean_s=sum(taken) / len(taken),
            share=sum(taken) / everything if everything else 0.0,
            implementation=implementation,
            sources=tuple((sources or {}).get(name, ())),
        )
        for (name, kind, implementation), taken in runs.items()
    ]
    return tuple(sorted(operators, key=lambda operator: (-operator.total_s, operator.name)))


def profile_of(
    profiler: str, request: ProfileRequest, taken: Sequence[float], operators: Sequence[Operator], **more: Any
) -> Profile:
    """A profile with its longest operators, and its lists cut where they are too long for a report.

    Args:
        taken: Seconds of each call of the model: `undisturbed` where the kernels are, so that kernels and calls are of
            one kind.
        operators: All, as `rank` gives them.
        more: Further fields of the profile, as far as the runtime tells them.
    """
    profile = Profile(
        profiler=profiler,
        batch_size=request.batch_size,
        calls=len(taken),
        call_s=sum(taken) / len(taken),
        kernels=len(operators),
        kernels_s=sum(operator.total_s for operator in operators),
        operators=tuple(operators[:MOST_OPERATORS]),
        **more,
    )
    for name in ("fusions", "conversions", "folded"):
        listed = getattr(profile, name)
        if listed is not None and len(listed) > MOST_LISTED:
            note = f"the first {MOST_LISTED} of {len(listed)} {_WORDS[name]} are listed"
            profile = replace(profile, notes=(*profile.notes, note), **{name: listed[:MOST_LISTED]})
    return profile


_WORDS = {"fusions": "fusions", "conversions": "inserted conversions", "folded": "folded nodes"}


def trace_events(kernels: Iterable[Kernel]) -> list[dict[str, Any]]:
    """Kernels as complete events of Chrome's trace form, in microseconds."""
    return [
        {
            "ph": "X",
            "cat": "kernel",
            "name": kernel.name,
            "ts": round(kernel.start_s * 1e6, 3),
            "dur": round(kernel.seconds * 1e6, 3),
            "pid": 0,
            "tid": 0,
            "args": {"kind": kernel.kind, "implementation": kernel.implementation},
        }
        for kernel in kernels
    ]


def write_trace(events: Iterable[Mapping[str, Any]], into: Path) -> tuple[str, tuple[str, ...]]:
    """Write `trace.json` for Chrome's trace viewer and Perfetto, at most 2 MB.

    Returns:
        The file's name, and a note where events were left out.
    """
    lines, size, left_out = [], 0, 0
    for event in events:
        line = json.dumps(event, separators=(",", ":"))
        size += len(line) + 2
        if size > _TRACE_BYTES:
            left_out += 1
        else:
            lines.append(line)
    text = '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(lines) + "\n]}\n"
    (into / TRACE).write_text(text, encoding="utf-8")
    note = f"the trace holds the first {len(lines)} of {len(lines) + left_out} events"
    return TRACE, (note,) if left_out else ()
