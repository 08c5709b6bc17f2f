"""PyTorch programs that are not compiled, and why: two calls answer differently, or runtimes can't take or give their
tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compile_stage.plugin_support.torch_programs import changed_tensors, read_for
from compile_stage.sources import torch_forward
from compile_stage.sources.torch_signature import tensors

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def refuse_program(program: ExportedProgram) -> str | None:
    """The reason when the program was frozen in training mode, draws random numbers, or takes or gives what is no
    array."""
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        values = {
            argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()
        }
        values |= {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)}
        values.update(node.kwargs)
        if schema.name == "aten::embedding_renorm_":
            return _scaled_table(program, values)
        if schema.name == "aten::batch_norm" and values["training"] is True and values["running_mean"] is None:
            if _of_one_row(node):
                continue
            return (
                "its batch_norm takes mean and variance from the batch that it is given (track_running_stats=False, or "
                "no running statistics), after model.eval() too, so the answer to a row depends on the other rows: "
                "train it with nn.BatchNorm's default, track_running_stats=True, or with nn.GroupNorm or nn.LayerNorm"
            )
        training = values.get("training", values.get("train"))
        if training is True and values.get("dropout", values.get("p")) != 0:
            return (
                f"it was logged in training mode ({schema.name.removeprefix('aten::')} is live), so two calls differ: "
                "call model.eval() before logging it; where its forward says training=True itself, have it say "
                "training=self.training"
            )
        if training is None and _is_random(node.target, values):
            return f"it draws random numbers ({schema.name.removeprefix('aten::')}), so nothing can be compared with it"
    if (reason := _refuse_names(program)) is not None:
        return reason
    for side, specs in (
        ("input", program.graph_signature.input_specs),
        ("output", program.graph_signature.output_specs),
    ):
        given = [spec.arg for spec in specs if spec.kind.name == f"USER_{side.upper()}"]
        for number, argument in enumerate(given, 1):
            if type(argument).__name__ == "TensorArgument":
                continue
            known = f" but {argument.value!r}" if type(argument).__name__ == "ConstantArgument" else ""
            return f"its {side} {number} of {len(given)} is no tensor{known}: log a model whose {side}s are all tensors"
    strange = [spec.name for spec in tensors(program) if spec.dtype.startswith("complex")]
    if strange:
        return (
            f"its tensors {', '.join(strange)} are complex, which runtimes can't take or give: log a model whose "
            "inputs and outputs are real and imaginary parts (torch.view_as_complex, torch.view_as_real)"
        )
    try:
        state = _state(program)
    except Exception as error:  # noqa: BLE001 - what PyTorch's passes raise shares no base class
        return (
            "its forward changes tensors of the model in a way that PyTorch can't follow "
            f"({torch_forward.reason(error)}): where these are kept for later calls, call the model on its longest "
            "input before logging it; else have forward make new tensors"
        )
    if state:
        return (
            f"running it changes its own state ({', '.join(state)}), so two calls differ: log a model that takes its "
            "state as an input and answers with the next one"
        )
    half = [spec.name for spec in tensors(program) if spec.dtype == "bfloat16"]
    if half:
        return f"its tensors {', '.join(half)} are bfloat16, which arrays don't have: log the model in float32"
    return None


def _of_one_row(node: Any) -> bool:
    """Whether what a batch_norm takes its mean of is of one row: a weight [1, channels, ...], which weight
    standardisation normalises so (the BiT of transformers, timm's StdConv2d), or rows that became channels."""
    size = node.args[0].meta["val"].shape[0]
    return isinstance(size, int) and size == 1


def refuse_outputs(program: ExportedProgram, module: Any = None) -> str | None:
    """The reason when an output has no batch on axis 0, by the program or by what its module answers to more rows.

    Where a policy asks for one batch size alone, an axis of that size would be taken for the batch.

    Args:
        module: What the program was traced from, where it is here.
    """
    inputs = len(program.graph_signature.user_inputs)
    specs = list(tensors(program))
    given, answered = specs[:inputs], specs[inputs:]
    if all(spec.shape and isinstance(spec.shape[0], str) for spec in given):
        fixed = [spec for spec in answered if spec.shape and isinstance(spec.shape[0], int)]
        if fixed:
            shape = ", ".join("batch" if size == given[0].shape[0] else str(size) for size in fixed[0].shape)
            return (
                f"one of its outputs has the shape [{shape}], and axis 0 must be the batch: log a model that answers "
                "with the rows on axis 0 (torch.movedim), and leaves out what is no answer to a row"
            )
    elif module is not None and program.example_inputs is not None:
        return _refuse_results_by_row(program, module)
    return None


def _refuse_results_by_row(program: ExportedProgram, module: Any) -> str | None:
    """The reason when there are more outputs for more rows, as of a list with a dict for each."""
    import torch

    leaves, structure = torch.utils._pytree.tree_flatten(program.example_inputs)
    if any(leaf.ndim == 0 for leaf in leaves):
        return None
    counts = []
    for times in (1, 2):
        args, kwargs = torch.utils._pytree.tree_unflatten([torch.cat([leaf] * times) for leaf in leaves], structure)
        try:
            with torch.no_grad():
                counts.append(len(torch.utils._pytree.tree_leaves(module(*args, **kwargs))))
        except Exception:  # noqa: BLE001 - it takes this batch alone, and may raise anything of another
            return None
    if counts[0] == counts[1]:
        return None
    rows = len(leaves[0])
    return (
        f"its forward answers {rows} rows with {counts[0]} tensors, and {2 * rows} with {counts[1]}: log a model that "
        "stacks what it answers to each row (torch.stack), so that axis 0 of an output is the batch"
    )


def _scaled_table(program: ExportedProgram, values: Mapping[str, Any]) -> str:
    """The reason of an embedding with `max_norm`. What scales all rows at once is what its calls do row by row."""
    held = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs if spec.target is not None}
    table = next((held[name] for name in sorted(read_for([values["self"]])) if name in held), "weight")
    return (
        f"its embedding has max_norm, by which a call changes its table {table}: scale the table once before logging "
        f"it, and it answers the same without (net.{table}.data.renorm_({values['norm_type']:g}, 0, "
        f"{values['max_norm']:g}); net.{table.removesuffix('weight')}max_norm = None)"
    )


def _state(program: ExportedProgram) -> list[str]:
    """Buffers and parameters that running the program changes, and that what it answers depends on. A counter of calls
    that nothing reads is no state."""
    changing = set(changed_tensors(program)) - set(map(str, program.graph_signature.user_inputs))
    if not changing:
        return []
    constants = [spec for spec in program.graph_signature.input_specs if spec.kind.name == "CONSTANT_TENSOR"]
    if kept := sorted(str(spec.target) for spec in constants if spec.arg.name in changing):
        return kept  # tensors that are no buffers, which PyTorch's passes refuse to see changed
    functional = program.run_decompositions({})  # names what changes, and reads what was before
    signature = functional.graph_signature
    changed = {**signature.buffers_to_mutate, **getattr(signature, "parameters_to_mutate", {})}
    nodes = {node.name: node for node in functional.graph.nodes}
    read = read_for(nodes[str(name)] for name in signature.user_outputs if str(name) in nodes)
    held = {spec.target: spec.arg.name for spec in signature.input_specs if spec.target is not None}
    return sorted({name for name in changed.values() if held.get(name) in read})


def _refuse_names(program: ExportedProgram) -> str | None:
    """The reason when a submodule, parameter or buffer of the model itself is called like an attribute of the class
    that PyTorch puts exported programs into: it can write and read such a program, but neither run nor export it."""
    import torch

    taken = set(dir(torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph()))) - set(dir(torch.nn.Module()))
    for target in sorted({str(spec.target) for spec in program.graph_signature.input_specs if spec.target}):
        name, point, _ = target.partition(".")
        if name in taken:
            what = "submodule" if point else "parameter or buffer"
            return (
                f"its {what} {name!r} is called like an attribute of torch.fx.GraphModule, so PyTorch can't run the "
                f"exported program: rename it (self.{name} to self.{name}_, for example) and log the model again"
            )
    return None


def _is_random(target: Any, values: Mapping[str, Any]) -> bool:
    import torch

    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return bool(values.get("dropout_p", 1.0) != 0.0)  # attention takes dropout as a number
