"""What a runtime's own profiler said of one model: where its time went, and what became of the graph's nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from compile_stage.core.records.base import record

PROFILE_FORM = "compile-stage/profile/v1"
"""The form of a profile as JSON. Within it fields keep their name and meaning; more may be added."""

MOST_OPERATORS = 20
"""So many operators a profile lists, those with the most time; the trace beside it has them all."""

MOST_LISTED = 100
"""So many fusions, conversions and folded nodes a profile lists of each; `notes` says when there were more."""


@record
class GraphNode:
    """A node of the graph that the runtime was given."""

    name: str
    kind: str


@record
class Operator:
    """One kernel that the runtime ran.

    Attributes:
        name: The runtime's own; in PyTorch, which names no nodes, the operator with the shapes of its inputs.
        kind: Its type: `Conv`, `aten::addmm`, `FullyConnected`.
        calls: Of the kernel, over all profiled calls of the model.
        total_s, mean_s: Seconds of all of these, and of one, each that was held up as long as the median.
        share: Of the time of all kernels, 0 to 1.
        implementation: What the runtime says of how it is computed: a provider, an instruction set; empty where it does
            not say.
        sources: The nodes of the graph that it computes; empty where that is not known.
    """

    name: str
    kind: str
    calls: int
    total_s: float
    mean_s: float
    share: float
    implementation: str = ""
    sources: tuple[GraphNode, ...] = ()


@record
class Fusion:
    """Several nodes of the graph that one kernel computes."""

    kernel: str
    kind: str
    sources: tuple[GraphNode, ...]


@record
class Profile:
    """One model at one batch size, by its runtime's profiler. Its figures are for finding what is slow: a profiler
    slows what it looks at, so no speedup is computed from them.

    Attributes:
        profiler: Which one, with its version.
        batch_size: Rows of each call.
        calls: Of the model, profiled after a warm-up.
        call_s: Mean seconds of such a call, the profiler's own work included; one that was held up as
            the median, but with OpenVINO.
        kernels: How many different ones ran.
        kernels_s: Seconds of all of them in all calls: what `share` is a share of.
        operators: Those with the most time, at most `MOST_OPERATORS`.
        fusions: What was fused into what; None where the runtime does not tell.
        conversions: Kernels that the runtime put in to change layout or type, which no node of the graph asks for; None
            where it does not tell.
        folded: Nodes that the runtime computed once, when it loaded the graph; None where it does not tell.
        memory: Bytes, as far as the runtime tells: `peak_bytes` and `arena_bytes` of its allocator since the session
            was made, `allocated_bytes` of each call.
        notes: What a reader should know.
        trace: Name of the file with every kernel of every call, in the form of Chrome's trace viewer, in the folder
            that the profiler was given; empty where there is none.
    """

    profiler: str
    batch_size: int
    calls: int
    call_s: float
    kernels: int
    kernels_s: float
    operators: tuple[Operator, ...]
    fusions: tuple[Fusion, ...] | None = None
    conversions: tuple[Operator, ...] | None = None
    folded: tuple[GraphNode, ...] | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    trace: str = ""


@record
class Profiled:
    """What came of profiling one model.

    Attributes:
        name: `baseline`, or a job's id.
        runtime: Its framework or backend, for people.
        profile: None where there is none.
        reason: Then why, in one sentence.
        trace: The trace's file; empty where there is none.
    """

    name: str
    runtime: str
    profile: Profile | None = None
    reason: str = ""
    trace: str = ""
