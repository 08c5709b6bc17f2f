"""Backends that misbehave, each in one way, installed through the same entry points as any third party's.

They are ONNX Runtime but for the one thing, so that only that thing can be what is caught.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from compile_stage.backends.onnxruntime import OnnxRuntime
from compile_stage.core.capabilities import BackendCapabilities
from compile_stage.core.records import Artifact, Scheme, Target, TuningOption


class _Fake(OnnxRuntime):
    def schemes(self, target: Target, precision: str) -> tuple[Scheme, ...]:
        return (Scheme(precision="fp32", name="fp32", native=True),) if precision == "fp32" else ()


# --------------------------------------------------------------------------------------------- die while they compile


class Segfault(_Fake):
    name = "fake-segfault"

    def compile(self, *args: Any, **kwargs: Any) -> Artifact:
        ctypes.string_at(0)
        raise AssertionError("unreachable")


class Endless(_Fake):
    name = "fake-endless"

    def compile(self, *args: Any, **kwargs: Any) -> Artifact:
        while True:
            pass


class Greedy(_Fake):
    """Allocates 50 GB, touching what it gets."""

    name = "fake-greedy"

    def compile(self, *args: Any, **kwargs: Any) -> Artifact:
        held = []
        for _ in range(500):
            held.append(np.ones(100_000_000 // 8))
            time.sleep(0.02)
        raise AssertionError(f"nobody stopped {len(held)} allocations")


class Garbage(_Fake):
    """Prints garbage and answers with something that is no artifact."""

    name = "fake-garbage"

    def compile(self, *args: Any, **kwargs: Any) -> Artifact:
        os.write(1, b"\x00\xff{not json}\n" * 100)
        print("\x1b[31mcompiling\x1b[0m", file=sys.stdout, flush=True)
        return {"path": object()}  # type: ignore[return-value]


class Missing(_Fake):
    """Says that it wrote a file, and did not."""

    name = "fake-missing-file"

    def compile(self, *args: Any, **kwargs: Any) -> Artifact:
        built = super().compile(*args, **kwargs)
        (Path(kwargs.get("into") or args[4]) / built.entry).unlink()
        return built


class Raises(_Fake):
    name = "fake-raises"

    def compile(self, *args: Any, **kwargs: Any) -> Artifact:
        raise ValueError("operator Foo is not supported")


# ------------------------------------------------------------------------------------- honest, and noting their times


class Beside(_Fake):
    """Takes its time, and writes down when: `begin end` is the artifact's last note."""

    name = "fake-beside"

    def compile(self, *args: Any, **kwargs: Any) -> Artifact:
        began = time.monotonic()
        time.sleep(1)
        built = super().compile(*args, **kwargs)
        return replace(built, notes=(*built.notes, f"{began} {time.monotonic()}"))


class Measures(Beside):
    """Says that it times kernels while it compiles."""

    name = "fake-measures"

    def capabilities_for(self, target: Target) -> BackendCapabilities:
        return replace(self.capabilities, times_kernels=True)


class Executable(_Fake):
    """Says that its artifact is code, as a shared library is."""

    name = "fake-executable"
    capabilities = replace(OnnxRuntime.capabilities, artifact_is_code=True)


class DyingProfiler(_Fake):
    """Honest, and its profiler ends the process."""

    name = "fake-dying-profiler"
    capabilities = replace(OnnxRuntime.capabilities, profiler="fake_backends:die_profiling")


def die_profiling(*_: Any) -> None:
    ctypes.string_at(0)


# -------------------------------------------------------------------------------------------------- answer wrongly


class _Session:
    """ONNX Runtime's session, with what it answers changed."""

    def __init__(self, inner: Any, change: Any) -> None:
        self._inner, self._change = inner, change

    @property
    def signature(self) -> Any:
        return self._inner.signature

    def run(self, batch: Any) -> Any:
        return self._change(dict(self._inner.run(batch)))


class _Liar(_Fake):
    """Answers with what `change` makes of all outputs, or `change_one` of each."""

    @staticmethod
    def change_one(value: Any) -> Any:
        raise NotImplementedError

    def change(self, outputs: dict[str, Any]) -> dict[str, Any]:
        return {name: self.change_one(value) for name, value in outputs.items()}

    @contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Any]:
        with super().open(artifact, threads) as inner:
            yield _Session(inner, self.change)


class LostOutput(_Liar):
    name = "fake-lost-output"

    def change(self, outputs: dict[str, Any]) -> dict[str, Any]:
        return dict(list(outputs.items())[:-1])


class RenamedOutput(_Liar):
    name = "fake-renamed-output"

    def change(self, outputs: dict[str, Any]) -> dict[str, Any]:
        return {f"{name}_0": value for name, value in outputs.items()}


class Empty(_Liar):
    name = "fake-empty"

    @staticmethod
    def change_one(value: Any) -> Any:
        return value[:0]


class NothingAtAll(_Liar):
    name = "fake-nothing"

    def change(self, outputs: dict[str, Any]) -> dict[str, Any]:
        return {}


class FewerRows(_Liar):
    name = "fake-fewer-rows"

    @staticmethod
    def change_one(value: Any) -> Any:
        return value[: max(1, len(value) // 2)] if len(value) > 1 else np.concatenate([value, value])


class NaN(_Liar):
    name = "fake-nan"

    @staticmethod
    def change_one(value: Any) -> Any:
        return np.full_like(value, np.nan)


class OneNaN(_Liar):
    """A single NaN among thousands of right values: a mean would hide it."""

    name = "fake-one-nan"
    calls = 0

    def change(self, outputs: dict[str, Any]) -> dict[str, Any]:
        OneNaN.calls += 1
        if OneNaN.calls == 3:
            name = next(iter(outputs))
            outputs[name] = outputs[name].copy()
            outputs[name].flat[0] = np.nan
        return outputs


class Infinite(_Liar):
    name = "fake-infinite"

    @staticmethod
    def change_one(value: Any) -> Any:
        return np.full_like(value, np.inf)


class Constant(_Liar):
    name = "fake-constant"

    @staticmethod
    def change_one(value: Any) -> Any:
        return np.zeros_like(value)


class Shape(_Liar):
    name = "fake-shape"

    @staticmethod
    def change_one(value: Any) -> Any:
        return value.reshape(len(value), -1, 1)


class Text(_Liar):
    name = "fake-text"

    @staticmethod
    def change_one(value: Any) -> Any:
        return value.astype(str)


class LargeBatch(_Liar):
    """Right for up to 8 rows, wrong beyond."""

    name = "fake-large-batch"

    @staticmethod
    def change_one(value: Any) -> Any:
        return value if len(value) <= 8 else -value


class Slow(_Liar):
    """Right, and slower than the original."""

    name = "fake-slow"

    def change(self, outputs: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.02)
        return outputs


class DiesLater(_Liar):
    """Right while it is validated; dies while it is measured."""

    name = "fake-dies-later"
    calls = 0

    def change(self, outputs: dict[str, Any]) -> dict[str, Any]:
        DiesLater.calls += 1
        if DiesLater.calls > 2000:  # a validation makes some hundred, and a measurement some ten thousand
            os._exit(3)
        return outputs


# ------------------------------------------------------------------------------------------------ offer settings to try


class Ladder(_Fake):
    """Right, takes 10 ms a call and 80 MB more than it needs; its settings change that, or its answers. A busy machine
    adds some ms to each call, which must not hide the difference."""

    name = "fake-ladder"

    def refuse_target(self, target: Target) -> str | None:
        unknown = set(target.options.get(self.name, {})) - {"wait_ms", "bent", "ballast_mb"}
        return f"fake-ladder has no option {sorted(unknown)[0]!r}" if unknown else None

    def tuning_options(self, target: Target, scheme: Scheme) -> tuple[TuningOption, ...]:
        return (
            # Wrong, and the fastest of all.
            TuningOption(kind="tuning", name="broken", options={"bent": True, "wait_ms": 0}),
            TuningOption(kind="tuning", name="slower", options={"wait_ms": 30}),
            TuningOption(kind="tuning", name="quick", options={"wait_ms": 3}),
            TuningOption(kind="tuning", name="too-late", options={"wait_ms": 0}),
            TuningOption(kind="memory", name="no-ballast", options={"ballast_mb": 0}),
        )

    def compile(self, *args: Any, **kwargs: Any) -> Artifact:
        model, scheme, target, *rest = args
        asked = target.options.get(self.name, {})
        return replace(super().compile(model, scheme, replace(target, options={}), *rest, **kwargs), options=asked)

    @contextmanager
    def open(self, artifact: Artifact, threads: int) -> Iterator[Any]:
        asked = artifact.options
        ballast = np.ones(int(asked.get("ballast_mb", 80) * 1e6 / 8))

        def change(outputs: dict[str, Any]) -> dict[str, Any]:
            time.sleep(asked.get("wait_ms", 10) * 1e-3)
            return {name: -value for name, value in outputs.items()} if asked.get("bent") else outputs

        with super().open(replace(artifact, options={}), threads) as inner:
            yield _Session(inner, change)
        del ballast


# ----------------------------------------------------------------------------------------- compile for what is not here


class Cross(_Fake):
    """What it compiles is the same everywhere."""

    name = "fake-cross"

    def capabilities_for(self, target: Target) -> BackendCapabilities:
        return replace(self.capabilities, cross_compiles=True)


# --------------------------------------------------------------------------- an accelerator, which is this CPU in truth


class Accelerated(_Fake):
    """Serves targets of the device rocm, which a machine of the tests only seems to have."""

    name = "fake-accelerated"
    capabilities = replace(OnnxRuntime.capabilities, devices=("rocm",), cross_compiles=False)

    def capabilities_for(self, target: Target) -> BackendCapabilities:
        return self.capabilities

    def refuse_target(self, target: Target) -> str | None:
        return None if target.device == "rocm" else "it serves the device rocm only"

    def refuse(self, model: Any, target: Target) -> str | None:
        return super().refuse(model, replace(target, device="cpu"))

    def tuning_options(self, target: Target, scheme: Scheme) -> tuple[TuningOption, ...]:
        return ()

    def compile(self, *args: Any, **kwargs: Any) -> Artifact:
        model, scheme, target, *rest = args
        return super().compile(model, scheme, replace(target, device="cpu"), *rest, **kwargs)


class AcceleratedElsewhere(Accelerated):
    """What it compiles is the same on every machine; that it runs here, only its artifact tells."""

    name = "fake-accelerated-cross"
    capabilities = replace(Accelerated.capabilities, cross_compiles=True)
