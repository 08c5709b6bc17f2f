"""A PyTorch program → a portable model: the ONNX graph that PyTorch's exporter makes of it, or the program as a `.pt2`
file."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.digest import digest_tree
from compile_stage.core.errors import SourceError
from compile_stage.core.records import PortableModel, ShapeRange, SourceModel
from compile_stage.core.shapes import demand_shapes
from compile_stage.core.tensors import Signature
from compile_stage.plugin_support.torch_programs import recurrent_lengths_open
from compile_stage.sources import graph, torch_forward
from compile_stage.sources.torch_bfloat16 import WIDENED, widen_bfloat16
from compile_stage.sources.torch_operators import optimiser_corrected, translations, write_for_exporter
from compile_stage.sources.torch_signature import symbol_names

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def export_graph(
    program: ExportedProgram,
    signature: Signature,
    source: SourceModel,
    shapes: Mapping[str, ShapeRange],
    into: Path,
    symbols: Mapping[str, str] | None = None,
) -> PortableModel:
    """Write the program as ONNX, with the signature's names. `symbols` names dimensions; `symbol_names` by default.
    Raises SourceError with the exporter's reason."""
    import torch

    demand_shapes(signature, shapes, source)
    write_for_exporter(program)
    inputs = [spec.name for spec in signature.inputs]
    # The exporter says of every absent optional package what it skips; that is no message for our users.
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), optimiser_corrected(), recurrent_lengths_open(), torch.no_grad():
            warnings.simplefilter("ignore")  # deprecations inside the exporter
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=graph.OPSET,
                input_names=inputs,
                output_names=[spec.name for spec in signature.outputs],
                verbose=False,
                custom_translation_table=translations(),
            )
    except Exception as error:
        reason = torch_forward.reason(error)
        missing = getattr(torch_forward.innermost(error), "name", None)
        if str(missing).startswith("onnxscript."):  # each PyTorch asks for a module of the onnxscript of its own time
            raise SourceError(
                f"PyTorch {torch.__version__} needs a newer onnxscript than {version('onnxscript')} to write ONNX",
                fix="pip install --upgrade onnxscript",
                where=source.uri,
            ) from error
        names_operation = "No ONNX function" in reason or "DispatchError" in reason
        raise SourceError(
            f"PyTorch's ONNX exporter refuses it: {reason}",
            fix=torch_forward.advice_on_operator(error)
            if names_operation
            else "this is PyTorch's own message: torch.onnx.export(program, dynamo=True) of the logged program shows "
            "all of it",
            where=source.uri,
        ) from error
    finally:
        registration.setLevel(level)
    _rename_inner(exported.model.graph, signature)
    notes = (WIDENED,) if widen_bfloat16(exported.model) else ()
    model = _as_message(exported, program, into)
    _write_fixed_sizes(model)
    graph.rename_symbols(model, symbol_names(program, inputs) if symbols is None else symbols)
    return graph.finish(model, source, shapes, into, notes=notes)


def _rename_inner(exported: Any, signature: Signature) -> None:
    """Weights and results within the graph that are called like an input or an output get another name. The exporter
    gives each the name that is asked for, and in ONNX an input takes the place of a weight of its name."""
    taken = {spec.name for spec in (*signature.inputs, *signature.outputs)}
    inner = [*exported.initializers.values(), *(value for node in exported.all_nodes() for value in node.outputs)]
    known = {value.name for value in inner} | taken
    for value in inner:
        if value.name in taken and not value.is_graph_output():
            name = f"{value.name}_inner"
            while name in known:
                name += "_"
            known.add(name)
            value.name = name


def _write_fixed_sizes(model: Any) -> None:
    """A dimension that the tracer was to leave open and had to fix is exported as a symbol, whose name is its size."""
    for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param.isdigit():
                size.dim_value = int(size.dim_param)


def _as_message(exported: Any, program: ExportedProgram, into: Path) -> Any:
    """The exported graph. Weights that are too large for one message go from PyTorch to `into/model.onnx.data`, without
    a copy of all of them in memory."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    if weights <= graph.EXTERNAL_DATA_ABOVE:
        return exported.model_proto
    from compile_stage.plugin_support import onnx_weights

    into.mkdir(parents=True, exist_ok=True)
    exported.save(str(into / "model.onnx"), external_data=True)
    return onnx_weights.load(into / "model.onnx")


def save_program(
    program: ExportedProgram,
    signature: Signature,
    source: SourceModel,
    shapes: Mapping[str, ShapeRange],
    into: Path,
) -> PortableModel:
    """Write the program as `into/model.pt2`, in the order of the signature's tensors."""
    import torch

    demand_shapes(signature, shapes, source)
    into.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the writer
        torch.export.save(program, str(into / "model.pt2"))
    return PortableModel(
        path=str(into / "model.pt2"),
        digest=digest_tree(into),
        form="torch-export",
        opset=0,
        precision="fp32",
        signature=signature,
        made_from=source.digest,
    )
