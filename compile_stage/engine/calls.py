"""What a worker can do: the whole list, each a plain function of plain values.

The parent decides, caches and judges; a worker holds the heavy libraries and does one thing at a time. At most one model
is open in a worker: opening another closes the one before, so that a process's peak memory is one model's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core import plugins
from compile_stage.core.baseline import baseline_target, refuse_baseline
from compile_stage.core.digest import revive
from compile_stage.core.errors import SourceError, UsageError
from compile_stage.core.records import (
    Artifact,
    Compliance,
    DataSpec,
    PortableModel,
    SampleSet,
    Scheme,
    ShapeRange,
    SourceModel,
    Target,
)
from compile_stage.core.tensors import Signature

if TYPE_CHECKING:
    from compile_stage.core.ports import Session
    from compile_stage.core.tensors import Batch

_opened: tuple[ExitStack, Session] | None = None


# ------------------------------------------------------------------------------------------------------------- source


def inspect_source(source: Any, compliance: Any) -> dict[str, Any]:
    """Refuse the model with SourceError, or say how it is to be read: framework, and how its pyfunc answers."""
    model = revive(SourceModel, source)
    exporter = plugins.load("sources", model.flavor)
    plugins.demand(exporter)
    if (reason := exporter.refuse(model, revive(Compliance, compliance))) is not None:
        raise SourceError(reason, where=model.uri)
    return {"framework": exporter.framework, "answer": exporter.answer(model)}


def export(source: Any, shapes: Any, into: str) -> PortableModel:
    """The source model as a portable one, in the folder `into`."""
    model = revive(SourceModel, source)
    wanted = revive(Mapping[str, ShapeRange], shapes)
    return plugins.load("sources", model.flavor).export(model, wanted, Path(into))


def export_program(source: Any, shapes: Any, into: str) -> PortableModel:
    """The source model as a PyTorch program, in the folder `into`. Raises SourceError when it can't be had as one."""
    model = revive(SourceModel, source)
    exporter = plugins.load("sources", model.flavor)
    if (reason := plugins.missing_for_programs(exporter)) is not None:
        raise SourceError(reason, where=model.uri)
    return exporter.export_program(model, revive(Mapping[str, ShapeRange], shapes), Path(into))


def prepare_samples(
    source: Any, spec: Any, signature: Any, shapes: Any, dataset: str | None, seed: int, into: str
) -> SampleSet:
    """The samples that a policy names, as one `.npy` per input below `into`."""
    from compile_stage.measure.samples import prepare

    wanted = revive(DataSpec, spec)
    example = None
    if wanted.source == "input_example":
        model = revive(SourceModel, source)
        example = plugins.load("sources", model.flavor).example(model)
        if example is None:
            raise SourceError(
                "the policy takes its samples from the input example, and the model was logged without one",
                fix="log the model with input_example=..., or name other samples under `data` in the policy",
                where=model.uri,
            )
    return prepare(
        wanted,
        revive(Signature, signature),
        Path(into),
        seed=seed,
        example=example,
        dataset=Path(dataset) if dataset else None,
        shapes=revive(Mapping[str, ShapeRange], shapes),
    )


# ----------------------------------------------------------------------------------------------------- lower, compile


def lower(scheme: Any, model: Any, calibration: Any, keep: list[str], into: str) -> PortableModel:
    """The portable model at the scheme's precision. Raises UsageError with the reason when it is refused."""
    portable, wanted = revive(PortableModel, model), revive(Scheme, scheme)
    lowering = plugins.load("lowerings", wanted.precision)
    plugins.demand(lowering)
    if (reason := lowering.refuse(portable, wanted)) is not None:
        raise UsageError(reason)
    samples = revive(SampleSet, calibration) if calibration else None
    return lowering.lower(portable, wanted, samples, keep, Path(into))


def rank_nodes(model: Any, lowered: Any, samples: Any, threads: int) -> list[Any]:
    """Every quantised node of the lowered model with its measured effect on the output."""
    from compile_stage.precision.sensitivity import rank_nodes as rank

    found = rank(revive(PortableModel, model), revive(PortableModel, lowered), revive(SampleSet, samples), threads)
    return list(found)


def mix(model: Any, lowered: Any, keep: list[str], into: str) -> PortableModel:
    """The lowered model with the nodes named in `keep` as the source has them."""
    from compile_stage.precision.mixed import mix as give_back

    return give_back(revive(PortableModel, model), revive(PortableModel, lowered), keep, Path(into))


def compile_model(
    backend: str, model: Any, scheme: Any, target: Any, job_id: str, calibration: Any, into: str
) -> Artifact:
    """The artifact of one job, in the folder `into`. Raises UsageError with the reason when it is refused."""
    compiler, portable, where = plugins.load("backends", backend), revive(PortableModel, model), revive(Target, target)
    plugins.demand(compiler)
    if (reason := compiler.refuse(portable, where)) is not None:
        raise UsageError(reason)
    samples = revive(SampleSet, calibration) if calibration else None
    built = compiler.compile(portable, revive(Scheme, scheme), where, job_id, Path(into), calibration=samples)
    if not isinstance(built, Artifact):
        raise TypeError(f"backend {backend!r} answered with {type(built).__name__} instead of an Artifact")
    return built


# -------------------------------------------------------------------------------------------------------------- run


def open_source(source: Any, target: Any) -> dict[str, Any]:
    """Open the original model in its own framework, on the target's device; it stays open until another is opened.

    Raises SourceError when the source does not declare that device, so that no original runs on another one unseen.
    """
    model, where = revive(SourceModel, source), revive(Target, target)
    if (reason := refuse_baseline(model.flavor, where)) is not None:
        raise SourceError(reason, where=model.uri)
    exporter = plugins.load("sources", model.flavor)
    return _open(lambda: exporter.open(model, baseline_target(where)))


def open_artifact(artifact: Any, threads: int) -> dict[str, Any]:
    """Open a compiled artifact; it stays open until another is opened."""
    built = revive(Artifact, artifact)
    backend = plugins.load("backends", built.backend)
    return _open(lambda: backend.open(built, threads))


def predict(samples: Any, batch_size: int, into: str) -> dict[str, str]:
    """Run the open model over all samples; output name → `.npy` file below `into`, axis 0 being the sample."""
    from compile_stage.measure.predict import predict as run_all
    from compile_stage.measure.samples import open_samples

    written = run_all(_session(), open_samples(revive(SampleSet, samples)), batch_size, Path(into))
    return {name: str(path) for name, path in written.items()}


def predict_corners(
    samples: Any, shapes: Any, batch_sizes: list[int], into: str, labels: list[str] | None = None
) -> list[dict[str, Any]]:
    """Run the open model at the smallest and largest shapes that the policy promises, and between them.

    Args:
        labels: Only those; None for the original, which may refuse a shape in between.

    Returns one `{"label", "outputs": {name: file}}` for each that differs from the samples' own shape, and from the others.
    """
    import numpy as np

    from compile_stage.measure.corners import BETWEEN, CORNERS, corner_batches
    from compile_stage.measure.predict import plain_array
    from compile_stage.measure.samples import open_samples

    session, found = _session(), []
    wanted = revive(Mapping[str, ShapeRange], shapes)
    corners = corner_batches(
        open_samples(revive(SampleSet, samples)), session.signature, wanted, batch_sizes, (*CORNERS, *BETWEEN)
    )
    for number, (label, batch) in enumerate(corners):
        if labels is not None and label not in labels:
            continue
        try:
            answers = session.run(batch)
        except Exception:
            if labels is None and label.startswith(BETWEEN):
                continue  # whatever the original's framework says of a shape that its network does not take
            raise
        outputs = {}
        for position, (name, array) in enumerate(answers.items()):
            path = Path(into) / f"corner-{number}-{position}.npy"
            np.save(path, plain_array(name, np.asarray(array)), allow_pickle=False)
            outputs[name] = str(path)
        found.append({"label": label, "outputs": outputs})
    return found


# -------------------------------------------------------------------------------------------------------------- measure


def warm_up(samples: Any, batch_size: int, seconds: float) -> dict[str, Any]:
    """Run the open model at one batch size until it is steady (at most `seconds`); says how many calls it took."""
    from compile_stage.measure import timing

    return timing.warm_up(_timed_call(samples, batch_size), max_seconds=seconds)


def time_turn(samples: Any, batch_size: int, seconds: float, max_calls: int | None = None) -> list[float]:
    """One turn of an interleaved measurement: seconds per call, for at most about `seconds` and so many calls."""
    from compile_stage.measure import timing

    return timing.turn(_timed_call(samples, batch_size), seconds=seconds, max_calls=max_calls)


def peak_memory() -> int:
    """Highest resident size of this process so far, in bytes."""
    from compile_stage.measure.memory import peak_rss_bytes

    return peak_rss_bytes()


# ---------------------------------------------------------------------------------------------------------------- debug


def compare_samples(model: Any, calibration: Any, validation: Any) -> dict[str, Any]:
    """How many samples both sets hold, and what of the validation samples' activations lies outside of the calibrated ranges; None for that where the
    two sets are one."""
    from compile_stage.core.parallel import granted_threads
    from compile_stage.graph_debug.coverage import coverage
    from compile_stage.measure.samples import overlap

    ours, theirs = revive(SampleSet, calibration), revive(SampleSet, validation)
    return {
        "overlap": overlap(ours, theirs),
        "coverage": coverage(revive(PortableModel, model), ours, theirs, granted_threads())
        if ours.digest != theirs.digest
        else None,
    }


def trace_nodes(
    reference: str, candidate: str, hint: str, precision: str, samples: Any, count: int, threads: int
) -> Any:
    """Two model files side by side on the first samples: a `debug.trace.Trace`."""
    from compile_stage.graph_debug.graphs import open_graph
    from compile_stage.graph_debug.trace import trace
    from compile_stage.measure.samples import open_samples

    opened, size = open_samples(revive(SampleSet, samples)), _fixed_batch(reference) or 1
    taken = max(size, min(count, opened.count) // size * size)
    batches = (opened.batch(start, start + size) for start in range(0, taken, size))
    return trace(open_graph(reference), open_graph(candidate, hint=hint), batches, precision=precision, threads=threads)


def describe_graph(path: str) -> PortableModel:
    """An ONNX file as a portable model. Raises SourceError when an input or output is no tensor."""
    from compile_stage.graph_debug.reduce import describe

    return describe(Path(path))


def list_nodes(path: str) -> list[list[str]]:
    """Name and operator of every node of an ONNX file, in order."""
    from compile_stage.graph_debug.reduce import Cutter

    return Cutter(Path(path)).nodes()


def cut_graph(path: str, nodes: list[int], into: str) -> PortableModel | None:
    """Some nodes of an ONNX file as a file of their own; None when that can't be made."""
    from compile_stage.graph_debug.reduce import Cutter

    return Cutter(Path(path)).write(nodes, Path(into))


def write_trace_bundle(
    reference: str, candidate: str, hint: str, samples: Any, tensor: str, facts: dict[str, Any], into: str
) -> None:
    """What is attached to a bug report about a wrong answer."""
    from compile_stage.graph_debug.bundle import write_trace_bundle as write

    chosen, size = revive(SampleSet, samples), _fixed_batch(reference)
    write(Path(reference), Path(candidate), hint, chosen, tensor, facts, Path(into), size)


def write_failure_bundle(graph: str, backend: str, facts: dict[str, Any], into: str) -> None:
    """What is attached to a bug report about a graph that can't be compiled."""
    from compile_stage.graph_debug.bundle import write_failure_bundle as write

    write(Path(graph), backend, facts, Path(into))


def _fixed_batch(path: str) -> int | None:
    return describe_graph(path).signature.fixed_batch if path.endswith(".onnx") else None


# --------------------------------------------------------------------------------------------------------------- within


def _open(opener: Callable[[], Any]) -> dict[str, Any]:
    global _opened
    _close()
    stack = ExitStack()
    began = time.perf_counter()
    session = stack.enter_context(opener())
    load_s = time.perf_counter() - began
    _opened = (stack, session)
    return {"load_s": load_s, "signature": session.signature}


def _close() -> None:
    global _opened
    if _opened is not None:
        stack, _opened = _opened[0], None
        stack.close()


def _session() -> Session:
    if _opened is None:
        raise UsageError("no model is open in this worker")
    return _opened[1]


_batches: dict[tuple[str, int], Batch] = {}


def _timed_call(samples: Any, batch_size: int) -> Callable[[], Batch]:
    """A call of the open model on a fixed batch that lies in memory, so that no disk is timed."""
    import numpy as np

    from compile_stage.measure.samples import open_samples

    chosen = revive(SampleSet, samples)
    key = (chosen.digest, batch_size)
    if key not in _batches:
        _batches.clear()
        opened = open_samples(chosen)
        rows = np.arange(batch_size) % opened.count
        _batches[key] = {name: np.ascontiguousarray(array[rows]) for name, array in opened.inputs.items()}
    session, batch = _session(), _batches[key]
    return lambda: session.run(batch)


CALLS: dict[str, Callable[..., Any]] = {
    call.__name__: call
    for call in (
        inspect_source,
        export,
        export_program,
        prepare_samples,
        lower,
        rank_nodes,
        mix,
        compile_model,
        open_source,
        open_artifact,
        predict,
        predict_corners,
        warm_up,
        time_turn,
        peak_memory,
        compare_samples,
        trace_nodes,
        describe_graph,
        list_nodes,
        cut_graph,
        write_trace_bundle,
        write_failure_bundle,
    )
}
