"""What a model of a flavor that no source reads is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_stage import api


@pytest.mark.parametrize(
    ("flavor", "why", "fix"),
    [
        ("keras", "it is not supported yet", "model.export('model.onnx', format='onnx')"),
        ("sentence_transformers", "it is not supported yet", "mlflow.transformers.log_model"),
        ("catboost", "it is not supported yet", "export it to ONNX"),
        ("python_function", "it is Python code and not a graph", "its framework's own flavor"),
    ],
)
def test_an_unsupported_flavor_is_told_what_is_supported_and_what_to_log(
    tmp_path: Path, flavor: str, why: str, fix: str
) -> None:
    """Broken: Keras's users are told to log the model with its own flavor, which is what they did."""
    model = tmp_path / "model"
    model.mkdir()
    others = "" if flavor == "python_function" else f"  {flavor}: {{data: data}}\n"
    (model / "MLmodel").write_text(f"flavors:\n{others}  python_function: {{loader_module: mlflow.pyfunc.model}}\n")
    policy = tmp_path / "p.yaml"
    policy.write_text(
        "apiVersion: compile-stage/v1\nkind: OptimizationPolicy\nname: p\ntargets: {cpu: {backends: [onnxruntime]}}\n"
    )
    result = api.run(f"folder:{model}", policy, publish=False, out=tmp_path / "out")
    assert (result.status, result.exit_code) == ("refused", 5)
    message, _, advice = result.problem.partition("\n")
    assert f"a model of flavor {flavor!r} can't be compiled: {why}; supported are lightgbm, onnx, pytorch" in message
    assert fix in advice
    assert ("own flavor" in advice) == (flavor == "python_function")
