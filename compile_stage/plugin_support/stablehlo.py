"""StableHLO as a portable form: a file `model.json` and, beside it, one module for each shape of the inputs.

Sizes are fixed in a module, since XLA and IREE compile for fixed ones; the signature that goes with the form keeps the
symbols. A module is in StableHLO's lasting form (VHLO bytecode), its function is `main`, and its weights are constants
in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from compile_stage.core.records import PortableModel
from compile_stage.plugin_support.buckets import Shapes

ENTRY = "model.json"


class Module(NamedTuple):
    """One module.

    Attributes:
        shapes: Of the inputs, in order.
    """

    shapes: Shapes
    file: Path


def read_modules(model: PortableModel) -> list[Module]:
    """The modules of a model in the form `stablehlo`, smallest first."""
    index = json.loads(Path(model.path).read_text(encoding="utf-8"))
    folder = Path(model.path).parent
    return [Module(tuple(map(tuple, one["shapes"])), folder / one["file"]) for one in index["modules"]]


def types(model: PortableModel) -> frozenset[str]:
    """Types of all tensors of the program, by NumPy's names."""
    return frozenset(json.loads(Path(model.path).read_text(encoding="utf-8"))["types"])
