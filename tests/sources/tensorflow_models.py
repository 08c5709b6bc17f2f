"""Small Keras and TensorFlow models, logged as MLflow lays them out, and what the source makes of each: run by the
interpreter of TensorFlow's toolchain, `tensorflow_models.py FOLDER`, findings as JSON on the last line.

MLflow is not in that toolchain, so the folders are written as `mlflow.keras` and `mlflow.tensorflow` 3.17 write them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from compile_stage.core import plugins
from compile_stage.core.digest import digest_tree, plain
from compile_stage.core.errors import CompileStageError
from compile_stage.core.records import Compliance, SourceModel, Target

SEED = 7


def sequential() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3), name="image"),
            layers.Rescaling(1 / 255),
            layers.Conv2D(8, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
            layers.Conv2DTranspose(4, 3, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(5, activation="softmax"),
        ]
    )


def functional() -> keras.Model:
    a, b = keras.Input((8,), name="a"), keras.Input((6,), name="b", dtype="int32")
    embedded = layers.GlobalAveragePooling1D()(layers.Embedding(20, 8)(b))
    joined = layers.LayerNormalization()(layers.Add()([a, embedded]))
    left = layers.Dense(3, activation="gelu", name="l")(keras.ops.concatenate([joined, a[:, :4] * 2.0], axis=-1))
    return keras.Model({"b": b, "a": a}, {"right": keras.ops.mean(joined, axis=-1, keepdims=True), "left": left})


def normalized() -> keras.Model:
    """With tensors that are no variables, operations of `keras.ops` that are no layers, and a branch that is NaN where
    it is not taken."""
    mean, variance = np.linspace(-1, 1, 4), np.linspace(0.5, 2, 4)
    x = keras.Input((4,), name="x")
    scaled = layers.Normalization(mean=mean, variance=variance)(x)
    positive = keras.ops.cast(scaled > 0.0, "float32")
    logarithm = keras.ops.where(scaled > 0.0, keras.ops.log(scaled), -scaled)
    return keras.Model(x, layers.Dense(3)(keras.ops.concatenate([scaled, positive, logarithm], axis=-1)))


def recurrent() -> keras.Model:
    x = keras.Input((None, 4), name="steps")
    y = layers.Bidirectional(layers.LSTM(6, return_sequences=True))(x)
    z = layers.GRU(5)(y)
    return keras.Model(x, [layers.Dense(2)(z), layers.GlobalMaxPooling1D()(y)])


def two_heads() -> keras.Model:
    x = keras.Input((4,), name="x")
    return keras.Model(x, [layers.Dense(3, name="classes")(x), layers.Dense(1, name="size")(x)])


def attention() -> keras.Model:
    x = keras.Input((6, 8), name="tokens")
    y = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    y = layers.Dense(8)(layers.Dense(16, activation="silu")(y))
    return keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(y)))


def separable() -> keras.Model:
    x = keras.Input((12, 12, 3), name="image")
    y = layers.SeparableConv2D(6, 3, strides=2, padding="same", activation="relu6")(x)
    y = layers.DepthwiseConv2D(3, padding="same")(layers.ZeroPadding2D()(y))
    y = layers.UpSampling2D(interpolation="bilinear")(layers.PReLU(shared_axes=[1, 2])(y))
    y = layers.AveragePooling2D(2)(layers.GroupNormalization(3)(y))
    return keras.Model(x, layers.GlobalMaxPooling2D()(y))


def deferred() -> keras.Model:
    """A model that was never given an input shape: the batch of its first call is in the archive."""
    model = keras.Sequential([layers.Dense(3, activation="tanh"), layers.Dense(2)])
    model(np.zeros((2, 4), np.float32))
    return model


def with_lambda() -> keras.Model:
    return keras.Sequential([keras.Input((4,), name="x"), layers.Lambda(lambda x: x * 2 + 1), layers.Dense(2)])


class OfOne(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(np.random.default_rng(SEED).standard_normal((4, 3)), dtype=tf.float32)

    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32, name="x")])
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return tf.nn.softplus(x @ self.weight)


class OfTwo(OfOne):
    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32, name="q"),
                                  tf.TensorSpec((None, 4), tf.float32, name="p")])  # fmt: skip
    def __call__(self, q: tf.Tensor, p: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"sum": tf.reduce_sum(q * 2 - p, axis=1), "norm": tf.norm(p @ self.weight, axis=1)}


class CallsPython(OfOne):
    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32, name="x")])
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.py_function(lambda y: y, [x], tf.float32), (None, 4))


class ReadsAFile(OfOne):
    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32, name="x")])
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return x + tf.cast(tf.strings.length(tf.io.read_file("/etc/hostname")), tf.float32)


class Table(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        made = tf.lookup.KeyValueTensorInitializer([1, 2], [3.0, 4.0], key_dtype=tf.int64)
        self.table = tf.lookup.StaticHashTable(made, 0.0)

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.int64, name="x")])
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return self.table.lookup(x)


class Unconverted(OfOne):
    @tf.function(input_signature=[tf.TensorSpec((None, 2, 2), tf.float32, name="x")])
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return tf.linalg.inv(x)


def logged(folder: Path, flavor: str, **settings: Any) -> SourceModel:
    described = {"flavors": {flavor: settings}}
    (folder / "MLmodel").write_text(json.dumps(described))
    return SourceModel(
        uri="models:/m/1", name="m", version="1", flavor=flavor, path=str(folder), digest=digest_tree(folder),
        mlmodel=described,
    )  # fmt: skip


def archived(folder: Path, model: keras.Model) -> SourceModel:
    (folder / "data").mkdir()
    model.save(folder / "data" / "model.keras")
    return logged(folder, "keras", data="data", keras_backend="tensorflow", save_exported_model=False)


def with_names(source: SourceModel, **outputs: int) -> SourceModel:
    """The same model with a signature of these outputs, each with its features."""
    specs = [
        {"type": "tensor", "name": name, "tensor-spec": {"dtype": "float32", "shape": [-1, size]}}
        for name, size in outputs.items()
    ]
    described = {**(source.mlmodel or {}), "signature": {"inputs": None, "outputs": json.dumps(specs)}}
    (Path(source.path) / "MLmodel").write_text(json.dumps(described))
    return dataclasses.replace(source, mlmodel=described, digest=digest_tree(Path(source.path)))


def saved(folder: Path, module: tf.Module) -> SourceModel:
    tf.saved_model.save(module, str(folder / "tf2model"))
    return logged(folder, "tensorflow", saved_model_dir="tf2model", model_type="tf2-module")


def exported(folder: Path, model: keras.Model) -> SourceModel:
    """As `mlflow.keras.log_model(save_exported_model=True)`."""
    (folder / "data").mkdir()
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.call, [tf.TensorSpec((None, *model.inputs[0].shape[1:]), "float32")])
    archive.write_out(str(folder / "data" / "model"))
    return logged(folder, "keras", data="data", keras_backend="tensorflow", save_exported_model=True)


MODELS: Mapping[str, Callable[[Path], SourceModel]] = {
    "sequential": lambda folder: archived(folder, sequential()),
    "functional": lambda folder: archived(folder, functional()),
    "normalized": lambda folder: archived(folder, normalized()),
    "recurrent": lambda folder: archived(folder, recurrent()),
    "named-outputs": lambda folder: with_names(archived(folder, two_heads()), size=1, classes=3),
    "attention": lambda folder: archived(folder, attention()),
    "separable": lambda folder: archived(folder, separable()),
    "deferred": lambda folder: archived(folder, deferred()),
    "lambda": lambda folder: archived(folder, with_lambda()),
    "module": lambda folder: saved(folder, OfOne()),
    "module-of-two": lambda folder: saved(folder, OfTwo()),
    "exported": lambda folder: exported(folder, sequential()),
    "python-function": lambda folder: saved(folder, CallsPython()),
    "reads-a-file": lambda folder: saved(folder, ReadsAFile()),
    "table": lambda folder: saved(folder, Table()),
    "unconverted": lambda folder: saved(folder, Unconverted()),
}


def prove(source: SourceModel, folder: Path) -> dict[str, Any]:
    """Refused or not, exported twice, opened, and its answers to two batches, `batch-1.npz` and `batch-3.npz`."""
    reader = plugins.load("sources", source.flavor)
    found: dict[str, Any] = {
        "refused": reader.refuse(source, Compliance()),
        "allowed": reader.refuse(source, Compliance(allow_pickle=True)),
    }
    if found["allowed"] is not None or (found["refused"] is not None and "Lambda" not in found["refused"]):
        return found
    try:
        models = [reader.export(source, {}, folder / name) for name in ("first", "again")]
    except CompileStageError as error:
        return {**found, "error": str(error)}
    rng = np.random.default_rng(SEED)
    with reader.open(source, Target(name="cpu")) as session:
        for size in (1, 3):
            batch = {
                spec.name: _values(rng, spec.dtype, [size if isinstance(n, str) and i == 0 else 5 if isinstance(n, str)
                                                     else n for i, n in enumerate(spec.shape)])
                for spec in session.signature.inputs
            }  # fmt: skip
            answers = session.run(batch)
            arrays = {f"in:{name}": array for name, array in batch.items()}
            np.savez(folder / f"batch-{size}.npz", **arrays, **{f"out:{name}": a for name, a in answers.items()})
        opened = plain(session.signature)
    if source.path.endswith("sequential/model"):
        target = Target(name="cpu", batch_sizes=(1, 3))
        for form in ("tflite", "stablehlo"):
            twice = [reader.export_for(form, source, target, folder / f"{form}-{time}") for time in (1, 2)]
            found[form] = [plain(made.signature) == opened and made.digest for made in twice]
    return {**found, "digests": [m.digest for m in models], "exported": plain(models[0].signature), "opened": opened}


def _values(rng: np.random.Generator, dtype: str, shape: list[int]) -> np.ndarray:
    values = rng.integers(0, 20, shape) if "int" in dtype else rng.standard_normal(shape)
    return values.astype(dtype)


if __name__ == "__main__":
    findings = {}
    for name, make in MODELS.items():
        keras.utils.set_random_seed(SEED)
        place = Path(sys.argv[1]) / name
        (place / "model").mkdir(parents=True)
        try:
            findings[name] = prove(make(place / "model"), place)
        except Exception as error:  # noqa: BLE001 - one model's trouble is that model's finding
            findings[name] = {"error": f"{type(error).__name__}: {error}"}
    print()
    print(json.dumps(findings))
