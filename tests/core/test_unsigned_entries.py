"""What is taken of a shared cache that nobody signs: what says of itself what is true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from factories import artifact

from compile_stage.core import plugins
from compile_stage.core.digest import plain
from compile_stage.core.environment import hardware
from compile_stage.core.records import PortableModel
from compile_stage.core.reuse import may_be_unsigned
from compile_stage.core.toolchains import Toolchain
from compile_stage.core.unsigned_entries import refuse_unsigned

FILES = "sha256:files"


def compiled(backend: str = "onnxruntime", **changed: Any) -> str | None:
    made = replace(
        artifact(), path=".", entry="model.onnx", backend=backend, precision="fp32", digest=FILES, size_bytes=30,
        toolchain=plugins.load("backends", backend).toolchain(), hardware=hardware().fingerprint,
    )  # fmt: skip
    value = {"artifact": plain(replace(made, **changed)), "compile_s": 1.0}
    key = {"backend": "onnxruntime", "scheme": {"precision": "fp32"}, "hardware": plain(hardware())}
    return refuse_unsigned("compile/1", key, value, FILES, {"model.onnx": 10, "weights/w.bin": 20})


def test_what_is_true_is_taken() -> None:
    """Broken: a shared cache without a key never hits."""
    assert compiled() is None
    assert compiled(entry="weights") is None, "it may be a folder"


@pytest.mark.parametrize(
    "changed",
    [
        {"entry": "../model.onnx"}, {"entry": "/etc/passwd"}, {"entry": "other.onnx"}, {"path": "/tmp"},
        {"digest": "sha256:other"}, {"size_bytes": 31}, {"precision": "int8"},
    ],
)  # fmt: skip
def test_what_is_not_true_is_refused(changed: dict[str, Any]) -> None:
    """Broken: an artifact is opened, or published, that is another than its record says."""
    assert compiled(**changed)


def test_an_artifact_of_another_backend_is_refused() -> None:
    """Broken: it is opened by another runtime than the one that the job names."""
    assert "openvino" in (compiled("openvino") or "")


@pytest.mark.parametrize(
    "toolchain",
    [
        {"onnxruntime": "1.0.0"}, {"onnxruntime": "1.0.0\nstranger==1"}, {}, {"stranger": "1"},
        {"onnxruntime": "1.0.0 @ https://example.invalid/stranger.whl"},
    ],
)  # fmt: skip
def test_an_artifact_names_the_packages_that_compile_here(toolchain: dict[str, str]) -> None:
    """Broken: who can write to the bucket writes lines into the published requirements.txt, and pip installs a package
    of his where the model is served."""
    assert "packages" in (compiled(toolchain=toolchain) or "")


def test_in_a_toolchain_of_its_own_the_packages_are_those_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the same for a backend that is not imported here; or a shared cache never hits for such a backend."""
    home = Toolchain(name="t", digest="", folder="", interpreter="", packages={"ONNX_Runtime": "1.2", "numpy": "2.0"})
    monkeypatch.setattr(plugins, "toolchain_of", lambda _backend: home)
    assert compiled(toolchain={"onnx-runtime": "1.2", "numpy": "2.0"}) is None
    assert compiled(toolchain={"onnx-runtime": "1.2\nstranger==1", "numpy": "2.0"})
    assert compiled(toolchain={"onnx-runtime": "1.2", "stranger": "1"})


def test_an_artifact_that_would_not_be_validated_is_refused() -> None:
    """Broken: who can write to the bucket has artifacts pass by the validation, and winners lost."""
    assert "validated" in (compiled(not_runnable_here="it is for a phone") or "")
    assert "machine" in (compiled(hardware="x86_64-other") or "")


def test_a_rewritten_graph_needs_a_signature() -> None:
    """Broken: runs put entries into the shared cache that every other run refuses with a warning."""
    assert not may_be_unsigned("rewrite/6")
    assert refuse_unsigned("rewrite/6", {}, {}, FILES, {})


def test_no_code_is_taken_that_nobody_signed() -> None:
    """Broken: who can write to the bucket runs a program on each machine of the team."""
    made = replace(artifact(), path=".", entry="model.pt", backend="torchscript", digest=FILES, size_bytes=10)
    value = {"artifact": plain(made), "compile_s": 1.0}
    key = {"backend": "torchscript", "scheme": {"precision": made.precision}}
    assert "executable" in (refuse_unsigned("compile/1", key, value, FILES, {"model.pt": 10}) or "")


@pytest.mark.parametrize("value", [None, 1, [], {}, {"artifact": None}, {"artifact": {}, "compile_s": 1}])
def test_nonsense_is_refused_and_raises_nothing(value: Any) -> None:
    """Broken: an object in a bucket ends a run with a traceback."""
    assert refuse_unsigned("compile/1", {"backend": "onnxruntime"}, value, FILES, {})
    assert refuse_unsigned("lower/3", {"model": "x"}, value, FILES, {})


def test_a_lowered_graph_must_be_of_that_model() -> None:
    """Broken: the graph of another model is compiled in this one's place."""
    graph = plain(
        PortableModel(
            path="m.onnx", digest=FILES, form="onnx", opset=18, precision="int8",
            signature=artifact().signature, made_from="sha256:model",
        )
    )  # fmt: skip
    key = {"model": "sha256:model", "scheme": {"precision": "int8"}}
    assert refuse_unsigned("lower/3", key, graph, FILES, {"m.onnx": 1}) is None
    assert refuse_unsigned("lower/3", {**key, "model": "sha256:other"}, graph, FILES, {"m.onnx": 1})
    assert refuse_unsigned("lower/3", key, graph, "sha256:other", {"m.onnx": 1})
    assert refuse_unsigned("sample/2", key, graph, FILES, {"m.onnx": 1})
