"""A first policy for a model: what the model, its run, the samples and this machine already say, written down."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.control_groups import cores_to_fill
from compile_stage.core.digest import revive
from compile_stage.core.environment import Hardware
from compile_stage.core.errors import CompileStageError, PolicyError, SourceError, UsageError
from compile_stage.core.language_models import has_language_gates
from compile_stage.core.records import Plan, SourceModel, Target
from compile_stage.core.tensors import Signature
from compile_stage.measure.readers import SampleRequest
from compile_stage.pipeline.inputs import source_errors, source_limits
from compile_stage.pipeline.run import make_plan
from compile_stage.policy.data_files import read_contents
from compile_stage.policy.load import load_policy
from compile_stage.steps.export import inspect
from compile_stage.steps.sample import sample

_ROLES = {
    "validation": ("validation", "val", "test", "eval"),
    "calibration": ("calibration", "train", "training"),
}
"""Names under which people log data sets, by what a policy uses them for, the best first."""

_FIRST_CHOICE = ("onnxruntime", "openvino")
"""Tried where they are installed: the two that win most often on CPUs (docs/benchmarks.md), and compile in seconds."""

_USUAL_LABELS = ("y", "label", "labels", "target", "class")
_PRECISIONS = ("int8", "int8-dynamic", "bf16", "fp32")
_OF_LANGUAGE_MODELS = ("int4", "int8-dynamic", "bf16", "fp32")  # of a token the time is that of reading the weights
_OPT_IN = "allow_pickle"  # as refusals of sources name it
_ALLOWED = "compliance: {allow_pickle: true}\n"
_ENOUGH = 32  # data.min_samples of the shipped defaults
_TAKEN = {"validation": 512, "calibration": 300}  # data.*.max_samples of the shipped defaults
_ENOUGH_FOR_ACCURACY = 299  # what a drop of 0.01 at 0.95 needs (docs/proof.md)


@dataclass(frozen=True)
class _Samples:
    """Samples for one role.

    Attributes:
        source: As the policy names them.
        labels: The array or column that is no input; empty when there is none, or more than one.
        rows: None when nobody knows before the model is run.
        others: Names that may be labels, where several could be.
    """

    source: str
    labels: str = ""
    rows: int | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Given:
    """A file of samples that the user names.

    Attributes:
        shown: Its path as the policy says it, relative to the policy's folder.
        labels: The array or column that holds labels; None takes the one that is no input.
    """

    file: Path
    shown: str
    labels: str | None


def first_policy(context: Context, model_uri: str, name: str, data: Given | None, *, allow_pickle: bool) -> str:
    """The text of a policy for this model on this machine; valid, and with comments that say where each value is from.

    Args:
        name: Of the policy, and of its one target.
        data: A file of samples (.npz, .parquet, .csv); None looks among the data sets of the model's run.
        allow_pickle: The model may be a pickle, which runs code of its own; the policy says so too.

    Raises:
        RegistryError: The model can't be had.
        SourceError: The model is refused.
        UsageError: `data` can't be read, has no such labels, or does not fit the model.
    """
    folder = context.scratch / "first-policy"
    folder.mkdir(parents=True, exist_ok=True)
    plan = _draft(context, model_uri, name, folder, allow_pickle)
    source = plan.source
    try:
        signature, read = _opened(context, plan, data)
    except SourceError as error:
        if allow_pickle or _OPT_IN not in f"{error.problem} {error.fix}":
            raise
        raise SourceError(
            error.problem, fix="if you trust it: compile-stage init --allow-pickle", where=source.uri
        ) from error
    validation = calibration = read
    if read is None:
        inputs = _names(source, signature)
        validation, calibration = (_logged(source, role, inputs, folder) for role in ("validation", "calibration"))
    example = _Samples("input_example")
    return _text(
        plan,
        signature,
        name,
        validation or calibration or example,
        calibration or validation or example,
        context.hardware,
    )


def _draft(context: Context, uri: str, name: str, folder: Path, allow_pickle: bool) -> Plan:
    """The plan of all backends that are installed, which says what takes this model."""
    file = folder / "draft.yaml"
    precisions = ", ".join(dict.fromkeys((*_PRECISIONS, *_OF_LANGUAGE_MODELS)))
    file.write_text(
        "apiVersion: compile-stage/v1\nkind: OptimizationPolicy\n"
        f"name: {json.dumps(name)}\n"
        f"targets: {{{json.dumps(name)}: {{device: cpu, backends: auto, precisions: [{precisions}]}}}}\n"
        f"{_ALLOWED if allow_pickle else ''}",
        encoding="utf-8",
    )
    return make_plan(context, load_policy(file), uri)


def _opened(context: Context, plan: Plan, data: Given | None) -> tuple[Signature, _Samples | None]:
    """The network's inputs and outputs, from opening the original, and the samples of the file that was named."""
    policy, source = plan.policy, plan.source
    given = policy.data.validation
    if data is not None:
        given = replace(given, source=f"file:{data.file.absolute()}")
    limits = source_limits(policy.budget, source, replace(policy.data, validation=given), policy.files)
    with context.source_worker(source, limits) as worker, source_errors(source):
        inspect(context, worker, source, policy.compliance)
        answer = worker.call("open_source", source=source, target=Target(name="", device="cpu"))
        signature: Signature = revive(Signature, answer["signature"])
        if data is None:
            return signature, None
        read = _read(data, _names(source, signature))
        if not read.others:  # else who writes the policy says first which of them holds the labels
            spec = replace(given, labels=read.labels or None)
            request = SampleRequest(spec=spec, signature=signature, seed=policy.data.seed)
            try:
                sample(context, worker, source, "validation", request)
            except PolicyError as error:
                raise UsageError(
                    f"its samples do not fit the model: {error.problem}", fix=error.fix, where=str(data.file)
                ) from error
        return signature, read


def _names(source: SourceModel, signature: Signature) -> set[str]:
    """What is no label in a file of samples."""
    return {spec.name for spec in signature.inputs} | _columns(source)


def _read(given: Given, inputs: set[str]) -> _Samples:
    file, labels = given.file, given.labels
    try:
        contents = read_contents(file, _ENOUGH_FOR_ACCURACY)
    except ImportError as error:
        raise UsageError(f"{file} needs pyarrow", fix='pip install "compile-stage[parquet]"') from error
    except KeyError as error:
        raise UsageError(f"{file} is no file of samples", fix="name a .npz, .parquet or .csv") from error
    except (OSError, ValueError, SyntaxError, LookupError) as error:
        raise UsageError(f"{file} can't be read: {error}") from error
    if labels is not None and labels not in contents.names:
        raise UsageError(f"{file} has no {labels!r}", fix=f"it has {', '.join(contents.names) or 'nothing'}")
    left = tuple(name for name in contents.names if name not in inputs)
    usual = [name for name in left if name.lower() in _USUAL_LABELS]
    found = labels or (usual[0] if usual else left[0] if len(left) == 1 and len(contents.names) > 1 else "")
    return _Samples(f"file:{given.shown}", found, contents.rows, others=left if not found and len(left) > 1 else ())


def _columns(source: SourceModel) -> set[str]:
    """The inputs of MLflow's signature: a table's columns, where the network has one matrix of them."""
    listed = json.loads((source.mlmodel.get("signature") or {}).get("inputs") or "[]")
    return {str(entry["name"]) for entry in listed if isinstance(entry, dict) and entry.get("name")}


def _logged(source: SourceModel, role: str, inputs: set[str], folder: Path) -> _Samples | None:
    """A data set that the model's run logged under a usual name, and that can be fetched."""
    registry = plugins.registry_for(source.uri)
    for name in _ROLES[role]:
        try:
            file = registry.dataset(source, name, folder / role)
            found = _read(Given(Path(file), "", None), inputs)
        except CompileStageError:
            continue
        return _Samples(f"mlflow-dataset:{name}", found.labels, found.rows, found.others)
    return None


# ------------------------------------------------------------------------------------------------------ what is written


def _text(
    plan: Plan, signature: Signature, name: str, validation: _Samples, calibration: _Samples, machine: Hardware
) -> str:
    source = plan.source
    willing = list(dict.fromkeys(job.backend for job in plan.jobs))
    chosen = [backend for backend in _FIRST_CHOICE if backend in willing] or willing[:1]
    if not chosen:
        reasons = "; ".join(dict.fromkeys(refusal.reason for refusal in plan.refused))
        raise UsageError(f"no backend that is installed here takes {source.uri}: {reasons}", fix="compile-stage doctor")
    lines = [
        f"# A first policy for {source.uri} ({source.flavor}), made by `compile-stage init`.",
        *_described("inputs", signature.inputs),
        *_described("outputs", signature.outputs),
        "apiVersion: compile-stage/v1",
        "kind: OptimizationPolicy",
        f"name: {_word(name)}",
        f"owner: {_word(os.environ.get('USER') or 'nobody')}  # who is asked when a gate falls: best a team",
        "",
        "applies_to:",
        f"  names: [{_word(source.name)}]",
        "",
        "data:",
        *_data("validation", validation),
        *_data("calibration", calibration),
        "",
        "targets:",
        f"  {_word(name)}:",
        "    device: cpu",
        *_backends(plan, chosen, willing),
        "    batch_sizes: [1]  # each is proven and measured; the first decides who wins",
        f"    threads: {min(cores_to_fill(), 4)}  # of {machine.cores} cores here; what one serving process may use",
        *_shapes(signature),
        "",
        *(["# The model is a pickle: opening it runs code of whoever made it.", _ALLOWED] if _is_allowed(plan) else []),
        "# The shipped tolerances hold: compile-stage explain shows each, with its file and line.",
        "performance:",
        "  min_speedup: 1.0  # slower than the original wins nowhere",
        "",
        "# To move an alias when the run has passed:",
        '# promote: {alias: "{target}-prod"}',
    ]
    return "\n".join(lines) + "\n"


def _is_allowed(plan: Plan) -> bool:
    return plan.policy.compliance.allow_pickle


def _described(what: str, specs: Sequence[object]) -> list[str]:
    shown = "; ".join(map(str, specs[:4])) + ("; ..." if len(specs) > 4 else "")
    return [f"# {what}: {shown}"]


def _data(role: str, samples: _Samples) -> Iterator[str]:
    labels = f", labels: {_word(samples.labels)}" if samples.labels else ""
    counted = f"  # {samples.rows} samples" if samples.rows is not None else ""
    if samples.rows == _ENOUGH_FOR_ACCURACY:  # rows of a text file are counted up to here
        counted = f"  # {_ENOUGH_FOR_ACCURACY} samples or more"
    if samples.rows is not None and samples.rows > _TAKEN[role]:  # the report counts those that were taken
        counted += f", of which {_TAKEN[role]} are taken: max_samples takes more"
    yield f"  {role}: {{source: {json.dumps(samples.source, ensure_ascii=False)}{labels}}}{counted}"
    if samples.others:
        yield f"  # which of these holds the labels? {', '.join(samples.others)}: name it as labels, or none"
    if role != "validation":
        return
    if samples.rows is None:
        yield f"  # The run logged no data set named {', '.join(_ROLES[role])}. A proof needs {_ENOUGH} real samples or"
        yield "  # more: name some of yours (file:PATH, .npz, .parquet or .csv), or use `compile-stage init --data`."
    elif samples.rows < _ENOUGH:
        yield f"  # Fewer than {_ENOUGH}: no candidate can pass with so few."
    elif samples.labels and samples.rows < _ENOUGH_FOR_ACCURACY:
        yield f"  # Fewer than {_ENOUGH_FOR_ACCURACY}: too few to show a loss of accuracy of at most 0.01."


def _backends(plan: Plan, chosen: Sequence[str], willing: Sequence[str]) -> Iterator[str]:
    others = [backend for backend in willing if backend not in chosen]
    also = f"  # these take it too: {', '.join(others)}" if others else ""
    yield f"    backends: [{', '.join(chosen)}]{also}"
    possible = {job.scheme.precision for job in plan.jobs if job.backend in chosen and not job.not_runnable_here}
    of_language = any(has_language_gates(job.gates) for job in plan.jobs)
    kept = [precision for precision in (_OF_LANGUAGE_MODELS if of_language else _PRECISIONS) if precision in possible]
    yield f"    precisions: [{', '.join(kept or ['fp32'])}]  # candidates; the fastest that holds its tolerances wins"


def _shapes(signature: Signature) -> Iterator[str]:
    """Axes besides the batch that the model leaves open: what is usual there is the user's to say."""
    for spec in signature.inputs:
        if any(isinstance(size, str) for size in spec.shape[1:]):
            shown = ", ".join(str(size) for size in spec.shape)
            yield f"    # {spec.name} is open in [{shown}]; say what is usual, if samples don't:"
            sizes = [
                "1" if axis == 0 else "128" if isinstance(size, str) else str(size)
                for axis, size in enumerate(spec.shape)
            ]
            yield f"    # shapes: {{{_word(spec.name)}: {{typical: [{', '.join(sizes)}]}}}}"
            return


def _word(text: str) -> str:
    """A YAML scalar that is read as this text."""
    plain = re.fullmatch(r"[A-Za-z_][\w./-]*", text) and text.lower() not in {
        "y",
        "n",
        "yes",
        "no",
        "on",
        "off",
        "true",
        "false",
        "null",
    }
    return text if plain else json.dumps(text, ensure_ascii=False)
