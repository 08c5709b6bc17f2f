"""On which device the original runs: on the one that its artifacts run on, so that no speedup is that of a GPU over a
CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from compile_stage.core import plugins
from compile_stage.core.environment import Hardware
from compile_stage.core.records import Job, Target

CPU = "cpu"

_WHOLE_MACHINES = (CPU, "apple", "android", "browser")
"""Devices that name a kind of machine and no accelerator in it: the original runs on that machine's CPU."""


def baseline_target(target: Target) -> Target:
    """The target as the original is opened for it when it is measured: its device is one of a source's
    `capabilities.devices`."""
    return replace(target, device=CPU) if target.device in _WHOLE_MACHINES else target


def refuse_baseline(flavor: str, target: Target) -> str | None:
    """The reason when a model of that flavor can't be the baseline of artifacts that run on the target's device."""
    wanted = baseline_target(target).device
    if flavor not in plugins.names("sources"):
        return None  # there is no original to open: `inspect` says so
    devices = plugins.load("sources", flavor).capabilities.devices
    if wanted in devices:
        return None
    only = "the CPU" if devices == (CPU,) else " and ".join(devices)
    return (
        f"a speedup on {target.device} over a baseline on the CPU would be no comparison: models of flavor {flavor} "
        f"run on {only} only; set the target's device to {' or '.join(devices)}"
    )


def reference_target(flavor: str, target: Target, jobs: Iterable[Job], hardware: Hardware) -> Target:
    """The target as the original is opened for it to predict what artifacts are compared with.

    That is where it is measured too. Where none of the artifacts can run on the target's device here, which holds for
    what is cross-compiled, it is the CPU. Its threads are the target's, or one (`asked_on_one_thread`).
    """
    if flavor in plugins.names("sources") and plugins.load("sources", flavor).capabilities.asked_on_one_thread:
        target = replace(target, threads=1)
    wanted = baseline_target(target)
    if wanted.device == CPU or any(_runs_here(job) for job in jobs):
        return wanted
    has_it = hardware.accelerators and refuse_baseline(flavor, target) is None
    may_run = any(not job.not_runnable_here for job in jobs)
    return wanted if has_it and may_run else replace(target, device=CPU)


def _runs_here(job: Job) -> bool:
    """True when what the job compiles is for this machine; of a backend that cross-compiles, only its artifact
    tells."""
    return not job.not_runnable_here and not crosses(job.backend, job.target)


def crosses(backend: str, target: Target) -> bool:
    """True when what the backend compiles for the target may be for another machine."""
    return plugins.load("backends", backend).capabilities_for(target).cross_compiles
