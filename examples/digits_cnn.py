"""A small convolutional network in PyTorch that reads handwritten digits (scikit-learn's `digits`, 8 × 8 pixels).

    python examples/digits_cnn.py

trains it in a few seconds and registers `digits-cnn` in the MLflow that MLFLOW_TRACKING_URI names.
"""

from __future__ import annotations

import mlflow
import numpy as np
import torch
from candidate import register
from mlflow.models import infer_signature
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

NAME = "digits-cnn"
SEED = 0


class DigitsNet(nn.Module):
    """[batch, 1, 8, 8] in [0, 1] → [batch, 10] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
        )
        self.classify = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(image))


def load_data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Train and test images and labels; the third part that is kept for testing has never been seen in training."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=1 / 3, random_state=SEED, stratify=labels
    )
    return train_x, train_y, test_x, test_y


def train(images: np.ndarray, labels: np.ndarray, epochs: int = 8) -> DigitsNet:
    """Train from scratch, with a fixed seed; the network comes back in evaluation mode."""
    torch.manual_seed(SEED)
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    for _ in range(epochs):
        model.train()
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
        schedule.step()
    return model.eval()  # a model logged in training mode keeps its dropout alive


def accuracy(model: DigitsNet, images: np.ndarray, labels: np.ndarray) -> float:
    with torch.no_grad():
        found = model(torch.from_numpy(images)).argmax(dim=1).numpy()
    return float((found == labels).mean())


def train_and_register(name: str = NAME, epochs: int = 8) -> str:
    """Train, log, register under the alias `candidate`. Returns `models:/NAME/VERSION`."""
    train_x, train_y, test_x, test_y = load_data()
    model = train(train_x, train_y, epochs)
    example = train_x[:8]  # two or more: with a single one the batch would be fixed to 1
    with torch.no_grad():
        signature = infer_signature(example, model(torch.from_numpy(example)).numpy())
    return register(
        name,
        lambda: mlflow.pytorch.log_model(
            model,
            name="model",
            signature=signature,
            input_example=example,
            serialization_format="pt2",
            pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}"],
        ),
        parameters={"epochs": epochs, "seed": SEED, "optimizer": "AdamW"},
        metrics={"accuracy": accuracy(model, test_x, test_y)},
        validation={"image": test_x, "y": test_y},
        calibration={"image": train_x[:300], "y": train_y[:300]},
        tags={"task": "classification", "data": "digits"},
    )


if __name__ == "__main__":
    print(train_and_register())
