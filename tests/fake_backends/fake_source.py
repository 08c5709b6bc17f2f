"""A source that says that it runs on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from compile_stage.core.records import SourceModel, Target
from compile_stage.sources.onnx import OnnxSource


class FakeOnnx(OnnxSource):
    """ONNX Runtime on the CPU, whatever the device."""

    name = "fake-onnx"
    capabilities = replace(OnnxSource.capabilities, forms=("onnx",), devices=("cpu", "rocm"))

    @contextmanager
    def open(self, source: SourceModel, target: Target) -> Iterator[Any]:
        with super().open(source, replace(target, device="cpu")) as session:
            yield session
