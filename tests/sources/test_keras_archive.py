"""`.keras` archives made by hand: what is more than data is refused with the reason, without Keras."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_stage.sources import keras_archive

INPUT = {
    "module": "keras.layers",
    "class_name": "InputLayer",
    "config": {"batch_shape": [None, 8, 8, 1], "dtype": "float32", "name": "image"},
    "registered_name": None,
}


def layer(name: str, module: str = "keras.layers", registered: str | None = None, **config: Any) -> dict[str, Any]:
    """One layer as Keras writes it."""
    described = {"module": module, "class_name": name, "config": {"name": name.lower(), **config}}
    return {**described, "registered_name": registered}


def sequential(*layers: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    config = {"name": "sequential", "layers": [INPUT, *layers]}
    return {"module": "keras", "class_name": "Sequential", "config": config, "registered_name": None, **more}


def archive(folder: Path, config: Any, records: Mapping[str, bytes] | None = None) -> Path:
    """A `.keras` file with this configuration."""
    path = folder / "model.keras"
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("metadata.json", json.dumps({"keras_version": "3.15.1"}))
        opened.writestr("config.json", config if isinstance(config, str | bytes) else json.dumps(config))
        for name, content in (records or {"model.weights.h5": b"\x89HDF"}).items():
            opened.writestr(name, content)
    return path


DENSE = layer(
    "Dense",
    units=3,
    activation="gelu",
    dtype={"module": "keras", "class_name": "DTypePolicy", "config": {"name": "float32"}, "registered_name": None},
    kernel_initializer={"module": "keras.initializers", "class_name": "GlorotUniform", "config": {"seed": None}},
)


def test_an_ordinary_model_is_taken_with_its_inputs(tmp_path: Path) -> None:
    """Broken: every Keras model would be refused, or its input example would have no name to go by."""
    path = archive(tmp_path, sequential(DENSE, layer("Flatten"), layer("LSTM", units=2, stateful=False)))
    assert keras_archive.refuse(path) is None
    assert keras_archive.inputs(path) == (keras_archive.Input("image", "float32", (None, 8, 8, 1)),)


def test_inputs_come_in_keras_own_order(tmp_path: Path) -> None:
    """Broken: two inputs of one shape would be swapped, and nothing would notice but the answers."""
    one = {**INPUT, "config": {"batch_shape": [None, 2], "dtype": "int32", "name": "b"}}
    other = {**INPUT, "config": {"batch_shape": [7, None], "dtype": "float32", "name": "a"}}
    config = {"layers": [one, other], "input_layers": {"y": ["b", 0, 0], "x": ["a", 0, 0]}, "output_layers": {}}
    path = archive(tmp_path, {"module": "keras.src.models.functional", "class_name": "Functional", "config": config})
    assert [tensor.name for tensor in keras_archive.inputs(path)] == ["a", "b"]
    assert keras_archive.inputs(path)[0].shape == (None, None), "the batch of one call is no part of the model"
    assert keras_archive.gives_a_dict(path)


LAMBDA = layer("Lambda", function={"class_name": "__lambda__", "config": {"value": "4wEAAAA=", "defaults": None}})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (sequential(LAMBDA), "its layer 'lambda' is Python code (a Lambda)"),
        (sequential(layer("TimeDistributed", layer=LAMBDA)), "its layer 'lambda' is Python code (a Lambda)"),
        (sequential(layer("Dense", activation=LAMBDA["config"]["function"])), "is Python code (a Lambda)"),
        (sequential(layer("Mine", module="builtins", registered="Custom>Mine")), "the class builtins.Mine"),
        (sequential(layer("system", module="os")), "the class os.system"),
        (sequential(layer("get_file", module="keras.utils")), "the class keras.utils.get_file"),
        (sequential(layer("enable_unsafe_deserialization", module="keras.config")), "keras.config"),
        (sequential(layer("TFSMLayer", filepath="/etc")), "the class keras.layers.TFSMLayer"),
        (sequential(layer("TorchModuleWrapper", module_="gASV")), "the class keras.layers.TorchModuleWrapper"),
        (sequential(layer("StringLookup", vocabulary="/etc/passwd")), "the class keras.layers.StringLookup"),
        (sequential(layer("Dense", vocabulary="/etc/passwd")), "names a file or a method in 'vocabulary'"),
        (sequential(layer("Dense", registered="Other>Dense")), "the class Other>Dense"),
        (sequential(layer("Dense", activation="my_function")), "the function 'my_function'"),
        (
            sequential(layer("Dense", activation={"module": "builtins", "class_name": "function", "config": "eval"})),
            "the function 'eval'",
        ),
        (sequential(layer("Map", module="keras.src.ops.core")), "the class keras.src.ops.core.Map"),
        (sequential({**layer("Dense"), "class_name": ["Dense"]}), "the class keras.layers.['Dense']"),
        (sequential(layer("LSTM", stateful=True)), "keeps its state from one call to the next"),
        (
            sequential(layer("Dense", dtype={"class_name": "DTypePolicy", "module": "keras",
                                             "config": {"name": "mixed_float16"}})),
            "computes in mixed_float16",
        ),
        ("[]", "describes no model"),
        ("{", "config.json can't be read"),
        ("[" * 100_000 + "]" * 100_000, "config.json can't be read"),
        ('{"config":' * 500 + "1" + "}" * 500, "nested deeper than 100 levels"),
    ],
)  # fmt: skip
def test_what_is_more_than_data_is_refused(tmp_path: Path, config: Any, says: str) -> None:
    """Broken: whoever can register a model could run code in the stage's worker, or read its files."""
    reason = keras_archive.refuse(archive(tmp_path, config))
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize("operation", ["core.Cast", "core.Slice", "linalg.Norm", "numpy.Add", "nn.Relu"])
def test_operations_that_only_compute_are_taken(operation: str, tmp_path: Path) -> None:
    """Broken: a functional model with `keras.ops.cast` in it could only be compiled where pickles are allowed."""
    module, _, name = operation.partition(".")
    config = sequential(layer(name, module=f"keras.src.ops.{module}"))
    assert keras_archive.refuse(archive(tmp_path, config)) is None


def test_a_refusal_says_what_to_do(tmp_path: Path) -> None:
    """Broken: who trusts the model's author would not learn how to say so."""
    reason = keras_archive.refuse(archive(tmp_path, sequential(LAMBDA)))
    assert reason is not None
    assert reason.endswith("or set compliance.allow_pickle in the policy if you trust where it comes from")


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ({"model.weights.h5": b"", "assets/vocabulary.txt": b"a"}, "holds assets/vocabulary.txt"),
        ({"model.weights.h5": b"", "../../evil": b"a"}, "holds ../../evil"),
        ({"other.h5": b""}, "holds other.h5"),
    ],
)
def test_records_that_no_plain_model_has_are_refused(tmp_path: Path, records: dict[str, bytes], says: str) -> None:
    """Broken: layers would read the files that they brought, wherever the archive says that these go."""
    reason = keras_archive.refuse(archive(tmp_path, sequential(DENSE), records))
    assert reason is not None
    assert says in reason


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_of_two_minds_is_refused(tmp_path: Path) -> None:
    """Broken: one reader of the zip file would see the harmless configuration, and Keras the other."""
    path = archive(tmp_path, sequential(DENSE))
    with zipfile.ZipFile(path, "a") as opened:
        opened.writestr("config.json", json.dumps(sequential(LAMBDA)))
    reason = keras_archive.refuse(path)
    assert reason is not None
    assert "lists a record twice" in reason


def test_what_unpacks_to_far_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    """Broken: a file of some megabytes would fill the worker's memory."""
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as opened:
        opened.writestr("config.json", json.dumps(sequential(DENSE)))
        with opened.open("model.weights.h5", "w", force_zip64=True) as record:
            for _ in range(1100):
                record.write(bytes(1 << 20))
    reason = keras_archive.refuse(path)
    assert reason is not None
    assert "unpacks to" in reason


def test_keras_gets_a_copy_without_what_only_training_needs(tmp_path: Path) -> None:
    """Broken: Keras would read records that nobody looked at, or run a loss that a stranger wrote."""
    path = archive(tmp_path, sequential(DENSE, compile_config={"loss": LAMBDA}))
    assert keras_archive.refuse(path) is None
    with keras_archive.checked(path) as copy, zipfile.ZipFile(copy) as opened:
        assert sorted(opened.namelist()) == ["config.json", "metadata.json", "model.weights.h5"]
        assert json.loads(opened.read("config.json")) == sequential(DENSE)
        assert opened.read("model.weights.h5") == b"\x89HDF"
    assert not copy.exists()


def test_a_compile_config_further_down_is_looked_at(tmp_path: Path) -> None:
    """Broken: Keras compiles a model within the model, and would run the Lambda that it calls its loss."""
    inner = sequential(DENSE, compile_config={"loss": LAMBDA})
    reason = keras_archive.refuse(archive(tmp_path, sequential(inner)))
    assert reason is not None
    assert "Lambda" in reason


@given(content=st.binary(max_size=400))
def test_any_bytes_are_an_answer(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Broken: a damaged file would end the run as a bug of ours, or crash the worker."""
    path = tmp_path_factory.mktemp("any") / "model.keras"
    path.write_bytes(content)
    reason = keras_archive.refuse(path)
    assert reason is not None
    assert "no readable .keras archive" in reason
