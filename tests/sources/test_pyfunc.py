"""The network that a custom pyfunc marks: what it may be, how it is called, and what is refused."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from compile_stage import pyfunc
from compile_stage.core.errors import SourceError
from compile_stage.core.provenance import _code_in
from compile_stage.core.records import Compliance, SourceModel, Target
from compile_stage.core.records.model import Origin
from compile_stage.serving.python_model import CompiledNetwork
from compile_stage.sources.pyfunc import PyfuncSource, _Marked, _unmarked

from .conftest import source_of

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

ALLOWED = Compliance(allow_pickle=True)
X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)


class Two(torch.nn.Module):
    """Two inputs, and a dict of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)

    def forward(self, left: Any, right: Any) -> Any:
        return {"sum": self.a(left) + self.b(right), "difference": self.a(left) - self.b(right)}


def source(folder: Path, predict: Any, nets: dict[str, Any], example: Any) -> SourceModel:
    class Model(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def __init__(self) -> None:
            for name, net in nets.items():
                setattr(self, name, net)

        def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
            return predict(self, model_input)

    model = Model()
    for net in nets.values():
        pyfunc.compiled(net, example=example)
    mlflow.pyfunc.save_model(str(folder / "m"), python_model=model, pip_requirements=["torch"])
    return SourceModel(
        uri="models:/m/1", name="m", version="1", digest="", flavor="python_function", path=str(folder / "m"),
        registry="folder",
    )  # fmt: skip


def both(self: Any, x: Any) -> Any:
    with torch.no_grad():
        return self.net(torch.from_numpy(np.asarray(x)), right=torch.from_numpy(np.asarray(x)) * 2)["sum"].numpy()


def test_arguments_by_name_and_a_dict_of_outputs(tmp_path: Path) -> None:
    """Broken: a network that is called as transformers' are, with keywords, is given the wrong inputs."""
    made = source(tmp_path, both, {"net": Two()}, {"left": X[:2], "right": X[:2]})
    plugin = PyfuncSource()
    assert plugin.refuse(made, ALLOWED) is None
    inputs = plugin.network_inputs(made, {"x": X})
    assert list(inputs) == ["left", "right"]
    assert np.array_equal(inputs["right"], X * 2)
    with plugin.open(made, Target(name="cpu", threads=1)) as session:
        answer = session.run(inputs)
        assert list(answer) == ["sum", "difference"]
        with plugin.whole(made, 1) as predict:
            ran = []

            def run(batch: Any) -> Any:
                ran.append(batch)
                return session.run(batch)

            assert np.allclose(predict({"x": X}, run), predict({"x": X}))
            assert len(ran) == 1
    portable = plugin.export(made, {}, tmp_path / "onnx")
    assert [spec.name for spec in portable.signature.inputs] == ["left", "right"]
    assert portable.signature.inputs[0].shape[0] == "batch"


@pytest.mark.parametrize("streams", [True, False])
def test_a_predict_stream_that_is_not_published_is_said(tmp_path: Path, streams: bool) -> None:
    """Broken: whoever serves the published version finds out by an error that predict_stream() is gone."""
    made = source(tmp_path, both, {"net": Two()}, {"left": X[:2], "right": X[:2]})
    file = tmp_path / "m" / "MLmodel"
    text = file.read_text()
    assert "streamable: false" in text
    file.write_text(text.replace("streamable: false", f"streamable: {str(streams).lower()}"))
    notes = Origin(framework="", prediction_format=PyfuncSource().prediction_format(made)).notes
    assert any("predict_stream() of the original is not published" in note for note in notes) is streams


@pytest.mark.parametrize(
    ("predict", "says"),
    [
        (lambda self, x: self.net(torch.from_numpy(np.asarray(x)[:1])), "of 6 rows calls self.net with 1 rows"),
        (lambda self, x: np.asarray(x), "calls self.net with no rows"),
        (lambda self, x: x.nothing, "its predict() does not answer the samples: AttributeError"),
    ],
)
def test_a_predict_that_does_not_call_it_row_by_row_is_refused(tmp_path: Path, predict: Any, says: str) -> None:
    """Broken: answers are laid beside the wrong rows, and labels beside the wrong answers."""
    made = source(tmp_path, predict, {"net": torch.nn.Linear(4, 3)}, X[:2])
    with pytest.raises(SourceError) as refusal:
        PyfuncSource().network_inputs(made, {"x": X})
    assert says in refusal.value.problem


def test_an_example_of_lists_of_unlike_length_is_refused_in_words(tmp_path: Path) -> None:
    """Broken: NumPy's error on an inhomogeneous shape was shown as a crash of the original model."""
    model = source(tmp_path, both, {"net": Two()}, (X, X))
    example = pd.DataFrame({"tokens": [[1, 2], [3]]})
    loaded = mlflow.pyfunc.load_model(model.path).unwrap_python_model()
    mlflow.pyfunc.save_model(
        str(tmp_path / "with"), python_model=loaded, pip_requirements=["torch"], input_example=example
    )
    with pytest.raises(SourceError, match="the lists of its input example differ in length"):
        PyfuncSource().example(replace(model, path=str(tmp_path / "with")))


def test_two_marks_and_a_mark_on_what_is_no_network_are_refused(tmp_path: Path) -> None:
    """Broken: one of two marked networks would be compiled, and the other left out without a word."""
    nets = {"first": torch.nn.Linear(4, 3), "second": torch.nn.Linear(4, 3)}
    two = source(tmp_path / "two", lambda self, x: x, nets, X[:2])
    assert PyfuncSource().refuse(two, ALLOWED) == "it marks self.first and self.second, and one network can be compiled"
    with pytest.raises(TypeError, match="an example is a tensor or an array of numbers"):
        pyfunc.compiled(torch.nn.Linear(4, 3), example="text")
    with pytest.raises(TypeError, match="the example is empty"):
        pyfunc.compiled(torch.nn.Linear(4, 3), example=())


@pytest.mark.parametrize("flattens", [False, True])
def test_the_network_is_asked_whether_it_answers_no_rows(flattens: bool) -> None:
    """Broken: a published predict() of no rows raises where the original answers none, or answers where it raises."""

    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.view(x.shape[0], -1) if flattens else x)

    marked = object.__new__(_Marked)
    marked.network = Net(4, 2)
    marked.example = pyfunc.example_of(pyfunc.compiled(marked.network, example=X))
    assert marked.answers_no_rows() is not flattens


def test_the_stand_in_is_called_and_answers_as_the_network_did() -> None:
    """Broken: predict() gets arrays where it had tensors, or a tuple where it had a dict, and fails when it serves."""
    how = {"parameters": ["x"], "outputs": ["a", "b"], "form": "dict", "keys": ["logits", "state"]}
    net = CompiledNetwork(how, lambda batch: {"b": batch["x"] * 2, "a": batch["x"] + 1})
    answer = net.eval().to("cpu")(torch.from_numpy(X))
    assert torch.equal(answer["logits"], torch.from_numpy(X) + 1)
    assert torch.equal(answer.state, torch.from_numpy(X) * 2)
    assert isinstance(CompiledNetwork({**how, "form": "tuple"}, net._run)(x=X)[0], np.ndarray)
    assert torch.equal(CompiledNetwork({**how, "form": "tensor"}, net._run)(x=torch.from_numpy(X)), answer["logits"])
    with pytest.raises(TypeError, match="the compiled network takes x, and was called with y"):
        net(y=X)


def test_a_bundle_with_a_pyfunc_counts_as_code() -> None:
    """Broken: a stranger's bundle is verified, which unpickles its pyfunc, without --allow-code."""
    manifest = {"job": {"backend": "onnxruntime", "gates": []}, "data": {"spec": {}}, "answer": {"python_model": {}}}
    assert _code_in(manifest) is None
    manifest["answer"] = {"python_model": {"attribute": "net"}}
    assert _code_in(manifest) == "it is a custom pyfunc, whose own code runs when it is loaded"


class Lengths(torch.nn.Module):
    """From eight ids on it takes their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 4)

    def forward(self, ids: Any) -> Any:
        return self.embed(ids).mean(1) if ids.shape[1] >= 8 else self.embed(ids).sum(1)


@pytest.mark.parametrize(("length", "smallest", "largest"), [(12, {"ids": (None, 8)}, {}), (4, {}, {"ids": (None, 7)})])
def test_sizes_for_which_its_network_goes_another_way_are_known(
    tmp_path: Path, length: int, smallest: Any, largest: Any
) -> None:
    """Broken: the published model answers other lengths without a word, and otherwise than the original."""
    made = source(tmp_path, both, {"net": Lengths()}, {"ids": np.ones((2, length), np.int64)})
    for export in (PyfuncSource().export, PyfuncSource().export_program):
        model = export(made, {}, tmp_path / export.__name__)
        assert (model.smallest, model.largest) == (smallest, largest)


def test_a_pyfunc_around_a_model_of_another_framework_names_it(tmp_path: Path) -> None:
    """Broken: the most common pyfunc, a scikit-learn model with some code around it, is told of a torch.nn.Module that
    it lacks, and not which attribute is to be logged how."""

    class Scores(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def __init__(self) -> None:
            self.threshold = 0.5
            self.scorer = LogisticRegression().fit(X, np.arange(len(X)) % 2)

        def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
            return self.scorer.predict_proba(model_input)[:, 1] > self.threshold

    mlflow.pyfunc.save_model(str(tmp_path / "model"), python_model=Scores(), pip_requirements=["scikit-learn"])
    reason = PyfuncSource().refuse(source_of(tmp_path / "model", "python_function"), ALLOWED) or ""
    assert "it holds self.scorer, a model of sklearn (LogisticRegression)" in reason
    assert "mlflow.sklearn.log_model(model.scorer, ...)" in reason


def test_a_pyfunc_whose_own_code_fails_is_not_told_to_install_packages(tmp_path: Path) -> None:
    """Broken: where load_context fails by a fault of its own, or for a file that is gone, its packages are blamed."""

    class Network(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def load_context(self, context):  # type: ignore[no-untyped-def]
            raise FileNotFoundError("weights.pt")

        def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
            return model_input

    mlflow.pyfunc.save_model(str(tmp_path / "model"), python_model=Network(), pip_requirements=["numpy"])
    with pytest.raises(SourceError) as caught:
        _Marked(source_of(tmp_path / "model", "python_function"))
    assert "FileNotFoundError: weights.pt" in caught.value.problem
    assert "mlflow.pyfunc.load_model" in str(caught.value.fix)
    assert "install" not in str(caught.value.fix)


@pytest.mark.skipif(importlib.util.find_spec("haiku") is not None, reason="Haiku is installed here")
def test_a_pyfunc_that_needs_jax_is_told_of_jax_log_model(tmp_path: Path) -> None:
    """Broken: it is told to install its packages, minutes later that it marks no network, and never of what takes
    JAX."""

    class Network(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def load_context(self, context):  # type: ignore[no-untyped-def]
            import haiku

            self.net = haiku.Linear(3)

        def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
            return self.net(model_input)

    mlflow.pyfunc.save_model(str(tmp_path / "model"), python_model=Network(), pip_requirements=["dm-haiku"])
    reason = PyfuncSource().refuse(source_of(tmp_path / "model", "python_function"), ALLOWED) or ""
    assert "its pyfunc needs haiku" in reason
    assert "compile_stage.jax.log_model(" in reason


def test_a_pyfunc_that_holds_weights_of_jax_is_told_of_jax_log_model() -> None:
    """Broken: a pyfunc around a Flax model or a tree of JAX's arrays is told that it holds no torch.nn.Module."""
    arrays = type("ArrayImpl", (), {"__module__": "jaxlib._jax"})
    layer = type("Dense", (type("Module", (), {"__module__": "flax.linen.module"}),), {"__module__": "train"})
    model = SourceModel(uri="models:/m/1", name="m", version="1", digest="", flavor="python_function", path="")
    for held in ({"names": ["a"], "params": {"dense": {"kernel": arrays()}}}, {"names": ["a"], "params": layer()}):
        error = _unmarked(model, held, [])
        assert "self.params" in error.problem
        assert "compile_stage.jax.log_model(" in str(error.fix)
