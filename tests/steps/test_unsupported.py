"""What a model of a flavor that no source reads is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_stage import api


@pytest.mark.parametrize(
    ("flavor", "why", "fix"),
    [
        ("paddle", "it is not supported yet", "export it to ONNX"),
        ("spacy", "its framework has no converter to ONNX", "serve the original"),
        ("prophet", "its framework has no converter to ONNX", "serve the original"),
    ],
)
def test_an_unsupported_flavor_is_told_what_is_supported_and_what_to_log(
    tmp_path: Path, flavor: str, why: str, fix: str
) -> None:
    """Broken: the users of another framework are told to log the model with its own flavor, which is what they
    did; those of spaCy and Prophet to export it by a converter that does not exist."""
    model = tmp_path / "model"
    model.mkdir()
    lines = f"flavors:\n  {flavor}: {{data: data}}\n  python_function: {{loader_module: mlflow.pyfunc.model}}\n"
    (model / "MLmodel").write_text(lines)
    policy = tmp_path / "p.yaml"
    policy.write_text(
        "apiVersion: compile-stage/v1\nkind: OptimizationPolicy\nname: p\ntargets: {cpu: {backends: [onnxruntime]}}\n"
    )
    result = api.run(f"folder:{model}", policy, publish=False, out=tmp_path / "out")
    assert (result.status, result.exit_code) == ("refused", 5)
    message, _, advice = result.problem.partition("\n")
    supported = "supported are catboost, "
    assert f"a model of flavor {flavor!r} can't be compiled: {why}; {supported}" in message
    assert fix in advice
    assert "own flavor" not in advice
