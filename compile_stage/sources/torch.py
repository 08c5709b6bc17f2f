"""PyTorch: an exported program (`pt2`), or a pickled module where the policy allows pickles.

Both become an `ExportedProgram`, whose graph tells whether the model was frozen in training mode, and which keeps
symbolic dimensions.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.digest import digest_tree
from compile_stage.core.errors import SourceError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Exporter, Session
from compile_stage.core.records import Compliance, PortableModel, ShapeRange, SourceModel, Target
from compile_stage.core.shapes import demand_shapes
from compile_stage.core.tensors import Dim, Signature, TensorSpec
from compile_stage.plugin_support.torch_attention import answer_masked_rows
from compile_stage.plugin_support.torch_programs import (
    changed_tensors,
    keep_inputs,
    read_for,
    recurrent_lengths_open,
    threads_restored,
    tracing,
    use_threads,
)
from compile_stage.sources import graph, mlmodel, pt2, torch_forward
from compile_stage.sources.session import SourceSession
from compile_stage.sources.torch_device import DEVICES, place
from compile_stage.sources.torch_operators import optimiser_corrected, translations, write_for_exporter
from compile_stage.sources.torch_size_limits import with_size_limits

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compile_stage.core.tensors import Batch

_NO_SHAPES: Mapping[str, ShapeRange] = {}

_PICKLED = (
    "it is a pickled PyTorch module, and pickled models execute code when loaded: log it with "
    "serialization_format='pt2' (MLflow 3.11 and newer), or set compliance.allow_pickle in the policy"
)


class TorchSource(Exporter):
    """Models that `mlflow.pytorch` logged."""

    name = "pytorch"
    requires = ("torch", "onnxscript")
    extra = "torch"
    framework = "PyTorch (eager)"
    capabilities = SourceCapabilities(
        forms=("onnx", "torch-export"),
        devices=DEVICES,
        profiler="compile_stage.plugin_support.torch_profiler:profile_source",
    )

    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        archive, pickled = _archive(source), _pickle(source)
        if archive.exists():
            if not compliance.allow_pickle and (reason := pt2.refuse(archive)) is not None:
                return f"{reason}; set compliance.allow_pickle in the policy if you trust where it comes from"
            return refuse_program(_load_archive(source)) or _refuse_params(source, None)
        if (reason := mlmodel.missing_file(pickled, source)) is not None:
            return reason
        if not compliance.allow_pickle:
            return _PICKLED
        module = _load_pickle(source)
        if _is_script(module):
            return (
                "it is a TorchScript module, which PyTorch's exporter no longer takes: log the module it was made from"
            )
        if mlmodel.raw_example(source) is None:
            return "it was logged without an input example, so its inputs are unknown: log it with input_example=..."
        return refuse_program(_export_module(source, module, _NO_SHAPES)) or _refuse_params(source, module)

    @contextmanager
    def open(self, source: SourceModel, target: Target) -> Iterator[Session]:
        import torch

        with threads_restored(), place(target.device) as there:
            use_threads(target.threads)
            if _archive(source).exists():
                program = _load_archive(source)
                keep_inputs(program)
                signature = signature_of(program, *_names(source, program))
                module, changed = there.program(program), [False] * len(signature.inputs)
            else:
                original = _load_pickle(source)
                program = _export_module(source, original, target.shapes)
                found = keep_inputs(program)
                signature = signature_of(program, *_names(source, program))
                module, changed = (
                    there.module(original),
                    [name in found for name in program.graph_signature.user_inputs],
                )
            in_spec = program.call_spec.in_spec

            def call(arrays: Sequence[Any]) -> list[Any]:
                inputs = [
                    there.tensor(_tensor(array.copy() if is_changed else array))
                    for array, is_changed in zip(arrays, changed, strict=True)
                ]
                args, kwargs = torch.utils._pytree.tree_unflatten(inputs, in_spec)
                with torch.no_grad():
                    outputs = module(*args, **kwargs)
                return there.arrays(torch.utils._pytree.tree_leaves(outputs))

            yield SourceSession(signature, call)

    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        original, program = _original_and_program(source, shapes)
        answer_masked_rows(program)
        signature = signature_of(program, *_names(source, program))
        made = export_graph(program, signature, source, shapes, into)
        model = with_size_limits(made, program, original, shapes, source)
        return replace(model, notes=(*model.notes, *_fixed_sizes(source, model.signature)))

    def export_program(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        original, program = _original_and_program(source, shapes)
        signature = signature_of(program, *_names(source, program))
        made = save_program(program, signature, source, shapes, into)
        model = with_size_limits(made, program, original, shapes, source)
        return replace(model, notes=(*model.notes, *_fixed_sizes(source, signature)))

    def example(self, source: SourceModel) -> Batch | None:
        program = _program(source)
        signature = signature_of(program, *_names(source, program))
        named = mlmodel.named_example(source, signature)
        if named is None and program.example_inputs is not None:
            import torch

            leaves = torch.utils._pytree.tree_leaves(program.example_inputs)
            named = {spec.name: leaf.numpy() for spec, leaf in zip(signature.inputs, leaves, strict=True)}
        return named

    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        program = _program(source)
        _, outputs = _names(source, program)
        if "python_function" not in mlmodel.read(source).flavors or len(outputs) > 1:
            # MLflow gives several inputs no pyfunc, and its pyfunc refuses several outputs: the published model answers
            # with a dict.
            return {"kind": "dict", "outputs": list(outputs), "columns": None, "frame_in_frame_out": False}
        columns = mlmodel.columns(source)
        how = {
            "kind": "array",
            "outputs": list(outputs),
            "columns": list(columns) if columns else None,
            "frame_in_frame_out": not mlmodel.has_tensor_signature(source),
        }
        return {**how, "params": _own_params(_load_pickle(source))} if mlmodel.params(source) else how

    def packages(self) -> Mapping[str, str]:
        return package_versions("torch", "onnxscript", "onnx")


# ------------------------------------------------------------------------------------------------------------- programs


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
            f"its forward changes tensors of the model in a way that PyTorch can't follow ({_reason(error)}): where "
            "these are kept for later calls, call the model on its longest input before logging it; else have forward "
            "make new tensors"
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
    that
    PyTorch puts exported programs into: it can write and read such a program, but neither run nor export it."""
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


def signature_of(
    program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], symbols: Mapping[str, str] | None = None
) -> Signature:
    """The program's tensors under the given names. `symbols` names dimensions; `symbol_names` by default."""
    rename = graph.symbol_renamer(symbol_names(program, inputs) if symbols is None else symbols)
    specs = list(tensors(program, rename))
    named = [
        TensorSpec(name=name, dtype=spec.dtype, shape=spec.shape)
        for name, spec in zip((*inputs, *outputs), specs, strict=True)
    ]
    return Signature(inputs=tuple(named[: len(inputs)]), outputs=tuple(named[len(inputs) :]))


def symbol_names(program: ExportedProgram, inputs: Sequence[str]) -> dict[str, str]:
    """The exporter's symbols (`s40`) → readable names: `batch` for axis 0 of every input, `NAME_AXIS` for others.

    The exporter may keep the batches of two inputs apart, because they could be broadcast; all samples have one batch.
    """
    names: dict[str, str] = {}
    for name, spec in zip(inputs, tensors(program), strict=False):
        for axis, size in enumerate(spec.shape):
            if isinstance(size, str) and size.isidentifier():
                names.setdefault(size, graph.BATCH if axis == 0 else f"{name}_{axis}")
    return names


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
        reason = _reason(error)
        names_operation = "No ONNX function" in reason or "DispatchError" in reason
        raise SourceError(
            f"PyTorch's ONNX exporter refuses it: {reason}",
            fix="replace the operation it names in the model's forward, or add a backend that starts from the PyTorch "
            "program (inductor, torchscript, executorch) to the target's backends"
            if names_operation
            else "this is PyTorch's own message: torch.onnx.export(program, dynamo=True) of the logged program shows "
            "all of it",
            where=source.uri,
        ) from error
    finally:
        registration.setLevel(level)
    _rename_inner(exported.model.graph, signature)
    model = _as_message(exported, program, into)
    _write_fixed_sizes(model)
    graph.rename_symbols(model, symbol_names(program, inputs) if symbols is None else symbols)
    return graph.finish(model, source, shapes, into)


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


# --------------------------------------------------------------------------------------------------------------- within


def _archive(source: SourceModel) -> Path:
    return mlmodel.data_file(source, "model.pt2", flavor_name="pytorch", key="model_data", default="data")


def _pickle(source: SourceModel) -> Path:
    return mlmodel.data_file(source, "model.pth", flavor_name="pytorch", key="model_data", default="data")


def _program(source: SourceModel, shapes: Mapping[str, ShapeRange] = _NO_SHAPES) -> ExportedProgram:
    return _original_and_program(source, shapes)[1]


def _original_and_program(source: SourceModel, shapes: Mapping[str, ShapeRange]) -> tuple[Any, ExportedProgram]:
    """The module that MLflow loads, which of an exported program refuses what breaks a guard; and the program."""
    if _archive(source).exists():
        program = _load_archive(source)
        original = program.module()
    else:
        original = _load_pickle(source)
        program = _export_module(source, original, shapes)
    keep_inputs(program)
    return original, program


def _load_archive(source: SourceModel) -> ExportedProgram:
    """The program. The caller has asked `refuse`, so an archive that could run code is one that the policy allows."""
    import torch

    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")  # deprecations inside the loader
        try:
            try:
                file = stack.enter_context(pt2.checked(_archive(source)))
            except pt2.RefusedError:
                file = _archive(source)
            return torch.export.load(str(file))
        except Exception as error:
            problem = f"torch.export.load can't read it: {_reason(error)}"
            if "vr must not be None" in str(error):  # a size that only the strides of an input name
                fix = "its input example was a slice of a transposed array: log it again with np.ascontiguousarray(...)"
                raise SourceError(problem, fix=fix, where=source.uri) from error
            raise mlmodel.not_loaded(source, problem, torch, "pytorch_version") from error


def _refuse_params(source: SourceModel, module: Any) -> str | None:
    """The reason when MLflow's pyfunc, which passes the signature's params on to forward, computes something else than
    what is compiled, or nothing. An exported program (no `module`) takes none."""
    own = _own_params(module) if module is not None else {}
    if unknown := [name for name in mlmodel.params(source) if name not in own]:
        return (
            f"its signature has the param {unknown[0]}, which {'forward' if own else 'an exported program'} does not "
            "take with a default, so its pyfunc fails: log it without the param"
        )
    return mlmodel.refuse_params(source, own)


def _own_params(module: Any) -> dict[str, Any]:
    """What forward takes with a default: that is compiled."""
    return mlmodel.defaults(module.forward)


def _load_pickle(source: SourceModel) -> Any:
    """The module in evaluation mode. The caller has asked `refuse`, which refuses pickles unless the policy allows
    them."""
    import mlflow.pytorch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow warns of pickles; the policy has allowed them
        try:
            module = mlflow.pytorch._load_model(str(_pickle(source).parent), weights_only=False)
        except Exception as error:
            raise SourceError(
                f"its pickle can't be loaded: {_reason(error)}",
                fix="install the packages that it was trained with, or log it with serialization_format='pt2' (MLflow "
                "3.11 and newer)",
                where=source.uri,
            ) from error
    return module.eval()


def _export_module(source: SourceModel, module: Any, shapes: Mapping[str, ShapeRange]) -> ExportedProgram:
    """Trace the module on its input example, with those dimensions open that its signature leaves open, or for which
    `shapes` asks for other sizes; with the batch alone where it can't be traced so."""
    import numpy as np

    raw = mlmodel.raw_example(source)
    names, _ = mlmodel.tensor_names(source)
    if isinstance(raw, Mapping):
        own = _arguments(module, len(raw))
        if names is not None and set(names) == set(own):  # given by name: the order of forward's arguments holds
            names = own
        values = [raw[name] for name in names or tuple(raw)]
    else:
        values = list(raw) if isinstance(raw, list | tuple) else [raw.to_numpy() if hasattr(raw, "to_numpy") else raw]
    floats = np.dtype(np.float32) if hasattr(raw, "to_numpy") else _example_floats(source, module)
    arrays = [
        array.astype(floats or array.dtype) if array.dtype.kind == "f" or hasattr(raw, "to_numpy") else array
        for array in map(np.asarray, values)
    ]
    named = names if names is not None and len(names) == len(arrays) else _arguments(module, len(arrays))
    try:
        inspect.signature(module.forward).bind(*arrays)
    except TypeError as error:
        count = f"{len(arrays)} tensor{'' if len(arrays) == 1 else 's'}"
        raise SourceError(
            f"its forward can't be called with the {count} of its input example: {error}",
            fix="give forward an argument for each tensor; a dict of tensors as one argument can't be compiled",
            where=source.uri,
        ) from error
    wanted = _open_axes(source, named, arrays, shapes)
    batch_alone: list[tuple[int, ...]] = [(0,) for _ in arrays]
    for axes in [wanted, batch_alone] if wanted != batch_alone else [batch_alone]:
        try:
            return _trace(module, arrays, axes)
        except Exception as error:
            if axes == wanted and wanted != batch_alone:
                continue
            raise SourceError(
                f"torch.export can't trace it{torch_forward.place_of(error)}: {_reason(error)}",
                fix=torch_forward.advice(error),
                where=source.uri,
            ) from error
    raise AssertionError("unreachable")


def _example_floats(source: SourceModel, module: Any) -> Any:
    """The NumPy type that the floats of its input example were logged in, as far as anybody knows: None for the type
    that they were read in. MLflow writes them as JSON, which has no types, and reads float64 where no signature says
    otherwise; it makes none for a module that answers a dict. What the module was given then computes in the type of
    its parameters."""
    if mlmodel.read(source).inputs is not None:
        return None
    return next((_numpy_type(p.dtype) for p in module.parameters() if p.is_floating_point()), None)


def _numpy_type(dtype: Any) -> Any:
    """None where NumPy has none of its own, such as for bfloat16."""
    import torch

    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


def _trace(module: Any, arrays: Sequence[Any], axes: Sequence[Sequence[int]]) -> ExportedProgram:
    """The program, with these axes of each input open. A size of 1 is doubled, because it would be fixed."""
    import numpy as np
    import torch

    example = []
    for array, opened in zip(arrays, axes, strict=True):
        for axis in opened:
            array = np.concatenate([array, array], axis=axis) if array.shape[axis] == 1 else array
        example.append(torch.from_numpy(array))
    dynamic = tuple(dict.fromkeys(opened, torch.export.Dim.AUTO) for opened in axes)
    shapes = _by_argument(module, dynamic)
    with tracing():
        try:
            program = torch.export.export(module, tuple(example), dynamic_shapes=shapes)
        except Exception as error:
            if not torch_forward.has_unknown_answer(error):
                raise
        else:
            if not torch_forward.has_absent_answer(program):
                return program
        torch_forward.answers_plainly(module)
        return torch.export.export(module, tuple(example), dynamic_shapes=shapes)


def _open_axes(
    source: SourceModel, names: Sequence[str], arrays: Sequence[Any], shapes: Mapping[str, ShapeRange]
) -> list[tuple[int, ...]]:
    """Of each input: the batch, the axes that the signature leaves open, and those of which another size is asked."""
    logged = mlmodel.open_axes(source, names)
    found = []
    for name, array in zip(names, arrays, strict=True):
        axes = {0, *logged.get(name, ())}
        if name in shapes:
            ends = zip(array.shape, shapes[name].min, shapes[name].typical, shapes[name].max, strict=False)
            axes |= {axis for axis, sizes in enumerate(ends) if len(set(sizes)) > 1}
        found.append(tuple(sorted(axis for axis in axes if axis < array.ndim)))
    return found


def _fixed_sizes(source: SourceModel, signature: Signature) -> list[str]:
    """Notes of the sizes that the logged signature leaves open, and of which the program takes one alone."""
    logged = mlmodel.open_axes(source, [spec.name for spec in signature.inputs])
    return [
        f"the logged signature leaves axis {axis} of {spec.name!r} open, and its program takes {spec.shape[axis]} "
        f"alone: so does what is made of it"
        for spec in signature.inputs
        for axis in logged.get(spec.name, ())
        if axis < len(spec.shape) and isinstance(spec.shape[axis], int)
    ]


def _arguments(module: Any, count: int) -> tuple[str, ...]:
    """Names of the forward's first arguments, as the program has them; empty names where it has fewer."""
    names = [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind is not p.VAR_POSITIONAL]
    return tuple([*names, *[""] * count][:count])


def _by_argument(module: Any, dynamic: tuple[Any, ...]) -> Any:
    """Dynamic shapes in the form that torch.export wants for this forward: nested for `*args`."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return (dynamic,)
    return dynamic


def _names(source: SourceModel, program: ExportedProgram) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The signature's tensor names where they fit, else the forward's arguments and the output's own keys."""
    inputs, outputs = mlmodel.tensor_names(source)
    own = tuple(str(name) for name in program.graph_signature.user_inputs)
    own_outputs = _output_names(program)
    fits_in = inputs is not None and len(inputs) == len(own)
    fits_out = outputs is not None and len(outputs) == len(own_outputs)
    # The same names in another order are the same tensors: the program's own order holds.
    chosen_in = inputs if fits_in and inputs and set(inputs) != set(own) else own
    chosen_out = outputs if fits_out and outputs and set(outputs) != set(own_outputs) else own_outputs
    # A model that answers with its own input needs two names.
    return chosen_in, tuple(f"{name}_out" if name in chosen_in else name for name in chosen_out)


def _output_names(program: ExportedProgram) -> tuple[str, ...]:
    """Keys of a dict (or of a dataclass) that the model returns, `output` for a single tensor, else `output_0`, ..."""
    import torch

    spec = program.call_spec.out_spec
    answer = torch.utils._pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    if isinstance(answer, Mapping) and all(isinstance(value, int) for value in answer.values()):
        return tuple(str(key) for key in answer)
    return ("output",) if spec.num_leaves == 1 else tuple(f"output_{i}" for i in range(spec.num_leaves))


def tensors(program: ExportedProgram, rename: Any = str) -> Iterator[TensorSpec]:
    """User inputs, then user outputs, as the program describes them."""
    nodes = {node.name: node for node in program.graph.nodes}
    for name in (*program.graph_signature.user_inputs, *program.graph_signature.user_outputs):
        value: Any = nodes[str(name)].meta["val"] if str(name) in nodes else None
        if not hasattr(value, "shape"):
            continue
        # As in `_write_fixed_sizes`.
        sizes = [size if isinstance(size, int) else str(size) for size in value.shape]
        shape: tuple[Dim, ...] = tuple(
            size if isinstance(size, int) else int(size) if size.isdigit() else rename(size) for size in sizes
        )
        yield TensorSpec(name=str(name), dtype=str(value.dtype).removeprefix("torch."), shape=shape)


def _is_random(target: Any, values: Mapping[str, Any]) -> bool:
    import torch

    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return bool(values.get("dropout_p", 1.0) != 0.0)  # attention takes dropout as a number


def _is_script(module: Any) -> bool:
    import torch

    return bool(isinstance(module, torch.jit.ScriptModule))


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _reason(error: BaseException) -> str:
    """The innermost cause's first line: the exporter wraps it in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
