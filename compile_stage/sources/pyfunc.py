"""Custom pyfuncs: the network that a `PythonModel` marks by `compile_stage.pyfunc.compiled`, within its own code.

What is exported and timed is the network, a PyTorch module. Its inputs are seen while the original's predict() answers
the policy's samples, which are those that people give to it; and that predict() is compared as a whole too, with the
artifact in the network's place (`whole`). The pyfunc is a pickle and Python code: nothing of it is loaded unless the
policy allows pickles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage import pyfunc
from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Exporter, Session
from compile_stage.core.records import Compliance, PortableModel, ShapeRange, SourceModel, Target
from compile_stage.plugin_support.torch_attention import answer_masked_rows
from compile_stage.plugin_support.torch_programs import keep_inputs, threads_restored, tracing, use_threads
from compile_stage.serving.python_model import CompiledNetwork, load_python_model, replaced
from compile_stage.sources import mlmodel, torch_forward, torch_portable, torch_refusals, torch_signature
from compile_stage.sources.session import SourceSession
from compile_stage.sources.torch_device import place
from compile_stage.sources.torch_size_limits import with_size_limits

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compile_stage.core.tensors import Array, Batch

_LOADERS = ("mlflow.pyfunc.model", "mlflow.pyfunc.loaders.code_model")  # a pickle, or the code itself (set_model)
_CODE = (
    "it is Python code and not a graph, and it runs when it is loaded: set compliance.allow_pickle in the policy if "
    "you trust where it comes from. What is compiled is the PyTorch network that it marks:"
)
_LINES = """
    import compile_stage.pyfunc
    example = ...  # what the network is called with: a tensor, or a tuple or dict of them, of two rows or more
    model.{name} = compile_stage.pyfunc.compiled(model.{name}, example=example)
before mlflow.pyfunc.log_model(python_model=model); where load_context makes the network, at its end, with `self` for \
`model`"""
# Package of a model's class → the flavor that logs it.
_FLAVORS = {
    "sklearn": "sklearn", "imblearn": "sklearn", "xgboost": "xgboost", "lightgbm": "lightgbm", "catboost": "catboost",
    "keras": "keras", "statsmodels": "statsmodels",
}  # fmt: skip
_JAX = ("jax", "jaxlib", "flax", "haiku", "equinox")  # packages of JAX's networks, weights and jitted functions
_OF_JAX = (
    "log its function by itself, with the weights bound, where JAX is installed: compile_stage.jax.log_model("
    "lambda x: net.apply(params, x), name='model', example=x), and do the rest of predict() where it is called"
)
_OTHERWISE = "; a model without such a network: log what is inside it with its framework's own flavor"


class PyfuncSource(Exporter):
    """Models of no flavor but `python_function`."""

    name = "python_function"
    requires = ("torch", "onnxscript", "mlflow")
    extra = "torch"
    framework = "PyTorch (eager), within a custom pyfunc"
    capabilities = SourceCapabilities(forms=("onnx", "torch-export"), reads_raw_samples=True)

    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        loader = str(mlmodel.flavor(source, "python_function").get("loader_module"))
        if loader not in _LOADERS:
            return f"its pyfunc is loaded by {loader}, and only a PythonModel can mark a network{_OTHERWISE}"
        if not compliance.allow_pickle:
            return f"{_CODE}{_LINES.format(name='net')}{_OTHERWISE}"
        try:
            return torch_refusals.refuse_program(_Marked(source).program)
        except SourceError as error:
            return error.reason

    @contextmanager
    def open(self, source: SourceModel, target: Target) -> Iterator[Session]:
        import torch

        with threads_restored(), place(target.device) as there:
            use_threads(target.threads)
            marked = _Marked(source)
            network, signature = there.module(marked.network), marked.signature
            count = len(marked.example.args)
            names = marked.inputs[count:]

            def call(arrays: Sequence[Any]) -> list[Any]:
                tensors = [there.tensor(torch.from_numpy(array.copy())) for array in arrays]
                with torch.no_grad():
                    answer = network(*tensors[:count], **dict(zip(names, tensors[count:], strict=True)))
                return there.arrays(torch.utils._pytree.tree_leaves(answer))

            yield SourceSession(signature, call)

    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        marked = _Marked(source)
        answer_masked_rows(marked.program)
        model = torch_portable.export_graph(marked.program, marked.signature, source, shapes, into)
        return with_size_limits(model, marked.program, marked.network, shapes, source)

    def export_program(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        marked = _Marked(source)
        model = torch_portable.save_program(marked.program, marked.signature, source, shapes, into)
        return with_size_limits(model, marked.program, marked.network, shapes, source)

    def example(self, source: SourceModel) -> Batch | None:
        """The logged input of predict(): columns, or one array."""
        import numpy as np

        raw = mlmodel.raw_example(source)
        if raw is None:
            return None
        columns = raw if isinstance(raw, Mapping) or hasattr(raw, "columns") else {"input": raw}
        try:
            return {
                str(name): np.asarray(columns[name].tolist() if hasattr(raw, "columns") else columns[name])
                for name in columns
            }
        except ValueError as error:  # NumPy's, of lists that make no array
            raise SourceError(
                "the lists of its input example differ in length, and samples are arrays with one length for all",
                fix="log it with lists of one length, or name other samples under `data` in the policy",
                where=source.uri,
            ) from error

    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        marked = _Marked(source)
        return {
            "kind": "dict",
            "outputs": list(marked.outputs),
            "columns": None,
            "frame_in_frame_out": False,
            "python_model": {
                **marked.described,
                **({"streams": True} if _streams(source) else {}),
                **({"no_rows": True} if marked.answers_no_rows() else {}),
            },
        }

    def network_inputs(self, source: SourceModel, columns: Mapping[str, Array]) -> Batch:
        """What the network is called with while predict() answers these rows. Raises SourceError where that is not one
        row for each."""
        marked = _Marked(source)
        seen: list[dict[str, Array]] = []
        parameters = marked.inputs

        def record(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            given = {**dict(zip(parameters, args, strict=False)), **kwargs}
            seen.append({name: given[name].detach().cpu().numpy().copy() for name in parameters})

        hook = marked.network.register_forward_pre_hook(record, with_kwargs=True)
        try:
            marked.predict(columns)
        except Exception as error:
            raise SourceError(
                f"its predict() does not answer the samples: {type(error).__name__}: {first_line(error)}",
                fix="give samples as predict() takes them: a column, or an array, for each of its inputs",
                where=source.uri,
            ) from error
        finally:
            hook.remove()
        return _together(seen, len(next(iter(columns.values()))), marked.attribute, source)

    @contextmanager
    def whole(self, source: SourceModel, threads: int) -> Iterator[Callable[..., Any]]:
        """predict() of the original: columns, and the artifact to put in the network's place or None → its answer."""
        with threads_restored():
            use_threads(threads)
            marked = _Marked(source)

            def predict(columns: Mapping[str, Array], run: Callable[[Batch], Batch] | None = None) -> Any:
                if run is None:
                    return marked.predict(columns)
                with replaced(marked.loaded, marked.attribute, CompiledNetwork(marked.described, run)):
                    return marked.predict(columns)

            yield predict

    def packages(self) -> Mapping[str, str]:
        return package_versions("torch", "onnxscript", "onnx", "mlflow")


class _Marked:
    """A pyfunc and the network that it marks.

    Raises:
        SourceError: It can't be loaded, or marks none or several networks.
    """

    def __init__(self, source: SourceModel) -> None:
        import torch

        self.source = source
        try:
            self.loaded = load_python_model(Path(source.path))
            model = self.loaded.unwrap_python_model()
        except Exception as error:
            missing = (getattr(error, "name", None) or "") if isinstance(error, ModuleNotFoundError) else ""
            if missing.partition(".")[0] in _JAX:
                raise SourceError(
                    f"its pyfunc needs {missing}, which is not installed here; a pyfunc is compiled around a PyTorch "
                    "network alone, and one of JAX is compiled by itself",
                    fix=_OF_JAX,
                    where=source.uri,
                ) from error
            raise SourceError(
                f"its pyfunc can't be loaded: {type(error).__name__}: {first_line(error)}",
                fix="install the packages that it was logged with: its requirements.txt names them"
                if isinstance(error, ImportError | AttributeError)  # of a package that is absent, or of another version
                else "load it with mlflow.pyfunc.load_model, which shows the line: fix that, and log it again (what "
                "it needs must be among its artifacts, since a worker of the stage may not use the network)",
                where=source.uri,
            ) from error
        held = vars(model)
        marked = {name: example for name, value in held.items() if (example := pyfunc.example_of(value)) is not None}
        if len(marked) != 1:
            raise _unmarked(source, held, list(marked))
        ((self.attribute, self.example),) = marked.items()
        self.network = held[self.attribute]
        if not isinstance(self.network, torch.nn.Module):
            kind = type(self.network).__name__
            raise SourceError(f"what it marks, self.{self.attribute}, is a {kind} and no torch.nn.Module")
        self.network.eval()
        self.inputs = _parameters(self.network, self.example)

    @cached_property
    def program(self) -> ExportedProgram:
        """The network as torch.export traces it."""
        return self._program()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the network's outputs, in order."""
        return torch_signature.output_names(self.program)

    @property
    def signature(self) -> Any:
        """The network's tensors."""
        return torch_signature.signature_of(self.program, self.inputs, self.outputs)

    @cached_property
    def described(self) -> dict[str, Any]:
        """As `serving.python_model` reads it."""
        import torch

        spec = self.program.call_spec.out_spec
        answer = torch.utils._pytree.tree_unflatten(list(self.outputs), spec)
        flat = isinstance(answer, Mapping | tuple | list)
        form = "tensor" if not flat else "dict" if isinstance(answer, Mapping) else type(answer).__name__
        values = list(answer.values()) if isinstance(answer, Mapping) else list(answer) if flat else [answer]
        if form not in ("tensor", "dict", "tuple", "list") or not all(isinstance(value, str) for value in values):
            raise SourceError(
                f"its network answers with a {form} of other things than tensors",
                fix="let its forward return a tensor, or a tuple, list or dict of tensors",
                where=self.source.uri,
            )
        keys = [str(key) for key in answer] if isinstance(answer, Mapping) else []
        return {
            "attribute": self.attribute, "parameters": list(self.inputs), "outputs": list(self.outputs), "form": form,
            "keys": keys,
        }  # fmt: skip

    def answers_no_rows(self) -> bool:
        """Whether the network answers a batch of none, which some of PyTorch's own operators refuse."""
        import torch

        args = [torch.from_numpy(value[:0].copy()) for value in self.example.args]
        kwargs = {name: torch.from_numpy(value[:0].copy()) for name, value in self.example.kwargs.items()}
        try:
            with torch.no_grad():
                found = torch.utils._pytree.tree_leaves(self.network(*args, **kwargs))
        except Exception:  # noqa: BLE001 - whatever a stranger's network raises is its answer
            return False
        return all(isinstance(value, torch.Tensor) and value.ndim and not len(value) for value in found)

    def predict(self, columns: Mapping[str, Array]) -> Any:
        """The pyfunc's answer to these rows."""
        return self.loaded.predict(_as_given(columns, self.loaded))

    def _program(self) -> ExportedProgram:
        import numpy as np
        import torch

        def twice(array: Any) -> Any:
            return torch.from_numpy(np.concatenate([array, array]) if len(array) == 1 else np.array(array))

        args = tuple(map(twice, self.example.args))
        kwargs = {name: twice(value) for name, value in self.example.kwargs.items()}
        free = {name: _free_axes(value) for name, value in zip(self.inputs, (*args, *kwargs.values()), strict=True)}
        sizes: Any = dict(free)
        parameters = list(inspect.signature(self.network.forward).parameters.values())
        if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
            sizes = (tuple(free.values()),)
        try:
            with tracing(), torch.no_grad():
                program = torch.export.export(self.network, args, kwargs, dynamic_shapes=sizes)
        except Exception as error:
            raise SourceError(
                f"torch.export can't trace self.{self.attribute}: {torch_forward.reason(error)}",
                fix="make its forward traceable by torch.export, or mark the part of it that is",
                where=self.source.uri,
            ) from error
        keep_inputs(program)
        return program


def _streams(source: SourceModel) -> bool:
    return bool(mlmodel.flavor(source, "python_function").get("streamable"))


def _unmarked(source: SourceModel, held: Mapping[str, Any], marked: Sequence[str]) -> SourceError:
    import torch

    if marked:
        names = " and ".join(f"self.{name}" for name in marked)
        return SourceError(f"it marks {names}, and one network can be compiled", where=source.uri)
    if network := next((name for name, value in held.items() if isinstance(value, torch.nn.Module)), None):
        lines = _LINES.format(name=network)
        return SourceError(f"it marks no network to compile. It holds self.{network}; add{lines}", where=source.uri)
    alone = "it marks no network to compile, and a pyfunc is compiled around a PyTorch network alone"
    if (inside := _of_another_framework(held)) is not None:
        name, value, flavor = inside
        return SourceError(
            f"{alone}; it holds self.{name}, a model of {flavor} ({type(value).__name__})",
            fix=f"log that by itself, with mlflow.{flavor}.log_model(model.{name}, ...), and do the rest of predict() "
            "where it is called",
            where=source.uri,
        )
    if of_jax := next((name for name, value in held.items() if _is_of_jax(value)), None):
        problem = f"{alone}; self.{of_jax} ({type(held[of_jax]).__name__}) is of JAX, which is compiled by itself"
        return SourceError(problem, fix=_OF_JAX, where=source.uri)
    problem = f"it marks no network to compile, and holds no torch.nn.Module as an attribute{_OTHERWISE}"
    return SourceError(problem, where=source.uri)


def _of_another_framework(held: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """The first attribute that is a model of a framework with a flavor of its own here: name, model, flavor."""
    for name, value in held.items():
        if (flavor := _FLAVORS.get(type(value).__module__.partition(".")[0])) and hasattr(value, "predict"):
            return name, value, flavor
    return None


def _is_of_jax(value: Any) -> bool:
    """Whether it is a network, a jitted function or an array of JAX, or a tree of such arrays."""
    if isinstance(value, Mapping | list | tuple):
        return any(_is_of_jax(part) for part in (value.values() if isinstance(value, Mapping) else value))
    return any(kind.__module__.partition(".")[0] in _JAX for kind in type(value).__mro__)


def _parameters(network: Any, example: pyfunc.Example) -> tuple[str, ...]:
    """Names of the arguments that the example gives, in order."""
    known = inspect.signature(network.forward).parameters.values()
    named = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positional = named[: len(example.args)]
    positional += [f"input_{number}" for number in range(len(positional), len(example.args))]
    return (*positional, *example.kwargs)


def _free_axes(tensor: Any) -> dict[int, Any]:
    """The batch, and the length of what is made of tokens."""
    import torch

    axes = {0: torch.export.Dim.AUTO}
    return {**axes, 1: torch.export.Dim.AUTO} if not tensor.is_floating_point() and tensor.ndim > 1 else axes


def _as_given(columns: Mapping[str, Array], loaded: Any) -> Any:
    """Rows as predict() takes them: a data frame of the columns, or what a signature of tensors asks for."""
    schema = loaded.metadata.get_input_schema()
    if schema is not None and schema.is_tensor_spec():
        named = schema.input_names()
        if named and all(name in columns for name in named):
            return {name: columns[name] for name in named}
        return next(iter(columns.values())) if len(columns) == 1 else dict(columns)
    if schema is None and len(columns) == 1 and next(iter(columns.values())).ndim > 1:
        return next(iter(columns.values()))
    import pandas as pd

    return pd.DataFrame({name: list(values) if values.ndim > 1 else values for name, values in columns.items()})


def _together(seen: Sequence[Mapping[str, Array]], rows: int, attribute: str, source: SourceModel) -> Batch:
    import numpy as np

    counts = [len(next(iter(call.values()))) for call in seen]
    if sum(counts) != rows:
        raise SourceError(
            f"predict() of {rows} rows calls self.{attribute} with {' + '.join(map(str, counts)) or 'no'} rows, so "
            "which answer belongs to which row is not known",
            fix="let predict() call it once, with one row for each of its own",
            where=source.uri,
        )
    try:
        return {name: np.concatenate([call[name] for call in seen]) for name in seen[0]}
    except ValueError as error:
        raise SourceError(
            f"predict() calls self.{attribute} several times, with other shapes each time: {error}",
            fix="let predict() call it once, with its rows padded to one length",
            where=source.uri,
        ) from error
