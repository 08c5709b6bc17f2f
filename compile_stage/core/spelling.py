"""Words that were probably meant."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Sequence

_OTHER_NAMES = {
    "gpu": "cuda", "nvidia": "cuda", "amd": "rocm", "mps": "apple", "metal": "apple", "ios": "apple",
    "float32": "fp32", "float": "fp32", "single": "fp32", "f32": "fp32", "float16": "fp16", "half": "fp16",
    "f16": "fp16", "bfloat16": "bf16", "uint8": "int8", "w8a8": "int8", "dynamic": "int8-dynamic", "w4a16": "int4",
    "uint4": "int4", "float8": "fp8", "fp8_e4m3": "fp8", "e4m3": "fp8",
    "ort": "onnxruntime", "onnx": "onnxruntime", "tflite": "litert", "trt": "tensorrt", "torch": "torchscript",
    "pytorch": "torchscript", "aotinductor": "inductor", "ov": "openvino",
    "acc": "accuracy", "auc": "roc_auc", "top1": "top1_agreement", "top5": "topk_agreement", "speed": "latency",
}  # fmt: skip
"""What others call a thing that is spelled unlike the word that we have for it: no measure of spelling finds it."""


def did_you_mean(word: str, allowed: Sequence[str]) -> str:
    """The nearest allowed word, or an empty string. Small and capital letters are alike: `CUDA` means `cuda`. In a word
    of three letters another letter makes another word: `gpu` is not near to `cpu`, and `cup` and `cpus` are."""
    words = {known.casefold(): known for known in reversed(allowed)}
    meant = _OTHER_NAMES.get(word.casefold(), "")
    if word.casefold() not in words and meant in words:
        return words[meant]
    near = difflib.get_close_matches(word.casefold(), [known for known in words if _may_mean(word, known)], n=1)
    return words[near[0]] if near else ""


def _may_mean(word: str, known: str) -> bool:
    if len(word) != len(known) or len(word) > 3 or not word.isascii():  # a letter of another script may look alike
        return True
    return sorted(word.casefold()) == sorted(known)


def look_alike(word: str) -> str:
    """The first character of a word that no keyword of ours has, and that may look like one that it has, as
    `, with U+0441 (CYRILLIC SMALL LETTER ES) in it`; empty where there is none."""
    odd = next((character for character in word if not character.isascii()), "")
    return f", with U+{ord(odd):04X} ({unicodedata.name(odd, 'no name')}) in it" if odd else ""
