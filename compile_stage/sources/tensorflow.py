"""Keras and TensorFlow: `.keras` archives and SavedModels, as `mlflow.keras` and `mlflow.tensorflow` log them.

The baseline is a direct call of the traced function, as a server of TensorFlow makes it. Keras's `predict` is a loop
over batches around the same function, and about ten times slower on small inputs: any compiled model would look fast
beside it. ONNX is made of that very function by tf2onnx, which Keras's own export to ONNX uses too; images stay
[batch, height, width, channels], as the caller has them.

TensorFlow does not live beside every compiler, so `open` and `export` may run in a toolchain. `refuse`, `example` and
`prediction_format` read the files alone (`sources.keras_archive`, `sources.saved_model`) and need no TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Exporter, Session
from compile_stage.core.records import Compliance, PortableModel, ShapeRange, SourceModel, Target
from compile_stage.core.shapes import demand_shapes
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.sources import graph, keras_archive, mlmodel, saved_model, tf2onnx_graph
from compile_stage.sources.session import SourceSession

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

_PICKLES = ("custom_objects.cloudpickle", "global_custom_objects.cloudpickle")
_OPT_IN = "set compliance.allow_pickle in the policy if you trust where it comes from"


class _Payload(NamedTuple):
    """The file or folder that holds the model, and pickles that lie beside it."""

    path: Path
    archive: bool
    pickles: tuple[Path, ...]


class _Network(NamedTuple):
    """The original, traced once.

    Attributes:
        function: A `tf.function` of the inputs in order; it gives the outputs in order.
        concrete: That function for the signature's types and shapes.
    """

    signature: Signature
    specs: Sequence[Any]
    function: Any
    concrete: Callable[..., Any]


class TensorFlowSource(Exporter):
    """Models that `mlflow.tensorflow` logged: Keras models and `tf.Module`s."""

    name: ClassVar[str] = "tensorflow"
    requires = ("tensorflow", "keras", "tf2onnx", "onnx")
    extra = "tensorflow"
    framework: ClassVar[str] = "TensorFlow (graph)"
    lists_outputs: ClassVar[bool] = True
    """Whether MLflow's pyfunc answers with a list where Keras does."""
    capabilities = SourceCapabilities(forms=("onnx", "tflite", "stablehlo"), toolchain="tensorflow")

    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        settings = mlmodel.flavor(source, self.name)
        if (reason := _refuse_settings(settings)) is not None:
            return reason
        payload = _payload(source, self.name)
        if (reason := mlmodel.missing_file(payload.path, source)) is not None:
            return reason
        if payload.pickles and not compliance.allow_pickle:
            return _refuse_pickles(payload)
        reason = _refuse_payload(payload, trusted=compliance.allow_pickle)
        return reason or _refuse_inputs(source, payload)

    @contextmanager
    def open(self, source: SourceModel, target: Target) -> Iterator[Session]:
        tensorflow = _tensorflow(target.threads)
        with _opened(source, self.name) as network:

            def call(arrays: Sequence[Any]) -> list[Any]:
                answers = network.concrete(*map(tensorflow.convert_to_tensor, arrays))
                return [answer.numpy() for answer in answers]

            yield SourceSession(network.signature, call)

    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        _tensorflow()
        with _opened(source, self.name) as network:
            demand_shapes(network.signature, shapes, source)
            model = tf2onnx_graph.convert(network.function, network.specs, network.signature, source)
        return graph.finish(model, source, shapes, into)

    def export_for(self, form: str, source: SourceModel, target: Target, into: Path) -> PortableModel:
        from compile_stage.sources import tensorflow_modules

        _tensorflow()
        with _opened(source, self.name) as network:
            return tensorflow_modules.write(form, network, source, target, into)

    def example(self, source: SourceModel) -> Batch | None:
        declared = _declared_inputs(source, _payload(source, self.name))
        if not declared:
            return None
        return mlmodel.named_example(source, Signature(inputs=declared, outputs=()))

    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        payload = _payload(source, self.name)
        kind = "dict" if _answers_a_dict(payload) else "list" if self.lists_outputs and _layers(payload) else "array"
        return {
            "kind": kind,
            "outputs": [],  # all that the graph has
            "columns": None,
            "frame_in_frame_out": not mlmodel.has_tensor_signature(source),
        }

    def packages(self) -> Mapping[str, str]:
        return package_versions("tensorflow", "tensorflow-cpu", "keras", "tf2onnx", "onnx")


class KerasSource(TensorFlowSource):
    """Models that `mlflow.keras` logged, with Keras's TensorFlow backend."""

    name = "keras"
    framework = "Keras (TensorFlow graph)"
    lists_outputs = False  # it stacks outputs of one shape, before the batch, and fails on others


# ------------------------------------------------------------------------------------------- without TensorFlow


def _payload(source: SourceModel, flavor: str) -> _Payload:
    settings = mlmodel.flavor(source, flavor)
    if folder := settings.get("saved_model_dir"):
        return _Payload(mlmodel.within(source, folder), archive=False, pickles=())
    data = mlmodel.within(source, settings.get("data") or "data")
    pickles = tuple(data / name for name in _PICKLES if (data / name).exists())
    exported = settings.get("save_exported_model") or (data / "model").is_dir()
    return _Payload(data / "model" if exported else data / "model.keras", archive=not exported, pickles=pickles)


def _refuse_settings(settings: Mapping[str, Any]) -> str | None:
    if settings.get("save_format") == "h5":
        return (
            "it is saved as HDF5, whose layers Keras makes without looking at what they are: log it again without "
            "keras_model_kwargs={'save_format': 'h5'}"
        )
    if (backend := settings.get("keras_backend", "tensorflow")) != "tensorflow":
        return (
            f"it was logged with Keras's {backend} backend, and the original runs in TensorFlow here: load the .keras "
            "file with KERAS_BACKEND=tensorflow and log it from there, where its users run it so"
        )
    if "signature_def_key" in settings:
        return "it is an estimator of TensorFlow 1: save it with TensorFlow 2 and log that"
    return None


def _refuse_pickles(payload: _Payload) -> str:
    """Why a model with pickled custom objects is refused. MLflow pickles what is registered in the process that logs,
    whether the model uses it or not. One that uses none is refused too: an object may stand for one of Keras's own by
    its name."""
    pickled = "it was logged with custom objects, which are a pickle and execute code when loaded"
    if payload.archive and keras_archive.refuse(payload.path) is None:
        return (
            f"{pickled}, and all of its layers are Keras's own: log it again after "
            f"keras.saving.get_custom_objects().clear(), or {_OPT_IN}"
        )
    return f"{pickled}: use layers of Keras in their place, or {_OPT_IN}"


def _refuse_payload(payload: _Payload, *, trusted: bool) -> str | None:
    if not payload.archive:
        return saved_model.refuse(payload.path, trusted=trusted)
    return None if trusted else keras_archive.refuse(payload.path)


def _refuse_inputs(source: SourceModel, payload: _Payload) -> str | None:
    try:
        declared = _declared_inputs(source, payload)
    except (saved_model.RefusedError, keras_archive.RefusedError) as error:
        return str(error)
    if text := [spec.name for spec in declared if spec.dtype in ("str", "string")]:
        return f"its input {', '.join(text)} is text: log the model that takes what the text becomes"
    if any(not spec.shape for spec in declared):
        return f"its input {', '.join(spec.name for spec in declared if not spec.shape)} has no batch dimension"
    return None


def _declared_inputs(source: SourceModel, payload: _Payload) -> tuple[TensorSpec, ...]:
    """The inputs as the files declare them; empty for a model of a class of the user's own."""
    found = keras_archive.inputs(payload.path) if payload.archive else saved_model.signature(payload.path).inputs
    return _specs([(name, dtype, shape) for name, dtype, shape in found], mlmodel.tensor_names(source)[0])


def _answers_a_dict(payload: _Payload) -> bool:
    """True where the model gives a dict of one tensor, which its pyfunc answers with too; several are a dict
    anyway."""
    if payload.archive:
        return keras_archive.gives_a_dict(payload.path)
    return [tensor.name for tensor in saved_model.signature(payload.path).outputs] != ["output_0"]


def _layers(payload: _Payload) -> tuple[str, ...]:
    """The layers that a list of several outputs comes from; empty where it is none, or the file does not say."""
    return keras_archive.output_layers(payload.path) if payload.archive else ()


def _named_outputs(
    outputs: Sequence[tuple[str, str, tuple[int | None, ...]]], layers: Sequence[str], source: SourceModel
) -> list[tuple[str, str, tuple[int | None, ...]]]:
    """Several outputs that have no names of their own, with those of the model's MLflow signature: each that of the
    layer that gives it, where the signature names the layers; else in order, where its types and sizes are theirs."""
    names = mlmodel.tensor_names(source)[1] or ()
    numbered = [f"output_{number}" for number in range(len(outputs))]
    if [name for name, _, _ in outputs] != numbered or len(set(names)) != len(outputs):
        return list(outputs)
    if set(names) == set(layers):
        names = tuple(layers)
    elif not all(map(_fits, outputs, mlmodel.read(source).outputs or ())):
        return list(outputs)
    return [(name, dtype, shape) for name, (_, dtype, shape) in zip(names, outputs, strict=True)]


def _fits(output: tuple[str, str, tuple[int | None, ...]], spec: Mapping[str, Any]) -> bool:
    """Whether a tensor of the signature has that type and these sizes, as far as both say."""
    _, dtype, shape = output
    described = spec.get("tensor-spec", {})
    sizes = list(described.get("shape") or ())
    if described.get("dtype") != dtype or len(sizes) != len(shape):
        return False
    return all(one in (None, size) or size == -1 for one, size in zip(shape, sizes, strict=True))


def _specs(
    tensors: Sequence[tuple[str, str, Sequence[int | None]]], named: Sequence[str] | None
) -> tuple[TensorSpec, ...]:
    """The tensors with open dimensions as symbols. A single one has the name that the model's MLflow signature gives
    it, since that is what callers write."""
    names = [name for name, _, _ in tensors]
    if named is not None and len(named) == len(names) == 1:
        names = list(named)
    return tuple(
        TensorSpec(name=name, dtype=dtype, shape=tuple(graph.dim(size, name, axis) for axis, size in enumerate(shape)))
        for name, (_, dtype, shape) in zip(names, tensors, strict=True)
    )


# ---------------------------------------------------------------------------------------------- with TensorFlow


def _tensorflow(threads: int = 0) -> Any:
    """TensorFlow, with thread pools of that size.

    Their size is fixed by the first computation of a process. Timed is only what a fresh worker opens, which is the
    first there; where the original was exported before in the same process, it predicts with the pools that there are.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    import tensorflow

    if threads:
        with contextlib.suppress(RuntimeError):
            tensorflow.config.threading.set_intra_op_parallelism_threads(threads)
            tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    return tensorflow


@contextmanager
def _opened(source: SourceModel, flavor: str) -> Iterator[_Network]:
    payload = _payload(source, flavor)
    with ExitStack() as stack:
        try:
            yield stack.enter_context(_archived(source, payload) if payload.archive else _saved(source, payload))
        except (saved_model.RefusedError, keras_archive.RefusedError) as error:
            raise SourceError(str(error), where=source.uri) from error


@contextmanager
def _archived(source: SourceModel, payload: _Payload) -> Iterator[_Network]:
    import keras
    import tensorflow

    with _loaded(source, payload) as model:
        inputs = getattr(model, "inputs", None)
        if not inputs:
            raise SourceError(
                "its inputs are not known, since it is a class of its own", fix=_AS_SAVED_MODEL, where=source.uri
            )
        structure = getattr(model, "_inputs_struct", None)

        def run(*tensors: Any) -> Any:
            packed = tensors[0] if structure is None else keras.tree.pack_sequence_as(structure, list(tensors))
            return model(packed, training=False)

        shapes = [(tensor.name, tensor.dtype, (None, *tensor.shape[1:])) for tensor in inputs]
        yield _traced(tensorflow, run, shapes, source, _layers(payload))


_AS_SAVED_MODEL = (
    "log it as a SavedModel: mlflow.keras.log_model(..., save_exported_model=True), with a signature of tensors"
)


@contextmanager
def _loaded(source: SourceModel, payload: _Payload) -> Iterator[Any]:
    """The Keras model; one that could run code of its own only gets here where the policy allows it."""
    import keras

    try:
        if not payload.pickles and keras_archive.refuse(payload.path) is None:
            with keras_archive.checked(payload.path) as archive:
                model = keras.saving.load_model(str(archive), compile=False, safe_mode=True)
        else:
            objects = _unpickled(payload.pickles)
            model = keras.saving.load_model(str(payload.path), custom_objects=objects, compile=False, safe_mode=False)
    except SourceError:
        raise
    except Exception as error:
        problem = f"Keras can't load it: {type(error).__name__}: {first_line(error)}"
        raise _not_loaded(source, problem, keras.__version__) from error
    yield model


def _unpickled(files: Sequence[Path]) -> dict[str, Any]:
    import cloudpickle  # type: ignore[import-untyped]

    objects: dict[str, Any] = {}
    for file in files:
        with file.open("rb") as stream:
            objects |= cloudpickle.load(stream)
    return objects


@contextmanager
def _saved(source: SourceModel, payload: _Payload) -> Iterator[_Network]:
    import tensorflow

    described = saved_model.signature(payload.path)
    with ExitStack() as stack:
        folder = payload.path
        if saved_model.refuse(folder) is None:
            folder = stack.enter_context(saved_model.checked(folder))
        try:
            model = tensorflow.saved_model.load(str(folder))
            served = model.signatures[described.name]
        except Exception as error:
            problem = f"TensorFlow can't load it: {type(error).__name__}: {first_line(error)}"
            raise _not_loaded(source, problem, tensorflow.__version__) from error
        names = [tensor.name for tensor in described.inputs]

        def run(*tensors: Any) -> Any:
            answers = served(**dict(zip(names, tensors, strict=True)))
            return answers["output_0"] if list(answers) == ["output_0"] else answers

        yield _traced(tensorflow, run, [tuple(tensor) for tensor in described.inputs], source)


def _traced(
    tensorflow: Any, run: Callable[..., Any], inputs: Sequence[Any], source: SourceModel, layers: Sequence[str] = ()
) -> _Network:
    """The function of the inputs that gives the outputs as a list.

    Args:
        run: Tensors in order → a tensor, or a list or a dict of tensors.
        inputs: Name, type and shape of each input.
        layers: Those that a list of several outputs comes from, where they are known.
    """
    named_inputs, named_outputs = mlmodel.tensor_names(source)
    taken = _specs(inputs, named_inputs)
    specs = [
        tensorflow.TensorSpec(shape, dtype, name=f"input_{index}") for index, (_, dtype, shape) in enumerate(inputs)
    ]
    names: list[str] = []

    def flat(*tensors: Any) -> list[Any]:
        answers = dict(_named(run(*tensors), ""))
        names[:] = list(answers)
        return list(answers.values())

    function = tensorflow.function(flat, autograph=False)
    try:
        concrete = function.get_concrete_function(*specs)
    except Exception as error:
        problem = f"TensorFlow can't trace it: {type(error).__name__}: {first_line(error)}"
        raise SourceError(problem, fix="call it on a batch in TensorFlow first", where=source.uri) from error
    outputs = [
        (name, output.dtype.name, tuple(output.shape))
        for name, output in zip(names, concrete.structured_outputs, strict=True)
    ]
    answered = _specs(_named_outputs(outputs, layers, source), named_outputs)
    return _Network(Signature(inputs=taken, outputs=_apart(answered, taken)), specs, function, concrete)


def _apart(outputs: Sequence[TensorSpec], inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The outputs, with other names where an input has theirs: in a graph that would be one value."""
    taken = {spec.name for spec in inputs}
    return tuple(replace(spec, name=f"{spec.name}_out") if spec.name in taken else spec for spec in outputs)


def _named(answer: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Each tensor of an answer with its name: `output`, the keys of a dict, or `output_0`, `output_1`, …"""
    if isinstance(answer, Mapping):
        for key in sorted(answer):
            yield from _named(answer[key], f"{prefix}_{key}" if prefix else str(key))
    elif isinstance(answer, list | tuple):
        for index, item in enumerate(answer):
            yield from _named(item, f"{prefix or 'output'}_{index}")
    else:
        yield prefix or "output", answer


def _not_loaded(source: SourceModel, problem: str, here: str) -> SourceError:
    logged = [mlmodel.flavor(source, name).get("keras_version") for name in ("keras", "tensorflow")]
    version = next((str(one) for one in logged if one), "an unknown version")
    return SourceError(
        problem,
        fix=f"it was logged with {version}, here is {here}: `compile-stage toolchain lock tensorflow` pins newer ones, "
        "or log it again",
        where=source.uri,
    )
