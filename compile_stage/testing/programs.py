"""The kit's models as PyTorch programs, for backends that start from one: the same weights, read from the ONNX file.

So what is expected stays what ONNX's own reference implementation answers: no PyTorch is both judge and party.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

from compile_stage.core.digest import digest_tree
from compile_stage.core.records import PortableModel
from compile_stage.plugin_support.torch_programs import tracing


def to_program(model: PortableModel, into: Path) -> PortableModel:
    """One of the kit's ONNX models as `into/model.pt2`, of the form `torch-export`. Raises NotImplementedError for an
    operator that the kit's models don't have."""
    import torch

    if (into / "model.pt2").is_file():
        return _describe(model, into)
    fixed = model.signature.fixed_batch
    example = tuple(
        torch.ones((fixed or 2, *spec.shape[1:]), dtype=getattr(torch, spec.dtype)) for spec in model.signature.inputs
    )
    shapes = tuple({0: torch.export.Dim.AUTO} for _ in example) if fixed is None else None
    into.mkdir(parents=True)
    with tracing():
        program = torch.export.export(_module(model), example, dynamic_shapes=(shapes,) if shapes else None)
        torch.export.save(program, str(into / "model.pt2"))
    return _describe(model, into)


def _describe(model: PortableModel, into: Path) -> PortableModel:
    return replace(
        model,
        path=str(into / "model.pt2"),
        digest=digest_tree(into),
        form="torch-export",
        opset=0,
        made_from=model.digest,
    )


def _module(model: PortableModel) -> Any:
    """A module that runs the graph's nodes one after another; float weights are its parameters."""
    import onnx
    import torch
    from onnx import helper, numpy_helper

    graph = onnx.load(model.path).graph
    inputs = [spec.name for spec in model.signature.inputs]
    outputs = [spec.name for spec in model.signature.outputs]
    nodes = [
        (
            node.op_type,
            list(node.input),
            node.output[0],
            {a.name: helper.get_attribute_value(a) for a in node.attribute},
        )
        for node in graph.node
    ]
    arrays = {weight.name: numpy_helper.to_array(weight).copy() for weight in graph.initializer}
    numbers = {name: array.tolist() for name, array in arrays.items() if array.dtype.kind == "i"}

    class Network(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
        def __init__(self) -> None:
            super().__init__()
            for name, array in arrays.items():
                if name not in numbers:
                    self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(array), requires_grad=False))

        def forward(self, *tensors: Any) -> Any:
            known: dict[str, Any] = {
                **numbers,
                **dict(self.named_parameters()),
                **dict(zip(inputs, tensors, strict=True)),
            }
            for op, names, output, attributes in nodes:
                known[output] = _apply(op, [known[name] for name in names], attributes)
            return tuple(known[name] for name in outputs)

    return Network().eval()


def _apply(op: str, given: list[Any], attributes: dict[str, Any]) -> Any:
    """An operator of the kit's models in PyTorch: integers that come with the graph are lists, all else is tensors."""
    if (function := _operators().get(op)) is None:
        raise NotImplementedError(f"the kit can't write the operator {op} as a PyTorch program")
    return function(attributes, *given)


@cache
def _operators() -> Mapping[str, Callable[..., Any]]:
    """ONNX's name of an operator → its function of attributes and inputs."""
    import torch
    from torch.nn import functional

    return {
        "Conv": lambda a, *given: functional.conv2d(*given, padding=a["pads"][:2]),
        "BatchNormalization": lambda _, x, scale, bias, mean, var: functional.batch_norm(x, mean, var, scale, bias),
        "Gemm": lambda _, x, weight, bias: torch.addmm(bias, x, weight),
        "LayerNormalization": lambda _, x, scale, bias: functional.layer_norm(x, x.shape[-1:], scale, bias),
        "GlobalAveragePool": lambda _, x: x.mean((2, 3), keepdim=True),
        "Flatten": lambda _, x: x.flatten(1),
        "Relu": lambda _, x: torch.relu(x),
        "ArgMax": lambda a, x: x.argmax(a["axis"]),
        "Softmax": lambda a, x: x.softmax(a["axis"]),
        "Gather": lambda _, table, rows: functional.embedding(rows, table),
        "Reshape": lambda _, x, sizes: x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]),
        "Transpose": lambda a, x: x.permute(a["perm"]),
        "Unsqueeze": lambda _, x, axes: reduce(torch.unsqueeze, axes, x),
        "Cast": lambda _, x: x.float(),
        "Add": lambda _, x, y: x + y,
        "Sub": lambda _, x, y: x - y,
        "Mul": lambda _, x, y: x * y,
        "MatMul": lambda _, x, y: x @ y,
    }
