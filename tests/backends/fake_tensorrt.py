"""TensorRT and PyCUDA with the members that the type stubs list and no others, over memory of this process: enough to
see that our calls are made in an order that works.

An engine of it holds the ONNX file and is run by ONNX's reference implementation. It proves nothing about TensorRT.
"""

from __future__ import annotations

import enum
import json
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np


class Severity(enum.IntEnum):
    WARNING = 2


class Logger:
    Severity, WARNING = Severity, Severity.WARNING
    INTERNAL_ERROR = ERROR = INFO = VERBOSE = Severity.WARNING

    def __init__(self, min_severity: Any = None) -> None: ...


class ILogger:
    Severity = Severity

    def __init__(self) -> None: ...


def _enum(name: str, *members: str) -> Any:
    return enum.IntEnum(name, {member: index for index, member in enumerate(members)})


MEMORY: dict[int, bytearray] = {}
STACK: list[int] = []
"""The threads in which a context is current: in CUDA each thread has a stack of its own."""


def demand_context() -> None:
    assert threading.get_ident() in STACK, "no context is current in this thread"


class DeviceAllocation:
    def __init__(self, size: int) -> None:
        demand_context()
        self.address = 1000 + len(MEMORY)
        MEMORY[self.address] = bytearray(size)

    def __int__(self) -> int:
        return self.address

    def free(self) -> None:
        demand_context()
        MEMORY[self.address] = bytearray()


class Context:
    def push(self) -> None:
        STACK.append(threading.get_ident())

    @staticmethod
    def pop() -> None:
        STACK.remove(threading.get_ident())


class Device:
    def __init__(self, number: int) -> None: ...

    def retain_primary_context(self) -> Context:
        return Context()


class Stream:
    handle = 7

    def __init__(self) -> None:
        demand_context()


class Event:
    def __init__(self, flags: int = 0) -> None: ...

    def record(self, stream: Any = None) -> Event:
        return self

    def synchronize(self) -> Event:
        return self


def memcpy_htod_async(dest: DeviceAllocation, src: Any, stream: Any = None) -> None:
    demand_context()
    MEMORY[dest.address][: src.nbytes] = src.tobytes()


def memcpy_dtoh_async(dest: Any, src: DeviceAllocation, stream: Any = None) -> None:
    demand_context()
    raw = bytes(MEMORY[src.address][: dest.nbytes])
    dest[...] = np.frombuffer(raw, dest.dtype).reshape(dest.shape)


class Engine:
    """Made of an ONNX file's bytes and the ranges of its profile."""

    def __init__(self, content: bytes) -> None:
        import onnx

        head, _, graph = bytes(content).partition(b"\n")
        self.ranges = json.loads(head)
        self.model = onnx.load_from_string(graph)
        graph_ = self.model.graph
        self.inputs = {value.name: value for value in graph_.input}
        self.outputs = {value.name: value for value in graph_.output}
        self.num_io_tensors = len(self.inputs) + len(self.outputs)

    def get_tensor_name(self, index: int) -> str:
        return [*self.outputs, *self.inputs][index]  # not in the model's order: the caller must go by name

    def get_tensor_mode(self, name: str) -> Any:
        return MODULE.TensorIOMode.INPUT if name in self.inputs else MODULE.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        import onnx

        kind = {**self.inputs, **self.outputs}[name].type.tensor_type.elem_type
        return {onnx.TensorProto.FLOAT: MODULE.DataType.FLOAT, onnx.TensorProto.INT64: MODULE.DataType.INT64}[kind]

    def get_tensor_shape(self, name: str) -> Any:
        sizes = {**self.inputs, **self.outputs}[name].type.tensor_type.shape.dim
        return [size.dim_value if size.HasField("dim_value") else -1 for size in sizes]

    def create_engine_inspector(self) -> Any:
        types_ = {True: "Row major Int8 format", False: "Row major linear FP32"}
        layers = [
            {
                "Name": node.name,
                "LayerType": node.op_type,
                "Inputs": [{"Format/Datatype": types_["Linear" in node.op_type]}],
                "Outputs": [],
            }
            for node in self.model.graph.node
        ]
        return types.SimpleNamespace(get_engine_information=lambda _: json.dumps({"Layers": layers}))

    def create_execution_context(self) -> ExecutionContext:
        return ExecutionContext(self)


class ExecutionContext:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self.engine.ranges[name]
        self.shapes[name] = tuple(shape)
        return all(least <= size <= most for least, size, most in zip(low, shape, high, strict=True))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        batch = next(iter(self.shapes.values()))[0]  # the shapes of inputs must be told first
        return tuple(batch if size < 0 else size for size in self.engine.get_tensor_shape(name))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        from onnx.helper import tensor_dtype_to_np_dtype
        from onnx.reference import ReferenceEvaluator

        demand_context()
        feeds = {}
        for name, value in self.engine.inputs.items():
            dtype = tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            count = int(np.prod(self.shapes[name])) * dtype.itemsize
            raw = bytes(MEMORY[self.addresses[name]][:count])
            feeds[name] = np.frombuffer(raw, dtype).reshape(self.shapes[name])
        answers = ReferenceEvaluator(self.engine.model).run(None, feeds)
        for name, answer in zip(self.engine.outputs, answers, strict=True):
            raw = np.ascontiguousarray(answer).tobytes()
            assert len(MEMORY[self.addresses[name]]) >= len(raw), f"the buffer of {name} is too small"
            MEMORY[self.addresses[name]][: len(raw)] = raw
        return True


class Runtime:
    engine_host_code_allowed = False

    def __init__(self, logger: Any) -> None: ...

    def deserialize_cuda_engine(self, content: bytes) -> Engine | None:
        return Engine(content) if content.startswith(b"{") else None


class OptimizationProfile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, low: Any, opt: Any, high: Any) -> None:
        self.shapes[name] = [list(low), list(opt), list(high)]

    def __bool__(self) -> bool:
        return True


class TimingCache:
    def __init__(self, content: bytes) -> None:
        self.content = bytes(content)

    def combine(self, other: TimingCache, ignore_mismatch: bool) -> bool:
        self.content = max(self.content, other.content, key=len)
        return True

    def serialize(self) -> Any:
        return memoryview(self.content + b"timed")


class BuilderConfig:
    DLA_core, default_device_type, engine_capability = -1, 0, "STANDARD"

    def get_tactic_sources(self) -> int:
        return 0

    def get_preview_feature(self, feature: Any) -> bool:
        return False

    def __init__(self) -> None:
        self.profiles: list[OptimizationProfile] = []
        self.flags: list[Any] = []
        self.cleared: list[Any] = []
        self.pools: dict[Any, int] = {}
        self.num_optimization_profiles = 0
        self.cache = TimingCache(b"")

    def set_flag(self, flag: Any) -> None:
        self.flags.append(flag)

    def clear_flag(self, flag: Any) -> None:
        self.cleared.append(flag)

    def get_flag(self, flag: Any) -> bool:
        return flag in self.flags

    def add_optimization_profile(self, profile: OptimizationProfile) -> int:
        self.profiles.append(profile)
        return 0

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self.pools[pool] = size

    def get_memory_pool_limit(self, pool: Any) -> int:
        return self.pools.get(pool, 0)

    def create_timing_cache(self, content: bytes) -> TimingCache:
        return TimingCache(content)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return True

    def get_timing_cache(self) -> TimingCache:
        return self.cache


class Network:
    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.path = ""
        self.model: Any = None

    @property
    def num_inputs(self) -> int:
        return len(self.model.graph.input)

    @property
    def num_outputs(self) -> int:
        return len(self.model.graph.output)

    num_layers = 0

    def get_input(self, index: int) -> Any:
        value = self.model.graph.input[index]
        sizes = [size.dim_value if size.HasField("dim_value") else -1 for size in value.type.tensor_type.shape.dim]
        return types.SimpleNamespace(
            name=value.name,
            shape=tuple(sizes),
            is_shape_tensor=False,
            is_execution_tensor=True,
            dtype=MODULE.DataType.FLOAT,
        )

    def get_output(self, index: int) -> Any:
        return types.SimpleNamespace(name=self.model.graph.output[index].name, dtype=MODULE.DataType.FLOAT, shape=())

    def __iter__(self) -> Any:
        return iter(())


class Parser:
    num_errors = 0

    def __init__(self, network: Network, logger: Any) -> None:
        self.network = network

    def set_flag(self, flag: Any) -> None: ...

    def clear_flag(self, flag: Any) -> None: ...

    def parse_from_file(self, path: str) -> bool:
        import onnx

        self.network.path, self.network.model = path, onnx.load(path)
        return True


BUILT: list[tuple[Network, BuilderConfig]] = []


class Builder:
    def __init__(self, logger: Any) -> None: ...

    def create_network(self, flags: int = 0) -> Network:
        return Network(flags)

    def create_builder_config(self) -> BuilderConfig:
        return BuilderConfig()

    def create_optimization_profile(self) -> OptimizationProfile:
        return OptimizationProfile()

    def build_serialized_network(self, network: Network, config: BuilderConfig) -> bytes:
        BUILT.append((network, config))
        return json.dumps(config.profiles[0].shapes).encode() + b"\n" + network.model.SerializeToString()


MODULE: Any = types.ModuleType("tensorrt")
MODULE.__dict__.update(
    __version__="11.4.0.106", Logger=Logger, ILogger=ILogger, Builder=Builder, Runtime=Runtime, OnnxParser=Parser,
    NetworkDefinitionCreationFlag=_enum("NetworkDefinitionCreationFlag", "STRONGLY_TYPED"),
    OnnxParserFlag=_enum("OnnxParserFlag", "NATIVE_INSTANCENORM"),
    BuilderFlag=_enum("BuilderFlag", "TF32", "REFIT", "VERSION_COMPATIBLE", "STRIP_PLAN"),
    MemoryPoolType=_enum("MemoryPoolType", "WORKSPACE"),
    HardwareCompatibilityLevel=_enum("HardwareCompatibilityLevel", "NONE", "AMPERE_PLUS", "SAME_COMPUTE_CAPABILITY"),
    ProfilingVerbosity=_enum("ProfilingVerbosity", "LAYER_NAMES_ONLY", "NONE", "DETAILED"),
    LayerInformationFormat=_enum("LayerInformationFormat", "ONELINE", "JSON"),
    LayerType=_enum("LayerType", "QUANTIZE", "DEQUANTIZE", "SHAPE"),
    DeviceType=_enum("DeviceType", "GPU", "DLA"),
    TacticSource=_enum("TacticSource", "JIT_CONVOLUTIONS"),
    PreviewFeature=_enum("PreviewFeature", "ALIASED_PLUGIN_IO_10_03"),
    TensorIOMode=_enum("TensorIOMode", "NONE", "INPUT", "OUTPUT"),
    DataType=_enum("DataType", "FLOAT", "HALF", "INT8", "INT32", "BOOL", "UINT8", "FP8", "BF16", "INT64", "INT4", "FP4",
        "E8M0"),
    IDebugListener=object, IOutputAllocator=object,
    init_libnvinfer_plugins=lambda logger, namespace: True,
)  # fmt: skip


def install(replace: Callable[[dict[str, Any], str, Any], None]) -> None:
    """Put the modules where they are imported from."""
    driver: Any = types.ModuleType("pycuda.driver")
    for value in (Device, Context, Stream, Event, DeviceAllocation, memcpy_htod_async, memcpy_dtoh_async):
        setattr(driver, value.__name__, value)
    driver.init, driver.mem_alloc = lambda flags=0: None, DeviceAllocation
    driver.event_flags = types.SimpleNamespace(DISABLE_TIMING=2)
    pycuda: Any = types.ModuleType("pycuda")
    pycuda.driver = driver
    for name, module in (("tensorrt", MODULE), ("pycuda", pycuda), ("pycuda.driver", driver)):
        replace(sys.modules, name, module)  # type: ignore[arg-type]
