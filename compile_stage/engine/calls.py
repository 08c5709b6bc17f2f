"""What a worker can do: the whole list, each a plain function of plain values.

The parent decides, caches and judges; a worker holds the heavy libraries and does one thing at a time. At most one
model is open in a worker: opening another closes the one before, so that a process's peak memory is one model's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core import plugins, remote_plugins
from compile_stage.core.baseline import baseline_target, refuse_baseline
from compile_stage.core.digest import revive
from compile_stage.core.errors import SourceError, UsageError
from compile_stage.core.records import (
    Artifact,
    Compliance,
    DataSpec,
    Job,
    PortableModel,
    Predictions,
    SampleSet,
    Scheme,
    ShapeRange,
    SourceModel,
    Target,
)
from compile_stage.engine.debug_calls import (
    compare_samples,
    cut_graph,
    describe_graph,
    list_nodes,
    trace_nodes,
    write_failure_bundle,
    write_trace_bundle,
)
from compile_stage.engine.fresh_load import load_published, run_batch
from compile_stage.engine.served import open_as_served

if TYPE_CHECKING:
    from compile_stage.core.ports import Session
    from compile_stage.measure.samples import FromModel
    from compile_stage.measure.timed_session import TimedSession

_COMPARED = 32  # samples whose texts the published predict() is compared on

_opened: tuple[ExitStack, Session] | None = None
_timed_session: TimedSession | None = None  # the open one


# ------------------------------------------------------------------------------------------------------------ plug-ins


def describe_plugin(group: plugins.Group, name: str) -> dict[str, Any]:
    """What a plug-in declares; it is imported for that."""
    return remote_plugins.describe(group, plugins.load_here(group, name))


def ask_plugin(group: plugins.Group, name: str, method: str, values: list[Any]) -> Any:
    """What a plug-in answers to a question of the stage's (`core.remote_plugins`)."""
    return remote_plugins.answer(group, plugins.load_here(group, name), method, values)


# ------------------------------------------------------------------------------------------------------------- source


def inspect_source(source: Any, compliance: Any, into: str) -> dict[str, Any]:
    """Refuse the model with SourceError, or say how it is to be read: framework, how its pyfunc answers, and what a
    published predict() needs beside the graph, whose files are written into the folder `into`."""
    model = revive(SourceModel, source)
    exporter = plugins.load("sources", model.flavor)
    if not plugins.has_toolchain(exporter):  # one that has reads files without its framework
        plugins.demand(exporter)
    if (reason := exporter.refuse(model, revive(Compliance, compliance))) is not None:
        raise SourceError(reason, where=model.uri)
    return {
        "framework": exporter.framework,
        "prediction_format": exporter.prediction_format(model),
        "processor": exporter.processor(model, Path(into)),
    }


def predict_original(source: Any, samples: Any) -> Predictions | None:
    """What the original's predict() answers to texts, those of the first samples among them."""
    from compile_stage.measure.samples import open_samples

    model, opened = revive(SourceModel, source), open_samples(revive(SampleSet, samples))
    return plugins.load("sources", model.flavor).predictions(model, opened.batch(0, min(opened.count, _COMPARED)))


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


def export_for(form: str, source: Any, target: Any, into: str) -> PortableModel:
    """The source model in a form of fixed shapes for a target, in the folder `into`."""
    model = revive(SourceModel, source)
    return plugins.load("sources", model.flavor).export_for(form, model, revive(Target, target), Path(into))


def prepare_samples(source: Any, request: Any, into: str) -> SampleSet:
    """The samples that a policy names, as one `.npy` per input below `into`; of no source for two files alone."""
    from compile_stage.measure.readers import SampleRequest
    from compile_stage.measure.samples import FromModel, prepare

    wanted = revive(SampleRequest, request)
    model = _read_by_source(revive(SourceModel, source), wanted.spec) if source is not None else FromModel()
    return prepare(wanted, Path(into), model)


def _read_by_source(model: SourceModel, wanted: DataSpec) -> FromModel:
    from compile_stage.measure.samples import FromModel, TextReader

    exporter = plugins.load("sources", model.flavor)
    example = exporter.example(model) if wanted.source == "input_example" else None
    if wanted.source == "input_example" and example is None:
        raise SourceError(
            "the policy takes its samples from the input example, and the model was logged without one",
            fix="log the model with input_example=..., or name other samples under `data` in the policy",
            where=model.uri,
        )
    raw = exporter.capabilities.reads_raw_samples
    reader = TextReader(
        tokenize=lambda texts: exporter.tokenize(model, texts), class_names=lambda: exporter.class_names(model)
    )
    network_inputs = partial(exporter.network_inputs, model) if raw else None
    return FromModel(example=example, network_inputs=network_inputs, reader=reader)


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


def compile_model(job: Any, model: Any, calibration: Any, into: str) -> Artifact:
    """The artifact of one job, in the folder `into`. Raises UsageError with the reason when it is refused."""
    asked, portable = revive(Job, job), revive(PortableModel, model)
    compiler = plugins.load("backends", asked.backend)
    plugins.demand(compiler)
    if (reason := compiler.refuse(portable, asked.target)) is not None:
        raise UsageError(reason)
    samples = revive(SampleSet, calibration) if calibration else None
    built = compiler.compile(portable, asked.scheme, asked.target, asked.id, Path(into), calibration=samples)
    if not isinstance(built, Artifact):
        raise TypeError(f"backend {asked.backend!r} answered with {type(built).__name__} instead of an Artifact")
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


def open_served(model: Any) -> dict[str, Any]:
    """Open a model by the loader that it carries (`engine.served`); it stays open until another is opened.

    Args:
        model: `{"path": ...}`, its directory.
    """
    return _open(lambda: open_as_served(Path(model["path"])))


def predict(samples: Any, batch_size: int, into: str) -> dict[str, str]:
    """Run the open model over all samples; output name → `.npy` file below `into`, axis 0 being the sample."""
    from compile_stage.measure.predict import predict as run_all
    from compile_stage.measure.samples import open_samples

    written = run_all(_session(), open_samples(revive(SampleSet, samples)), batch_size, Path(into))
    return {name: str(path) for name, path in written.items()}


def predict_whole(source: Any, columns: Any, artifact: Any, target: Any, rounds: int, into: str) -> dict[str, Any]:
    """The original's predict() on rows of samples, with its own network and with a compiled artifact in its place
    (`measure.whole_predict`).

    Args:
        columns: `{"path": ...}`, the folder of `measure.samples.open_raw`.
        target: Its threads, and the first of its batch sizes.
    """
    from compile_stage.measure.samples import open_raw
    from compile_stage.measure.whole_predict import predict_both

    model, where = revive(SourceModel, source), revive(Target, target)
    open_artifact(artifact, where.threads)
    with plugins.load("sources", model.flavor).whole(model, where.threads) as predict:
        rows, batch_size = open_raw(Path(columns["path"])), where.batch_sizes[0]
        return predict_both(predict, _session().run, rows, batch_size, rounds, Path(into))


def predict_corners(
    samples: Any, shapes: Any, batch_sizes: list[int], into: str, labels: list[str] | None = None
) -> list[dict[str, Any]]:
    """Run the open model at the smallest and largest shapes that the policy promises, and between them.

    Args:
        labels: Only those; None for the original, which may refuse a shape in between.

    Returns one `{"label", "outputs": {name: file}}` for each that differs from the samples' own shape, and from the
    others.
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


def make_calls(samples: Any, calls: list[Any], into: str) -> dict[str, Any]:
    """How the open model behaves from call to call (`measure.behaviour`); its answers are below `into`.

    Args:
        calls: `{"check", "rows"}` each: the numbers of the samples that make up the batch; with `parts`, it is run in
            batches of these sizes.
    """
    from compile_stage.measure.behaviour import make_calls as make
    from compile_stage.measure.samples import open_samples

    return make(_session(), open_samples(revive(SampleSet, samples)), calls, Path(into))


def soak(samples: Any, batch_size: int, seconds: float, seed: int, into: str) -> dict[str, Any]:
    """Call the open model for about `seconds`; some of the answers are kept below `into` (`measure.soak`)."""
    from compile_stage.measure.samples import open_samples
    from compile_stage.measure.soak import run_soak

    return run_soak(_session(), open_samples(revive(SampleSet, samples)), batch_size, seconds, seed, Path(into))


def predict_batch(samples: Any, batch_size: int, into: str) -> dict[str, str]:
    """Run the open model on the first batch of the samples; output name → `.npy` file below `into`."""
    return run_batch(_session(), samples, batch_size, Path(into))


# -------------------------------------------------------------------------------------------------------------- measure


def warm_up(samples: Any, batch_size: int, seconds: float) -> dict[str, Any]:
    """Run the open model at one batch size until it is steady (at most `seconds`); says how many calls it took."""
    return _timed().warm_up(revive(SampleSet, samples), batch_size, seconds)


def quick_turn(samples: Any, batch_size: int, seconds: float) -> list[float]:
    """Seconds of each call for about `seconds`, at least one: an idea, no measurement."""
    return _timed().quick_turn(revive(SampleSet, samples), batch_size, seconds)


def prepare_turn(samples: Any, batch_size: int, calls: int, seed: int, checked_seed: int | None) -> int:
    """Make the inputs of one turn of an interleaved measurement, and a call that is not timed; says how many will
    be."""
    return _timed().prepare(revive(SampleSet, samples), batch_size, calls, seed, checked_seed)


def time_turn(seconds: float) -> list[float]:
    """Seconds of each call of the prepared turn, for at most about `seconds`."""
    return _timed().run(seconds)


def end_turn(into: str | None) -> list[dict[str, str]]:
    """Write the answers that were kept into the folder, and come to rest; one `{output: file}` for each checked
    batch."""
    return _timed().end(Path(into) if into else None)


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
    global _opened, _timed_session
    _timed_session = None
    if _opened is not None:
        stack, _opened = _opened[0], None
        stack.close()


def _session() -> Session:
    if _opened is None:
        raise UsageError("no model is open in this worker")
    return _opened[1]


def _timed() -> TimedSession:
    from compile_stage.measure.timed_session import TimedSession

    global _timed_session
    if _timed_session is None:
        _timed_session = TimedSession(_session())
    return _timed_session


CALLS: dict[str, Callable[..., Any]] = {
    call.__name__: call
    for call in (
        describe_plugin,
        ask_plugin,
        inspect_source,
        export,
        export_program,
        export_for,
        prepare_samples,
        predict_original,
        lower,
        rank_nodes,
        mix,
        compile_model,
        open_source,
        open_artifact,
        open_served,
        predict,
        predict_corners,
        predict_whole,
        make_calls,
        soak,
        load_published,
        predict_batch,
        warm_up,
        quick_turn,
        prepare_turn,
        time_turn,
        end_turn,
        compare_samples,
        trace_nodes,
        describe_graph,
        list_nodes,
        cut_graph,
        write_trace_bundle,
        write_failure_bundle,
    )
}
