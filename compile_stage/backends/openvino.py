"""OpenVINO on its CPU plug-in.

The artifact is OpenVINO's own IR, compiled for the machine when it is opened. This plug-in picks bfloat16 by itself
where the CPU has it, so every artifact names its execution precision; the hint is read back from the compiled model,
and what each layer runs in is counted from the graph that the plug-in executes.

`open` needs nothing but openvino and numpy; NNCF is needed only to compile the schemes that calibrate natively.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar, cast

from compile_stage.backends.openvino_layers import read_back
from compile_stage.backends.openvino_reading import read_graph
from compile_stage.backends.openvino_session import open_model, sentence
from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.environment import hardware
from compile_stage.core.errors import NothingCompiledError, UsageError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Samples, Session
from compile_stage.core.records import Artifact, PortableModel, SampleSet, Scheme, Target, TuningOption
from compile_stage.core.sample_files import read_batches
from compile_stage.core.tensors import Signature
from compile_stage.plugin_support.artifacts import Compiled, describe, refuse_types
from compile_stage.plugin_support.compiler import Compiler
from compile_stage.plugin_support.options import FLAG, Number, OneOf, Option, valid_options

# Options of a target, and the plug-in's property of each that is one.
_OPTIONS: Mapping[str, Option] = {
    "performance_hint": OneOf("latency", "throughput", "cumulative_throughput"),
    "num_streams": Number(low=1),
    "threads": Number(low=1),
    "cpu_pinning": FLAG,
    "hyper_threading": FLAG,
    "partitioner": OneOf("static", "auto"),
    "fixed_shapes": FLAG,
    "requests": Number(low=1),
}
_PROPERTIES = {
    "performance_hint": "PERFORMANCE_HINT",
    "num_streams": "NUM_STREAMS",
    "threads": "INFERENCE_NUM_THREADS",
    "cpu_pinning": "ENABLE_CPU_PINNING",
    "hyper_threading": "ENABLE_HYPER_THREADING",
    "partitioner": "TBB_PARTITIONER",
}
# The plug-in's word for what it runs the floating-point part of a graph in.
_HINTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}

_LACKS = {
    "bf16": "this machine has no bfloat16",
    "fp16": "this CPU has no matrix instructions for float16 (AMX-FP16), and without them the plug-in runs it slower "
    "than float32, or as bfloat16",
    "int8-dynamic": "it has no kernels for ONNX's DynamicQuantizeLinear",
    "fp8": "its CPU plug-in has no 8-bit float arithmetic: it would round, and compute in float32",
}


# Native int8 calibrates on at most so many samples; NNCF's own default.
_CALIBRATION_SAMPLES = 300

_LSTM_STATE = 1  # which input of OpenVINO's LSTMSequence its first hidden state is


class OpenVino(Compiler):
    """The backend."""

    name: ClassVar[str] = "openvino"
    requires: ClassVar[tuple[str, ...]] = ("openvino",)
    extra: ClassVar[str] = "openvino"
    options: ClassVar[Mapping[str, Option]] = _OPTIONS
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        forms=("onnx",),
        devices=("cpu",),
        precisions=("fp32", "bf16", "fp16", "int8", "int4"),
        runtime=("openvino",),
        lacks=_LACKS,
        artifact_is_code=False,
        compiles_any_graph=True,
        offers_tuning_options=True,
        caches=True,
        follows_others=True,
        profiler="compile_stage.backends.openvino_profile:profile_artifact",
    )

    def toolchain(self) -> Mapping[str, str]:
        return package_versions("openvino", "nncf", "numpy")

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        if target.device != "cpu":
            return ()
        if precision == "fp32":
            return (Scheme(precision="fp32", name="fp32", native=True, options={"hint": "f32"}),)
        if precision == "bf16" and hardware().multiplies_bf16:
            return (Scheme(precision="bf16", name="bf16", native=True, options={"hint": "bf16"}),)
        if precision == "fp16" and hardware().multiplies_fp16:
            return (Scheme(precision="fp16", name="fp16", native=True, options={"hint": "f16"}),)
        if precision == "int8":
            return _int8_schemes()
        if precision == "int4":
            return _block_schemes()
        return ()

    def tuning_options(self, target: Target, scheme: Scheme) -> tuple[TuningOption, ...]:
        return _tuning_options(target)

    def refuse(self, model: PortableModel, target: Target) -> str | None:
        if (reason := super().refuse(model, target) or refuse_types(model.signature)) is not None:
            return reason
        try:
            read_graph(model)
        except RuntimeError as error:
            return _why_unread(error)
        return None

    def compile(
        self, model: PortableModel, scheme: Scheme, target: Target, job_id: str, into: Path, calibration: Samples = None
    ) -> Artifact:
        import openvino

        asked = valid_options(self.name, _OPTIONS, target)
        if scheme.native and scheme.precision == "int8" and calibration is None:
            raise UsageError("int8 needs calibration samples: set data.calibration in the policy")
        into.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "config": _config(asked),
            "hint": str(scheme.options.get("hint", _HINTS[scheme.float_type])),
            "shapes": _known_shapes(model.signature, target) if asked.get("fixed_shapes", True) else [],
        }
        if (requests := int(asked.get("requests", 1))) > 1:
            _demand_rows(model.signature, requests, target.threads)
            options["requests"] = requests
        graph = read_graph(model)
        name_by_place(graph)  # before constants are folded, and before NNCF: both derive names from these
        if scheme.native and scheme.precision == "int8" and calibration is not None:
            _prepare_lstms(graph)
            name_by_place(graph)
            graph = _quantize(graph, model.signature, calibration)
            name_by_place(graph)
        openvino.save_model(graph, str(into / "model.xml"), compress_to_fp16=False)
        try:
            signature, executed, notes = _executed(into / "model.xml", options, target.threads, model, graph, scheme)
        except NothingCompiledError:
            if not options["shapes"]:
                raise
            # For a fixed shape the plug-in may fuse a small network into one kernel of another precision; for free ones
            # it does not.
            options["shapes"] = []
            signature, executed, notes = _executed(into / "model.xml", options, target.threads, model, graph, scheme)
        compiled = Compiled(entry="model.xml", signature=signature, options=options, executed=executed, notes=notes)
        return describe(self, model, scheme, job_id, into, compiled)

    @contextlib.contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Session]:
        path = Path(artifact.path) / artifact.entry
        with open_model(path, artifact.options, threads, artifact.signature) as session:
            yield session


# ------------------------------------------------------------------------------------------------------------ schemes


def _int8_schemes() -> tuple[Scheme, ...]:
    """Our graphs first, the one with symmetric activations before the other: it rounds only what matrix operators read,
    which is the most accurate and no slower, and a product of two activations runs in integers, but where the CPU's are
    slower than its floats (docs/int8.md). NNCF's own is last, so that a tie is not decided for it (docs/int8.md)."""
    floats = ("bf16",) if hardware().multiplies_bf16 else ()
    safe = {"reduce_range": hardware().sums_saturate, "products": not hardware().sums_saturate}
    symmetric = Scheme(
        precision="int8",
        name="int8-sym",
        activations="int8",
        weights="int8",
        symmetric=True,
        ops=("Conv", "ConvTranspose", "Gemm", "MatMul"),
        options={"placement": "operands", "one_sided": True, **safe},
        float_types=floats,
    )
    unsigned = Scheme(
        precision="int8",
        name="int8-u8",
        activations="uint8",
        weights="int8",
        options=safe,
        float_types=floats,
    )
    native = Scheme(
        precision="int8",
        name="int8-nncf",
        native=True,
        activations="int8",
        weights="int8",
        options={"hint": "f32"},
        calibrates=True,
    )
    return (symmetric, unsigned, native) if importlib.util.find_spec("nncf") else (symmetric, unsigned)


def _block_schemes() -> tuple[Scheme, ...]:
    """4-bit weights, which FullyConnected keeps compressed. HQQ with blocks of 32 alone: rounding to nearest runs the
    same and is hardly ever more accurate, and larger blocks are up to 6 % slower here (docs/lowerings.md)."""
    floats = ("bf16",) if hardware().multiplies_bf16 else ()
    options = {"method": "hqq", "block": 32}
    return (Scheme(precision="int4", name="int4-hqq", weights="uint4", options=options, float_types=floats),)


# ------------------------------------------------------------------------------------------------------- tuning options


def _tuning_options(target: Target) -> tuple[TuningOption, ...]:
    """Settings that are worth a try. The plug-in maps weights from their file and reuses its buffers by itself; streams
    serve calls that come at once, and a session's come one by one."""
    several = len(target.batch_sizes) > 1
    options = [
        # One compiled model for every batch size, not one for each with packed weights of its own.
        *([TuningOption(kind="memory", name="one-model", options={"fixed_shapes": False})] if several else []),
        _setting("no-pinning", cpu_pinning=False),
    ]
    if target.threads > 1:
        options += [
            _setting("hyper-threading", hyper_threading=True),
            # The parts of an operator are balanced among the threads while they run.
            _setting("auto-partitioner", partitioner="auto"),
            # Small operators lose more by being shared out than they gain.
            _fewer("half-threads", target.threads // 2),
            *([_fewer("one-thread", 1)] if target.threads > 3 else []),
        ]
        if any(size >= target.threads and size % target.threads == 0 for size in target.batch_sizes):
            # A thread that has rows of its own waits for no other after each operator.
            shared = {"requests": target.threads}
            options.append(
                TuningOption(kind="tuning", name="shared-batch", options=shared, opening=shared, worth_a_try="batches")
            )
    return tuple(options)


def _setting(name: str, **options: Any) -> TuningOption:
    """One that the plug-in takes when it opens the model."""
    properties = {_PROPERTIES[key]: value for key, value in options.items()}
    return TuningOption(kind="tuning", name=name, options=options, opening={"config": properties})


def _fewer(name: str, threads: int) -> TuningOption:
    return replace(_setting(name, threads=threads), worth_a_try="short-calls")


# -------------------------------------------------------------------------------------------------------- quantisation


def _prepare_lstms(graph: Any) -> None:
    """Change LSTMs in place so that NNCF quantises them as OpenVINO's kernels for 8 bits need. Two layers of 128 units
    took 3.0 ms for 8 x 64 steps, as in float32, and take 1.4 ms in 8 bits (one thread of a Zen 4).

    The weights must be constants, and OpenVINO puts the gates in order by nodes: constants are folded. The first state
    must be quantised as the input is, and NNCF takes zeros for a weight, whatever size the batch gives them: a Slice
    that keeps all of it makes it an activation."""
    import numpy as np
    from openvino import opset13
    from openvino.passes import ConstantFolding, Manager

    manager = Manager()
    manager.register_pass(ConstantFolding())
    manager.run_passes(graph)
    start, stop, step, axis = 0, np.iinfo(np.int64).max, 1, 1
    whole = [np.array([one], np.int64) for one in (start, stop, step, axis)]
    for operation in graph.get_ordered_ops():
        if operation.get_type_name() == "LSTMSequence":
            state = operation.input(_LSTM_STATE)
            state.replace_source_output(opset13.slice(state.get_source_output(), *whole).output(0))


def _quantize(graph: Any, signature: Signature, calibration: SampleSet) -> Any:
    """NNCF's post-training quantisation, on the policy's samples in their order. The graph's batch stays free."""
    # Its own switch against sending usage statistics: a compiler does not call home.
    os.environ.setdefault("NNCF_CI", "1")
    import nncf

    items = list(islice(read_batches(calibration, signature), _CALIBRATION_SAMPLES))
    if not items:
        size = signature.fixed_batch or 1
        raise UsageError(
            f"int8 needs at least {size} calibration samples, and data.calibration gives {calibration.count}"
        )
    with contextlib.redirect_stdout(sys.stderr):  # it draws progress bars, and standard output is not ours to draw on
        return nncf.quantize(
            graph,
            nncf.Dataset(items),
            # NNCF's own choice: symmetric activations but for a transformer's. The CPU's kernels subtract no zero point
            # then, and where the other half of the integers is missed, `int8-u8` has it.
            preset=None,
            subset_size=len(items),
            # By itself it protects the first layer only, which is not enough where sums saturate.
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                overflow_fix=nncf.OverflowFix.ENABLE if hardware().sums_saturate else nncf.OverflowFix.FIRST_LAYER
            ),
            # An attention's products and normalisations need NNCF's transformer rules.
            model_type=nncf.ModelType.TRANSFORMER if _has_attention(graph) else None,
        )


def _has_attention(graph: Any) -> bool:
    """A Softmax whose answer reaches a MatMul, through what exporters put between (a guard against NaN, a reshape). A
    classifier's last Softmax reaches none."""
    return any(_reaches_matmul(operation) for operation in graph.get_ops() if operation.get_type_name() == "Softmax")


def _reaches_matmul(operation: Any, steps: int = 4) -> bool:
    users = [target.get_node() for output in operation.outputs() for target in output.get_target_inputs()]
    if any(user.get_type_name() == "MatMul" for user in users):
        return True
    return steps > 0 and any(_reaches_matmul(user, steps - 1) for user in users)


def name_by_place(graph: Any) -> None:
    """Give each operation without a name its type and a number by its place in the graph, and so in the bodies of loops
    and conditions. OpenVINO numbers them over all graphs of a process, so that a file would depend on what was compiled
    before."""
    operations = graph.get_ordered_ops()
    unnamed = [operation for operation in operations if operation.get_friendly_name() == operation.get_name()]
    named = {operation.get_friendly_name() for operation in operations} - {one.get_name() for one in unnamed}
    numbers: dict[str, Iterator[int]] = defaultdict(count)
    for operation in unnamed:
        kind = operation.get_type_name()
        operation.set_friendly_name(next(n for i in numbers[kind] if (n := f"{kind}_{i}") not in named))
    for operation in operations:
        for body in _bodies(operation):
            name_by_place(body)


def _bodies(operation: Any) -> tuple[Any, ...]:
    match operation.get_type_name():
        case "If":
            return operation.get_then_body(), operation.get_else_body()
        case "Loop" | "TensorIterator":
            return (operation.get_function(),)
    return ()


# ------------------------------------------------------------------------------------------------- what a session needs


def _config(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The plug-in's properties that a target's options ask for."""
    config = {_PROPERTIES[key]: value for key, value in asked.items() if key in _PROPERTIES}
    return {"PERFORMANCE_HINT": "latency", **config}


def _demand_rows(signature: Signature, requests: int, threads: int) -> None:
    """Refuse to share a batch among requests where its rows are not those of all that goes in and comes out."""
    if requests > threads:
        raise UsageError(f"requests: {requests} is more than the target's threads: {threads}")
    for spec in (*signature.inputs, *signature.outputs):
        if not spec.shape or isinstance(spec.shape[0], int):
            raise UsageError(f"requests: {requests} needs a free batch size, and {spec} has none")


def _known_shapes(signature: Signature, target: Target) -> list[dict[str, tuple[int, ...]]]:
    """The shapes that the target says will come: one for each batch size, where every other dimension is fixed or has a
    typical size. The plug-in's kernels for them are 4 to 8 % faster than those for free shapes (int8 ResNet-50 and
    BERT)."""
    known: list[dict[str, tuple[int, ...]]] = []
    for batch_size in target.batch_sizes:
        shapes = {}
        for spec in signature.inputs:
            typical = target.shapes[spec.name].typical if spec.name in target.shapes else spec.shape
            shapes[spec.name] = (batch_size, *typical[1:])
        if all(isinstance(size, int) for shape in shapes.values() for size in shape):
            known.append(cast("dict[str, tuple[int, ...]]", shapes))
    return known


# ------------------------------------------------------------------------------------------------------ what really ran


def _executed(
    path: Path, options: Mapping[str, Any], threads: int, model: PortableModel, graph: Any, scheme: Scheme
) -> tuple[Signature, dict[str, Any], tuple[str, ...]]:
    with open_model(path, options, threads, model.signature) as session:
        return session.signature, *read_back(session.compiled, graph, scheme)


# --------------------------------------------------------------------------------------------------------------- words


def _why_unread(error: RuntimeError) -> str:
    """OpenVINO lists the operators that it lacks behind a paragraph of its own internals; people need the list."""
    _, found, operators = str(error).partition("No conversion rule found for operations:")
    if found:
        return f"OpenVINO does not know the operators {' '.join(operators.split('--')[0].split())}"
    return f"OpenVINO can't read the graph: {sentence(error)}"
