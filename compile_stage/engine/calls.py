"""What a worker can do: the whole list, each a plain function of plain values.

The parent decides, caches and judges; a worker holds the heavy libraries and does one thing at a time. What is asked of
the model that it has open is in `engine.open_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from compile_stage.engine import predict_calls
from compile_stage.engine.debug_calls import (
    compare_samples,
    cut_graph,
    describe_graph,
    list_nodes,
    trace_nodes,
    write_failure_bundle,
    write_trace_bundle,
)
from compile_stage.engine.export_calls import answer_export
from compile_stage.engine.fresh_load import (
    close_published,
    load_published,
    prepare_published,
    time_published,
    time_published_runs,
)
from compile_stage.engine.open_model import (
    call_untimed,
    close_model,
    end_turn,
    find_refused_missing,
    first_tokens,
    make_calls,
    open_model,
    open_served,
    open_session,
    predict,
    predict_batch,
    predict_corners,
    prepare_turn,
    quick_turn,
    soak,
    time_turn,
    warm_up,
)
from compile_stage.engine.other_process import repeated_inputs
from compile_stage.engine.predict_calls import close_predict, describe_predict, time_predict
from compile_stage.engine.profile_calls import profile_artifact, profile_source
from compile_stage.engine.serving_calls import (
    answer_requests,
    are_servers_up,
    make_requests,
    start_servers,
    time_predicts,
)
from compile_stage.engine.token_calls import prompt_tokens, texts_of_tokens, written_by
from compile_stage.serving.generation import opened_as_called
from compile_stage.sources import pickles

if TYPE_CHECKING:
    from compile_stage.measure.samples import FromModel

_COMPARED = 32  # samples whose texts the published predict() is compared on

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
    allowed = revive(Compliance, compliance)
    other_python = pickles.refuse_other_python(model) if allowed.allow_pickle else None
    if (reason := other_python or exporter.refuse(model, allowed)) is not None:
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


def demand_even_lists(spec: Any) -> None:
    """Raises PolicyError where the lists of a column of the policy's file differ in length."""
    from compile_stage.measure.readers import demand_even_lists as demand

    demand(revive(DataSpec, spec))


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
    if exporter.keeps_cache(model):
        return FromModel(example=example, windows=partial(exporter.token_windows, model))
    reader = TextReader(
        tokenize=lambda texts: exporter.tokenize(model, texts), class_names=lambda: exporter.class_names(model)
    )
    network_inputs = partial(repeated_inputs, model) if raw else None
    return FromModel(
        example=example,
        network_inputs=network_inputs,
        reader=reader,
        columns=lambda: exporter.prediction_format(model).get("columns"),
        fills=lambda: exporter.prediction_format(model).get("fills") or {},
    )


def find_taken_values(source: Any, samples: Any, batch_size: int) -> dict[str, Any]:
    """Which whole numbers and categories the open original takes (`measure.taken_search`)."""
    from compile_stage.measure.samples import open_samples
    from compile_stage.measure.taken_search import find_taken

    model = revive(SourceModel, source)
    categories = plugins.load("sources", model.flavor).categories(model)
    return find_taken(open_session(), open_samples(revive(SampleSet, samples)), batch_size, categories)


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


def rewrite_graph(source: None, model: Any, samples: Any, into: str) -> PortableModel:
    """The portable model with the rewrites that hold; itself where there is none.

    Args:
        source: None: it is done without the original.
    """
    from compile_stage.graph_rewrites.apply import rewrite_graph as rewrite

    return rewrite(revive(PortableModel, model), revive(SampleSet, samples), Path(into))


def find_mixed_rows(source: None, model: Any, samples: Any, rows: int) -> str:
    """Why an answer of the portable model is not shown to depend on its own row alone; empty where it is shown
    (`measure.graph_rows`).

    Args:
        source: None: it is done without the original.
        rows: Of the batch that is followed.
    """
    from compile_stage.measure import graph_rows
    from compile_stage.measure.samples import open_samples

    inputs = open_samples(revive(SampleSet, samples)).inputs
    shapes = {name: array.shape[1:] for name, array in inputs.items()}
    return graph_rows.find_mixed_rows(revive(PortableModel, model).path, rows, shapes)


def rank_nodes(model: Any, lowered: Any, samples: Any, threads: int) -> list[Any]:
    """Every quantised node of the lowered model with its measured effect on the output."""
    from compile_stage.precision.sensitivity import rank_nodes as rank

    found = rank(revive(PortableModel, model), revive(PortableModel, lowered), revive(SampleSet, samples), threads)
    return list(found)


def mix(model: Any, lowered: Any, keep: list[str], into: str) -> PortableModel:
    """The lowered model with the nodes named in `keep` as the source has them."""
    from compile_stage.precision.mixed import mix as give_back

    return give_back(revive(PortableModel, model), revive(PortableModel, lowered), keep, Path(into))


def refuse_model(job: Any, model: Any) -> str | None:
    """Why the backend of a job can't compile the model, as far as it knows before; None where nothing is known."""
    asked = revive(Job, job)
    compiler = plugins.load("backends", asked.backend)
    plugins.demand(compiler)
    reason: str | None = compiler.refuse(revive(PortableModel, model), asked.target)
    return reason


def compile_model(job: Any, model: Any, calibration: Any, into: str) -> Artifact:
    """The artifact of one job, in the folder `into`. Raises UsageError with the reason when it is refused."""
    if (reason := refuse_model(job, model)) is not None:
        raise UsageError(reason)
    asked, portable = revive(Job, job), revive(PortableModel, model)
    compiler = plugins.load("backends", asked.backend)
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
    return open_model(lambda: exporter.open(model, baseline_target(where)))


def open_as_given(source: Any, target: Any) -> dict[str, Any]:
    """The same of a source that `computes_wider`, to be given samples as they are (`core.sample_files.GIVEN`)."""
    model, where = revive(SourceModel, source), revive(Target, target)
    exporter = plugins.load("sources", model.flavor)
    return open_model(lambda: exporter.open_as_given(model, baseline_target(where)))


def find_rounded(source: Any, samples: Any, given: Any) -> list[dict[str, Any]]:
    """Which columns' rounding changes the answers of the original, which `open_as_given` opened, and of how many
    samples: `{"column", "samples"}` each, the one that changes most first.

    Args:
        samples, given: Rounded, and as they are.
    """
    from compile_stage.measure.rounding import blamed
    from compile_stage.measure.samples import open_samples

    rounded, whole = (open_samples(revive(SampleSet, one)).inputs for one in (samples, given))
    model = revive(SourceModel, source)
    names = plugins.load("sources", model.flavor).prediction_format(model).get("columns") or ()
    return [
        {"column": _column_name(name, column, names), "samples": count}
        for name, column, count in blamed(open_session().run, whole, rounded)
    ]


def _column_name(input_name: str, column: int | None, names: Sequence[str]) -> str:
    if column is None:
        return repr(input_name)
    return repr(names[column]) if column < len(names) else f"column {column}"


def open_artifact(artifact: Any, threads: int) -> dict[str, Any]:
    """Open a compiled artifact; it stays open until another is opened."""
    built = revive(Artifact, artifact)
    backend = plugins.load("backends", built.backend)
    return open_model(lambda: opened_as_called(backend, built, threads))


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
        return predict_both(predict, open_session().run, rows, batch_size, rounds, Path(into))


# -------------------------------------------------------------------------------------------------------------- measure


def write_tokens(samples: Any, rows: list[int], generation: Any) -> list[list[int]]:
    """What the open language model writes after the prompts of these samples, the likeliest token each time."""
    return written_by(open_session(), samples, rows, generation)


def open_predict(source: Any, compliance: Any, target: Any, samples: Any, how: Any) -> dict[str, Any]:
    """`engine.predict_calls.open_predict`, in place of the model that is open."""
    close_model()
    return predict_calls.open_predict(source, compliance, target, samples, how)


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
        demand_even_lists,
        predict_original,
        lower,
        rank_nodes,
        rewrite_graph,
        find_mixed_rows,
        mix,
        refuse_model,
        compile_model,
        open_source,
        open_as_given,
        find_rounded,
        open_artifact,
        open_served,
        predict,
        predict_corners,
        predict_whole,
        make_calls,
        find_refused_missing,
        find_taken_values,
        soak,
        answer_export,
        profile_artifact,
        profile_source,
        load_published,
        prepare_published,
        time_published,
        time_published_runs,
        close_published,
        make_requests,
        answer_requests,
        start_servers,
        are_servers_up,
        time_predicts,
        describe_predict,
        open_predict,
        time_predict,
        close_model,
        close_predict,
        predict_batch,
        warm_up,
        quick_turn,
        prepare_turn,
        call_untimed,
        time_turn,
        first_tokens,
        write_tokens,
        prompt_tokens,
        texts_of_tokens,
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
