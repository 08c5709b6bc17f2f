"""An open model of the OpenVINO backend: compiled when it is opened, with what really runs read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.generation import INPUT_IDS, LOGITS, empty_cache, present_of
from compile_stage.core.tensors import Signature, TensorSpec, form_of, has_form
from compile_stage.plugin_support.sessions import demand_call, in_place_or_copied

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch, Form

_DTYPES = {
    "f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "boolean": "bool", "string": "str",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "u16": "uint16", "u32": "uint32",
    "u64": "uint64",
}  # fmt: skip


class OpenVinoSession:
    """One open model: compiled for each of the shapes that are known beforehand, and for free shapes when a batch of
    another comes.

    With `requests` among the options, the rows of a batch are shared among so many infer requests, which run at the
    same time on their part of the threads: a request waits for no other after each operator.

    An infer request reuses its output buffers, so what is handed out are copies.
    """

    def __init__(self, core: Any, path: Path, options: Mapping[str, Any], threads: int, described: Signature) -> None:
        from openvino import Tensor

        self._core = core
        self._path = path
        self._options = options
        self._threads = threads
        self._requests: dict[tuple[tuple[int, ...], ...], tuple[Any, ...]] = {}
        self._free: Any = None
        self._last: tuple[Form | None, tuple[Any, ...]] = (None, ())
        """Form of the last batch that was answered, and the requests that it went to: mostly the next has the same."""
        self._turns: tuple[Any, ...] = ()  # of a graph with a cache
        self._closed = False
        self._make_tensor = Tensor
        self.signature = _read_signature(core.read_model(path), described)
        self.compiled: Any = None  # the model for the first known shape, or for free ones: what is read back
        for shapes in options["shapes"]:
            key = tuple(tuple(shapes[spec.name]) for spec in self.signature.inputs)
            count = _requests_of(key, min(threads, int(options.get("requests", 1))))
            part = {
                name: (shape[0] // count, *shape[1:]) if count > 1 else tuple(shape) for name, shape in shapes.items()
            }
            compiled = self._compile(part, streams=count)
            self.compiled = self.compiled or compiled
            self._requests[key] = tuple(compiled.create_infer_request() for _ in range(count))
        if self.compiled is None:
            self._free = self._free_request()

    def run(self, batch: Batch) -> Batch:
        form, requests = self._last
        known = has_form(batch, form)
        if not known:
            demand_call(self.signature, batch, closed=self._closed)
            shapes = tuple(batch[spec.name].shape for spec in self.signature.inputs)
            requests = self._requests.get(shapes) or self._of_free_shapes()
        # Inputs lie where they are until the call ends, and a request does not read them after that.
        arrays = [in_place_or_copied(batch[spec.name]) for spec in self.signature.inputs]
        try:
            answers = self._ask(requests[0], arrays) if len(requests) == 1 else self._share(requests, arrays)
        except RuntimeError as error:
            raise NothingCompiledError(f"OpenVINO could not run the graph: {sentence(error)}") from error
        if not known:
            self._last = (form_of(batch), requests)
        return {spec.name: answer for spec, answer in zip(self.signature.outputs, answers, strict=True)}

    def _ask(self, request: Any, arrays: Sequence[Array]) -> list[Array]:
        """By single tensors: to hand `infer` a list, and to read `output_tensors`, takes 10 and 20 us more. In this
        thread: `start_async` wakes another one, which takes 3 us while calls follow each other at once, and 35 to 70 us
        else."""
        for place, array in enumerate(arrays):
            request.set_input_tensor(place, self._make_tensor(array, shared_memory=True))
        request.infer(share_outputs=True)
        return [request.get_output_tensor(place).data.copy() for place in range(len(self.signature.outputs))]

    def _share(self, requests: Sequence[Any], arrays: Sequence[Array]) -> list[Array]:
        """The rows of a batch, each request its part, at the same time; the last one's in this thread."""
        rows = len(arrays[0]) // len(requests)
        for at, request in enumerate(requests):
            for place, array in enumerate(arrays):
                part = array[at * rows : (at + 1) * rows]
                request.set_input_tensor(place, self._make_tensor(part, shared_memory=True))
        *others, own = requests
        for request in others:
            request.start_async()
        try:
            own.infer(share_outputs=True)
        finally:
            for request in others:  # they read the inputs until then
                request.wait()
        places = range(len(self.signature.outputs))
        return [np.concatenate([request.get_output_tensor(place).data for request in requests]) for place in places]

    def request_for(self, batch: Batch) -> Any:
        """The infer request that a batch of these shapes goes to; the first of those that share it."""
        key = tuple(batch[spec.name].shape for spec in self.signature.inputs)
        return (self._requests.get(key) or self._of_free_shapes())[0]

    def _of_free_shapes(self) -> tuple[Any, ...]:
        self._free = self._free or self._free_request()
        return (self._free,)

    def step(self, inputs: Batch, cache: Any) -> tuple[Array, Any]:
        """One call of a graph with a cache (`core.generation`). Two infer requests take turns: what one answers with is
        read by the other where it lies.

        Args:
            cache: Which request answered last, and its tensors by the names of the inputs that they become; None for
                the first call.
        """
        if self._closed:
            raise UsageError("this session is closed; call it inside its context")
        if not self._turns:
            self._free = self._free or self._free_request()  # a cache's length is free, so it is there already
            self._turns = (self._free, self._free.get_compiled_model().create_infer_request())
        turn, held = cache or (1, {})
        if cache is None:
            empty = empty_cache(self.signature, len(inputs[INPUT_IDS]))
            held = {name: self._make_tensor(array) for name, array in empty.items()}
        request = self._turns[1 - turn]
        try:
            for name, array in inputs.items():
                request.set_tensor(name, self._make_tensor(array))
            for name, tensor in held.items():
                request.set_tensor(name, tensor)
            request.infer()
        except RuntimeError as error:
            raise NothingCompiledError(f"OpenVINO could not run the graph: {sentence(error)}") from error
        answered = {name: request.get_tensor(present_of(name)) for name in held}
        return request.get_tensor(LOGITS).data.copy(), (1 - turn, answered)

    def close(self) -> None:
        self._closed, self._free, self.compiled, self._turns, self._last = True, None, None, (), (None, ())
        self._requests.clear()

    def _free_request(self) -> Any:
        compiled = self._compile(None)
        self.compiled = self.compiled or compiled
        return compiled.create_infer_request()

    def _compile(self, shapes: Mapping[str, Sequence[int]] | None, streams: int = 1) -> Any:
        return _compile(self._core, self._path, self._options, self._threads, shapes, streams)


@contextmanager
def open_model(path: Path, options: Mapping[str, Any], threads: int, described: Signature) -> Iterator[OpenVinoSession]:
    """Open an IR file.

    Args:
        options: Of the artifact: `config`, `hint` and `shapes`.
        described: The model's signature, which the runtime's must match.

    Raises:
        NothingCompiledError: It can't be compiled, or was compiled for another precision or device than asked for.
        IntegrityError: The runtime's inputs or outputs are not the model's.
    """
    import openvino

    session = OpenVinoSession(openvino.Core(), path, options, threads, described)
    try:
        yield session
    finally:
        session.close()


def _requests_of(shapes: tuple[tuple[int, ...], ...], wanted: int) -> int:
    """How many requests share a batch of these shapes: those wanted, where its rows can be shared out evenly."""
    [rows, *others] = {shape[0] if shape else 0 for shape in shapes}
    return wanted if not others and rows and rows % wanted == 0 else 1


def _compile(
    core: Any,
    path: Path,
    options: Mapping[str, Any],
    threads: int,
    shapes: Mapping[str, Sequence[int]] | None,
    streams: int,
) -> Any:
    """The compiled model, for these shapes or for free ones, with its execution precision asked for by name and read
    back.

    Args:
        streams: So many of its requests run at the same time, each on its part of the threads.
    """
    hint = options["hint"]
    config = {key: value.upper() if isinstance(value, str) else value for key, value in options["config"].items()}
    config["INFERENCE_NUM_THREADS"] = min(threads, int(config.get("INFERENCE_NUM_THREADS", threads)))
    config |= {"INFERENCE_PRECISION_HINT": hint}
    if streams > 1:
        config["NUM_STREAMS"] = streams
    for kind, capability in (("bf16", "BF16"), ("f16", "FP16")):
        if hint == kind and capability not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise NothingCompiledError(f"OpenVINO's CPU plug-in says that this machine has no arithmetic in {kind}")
    try:
        graph = core.read_model(path)
        if shapes is not None:
            graph.reshape({name: list(shape) for name, shape in shapes.items()})
        compiled = core.compile_model(graph, "CPU", config)
    except RuntimeError as error:
        raise NothingCompiledError(f"OpenVINO can't compile the graph: {sentence(error)}") from error
    taken = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    if taken != hint:
        raise NothingCompiledError(f"OpenVINO was asked to run in {hint} and runs in {taken}")
    if (devices := compiled.get_property("EXECUTION_DEVICES")) != ["CPU"]:
        raise NothingCompiledError(f"OpenVINO was asked for the CPU alone and took {', '.join(devices)}")
    return compiled


def _read_signature(graph: Any, described: Signature) -> Signature:
    """Names, types and shapes as the runtime's own graph reports them, in the model's order; a free dimension keeps the
    model's name."""
    return Signature(
        inputs=_read_specs("input", graph.inputs, described.inputs),
        outputs=_read_specs("output", graph.outputs, described.outputs),
    )


def _read_specs(word: str, ports: Any, described: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    # An input or output that was lost, renamed, moved or retyped on the way is an error here, not a surprise later.
    names = [sorted(port.get_names()) for port in ports]
    kept = len(names) == len(described) and all(
        spec.name in known for spec, known in zip(described, names, strict=True)
    )
    specs = tuple(_read_spec(port, spec) for port, spec in zip(ports, described, strict=True)) if kept else ()
    if [(spec.name, spec.dtype) for spec in specs] != [(spec.name, spec.dtype) for spec in described]:
        wanted = "; ".join(map(str, described))
        found = "; ".join(map(str, specs)) or ", ".join("/".join(known) for known in names)
        raise IntegrityError(f"the {word}s changed on the way: the model has {wanted}, the runtime {found}")
    return specs


def _read_spec(port: Any, described: TensorSpec) -> TensorSpec:
    partial = port.get_partial_shape()
    if partial.rank.is_dynamic:
        shape = described.shape
    else:
        known = described.shape if len(described.shape) == len(partial) else (None,) * len(partial)
        shape = tuple(
            dim.get_length() if dim.is_static else str(known[axis] or f"{described.name}_{axis}")
            for axis, dim in enumerate(partial)
        )
    kind = port.get_element_type().to_string()
    return TensorSpec(name=described.name, dtype=_DTYPES.get(kind, kind), shape=shape)


def sentence(error: Exception) -> str:
    """An error of the runtime without the places in its own source."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    said = [
        line for line in lines if line and not line.startswith(("Exception from", "Check '")) and ".cpp:" not in line
    ]
    return " ".join(said)[:600] or " ".join(lines)[:600]
