"""What is done in workers to find why a candidate goes wrong: the trace against FP32, a small graph that fails like it,
the bundle for a bug report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import CompileStageError, WorkerError
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import Job, PortableModel
from compile_stage.graph_debug.comparison import Comparison
from compile_stage.graph_debug.diagnosis import Failed
from compile_stage.graph_debug.reduce import reduce_nodes
from compile_stage.graph_debug.trace import Trace

MAX_TRIES = 48
"""Graphs that a reduction may try; each is compiled in a worker."""


def trace(context: Context, worker: Worker, pair: Comparison, count: int) -> Trace:
    """Both files on the first `count` samples, tensor by tensor."""
    with context.events.step("trace", pair.title):
        answer = worker.call("trace_nodes", pair=pair, count=count)
    traced: Trace = revive(Trace, answer)
    return traced


def reduce_failure(context: Context, job: Job, model: PortableModel, limits: WorkerLimits, into: Path) -> Failed | None:
    """The smallest graph that fails to compile as the job does, as `into/reduced/model.onnx`; None when the graph
    compiles alone.

    Every try is made in a worker, and after a crash in a new one.
    """
    with (
        context.events.step("reduce", job.id),
        context.worker(job.id, limits) as source_worker,
        _Compiler(context, limits) as compiler,
    ):
        nodes: list[list[str]] = source_worker.call("list_nodes", path=model.path)
        failure = compiler.failure(job, model, into / "whole")
        if failure is None:
            return None

        def fails(chosen: Sequence[int]) -> str | None:
            context.events.progress("reduce", job.id, f"trying {len(chosen)} of {len(nodes)} nodes")
            answer = source_worker.call("cut_graph", path=model.path, nodes=list(chosen), into=str(into / "try"))
            return compiler.failure(job, revive(PortableModel, answer), into / "tried") if answer else None

        reduced = reduce_nodes(len(nodes), failure, fails, max_tries=MAX_TRIES)
        source_worker.call("cut_graph", path=model.path, nodes=list(reduced.nodes), into=str(into / "reduced"))
        names, ops = zip(*(nodes[i] for i in reduced.nodes), strict=True)
        return Failed(step="compile", problem=failure, reduced=reduced, nodes=names, ops=ops)


def bundle_trace(
    context: Context, worker: Worker, pair: Comparison, tensor: str, facts: Mapping[str, Any], into: Path
) -> str:
    """Write the bundle about a wrong output; returns its folder."""
    into.mkdir(parents=True, exist_ok=True)
    with context.events.step("bundle", pair.title):
        worker.call("write_trace_bundle", pair=pair, tensor=tensor, facts=dict(facts), into=str(into))
    return str(into)


def bundle_failure(
    context: Context, worker: Worker, job: Job, graph: Path, *, facts: Mapping[str, Any], into: Path
) -> str:
    """Write the bundle about a graph that can't be compiled; returns its folder."""
    into.mkdir(parents=True, exist_ok=True)
    with context.events.step("bundle", job.id):
        worker.call("write_failure_bundle", graph=str(graph), backend=job.backend, facts=dict(facts), into=str(into))
    return str(into)


class _Compiler:
    """Compiles one graph after the other; a worker that dies of one is replaced for the next."""

    def __init__(self, context: Context, limits: WorkerLimits) -> None:
        self._context, self._limits = context, limits
        self._worker: Worker | None = None
        self._stack = ExitStack()

    def __enter__(self) -> _Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def failure(self, job: Job, model: PortableModel, into: Path) -> str | None:
        """What compiling this graph fails with, or None."""
        if self._worker is None:
            self._worker = self._stack.enter_context(
                self._context.worker(job.id, replace(self._limits, interpreter=plugins.interpreter_of(job.backend)))
            )
        try:
            self._context.compile_in(self._worker, job, model, None, into)
        except WorkerError as error:
            if error.worker_is_gone:
                self._stack.close()
                self._worker = None
            return f"{error.kind}: {error.problem}"
        except CompileStageError as error:
            return error.problem
        return None
