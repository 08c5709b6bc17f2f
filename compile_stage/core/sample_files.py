"""How samples lie on disk, for everybody who reads them: validation, lowerings, and backends that calibrate themselves.

A folder holds one `.npy` for each input below `inputs/` (axis 0 is the sample), `labels.npy` when there are labels,
`groups.npy` when samples come in groups (the number of each sample's group, from 0), `given/` where numbers were
rounded that the original does not round (`as_given`), and `samples.json`:

    {"inputs": {tensor name: file}, "labels": true | false, "count": 256}

The index is what names are looked up in: a tensor may be called what no file can be (`serving_default/x:0`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from compile_stage.core.digest import canonical_json, digest_file, digest_of, digest_tree
from compile_stage.core.errors import IntegrityError
from compile_stage.core.generation import INPUT_IDS, as_first_call, has_cache
from compile_stage.core.json_files import read_json_object
from compile_stage.core.records import SampleSet

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch, Signature

LABELS, GROUPS = "labels.npy", "groups.npy"
RAW = "raw"
"""Folder with what predict() was given, a `.npy` for each column and `columns.json`: where the network's inputs were
made of it."""
GIVEN = "given"
"""Folder with the same samples as they were before they were rounded to the types of the network's inputs, laid out as
samples are: where the original answers those (`SourceCapabilities.computes_wider`)."""
_INDEX = "samples.json"


def write_index(folder: Path, inputs: Mapping[str, str], *, labels: bool, count: int) -> None:
    """Write the index. `inputs` is tensor name → file, relative to the folder."""
    (folder / _INDEX).write_text(canonical_json({"inputs": inputs, "labels": labels, "count": count}), encoding="utf-8")


def read_index(samples: SampleSet) -> tuple[dict[str, Path], Path | None]:
    """The `.npy` of each input by name, and that of the labels. Raises IntegrityError when the index can't be read."""
    folder = Path(samples.path)
    try:
        index = read_json_object(folder / _INDEX)
        inputs = {str(name): folder / file for name, file in index["inputs"].items()}
        return inputs, folder / LABELS if index["labels"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"the samples can't be read back: {error}", where=str(folder)) from error


def inputs_alone(folder: Path) -> tuple[list[str], str] | None:
    """Of a folder of samples the files of the inputs (and the samples' groups), relative to it, and an index that names
    nothing else: what a worker needs that is to answer them. None for any other folder."""
    try:
        content = read_json_object(folder / _INDEX)
        files = [str(file) for file in content["inputs"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if any(Path(file).is_absolute() or ".." in Path(file).parts for file in files):
        return None
    files += [GROUPS] if (folder / GROUPS).is_file() else []
    return files, canonical_json({**content, "labels": False})


def write_inputs_alone(index: str, folder: Path) -> None:
    """Write the index of `inputs_alone`."""
    (folder / _INDEX).write_text(index, encoding="utf-8")


def as_given(samples: SampleSet) -> SampleSet | None:
    """The same samples, by number, before they were rounded, for the original alone; None where nothing was."""
    folder = Path(samples.path) / GIVEN
    return replace(samples, path=str(folder), has_labels=False, groups=0) if folder.is_dir() else None


def digest_of_samples(samples: SampleSet) -> str:
    """The digest of a set's files, which is its `SampleSet.digest`. Raises IntegrityError when they can't be read."""
    inputs, labels = read_index(samples)
    try:
        content: dict[str, object] = {
            "inputs": {name: digest_file(file) for name, file in inputs.items()},
            "labels": digest_file(labels) if labels is not None else None,
            "real": samples.real,
        }
        if samples.groups:
            content["groups"] = digest_file(Path(samples.path) / GROUPS)
        if (raw := Path(samples.path) / RAW).is_dir():
            content["raw"] = digest_tree(raw)
        if (given := Path(samples.path) / GIVEN).is_dir():
            content["given"] = digest_tree(given)
    except OSError as error:
        raise IntegrityError(f"the samples can't be read back: {error}", where=samples.path) from error
    return digest_of(content)


def read_batches(samples: SampleSet, signature: Signature) -> Iterator[Batch]:
    """The samples in order, in batches of one, or of the batch that the model has fixed; each is read when it is asked
    for. Of a graph with a cache a sample is a window of tokens, which goes in at once, with an empty cache: a token's
    values inside are those that it has behind a filled one.

    The last samples are left out where they do not fill a batch.
    """
    import numpy as np

    files, _ = read_index(samples)
    cached = has_cache(signature)
    names = [INPUT_IDS] if cached else [spec.name for spec in signature.inputs]
    columns = {name: np.load(files[name], mmap_mode="r", allow_pickle=False) for name in names}
    size = signature.fixed_batch or 1
    for start in range(0, samples.count - size + 1, size):
        batch = {name: np.ascontiguousarray(column[start : start + size]) for name, column in columns.items()}
        yield as_first_call(signature, batch[INPUT_IDS]) if cached else batch
