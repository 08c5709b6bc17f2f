"""PyTorch: an exported program (`pt2`), or a pickled module where the policy allows pickles.

Both become an `ExportedProgram`, whose graph tells whether the model was frozen in training mode, and which keeps
symbolic dimensions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.errors import SourceError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Exporter, Session
from compile_stage.core.records import Compliance, PortableModel, ShapeRange, SourceModel, Target
from compile_stage.core.tensors import Signature
from compile_stage.plugin_support.torch_attention import answer_masked_rows
from compile_stage.plugin_support.torch_programs import keep_inputs, threads_restored, use_threads
from compile_stage.sources import logged_code, mlmodel, pt2, torch_forward
from compile_stage.sources.session import SourceSession
from compile_stage.sources.torch_device import DEVICES, place
from compile_stage.sources.torch_portable import export_graph, save_program
from compile_stage.sources.torch_refusals import refuse_outputs, refuse_program
from compile_stage.sources.torch_signature import output_names, signature_of
from compile_stage.sources.torch_size_limits import with_size_limits
from compile_stage.sources.torch_tracing import example_of, export_module

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
            program = _load_archive(source)
            return refuse_program(program) or refuse_outputs(program) or _refuse_params(source, None)
        if (reason := mlmodel.missing_file(pickled, source)) is not None:
            return reason
        if not compliance.allow_pickle:
            return _PICKLED
        module = _load_pickle(source)
        if _is_script(module):
            return (
                "it is a TorchScript module, which PyTorch's exporter no longer takes: log the module it was made from"
            )
        if example_of(source) is None:
            return (
                "it was logged without an input example, and its signature does not say what it can be called with "
                "(floats, of sizes that are fixed but for the batch): log it with input_example=..."
            )
        program = export_module(source, module, _NO_SHAPES)
        return refuse_program(program) or refuse_outputs(program, module) or _refuse_params(source, module)

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
                program = export_module(source, original, target.shapes)
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
        program = export_module(source, original, shapes)
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
            problem = f"torch.export.load can't read it: {torch_forward.reason(error)}"
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

    def read() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow warns of pickles; the policy has allowed them
            return mlflow.pytorch._load_model(str(_pickle(source).parent), weights_only=False)

    def not_loaded(error: Exception) -> SourceError:
        return SourceError(
            f"its pickle can't be loaded: {torch_forward.reason(error)}",
            fix="install the packages that it was trained with, or log it with serialization_format='pt2' (MLflow "
            "3.11 and newer)",
            where=source.uri,
        )

    return logged_code.load_pickle(source, read, not_loaded).eval()


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


def _names(source: SourceModel, program: ExportedProgram) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The signature's tensor names where they fit, else the forward's arguments and the output's own keys."""
    inputs, outputs = mlmodel.tensor_names(source)
    own = tuple(str(name) for name in program.graph_signature.user_inputs)
    own_outputs = output_names(program)
    fits_in = inputs is not None and len(inputs) == len(own)
    fits_out = outputs is not None and len(outputs) == len(own_outputs)
    # The same names in another order are the same tensors: the program's own order holds.
    chosen_in = inputs if fits_in and inputs and set(inputs) != set(own) else own
    chosen_out = outputs if fits_out and outputs and set(outputs) != set(own_outputs) else own_outputs
    return chosen_in, _apart(chosen_in, chosen_out)


def _apart(inputs: Sequence[str], outputs: Sequence[str]) -> tuple[str, ...]:
    """The outputs' names, where one that is called like an input ends with `_out`, or with more underscores where that
    is taken: a graph has one tensor of a name."""
    taken, names = {*inputs, *outputs}, []
    for name in outputs:
        if name in inputs:
            name = f"{name}_out"
            while name in taken:
                name += "_"
            taken.add(name)
        names.append(name)
    return tuple(names)


def _is_script(module: Any) -> bool:
    import torch

    return bool(isinstance(module, torch.jit.ScriptModule))


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array if array.flags.writeable else array.copy())
