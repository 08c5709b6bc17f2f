"""The original over all samples → what every artifact is compared with.

One that computes in a wider type than its network's inputs have is asked with the samples as they are. Artifacts take
them rounded, as their published predict() does with what people send, so the gates see what rounding does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.cache import Cached
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import CompileStageError, WorkerError
from compile_stage.core.generation import has_cache
from compile_stage.core.ports import Worker
from compile_stage.core.records import Data, PortableModel, SampleSet, SourceModel, Target
from compile_stage.core.sample_files import GIVEN, as_given
from compile_stage.measure.behaviour import calls_to_compare, mixed_rows, not_repeated
from compile_stage.measure.extra_calls import ExtraCalls, ask_original
from compile_stage.measure.reference import Reference

_LONG_S = 10.0  # for the original to answer all samples; two more calls in the largest batch would take seconds


def reference(
    context: Context,
    worker: Worker,
    source: SourceModel,
    exported: PortableModel,
    samples: SampleSet,
    data: Data,
    target: Target,
) -> Reference:
    """Run the original over all samples once, at the largest batch size, since it is mostly the slowest of all:
    artifacts must agree with it at every batch size.

    Args:
        exported: The source as ONNX, or in the form that it has: whether its rows mix is read from the graph.
        data: What the policy says of samples: the seed, and how many are made beside them.
        target: Its device is where the original runs (`core.baseline.reference_target`).
    """
    calls = calls_to_compare(samples.count, target.batch_sizes, data.seed)
    batch_sizes = list(target.batch_sizes)
    batch_size = max(batch_sizes)
    key = {
        "source": source.identity,
        "exported": exported.digest,
        "samples": samples.digest,
        "batch_size": batch_size,
        "batch_sizes": batch_sizes,
        "calls": calls,
        "min_samples": data.min_samples,
        "seed": data.seed,
        "robustness": data.robustness.samples if data.robustness else 0,
        "shapes": target.shapes,
        "threads": target.threads,
        "device": target.device,
        "made_by": plugins.cache_identity("sources", source.flavor),
        "hardware": context.hardware,
    }

    def make(into: Path) -> dict[str, Any]:
        from compile_stage.measure.distinct import count_distinct
        from compile_stage.measure.predict import open_outputs
        from compile_stage.measure.samples import open_samples

        worker.call("open_source", source=source, target=target)
        answers, sample_s = _predicted(worker, samples, batch_size, into)
        corners = worker.call(
            "predict_corners", samples=samples, shapes=target.shapes, batch_sizes=batch_sizes, into=str(into)
        )
        asked, outputs, rounding = _asked_as_given(worker, source, target, samples, answers, batch_size, into)
        distinct = count_distinct(open_samples(samples), open_outputs(outputs))
        made: dict[str, Any] = {
            "outputs": _below(outputs, into),
            "rounded": _below(answers, into) if asked is not samples else None,
            "rounding": rounding,
            "corners": [{**c, "outputs": _below(c["outputs"], into)} for c in corners],
            "sample_s": sample_s,
            "distinct": distinct,
            "beyond": None,
            "mixed_rows": "",
        }
        if samples.real and min(samples.independent, distinct) >= data.min_samples:
            extra = ask_original(worker, source, asked, data, target, outputs, into)
            extra = replace(extra, mixed=_mixed_rows(worker, exported, samples, max(map(_rows_of, calls))))
            kept = extra if asked is samples else extra.rounded(samples)
            if not not_repeated(kept.answers):
                made["mixed_rows"] = mixed_rows(kept.calls, kept.answers, open_outputs(outputs))
            made["beyond"] = kept.below(into)
        worker.call("close_model")  # its worker lives as long as the run, and measuring has every model in memory
        return made

    return _placed(context.cached("reference/16", "", key, make), batch_size)


def _rows_of(call: Mapping[str, Any]) -> int:
    return len(call["rows"])


def _mixed_rows(worker: Worker, exported: PortableModel, samples: SampleSet, rows: int) -> str:
    """Why an answer is not shown to depend on its own row alone; empty where it is shown, or where there is no graph to
    read: of StableHLO and of a language model's generation the calls alone say it."""
    if exported.form == "torch-export":
        return "no operator can be read: it has no ONNX"
    if exported.form != "onnx" or has_cache(exported.signature):
        return ""
    try:
        mixed: str = worker.call("find_mixed_rows", source=None, model=exported, samples=samples, rows=rows)
    except WorkerError as error:
        if error.worker_is_gone:
            raise
        return f"its graph could not be read: {error.problem}"
    return mixed


def _asked_as_given(
    worker: Worker,
    source: SourceModel,
    target: Target,
    samples: SampleSet,
    answers: dict[str, str],
    batch_size: int,
    into: Path,
) -> tuple[SampleSet, dict[str, str], str]:
    """The samples that the original is asked with, its answers to them, and what their rounding changes: the samples as
    they were given where they were rounded and it takes them so, else `samples` and `answers`. The worker has the
    original open for them."""
    given = as_given(samples)
    if given is None:
        return samples, answers, ""
    from compile_stage.measure import rounding
    from compile_stage.measure.predict import open_outputs, try_predict

    worker.call("open_as_given", source=source, target=target)
    found = try_predict(worker, given, batch_size, into / GIVEN)
    if isinstance(found, CompileStageError):  # it takes float32 alone
        worker.call("open_source", source=source, target=target)
        return samples, answers, ""
    count = rounding.changed(open_outputs(found), open_outputs(answers))
    columns = worker.call("find_rounded", source=source, samples=samples, given=given) if count else []
    return given, dict(found), rounding.in_words(count, samples.count, columns) if count else ""


def _predicted(worker: Worker, samples: SampleSet, batch_size: int, into: Path) -> tuple[dict[str, str], float]:
    """The files of the outputs, and what a warm call takes in seconds for each sample."""
    began = time.monotonic()
    outputs: dict[str, str] = worker.call("predict", samples=samples, batch_size=batch_size, into=str(into))
    took_s = time.monotonic() - began
    if took_s >= _LONG_S:  # the start of the first call is hardly any of it
        return outputs, took_s / max(1, samples.count)
    turn = worker.call("quick_turn", samples=samples, batch_size=batch_size, seconds=0.0)
    return outputs, min(turn) / batch_size


def _placed(stored: Cached, batch_size: int) -> Reference:
    """The reference with the paths of its files in the cache."""
    here, extra, rounded = Path(stored.path), stored.value["beyond"], stored.value["rounded"]
    return Reference(
        outputs=_above(stored.value["outputs"], here),
        rounded=_above(rounded, here) if rounded is not None else None,
        rounding=stored.value["rounding"],
        corners=tuple({**c, "outputs": _above(c["outputs"], here)} for c in stored.value["corners"]),
        digest=stored.digest,
        path=stored.path,
        batch_size=batch_size,
        sample_s=stored.value["sample_s"],
        distinct=stored.value["distinct"],
        extra=revive(ExtraCalls, extra).above(here) if extra is not None else None,
        mixed_rows=stored.value["mixed_rows"],
    )


def rounding_notes(reference: Reference) -> tuple[str, ...]:
    """What a reader of the run should know of rounded samples."""
    if not reference.rounding:
        return ()
    return (f"{reference.rounding}; artifacts are compared with its answers to the samples as they are",)


def copies_notes(samples: SampleSet, reference: Reference) -> tuple[str, ...]:
    """What a reader of the run should know where most validation samples are copies of others."""
    if samples.groups or not samples.real or 2 * reference.distinct >= samples.count:
        return ()
    return (
        f"Of the {samples.count} validation samples only {reference.distinct} differ beyond rounding and have a finite "
        f"answer, and intervals count all {samples.count}: where rows were repeated, name the column that says what "
        "they are copies of as data.groups",
    )


def _below(files: Mapping[str, str], root: Path) -> dict[str, str]:
    return {name: Path(path).relative_to(root).as_posix() for name, path in files.items()}


def _above(files: Mapping[str, str], root: Path) -> dict[str, str]:
    return {name: str(root / path) for name, path in files.items()}
