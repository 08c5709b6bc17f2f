"""How samples lie on disk, for everybody who reads them: validation, lowerings, and backends that calibrate themselves.

A folder holds one `.npy` for each input below `inputs/` (axis 0 is the sample), `labels.npy` when there are labels, and
`samples.json`:

    {"inputs": {tensor name: file}, "labels": true | false, "count": 256}

The index is what names are looked up in: a tensor may be called what no file can be (`serving_default/x:0`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from compile_stage.core.digest import canonical_json
from compile_stage.core.errors import IntegrityError
from compile_stage.core.records import SampleSet

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch, Signature

LABELS = "labels.npy"
_INDEX = "samples.json"


def write_index(folder: Path, inputs: Mapping[str, str], *, labels: bool, count: int) -> None:
    """Write the index. `inputs` is tensor name → file, relative to the folder."""
    (folder / _INDEX).write_text(canonical_json({"inputs": inputs, "labels": labels, "count": count}))


def read_index(samples: SampleSet) -> tuple[dict[str, Path], Path | None]:
    """The `.npy` of each input by name, and that of the labels. Raises IntegrityError when the index can't be read."""
    folder = Path(samples.path)
    try:
        index = json.loads((folder / _INDEX).read_text())
        inputs = {str(name): folder / file for name, file in index["inputs"].items()}
        return inputs, folder / LABELS if index["labels"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"the samples can't be read back: {error}", where=str(folder)) from error


def read_batches(samples: SampleSet, signature: Signature) -> Iterator[Batch]:
    """The samples in order, in batches of one, or of the batch that the model has fixed; each is read when it is asked
    for.

    The last samples are left out where they do not fill a batch.
    """
    import numpy as np

    files, _ = read_index(samples)
    columns = {spec.name: np.load(files[spec.name], mmap_mode="r", allow_pickle=False) for spec in signature.inputs}
    size = signature.fixed_batch or 1
    for start in range(0, samples.count - size + 1, size):
        yield {name: np.ascontiguousarray(column[start : start + size]) for name, column in columns.items()}
