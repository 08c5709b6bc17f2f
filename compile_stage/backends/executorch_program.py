"""A PyTorch program as ExecuTorch's file, with XNNPACK's parts: exported anew with bounds, quantised, lowered, and read
back.

One half of the backend `executorch`; what opens the file is the other (`backends.executorch`).
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from compile_stage.core.errors import NothingCompiledError, UsageError
from compile_stage.core.records import PortableModel, SampleSet, Scheme
from compile_stage.core.sample_files import read_batches
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.torch_programs import flat_module

DELEGATE = "XnnpackBackend"
PORTABLE = "portable operators"

# Calibrates on at most so many samples: observers keep whole histograms, and theirs barely move after that.
_CALIBRATION_SAMPLES = 300

# XNNPACK's nodes that do the arithmetic of a network, and what ExecuTorch calls the same in its own operators.
_MATRIX_NODES = ("Conv2d", "DepthwiseConv2d", "ConvTranspose2d", "FullyConnected", "BatchMatrixMultiply")
_MATRIX_OPS = re.compile(r"^aten::(convolution|linear|mm|bmm|addmm|matmul|_scaled_dot_product)")
_INTEGER = ("qint8", "quint8", "qdint8", "qpint8")

# Instructions that compute sizes and addresses, not values.
_NO_KERNELS = ("executorch_prim::", "aten::sym_")


# ----------------------------------------------------------------------------------------------------------- compiling


def compile_program(
    model: PortableModel, scheme: Scheme, bounds: Sequence[Mapping[int, tuple[int, int]]], calibration: SampleSet | None
) -> bytes:
    """The `.pte` file's bytes."""
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    tree = torch.utils._pytree
    program = torch.export.load(model.path)
    example = tuple(
        _sized(tensor, axes) for tensor, axes in zip(tree.tree_leaves(program.example_inputs), bounds, strict=True)
    )
    try:
        exported = _export(flat_module(program), example, bounds, model.signature.inputs, gathered=True)
        if scheme.precision != "fp32":
            quantised = _quantise(exported, example, model.signature, scheme, calibration)
            exported = _export(quantised, example, bounds, model.signature.inputs, gathered=False)
        with torch.no_grad():
            # Operators with an order of dimensions, and the check of types, call what makes a tensor of a given size
            # with the largest batch as a number: from then on it is the only one.
            config = EdgeCompileConfig(_skip_dim_order=True, _check_ir_validity=False)
            lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()], compile_config=config)
            return bytes(lowered.to_executorch().buffer)
    except (UsageError, NothingCompiledError):
        raise
    except Exception as error:  # what fails in a compiler of Python shares no base class
        raise NothingCompiledError(
            f"ExecuTorch can't compile the program in {scheme.precision}: {sentence(error)}"
        ) from error


def _sized(tensor: Any, axes: Mapping[int, tuple[int, int]]) -> Any:
    """The example with each free axis at its largest size, its own rows again and again: they are values that the model
    takes."""
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
    """The module, whose inputs are `gathered` in one `*tensors` or not, as a program whose free axes have upper bounds:
    without one ExecuTorch plans memory for a number of its own."""
    import torch

    free = tuple(
        {axis: torch.export.Dim.AUTO(min=low, max=high) for axis, (low, high) in axes.items() if low < high}
        for axes in bounds
    )
    with torch.no_grad():
        exported = torch.export.export(module, example, dynamic_shapes=(free,) if gathered else free)
    taken = [
        node.meta["val"].shape for node in exported.graph.nodes if node.name in exported.graph_signature.user_inputs
    ]
    for spec, shape, axes in zip(inputs, taken, bounds, strict=True):
        for axis, (low, high) in axes.items():
            if low < high and isinstance(shape[axis], int):
                raise NothingCompiledError(
                    f"the program takes only {shape[axis]} along axis {axis} of input {spec.name!r}, though its "
                    "signature leaves it free"
                )
    return exported


def _quantise(
    exported: Any, example: tuple[Any, ...], signature: Signature, scheme: Scheme, calibration: SampleSet | None
) -> Any:
    """PyTorch's own quantisation of exported programs, with XNNPACK's rules of what is rounded: the module with
    quantised weights.

    Static: ranges of activations are observed on the policy's samples in their order. Dynamic: they are taken from each
    call's own values, and only matrix products by a weight are rounded.
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
    """The module with products by a weight written as linear layers, the only form in which the quantizer knows
    them."""
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
    """XNNPACK's quantizer, kept from arithmetic of whole numbers. By itself it makes floats of the constants in it, and
    marks it for rounding: an index that was rounded is no index."""
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


def read_back(program: bytes, scheme: Scheme, kernels: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Which nodes of the file XNNPACK runs, in what types, and what is left to portable operators. Raises when XNNPACK
    has none, or none in the precision that was asked for, or one is not among the runtime's `kernels`."""
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
    called = {f"{one.name}.{one.overload}" if one.overload else one.name for one in plan.operators}
    if lacking := sorted(called.difference(kernels)):
        raise NothingCompiledError(f"ExecuTorch's runtime can't run {', '.join(lacking)}: replace it in the forward")
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
            f"ExecuTorch was asked for {scheme.precision}, and XNNPACK runs no convolution or matrix product in "
            f"integers: {floating} stayed in float, {left} in portable operators"
        )
    if floating + left:
        return (f"{integer} convolutions and matrix products run in int8, {floating + left} in float",)
    return ()


def sentence(error: Exception) -> str:
    """The first lines of what it says, without the program that compilers print behind it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:400]
