"""Sessions of ONNX Runtime: how one is opened, what it says of the model, and what it really runs.

It needs nothing but onnxruntime and numpy; reading an optimised graph back needs onnx.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compile_stage.backends import onnxruntime_providers as providers
from compile_stage.core.environment import usable_cores
from compile_stage.core.errors import IntegrityError, NothingCompiledError
from compile_stage.core.generation import INPUT_IDS, LOGITS, cache_specs, empty_cache, present_of
from compile_stage.core.records import Scheme
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.known_sizes import KNOWN_SIZES, Sizes

LEVELS = {
    "disabled": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
_PLACE = re.compile(r"\S*/onnxruntime_src/\S+:\d+ ")  # of an error, in ONNX Runtime's source
_DTYPES = {
    "float": "float32", "double": "float64", "float16": "float16", "bfloat16": "bfloat16", "string": "str",
    "bool": "bool", "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
    "uint8": "uint8", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
}  # fmt: skip
INT8_PRODUCTS = "4"
"""How `MatMulNBits` computes where its products are in int8 (`session.qdq_matmulnbits_accuracy_level`)."""
FLOAT_PRODUCTS = "1"

CACHE_IN_PLACE = "cache_in_place"
"""The option of an artifact that says: its attention writes new tokens into the memory of the cache."""

NO_SIZES: Sizes = {}

_LEAST_ROOM = 64  # tokens

# Operators that do the arithmetic of a network, by what they compute in.
_INTEGER_OPS = {
    "QLinearConv", "QLinearMatMul", "QGemm", "QAttention", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul", "DynamicQuantizeLSTM",
}  # fmt: skip
_BLOCK_OPS = {"MatMulNBits"}  # they read weights of 4 or 8 bits by blocks
FLOAT_OPS = {
    "Conv", "FusedConv", "NhwcFusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "Attention",
    "MultiHeadAttention", "GroupQueryAttention", "LSTM", "GRU", "RNN",
}  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- sizes


def fixed_sizes(options: Mapping[str, Any]) -> list[dict[str, int]]:
    """What sessions of an artifact are opened for, beside one for free sizes: where the target asks for one batch size,
    that; where for several, what all have in common, since each session has weights of its own. `fixed_shapes` says
    otherwise."""
    known: list[dict[str, int]] = [dict(sizes) for sizes in options.get(KNOWN_SIZES, ())]
    wanted = options.get("fixed_shapes")
    if wanted is False or not known:
        return []
    if wanted or len(known) == 1:
        return known
    common = {dim: size for dim, size in known[0].items() if all(other.get(dim) == size for other in known[1:])}
    return [common] if common else []


# --------------------------------------------------------------------------------------------------------- the session


def session_options(asked: Mapping[str, Any], threads: int, fixed: Sizes = NO_SIZES) -> Any:
    """What a session is opened with, by the options of a target, and for these sizes of free dimensions."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    for name, size in fixed.items():
        options.add_free_dimension_override_by_name(name, size)
    within = min(threads, int(asked.get("threads", threads)))  # never more than the target's
    beside = max(1, min(threads // within, int(asked.get("inter_op_threads", 1))))
    options.intra_op_num_threads = within
    options.inter_op_num_threads = beside
    modes = onnxruntime.ExecutionMode
    options.execution_mode = modes.ORT_PARALLEL if beside > 1 else modes.ORT_SEQUENTIAL
    if asked.get("affinity", False) and (pinned := affinities(within)):
        options.add_session_config_entry("session.intra_op_thread_affinities", pinned)
    level = LEVELS[asked.get("graph_optimization", "all")]
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.enable_cpu_mem_arena = asked.get("memory_arena", True)
    options.log_severity_level = 3  # a dump at level ALL warns that it fits this machine only; it is thrown away
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if asked.get("spinning", True) else "0")
    for key, value in asked.get("config", {}).items():
        options.add_session_config_entry(str(key), str(value))
    return options


def affinities(threads: int) -> str:
    """A core for each thread of the pool but the caller's own, as the runtime writes it (`2;3`, counted from 1): of the
    cores that this process may use where it is opened. Empty where there is none to spare, or the system can't say."""
    allowed = usable_cores()
    return ";".join(str(core + 1) for core in allowed[1:threads]) if 1 < threads <= len(allowed) else ""


def open_here(
    path: Path, asked: Mapping[str, Any], threads: int, dump: Path | None = None, fixed: Sizes = NO_SIZES
) -> Any:
    """A session on the CPU provider alone. With `dump`, it writes the graph that it optimised there."""
    import onnxruntime

    options = session_options(asked, threads, fixed)
    if dump is not None:
        dump_to(dump, options)
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=[providers.CPU])
    except Exception as error:  # onnxruntime's own errors share no base class
        raise NothingCompiledError(f"ONNX Runtime can't load the graph: {sentence(error)}") from error
    session.disable_fallback()
    if session.get_providers() != [providers.CPU]:
        taken = ", ".join(session.get_providers())
        raise NothingCompiledError(f"ONNX Runtime was asked for {providers.CPU} alone and took {taken}")
    return session


def dump_to(path: Path, options: Any) -> None:
    """Have the session write the graph that it optimised, and say where every node of it lies."""
    options.optimized_model_filepath = str(path)
    # Weights go to a file of their own, which is not read back.
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")


def open_elsewhere(provider: providers.Provider, path: Path, asked: Mapping[str, Any], threads: int) -> Any:
    """A session on another provider than the CPU's. Raises NothingCompiledError when the runtime put it, or too many of
    its nodes, elsewhere."""
    import onnxruntime

    if (reason := providers.refuse_absent(provider)) is not None:
        raise NothingCompiledError(reason)
    bound = float(asked.get("min_nodes_share", 1.0))
    wanted = providers.arguments(provider, asked, threads)

    def start(*, cpu: bool) -> Any:
        options = session_options(asked, threads)
        options.log_severity_level = 4
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "0" if cpu else "1")
        if provider.short == "directml":
            options.enable_mem_pattern = False  # it can't have it
        return onnxruntime.InferenceSession(str(path), options, providers=wanted, enable_fallback=0)

    try:
        session = start(cpu=bound < 1)
    except Exception as error:  # onnxruntime's own errors share no base class
        said = str(error)
        if "fallback to CPU EP has been explicitly disabled" not in said:
            raise NothingCompiledError(
                f"ONNX Runtime can't load the graph on {provider.name}: {sentence(error)}"
            ) from error
        try:
            left = providers.left_over(start(cpu=True), provider)  # never run: it says which operators it were
        except Exception:  # noqa: BLE001 - then they are not known
            left = ""
        raise NothingCompiledError(
            f"{provider.name} does not take every node, and none may run on the "
            f"CPU{f': it leaves {left}' if left else ''}",
            fix="allow a share with the target's option min_nodes_share, such as 0.9, or name another provider",
        ) from error
    session.disable_fallback()
    if provider.name not in session.get_providers():
        taken = ", ".join(session.get_providers())
        raise NothingCompiledError(
            f"{provider.name} was asked for and the session has only {taken}: its device or driver is not there"
        )
    found = providers.placement(session)
    providers.demand(provider, found[0] if found else None, bound)
    return session


def read_signature(session: Any, described: Signature, fixed: Sizes = NO_SIZES) -> Signature:
    """Names, types and shapes as the runtime reports them; where it has no name for a free dimension, the model's own.

    Args:
        fixed: Sizes that the session was opened for: these dimensions keep their names, and so do those of outputs,
            which may have been computed from them.
    """

    def read(values: Any, known: tuple[TensorSpec, ...], free: frozenset[str]) -> tuple[TensorSpec, ...]:
        return tuple(_read_spec(value, {spec.name: spec for spec in known}.get(value.name), free) for value in values)

    named = frozenset(dim for spec in described.outputs for dim in spec.shape if isinstance(dim, str) and fixed)
    return Signature(
        inputs=read(session.get_inputs(), described.inputs, frozenset(fixed)),
        outputs=read(session.get_outputs(), described.outputs, named),
    )


def _read_spec(value: Any, known: TensorSpec | None, free: frozenset[str]) -> TensorSpec:
    inner = value.type.removeprefix("tensor(").removesuffix(")")
    names = known.shape if known is not None and len(known.shape) == len(value.shape) else (None,) * len(value.shape)
    shape = tuple(
        dim if isinstance(dim, int) and name not in free else str(name or dim or f"{value.name}_{axis}")
        for axis, (dim, name) in enumerate(zip(value.shape, names, strict=True))
    )
    return TensorSpec(name=value.name, dtype=_DTYPES.get(inner, value.type), shape=shape)


def demand_same(model: Signature, runtime: Signature) -> None:
    """An input or output that was lost, renamed or retyped on the way is an error here, not a surprise later."""
    for word, wanted, found in (
        ("inputs", model.inputs, runtime.inputs),
        ("outputs", model.outputs, runtime.outputs),
    ):
        if [(s.name, s.dtype) for s in wanted] != [(s.name, s.dtype) for s in found]:
            listed = "; ".join(map(str, found))
            raise IntegrityError(
                f"the {word} changed on the way: the model has {'; '.join(map(str, wanted))}, the runtime {listed}"
            )


def bare_call(session: Any) -> Callable[[list[str], dict[str, Any]], list[Any]]:
    """`session.run` (names of outputs, arrays of all inputs → outputs) without what its Python part checks in each call
    and this session's owner has checked already: 0.8 µs, 1 to 3 % of a small network's call. As ONNX Runtime's own
    `IOBinding` does it; where a version, or what stands for a session, has no such part, or its own `run` (a tracing
    library's): `session.run` itself."""
    from onnxruntime.capi.onnxruntime_inference_collection import Session

    inner = getattr(session, "_sess", None)
    if inner is None or type(session).run is not Session.run or "run" in vars(session):
        return session.run  # type: ignore[no-any-return]
    run = inner.run
    return lambda names, batch: run(names, batch, None)


def step(session: Any, signature: Signature, inputs: Mapping[str, Any], cache: Any) -> tuple[Any, Any]:
    """One call of a graph with a cache: the logits as an array, and the new cache, which stays the runtime's and is
    not copied.

    Args:
        cache: Name → value of the runtime, of the call before; None for the first.
    """
    from onnxruntime import OrtValue

    if cache is None:
        rows = len(inputs[INPUT_IDS])
        cache = {name: OrtValue.ortvalue_from_numpy(array) for name, array in empty_cache(signature, rows).items()}
    given = {name: OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    names = list(cache)
    logits, *held = session.run_with_ort_values([LOGITS, *map(present_of, names)], {**given, **cache})
    return logits.numpy(), dict(zip(names, held, strict=True))


class CacheInPlace:
    """The cache of one generation, in memory that the graph's attention writes new tokens into: past and present of a
    call are the same buffers [rows, heads, capacity, size], of which the first tokens are taken."""

    def __init__(self, session: Any, signature: Signature, rows: int) -> None:
        self._session, self._rows, self._held = session, rows, 0
        self._specs = {spec.name: spec for spec in cache_specs(signature)}
        logits = next(spec for spec in signature.outputs if spec.name == LOGITS)
        self._logits = np.empty((rows, 1, int(logits.shape[-1])), logits.dtype)
        self._buffers: dict[str, Any] = {}
        self._bound: Any = None

    def step(self, inputs: Mapping[str, Any]) -> Any:
        """The logits [rows, 1, vocabulary] behind the tokens of a call."""
        self._make_room(self._held + inputs[INPUT_IDS].shape[1])
        for name, array in inputs.items():
            self._bound.bind_cpu_input(name, array)  # it copies: a third of the time that a value of its own takes
        self._session.run_with_iobinding(self._bound)
        self._held += inputs[INPUT_IDS].shape[1]
        return self._logits.copy()

    def _make_room(self, tokens: int) -> None:
        """Larger buffers where the tokens have no place: a quarter more, so that few copies are made of long texts."""
        from onnxruntime import OrtValue

        if self._bound is not None and tokens <= next(iter(self._buffers.values())).shape[2]:
            return
        self._bound = self._session.io_binding()
        self._bound.bind_ortvalue_output(LOGITS, OrtValue.ortvalue_from_numpy(self._logits))
        for name, spec in self._specs.items():
            room = tokens + max(_LEAST_ROOM, tokens // 4)
            grown = np.zeros((self._rows, int(spec.shape[1]), room, int(spec.shape[3])), spec.dtype)
            if self._held:
                grown[:, :, : self._held] = self._buffers[name][:, :, : self._held]
            value = OrtValue.ortvalue_from_numpy(grown)  # it does not copy: the array is kept here
            self._bound.bind_ortvalue_input(name, value)
            self._bound.bind_ortvalue_output(present_of(name), value)
            self._buffers[name] = grown


# ------------------------------------------------------------------------------------------------------ what really ran


def read_back(session: Any, dump: Path, scheme: Scheme) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the optimised graph holds, and what a reader should know of it. Raises when the precision was not taken."""
    import onnx

    nodes = list(onnx.load(dump, load_external_data=False).graph.node)
    assigned: Counter[str] = Counter()
    if hasattr(session, "get_provider_graph_assignment_info"):
        for part in session.get_provider_graph_assignment_info():
            assigned[part.ep_name] += len(part.get_nodes())
    else:  # before 1.24 it can't say; with one provider and no fallback, that one has every node
        assigned[providers.CPU] = len(nodes)
    if set(assigned) - {providers.CPU}:
        raise NothingCompiledError(
            f"nodes were given to {', '.join(sorted(set(assigned) - {providers.CPU}))}, not to {providers.CPU}"
        )
    in_bytes = [node for node in nodes if node.op_type in _BLOCK_OPS and _attribute(node, "bits") == 8]
    in_blocks = [node for node in nodes if node.op_type in _BLOCK_OPS and _attribute(node, "bits") != 8]
    integer = sum(node.op_type in _INTEGER_OPS for node in nodes) + len(in_bytes)
    in_float = Counter(node.op_type for node in nodes if node.op_type in FLOAT_OPS)
    floating = sum(in_float.values())
    computed = {"int8": integer, "float": floating} | ({"int4": len(in_blocks)} if in_blocks else {})
    executed = {
        "providers": dict(sorted(assigned.items())),
        "ops": dict(sorted(Counter(_op(node) for node in nodes).items())),
        "precision": {"matrix_and_convolution": computed},
    }
    notes: list[str] = []
    if scheme.precision == "fp32" and integer + len(in_blocks):
        notes.append(
            f"the source's own graph is quantised: {integer + len(in_blocks)} matrix and convolution operators do not "
            "run in float"
        )
    if scheme.precision == "int4":
        notes += _judge_blocks(in_blocks, in_float, sum(node.op_type == "DequantizeLinear" for node in nodes))
    if scheme.precision.startswith("int8"):
        if not integer:
            raise NothingCompiledError(
                f"the graph is {scheme.precision}, and ONNX Runtime runs none of it in integers: "
                f"{floating} matrix and convolution operators stayed in float"
            )
        if floating:
            listed = ", ".join(f"{count} {op}" for op, count in sorted(in_float.items()))
            notes.append(f"{integer} matrix and convolution operators run in int8, {floating} in float ({listed})")
    if scheme.precision == "fp16":
        casts = sum(node.op_type == "Cast" for node in nodes)
        notes.append(
            f"float16 is stored, not computed: this CPU's kernels work in float32 (the graph runs {casts} casts)"
        )
    return executed, tuple(notes)


def read_places(
    session: Any, provider: providers.Provider, asked: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the session says of every node's place, and a word where some are not the provider's."""
    places, ops = providers.placement(session) or (Counter(), Counter())
    share = providers.demand(provider, places, float(asked.get("min_nodes_share", 1.0)))
    heavy = sum(count for op, count in ops.items() if op in FLOAT_OPS)
    executed = {
        "providers": dict(sorted(places.items())),
        "ops": dict(sorted(ops.items())),
        "precision": {"matrix_and_convolution": {"float": heavy}},
        "share": round(share, 6),
    }
    listed = ", ".join(f"{count} on {name}" for name, count in sorted(places.items()) if name != provider.name)
    notes = (f"{provider.name} runs {100 * share:.0f} % of the nodes; {listed}",) if listed else ()
    return executed, notes


def _judge_blocks(in_blocks: list[Any], in_float: Counter[str], expanded: int) -> list[str]:
    """What became of 4-bit weights. Raises when the runtime holds none of them as such."""
    if not in_blocks:
        raise NothingCompiledError(
            "the graph is int4, and ONNX Runtime keeps no weight in 4 bits: it expands each to float before the "
            "product (graph_optimization must be extended or all for it to merge them)"
        )
    levels = {_attribute(node, "accuracy_level") for node in in_blocks}
    sums = "in int8" if levels == {int(INT8_PRODUCTS)} else "in float"
    listed = ", ".join(f"{count} {op}" for op, count in sorted(in_float.items()))
    notes = [
        f"{len(in_blocks)} matrix operators read weights in 4 bits and multiply {sums}, {listed or 'none'} in float"
    ]
    if expanded:
        notes.append(f"{expanded} weights are expanded to float while the model runs")
    return notes


def _attribute(node: Any, name: str) -> int | None:
    return next((one.i for one in node.attribute if one.name == name), None)


def _op(node: Any) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type)


def sentence(error: Exception) -> str:
    """An error of the runtime without its code, the places in its source and in our scratch folders, and its line
    breaks."""
    words = " ".join(str(error).split())
    words = words.rpartition("[ONNXRuntimeError] : ")[2].partition(" : ")[2].partition(" : ")[2] or words
    if newest := re.search(r"Opset (\d+) is under development.* for domain (\S+) is till opset (\d+)", words):
        have, domain, most = newest.groups()
        return (
            f"its operator set is version {have} of {domain}, and this ONNX Runtime takes up to {most}: export it with "
            "an older one"
        )
    words = re.sub(r"Load model from .*? failed: ?", "", words)
    words = re.sub(r" ; GPU=.*? ; expr=", " in ", words)  # of CUDA's errors: host, file and line
    while (place := _PLACE.search(words)) is not None:
        words = f"{words[: place.start()]}{_behind_a_signature(words[place.end() :])}".strip()
    return words or str(error)


def _behind_a_signature(words: str) -> str:
    """What follows a C++ signature, whose end is that of its own parentheses; the words where there is none."""
    depth = 0
    for position, letter in enumerate(words):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == ")" and depth == 0:
            return re.sub(r"^( const)?( \[with .*?\])? ?", "", words[position + 1 :])
    return words
