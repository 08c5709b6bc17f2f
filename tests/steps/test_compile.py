"""What a backend says of its own artifact is compared with what is there."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import factories
import pytest
from factories import run_context

from compile_stage.core.digest import plain
from compile_stage.core.errors import IntegrityError
from compile_stage.core.records import PortableModel
from compile_stage.steps.compile import compile_job

MODEL = PortableModel(
    path="", digest="sha256:m", form="onnx", opset=17, precision="fp32", kept={}, signature=factories.SIGNATURE,
    made_from="",
)  # fmt: skip


class Compiler:
    """A worker whose backend says that these packages made what it wrote."""

    def __init__(self, **packages: str) -> None:
        self._packages = packages

    def call(self, function: str, /, job: Any, into: str, **_: Any) -> Any:
        assert function == "compile_model"
        Path(into, "model.bin").write_text("compiled")
        artifact = factories.artifact(job, toolchain=self._packages)
        return plain(replace(artifact, entry="model.bin"))


def test_an_artifact_names_no_version_that_is_not_installed(tmp_path: Path) -> None:
    """Broken: a plug-in says that onnxruntime 99.0 compiled, the published requirements.txt demands it, and no machine
    that serves the model can install it. What is no package, such as a compiler, is its own to name."""
    numpy = version("numpy")

    def packages(**said: str) -> dict[str, str]:
        worker: Any = Compiler(**said)
        return dict(compile_job(run_context(tmp_path), worker, factories.job(), MODEL, None).artifact.toolchain)

    with pytest.raises(
        IntegrityError, match=rf"says that numpy 99\.0 made its artifact, and {numpy} is there"
    ) as caught:
        packages(numpy="99.0")
    assert "toolchain()" in caught.value.fix
    assert packages(numpy=numpy, compiler="g++ 13") == {"numpy": numpy, "compiler": "g++ 13"}
