"""What the backends offer to the ladder: every setting is real, is recorded, survives being opened anew, and keeps the
answers."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.backends.onnxruntime import OnnxRuntime
from compile_stage.backends.openvino import OpenVino
from compile_stage.core.digest import list_tree
from compile_stage.core.records import Target
from compile_stage.pipeline.tuning_options import laid_over
from compile_stage.testing import models

TARGET = Target(name="cpu", threads=2, batch_sizes=(1, 4))
BACKENDS = [OnnxRuntime(), *([OpenVino()] if importlib.util.find_spec("openvino") else [])]
RUNGS = [
    (backend, rung)
    for backend in BACKENDS
    for rung in backend.tuning_options(TARGET, backend.schemes(TARGET, "fp32")[0])
]


@pytest.fixture(scope="module")
def conv(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.conv_net(tmp_path_factory.mktemp("conv"))


def built(backend: Any, conv: Any, into: Path, **options: Any) -> Any:
    target = replace(TARGET, options={backend.name: options})
    return backend.compile(conv[0], backend.schemes(TARGET, "fp32")[0], target, "job", into)


def answers(backend: Any, artifact: Any, conv: Any) -> np.ndarray:
    with backend.open(artifact, 2) as session:
        found: np.ndarray = session.run({"image": np.load(Path(conv[1].path) / "inputs" / "image.npy")[:4]})["scores"]
    return found


@pytest.mark.parametrize(("backend", "rung"), RUNGS, ids=[f"{b.name}-{r.name}" for b, r in RUNGS])
def test_every_rung_is_taken_and_answers_the_same(backend: Any, rung: Any, conv: Any, tmp_path: Path) -> None:
    """Broken: a setting would be refused by the runtime, or forgotten when the artifact is opened elsewhere."""
    plain = built(backend, conv, tmp_path / "plain")
    made = built(backend, conv, tmp_path / "rung", **rung.options)
    assert made.options != plain.options
    if rung.opening:
        if backend.name == "onnxruntime":  # OpenVINO writes its IR anew each time, in another order
            assert made.digest == plain.digest
        assert made.options == laid_over(plain.options, rung.opening)
    np.testing.assert_allclose(answers(backend, made, conv), answers(backend, plain, conv), rtol=1e-4, atol=1e-5)


def test_mapped_weights_lie_beside_the_graph_and_are_the_same_bytes_each_time(conv: Any, tmp_path: Path) -> None:
    """Broken: weights would still be read into memory twice, the bundle would lack them, or others could not read
    them."""
    made = [built(OnnxRuntime(), conv, tmp_path / name, mapped_weights=True) for name in ("a", "b")]
    assert sorted(list_tree(Path(made[0].path))) == ["model.onnx", "weights.bin"]
    assert made[0].digest == made[1].digest
    assert (Path(made[0].path) / "weights.bin").stat().st_mode & 0o777 == 0o644
    plain = built(OnnxRuntime(), conv, tmp_path / "plain")
    assert (Path(made[0].path) / "model.onnx").stat().st_size < 0.7 * plain.size_bytes


@pytest.mark.skipif(not importlib.util.find_spec("openvino"), reason="openvino is not installed")
def test_one_model_serves_every_batch_size(conv: Any, tmp_path: Path) -> None:
    """Broken: each batch size would still hold packed weights of its own."""
    assert len(built(OpenVino(), conv, tmp_path / "plain").options["shapes"]) == 2
    one = built(OpenVino(), conv, tmp_path / "one", fixed_shapes=False)
    assert one.options["shapes"] == []
    assert "" not in one.options["config"]
