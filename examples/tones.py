"""A small audio transformer that tells waves by their shape (sine, square, sawtooth, noise), logged as a transformers
pipeline: recording in, labels and scores out.

    python examples/tones.py

trains it in under a minute and registers `tones` in the MLflow that MLFLOW_TRACKING_URI names. Its data sets hold
waveforms, [n, samples] in float32, which compile-stage prepares with the model's own feature extractor.
"""

from __future__ import annotations

import mlflow
import numpy as np
import torch
import transformers
from candidate import register
from sklearn.model_selection import train_test_split

NAME = "tones"
SEED = 0
RATE = 8000  # Hz
SECONDS = 0.25
FRAMES, BINS = 24, 32
LABELS = ["sine", "square", "sawtooth", "noise"]


def waves(count: int, seed: int = SEED) -> tuple[np.ndarray, np.ndarray]:
    """Waves of 100 to 400 Hz in some noise, [count, 2000] in float32, and the numbers of their shapes."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % len(LABELS)
    phase = np.arange(int(RATE * SECONDS)) / RATE * random.uniform(100, 400, (count, 1)) + random.random((count, 1))
    cycle = phase % 1
    shapes = np.stack([np.sin(2 * np.pi * cycle), np.sign(cycle - 0.5), 2 * cycle - 1, random.normal(size=cycle.shape)])
    loud = shapes[labels, np.arange(count)] * random.uniform(0.1, 0.5, (count, 1))
    return (loud + 0.01 * random.normal(size=cycle.shape)).astype(np.float32), labels.astype(np.int64)


def extractor() -> transformers.ASTFeatureExtractor:
    """Mel energies of frames of 50 ms, twenty in a quarter of a second."""
    return transformers.ASTFeatureExtractor(sampling_rate=RATE, num_mel_bins=BINS, max_length=FRAMES)


def train(inputs: torch.Tensor, labels: np.ndarray, epochs: int) -> transformers.ASTForAudioClassification:
    """Two layers, 32 wide."""
    torch.manual_seed(SEED)
    model = transformers.ASTForAudioClassification(
        transformers.ASTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, patch_size=8,
            frequency_stride=8, time_stride=8, max_length=FRAMES, num_mel_bins=BINS, num_labels=len(LABELS),
            id2label=dict(enumerate(LABELS)), label2id={label: number for number, label in enumerate(LABELS)},
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    order = torch.Generator().manual_seed(SEED)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs), generator=order).split(32):
            loss = model(input_values=inputs[rows], labels=torch.from_numpy(labels)[rows]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def train_and_register(name: str = NAME, epochs: int = 40) -> str:
    """Train, log, register under the alias `candidate`. Returns `models:/NAME/VERSION`."""
    sounds, labels = waves(1200)
    train_x, test_x, train_y, test_y = train_test_split(
        sounds, labels, test_size=0.25, random_state=SEED, stratify=labels
    )
    prepare = extractor()
    given = {"sampling_rate": RATE, "return_tensors": "pt"}
    model = train(prepare(list(train_x), **given)["input_values"], train_y, epochs)
    with torch.no_grad():
        scores = model(input_values=prepare(list(test_x), **given)["input_values"]).logits
    pipeline = transformers.pipeline("audio-classification", model=model, feature_extractor=prepare)
    return register(
        name,
        lambda: mlflow.transformers.log_model(
            pipeline,
            name="model",
            task="audio-classification",
            pip_requirements=[f"transformers=={transformers.__version__}", "torch"],
        ),
        parameters={"epochs": epochs, "seed": SEED},
        metrics={"accuracy": float((scores.argmax(-1).numpy() == test_y).mean())},
        validation={"audio": test_x, "y": test_y},
        calibration={"audio": train_x[:200], "y": train_y[:200]},
        tags={"task": "audio-classification", "data": "synthetic"},
    )


if __name__ == "__main__":
    print(train_and_register())
