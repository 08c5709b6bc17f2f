"""ONNX Runtime, on its CPU provider or on another one (`onnxruntime_providers.py`).

The artifact is the ONNX graph itself; the runtime optimises it for the machine when it is opened. What comes out of that is
read back at compile time: the optimised graph is dumped and counted, so that a provider that was not taken, or an int8 graph
whose kernels stayed in float, is found here and not by a user. Another provider's graph can't be dumped; of that, the place of every node is read
back, when it is compiled and whenever it is opened.

`open` needs nothing but onnxruntime and numpy; `compile` also reads the graph with onnx.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from compile_stage.backends import onnxruntime_providers as providers
from compile_stage.core import plugins
from compile_stage.core.compiled import describe, refuse_form, refuse_types
from compile_stage.core.environment import hardware
from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Session
from compile_stage.core.records import Artifact, PortableModel, Rung, SampleSet, Scheme, Target
from compile_stage.core.tensors import Signature, TensorSpec

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

PROVIDER = providers.CPU

_LEVELS = {
    "disabled": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
# Options of a target, with what each may be. `config` hands entries to the session untouched.
_OPTIONS: Mapping[str, tuple[str, ...] | type] = {
    "graph_optimization": tuple(_LEVELS),
    "spinning": bool,
    "memory_arena": bool,
    "mapped_weights": bool,
    "config": dict,
    "provider": str,
    "provider_options": dict,
    "min_nodes_share": float,
}
_DTYPES = {
    "float": "float32", "double": "float64", "float16": "float16", "bfloat16": "bfloat16", "string": "str", "bool": "bool",
    "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
    "uint8": "uint8", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
}  # fmt: skip
_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc")

# How MatMulNBits computes: 4 rounds its input to int8 by blocks too, with integer products; 1 stays in float32. The runtime's own default, pinned.
_ACCURACY_LEVEL, _INT8_PRODUCTS = "session.qdq_matmulnbits_accuracy_level", "4"

_LACKS = {
    "bf16": "its CPU kernels have no bfloat16, and reject a graph in it",
    "fp8": "its CPU kernels have no 8-bit floats, and its optimiser takes such a graph for int8 and answers wrongly",
}

# Operators that do the arithmetic of a network, by what they compute in.
_INTEGER_OPS = {
    "QLinearConv", "QLinearMatMul", "QGemm", "QAttention", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul", "DynamicQuantizeLSTM",
}  # fmt: skip
_BLOCK_OPS = {"MatMulNBits"}  # they read weights of 4 bits by blocks
_FLOAT_OPS = {
    "Conv", "FusedConv", "NhwcFusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "Attention",
    "MultiHeadAttention", "LSTM", "GRU", "RNN",
}  # fmt: skip


class OnnxRuntime:
    """The backend (`core.ports.Backend`)."""

    name: ClassVar[str] = "onnxruntime"
    requires: ClassVar[tuple[str, ...]] = ("onnxruntime",)
    extra: ClassVar[str] = ""
    forms: ClassVar[tuple[str, ...]] = ("onnx",)
    runtime: ClassVar[tuple[str, ...]] = providers.PACKAGES
    requires_distributions: ClassVar[tuple[str, ...]] = ()
    default_provider: ClassVar[str] = providers.CPU

    def toolchain(self) -> Mapping[str, str]:
        return package_versions(*self.runtime, "onnx", "numpy")

    def refuse_target(self, target: Target) -> str | None:
        asked = target.options.get(self.name, {})
        if (reason := self._refuse_options(asked)) is not None:
            return reason
        provider = self._provider(asked)
        if target.device not in provider.devices:
            said = f"{self.name}'s {provider.name} runs on the device {' or '.join(provider.devices)}, not on {target.device!r}"
            suited = [one.short for one in providers.PROVIDERS if target.device in one.devices]
            return f"{said}; its option provider can be {', '.join(suited)} there" if suited else said
        # In a toolchain of its own the runtime is not the one of this process: there, `compile` asks it.
        if provider.name == providers.CPU or not plugins.importable(self):
            return None
        try:
            return providers.refuse_absent(provider)
        except NothingCompiledError as error:
            return error.problem

    def _provider(self, asked: Mapping[str, Any]) -> providers.Provider:
        found = providers.find(str(asked.get("provider", self.default_provider)))
        if found is None:
            raise UsageError(f"{self.name} knows no provider {asked.get('provider')!r}")
        return found

    def _refuse_options(self, asked: Mapping[str, Any]) -> str | None:
        return _refuse_options(asked, self.name) or providers.refuse(asked, self.name, self.default_provider)

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        provider = self._provider(target.options.get(self.name, {}))
        if target.device not in provider.devices:
            return ()
        if provider.name != providers.CPU and precision not in provider.precisions:
            return ()
        return {
            "fp32": (Scheme(precision="fp32", name="fp32", native=True),),
            # Computed in float32 on a CPU: half the size, no more speed. Whether that is worth shipping is the policy's to say.
            "fp16": (Scheme(precision="fp16", name="fp16", weights="float16"),),
            "int8": _static_schemes(),
            "int8-dynamic": (
                Scheme(
                    precision="int8-dynamic",
                    name="int8-dynamic",
                    activations="uint8",
                    weights="int8",
                    options={"reduce_range": hardware().sums_saturate},
                ),
            ),
            "int4": _block_schemes(),
        }.get(precision, ())

    def lacks(self, target: Target, precision: str) -> str | None:
        provider = self._provider(target.options.get(self.name, {}))
        if provider.name == providers.CPU:
            return _LACKS.get(precision)
        return f"what {provider.name} computes in {precision} can't be read back from it; it is served in {' and '.join(provider.precisions)}"

    def rungs(self, target: Target, scheme: Scheme) -> tuple[Rung, ...]:
        """`core.ports.Climber`. They are settings of the CPU's kernels."""
        on_cpu = self._provider(target.options.get(self.name, {})).name == providers.CPU
        return _rungs(target.threads, scheme) if on_cpu else ()

    def refuse(self, model: PortableModel, target: Target) -> str | None:
        if (reason := refuse_form(self, model, target) or refuse_types(model.signature)) is not None:
            return reason
        import onnx

        graph = onnx.load(model.path, load_external_data=False).graph
        for node in graph.node:
            if node.domain not in _DOMAINS:
                return f"operator {node.domain}.{node.op_type} (node {node.name!r}) is not one that ONNX Runtime knows"
        for output in graph.output:
            if not output.type.HasField("tensor_type"):
                return f"output {output.name!r} is not a tensor but a {output.type.WhichOneof('value')}"
        return None

    def compile(
        self,
        model: PortableModel,
        scheme: Scheme,
        target: Target,
        job_id: str,
        into: Path,
        calibration: SampleSet | None = None,  # the graph carries its calibration: no scheme here calibrates natively
    ) -> Artifact:
        asked = target.options.get(self.name, {})
        if (reason := self._refuse_options(asked)) is not None:
            raise UsageError(reason)
        provider = self._provider(asked)
        if scheme.precision == "int4":
            asked = {**asked, "config": {_ACCURACY_LEVEL: _INT8_PRODUCTS, **asked.get("config", {})}}
        into.mkdir(parents=True, exist_ok=True)
        _copy_graph(Path(model.path), into, mapped=asked.get("mapped_weights", False))
        if provider.name != providers.CPU:
            asked = {**asked, "provider": provider.name}
            session = _open_elsewhere(provider, into / "model.onnx", asked, target.threads)
            executed, notes = _read_places(session, provider, asked)
            signature = _read_signature(session, model.signature)
        else:
            with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
                dump = Path(scratch) / "optimized.onnx"
                session = _open_session(into / "model.onnx", asked, target.threads, dump=dump)
                signature = _read_signature(session, model.signature)
                executed, notes = _read_back(session, dump, scheme)
        _demand_same(model.signature, signature)
        return describe(
            self,
            model,
            scheme,
            job_id,
            into,
            entry="model.onnx",
            signature=signature,
            options=asked,
            executed=executed,
            notes=notes,
        )

    @contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Session]:
        path, provider = Path(artifact.path) / artifact.entry, self._provider(artifact.options)
        if provider.name == providers.CPU:
            runtime = _open_session(path, artifact.options, threads)
        else:
            runtime = _open_elsewhere(provider, path, artifact.options, threads)
        session = _OnnxSession(runtime, artifact.signature)
        try:
            yield session
        finally:
            session.close()


class OnnxRuntimeOpenVino(OnnxRuntime):
    """The same on OpenVINO's provider, whose package takes the place of onnxruntime's and so has an environment of its own (docs/decisions/0022)."""

    name: ClassVar[str] = "onnxruntime-openvino"
    runtime: ClassVar[tuple[str, ...]] = ("onnxruntime-openvino",)
    requires_distributions: ClassVar[tuple[str, ...]] = ("onnxruntime-openvino",)
    default_provider: ClassVar[str] = providers.OPENVINO


class _OnnxSession:
    """One open model. ONNX Runtime allocates new outputs for every call, so they are the caller's."""

    def __init__(self, session: Any, described: Signature) -> None:
        self._session = session
        self.signature = _read_signature(session, described)

    def run(self, batch: Batch) -> Batch:
        if self._session is None:
            raise UsageError("this session is closed; call it inside its context")
        if (reason := self.signature.refuse(batch)) is not None:
            raise UsageError(reason)
        names = [spec.name for spec in self.signature.outputs]
        try:
            outputs = self._session.run(names, dict(batch))
        except Exception as error:  # onnxruntime's own errors share no base class
            raise NothingCompiledError(f"ONNX Runtime could not run the graph: {_sentence(error)}") from error
        return dict(zip(names, outputs, strict=True))

    def close(self) -> None:
        self._session = None


# ------------------------------------------------------------------------------------------------------------ schemes


def _static_schemes() -> tuple[Scheme, ...]:
    """One static scheme: the integer convolution answers in integers, so the placement is `chain`, which leaves a transformer's sums and
    normalisations in float. On x86 unsigned activations; symmetric int8 ones are twice as slow there."""
    if hardware().machine in ("aarch64", "arm64"):
        # With zero points, not symmetric: a ReLU is merged into the convolution before it only where the smallest integer stands for 0.
        return (Scheme(precision="int8", name="int8-s8s8", activations="int8", weights="int8"),)
    safe = {"reduce_range": hardware().sums_saturate}
    return (Scheme(precision="int8", name="int8-u8s8", activations="uint8", weights="int8", options=safe),)


def _block_schemes() -> tuple[Scheme, ...]:
    """4-bit weights, as MatMulNBits takes them; the more accurate method first, since both run the same."""
    return tuple(
        Scheme(precision="int4", name=f"int4-{method}", weights="uint4", options={"method": method, "block": 32})
        for method in ("hqq", "rtn")
    )


# -------------------------------------------------------------------------------------------------------------- rungs


def _rungs(threads: int, scheme: Scheme) -> tuple[Rung, ...]:
    """Settings of the session that are worth a try. Outputs bound to buffers of ours are none of them: they would have to be copied, since
    they belong to the caller, and the copy costs what the allocation does (docs/ladder.md). Nor is the switch that takes denormals for zero: it sets the
    arithmetic of the thread that serves, not of the model alone."""

    def config(name: str, value: str) -> dict[str, Any]:
        return {"config": {name: value}}

    memory = (
        # From a file of their own weights are mapped: they are not read twice, and processes share what is not packed for the kernels.
        Rung(kind="memory", name="mapped-weights", options={"mapped_weights": True}),
        Rung(kind="memory", name="no-arena", options={"memory_arena": False}),
        # Weights are not packed beforehand: less memory, and where packing paid each call is slower.
        Rung(kind="memory", name="no-prepacking", options=config("session.disable_prepacking", "1")),
    )
    tuning = (
        # Without NCHWc, whose copies of the weights are most of a large network's memory, and whose reordering may cost a small one time.
        Rung(kind="tuning", name="extended", options={"graph_optimization": "extended"}),
    )
    if threads == 1:  # what follows is about the threads of the pool, and there is none
        return memory + tuning
    return (
        *memory,
        *tuning,
        Rung(kind="tuning", name="no-spinning", options={"spinning": False}),
        # Blocks of an operator are handed out in ever smaller parts: threads wait less for the last.
        Rung(kind="tuning", name="dynamic-blocks", options=config("session.dynamic_block_base", "4")),
    )


# ------------------------------------------------------------------------------------------------------------ refusals


def _refuse_options(given: Mapping[str, Any], backend: str) -> str | None:
    for key, value in given.items():
        allowed = _OPTIONS.get(key)
        if allowed is None:
            return f"{backend} has no option {key!r}; it has {', '.join(_OPTIONS)}"
        if isinstance(allowed, tuple) and value not in allowed:
            return f"{backend}'s option {key} can't be {value!r}; it can be {', '.join(allowed)}"
        if allowed in (bool, dict) and not isinstance(value, Mapping if allowed is dict else bool):
            wanted = "a mapping" if allowed is dict else "true or false"
            return f"{backend}'s option {key} must be {wanted}, not {value!r}"
    return None


# --------------------------------------------------------------------------------------------------------- the session


def _session_options(asked: Mapping[str, Any], threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    level = _LEVELS[asked.get("graph_optimization", "all")]
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.enable_cpu_mem_arena = asked.get("memory_arena", True)
    options.log_severity_level = 3  # a dump at level ALL warns that it fits this machine only; it is thrown away
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if asked.get("spinning", True) else "0")
    for key, value in asked.get("config", {}).items():
        options.add_session_config_entry(str(key), str(value))
    return options


def _open_session(path: Path, asked: Mapping[str, Any], threads: int, dump: Path | None = None) -> Any:
    import onnxruntime

    options = _session_options(asked, threads)
    if dump is not None:
        options.optimized_model_filepath = str(dump)
        # Weights go to a file of their own, which is not read back.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=[PROVIDER])
    except Exception as error:  # onnxruntime's own errors share no base class
        raise NothingCompiledError(f"ONNX Runtime can't load the graph: {_sentence(error)}") from error
    session.disable_fallback()
    if session.get_providers() != [PROVIDER]:
        taken = ", ".join(session.get_providers())
        raise NothingCompiledError(f"ONNX Runtime was asked for {PROVIDER} alone and took {taken}")
    return session


def _open_elsewhere(provider: providers.Provider, path: Path, asked: Mapping[str, Any], threads: int) -> Any:
    """A session on another provider than the CPU's. Raises NothingCompiledError when the runtime put it, or too many of its nodes, elsewhere."""
    import onnxruntime

    if (reason := providers.refuse_absent(provider)) is not None:
        raise NothingCompiledError(reason)
    bound = float(asked.get("min_nodes_share", 1.0))
    wanted = providers.arguments(provider, asked, threads)

    def start(*, cpu: bool) -> Any:
        options = _session_options(asked, threads)
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
                f"ONNX Runtime can't load the graph on {provider.name}: {_sentence(error)}"
            ) from error
        try:
            left = providers.left_over(start(cpu=True), provider)  # never run: it says which operators it were
        except Exception:  # noqa: BLE001 - then they are not known
            left = ""
        raise NothingCompiledError(
            f"{provider.name} does not take every node, and none may run on the CPU{f': it leaves {left}' if left else ''}",
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


def _read_signature(session: Any, described: Signature) -> Signature:
    """Names, types and shapes as the runtime reports them; where it has no name for a free dimension, the model's own."""

    def read(values: Any, known: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(_read_spec(value, {spec.name: spec for spec in known}.get(value.name)) for value in values)

    return Signature(
        inputs=read(session.get_inputs(), described.inputs), outputs=read(session.get_outputs(), described.outputs)
    )


def _read_spec(value: Any, known: TensorSpec | None) -> TensorSpec:
    inner = value.type.removeprefix("tensor(").removesuffix(")")
    names = known.shape if known is not None and len(known.shape) == len(value.shape) else None
    shape = tuple(
        dim if isinstance(dim, int) else str((names[axis] if names else dim) or f"{value.name}_{axis}")
        for axis, dim in enumerate(value.shape)
    )
    return TensorSpec(name=value.name, dtype=_DTYPES.get(inner, value.type), shape=shape)


def _demand_same(model: Signature, runtime: Signature) -> None:
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


# ------------------------------------------------------------------------------------------------------- what really ran


def _read_back(session: Any, dump: Path, scheme: Scheme) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the optimised graph holds, and what a reader should know of it. Raises when the precision was not taken."""
    import onnx

    nodes = list(onnx.load(dump, load_external_data=False).graph.node)
    assigned: Counter[str] = Counter()
    if hasattr(session, "get_provider_graph_assignment_info"):
        for part in session.get_provider_graph_assignment_info():
            assigned[part.ep_name] += len(part.get_nodes())
    else:  # before 1.24 it can't say; with one provider and no fallback, that one has every node
        assigned[PROVIDER] = len(nodes)
    if set(assigned) - {PROVIDER}:
        raise NothingCompiledError(
            f"nodes were given to {', '.join(sorted(set(assigned) - {PROVIDER}))}, not to {PROVIDER}"
        )
    integer = sum(node.op_type in _INTEGER_OPS for node in nodes)
    in_blocks = [node for node in nodes if node.op_type in _BLOCK_OPS]
    in_float = Counter(node.op_type for node in nodes if node.op_type in _FLOAT_OPS)
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
            f"the source's own graph is quantised: {integer + len(in_blocks)} matrix and convolution operators do not run in float"
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


def _read_places(
    session: Any, provider: providers.Provider, asked: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the session says of every node's place, and a word where some are not the provider's."""
    places, ops = providers.placement(session) or (Counter(), Counter())
    share = providers.demand(provider, places, float(asked.get("min_nodes_share", 1.0)))
    heavy = sum(count for op, count in ops.items() if op in _FLOAT_OPS)
    executed = {
        "providers": dict(sorted(places.items())),
        "ops": dict(sorted(ops.items())),
        "precision": {"matrix_and_convolution": {"float": heavy}},
        "share": round(share, 6),
    }
    listed = ", ".join(f"{count} on {name}" for name, count in sorted(places.items()) if name != provider.name)
    notes = (f"{provider.name} runs {share:.0%} of the nodes; {listed}",) if listed else ()
    return executed, notes


def _judge_blocks(in_blocks: list[Any], in_float: Counter[str], expanded: int) -> list[str]:
    """What became of 4-bit weights. Raises when the runtime holds none of them as such."""
    if not in_blocks:
        raise NothingCompiledError(
            "the graph is int4, and ONNX Runtime keeps no weight in 4 bits: it expands each to float before the product "
            "(graph_optimization must be extended or all for it to merge them)"
        )
    levels = {attribute.i for node in in_blocks for attribute in node.attribute if attribute.name == "accuracy_level"}
    sums = "in int8" if levels == {int(_INT8_PRODUCTS)} else "in float"
    listed = ", ".join(f"{count} {op}" for op, count in sorted(in_float.items()))
    notes = [
        f"{len(in_blocks)} matrix operators read weights in 4 bits and multiply {sums}, {listed or 'none'} in float"
    ]
    if expanded:
        notes.append(f"{expanded} weights are expanded to float while the model runs")
    return notes


def _op(node: Any) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type)


# --------------------------------------------------------------------------------------------------------------- files


def _copy_graph(source: Path, into: Path, *, mapped: bool) -> None:
    """The graph as `model.onnx` with the external data that it names, and nothing else; `mapped`: all weights are external data."""
    import onnx
    from onnx.external_data_helper import _get_all_tensors, uses_external_data

    graph = onnx.load(source, load_external_data=False)
    files = set()
    for tensor in _get_all_tensors(graph):
        if uses_external_data(tensor):
            files.add({entry.key: entry.value for entry in tensor.external_data}["location"])
    for name in sorted(files):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise IntegrityError(f"the graph keeps weights outside its folder: {name}", where=str(source))
    if mapped:
        onnx.save_model(onnx.load(source), into / "model.onnx", save_as_external_data=True, location="weights.bin")
        if (into / "weights.bin").exists():
            (into / "weights.bin").chmod(0o644)  # onnx makes it readable by its owner alone
        return
    for name in sorted(files):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / name, into / name)
    shutil.copyfile(source, into / "model.onnx")


def _sentence(error: Exception) -> str:
    """An error of the runtime without its code, the places in its source and in our scratch folders, and its line breaks."""
    words = " ".join(str(error).split())
    words = words.rpartition("[ONNXRuntimeError] : ")[2].partition(" : ")[2].partition(" : ")[2] or words
    if newest := re.search(r"Opset (\d+) is under development.* for domain (\S+) is till opset (\d+)", words):
        have, domain, most = newest.groups()
        return f"its operator set is version {have} of {domain}, and this ONNX Runtime takes up to {most}: export it with an older one"
    words = re.sub(r"Load model from .*? failed: ?", "", words)
    place = re.search(r"\S*/onnxruntime_src/\S+:\d+ ", words)
    if place is None:
        return words
    # Behind the place stands a C++ signature, whose end is that of its own parentheses.
    depth, rest = 0, words[place.end() :]
    for position, letter in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == ")" and depth == 0:
            rest = re.sub(r"^( const)?( \[with .*?\])? ?", "", rest[position + 1 :])
            break
    return f"{words[: place.start()]}{rest}".strip() or words
