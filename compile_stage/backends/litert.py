"""LiteRT (formerly TensorFlow Lite), the runtime of Android and small devices, on this machine's CPU.

litert-torch converts the PyTorch program, ai-edge-quantizer rounds it, and ai-edge-litert runs it with XNNPACK's
kernels. A converted file has fixed shapes, so the artifact is one file for each bucket of the target's shapes
(`plugin_support.buckets`). Which operators XNNPACK took, and in what types they compute, is read back from the loaded
interpreter.

`open` needs nothing but ai-edge-litert and numpy.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Samples, Session
from compile_stage.core.records import Artifact, PortableModel, SampleSet, Scheme, Target
from compile_stage.core.sample_files import read_index
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.artifacts import Compiled, describe, without_folders
from compile_stage.plugin_support.buckets import Router, Shapes, bucket_name, buckets, padding_note, refuse_buckets
from compile_stage.plugin_support.compiler import Compiler
from compile_stage.plugin_support.fixed_shapes import read_modules
from compile_stage.plugin_support.options import FLAG, Option, valid_options
from compile_stage.plugin_support.pool_threads import PoolCores
from compile_stage.plugin_support.sessions import demand_call, quiet_logs
from compile_stage.plugin_support.torch_attention import answer_masked_rows
from compile_stage.plugin_support.torch_programs import flat_module

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch

DELEGATE = "XNNPACK"
BUILT_IN = "built-in kernels"
_SIGNATURE = "serving_default"

# Calibrates on at most so many samples, as the other backends that calibrate by themselves.
_CALIBRATION_SAMPLES = 300

_LACKS = {
    "bf16": "this backend does not drive LiteRT in bfloat16",
    "int4": "this backend does not drive LiteRT's 4-bit weights",
    "fp8": "LiteRT has no 8-bit floats",
}
_SCHEMES: Mapping[str, Scheme] = {
    "fp32": Scheme(precision="fp32", name="fp32", native=True),
    "fp16": Scheme(precision="fp16", name="fp16-weights", native=True, weights="float16"),
    "int8": Scheme(
        precision="int8", name="int8-litert", native=True, activations="int8", weights="int8", calibrates=True
    ),
    "int8-dynamic": Scheme(precision="int8-dynamic", name="int8-dynamic-litert", native=True, weights="int8"),
}

# Operators that do the arithmetic of a network. Their second input is the weight (of TRANSPOSE_CONV the second of
# three, too).
_MATRIX_OPS = ("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "FULLY_CONNECTED", "BATCH_MATMUL")

# The converter makes 32-bit numbers of 64-bit ones. Whole numbers are checked at each call; rounding floats would be
# another precision.
_NARROWED = {"int64": "int32", "uint64": "uint32"}


class LiteRt(Compiler):
    """The backend."""

    name: ClassVar[str] = "litert"
    requires: ClassVar[tuple[str, ...]] = ("litert_torch", "ai_edge_quantizer", "ai_edge_litert", "torch")
    extra: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Option]] = {"affinity": FLAG}
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        forms=("torch-export", "tflite"),
        devices=("cpu",),
        precisions=tuple(_SCHEMES),
        runtime=("ai-edge-litert",),
        opens_with=("ai_edge_litert",),
        follows_others=True,
        artifact_is_code=False,
        lacks=_LACKS,
    )

    def toolchain(self) -> Mapping[str, str]:
        return package_versions(
            "litert-torch", "litert-converter", "ai-edge-quantizer", "ai-edge-litert", "torch", "numpy"
        )

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        return (_SCHEMES[precision],) if target.device == "cpu" and precision in _SCHEMES else ()

    def refuse(self, model: PortableModel, target: Target) -> str | None:
        if (reason := super().refuse(model, target)) is not None:
            return reason
        for spec in (*model.signature.inputs, *model.signature.outputs):
            if spec.dtype == "float64":
                return f"{spec.name!r} is float64, which litert's converter rounds to float32: log the model in float32"
        return refuse_buckets(self.name, model.signature, target)

    def compile(
        self, model: PortableModel, scheme: Scheme, target: Target, job_id: str, into: Path, calibration: Samples = None
    ) -> Artifact:
        if (reason := self.refuse_target(target)) is not None:
            raise UsageError(reason)
        if scheme.precision == "int8" and (calibration is None or not calibration.count):
            raise UsageError("int8 needs calibration samples: set data.calibration in the policy")
        if (reason := refuse_buckets(self.name, model.signature, target)) is not None:
            raise UsageError(reason)
        shapes = buckets(model.signature, target)
        if scheme.precision == "int8" and len({tuple(shape[1:] for shape in one) for one in shapes}) > 1:
            raise UsageError(
                "litert calibrates each file on samples of its own shape, and the target promises several sizes beside "
                "the batch: leave int8 to another backend"
            )
        into.mkdir(parents=True, exist_ok=True)
        notes: list[str] = []
        found: list[dict[str, Any]] = []
        files = [f"model-{bucket_name(model.signature, inputs)}.tflite" for inputs in shapes]
        with _quiet():
            for name, inputs in zip(files, shapes, strict=True):
                file = into / name
                file.write_bytes(_converted(model, inputs))
                if scheme.precision != "fp32":
                    rows = inputs[0][0] if inputs[0] else 1
                    file.write_bytes(_quantise(file, scheme, model.signature, calibration, rows))
        for name in files:
            loaded = _Loaded(into / name, model.signature, target.threads, pinned=False)
            executed, remarks = _read_back(loaded.interpreter, scheme)
            found.append(executed)
            notes += [note for note in remarks if note not in notes]
        notes += filter(None, [padding_note(model.signature, shapes)])
        compiled = Compiled(
            entry=files[0],
            options={
                "files": [{"file": name, "shapes": one} for name, one in zip(files, shapes, strict=True)],
                **valid_options(self.name, self.options, target),
            },
            executed=found[0],
            notes=notes,
        )
        return describe(self, model, scheme, job_id, into, compiled)

    @contextlib.contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Session]:
        session = _LiteRtSession(artifact, threads)
        try:
            yield session
        finally:
            session.close()


# ---------------------------------------------------------------------------------------------------------- the session


class _LiteRtSession:
    """An interpreter for each bucket. What it answers are copies, so they are the caller's."""

    def __init__(self, artifact: Artifact, threads: int) -> None:
        self.signature = artifact.signature
        folder, pinned = Path(artifact.path), bool(artifact.options.get("affinity", True))
        self._names = [spec.name for spec in self.signature.inputs]
        self._loaded: dict[Shapes, _Loaded] = {}
        for one in artifact.options["files"]:
            shapes = tuple(tuple(shape) for shape in one["shapes"])
            self._loaded[shapes] = _Loaded(folder / one["file"], self.signature, threads, pinned=pinned)
            self._loaded[shapes].demand(shapes)
        self._router = Router("litert", self.signature, tuple(self._loaded))
        self._closed = False

    def run(self, batch: Batch) -> Batch:
        demand_call(self.signature, batch, closed=self._closed)
        arrays = [batch[name] for name in self._names]
        if (fitting := self._loaded.get(tuple([array.shape for array in arrays]))) is not None:
            return fitting.run(arrays)  # nothing to pad and to cut
        bucket, arrays = self._router.fit(batch)
        return self._router.cut(batch, bucket, self._loaded[bucket].run(arrays))

    def close(self) -> None:
        self._closed = True
        self._loaded.clear()


class _Loaded:
    """One file in an interpreter, which has a pool of threads of its own."""

    def __init__(self, path: Path, signature: Signature, threads: int, *, pinned: bool) -> None:
        import numpy as np
        from ai_edge_litert.interpreter import Interpreter

        self._cores = PoolCores()
        try:
            with _silent(), self._cores.pinned(threads, wanted=pinned):
                self.interpreter: Any = Interpreter(model_path=str(path), num_threads=threads)
                self.interpreter.allocate_tensors()
                runner = self.interpreter.get_signature_runner(_SIGNATURE)
        except (RuntimeError, ValueError) as error:
            raise NothingCompiledError(f"LiteRT can't load the model: {_sentence(error)}") from error
        inputs = _tensors("inputs", runner.get_input_details(), signature.inputs)
        outputs = _tensors("outputs", runner.get_output_details(), signature.outputs)
        # Read once: for each call it would take several us.
        self._shapes: Shapes = tuple(tuple(int(size) for size in tensor["shape"]) for tensor in inputs)
        self._inputs = [
            (spec, t["index"], np.dtype(t["dtype"])) for spec, t in zip(signature.inputs, inputs, strict=True)
        ]
        self._outputs = [
            (spec.name, t["index"], np.dtype(spec.dtype)) for spec, t in zip(signature.outputs, outputs, strict=True)
        ]

    def demand(self, shapes: Shapes) -> None:
        """Raise IntegrityError where the file takes inputs of other shapes."""
        if self._shapes != shapes:
            raise IntegrityError(f"the file takes inputs of {self._shapes}, and the artifact says {shapes}")

    def run(self, arrays: Sequence[Array]) -> Batch:
        """Of arrays in the signature's order, and of the file's shapes."""
        interpreter = self.interpreter
        for (spec, index, dtype), array in zip(self._inputs, arrays, strict=True):
            fits = array.dtype is dtype and array.flags.c_contiguous  # mostly; then one call less
            interpreter.set_tensor(index, array if fits else _narrowed(spec, array, dtype))
        self._cores.leave()
        interpreter.invoke()
        answer = {}
        for name, index, dtype in self._outputs:
            found = interpreter.get_tensor(index)
            answer[name] = found if found.dtype is dtype else found.astype(dtype)
        return answer


def _tensors(word: str, details: Mapping[str, Any], specs: Sequence[TensorSpec]) -> list[Any]:
    """The file's tensors in the model's order: the converter numbers them. One that was lost or retyped is an error
    here."""
    ordered = [details[name] for name in sorted(details, key=lambda name: int(name.rpartition("_")[2]))]
    wanted = [(_NARROWED.get(spec.dtype, spec.dtype), len(spec.shape)) for spec in specs]
    have = [(tensor["dtype"].__name__.rstrip("_"), len(tensor["shape"])) for tensor in ordered]
    if wanted != have:
        listed = "; ".join(f"{dtype} of {rank} dimensions" for dtype, rank in have)
        raise IntegrityError(
            f"the {word} changed on the way: the model has {'; '.join(map(str, specs))}, the file {listed}"
        )
    return ordered


def _narrowed(spec: TensorSpec, array: Any, dtype: Any) -> Any:
    """The array in the file's type. A number that does not fit is refused, not wrapped around."""
    import numpy as np

    if array.dtype == dtype:
        return np.asarray(array, order="C")
    narrowed = array.astype(dtype, order="C")
    # Compared with what they were: between calls of 5 ms that takes half as long as to find the smallest and largest.
    if np.count_nonzero(narrowed != array):
        raise UsageError(
            f"input {spec.name!r} holds {int(array.min())} to {int(array.max())}, and the compiled model takes "
            f"{dtype} only"
        )
    return narrowed


# ----------------------------------------------------------------------------------------------------------- converting


_last: tuple[tuple[object, ...], bytes] | None = None
"""The last file that this process converted: of one model, int8 begins from what fp32 is."""

_KEPT_BYTES = 500_000_000  # a larger file is converted again, rather than kept in memory


def _converted(model: PortableModel, shapes: Sequence[tuple[int, ...]]) -> bytes:
    global _last
    key = (model.digest, tuple(map(tuple, shapes)))
    if _last is not None and _last[0] == key:
        return _last[1]
    _last = None  # its memory is free while the next is made
    made = _convert(model, shapes)
    if len(made) <= _KEPT_BYTES:
        _last = (key, made)
    return made


def _convert(model: PortableModel, shapes: Sequence[tuple[int, ...]]) -> bytes:
    """The file's bytes, in float32, for inputs of these shapes."""
    if model.form == "tflite":
        return next(one.file.read_bytes() for one in read_modules(model) if one.shapes == tuple(map(tuple, shapes)))
    import litert_torch
    import torch

    tree = torch.utils._pytree
    program = torch.export.load(model.path)
    answer_masked_rows(program)
    example = []
    for tensor, shape in zip(tree.tree_leaves(program.example_inputs), shapes, strict=True):
        sized = tensor
        for axis, size in enumerate(shape):  # its own rows again and again: they are values that the model takes
            sized = sized.index_select(axis, torch.arange(size) % tensor.shape[axis])
        example.append(sized.contiguous())
    try:
        with torch.no_grad():
            return bytes(litert_torch.convert(flat_module(program), tuple(example)).model_content())
    except Exception as error:  # what fails in a compiler of Python shares no base class
        raise NothingCompiledError(f"LiteRT's converter can't convert the program: {_sentence(error)}") from error


def _quantise(
    file: Path, scheme: Scheme, signature: Signature, calibration: SampleSet | None, batch_size: int
) -> bytes:
    """The file rounded by ai-edge-quantizer. Inputs and outputs stay what they are."""
    from ai_edge_quantizer import calibrator, quantizer
    from ai_edge_quantizer.utils import qsv_utils

    try:
        rules, ranges = _rules(scheme.precision), None
        if scheme.precision == "int8" and calibration is not None:
            # The smallest and largest value of all samples. By default it takes a moving average, which with few
            # samples is the range of the first, and another one for another batch size.
            observed = calibrator.Calibrator(str(file), num_threads=1, qsv_update_func=qsv_utils.min_max_update)
            observed.calibrate({_SIGNATURE: list(_calibration(calibration, signature, batch_size))}, rules)
            ranges = observed.get_model_qsvs()
        work = quantizer.Quantizer(str(file), rules.get_quantization_recipe())
        return bytes(work.quantize(ranges, enable_progress_report=False).quantized_model)
    except Exception as error:  # as above
        raise NothingCompiledError(
            f"LiteRT's quantizer can't make {scheme.precision} of the model: {_sentence(error)}"
        ) from error


def _rules(precision: str) -> Any:
    """What is rounded, and how, in ai-edge-quantizer's own words."""
    from ai_edge_quantizer import qtyping, recipe, recipe_manager
    from ai_edge_quantizer.algorithm_manager import AlgorithmName

    rules = recipe_manager.RecipeManager()
    if precision == "int8-dynamic":
        rules.load_quantization_recipe(recipe.dynamic_wi8_afp32())
    elif precision == "fp16":
        halves = qtyping.TensorQuantizationConfig(num_bits=16, dtype=qtyping.TensorDataType.FLOAT)
        config = qtyping.OpQuantizationConfig(
            weight_tensor_config=halves, compute_precision=qtyping.ComputePrecision.FLOAT, explicit_dequantize=True
        )
        rules.add_quantization_config(".*", qtyping.TFLOperationName.ALL_SUPPORTED, config, AlgorithmName.FLOAT_CASTING)
    else:
        rules.add_static_config(
            regex=".*",
            operation_name=qtyping.TFLOperationName.ALL_SUPPORTED,
            activation_num_bits=8,
            weight_num_bits=8,
            algorithm_key=AlgorithmName.MIN_MAX_UNIFORM_QUANT,
        )
        for end in (qtyping.TFLOperationName.INPUT, qtyping.TFLOperationName.OUTPUT):
            rules.add_quantization_config(".*", end, algorithm_key=AlgorithmName.NO_QUANTIZE)
    return rules


def _calibration(samples: SampleSet, signature: Signature, batch_size: int) -> Iterator[dict[str, Any]]:
    """The policy's samples in their order, in batches of the file's size; the last is filled up with the first."""
    import numpy as np

    files, _ = read_index(samples)
    columns = [np.load(files[spec.name], mmap_mode="r", allow_pickle=False) for spec in signature.inputs]
    for start in range(0, min(samples.count, _CALIBRATION_SAMPLES), batch_size):
        rows = (start + np.arange(batch_size)) % samples.count
        yield {
            f"args_{at}": np.ascontiguousarray(column[rows]).astype(_NARROWED.get(spec.dtype, spec.dtype))
            for at, (spec, column) in enumerate(zip(signature.inputs, columns, strict=True))
        }


# ------------------------------------------------------------------------------------------------------- what was made


def _read_back(interpreter: Any, scheme: Scheme) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The loaded file's operators, which of them XNNPACK took, and the types of activations and weights in the
    products. Raises when XNNPACK took none, or the precision that was asked for was not taken."""
    nodes = interpreter._get_ops_details()
    operators = [node for node in nodes if node["op_name"] != "DELEGATE"]
    left = _left_out(nodes, [detail["index"] for detail in interpreter.get_output_details()])
    outside = Counter(node["op_name"] for node in operators if node["index"] in left)
    taken = len(operators) - outside.total()
    listed = ", ".join(f"{count} {name}" for name, count in outside.most_common(3))
    if not taken:
        raise NothingCompiledError(f"XNNPACK took none of the model's operators: {listed or 'there are none'}")
    made_by = {int(output): node for node in operators for output in node["outputs"]}

    def kind(tensor: int) -> str:
        """The type in which a tensor is stored: that of its source where it is expanded when the model is loaded."""
        node = made_by.get(tensor)
        stored = int(node["inputs"][0]) if node is not None and node["op_name"] == "DEQUANTIZE" else tensor
        return str(interpreter._get_tensor_details(stored, 0)["dtype"].__name__)

    products: Counter[str] = Counter()
    for node in operators:
        if node["op_name"] in _MATRIX_OPS:
            weight, activation = (1, 2) if node["op_name"] == "TRANSPOSE_CONV" else (1, 0)
            given = interpreter._get_tensor_details(int(node["inputs"][activation]), 0)["dtype"].__name__
            products[f"{given} by {kind(int(node['inputs'][weight]))}"] += 1
    providers = {DELEGATE: taken, BUILT_IN: outside.total()}
    executed = {
        "providers": {name: count for name, count in providers.items() if count},
        "ops": dict(sorted(Counter(node["op_name"] for node in operators).items())),
        "precision": {"matrix_and_convolution": dict(sorted(products.items()))},
    }
    notes = _judge(scheme, products)
    if outside:
        notes += (f"{taken} operators run in XNNPACK, {outside.total()} in built-in kernels (most: {listed})",)
    return executed, notes


def _left_out(nodes: Sequence[Mapping[str, Any]], outputs: Sequence[int]) -> set[int]:
    """The operators that no delegate took. The interpreter lists those that one did take beside it, but what they make
    is made by it now: so from the outputs backwards, each tensor's maker is the delegate where there is one."""
    makers: dict[int, Mapping[str, Any]] = {}
    for node in nodes:
        for output in node["outputs"]:
            if int(output) not in makers or node["op_name"] == "DELEGATE":
                makers[int(output)] = node
    waiting, seen, left = [int(output) for output in outputs], set(), set()
    while waiting:
        tensor = waiting.pop()
        if tensor in seen or tensor not in makers:
            continue
        seen.add(tensor)
        node = makers[tensor]
        if node["op_name"] != "DELEGATE":
            left.add(int(node["index"]))
        waiting.extend(int(given) for given in node["inputs"])
    return left


def _judge(scheme: Scheme, products: Counter[str]) -> tuple[str, ...]:
    wanted = {
        "fp32": "float32 by float32",
        "fp16": "float32 by float16",
        "int8": "int8 by int8",
        "int8-dynamic": "float32 by int8",
    }[scheme.precision]
    taken = products[wanted]
    rest = ", ".join(f"{count} {kind}" for kind, count in sorted(products.items()) if kind != wanted)
    if scheme.precision == "fp32":
        if rest:
            raise NothingCompiledError(f"the model is fp32, and LiteRT runs some of its products otherwise: {rest}")
        return ()
    if not taken:
        raise NothingCompiledError(
            f"LiteRT was asked for {scheme.precision}, and multiplies nothing in it: {rest or 'there are no products'}"
        )
    notes = [f"{taken} products are {wanted}, {rest}"] if rest else []
    if scheme.precision == "fp16":
        notes.append("float16 is stored, not computed: weights are expanded to float32 when the model is loaded")
    return tuple(notes)


# ---------------------------------------------------------------------------------------------------------------- quiet


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress, warnings and log lines of the converter and of what it imports."""
    with quiet_logs(), contextlib.redirect_stdout(io.StringIO()), _silent():
        yield


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what the C++ of the converter and the runtime writes on standard error, which no setting of their
    packages turns off."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _sentence(error: Exception) -> str:
    """The first lines of what it says, without the program that compilers print behind it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {without_folders(' '.join(lines))}"[:400]
