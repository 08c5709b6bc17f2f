"""A small convolutional network in Keras that reads handwritten digits (scikit-learn's `digits`, 8 × 8 pixels).

    python examples/digits_keras.py

trains it in a few seconds and registers `digits-keras` in the MLflow that MLFLOW_TRACKING_URI names. It needs
TensorFlow, Keras, scikit-learn and MLflow; where these are in an environment of their own, the stage needs none of
them: it runs the original in a toolchain (`compile-stage toolchain install tensorflow`).

    python examples/digits_keras.py --saved-model

registers the same network as `digits-saved-model`, a SavedModel of the flavor `tensorflow`.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import mlflow
import numpy as np
import tensorflow as tf
from candidate import register
from mlflow.models import infer_signature
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SEED = 0


def load_data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Train and test images [batch, 8, 8, 1] in [0, 1], and labels; the test part has never been seen in training."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int64)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=1 / 3, random_state=SEED, stratify=labels
    )
    return train_x, train_y, test_x, test_y


def train(images: np.ndarray, labels: np.ndarray, epochs: int = 8) -> keras.Model:
    """[batch, 8, 8, 1] in [0, 1] → [batch, 10] logits; trained from scratch with a fixed seed."""
    keras.utils.set_random_seed(SEED)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            keras.layers.Conv2D(32, 3, padding="same"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Conv2D(64, 3, padding="same"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(images, labels, batch_size=64, epochs=epochs, verbose=0)
    return model


class Served(tf.Module):
    """The network as a module whose call has one signature, which is what a SavedModel is served by."""

    def __init__(self, network: keras.Model) -> None:
        super().__init__()
        self.network = network

    @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 1), tf.float32, name="image")])
    def __call__(self, image: tf.Tensor) -> tf.Tensor:
        return self.network(image, training=False)


def train_and_register(name: str = "", epochs: int = 8, *, saved_model: bool = False) -> str:
    """Train, log, register under the alias `candidate`. Returns `models:/NAME/VERSION`."""
    train_x, train_y, test_x, test_y = load_data()
    model = train(train_x, train_y, epochs)
    example = train_x[:8]
    # MLflow 3.17 can't save an input example with a model of the flavor keras; the data sets below do without.
    extra = {"input_example": example} if saved_model else {}
    signature = infer_signature(example, np.asarray(model(example, training=False)))
    flavor = mlflow.tensorflow if saved_model else mlflow.keras
    return register(
        name or ("digits-saved-model" if saved_model else "digits-keras"),
        lambda: flavor.log_model(
            Served(model) if saved_model else model,
            name="model",
            signature=signature,
            pip_requirements=[f"tensorflow=={tf.__version__}", f"keras=={keras.__version__}"],
            **extra,
        ),
        parameters={"epochs": epochs, "seed": SEED, "optimizer": "AdamW"},
        metrics={"accuracy": float(model.evaluate(test_x, test_y, verbose=0)[1])},
        validation={"image": test_x, "y": test_y},
        calibration={"image": train_x[:300], "y": train_y[:300]},
        tags={"task": "classification", "data": "digits"},
    )


if __name__ == "__main__":
    print(train_and_register(saved_model="--saved-model" in sys.argv))
