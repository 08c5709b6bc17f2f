"""The two networks that benchmarks measure, built from transformers' configurations with random weights: nothing is
downloaded.

python examples/models.py resnet50 | bert6        registers one in the MLflow that MLFLOW_TRACKING_URI names
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import mlflow
import numpy as np
import torch
import transformers
from candidate import register
from mlflow.models import infer_signature
from torch import nn

SEED = 1
SEQUENCE = 128
VOCABULARY = 30522


class ResNet50(nn.Module):
    """[batch, 3, 224, 224] → [batch, 1000] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.network = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.network(pixel_values=pixel_values).logits


class Bert6(nn.Module):
    """Six layers, 384 wide: [batch, 128] token ids and mask → [batch, 128, 384]."""

    def __init__(self) -> None:
        super().__init__()
        configuration = transformers.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=VOCABULARY
        )
        self.network = transformers.BertModel(configuration)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.network(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def resnet50() -> nn.Module:
    """ResNet-50 in evaluation mode. Its batch norms get statistics as after training, or every activation would
    vanish."""
    torch.manual_seed(SEED)
    model = ResNet50().eval()
    random = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.copy_(torch.randn(module.num_features, generator=random) * 0.1)
                module.running_var.copy_(torch.rand(module.num_features, generator=random) + 0.5)
    return model


def bert6() -> nn.Module:
    """The 6-layer BERT in evaluation mode."""
    torch.manual_seed(SEED)
    return Bert6().eval()


def samples(name: str, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of a model by name: noise for images; random tokens, of which the last are padding, for text."""
    random = np.random.default_rng(seed)
    if name == "resnet50":
        return {"pixel_values": random.standard_normal((count, 3, 224, 224), dtype=np.float32)}
    mask = np.ones((count, SEQUENCE), np.int64)
    mask[:, 100:] = 0
    return {"input_ids": random.integers(0, VOCABULARY, (count, SEQUENCE)), "attention_mask": mask}


BUILDERS = {"resnet50": resnet50, "bert6": bert6}


def register_model(name: str, model: nn.Module, draw: Callable[..., dict[str, np.ndarray]] = samples) -> str:
    """Log and register one under the alias `candidate`. Its labels mean nothing: it was never trained. Returns its
    URI."""
    validation, calibration = draw(name, 64, seed=1), draw(name, 64, seed=2)
    example = {key: value[:2] for key, value in validation.items()}
    with torch.no_grad():
        answer = model(*map(torch.from_numpy, example.values())).numpy()
    single = next(iter(example.values())) if len(example) == 1 else None
    signature = infer_signature(example if single is None else single, answer)
    return register(
        name,
        lambda: mlflow.pytorch.log_model(
            model,
            name="model",
            signature=signature,
            input_example=list(example.values()) if single is None else single,
            serialization_format="pt2",
            pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}"],
        ),
        parameters={"seed": SEED},
        metrics={},
        validation=validation | {"y": np.zeros(64, np.int64)},
        calibration=calibration | {"y": np.zeros(64, np.int64)},
        tags={"task": "benchmark", "weights": "random"},
    )


if __name__ == "__main__":
    for chosen in sys.argv[1:] or list(BUILDERS):
        print(register_model(chosen, BUILDERS[chosen]()))
