"""A picture, as a client gives it → the array that an image classifier reads.

Vendored with `serving.media`. It follows the Pillow processors of transformers 5: Pillow decodes and resizes, NumPy
does the rest.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compile_stage.serving.prediction_io import InputRefusedError

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

_CHANNELS = (1, 3, 4)
_CROPPED_BELOW = 384  # ConvNext's processor warps larger pictures instead of cropping them


def read_image(given: Any, how: Mapping[str, Any]) -> Array:
    """The network's input for one picture, [channels, height, width] in float32.

    Args:
        given: The path of a file, its base64 text or bytes, or an array of pixels, [height, width, channels] or
            [channels, height, width].
        how: The manifest's `answer.media.processor`: `resize` (a size, None for no change), `resample` (Pillow's
            number), `crop_pct`, `crop` ([height, width] or None), `rescale` (factor or None), `mean` and `std` (None
            for no normalization).

    Raises:
        InputRefusedError: It is no picture, or an address on the web.
    """
    import numpy as np

    pixels: Any = _pixels(given)
    if how["resize"] is not None:
        pixels = _resized(pixels, how)
    if how["crop"] is not None:
        pixels = _cropped(pixels, *how["crop"])
    if how["rescale"] is not None:
        pixels = (pixels.astype(np.float64) * how["rescale"]).astype(np.float32)
    if how["mean"] is not None:
        if pixels.shape[0] != len(how["mean"]):
            raise InputRefusedError(f"a picture has {len(how['mean'])} channels, not {pixels.shape[0]}")
        pixels = pixels if pixels.dtype.kind == "f" else pixels.astype(np.float32)
        mean, std = (np.array(how[name], pixels.dtype)[:, None, None] for name in ("mean", "std"))
        pixels = (pixels - mean) / std
    found: Array = np.ascontiguousarray(pixels, np.float32)
    return found


def _pixels(given: Any) -> Array:
    """[channels, height, width]."""
    import numpy as np

    if isinstance(given, str | bytes):
        return _channels_first(opened(given))
    array: Any = np.asarray(given)
    if array.dtype.kind not in "uif" or array.ndim not in (2, 3):
        raise InputRefusedError(
            "a picture is the path of a file, its base64 text, its bytes, or an array of pixels [height, width, "
            f"channels], not {type(given).__name__}"
        )
    if array.ndim == 2:
        array = array[None]
    if array.shape[0] in _CHANNELS:
        found: Array = array
        return found
    if array.shape[2] in _CHANNELS:
        return _channels_first(array)
    raise InputRefusedError(f"an array of shape {list(array.shape)} has no axis of 1, 3 or 4 channels")


def _channels_first(pixels: Any) -> Array:
    import numpy as np

    found: Array = np.moveaxis(pixels, -1, 0)
    return found


def opened(given: str | bytes) -> Array:
    """The pixels of an upright picture in RGB, [height, width, 3]. What clients name on the web is not fetched: a
    server would reach what they can't.

    Raises:
        InputRefusedError: It is no picture.
    """
    import numpy as np
    from PIL import Image, ImageOps

    if isinstance(given, str) and given.startswith(("http://", "https://")):
        raise InputRefusedError("pictures are not fetched from the web: send the file's content as base64 text")
    try:
        pixels: Array = np.array(ImageOps.exif_transpose(Image.open(_source(given))).convert("RGB"))
    except (OSError, ValueError, SyntaxError, binascii.Error, Image.DecompressionBombError) as error:
        raise InputRefusedError(f"it is no picture: {str(error)[:100]}") from error
    return pixels


def _source(given: str | bytes) -> Any:
    if isinstance(given, bytes):
        return io.BytesIO(given)
    if len(given) < 4096 and os.path.isfile(given):  # noqa: PTH113 - Path refuses texts with a null character
        return given
    text = given.split(",", 1)[-1] if given.startswith("data:image/") else given
    return io.BytesIO(base64.decodebytes(text.encode()))


def _resized(pixels: Array, how: Mapping[str, Any]) -> Array:
    size, resample = how["resize"], how["resample"]
    height, width = pixels.shape[1:]
    edge = size.get("shortest_edge")
    if how.get("crop_pct") is not None:
        if edge >= _CROPPED_BELOW:
            return _to_size(pixels, edge, edge, resample)
        larger = _keeping_ratio(height, width, int(edge / how["crop_pct"]))
        return _cropped(_to_size(pixels, *larger, resample), edge, edge)
    if edge is not None:
        return _to_size(pixels, *_keeping_ratio(height, width, edge), resample)
    return _to_size(pixels, size["height"], size["width"], resample)


def _keeping_ratio(height: int, width: int, shortest: int) -> tuple[int, int]:
    longest = int(shortest * max(height, width) / min(height, width))
    return (longest, shortest) if width <= height else (shortest, longest)


def _to_size(pixels: Array, height: int, width: int, resample: int) -> Array:
    """Pillow resizes 8-bit pictures: fractions in [0, 1] go there and back, as in transformers."""
    import numpy as np
    from PIL import Image

    values: Any = pixels
    fractions = False
    if values.dtype != np.uint8:
        whole = bool(np.allclose(values, values.astype(int)))
        low, high = float(values.min()), float(values.max())
        fractions = not whole
        if low < 0 or high > (1 if fractions else 255):
            raise InputRefusedError(f"pixels are whole numbers up to 255 or fractions up to 1, not {low:g} to {high:g}")
        values = ((values.astype(np.float64) * 255).astype(np.float32) if fractions else values).astype(np.uint8)
    channels_last = np.moveaxis(values, 0, -1)
    picture = Image.fromarray(channels_last[..., 0] if channels_last.shape[-1] == 1 else channels_last)
    resized = np.array(picture.resize((width, height), resample=resample))
    found: Any = np.moveaxis(resized[..., None] if resized.ndim == 2 else resized, -1, 0)
    answer: Array = (found.astype(np.float64) / 255).astype(np.float32) if fractions else found
    return answer


def _cropped(pixels: Array, height: int, width: int) -> Array:
    """The middle of the picture; zeros around one that is too small."""
    import numpy as np

    have_height, have_width = pixels.shape[1:]
    top, left = (have_height - height) // 2, (have_width - width) // 2
    if top >= 0 and left >= 0 and top + height <= have_height and left + width <= have_width:
        return pixels[:, top : top + height, left : left + width]
    tall, wide = max(height, have_height), max(width, have_width)
    above, before = -(-(tall - have_height) // 2), -(-(wide - have_width) // 2)
    padded = np.zeros((pixels.shape[0], tall, wide), pixels.dtype)
    padded[:, above : above + have_height, before : before + have_width] = pixels
    top, left = top + above, left + before
    return padded[:, max(0, top) : min(tall, top + height), max(0, left) : min(wide, left + width)]
