"""A published model that multiplies by a matrix, for tests of what loads it: x [batch, 4] -> y [batch, 3]."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import factories
import numpy as np

from compile_stage import flavor
from compile_stage.core.digest import digest_tree, plain
from compile_stage.core.environment import hardware
from compile_stage.core.records import Artifact, Target
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.signing.signers import Signer
from compile_stage.steps import sign as step

WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3)
SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 4)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", 3)),),
)


def write_onnx(folder: Path) -> None:
    from onnx import TensorProto, helper, numpy_helper, save

    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(WEIGHTS, "w")],
    )
    folder.mkdir(parents=True)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "model.onnx")


def describe(artifact: Path, **changes: Any) -> dict[str, Any]:
    """The manifest as the package step makes it."""

    made = Artifact(
        path="artifact",
        entry="model.onnx",
        digest=digest_tree(artifact),
        job_id="tiny-1--cpu--onnxruntime--fp32",
        backend="onnxruntime",
        precision="fp32",
        toolchain={"onnxruntime": version("onnxruntime")},
        hardware=hardware().fingerprint,
        signature=SIGNATURE,
        size_bytes=1,
    )
    return {
        "artifact": made,
        "target": Target(name="cpu"),
        "hardware": hardware(),
        "fingerprint": hardware().fingerprint,
        "runtime": {"onnxruntime": version("onnxruntime")},
        "answer": {"kind": "array", "outputs": ["y"], "columns": None, "frame_in_frame_out": True},
        "threads": 1,
        "on_hardware_mismatch": "error",
        "signature": SIGNATURE,
        **changes,
    }


def save_bundle(
    folder: Path, name: str = "model", source_model: Path | None = None, signature: Any = None, **changes: Any
) -> Path:
    """The model directory `folder/name`; `changes` are laid over its manifest."""
    data = folder / f"{name}-data"
    write_onnx(data / "artifact")
    manifest = describe(data / "artifact", **changes)
    flavor.save_model(data, folder / name, manifest=manifest, source_model=source_model, signature=signature)
    return folder / name


def manifest_fields() -> dict[str, Any]:
    """What a run's manifest has beside what loading needs."""
    job = factories.job()
    return {
        "key": "sha256:1",
        "source": {"uri": "models:/m/1", "digest": "sha256:m", "name": "m", "version": "1", "flavor": "onnx"},
        "policy": {"name": "p", "digest": "sha256:p", "owner": "me"},
        "data": {"samples": {}, "spec": {}},
        "toolchain": {},
        "job": plain(job),
        "scheme": plain(job.scheme),
        "verdict": plain(factories.verdict()),
        "python": "3.11",
    }


def signed_bundle(folder: Path, signer: Signer, name: str = "model", **changes: Any) -> Path:
    """A bundle signed as a run signs it."""
    path = save_bundle(folder, name, **manifest_fields(), **changes)
    bundle: Any = type("Bundle", (), {"path": str(path), "manifest": flavor.read_manifest(path)})
    step._sign(bundle, factories.policy(), signer)
    return path
