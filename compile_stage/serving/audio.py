"""A recording, as a client gives it → the array that an audio classifier reads.

Vendored with `serving.media`. It follows the feature extractors of transformers 5, in NumPy. WAV files at the model's
own sampling rate are read here; all others, as in transformers, by the program ffmpeg.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import shutil
import subprocess
import wave
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.serving.prediction_io import InputRefusedError

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array

_FRAME, _HOP, _FFT = 400, 160, 512  # samples, whatever the sampling rate: as in transformers
_LOWEST_HZ = 20.0
_FLOOR = 1.192092955078125e-07  # float32's epsilon
_PREEMPHASIS = 0.97
_FFMPEG_TIMEOUT_S = 120


def read_audio(given: Any, how: Mapping[str, Any]) -> Array:
    """The network's input for one recording in float32: [samples], or [frames, mel bins].

    Args:
        given: The path of a file, its bytes (or their base64), or the waveform as an array at the model's own rate.
        how: The manifest's `answer.media.processor`: `kind` (`waveform` or `mel`), `sampling_rate` (Hz), `shortest`
            (samples), `normalize`; of mel also `bins`, `frames`, `mean`, `std`.

    Raises:
        InputRefusedError: It is no recording, too short, or nothing here can decode it.
    """
    import numpy as np

    if isinstance(given, str | bytes):
        given = decode(content_of(given), how["sampling_rate"])
    waveform: Any = np.asarray(given)
    if waveform.ndim != 1 or waveform.dtype.kind not in "fiu":
        raise InputRefusedError("a recording is a file, its bytes, or an array of samples of one channel")
    if len(waveform) < how["shortest"]:
        raise InputRefusedError(f"a recording has {how['shortest']} samples or more, not {len(waveform)}")
    waveform = waveform.astype(np.float32)
    if how["kind"] == "mel":
        return _mel(waveform, how)
    if how["normalize"]:
        waveform = (waveform - waveform.mean()) / np.sqrt(waveform.var() + 1e-7)
    found: Array = waveform.astype(np.float32)
    return found


def decode(content: bytes, rate: int) -> Array:
    """The waveform of an audio file, one channel at `rate` Hz, in float32. Raises InputRefusedError."""
    import numpy as np

    if (waveform := _wav(content, rate)) is not None:
        return waveform
    if (program := shutil.which("ffmpeg")) is None:
        raise InputRefusedError(
            f"it is no WAV file of whole numbers at {rate} Hz, and other recordings are decoded by ffmpeg, which is "
            "not installed"
        )
    command = [
        program, "-i", "pipe:0", "-ac", "1", "-ar", str(rate), "-f", "f32le", "-hide_banner", "-loglevel", "quiet",
        "pipe:1",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=_FFMPEG_TIMEOUT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise InputRefusedError("ffmpeg can't decode it in time") from error
    decoded: Array = np.frombuffer(done.stdout[: len(done.stdout) // 4 * 4], np.float32)
    if not len(decoded):
        raise InputRefusedError("it is no recording that ffmpeg can decode")
    return decoded


def content_of(given: str | bytes) -> bytes:
    """An audio file's bytes, of its path, or of itself or its base64. Raises InputRefusedError."""
    if isinstance(given, str):
        if given.startswith(("http://", "https://")):
            raise InputRefusedError("recordings are not fetched from the web: send the file's bytes")
        if len(given) > 4096 or not os.path.isfile(given):  # noqa: PTH113 - Path refuses texts with a null character
            raise InputRefusedError(f"there is no file {given[:40]!r}")
        return Path(given).read_bytes()
    try:  # the scoring server hands bytes on as they came in JSON
        decoded = base64.b64decode(given)
    except binascii.Error:
        return given
    return decoded if base64.b64encode(decoded) == given else given


def _wav(content: bytes, rate: int) -> Array | None:
    """None for what is no WAV file of whole numbers at that rate, in one channel or two."""
    import numpy as np

    try:
        with wave.open(io.BytesIO(content)) as file:
            channels, width, found = file.getnchannels(), file.getsampwidth(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError):
        return None
    if found != rate or channels > 2 or width not in (1, 2, 4):
        return None
    values: Any = np.frombuffer(frames[: len(frames) // width * width], f"<i{width}" if width > 1 else np.uint8)
    scaled = (values.astype(np.float64) - (128 if width == 1 else 0)) / 2.0 ** (8 * width - 1)
    mixed = scaled[: len(scaled) // channels * channels].reshape(-1, channels).sum(axis=1) / channels**0.5  # as ffmpeg
    waveform: Array = mixed.astype(np.float32)
    return waveform


def _mel(waveform: Array, how: Mapping[str, Any]) -> Array:
    """The logarithm of mel energies, cut or filled with zeros to `frames`."""
    import numpy as np

    frames = np.lib.stride_tricks.sliding_window_view(waveform.astype(np.float64), _FRAME)[::_HOP][: how["frames"]]
    frames = frames - frames.mean(axis=1, keepdims=True)
    first = frames[:, :1] * (1 - _PREEMPHASIS)
    frames = np.concatenate([first, frames[:, 1:] - _PREEMPHASIS * frames[:, :-1]], axis=1) * np.hanning(_FRAME)
    power: Any = np.abs(np.fft.rfft(frames, _FFT).astype(np.complex64)).astype(np.float64) ** 2
    energies = np.log(np.maximum(_FLOOR, power @ _filters(how["bins"], how["sampling_rate"]))).astype(np.float32)
    filled = np.zeros((how["frames"], how["bins"]), np.float32)
    filled[: len(energies)] = energies
    if how["normalize"]:
        filled = (filled - how["mean"]) / (how["std"] * 2)
    found: Array = filled.astype(np.float32)
    return found


@lru_cache(maxsize=4)
def _filters(bins: int, rate: int) -> Array:
    """Kaldi's triangles, equally wide in mel, [frequencies, bins]."""
    import numpy as np

    def mel(hertz: Any) -> Any:
        return 1127.0 * np.log(1.0 + hertz / 700.0)

    edges = np.linspace(mel(_LOWEST_HZ), mel(rate // 2), bins + 2)
    frequencies = mel(rate / _FFT * np.arange(_FFT // 2 + 1))[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    found: Array = np.maximum(0.0, np.minimum(rising, falling))
    return found
