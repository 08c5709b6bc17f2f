"""The networks that benchmarks measure; those of examples/models.py among them. All but `digits` have random
weights."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import onnx

sys.path[:0] = [str(Path(__file__).parents[1] / "examples")]

import digits  # noqa: E402
import models as examples  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import nn  # noqa: E402


def small() -> nn.Module:
    """Three convolutions and a linear layer: [batch, 3, 96, 96] → 10."""
    torch.manual_seed(examples.SEED)
    layers, width = [], 3
    for outputs in (16, 32, 64):
        layers += [nn.Conv2d(width, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)).eval()


def separable() -> nn.Module:
    """Depthwise-separable blocks as MobileNet has them, with ReLU: [batch, 3, 96, 96] → 100. Scales differ from channel
    to channel, as training leaves them."""
    torch.manual_seed(examples.SEED)

    def layer(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
        norm = nn.BatchNorm2d(outputs)
        nn.init.uniform_(norm.weight, 0.1, 2.0)
        nn.init.normal_(norm.bias, 0.0, 0.3)
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.1, 1.5)
        return [nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False), norm, nn.ReLU()]

    layers, width = layer(3, 32, 3, 2), 32
    for outputs, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers += [*layer(width, width, 3, stride, width), *layer(width, outputs, 1)]
        width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100)).eval()


class _Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = transformers.ViTForImageClassification(
            transformers.ViTConfig(
                image_size=96, patch_size=8, hidden_size=192, num_hidden_layers=6, num_attention_heads=3,
                intermediate_size=768, num_labels=100,
            )
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(pixel_values=x).logits


def vit() -> nn.Module:
    """A vision transformer as wide as ViT-Tiny, six layers: [batch, 3, 96, 96] → 100."""
    torch.manual_seed(examples.SEED)
    return _Vit().eval()


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(32, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps, _ = self.layers(x)
        return self.head(steps[:, -1])


def lstm() -> nn.Module:
    """Two layers of LSTM, 128 wide, over 64 steps of 32 values: [batch, 64, 32] → 10."""
    torch.manual_seed(examples.SEED)
    return _Lstm().eval()


NETWORKS = {
    **examples.BUILDERS, "separable": separable, "small": small, "vit": vit, "lstm": lstm,
    "digits": partial(digits.digits, 4.0), "digits-wild": partial(digits.digits, 6.0),
}  # fmt: skip


def samples(name: str, count: int, seed: int) -> dict[str, np.ndarray]:
    """Inputs of a network by name, `count` of each."""
    if name in examples.BUILDERS:
        return examples.samples(name, count, seed)
    if name.startswith("digits"):
        return {"input": np.random.default_rng(seed).permutation(digits.data()[0])[:count]}
    shape = (64, 32) if name == "lstm" else (3, 96, 96)
    key = "x" if name in ("vit", "lstm") else "input"  # as nn.Sequential calls it
    return {key: np.random.default_rng(seed).standard_normal((count, *shape), dtype=np.float32)}


def register(name: str) -> str:
    """Log and register one in the MLflow that MLFLOW_TRACKING_URI names; returns its URI."""
    return examples.register_model(name, NETWORKS[name](), samples)


def export(name: str) -> onnx.ModelProto:
    """A network of `NETWORKS` as ONNX, with a free batch and one output, `answer`."""
    example = samples(name, 2, 0)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            NETWORKS[name](), tuple(map(torch.from_numpy, example.values())), dynamo=True, verbose=False,
            input_names=list(example), output_names=["answer"],
            dynamic_shapes=tuple({0: torch.export.Dim("batch")} for _ in example),
        )  # fmt: skip
    return program.model_proto
