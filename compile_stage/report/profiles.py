"""Profiles as the reports show them, and as JSON."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compile_stage.core.digest import plain
from compile_stage.core.records import Fusion, GraphNode, Operator, Profile, Profiled, RunResult, TargetResult
from compile_stage.core.records.profile import PROFILE_FORM
from compile_stage.report import numbers

SHOWN = 8
"""So many operators of each model a report shows; result.json has more, and the trace all."""

FOLDER = "profiles"
TRACE = ".trace.json"
"""How the name of a trace ends."""
_SHOWN_NODES = 6


@dataclass(frozen=True)
class ProfileView:
    """One model's profile for people.

    Attributes:
        title: Whose it is: `baseline: PyTorch (eager)`.
        lines: What else is to be said of it, a sentence each.
        fusions: `Conv a + Relu b → Conv c`, a line each; at most `SHOWN`.
        trace: File name relative to the report; empty where there is none.
    """

    title: str
    profile: Profile | None
    reason: str
    lines: tuple[str, ...]
    fusions: tuple[str, ...]
    trace: str

    @property
    def operators(self) -> tuple[Operator, ...]:
        """Those that are shown."""
        return self.profile.operators[:SHOWN] if self.profile is not None else ()


def views(target: TargetResult) -> tuple[ProfileView, ...]:
    """The profiles of a target: the baseline's first."""
    return tuple(view(target.policy.target.name, profiled) for profiled in target.profiles)


def view(target: str, profiled: Profiled) -> ProfileView:
    """One profile, in words."""
    profile, whose = profiled.profile, "Baseline" if profiled.name == "baseline" else profiled.name
    return ProfileView(
        title=f"{whose}: {profiled.runtime}" if whose == "Baseline" else whose,
        profile=profile,
        reason=profiled.reason,
        lines=tuple(_lines(profile)) if profile is not None else (),
        fusions=tuple(map(fusion_text, (profile.fusions or ())[:SHOWN])) if profile is not None else (),
        trace=trace_name(target, profiled) if profiled.trace else "",
    )


def fusion_text(fusion: Fusion) -> str:
    """`Conv a + Relu b → Conv c`."""
    shown = " + ".join(_node(node) for node in fusion.sources[:_SHOWN_NODES])
    more = len(fusion.sources) - _SHOWN_NODES
    return f"{shown}{f' + {more} more' if more > 0 else ''} → {fusion.kind} {fusion.kernel}"


def operator_name(operator: Operator) -> str:
    """Its name, without a kind that it begins with, and the nodes that it computes where they have other names."""
    names = [node.name for node in operator.sources]
    shown = ", ".join(names[:_SHOWN_NODES])
    if not names or names == [operator.name]:
        return operator.name
    return f"{operator.name} ({shown}{', ...' if len(names) > _SHOWN_NODES else ''})"


def _node(node: GraphNode) -> str:
    return f"{node.kind} {node.name}"


def _lines(profile: Profile) -> Iterable[str]:
    yield (
        f"{profile.profiler}: {numbers.count(profile.calls, 'call')} of batch {profile.batch_size}, "
        f"{numbers.duration(profile.call_s)} each while profiled; {numbers.count(profile.kernels, 'kernel')}."
    )
    if profile.fusions and len(profile.fusions) > SHOWN:
        yield f"{len(profile.fusions)} fusions; the first {SHOWN} are shown."
    if profile.fusions is not None and not profile.fusions:
        yield "No nodes were fused."
    if profile.conversions:
        spent = sum(operator.share for operator in profile.conversions)
        kinds = ", ".join(sorted({operator.kind for operator in profile.conversions}))
        said = f"{numbers.count(len(profile.conversions), 'conversion')} of layout or type ({kinds})"
        yield f"{said}: {numbers.percent(spent)} of the time."
    if profile.folded:
        yield f"{numbers.count(len(profile.folded), 'node')} became constants when the graph was loaded."
    if profile.memory:
        sizes = (f"{_MEMORY.get(key, key)} {numbers.size(size)}" for key, size in profile.memory.items())
        yield f"Memory: {', '.join(sizes)}."


_MEMORY = {
    "peak_bytes": "peak of the allocator",
    "arena_bytes": "arena held",
    "allocated_bytes": "allocated in each call",
}


def profiles_json(uri: str, targets: Mapping[str, Sequence[Profiled]], *, kept: bool) -> Mapping[str, Any]:
    """What the command `profile` found, as plain JSON.

    Args:
        targets: Target's name → its profiles.
        kept: Whether the traces are.
    """
    shown = {
        name: [profiled if kept else replace(profiled, trace="") for profiled in profiles]
        for name, profiles in targets.items()
    }
    return {"model": uri, "targets": {name: profile_document(name, profiles) for name, profiles in shown.items()}}


def profile_document(target: str, profiles: Sequence[Profiled]) -> Mapping[str, Any]:
    """The profiles of one target as plain JSON: the form `PROFILE_FORM`."""
    return {
        "schema": PROFILE_FORM,
        "models": {
            profiled.name: {
                "runtime": profiled.runtime,
                "profile": None if profiled.profile is None else _plain(profiled.profile),
                "reason": profiled.reason or None,
                "trace": trace_name(target, profiled) if profiled.trace else None,
            }
            for profiled in profiles
        },
    }


def _plain(profile: Profile) -> dict[str, Any]:
    # The trace's own name says nothing here: it is copied to another.
    return {key: value for key, value in plain(profile).items() if key != "trace"}


def trace_name(target: str, profiled: Profiled) -> str:
    """Where a trace lies beside the reports: `profiles/JOB.trace.json`."""
    name = f"{target}--baseline" if profiled.name == "baseline" else profiled.name
    return f"{FOLDER}/{re.sub('[^A-Za-z0-9_.-]+', '-', name)}{TRACE}"


def write_traces(result: RunResult, out: Path) -> None:
    """Copy the traces of a run beside its reports."""
    for target in result.targets:
        copy_traces(target.policy.target.name, target.profiles, out)


def copy_traces(target: str, profiles: Iterable[Profiled], out: Path) -> None:
    """Copy the traces of one target's models into a folder of reports."""
    for profiled in profiles:
        if profiled.trace and Path(profiled.trace).is_file():
            place = out / trace_name(target, profiled)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(profiled.trace, place)
