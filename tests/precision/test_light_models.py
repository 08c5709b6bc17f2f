"""Classic networks that others wrote, through every lowering: `benchmarks/light_models.py` does all nine of them, this
the two smallest."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "light_models.py"
# ONNX Runtime's CPU kernels have neither; the backend declares no scheme for them, so nobody is given such a graph.
NOT_FOR_ONNX_RUNTIME = ("bf16", "fp8")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def light() -> Any:
    spec = importlib.util.spec_from_file_location("light_models", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["light_models"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["light_models"]


@pytest.mark.parametrize(
    ("model", "only", "refused"),
    [
        ("squeezenet", [], {"int4": "has no MatMul or Gemm"}),
        ("shufflenet", ["fp16", "bf16", "int4", "fp8"], {}),
    ],
)
def test_a_network_of_others_goes_through(light: Any, model: str, only: list[str], refused: dict[str, str]) -> None:
    """Broken: a lowering would crash on a graph that it did not expect, change its signature, or write what no runtime
    loads."""
    pytest.importorskip("openvino")
    rows = list(light.rows([model], only))
    assert len(rows) == len(only or light.SCHEMES)
    for row in rows:
        if row.lowering in refused:
            assert refused[row.lowering] in row.outcome
            continue
        assert row.outcome == "ok"
        assert row.loads["openvino"] == "ok"
        if row.lowering not in NOT_FOR_ONNX_RUNTIME:
            assert row.loads["onnxruntime"] == "ok"
