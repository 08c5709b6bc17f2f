"""Polygraphy's own runner and comparator as a witness: what we prove must hold in the eyes of somebody else's tool
too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compile_stage.core import plugins
from compile_stage.core.records import PortableModel, Target
from compile_stage.testing import models

pytestmark = pytest.mark.filterwarnings("ignore")  # Polygraphy's own deprecations are not what is tested here


@pytest.mark.parametrize("backend_name", ["onnxruntime", "openvino"])
def test_polygraphy_agrees_with_our_fp32_sessions(backend_name: str, tmp_path: Path) -> None:
    """Broken: our session would feed, name or order tensors wrongly, and compare itself with itself."""
    pytest.importorskip("polygraphy", reason="the witness is Polygraphy")
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.comparator import Comparator, CompareFunc, IterationResult, RunResults

    backend = plugins.load("backends", backend_name)
    if (reason := plugins.missing(backend)) is not None:
        pytest.skip(reason)
    model, _ = models.conv_net(tmp_path / "model")
    target = Target(name="witness", batch_sizes=(2,))
    artifact = backend.compile(model, backend.schemes(target, "fp32")[0], target, "witness", tmp_path / "artifact")

    feeds = _feeds(model)
    theirs = Comparator.run(
        [OnnxrtRunner(SessionFromOnnx(model.path, providers=["cpu"]), name="polygraphy")], data_loader=feeds
    )
    with backend.open(artifact, 1) as session:
        ours = [IterationResult(outputs=dict(session.run(feed)), runner_name="ours") for feed in feeds]
    both = RunResults([*theirs.items(), ("ours", ours)])
    compared = Comparator.compare_accuracy(both, compare_func=CompareFunc.simple(atol=1e-5, rtol=1e-5))
    # Polygraphy calls nothing compared a success, so what was compared is counted first.
    assert len(compared) == 1
    assert compared.output_names() == [spec.name for spec in model.signature.outputs]
    assert len(theirs["polygraphy"]) == len(ours) == 3
    assert bool(compared)


def _feeds(model: PortableModel) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            spec.name: rng.standard_normal([2 if isinstance(d, str) else d for d in spec.shape]).astype(spec.dtype)
            for spec in model.signature.inputs
        }
        for _ in range(3)
    ]
