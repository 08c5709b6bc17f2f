"""Published version → does serving load it, and does it answer there as what was proven?

Looked at before an alias moves: what was proven is a file of the cache, opened by this installation; what is served is
what the registry gives out, opened by the code that it carries.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core import plugins
from compile_stage.core.capabilities import SOURCE_PRECISION
from compile_stage.core.context import Context
from compile_stage.core.digest import digest_tree
from compile_stage.core.errors import CompileStageError, GateError, StorageError
from compile_stage.core.killed_workers import once_more_after_a_kill
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import Artifact, Bundle, FetchedVersion, Predictions, SampleSet, Target
from compile_stage.measure.served_tolerance import SERVED_TOLERANCE, served_tolerance
from compile_stage.serving.predictions import refuse_prediction
from compile_stage.serving.signatures import offline_trust
from compile_stage.serving.trust import Trust, trust_document

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array


def demand_served(
    context: Context,
    version: FetchedVersion,
    target: Target,
    samples: SampleSet | None,
    limits: WorkerLimits,
    trust: Trust | None,
) -> str:
    """Load the files of a published version by MLflow in a new process, in a worker's confinement, and compare what it
    answers there to the first batch of the samples with what the proven artifact answers here. Returns what was looked
    at, as a sentence; where the very same files passed here before, that of then.

    Args:
        samples: None to load it only; so it is too where they are synthetic and the proven artifact does not take them.
        trust: Whose signatures it is loaded with.

    Raises:
        GateError: It can't be loaded there, or answers otherwise.
    """
    key = {
        "files": digest_tree(version.path),
        "artifact": replace(version.artifact, path=""),  # perhaps among the files, which are fetched to another folder
        "predictions": version.predictions,
        **({"variant": version.variant} if version.variant else {}),
        "samples": samples.digest if samples is not None else "",
        "target": target,
        "packages": plugins.package_versions("mlflow", "numpy", "pandas", *_runtime(version.artifact)),
        "made_by": plugins.cache_identity("backends", version.artifact.backend),
        "hardware": context.hardware,
        # Where less was closed, it may have loaded with the help of a file that is no part of it.
        "confinement": context.confinement(),
        # A signature holds for days that the trust file names.
        "trust": [trust_document(trust), context.today.isoformat()] if trust is not None else [],
    }
    made = context.cached(
        "serve/3",
        target.name,
        key,
        lambda _: _looked_at(context, version, target, samples, limits, trust),
    )
    return str(made.value)


@contextmanager
def load_model_dir(
    context: Context, version: Bundle, target: Target, limits: WorkerLimits, trust: Trust | None
) -> Iterator[Worker]:
    """A worker that has a bundle loaded as serving loads it. Raises UsageError where it can't be."""
    model_dir = version.path
    with (
        tempfile.TemporaryDirectory(dir=context.scratch) as scratch,
        context.worker(f"serve {target.name}", limits) as worker,
    ):
        worker.call(
            "load_published",
            model={"path": model_dir, "variant": version.manifest.get("family", {}).get("lead", "")},
            trust=hand_over_trust(trust, model_dir, Path(scratch) / "trust") if trust is not None else None,
            samples=None,
            batch_size=target.batch_sizes[0],
            into=str(Path(scratch) / "served"),
            stays=True,
        )
        yield worker


def _runtime(artifact: Artifact) -> tuple[str, ...]:
    return tuple(plugins.load("backends", artifact.backend).capabilities.runtime)


def _looked_at(
    context: Context,
    version: FetchedVersion,
    target: Target,
    samples: SampleSet | None,
    limits: WorkerLimits,
    trust: Trust | None,
) -> str:
    uri = version.uri
    with tempfile.TemporaryDirectory(dir=context.scratch) as scratch:

        def ask(_: bool) -> tuple[dict[str, Any], dict[str, str] | None]:
            with context.worker(f"serve {target.name}", limits) as worker:
                return _answers(worker, version, target, samples, Path(tempfile.mkdtemp(dir=scratch)), trust)

        try:
            answers, own = once_more_after_a_kill(ask)
        except StorageError:  # this machine's trouble, not the version's
            raise
        except CompileStageError as error:
            raise GateError(
                f"{uri} was published, and serving can't load it: {error.problem}",
                fix="load it yourself: mlflow.pyfunc.load_model, in a new process",
                where=uri,
            ) from error
        if own is None:
            return "MLflow loads it in a new process; its answers were not compared: there are no samples that it takes"
        reason = differs(read_answers(answers["outputs"]), read_answers(own)) or _predictions_differ(
            answers["predictions"], version
        )
        if reason is not None:
            raise GateError(f"{uri} was published, and answers otherwise when MLflow loads it: {reason}", where=uri)
    kind = "validation" if samples is not None and samples.real else "synthetic"
    return f"MLflow loads it in a new process, and it answers a batch of {kind} samples there as the proven artifact"


def compare_answers(
    context: Context,
    artifacts: tuple[Artifact, Artifact],
    target: Target,
    samples: SampleSet,
    limits: WorkerLimits,
) -> str | None:
    """None where two builds of one model answer the first batch of the samples alike, or how they differ. Both are
    opened by this installation. In fp32 by 1e-3 of an output's largest value at most; in lower precisions, where one
    rounding may fall otherwise, by 1e-2."""
    limit = served_tolerance(artifacts[0].precision)
    with tempfile.TemporaryDirectory(dir=context.scratch) as scratch, context.worker("rebuilt", limits) as worker:
        answers = []
        for number, artifact in enumerate(artifacts):
            version = FetchedVersion(uri="", path="", artifact=artifact)
            answers.append(read_answers(_predict(worker, version, target, samples, Path(scratch) / str(number))))
    return differs(answers[0], answers[1], limit)


def _answers(
    worker: Worker,
    version: FetchedVersion,
    target: Target,
    samples: SampleSet | None,
    into: Path,
    trust: Trust | None,
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """What it answers when it is served, and the files of what the proven artifact answers; None for these where there
    is nothing to ask both.

    Args:
        into: A folder for the files.
        trust: Whose signatures it is loaded with.
    """
    own = _proven(worker, version, target, samples, into) if samples is not None and not samples.real else None
    asked = samples if own is not None or (samples is not None and samples.real) else None
    answers = worker.call(
        "load_published",
        model={"path": version.path, "variant": version.variant},
        trust=hand_over_trust(trust, version.path, into / "trust") if trust is not None else None,
        samples=asked,
        batch_size=target.batch_sizes[0],
        into=str(into / "served"),
        questions=_questions(version.predictions) if version.predictions is not None else None,
    )
    if asked is None:
        return answers, None
    # Of real samples only now: two open models need twice the memory.
    return answers, own or _predict(worker, version, target, asked, into)


def _proven(
    worker: Worker, version: FetchedVersion, target: Target, samples: SampleSet, into: Path
) -> dict[str, str] | None:
    """What the proven artifact answers to synthetic samples; None where it does not take them."""
    try:
        return _predict(worker, version, target, samples, into)
    except CompileStageError:
        return None


def _predict(worker: Worker, version: FetchedVersion, target: Target, samples: SampleSet, into: Path) -> dict[str, str]:
    worker.call("open_artifact", artifact=version.artifact, threads=target.threads)
    outputs: dict[str, str] = worker.call(
        "predict_batch", samples=samples, batch_size=target.batch_sizes[0], into=str(into / "proven")
    )
    return outputs


def hand_over_trust(trust: Trust, model_dir: str, folder: Path) -> dict[str, str]:
    """A new folder with the trust file that a worker verifies a model with."""
    folder.mkdir()
    (folder / "trust.json").write_text(
        json.dumps(trust_document(offline_trust(trust, Path(model_dir)))), encoding="utf-8"
    )
    return {"path": str(folder)}


def _questions(asked: Predictions) -> dict[str, Any]:
    return {
        "texts": list(asked.texts), "column": asked.column, "pair": asked.pair, "each": asked.each,
        "params": asked.params,
    }  # fmt: skip


def _predictions_differ(served: Mapping[str, Any] | None, version: FetchedVersion) -> str | None:
    """What of predict()'s answers is not as the original's: the tokens of texts, and of an FP32 network the answers; of
    another, whose answers the gates judge, the form. None where nothing was asked."""
    original = version.predictions
    if original is None or served is None:
        return None
    for text, found, tokens in zip(original.texts, served["ids"], original.ids, strict=False):
        if tuple(found) != tokens:
            return f"its tokens of {text[:60]!r} are others than the original's"
    if len(served["ids"]) != len(original.ids):
        return f"it tokenizes {len(served['ids'])} texts, not {len(original.ids)}"
    ours, theirs = served["answer"], original.answer
    if version.artifact.precision == SOURCE_PRECISION:
        return refuse_prediction(ours, theirs, SERVED_TOLERANCE)
    alike = [
        ours["form"] == theirs["form"],
        *(len(ours[key]) == len(theirs[key]) for key in ("texts", "numbers", "ranks")),
    ]
    return None if all(alike) else f"predict() answers with a {ours['form']}, not with a {theirs['form']}"


def read_answers(files: dict[str, str]) -> dict[str, Array]:
    """The arrays of `.npy` files, by output."""
    return {name: np.load(file, allow_pickle=False) for name, file in files.items()}


def differs(served: Mapping[str, Array], own: Mapping[str, Array], limit: float = SERVED_TOLERANCE) -> str | None:
    """None where two answers are alike, or what of the first is not as in the second. Floats may be off by `limit` of
    an output's largest value."""
    if served.keys() != own.keys():
        return f"it has the outputs {', '.join(served)}, and what was proven has {', '.join(own)}"
    for name, value in own.items():
        there = served[name]
        if there.shape != value.shape or there.dtype != value.dtype:
            return f"output {name!r} is {there.dtype}{list(there.shape)}, and was {value.dtype}{list(value.shape)}"
        if value.dtype.kind != "f":
            if not np.array_equal(there, value):
                return f"output {name!r} differs"
            continue
        finite = np.isfinite(value)
        if not np.array_equal(finite, np.isfinite(there)):
            return f"output {name!r} is not finite in other places"
        scale = float(np.max(np.abs(value[finite]), initial=0.0))
        error = float(np.max(np.abs(there[finite].astype(np.float64) - value[finite].astype(np.float64)), initial=0.0))
        if error > limit * scale:
            return f"output {name!r} is off by {error:.3g}, where the largest value is {scale:.3g}"
    return None
