"""Portable forms of fixed shapes, `stablehlo` and `tflite`: a file `model.json` and, beside it, one file for each shape
of the inputs.

Sizes are fixed, since XLA, IREE and LiteRT compile for fixed ones; the signature that goes with the form keeps the
symbols. A StableHLO module is in its lasting form (VHLO bytecode) or text, its function is `main`, and its weights are
constants in it. A TFLite file is in float32, with the signature `serving_default` of `args_0`, … and `output_0`, …
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from compile_stage.core.records import PortableModel
from compile_stage.plugin_support.buckets import Shapes

ENTRY = "model.json"

_NUMPY = {"i": "int", "ui": "uint", "f": "float", "bf": "bfloat"}


class Module(NamedTuple):
    """One file.

    Attributes:
        shapes: Of the inputs, in order.
    """

    shapes: Shapes
    file: Path


def read_modules(model: PortableModel) -> list[Module]:
    """The files of a model in such a form, smallest first."""
    index = json.loads(Path(model.path).read_text(encoding="utf-8"))
    folder = Path(model.path).parent
    return [Module(tuple(map(tuple, one["shapes"])), folder / one["file"]) for one in index["modules"]]


def types(model: PortableModel) -> frozenset[str]:
    """Types of all tensors of a StableHLO program, by NumPy's names."""
    return frozenset(json.loads(Path(model.path).read_text(encoding="utf-8"))["types"])


def element_types(text: str) -> set[str]:
    """The same, from the text of a module."""
    found = set()
    for letters, bits in re.findall(r"tensor<(?:[\dx?]+x)?(i|ui|f|bf)(\d+)>", text):
        found.add("bool" if letters + bits == "i1" else f"{_NUMPY[letters]}{bits}")
    return found
