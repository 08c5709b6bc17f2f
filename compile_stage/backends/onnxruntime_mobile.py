"""ONNX Runtime's own file format (`.ort`), and phones: what is written for them here, and what can be said of it
without one.

An `.ort` file holds the graph after optimisation; opening it optimises no further, and needs no ONNX in the runtime (a
minimal build). Beside it lies `required_operators.config`, from which such a build is made. It is written as
`onnxruntime.tools.convert_onnx_models_to_ort` of 1.31 does: `fixed` for what runs on the CPU, with all optimisations in
the graph; `runtime` for providers that compile parts of it themselves, with the basic ones in the graph and the rest
beside it, to be replayed on what such a provider leaves.

How much a provider would take is estimated with the lists that ONNX Runtime ships (`onnxruntime.tools.mobile_helpers`):
by operator, shape and rank. It is no measurement: nothing here runs such a provider.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from compile_stage.backends import onnxruntime_providers as providers
from compile_stage.backends import onnxruntime_session as sessions
from compile_stage.core.errors import IntegrityError, NothingCompiledError
from compile_stage.core.records import Scheme
from compile_stage.core.tensors import Signature

DEVICES: Mapping[str, str] = {"android": "Android", "apple": "iOS and macOS"}
"""Of a target: what is compiled for them on any machine; and their systems."""

MODEL, OPERATORS = "model.ort", "required_operators.config"

_COMPILING = ("NnapiExecutionProvider", "CoreMLExecutionProvider")
"""They compile parts of the graph on the device."""
_WRITTEN_FOR = (providers.CPU, "XnnpackExecutionProvider", *_COMPILING)

REPLAY: Mapping[str, str] = {"session.enable_saved_runtime_optimizations": "1"}
"""What a session needs to apply what the style `runtime` saved."""


# ---------------------------------------------------------------------------------------------------- what can be asked


def file_format(given: Mapping[str, Any], device: str, provider: providers.Provider) -> str:
    """`onnx` or `ort`: the option's, and on Android `ort` when there is none."""
    return str(given.get("format", "ort" if device == "android" and provider.name in _WRITTEN_FOR else "onnx"))


def is_written_for(provider: providers.Provider, device: str) -> bool:
    """True when an artifact for that provider and device can be made on any machine."""
    return device in DEVICES and provider.name in _WRITTEN_FOR


def refuse(given: Mapping[str, Any], device: str, provider: providers.Provider) -> str | None:
    """The reason why this combination of options is invalid."""
    if file_format(given, device, provider) == "ort":
        if provider.name not in _WRITTEN_FOR:
            shorts = ", ".join(one.short for one in providers.PROVIDERS if one.name in _WRITTEN_FOR)
            return f"an .ort file is written for the providers {shorts}, not for {provider.name}: set format: onnx"
        if provider.name != providers.CPU and device not in DEVICES:
            return f"ONNX Runtime can't say which nodes of an .ort file {provider.name} took: set format: onnx"
        if given.get("mapped_weights", False):
            return (
                "an .ort file holds its weights, so they can't be mapped from a file of their own: leave out "
                "mapped_weights"
            )
    if (
        is_written_for(provider, device)
        and provider.name not in (*_COMPILING, providers.CPU)
        and "min_nodes_share" in given
    ):
        return (
            f"min_nodes_share can't be judged here: ONNX Runtime ships no list of what {provider.name} takes; leave it "
            "out"
        )
    return None


def not_runnable_here(device: str, provider: providers.Provider, file: str) -> str:
    """Why this machine can't run it; empty when it can."""
    if device not in DEVICES:
        return ""
    if device != "apple" or sys.platform != "darwin":
        return f"{provider.name} was asked for on {DEVICES[device]}, and this is {sys.platform}"
    if provider.name != providers.CPU and file == "ort":
        return f"ONNX Runtime can't say which nodes of an .ort file {provider.name} takes; with format: onnx it can"
    return ""


def style(provider: providers.Provider) -> str:
    """How the graph is optimised before it is written: `fixed` for the CPU. Other providers know few of the merged
    operators that this makes, so theirs is `runtime`; ONNX Runtime advises it for NNAPI and Core ML, and says nothing
    of XNNPACK."""
    return "fixed" if provider.name == providers.CPU else "runtime"


# -------------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to write, and for whom.

    Attributes:
        source: The ONNX file.
        signature: Of the model.
        asked: Options of the target.
        portable: Nothing in the file is for this machine alone.
        fixed: Free dimension → the size that the file is written for.
    """

    source: Path
    signature: Signature
    scheme: Scheme
    asked: Mapping[str, Any]
    threads: int
    portable: bool = False
    fixed: Mapping[str, int] = field(default_factory=dict)

    def session(self, set_up: Callable[[Any], None]) -> Any:
        """A session on this machine's CPU that writes the graph which it optimised. Raises NothingCompiledError."""
        import onnxruntime

        options = sessions.session_options(self.asked, self.threads)
        for name, size in self.fixed.items():
            options.add_free_dimension_override_by_name(name, size)
        if self.portable:
            options.add_session_config_entry("session.qdqisint8allowed", "1")  # as on ARM, where int8 is the fast type
        set_up(options)
        # The layout of this optimiser is that of x86, and of this machine's vectors.
        off = ["NchwcTransformer"] if self.portable else []
        try:
            return onnxruntime.InferenceSession(
                str(self.source), options, providers=[providers.CPU], disabled_optimizers=off, enable_fallback=0
            )
        except Exception as error:  # onnxruntime's own errors share no base class
            raise NothingCompiledError(f"ONNX Runtime can't write the graph: {sessions.sentence(error)}") from error

    def save(self, into: Path, **entries: str) -> Counter[tuple[str, int, str]]:
        """Write `into/model.ort`; its operators. `entries` are of the configuration, `minimal_build_optimizations`
        among them."""

        def set_up(options: Any) -> None:
            options.optimized_model_filepath = str(into / MODEL)
            options.add_session_config_entry("session.save_model_format", "ORT")
            for name, value in entries.items():
                options.add_session_config_entry(f"optimization.{name}", value)

        self.session(set_up)
        return operators(into / MODEL)


ReadBack: TypeAlias = tuple[Signature, dict[str, Any], tuple[str, ...]]
"""The signature as the runtime reports it, `Artifact.executed`, and notes."""


def write(order: Order, into: Path) -> ReadBack:
    """`into/model.ort` for the CPU provider, in the style `fixed`: opened as it will be, and its graph judged as that
    of an ONNX file is."""
    with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
        # Of an .ort file a session says neither where its nodes lie nor what they hold: it is asked of the same graph
        # as ONNX.
        dump = Path(scratch) / "optimized.onnx"
        session = order.session(lambda options: sessions.dump_to(dump, options))
        executed, notes = sessions.read_back(session, dump, order.scheme)
    found = order.save(into)
    held, shown = counted(found), executed["ops"]
    if any(held.get(op, 0) < count for op, count in shown.items()):
        raise IntegrityError(f"the .ort file holds {held}, and the runtime optimised the graph to {shown}")
    write_operators(found, into)
    opened = sessions.open_here(into / MODEL, order.asked, order.threads)
    executed["file"] = {"format": "ort", "style": "fixed"}
    return sessions.read_signature(opened, order.signature), executed, notes


def compile_away(order: Order, into: Path, provider: providers.Provider, device: str) -> ReadBack:
    """For a device that is not here: the file, opened here on the CPU, and what can be said of it without the device.

    `into` holds `model.onnx` already where that is the format. Raises NothingCompiledError when the estimated share is
    below `min_nodes_share`.
    """
    given = order.asked
    on_cpu = {key: value for key, value in given.items() if key not in ("provider", "provider_options")}
    order = replace(order, asked=on_cpu, portable=True)
    as_ort = file_format(given, device, provider) == "ort"
    replay = dict(REPLAY) if as_ort and style(provider) == "runtime" else {}
    if as_ort and not replay:
        signature, executed, notes = write(order, into)
    elif replay:
        signature, executed, notes = _write_for_replay(order, into)
    else:
        signature, executed, notes = _read_graph(order, on_cpu=provider.name == providers.CPU)
    executed["providers"] = {f"{provider.name}, not run": sum(executed["ops"].values())}
    executed["app_opens_with"] = {
        "provider_options": {**given.get("provider_options", {}), **provider.fixed},
        "config": {**replay, **on_cpu.get("config", {})},
    }
    if (found := estimate(order, provider, given)) is not None:
        notes += demand(found, order, float(given.get("min_nodes_share", 1.0)))
        executed["estimate"] = found
    if order.fixed:
        sizes_said = ", ".join(f"{dim} = {size}" for dim, size in sorted(order.fixed.items()))
        notes += (f"written for {sizes_said} alone, as the target asks",)
    return signature, executed, notes


def _write_for_replay(order: Order, into: Path) -> ReadBack:
    """`into/model.ort` in the style `runtime`."""
    found = order.save(into, minimal_build_optimizations="save")
    with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
        # What is replayed on the device brings operators that are not in the file, and a build must have them.
        write_operators(found + order.save(Path(scratch), minimal_build_optimizations="apply"), into)
    replaying = {**order.asked, "config": {**REPLAY, **order.asked.get("config", {})}}
    opened = sessions.open_here(into / MODEL, replaying, order.threads)
    executed = {**_told(counted(found)), "file": {"format": "ort", "style": "runtime"}}
    return sessions.read_signature(opened, order.signature), executed, ()


def _read_graph(order: Order, *, on_cpu: bool) -> ReadBack:
    """What an ONNX file becomes on a device: for its CPU as optimised there, for another provider the graph that it is
    shown."""
    import onnx

    with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
        dump = Path(scratch) / "optimized.onnx"
        if on_cpu:
            session = order.session(lambda options: sessions.dump_to(dump, options))
            executed, notes = sessions.read_back(session, dump, order.scheme)
        else:
            session = sessions.open_here(order.source, order.asked, order.threads)
            names = (
                f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
                for node in onnx.load(order.source, load_external_data=False).graph.node
            )
            executed, notes = _told(dict(sorted(Counter(names).items()))), ()
        executed["file"] = {"format": "onnx"}
        return sessions.read_signature(session, order.signature), executed, notes


def _told(ops: Mapping[str, int]) -> dict[str, Any]:
    heavy = sum(count for op, count in ops.items() if op.rpartition(".")[2] in sessions.FLOAT_OPS)
    return {"ops": dict(ops), "precision": {"matrix_and_convolution": {"float": heavy}}}


def operators(path: Path) -> Counter[tuple[str, int, str]]:
    """(domain, version of the operator, operator) → nodes of an `.ort` file, those of subgraphs included."""
    fbs = _flatbuffers()
    root = fbs.InferenceSession.InferenceSession.GetRootAsInferenceSession(bytearray(path.read_bytes()), 0)
    attribute_graph = fbs.AttributeType.AttributeType.GRAPH
    found: Counter[tuple[str, int, str]] = Counter()

    def walk(graph: Any) -> None:
        for number in range(graph.NodesLength()):
            node = graph.Nodes(number)
            found[(node.Domain().decode(), node.SinceVersion(), node.OpType().decode())] += 1
            for position in range(node.AttributesLength()):
                if node.Attributes(position).Type() == attribute_graph:
                    walk(node.Attributes(position).G())

    walk(root.Model().Graph())
    return found


def counted(found: Counter[tuple[str, int, str]]) -> dict[str, int]:
    """Operator → nodes, named as in `Artifact.executed`."""
    ops: Counter[str] = Counter()
    for (domain, _, op), count in found.items():
        ops[f"{domain}.{op}" if domain not in ("", "ai.onnx") else op] += count
    return dict(sorted(ops.items()))


def write_operators(found: Counter[tuple[str, int, str]], into: Path) -> None:
    """`into/required_operators.config`: what a minimal build includes (`--include_ops_by_config`)."""
    lines: dict[tuple[str, int], list[str]] = {}
    for domain, version, op in sorted(found):
        lines.setdefault((domain or "ai.onnx", version), []).append(op)
    text = "".join(f"{domain};{version};{','.join(ops)}\n" for (domain, version), ops in sorted(lines.items()))
    (into / OPERATORS).write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------- estimate


def estimate(order: Order, provider: providers.Provider, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """How much of the graph the provider would take on the device, by ONNX Runtime's own lists; None where it has no
    list.

    Returns `{"provider", "nodes", "taken", "share" (of nodes, 0 to 1), "partitions", "suits" (yes, maybe or no, as ONNX
    Runtime judges it), "left" (operator → nodes that are in no list), "free_shapes" (nodes lost to them),
    "too_many_dimensions" (nodes lost to them), "share_if_fixed", "unchecked" (conditions that were not looked at)}`.

    Raises:
        NothingCompiledError: It can't be estimated.
    """
    if provider.name not in _COMPILING:
        return None
    with _unchanged():
        model = _as_shown(order)
        strict, loose = _check_partitions(model, provider)
        # NNAPI takes no free shapes at all; Core ML's provider does unless an option forbids it, and is slower with
        # them.
        asked = str(given.get("provider_options", {}).get("RequireStaticInputShapes"))
        checked = strict if provider.short == "nnapi" or asked in ("1", "True") else loose
        if not checked.num_nodes:
            raise NothingCompiledError(
                f"no node is left for {provider.name}: the runtime folds all of the graph into constants"
            )
        left = Counter(
            f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            for node in model.graph.node
            if f"{node.domain or 'ai.onnx'}:{node.op_type}" in checked.unsupported_ops
        )
        return {
            "provider": provider.name,
            "nodes": checked.num_nodes,
            "taken": checked.num_supported_nodes,
            "share": round(checked.num_supported_nodes / checked.num_nodes, 6),
            "partitions": checked.num_partitions,
            "suits": checked.suitability().name.lower(),
            "left": dict(sorted(left.items())),
            "free_shapes": strict.nodes_unsupported_due_to_dynamic_input,
            "too_many_dimensions": checked.num_unsupported_nodes_due_to_rank,
            "share_if_fixed": round(loose.num_supported_nodes / loose.num_nodes, 6),
            "unchecked": checked.supported_ops_checker.get_caveats(),
        }


def _as_shown(order: Order) -> Any:
    """The graph as a provider is shown it, with the shapes that can be inferred."""
    from onnxruntime.tools.onnx_model_utils import ModelProtoWithShapeInfo

    if order.scheme.precision != "fp32":
        # In float16 the basic optimisations would cast it to float32 here, for want of kernels.
        return ModelProtoWithShapeInfo(order.source).model_with_shape_info
    with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
        shown = Path(scratch) / "basic.onnx"
        basic = replace(order, asked={**order.asked, "graph_optimization": "basic"})
        basic.session(lambda options: sessions.dump_to(shown, options))
        return ModelProtoWithShapeInfo(shown).model_with_shape_info


def _check_partitions(model: Any, provider: providers.Provider) -> tuple[Any, Any]:
    """What ONNX Runtime's checker says of the graph for the provider: where free shapes are none of its, and where they
    do not matter. Raises NothingCompiledError."""
    from onnxruntime.tools.mobile_helpers import usability_checker

    def check(*, need_sizes: bool) -> Any:
        if provider.short == "nnapi":
            return usability_checker.check_nnapi_partitions(model, need_sizes)
        return usability_checker.check_coreml_partitions(model, need_sizes, "coreml_supported_mlprogram_ops.md")

    try:
        return check(need_sizes=True), check(need_sizes=False)
    except ValueError as error:
        raise NothingCompiledError(
            f"what {provider.name} would take of the graph can't be estimated: {error}"
        ) from error


def demand(found: Mapping[str, Any], order: Order, bound: float) -> tuple[str, ...]:
    """What the report says of an estimate. Raises NothingCompiledError when its share is below the bound."""
    name = found["provider"]
    free = [
        f"{spec.name} {spec.shape}".replace("'", "")
        for spec in order.signature.inputs
        if any(isinstance(dim, str) and dim not in order.fixed for dim in spec.shape)
    ]
    left = ", ".join(f"{count} {op}" for op, count in found["left"].items())
    lost = [f"it does not take {left}"] if left else []
    if found["too_many_dimensions"]:
        lost.append(f"{found['too_many_dimensions']} nodes have more dimensions than it takes")
    if found["share"] < found["share_if_fixed"] and free:
        lost.append(
            f"{found['free_shapes']} nodes have free shapes, which come from the input {', '.join(free)}; with fixed "
            f"ones its share would be {100 * found['share_if_fixed']:.0f} %"
        )
    said = f"{name} would take an estimated {found['taken']} of {found['nodes']} nodes ({100 * found['share']:.0f} %)"
    why = "; ".join(lost)
    if found["taken"] < bound * found["nodes"]:
        raise NothingCompiledError(
            f"{said}, and min_nodes_share asks for {100 * bound:.0f} %{f': {why}' if why else ''}",
            fix="allow a smaller min_nodes_share, ask for one batch size and fixed shapes, or name another provider",
        )
    parts = f"{found['partitions']} part{'' if found['partitions'] == 1 else 's'}"
    notes = [
        f"{said} in {parts}{f'; {why}' if why else ''}; ONNX Runtime's own word on its use here is: {found['suits']}"
    ]
    if free and not lost and found["free_shapes"]:
        notes.append(f"the shapes of {found['free_shapes']} nodes are free ({', '.join(free)}): it is slower with them")
    return tuple(notes)


# ------------------------------------------------------------------------------------------------------------ the tools


def _flatbuffers() -> Any:
    """The reader of the file format, as ONNX Runtime ships it."""
    with _unchanged():
        import_module("onnxruntime.tools.ort_format_model")  # it puts the next ones on the path
        import_module("ort_flatbuffers_py.fbs.AttributeType")
        import_module("ort_flatbuffers_py.fbs.InferenceSession")
        return import_module("ort_flatbuffers_py.fbs")


@contextmanager
def _unchanged() -> Iterator[None]:
    """The tools are scripts: they set up logging, change the search path, and give a class of onnx another hash.
    Afterwards all is as it was."""
    import onnx

    root = logging.getLogger()
    handlers, level, path = list(root.handlers), root.level, list(sys.path)
    own_hash = "__hash__" in vars(onnx.NodeProto)
    try:
        yield
    finally:
        root.handlers[:], sys.path[:] = handlers, path
        root.setLevel(level)
        if not own_hash and "__hash__" in vars(onnx.NodeProto):
            del onnx.NodeProto.__hash__
