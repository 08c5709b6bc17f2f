"""A small convolutional network in JAX that reads handwritten digits (scikit-learn's `digits`, 8 × 8 pixels).

    python examples/digits_jax.py

trains it in a few seconds and registers `digits-jax` in the MLflow that MLFLOW_TRACKING_URI names. It needs JAX,
scikit-learn, MLflow and compile-stage; with jax2onnx an ONNX lies beside the StableHLO, so that ONNX Runtime and
OpenVINO can compile it too. The stage itself needs no JAX: it runs the original in a toolchain
(`compile-stage toolchain install jax`).
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from candidate import register
from jax import lax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import compile_stage.jax

SEED = 0
LAYOUT = ("NHWC", "HWIO", "NHWC")


def load_data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Train and test images [batch, 8, 8, 1] in [0, 1], and labels; the test part has never been seen in training."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int64)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=1 / 3, random_state=SEED, stratify=labels
    )
    return train_x, train_y, test_x, test_y


def initial() -> dict[str, jax.Array]:
    """Weights before training, by He's rule."""
    shapes = {"conv1": (3, 3, 1, 32), "conv2": (3, 3, 32, 64), "conv3": (3, 3, 64, 64), "dense": (1024, 10)}
    keys = jax.random.split(jax.random.key(SEED), len(shapes))
    weights = {
        name: jax.random.normal(key, shape) * np.sqrt(2 / np.prod(shape[:-1]))
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return {**weights, **{f"{name}_bias": jnp.zeros(shape[-1]) for name, shape in shapes.items()}}


def network(weights: dict[str, jax.Array], image: jax.Array) -> jax.Array:
    """[batch, 8, 8, 1] in [0, 1] → [batch, 10] logits."""
    x = image
    for name, stride in (("conv1", 1), ("conv2", 2), ("conv3", 1)):
        x = lax.conv_general_dilated(x, weights[name], (stride, stride), "SAME", dimension_numbers=LAYOUT)
        x = jax.nn.relu(x + weights[f"{name}_bias"])
    return x.reshape(x.shape[0], 1024) @ weights["dense"] + weights["dense_bias"]


@jax.jit
def step(weights, moments, count, images, labels):
    """One step of Adam."""

    def loss(weights):
        scores = jax.nn.log_softmax(network(weights, images))
        return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))

    slope = jax.grad(loss)(weights)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], slope)
    second = jax.tree.map(lambda m, g: 0.999 * m + 0.001 * g * g, moments[1], slope)
    rate = 2e-3 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    return jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), weights, first, second), (first, second)


def train(images: np.ndarray, labels: np.ndarray, epochs: int = 8) -> dict[str, jax.Array]:
    """Trained weights, from scratch with a fixed seed."""
    weights = initial()
    moments = (jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights))
    order, count = np.random.default_rng(SEED), 0
    for _ in range(epochs):
        mixed = order.permutation(len(images))
        for rows in np.array_split(mixed[: len(mixed) // 64 * 64], len(mixed) // 64):
            count += 1
            weights, moments = step(weights, moments, count, images[rows], labels[rows])
    return weights


def train_and_register(name: str = "digits-jax", epochs: int = 8) -> str:
    """Train, log, register under the alias `candidate`. Returns `models:/NAME/VERSION`."""
    train_x, train_y, test_x, test_y = load_data()
    weights = train(train_x, train_y, epochs)
    right = np.asarray(network(weights, test_x)).argmax(-1) == test_y
    return register(
        name,
        lambda: compile_stage.jax.log_model(
            lambda image: network(weights, image), name="model", example=train_x[:8], input_example=train_x[:8]
        ),
        parameters={"epochs": epochs, "seed": SEED, "optimizer": "Adam"},
        metrics={"accuracy": float(right.mean())},
        validation={"image": test_x, "y": test_y},
        calibration={"image": train_x[:300], "y": train_y[:300]},
        tags={"task": "classification", "data": "digits"},
    )


if __name__ == "__main__":
    print(train_and_register())
