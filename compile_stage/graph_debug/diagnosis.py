"""What `compile-stage debug` found, for the terminal, the page and `debug.json` alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from compile_stage.core.records import Trial, record
from compile_stage.graph_debug.reduce import Reduced
from compile_stage.graph_debug.trace import Trace


@record
class Kept:
    """What a search for nodes to keep in higher precision came to.

    Attributes:
        nodes: A set with which it passes; None when none was found.
        minimal: No trial passed with fewer nodes, and without each node of the set it was tried.
        note: What became of the search.
    """

    nodes: tuple[str, ...] | None
    minimal: bool
    trials: tuple[Trial, ...]
    note: str = ""


@record
class Failed:
    """A compilation that failed, and the small graph that still does.

    Attributes:
        step: `lower`, `compile`, ...
        nodes, ops: Of the small graph; empty when it was not reduced.
    """

    step: str
    problem: str
    reduced: Reduced | None = None
    nodes: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()


@record
class Diagnosis:
    """One candidate, looked into.

    Attributes:
        title: The job's id, or the two files' names.
        misses: The gates that do not hold, one sentence each; empty where none was looked at.
        trace: None when there was nothing to run.
        kept: None when no set was searched for; `notes` says why.
        failed: None when it compiles.
        bundle: Folder to attach to a bug report.
        packages: Package → version.
    """

    title: str
    precision: str
    backend: str
    reference: str
    candidate: str
    misses: tuple[str, ...] = ()
    trace: Trace | None = None
    kept: Kept | None = None
    failed: Failed | None = None
    bundle: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The finding, in one sentence."""
        if self.failed is not None:
            if self.failed.reduced is None:
                return f"it fails to {self.failed.step}: {self.failed.problem}"
            count, of = len(self.failed.nodes), self.failed.reduced.of
            named = ", ".join(f"{name} ({op})" for name, op in zip(self.failed.nodes, self.failed.ops, strict=True))
            return f"{count} of {of} nodes are enough to make it fail: {named}"
        if self.trace is None:
            return self.notes[0] if self.notes else "there is nothing to look into"
        if (first := self.trace.find(self.trace.first or "")) is None:
            worst = max(self.trace.nodes, key=lambda error: error.drop_db, default=None)
            ends = ""
            if worst is not None and worst.drop_db > 0:
                ends = f"; the largest drop is {worst.drop_db:.1f} dB at {worst.node} ({worst.op})"
            return f"no single node departs by {self.trace.drop_db:g} dB{ends}"
        if first.kind == "not finite":
            return f"the error departs at {first.node} ({first.op}): values are NaN or infinite in the candidate only"
        cause = "the quantisation of its output" if first.kind == "quantisation" else "its own computation"
        return (
            f"the error departs at {first.node} ({first.op}): {first.snr_db:.1f} dB, {first.drop_db:.1f} dB worse than "
            f"what it reads, by {cause}"
        )
