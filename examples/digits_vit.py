"""A small vision transformer that reads handwritten digits, logged as a transformers pipeline: picture in, labels and
scores out.

    python examples/digits_vit.py

trains it in under a minute and registers `digits-vit` in the MLflow that MLFLOW_TRACKING_URI names. Its data sets hold
pictures, [n, height, width, 3] in uint8, which compile-stage prepares with the model's own image processor.
"""

from __future__ import annotations

import base64
import io

import mlflow
import numpy as np
import torch
import transformers
from candidate import register
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

NAME = "digits-vit"
SEED = 0
SIDE = 16
LABELS = [f"digit {number}" for number in range(10)]


def pictures() -> tuple[np.ndarray, np.ndarray]:
    """White digits on black, [1797, 16, 16, 3] in uint8, and their numbers."""
    digits = load_digits()
    grey = (digits.images * (255 / 16)).astype(np.uint8)
    large = grey.repeat(SIDE // 8, axis=1).repeat(SIDE // 8, axis=2)
    return np.repeat(large[..., None], 3, axis=3), digits.target.astype(np.int64)


def processor() -> transformers.ViTImageProcessorPil:
    """Any picture as 16 x 16 pixels in [-1, 1]."""
    return transformers.ViTImageProcessorPil(size={"height": SIDE, "width": SIDE})


def train(inputs: torch.Tensor, labels: np.ndarray, epochs: int) -> transformers.ViTForImageClassification:
    """Two layers, 48 wide, over patches of 4 x 4."""
    torch.manual_seed(SEED)
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=SIDE,
            patch_size=4, num_labels=10, id2label=dict(enumerate(LABELS)),
            label2id={label: number for number, label in enumerate(LABELS)},
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(SEED)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(inputs), generator=order).split(64):
            loss = model(pixel_values=inputs[rows], labels=torch.from_numpy(labels)[rows]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def encoded(picture: np.ndarray) -> str:
    """The base64 text of a PNG, as clients send it."""
    content = io.BytesIO()
    Image.fromarray(picture).save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def train_and_register(name: str = NAME, epochs: int = 40) -> str:
    """Train, log, register under the alias `candidate`. Returns `models:/NAME/VERSION`."""
    images, labels = pictures()
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.2, random_state=SEED, stratify=labels
    )
    prepare = processor()
    model = train(prepare(images=list(train_x), return_tensors="pt")["pixel_values"], train_y, epochs)
    with torch.no_grad():
        scores = model(prepare(images=list(test_x), return_tensors="pt")["pixel_values"]).logits
    pipeline = transformers.pipeline("image-classification", model=model, image_processor=prepare)
    return register(
        name,
        lambda: mlflow.transformers.log_model(
            pipeline,
            name="model",
            task="image-classification",
            input_example=[encoded(picture) for picture in test_x[:2]],
            pip_requirements=[f"transformers=={transformers.__version__}", "torch", "pillow"],
        ),
        parameters={"epochs": epochs, "seed": SEED},
        metrics={"accuracy": float((scores.argmax(-1).numpy() == test_y).mean())},
        validation={"image": test_x, "y": test_y},
        calibration={"image": train_x[:300], "y": train_y[:300]},
        tags={"task": "image-classification", "data": "digits"},
    )


if __name__ == "__main__":
    print(train_and_register())
