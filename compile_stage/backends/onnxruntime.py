"""ONNX Runtime, on its CPU provider or on another one (`onnxruntime_providers.py`).

The artifact is the ONNX graph itself; the runtime optimises it for the machine when it is opened. What comes out of
that is read back at compile time: the optimised graph is dumped and counted, so that a provider that was not taken, or
an int8 graph whose kernels stayed in float, is found here and not by a user. Another provider's graph can't be dumped;
of that, the place of every node is read back, when it is compiled and whenever it is opened.

As `.ort` (`onnxruntime_mobile.py`) it is optimised when it is written; for a phone it is compiled here, and not run.

`open` needs nothing but onnxruntime and numpy; `compile` also reads the graph with onnx.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compile_stage.backends import onnxruntime_cuda_graphs as cuda_graphs
from compile_stage.backends import onnxruntime_mobile as mobile
from compile_stage.backends import onnxruntime_providers as providers
from compile_stage.backends import onnxruntime_session as sessions
from compile_stage.core import plugins
from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.environment import hardware
from compile_stage.core.errors import IntegrityError, NothingCompiledError, UsageError
from compile_stage.core.generation import INPUT_IDS, has_cache
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Backend, Samples, Session
from compile_stage.core.records import Artifact, PortableModel, Scheme, Target, TuningOption
from compile_stage.core.tensors import Signature, form_of, has_form
from compile_stage.plugin_support import onnx_weights
from compile_stage.plugin_support.artifacts import Compiled, describe, refuse_form, refuse_types
from compile_stage.plugin_support.known_sizes import KNOWN_SIZES, Sizes, asked_sizes, known_sizes, shapes_of
from compile_stage.plugin_support.options import CHECKED_ELSEWHERE, FLAG, MAPPING, Number, OneOf, Option, refuse_options
from compile_stage.plugin_support.recorded_calls import record_where_possible
from compile_stage.plugin_support.sessions import demand_call

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch, Form

# Options of a target. `config` hands entries to the session untouched.
_OPTIONS: Mapping[str, Option] = {
    "graph_optimization": OneOf(*sessions.LEVELS),
    "spinning": FLAG,
    "memory_arena": FLAG,
    "threads": Number(low=1),
    "inter_op_threads": Number(low=1),
    "affinity": FLAG,
    "mapped_weights": FLAG,
    "fused_attention": FLAG,
    "fixed_shapes": FLAG,
    "config": MAPPING,
    "provider": CHECKED_ELSEWHERE,
    "provider_options": MAPPING,
    "min_nodes_share": CHECKED_ELSEWHERE,
    "cuda_graphs": FLAG,
    "format": OneOf("onnx", "ort"),
}
_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc")

# How MatMulNBits computes: 4 rounds its input to int8 by blocks too, with integer products; 1 stays in float32. The
# runtime's own default, pinned.
_ACCURACY_LEVEL = "session.qdq_matmulnbits_accuracy_level"

_LACKS = {
    "bf16": "its CPU kernels have no bfloat16, and reject a graph in it",
    "fp8": "its CPU kernels have no 8-bit floats, and its optimiser takes such a graph for int8 and answers wrongly",
}

_NO_HALF_IN_ORT = (
    "its CPU kernels have no float16, so it casts the graph to float32 when it writes it as .ort: set format: onnx"
)


class OnnxRuntime(Backend):
    """The backend."""

    name: ClassVar[str] = "onnxruntime"
    requires: ClassVar[tuple[str, ...]] = ("onnxruntime",)
    extra: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Option]] = _OPTIONS
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        forms=("onnx",),
        devices=tuple(dict.fromkeys(device for one in providers.PROVIDERS for device in one.devices)),
        precisions=("fp32", "fp16", "int8", "int8-dynamic", "int4"),
        runtime=providers.PACKAGES,
        lacks=_LACKS,
        follows_others=True,
        artifact_is_code=False,
        compiles_any_graph=True,
        cross_compiles=True,
        offers_tuning_options=True,
        caches=True,
        reopens_after_fork=True,
        profiler="compile_stage.backends.onnxruntime_profile:profile_artifact",
    )
    default_provider: ClassVar[str] = providers.CPU

    def toolchain(self) -> Mapping[str, str]:
        return package_versions(*self.capabilities.runtime, "onnx", "numpy")

    def refuse_target(self, target: Target) -> str | None:
        asked = target.options.get(self.name, {})
        if (reason := self._refuse_options(target)) is not None:
            return reason
        provider = self._provider(asked)
        if target.device not in provider.devices:
            said = (
                f"{self.name}'s {provider.name} runs on the device {' or '.join(provider.devices)}, not on "
                f"{target.device!r}"
            )
            suited = [one.short for one in providers.PROVIDERS if target.device in one.devices]
            return f"{said}; its option provider can be {', '.join(suited)} there" if suited else said
        if (reason := mobile.refuse(asked, target.device, provider)) is not None:
            return f"{self.name}: {reason}"
        if mobile.is_written_for(provider, target.device):
            return None
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

    def _refuse_options(self, target: Target) -> str | None:
        asked = target.options.get(self.name, {})
        return refuse_options(self.name, _OPTIONS, target) or providers.refuse(asked, self.name, self.default_provider)

    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        asked = target.options.get(self.name, {})
        provider = self._provider(asked)
        if target.device not in provider.devices:
            return ()
        if provider.name != providers.CPU and precision not in provider.precisions:
            return ()
        if precision == "fp16" and mobile.file_format(asked, target.device, provider) == "ort":
            return ()
        return {
            "fp32": (Scheme(precision="fp32", name="fp32", native=True),),
            # Computed in float32 on a CPU: half the size, no more speed. Whether that is worth shipping is the policy's
            # to say.
            "fp16": (Scheme(precision="fp16", name="fp16", weights="float16"),),
            "int8": _static_schemes(on_arm=target.device in mobile.DEVICES or _on_arm()),
            "int8-dynamic": (
                Scheme(
                    precision="int8-dynamic",
                    name="int8-dynamic",
                    activations="uint8",
                    weights="int8",
                    options={"reduce_range": target.device not in mobile.DEVICES and hardware().sums_saturate},
                ),
            ),
            "int4": _block_schemes(),
        }.get(precision, ())

    def capabilities_for(self, target: Target) -> BackendCapabilities:
        """Its options and kernels are the CPU's; what it writes for a phone, or for Apple's provider, needs no such
        device here."""
        asked = target.options.get(self.name, {})
        provider = providers.find(str(asked.get("provider", self.default_provider)))
        if provider is None:
            return self.capabilities
        on_cpu = provider.name == providers.CPU
        file = mobile.file_format(asked, target.device, provider)
        return replace(
            self.capabilities,
            devices=provider.devices,
            precisions=self.capabilities.precisions if on_cpu else provider.precisions,
            lacks=self._lacks(provider, file),
            # ONNX Runtime writes two tables of an .ort file in the order of a hash map: no two have the same bytes.
            follows_others=file == "onnx",
            compiles_any_graph=on_cpu,
            runs_anywhere=on_cpu and file == "onnx",
            cross_compiles=mobile.is_written_for(provider, target.device),
            offers_tuning_options=provider.short in ("cpu", "cuda") and target.device not in mobile.DEVICES,
        )

    def _lacks(self, provider: providers.Provider, file: str) -> Mapping[str, str]:
        written = {"fp16": _NO_HALF_IN_ORT} if file == "ort" else {}
        if provider.name == providers.CPU:
            return {**_LACKS, **written}
        served = " and ".join(provider.precisions)
        return {
            "*": f"what {provider.name} computes in another precision can't be read back from it; it is served in "
            f"{served}",
            **written,
        }

    def tuning_options(self, target: Target, scheme: Scheme) -> tuple[TuningOption, ...]:
        asked = target.options.get(self.name, {})
        if not self.capabilities_for(target).offers_tuning_options:
            return ()
        if self._provider(asked).short == "cuda":
            return _on_cuda(scheme)
        offered = _tuning_options(target.threads)
        if mobile.file_format(asked, target.device, self._provider(asked)) == "ort":  # it holds its weights
            return tuple(option for option in offered if "mapped_weights" not in option.options)
        return offered

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
        self, model: PortableModel, scheme: Scheme, target: Target, job_id: str, into: Path, calibration: Samples = None
    ) -> Artifact:
        asked = target.options.get(self.name, {})
        if (reason := self._refuse_options(target)) is not None:
            raise UsageError(reason)
        provider = self._provider(asked)
        if (reason := mobile.refuse(asked, target.device, provider)) is not None:
            raise UsageError(reason)
        file = mobile.file_format(asked, target.device, provider)
        if scheme.precision == "int4" or (scheme.precision == "int8-dynamic" and has_cache(model.signature)):
            asked = {**asked, "config": {_ACCURACY_LEVEL: sessions.INT8_PRODUCTS, **asked.get("config", {})}}
        into.mkdir(parents=True, exist_ok=True)
        entry, away = "model.onnx", mobile.not_runnable_here(target.device, provider, file)
        if file == "ort":
            entry = mobile.MODEL
        else:
            _copy_graph(Path(model.path), into, mapped=asked.get("mapped_weights", False))
        order = mobile.Order(
            source=Path(model.path), signature=model.signature, scheme=scheme, asked=asked, threads=target.threads
        )
        if away:
            if file == "ort" and provider.name != providers.CPU:  # they want fixed shapes
                order = replace(order, fixed=asked_sizes(model.signature, target, target.batch_sizes))
            signature, executed, notes = mobile.compile_away(order, into, provider, target.device)
            asked = {**asked, "provider": provider.name, "device": target.device}
        elif file == "ort":
            signature, executed, notes = mobile.write(order, into)
        elif provider.name != providers.CPU:
            (signature, executed, notes), asked = _read_from_provider(
                provider, into / entry, asked, target, model.signature
            )
        else:
            (signature, executed, notes), asked = self._read_from_cpu(into / entry, scheme, asked, target, model)
        sessions.demand_same(model.signature, signature)
        compiled = Compiled(
            entry=entry,
            signature=signature,
            options=asked,
            executed=executed,
            notes=notes,
            not_runnable_here=away,
        )
        return describe(self, model, scheme, job_id, into, compiled)

    def _read_from_cpu(
        self, path: Path, scheme: Scheme, asked: Mapping[str, Any], target: Target, model: PortableModel
    ) -> tuple[mobile.ReadBack, Mapping[str, Any]]:
        """What the CPU provider makes of the graph, whose file may get the runtime's own attention; and the artifact's
        options."""
        signature = model.signature
        fused, said = self._fuse_attention(path, model, scheme, asked, target.threads)
        asked = {**asked, **fused}
        if known := known_sizes(signature, target):
            asked = {**asked, KNOWN_SIZES: known}
        fixed = next(iter(sessions.fixed_sizes(asked)), sessions.NO_SIZES)
        with tempfile.TemporaryDirectory(prefix="compile-stage-") as scratch:
            dump = Path(scratch) / "optimized.onnx"
            session = sessions.open_here(path, asked, target.threads, dump=dump, fixed=fixed)
            signature = sessions.read_signature(session, signature, fixed)
            executed, notes = sessions.read_back(session, dump, scheme)
        return (signature, executed, (*notes, *said)), asked

    def _fuse_attention(
        self, path: Path, model: PortableModel, scheme: Scheme, asked: Mapping[str, Any], threads: int
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The attention of a language model as the runtime's own, in the file; what a session has to know of that, and
        a note."""
        # By its name: a published model carries what is imported here, and never compiles.
        decoder = importlib.import_module("compile_stage.backends.onnxruntime_decoder")
        if not decoder.is_offered(model.signature, scheme.precision, asked):
            return {}, ()
        reason, more = decoder.fuse(
            path, model.signature, model.places, partial(_answers, asked=asked, threads=threads)
        )
        if reason is not None:
            return {}, (f"attention stays in single operators: {reason}",)
        note = "attention is ONNX Runtime's own operator (GroupQueryAttention): it takes no padding"
        return {sessions.CACHE_IN_PLACE: True}, (note, *more)

    @contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Session]:
        path, provider = Path(artifact.path) / artifact.entry, self._provider(artifact.options)
        file = "ort" if artifact.entry == mobile.MODEL else "onnx"
        if why := mobile.not_runnable_here(str(artifact.options.get("device", "")), provider, file):
            raise NothingCompiledError(
                f"this artifact can't be run here: {why}", fix="run it on the device", where=artifact.job_id
            )
        options, fixed = artifact.options, list[dict[str, int]]()
        if provider.name == providers.CPU:
            start = partial(sessions.open_here, path, options, threads)
            fixed = sessions.fixed_sizes(options) if file == "onnx" else fixed
        else:
            start = partial(sessions.open_elsewhere, provider, path, options, threads)
            if options.get("cuda_graphs"):
                start = partial(_recording, start, options, artifact.signature)
        session = _OnnxSession(start, artifact, fixed)
        try:
            yield session
        finally:
            session.close()


class OnnxRuntimeOpenVino(OnnxRuntime):
    """The same on OpenVINO's provider, whose package takes the place of onnxruntime's and so has an environment of its
    own (docs/decisions/0022)."""

    name: ClassVar[str] = "onnxruntime-openvino"
    capabilities: ClassVar[BackendCapabilities] = replace(
        OnnxRuntime.capabilities,
        runtime=("onnxruntime-openvino",),
        distributions=("onnxruntime-openvino",),
        reopens_after_fork=False,  # never run so
    )
    default_provider: ClassVar[str] = providers.OPENVINO


_MOST_SHAPES = 64  # whose session is looked up, where some sizes are free


class _OnnxSession:
    """One open model: a session for each of the sizes that are known beforehand, and one for free sizes when a batch of
    another comes. ONNX Runtime allocates new outputs for every call, so they are the caller's.

    Args:
        start: Opens a session; with `fixed`, for these sizes of free dimensions.
        fixed: The known sizes.
    """

    def __init__(self, start: Callable[..., Any], artifact: Artifact, fixed: Sequence[Sizes]) -> None:
        self._start, self._in_place = start, bool(artifact.options.get(sessions.CACHE_IN_PLACE))
        self._fixed = [(sizes, start(fixed=sizes)) for sizes in fixed]
        self._free: Any = None if fixed else start()
        self._closed = False
        sizes, session = self._fixed[0] if fixed else (sessions.NO_SIZES, self._free)
        self.signature = sessions.read_signature(session, artifact.signature, sizes)
        self._inputs = [spec.name for spec in self.signature.inputs]
        self._outputs = [spec.name for spec in self.signature.outputs]
        self._of_shapes: dict[tuple[tuple[int, ...], ...], Any] = {}  # sessions of known sizes
        self._last: tuple[Form | None, Any] = (None, None)
        """Form of the last batch that was answered, and its session's call: mostly the next has the same."""

    def run(self, batch: Batch) -> Batch:
        form, call = self._last
        known = has_form(batch, form)
        if not known:
            demand_call(self.signature, batch, closed=self._closed)
            shapes = tuple([batch[name].shape for name in self._inputs])
            call = sessions.bare_call(self._of_shapes.get(shapes) or self._session_for(shapes))
        try:
            outputs = call(self._outputs, batch if type(batch) is dict else dict(batch))
        except Exception as error:  # onnxruntime's own errors share no base class
            raise NothingCompiledError(f"ONNX Runtime could not run the graph: {sessions.sentence(error)}") from error
        if not known:
            self._last = (form_of(batch), call)
        if len(outputs) == 1:  # 0.3 µs less than the other way
            return {self._outputs[0]: outputs[0]}
        return dict(zip(self._outputs, outputs, strict=True))

    def _session_for(self, shapes: tuple[tuple[int, ...], ...]) -> Any:
        given = {
            dim: size
            for spec, shape in zip(self.signature.inputs, shapes, strict=True)
            for dim, size in zip(spec.shape, shape, strict=True)
        }
        for sizes, session in self._fixed:
            if all(given.get(dim) == size for dim, size in sizes.items()):
                if len(self._of_shapes) < _MOST_SHAPES:
                    self._of_shapes[shapes] = session
                return session
        if self._free is None:
            self._free = self._start()
        return self._free

    def step(self, inputs: Batch, cache: Any) -> tuple[Array, Any]:
        """One call of a graph with a cache (`core.generation`): its buffers, or the runtime's own values, are handed
        on."""
        if self._closed:
            raise UsageError("this session is closed; call it inside its context")
        try:
            if not self._in_place:
                return sessions.step(self._free, self.signature, inputs, cache)
            held = cache or sessions.CacheInPlace(self._free, self.signature, len(inputs[INPUT_IDS]))
            return held.step(inputs), held
        except Exception as error:  # onnxruntime's own errors share no base class
            raise NothingCompiledError(f"ONNX Runtime could not run the graph: {sessions.sentence(error)}") from error

    def close(self) -> None:
        self._closed, self._free, self._last = True, None, (None, None)
        self._fixed.clear()
        self._of_shapes.clear()


# ------------------------------------------------------------------------------------------------------------ schemes


def _on_arm() -> bool:
    return hardware().machine in ("aarch64", "arm64")


def _static_schemes(*, on_arm: bool) -> tuple[Scheme, ...]:
    """One static scheme: the integer convolution answers in integers, so the placement is `chain`, which leaves a
    transformer's sums and normalisations in float. On x86 unsigned activations; symmetric int8 ones are twice as slow
    there. Products of two activations stay in float where the CPU's integers are slow: 2 % less for a transformer, and
    more accurate (docs/int8.md)."""
    if on_arm:
        # With zero points, not symmetric: a ReLU is merged into the convolution before it only where the smallest
        # integer stands for 0.
        return (Scheme(precision="int8", name="int8-s8s8", activations="int8", weights="int8"),)
    safe = {"reduce_range": hardware().sums_saturate, "products": not hardware().sums_saturate}
    return (Scheme(precision="int8", name="int8-u8s8", activations="uint8", weights="int8", options=safe),)


def _block_schemes() -> tuple[Scheme, ...]:
    """4-bit weights, as MatMulNBits takes them. With blocks of 128 a token takes 10 to 24 % less time, and weights lose
    1.9 dB (docs/lowerings.md). HQQ alone: rounding to nearest runs the same, and is hardly ever more accurate."""
    return tuple(
        Scheme(precision="int4", name=name, weights="uint4", options={"method": "hqq", "block": block})
        for name, block in (("int4-hqq", 32), ("int4-hqq-128", 128))
    )


# ------------------------------------------------------------------------------------------------------- tuning options


def _tuning_options(threads: int) -> tuple[TuningOption, ...]:
    """Settings of the session that are worth a try. Outputs bound to buffers of ours are none of them: they would have
    to be copied, since they belong to the caller, and the copy costs what the allocation does (docs/option-tuning.md).
    Nor are threads between operators: all nodes of a CPU graph run one after the other in any execution mode.
    Nor is the switch that takes denormals for zero: it sets the arithmetic of the thread that serves, not of the model
    alone."""

    def setting(kind: Literal["memory", "tuning"], name: str, **options: Any) -> TuningOption:
        return TuningOption(kind=kind, name=name, options=options, opening=options)

    def fewer(name: str, count: int) -> TuningOption:
        return replace(setting("tuning", name, threads=count), worth_a_try="short-calls")

    memory = (
        # From a file of their own weights are mapped: they are not read twice, and processes share what is not packed
        # for the kernels.
        TuningOption(kind="memory", name="mapped-weights", options={"mapped_weights": True}),
        setting("memory", "no-arena", memory_arena=False),
        # Weights are not packed beforehand: less memory, and where packing paid each call is slower.
        setting("memory", "no-prepacking", config={"session.disable_prepacking": "1"}),
    )
    tuning = (
        # Without NCHWc, whose copies of the weights are most of a large network's memory, and whose reordering may cost
        # a small one time.
        setting("tuning", "extended", graph_optimization="extended"),
    )
    if threads == 1:  # what follows is about the threads of the pool, and there is none
        return memory + tuning
    return (
        *memory,
        *tuning,
        setting("tuning", "no-spinning", spinning=False),
        # Blocks of an operator are handed out in ever smaller parts: threads wait less for the last.
        setting("tuning", "dynamic-blocks", config={"session.dynamic_block_base": "4"}),
        # Small operators lose more by being shared out than they gain.
        fewer("half-threads", threads // 2),
        *([fewer("one-thread", 1)] if threads > 3 else []),
        setting("tuning", "affinity", affinity=True),
    )


def _on_cuda(scheme: Scheme) -> tuple[TuningOption, ...]:
    """Settings of a session on an NVIDIA GPU. Its kernels for float16 take all channels of a pixel together."""
    if scheme.precision != "fp16":
        return ()
    given = {"provider_options": {"prefer_nhwc": True}}
    return (TuningOption(kind="tuning", name="nhwc", options=given, opening=given, worth_a_try="layout"),)


# ---------------------------------------------------------------------------------------------------------- CUDA graphs


def _read_from_provider(
    provider: providers.Provider, path: Path, asked: Mapping[str, Any], target: Target, signature: Signature
) -> tuple[mobile.ReadBack, Mapping[str, Any]]:
    """Where another provider than the CPU's places the nodes of the graph; and the artifact's options."""
    options, said = {**asked, "provider": provider.name}, tuple[str, ...]()
    if provider.short == "cuda":
        start = partial(_opened_recording, provider, path, signature, target.threads)
        options, said = record_where_possible(options, signature, target, start)
    session = sessions.open_elsewhere(provider, path, options, target.threads)
    executed, notes = sessions.read_places(session, provider, options)
    return (sessions.read_signature(session, signature), executed, (*notes, *said)), options


@contextmanager
def _opened_recording(
    provider: providers.Provider, path: Path, signature: Signature, threads: int, options: Mapping[str, Any]
) -> Iterator[cuda_graphs.CudaGraphs]:
    yield _recording(partial(sessions.open_elsewhere, provider, path, options, threads), options, signature)


def _recording(start: Callable[[], Any], options: Mapping[str, Any], signature: Signature) -> cuda_graphs.CudaGraphs:
    """A session whose calls are recorded and replayed, for the sizes that the options name."""
    device = int(options.get("provider_options", {}).get("device_id", 0))
    shapes = shapes_of(signature, options.get(KNOWN_SIZES, ()))
    return cuda_graphs.CudaGraphs(start(), ("cuda", device), shapes)


# --------------------------------------------------------------------------------------------------------------- files


def _answers(
    path: Path, names: Sequence[str], calls: Sequence[Mapping[str, Any]], *, asked: Mapping[str, Any], threads: int
) -> list[list[Any]]:
    """What a graph answers, with float products: with rounded ones the least difference moves a whole step."""
    exact = {**asked, "config": {**asked.get("config", {}), _ACCURACY_LEVEL: sessions.FLOAT_PRODUCTS}}
    session = sessions.open_here(path, exact, threads)
    return [session.run(list(names), dict(call)) for call in calls]


def _copy_graph(source: Path, into: Path, *, mapped: bool) -> None:
    """The graph as `model.onnx` with the external data that it names, and nothing else; `mapped`: all weights are
    external data."""
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
        onnx_weights.write(onnx_weights.load(source), into / "model.onnx", "weights.bin", 0)
        return
    for name in sorted(files):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / name, into / name)
    shutil.copyfile(source, into / "model.onnx")
