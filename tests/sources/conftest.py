"""Small real models, logged as a user would, and one check that every source must pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage.core import plugins
from compile_stage.core.digest import digest_tree
from compile_stage.core.records import Compliance, PortableModel, SourceModel, Target
from compile_stage.registry.model_files import read_model

Proof = Callable[..., PortableModel]


@pytest.fixture(autouse=True)
def quiet_third_parties(recwarn: pytest.WarningsRecorder) -> None:
    """Saving a model is MLflow's and the frameworks' work here, and each has warnings of its own on the way (signatures
    with integers, deprecations between their versions). What OUR calls raise is tested in test_warnings.py."""
    warnings.simplefilter("ignore")


def source_of(path: Path, flavor: str, *, parsed: bool = False) -> SourceModel:
    """A logged model as the folder registry resolves it.

    Args:
        parsed: With the parts of `MLmodel` that the registry hands on, which is else read a dozen times in a test, by
            8 ms each. The file must not change afterwards.
    """
    uri = f"models:/{path.name}/1"
    return SourceModel(
        uri=uri,
        name=path.name,
        version="1",
        flavor=flavor,
        path=str(path),
        digest=digest_tree(path),
        mlmodel=read_model(path, uri).mlmodel if parsed else {},
    )


def save_pickled(path: Path, model: Any, rows: Any, *, examples: int = 20, **options: Any) -> SourceModel:
    """A scikit-learn model as `mlflow.sklearn` logs it with cloudpickle.

    Args:
        rows: That it is asked for, for the signature; the first `examples` are the input example.
    """
    import mlflow

    mlflow.sklearn.save_model(
        model,
        path,
        signature=mlflow.models.infer_signature(rows, model.predict(rows)),
        input_example=rows[:examples],
        serialization_format="cloudpickle",
        pip_requirements=["scikit-learn"],
        **options,
    )
    return source_of(path, "sklearn", parsed=True)


def run_onnx(model: PortableModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """What the graph answers to arrays, of which those of fractions are given in the type that it takes."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    types = {spec.name: spec.dtype for spec in model.signature.inputs}
    given = {name: array.astype(types[name]) if array.dtype.kind == "f" else array for name, array in batch.items()}
    return dict(zip(names, session.run(names, given), strict=True))


BY_TORCH = ("pytorch", "transformers", "sentence_transformers")
"""Flavors that PyTorch's exporter writes, in 0.5 to 3 CPU seconds."""


@pytest.fixture(scope="module")
def exported_twice() -> set[str]:
    """Flavors of which two exports were compared in this module."""
    return set()


@pytest.fixture
def prove(tmp_path: Path, exported_twice: set[str]) -> Proof:
    """Original and export: the same names, shapes and answers at every batch size, and the same bytes twice; of what
    PyTorch's exporter writes, which names all tensors, once in a module."""

    def check(
        source: SourceModel,
        batch: Mapping[str, Any],
        *,
        sizes: tuple[int, ...] = (1, 3),
        compliance: Compliance | None = None,
        rtol: float = 1e-5,
    ) -> PortableModel:
        exporter = plugins.load("sources", source.flavor)
        assert exporter.refuse(source, compliance or Compliance()) is None
        model = exporter.export(source, {}, tmp_path / "first")
        if source.flavor not in BY_TORCH or source.flavor not in exported_twice:
            exported_twice.add(source.flavor)
            again = exporter.export(source, {}, tmp_path / "again")
            assert model.digest == again.digest, "two exports of one model differ"
        assert model.precision == "fp32"
        assert model.made_from == source.digest
        with exporter.open(source, Target(name="cpu")) as session:
            assert session.signature == model.signature
            for size in sizes:
                part = {name: array[:size] for name, array in batch.items()}
                expected, found = session.run(part), run_onnx(model, part)
                assert list(expected) == list(found) == [spec.name for spec in model.signature.outputs]
                for spec in model.signature.outputs:
                    assert expected[spec.name].shape == found[spec.name].shape
                    if spec.dtype.startswith("float"):
                        scale = float(np.abs(expected[spec.name]).max()) or 1.0
                        np.testing.assert_allclose(found[spec.name], expected[spec.name], rtol=rtol, atol=rtol * scale)
                    else:
                        assert list(found[spec.name].ravel()) == list(expected[spec.name].ravel())
        return model

    return check
