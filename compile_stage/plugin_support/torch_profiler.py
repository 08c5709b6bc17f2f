"""PyTorch's own profiler, for sources and backends that compute with it.

On a CPU it records without Kineto: that is the part of `torch.profiler` that traces GPUs, costs a second of CPU time
when it starts, and adds nothing to the operators of a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from compile_stage.core.records import Artifact, Operator, Profile, SourceModel, Target
from compile_stage.plugin_support.profiling import (
    Kernel,
    ProfileRequest,
    call_repeatedly,
    profile_of,
    rank,
    trace_events,
    undisturbed,
    warm_up,
    write_trace,
)

if TYPE_CHECKING:
    from compile_stage.core.ports import Backend, Exporter, Session

_CONVERSIONS = ("aten::_to_copy", "aten::contiguous", "aten::clone", "aten::copy_", "aten::to_mkldnn")
_INNER = ("[memory]", "profiler::")
_MOST_EVENTS = 20_000  # in all calls: to read a record of 200,000, a recurrent network's, takes 20 s


def profile_source(exporter: Exporter, source: SourceModel, target: Target, request: ProfileRequest) -> Profile:
    """Profile an original that PyTorch runs."""
    with exporter.open(source, target) as session:
        return _profile(session, request)


def profile_artifact(backend: Backend, artifact: Artifact, request: ProfileRequest) -> Profile:
    """Profile an artifact that PyTorch runs."""
    with backend.open(artifact, request.threads) as session:
        return _profile(session, request)


def _profile(session: Session, request: ProfileRequest) -> Profile:
    import torch

    # A whole generation of a language model is hundreds of operators for each token, whose record takes longer to read
    # than all else; the call for its prompt has each of them once.
    run = getattr(session, "first", session.run)
    warm_up(run, request.batches)
    if request.device == "cuda":
        recorder: Any = torch.profiler.profile(record_shapes=True, profile_memory=True, acc_events=True)
        most_calls = _MOST_EVENTS
    else:
        on_cpu = partial(torch.autograd.profiler.profile, use_kineto=False, record_shapes=True, profile_memory=True)
        with on_cpu() as once:
            run(request.batches[0])
        recorder, most_calls = on_cpu(), _MOST_EVENTS // max(1, len(_events(once)))
    with recorder as recorded:
        taken = call_repeatedly(run, request.batches, most_calls)
    events = [event for event in _events(recorded) if not event.name.startswith(_INNER)]
    kernels = [_kernel(event) for event in events]
    operators = rank(kernel for kernel in kernels if kernel.seconds > 0)
    trace, notes = write_trace(trace_events(_whole(events)), request.into)
    return profile_of(
        f"PyTorch {torch.__version__} (torch.profiler)",
        request,
        undisturbed(taken),
        operators,
        conversions=_conversions(operators),
        memory={"allocated_bytes": _allocated(events) // len(taken)},
        notes=(
            *notes,
            "times are an operator's own, without those that it calls; PyTorch names no nodes, so calls of the same "
            "operator on the same shapes are one line",
        ),
        trace=trace,
    )


def _events(recorded: Any) -> Sequence[Any]:
    events: Sequence[Any] = recorded.events() if hasattr(recorded, "events") else recorded.function_events
    return events


def _kernel(event: Any) -> Kernel:
    """An operator's own time; of one on a GPU, the time there."""
    on_gpu = event.device_type.name != "CPU"
    own_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
    shapes = [str(shape).replace(" ", "") for shape in event.input_shapes or () if shape]
    return Kernel(
        name=" ".join([event.name, *shapes]),
        kind=event.name,
        start_s=event.time_range.start / 1e6,
        seconds=own_us / 1e6,
        implementation=event.device_type.name.lower(),
    )


def _whole(events: Sequence[Any]) -> list[Kernel]:
    """Operators with those that they call within them, as a trace shows them."""
    return [
        Kernel(
            name=event.name,
            kind=json.dumps(event.input_shapes or []),
            start_s=event.time_range.start / 1e6,
            seconds=event.time_range.elapsed_us() / 1e6,
            implementation=event.device_type.name.lower(),
        )
        for event in events
    ]


def _allocated(events: Sequence[Any]) -> int:
    """Bytes that operators took, whether or not they gave them back."""
    return sum(max(0, int(event.self_cpu_memory_usage)) for event in events)


def _conversions(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    return tuple(operator for operator in operators if operator.kind in _CONVERSIONS)
