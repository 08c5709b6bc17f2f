"""ExecuTorch with XNNPACK, PyTorch's runtime for phones and small devices, on this machine's CPU.

The artifact is one `.pte` file. XNNPACK takes the parts of the program that it has kernels for; the rest runs in ExecuTorch's portable
operators, one thread and no vector code for most of them. Which nodes went where, and in what types, is read back from the file itself.

`open` needs nothing but executorch's extension module, torch and numpy: not the compiler, whose import takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import re
import sys
import tempfile
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compile_stage.core.compiled import describe, refuse_form
from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Session
from compile_stage.core.records import Artifact, PortableModel, SampleSet, Scheme, Target
from compile_stage.core.sample_files import read_batches
from compile_stage.core.tensors import Signature, TensorSpec

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

DELEGATE = "XnnpackBackend"
PORTABLE = "portable operators"
_ENTRY = "model.pte"
_METHOD = "forward"

# Calibrates on at most so many samples: observers keep whole histograms, and theirs barely move after that.
_CALIBRATION_SAMPLES = 300

_LACKS = {
    "fp16": "this backend does not drive XNNPACK's float16 kernels, which x86 CPUs lack",
    "bf16": "XNNPACK has no bfloat16 kernels that ExecuTorch would call",
    "int4": "this backend does not drive the quantisers that pack blocks for XNNPACK",
    "fp8": "XNNPACK has no 8-bit floats",
}

# XNNPACK's nodes that do the arithmetic of a network, and what ExecuTorch calls the same in its own operators.
_MATRIX_NODES = ("Conv2d", "DepthwiseConv2d", "ConvTranspose2d", "FullyConnected", "BatchMatrixMultiply")
_MATRIX_OPS = re.compile(r"^aten::(convolution|linear|mm|bmm|addmm|matmul|_scaled_dot_product)")
_INTEGER = ("qint8", "quint8", "qdint8", "qpint8")

# Instructions that compute sizes and addresses, not values.
_NO_KERNELS = ("executorch_prim::", "aten::sym_")

# ExecuTorch's numbers for the types of elements.
_DTYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64", 11: "bool",
}  # fmt: skip


class ExecuTorch:
    """The backend (`core.ports.Backend`)."""

    name: ClassVar[str] = "executorch"
    requires: ClassVar[tuple[str, ...]] = ("executorch", "torch", "torchao")
    opens_with: ClassVar[tuple[str, ...]] = ("executorch", "torch")
    extra: ClassVar[str] = "executorch"
    forms: ClassVar[tuple[str, ...]] = ("torch-export",)
    runtime: ClassVar[tuple[str, ...]] = ("executorch", "torch")

    def toolchain(self) -> Mapping[str, str]:
        return package_versions("executorch", "torch", "torchao", "numpy")

    def refuse_target(self, target: Target) -> str | None:
        if target.device != "cpu":
            return f"executorch is served on the device cpu; {target.device!r} is not served by this backend yet"
        for key in target.options.get(self.name, {}):
            return f"executorch has no option {key!r}; it has none"
        return None

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        return (_SCHEMES[precision],) if target.device == "cpu" and precision in _SCHEMES else ()

    def lacks(self, target: Target, precision: str) -> str | None:
        return _LACKS.get(precision)

    def refuse(self, model: PortableModel, target: Target) -> str | None:
        if (reason := refuse_form(self, model, target)) is not None:
            return reason
        try:
            _bounds(model.signature, target)
        except UsageError as error:
            return error.problem
        return None

    def compile(
        self,
        model: PortableModel,
        scheme: Scheme,
        target: Target,
        job_id: str,
        into: Path,
        calibration: SampleSet | None = None,
    ) -> Artifact:
        if (reason := self.refuse_target(target)) is not None:
            raise UsageError(reason)
        if scheme.precision == "int8" and calibration is None:
            raise UsageError("int8 needs calibration samples: set data.calibration in the policy")
        bounds = _bounds(model.signature, target)
        into.mkdir(parents=True, exist_ok=True)
        with _quiet():
            program = _compile(model, scheme, bounds, calibration)
            (into / _ENTRY).write_bytes(program)
            executed, notes = _read_back(program, scheme)
        session = _ExecuTorchSession(into / _ENTRY, model.signature, target.threads)
        try:
            limits = session.limits
        finally:
            session.close()
        _demand_room(bounds, limits)
        largest = {sizes[axis] for sizes, axes in zip(limits, bounds, strict=True) for axis in axes if axis == 0}
        if largest:
            notes += (f"takes batches of at most {min(largest)}, the largest that it was compiled for",)
        return describe(self, model, scheme, job_id, into, entry=_ENTRY, executed=executed, notes=notes)

    @contextlib.contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Session]:
        session = _ExecuTorchSession(Path(artifact.path) / artifact.entry, artifact.signature, threads)
        try:
            yield session
        finally:
            session.close()


_SCHEMES: Mapping[str, Scheme] = {
    "fp32": Scheme(precision="fp32", name="fp32", native=True),
    "int8": Scheme(precision="int8", name="int8-xnnpack", native=True, activations="int8", weights="int8"),
    "int8-dynamic": Scheme(precision="int8-dynamic", name="int8-dynamic-xnnpack", native=True, weights="int8"),
}


# ----------------------------------------------------------------------------------------------------------- the session

# The threads of ExecuTorch are one pool of the process, and a loaded program keeps the address of the pool that it was loaded with. So there is
# one lock, and before the pool is replaced every open session lets go of its program; it loads it again at its next call.
_LOCK = threading.RLock()
_OPEN: weakref.WeakSet[_ExecuTorchSession] = weakref.WeakSet()


class _ExecuTorchSession:
    """One loaded program. Its outputs are copies, so they are the caller's.

    Attributes:
        limits: By input, the sizes that the program has room for.
    """

    def __init__(self, path: Path, signature: Signature, threads: int) -> None:
        self.signature = signature
        self._path = path
        self._threads = threads
        self._method: Any = None
        self._closed = False
        _OPEN.add(self)
        with _LOCK:
            meta = self._ready().method_meta()
        self.limits = tuple(tuple(meta.input_tensor_meta(at).sizes()) for at in range(meta.num_inputs()))
        _demand_same(signature, meta)

    def run(self, batch: Batch) -> Batch:
        import numpy as np
        import torch

        if self._closed:
            raise UsageError("this session is closed; call it inside its context")
        if (reason := self.signature.refuse(batch) or self._refuse_size(batch)) is not None:
            raise UsageError(reason)
        arrays = [np.ascontiguousarray(batch[spec.name]) for spec in self.signature.inputs]
        tensors = [torch.from_numpy(array if array.flags.writeable else array.copy()) for array in arrays]
        with _LOCK:
            answers = self._ready()(tensors, True)  # True: copies, not the program's own memory
        names = (spec.name for spec in self.signature.outputs)
        return {name: answer.numpy() for name, answer in zip(names, answers, strict=True)}

    def close(self) -> None:
        with _LOCK:
            self._closed, self._method = True, None
            _OPEN.discard(self)

    def let_go(self) -> None:
        """Unload the program; the next call loads it again."""
        self._method = None

    def _ready(self) -> Any:
        """The loaded program, with the session's own number of threads in the pool."""
        runtime = _runtime()
        if runtime._threadpool_get_thread_count() != self._threads:
            for session in list(_OPEN):
                session.let_go()
            with _silent():  # it tells of the new number on standard error
                runtime._unsafe_reset_threadpool(self._threads)
            if (taken := runtime._threadpool_get_thread_count()) != self._threads:
                raise UsageError(f"ExecuTorch was asked for {self._threads} threads and runs {taken}")
        if self._method is None:
            try:
                self._method = runtime._load_program(str(self._path)).load_method(_METHOD)
            except RuntimeError as error:
                raise NothingCompiledError(f"ExecuTorch can't load the program: {_sentence(error)}") from error
        return self._method

    def _refuse_size(self, batch: Batch) -> str | None:
        for spec, room in zip(self.signature.inputs, self.limits, strict=True):
            shape = batch[spec.name].shape
            if any(size > limit for size, limit in zip(shape, room, strict=True)):
                return (
                    f"input {spec.name!r} of shape {list(shape)} is larger than the program has room for, {list(room)}: "
                    "compile it with larger batch_sizes or shapes of the target"
                )
        return None


def _runtime() -> Any:
    """ExecuTorch's extension module. `executorch.runtime` wraps it, and imports the whole compiler for a warning (7 s)."""
    import importlib

    import torch  # noqa: F401 - the extension needs its libraries loaded

    name = "executorch.extension.pybindings._C"
    if name in sys.modules:
        return sys.modules[name]
    with _silent(), _quiet():
        runtime = importlib.import_module(name)
        runtime._threadpool_get_thread_count()  # makes the pool, and tells of the CPU on standard error
    if DELEGATE not in runtime._get_registered_backend_names():
        raise NothingCompiledError("this build of ExecuTorch has no XNNPACK")
    return runtime


def _demand_same(signature: Signature, meta: Any) -> None:
    """An input or output that was lost or retyped on the way is an error here, not a surprise later. Names are not in the file: order counts."""
    inputs = [meta.input_tensor_meta(at) for at in range(meta.num_inputs())]
    outputs = [meta.output_tensor_meta(at) for at in range(meta.num_outputs())]
    for word, specs, found in (("inputs", signature.inputs, inputs), ("outputs", signature.outputs, outputs)):
        wanted = [(spec.dtype, len(spec.shape)) for spec in specs]
        have = [(_DTYPES.get(info.dtype(), str(info.dtype())), len(info.sizes())) for info in found]
        if wanted != have:
            listed = "; ".join(f"{dtype} of {rank} dimensions" for dtype, rank in have)
            raise IntegrityError(
                f"the {word} changed on the way: the model has {'; '.join(map(str, specs))}, the program {listed}"
            )


# ---------------------------------------------------------------------------------------------------------------- shapes


def _bounds(signature: Signature, target: Target) -> tuple[dict[int, tuple[int, int]], ...]:
    """By input, each free axis with the smallest and the largest size that the program must take: memory is planned for the largest.

    The batch goes up to the largest of the target's sizes, and at least to 2, since PyTorch takes a size of 1 for a constant.

    Raises:
        UsageError: Another axis is free, and the policy does not say between which sizes.
    """
    found = []
    for spec in signature.inputs:
        axes: dict[int, tuple[int, int]] = {}
        given = target.shapes.get(spec.name)
        for axis, size in enumerate(spec.shape):
            if isinstance(size, int):
                continue
            if axis and given is None:
                raise UsageError(
                    f"axis {axis} of input {spec.name!r} is free, and ExecuTorch plans memory for the largest size: "
                    f"give its min, typical and max shape under shapes.{spec.name} of the target"
                )
            low, high = (given.min[axis], given.max[axis]) if given is not None else (1, 1)
            if axis == 0:
                low, high = min(low, *target.batch_sizes), max(high, *target.batch_sizes)
            axes[axis] = (low, max(high, 2))
        found.append(axes)
    return tuple(found)


def _demand_room(bounds: Sequence[Mapping[int, tuple[int, int]]], limits: Sequence[Sequence[int]]) -> None:
    for at, (axes, sizes) in enumerate(zip(bounds, limits, strict=True)):
        for axis, (_, high) in axes.items():
            if sizes[axis] < high:
                raise NothingCompiledError(
                    f"the program must take {high} along axis {axis} of input {at}, and ExecuTorch planned memory for {sizes[axis]}"
                )


# ----------------------------------------------------------------------------------------------------------- compiling


def _compile(
    model: PortableModel, scheme: Scheme, bounds: Sequence[Mapping[int, tuple[int, int]]], calibration: SampleSet | None
) -> bytes:
    """The `.pte` file's bytes."""
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    tree = torch.utils._pytree
    program = torch.export.load(model.path)
    example = tuple(
        _sized(tensor, axes) for tensor, axes in zip(tree.tree_leaves(program.example_inputs), bounds, strict=True)
    )
    try:
        exported = _export(_flat(program), example, bounds, model.signature.inputs, gathered=True)
        if scheme.precision != "fp32":
            quantised = _quantise(exported, example, model.signature, scheme, calibration)
            exported = _export(quantised, example, bounds, model.signature.inputs, gathered=False)
        with torch.no_grad():
            lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
            return bytes(lowered.to_executorch().buffer)
    except (UsageError, NothingCompiledError):
        raise
    except Exception as error:  # what fails in a compiler of Python shares no base class
        raise NothingCompiledError(
            f"ExecuTorch can't compile the program in {scheme.precision}: {_sentence(error)}"
        ) from error


def _flat(program: Any) -> Any:
    """The program's module with its inputs flat, in the signature's order, and its outputs as a tuple. It takes sizes that the program was not
    exported for, a batch of 1 above all: exporting it anew finds out which are right."""
    import torch

    tree = torch.utils._pytree
    module, in_spec = program.module(check_guards=False), program.call_spec.in_spec

    class Flat(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.training = False  # a program's module has no eval(): it is frozen already

        def forward(self, *tensors: Any) -> Any:
            args, kwargs = tree.tree_unflatten(list(tensors), in_spec)
            return tuple(tree.tree_leaves(self.module(*args, **kwargs)))

    return Flat()


def _sized(tensor: Any, axes: Mapping[int, tuple[int, int]]) -> Any:
    """The example with each free axis at its largest size, its own rows again and again: they are values that the model takes."""
    import torch

    for axis, (_, high) in axes.items():
        tensor = tensor.index_select(axis, torch.arange(high) % tensor.shape[axis])
    return tensor.contiguous()


def _export(
    module: Any,
    example: tuple[Any, ...],
    bounds: Sequence[Mapping[int, tuple[int, int]]],
    inputs: Sequence[TensorSpec],
    *,
    gathered: bool,
) -> Any:
    """The module, whose inputs are `gathered` in one `*tensors` or not, as a program whose free axes have upper bounds: without one ExecuTorch plans memory for a number of its own."""
    import torch

    free = tuple(
        {axis: torch.export.Dim.AUTO(min=low, max=high) for axis, (low, high) in axes.items()} for axes in bounds
    )
    with torch.no_grad():
        exported = torch.export.export(module, example, dynamic_shapes=(free,) if gathered else free)
    taken = [
        node.meta["val"].shape for node in exported.graph.nodes if node.name in exported.graph_signature.user_inputs
    ]
    for spec, shape, axes in zip(inputs, taken, bounds, strict=True):
        for axis in axes:
            if isinstance(shape[axis], int):
                raise NothingCompiledError(
                    f"the program takes only {shape[axis]} along axis {axis} of input {spec.name!r}, though its signature leaves it free"
                )
    return exported


def _quantise(
    exported: Any, example: tuple[Any, ...], signature: Signature, scheme: Scheme, calibration: SampleSet | None
) -> Any:
    """PyTorch's own quantisation of exported programs, with XNNPACK's rules of what is rounded: the module with quantised weights.

    Static: ranges of activations are observed on the policy's samples in their order. Dynamic: they are taken from each call's own values, and only matrix
    products by a weight are rounded.
    """
    import torch
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import get_symmetric_quantization_config
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    dynamic = scheme.precision == "int8-dynamic"
    quantizer = _quantizer().set_global(get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic))
    with torch.no_grad():
        prepared = prepare_pt2e(_as_linear(exported.module(check_guards=False)), quantizer)
        if dynamic:
            prepared(*example)  # ranges of weights are observed too
        elif calibration is not None:
            seen = 0
            for batch in islice(read_batches(calibration, signature), _CALIBRATION_SAMPLES):
                prepared(*(torch.from_numpy(batch[spec.name]) for spec in signature.inputs))
                seen += 1
            if not seen:
                size = signature.fixed_batch or 1
                raise UsageError(
                    f"int8 needs at least {size} calibration samples, and data.calibration gives {calibration.count}"
                )
        return convert_pt2e(prepared)


def _as_linear(module: Any) -> Any:
    """The module with products by a weight written as linear layers, the only form in which the quantizer knows them."""
    import torch

    aten = torch.ops.aten
    for node in list(module.graph.nodes):
        bias, product, weight = None, None, None
        if node.target is aten.addmm.default and not node.kwargs:
            bias, product, weight = node.args
        elif node.target in (aten.mm.default, aten.matmul.default):
            product, weight = node.args
        if weight is None or weight.op != "get_attr" or weight.meta["val"].dim() != 2:
            continue
        if bias is not None and (bias.op != "get_attr" or bias.meta["val"].dim() != 1):
            continue
        turned = functools.reduce(getattr, weight.target.split("."), module).detach().t().contiguous()
        name = f"turned_{node.name}"
        module.register_buffer(name, turned)
        with module.graph.inserting_before(node):
            given = module.graph.create_node("get_attr", name)
            given.meta["val"] = weight.meta["val"].t()
            linear = module.graph.call_function(aten.linear.default, (product, given, bias))
        linear.meta = dict(node.meta)
        node.replace_all_uses_with(linear)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _quantizer() -> Any:
    """XNNPACK's quantizer, kept from arithmetic of whole numbers. By itself it makes floats of the constants in it, and marks it for rounding:
    an index that was rounded is no index."""
    import torch
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

    aten = torch.ops.aten
    by_number = {aten.add.Tensor: aten.add.Scalar, aten.mul.Tensor: aten.mul.Scalar}

    def is_float(node: Any) -> bool:
        value = node.meta.get("val")
        return value is not None and hasattr(value, "dtype") and bool(value.dtype.is_floating_point)

    class Quantizer(XNNPACKQuantizer):  # type: ignore[misc]  # executorch is untyped here
        def transform_for_annotation(self, model: Any) -> Any:
            for node in model.graph.nodes:
                if node.target in by_number and not is_float(node) and not isinstance(node.args[1], torch.fx.Node):
                    node.target = by_number[node.target]
            return super().transform_for_annotation(model)

        def annotate(self, model: Any) -> Any:
            annotated = super().annotate(model)
            for node in annotated.graph.nodes:
                found = node.meta.get(Q_ANNOTATION_KEY)
                if found is not None and not all(map(is_float, (node, *found.input_qspec_map))):
                    del node.meta[Q_ANNOTATION_KEY]
            return annotated

    return Quantizer()


# ------------------------------------------------------------------------------------------------------- what was made


def _read_back(program: bytes, scheme: Scheme) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Which nodes of the file XNNPACK runs, in what types, and what is left to portable operators. Raises when XNNPACK has none, or none in the precision
    that was asked for."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    read = deserialize_pte_binary(program).program
    (plan,) = read.execution_plan
    portable: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    types: Counter[str] = Counter()
    for instruction in (one.instr_args for chain in plan.chains for one in chain.instructions):
        kind = type(instruction).__name__
        if kind == "KernelCall":
            portable[plan.operators[instruction.op_index].name] += 1
        elif kind == "DelegateCall":
            delegate = plan.delegates[instruction.delegate_index]
            if delegate.id != DELEGATE:
                raise NothingCompiledError(f"nodes were given to {delegate.id}, not to {DELEGATE}")
            graph = _delegated(bytes(read.backend_delegate_data[delegate.processed.index].data))
            taken.update(node["xnode_union_type"].removeprefix("XNN") for node in graph["xnodes"])
            types.update(_matrix_types(graph))
    portable = Counter({name: n for name, n in portable.items() if not name.startswith(_NO_KERNELS)})
    listed = ", ".join(f"{count} {name}" for name, count in sorted(portable.items()))
    if not taken:
        raise NothingCompiledError(f"XNNPACK took none of the program's nodes; left are {listed or 'none'}")
    outside = {name: count for name, count in sorted(portable.items()) if _MATRIX_OPS.match(name)}
    providers = {DELEGATE: taken.total(), PORTABLE: portable.total()}
    executed = {
        "providers": {name: count for name, count in providers.items() if count},
        "ops": dict(sorted(taken.items())) | dict(sorted(portable.items())),
        "precision": {"matrix_and_convolution": dict(sorted(types.items())), "portable_matrix_operators": outside},
    }
    notes = _judge(scheme, types, outside)
    if portable:
        most = ", ".join(f"{count} {name}" for name, count in portable.most_common(3))
        notes += (f"{taken.total()} nodes run in XNNPACK, {portable.total()} in portable operators (most: {most})",)
    return executed, notes


def _delegated(payload: bytes) -> dict[str, Any]:
    """XNNPACK's part of the file, as the tree that its own schema describes: nodes, and tensors with their types."""
    from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import XNNHeader, _get_schema_bytes
    from executorch.exir._serialize._flatbuffer import _flatc_decompile

    header = XNNHeader.from_bytes(payload[: XNNHeader.EXPECTED_LENGTH])
    start = header.flatbuffer_offset
    with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
        schema, binary = Path(scratch) / "schema.fbs", Path(scratch) / "graph.bin"
        schema.write_bytes(_get_schema_bytes())
        binary.write_bytes(payload[start : start + header.flatbuffer_size])
        _flatc_decompile(scratch, str(schema), str(binary), ["--raw-binary"])
        text = binary.with_suffix(".json").read_text(encoding="utf-8")
    graph: dict[str, Any] = json.loads(re.sub(r"(?<=: )-?(?:inf|nan)\b", "null", text))  # bounds of an activation
    return graph


def _matrix_types(graph: Mapping[str, Any]) -> Iterator[str]:
    """The type in which each convolution and matrix product takes its activations."""
    types = {}
    for value in graph["xvalues"]:
        tensor = value["xvalue_union"]
        tensor = tensor.get("tensor_value", tensor)
        types[tensor["id_out"]] = str(tensor["datatype"]).removeprefix("xnn_datatype_")
    for node in graph["xnodes"]:
        if node["xnode_union_type"].removeprefix("XNN") in _MATRIX_NODES:
            yield types[node["xnode_union"]["input1_id"]]


def _judge(scheme: Scheme, types: Counter[str], outside: Mapping[str, int]) -> tuple[str, ...]:
    integer = sum(count for kind, count in types.items() if kind in _INTEGER)
    floating = types.total() - integer
    left = sum(outside.values())
    if scheme.precision == "fp32":
        if integer or floating != types["fp32"]:
            listed = ", ".join(f"{count} in {kind}" for kind, count in sorted(types.items()))
            raise NothingCompiledError(
                f"the program is fp32, and XNNPACK runs some of it in another precision: {listed}"
            )
        return ()
    if not integer:
        raise NothingCompiledError(
            f"ExecuTorch was asked for {scheme.precision}, and XNNPACK runs no convolution or matrix product in integers: "
            f"{floating} stayed in float, {left} in portable operators"
        )
    if floating + left:
        return (f"{integer} convolutions and matrix products run in int8, {floating + left} in float",)
    return ()


# ----------------------------------------------------------------------------------------------------------------- quiet


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings and log lines that PyTorch, torchao and ExecuTorch write about each other when they are imported and called."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what ExecuTorch's C++ writes by way of Python's standard error; its package has no setting for that."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _sentence(error: Exception) -> str:
    """The first lines of what it says, without the program that compilers print behind it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:400]
