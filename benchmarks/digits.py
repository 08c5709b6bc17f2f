"""A convolutional network trained on handwritten digits, and what makes it hard for 8 bits: channels whose sizes differ
by orders of magnitude.

Training a network this small on data this easy leaves channels of much the same size, and any int8 holds its accuracy.
So each channel is multiplied by a factor of its own before a ReLU, and the weights behind are divided by it: the
function stays the same, while one scale for all channels of a tensor no longer serves the small ones. Trained networks
are like that (Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction, 2019, figure 2).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

SEED, EPOCHS, ENLARGED = 0, 6, 2


@cache
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images [count, 1, 8, 8] in [0, 1] and labels to train on, then those that were never trained on (599)."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None]
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target.astype(np.int64), test_size=1 / 3, random_state=SEED, stratify=digits.target
    )
    return train_x, train_y, test_x, test_y


def digits(spread: float) -> nn.Module:
    """[batch, 1, 8, 8], enlarged to 16 × 16 in the network so that there is something to compute → 10, trained. Factors
    of channels lie between exp(-spread) and exp(spread)."""
    torch.manual_seed(SEED)
    layers: list[nn.Module] = _layer(1, 32)
    width = 32
    for outputs, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (128, 1)):
        layers += _layer(width, outputs, stride)
        width = outputs
    model = nn.Sequential(
        nn.Upsample(scale_factor=ENLARGED), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    )
    _train(model)
    _spread(layers, spread)
    return model.eval()


def _layer(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


@torch.enable_grad()  # whoever exports it does so without
def _train(model: nn.Module) -> None:
    images, labels = map(torch.from_numpy, data()[:2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
        schedule.step()


@torch.no_grad()
def _spread(layers: list[nn.Module], spread: float) -> None:
    drawn = torch.Generator().manual_seed(SEED)
    for norm, behind in zip(layers[1::3], layers[3::3], strict=False):
        factors = torch.exp(torch.empty(norm.num_features).uniform_(-spread, spread, generator=drawn))
        norm.weight *= factors
        norm.bias *= factors
        behind.weight /= factors.reshape(1, -1, 1, 1)
