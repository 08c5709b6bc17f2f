"""A source that says that it runs on an accelerator, and notes on which device it was opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from compile_stage.core.records import SourceModel, Target
from compile_stage.sources.onnx import OnnxSource


class FakeOnnx(OnnxSource):
    """ONNX Runtime on the CPU, whatever the device; a line for each opening in the file that OPENED_ON names."""

    name = "fake-onnx"
    capabilities = replace(OnnxSource.capabilities, forms=("onnx",), devices=("cpu", "rocm"))

    @contextmanager
    def open(self, source: SourceModel, target: Target) -> Iterator[Any]:
        with Path(os.environ["OPENED_ON"]).open("a") as file:
            file.write(f"{target.device} {target.threads}\n")
        with super().open(source, replace(target, device="cpu")) as session:
            yield session
