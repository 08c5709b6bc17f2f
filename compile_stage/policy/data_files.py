"""What `lint` looks up in the data files that a policy names: how many samples there are, and whether the labels are
there.

Headers are read, and no more lines than it takes to know. The files may differ where the policy runs, so these are
warnings.
"""

from __future__ import annotations

import ast
import csv
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath

from compile_stage.policy.checks import data_file
from compile_stage.policy.nodes import Node, Path, Problem, show_path

_NO_PROOF = "so no candidate can pass"


@dataclass(frozen=True)
class Contents:
    """Of a data file.

    Attributes:
        rows: How many samples it holds, counted up to what was asked for.
        names: Of its arrays or columns.
    """

    rows: int
    names: tuple[str, ...]


def data_warnings(tree: Node) -> Iterator[Problem]:
    """What is wrong with the data of a resolved policy, as far as it lies on this machine."""
    needed = tree.get("data", "min_samples")
    minimum = needed.value if needed is not None and isinstance(needed.value, int) else 0
    for role in ("validation", "calibration"):
        path: Path = ("data", role, "source")
        source = tree.get(*path)
        if source is None:
            continue
        if role == "validation":
            yield from _too_few_taken(tree, minimum)
        file = data_file(source)
        if file is None or not FilePath(file).is_file():
            continue
        try:
            contents = read_contents(FilePath(file), minimum)
        except ImportError:
            wrong = "parquet files are read with pyarrow, which is not installed here"
            yield Problem(source.place, show_path(path), wrong, 'pip install "compile-stage[parquet]"')
            continue
        # What the readers raise for files that are not what their names say.
        except (OSError, ValueError, SyntaxError, LookupError, zipfile.BadZipFile, csv.Error) as error:
            yield Problem(source.place, show_path(path), f"{file} can't be read: {error}")
            continue
        if role == "validation" and contents.rows < minimum:
            wrong = f"{file} holds {contents.rows} samples, fewer than data.min_samples ({minimum}), {_NO_PROOF}"
            yield Problem(source.place, show_path(path), wrong, "name a file with more samples")
        labels = tree.get("data", role, "labels")
        if labels is not None and labels.value is not None and labels.value not in contents.names:
            wrong = f"{file} has no labels {labels.value!r}, so every run is refused"
            held = ", ".join(contents.names) or "nothing"
            yield Problem(labels.place, show_path(("data", role, "labels")), wrong, f"it has {held}")


def _too_few_taken(tree: Node, minimum: int) -> Iterator[Problem]:
    source, taken = tree.get("data", "validation", "source"), tree.get("data", "validation", "max_samples")
    if source is not None and source.value == "synthetic":
        wrong = f"synthetic samples prove nothing, {_NO_PROOF}"
        yield Problem(source.place, "data.validation.source", wrong, "name real samples")
    elif taken is not None and isinstance(taken.value, int) and taken.value < minimum:
        wrong = f"{taken.value} samples are fewer than data.min_samples ({minimum}), {_NO_PROOF}"
        yield Problem(taken.place, "data.validation.max_samples", wrong, f"a number >= {minimum}")


def read_contents(path: FilePath, at_most: int) -> Contents:
    """Rows and names of a data file, without reading its values.

    Args:
        at_most: Rows of a text file are counted up to here.

    Raises:
        ImportError: pyarrow is not installed, for a parquet file.
        OSError, ValueError, SyntaxError, LookupError, zipfile.BadZipFile, csv.Error: The file is not what its name
        says.
    """
    readers: Mapping[str, Callable[[FilePath, int], Contents]] = {".npz": _npz, ".csv": _csv, ".parquet": _parquet}
    return readers[path.suffix](path, at_most)


def _npz(path: FilePath, _: int) -> Contents:
    """By hand, since NumPy would take longer to import than all of lint."""
    with zipfile.ZipFile(path) as archive:
        shapes = {}
        for member in archive.namelist():
            if member.endswith(".npy"):
                with archive.open(member) as stream:
                    version = stream.read(8)[6]
                    size = int.from_bytes(stream.read(2 if version == 1 else 4), "little")
                    header = ast.literal_eval(stream.read(size).decode("latin-1"))
                shapes[member.removesuffix(".npy")] = header["shape"]
    return Contents(rows=min((shape[0] for shape in shapes.values() if shape), default=0), names=tuple(shapes))


def _csv(path: FilePath, at_most: int) -> Contents:
    with path.open(newline="", encoding="utf-8") as stream:
        lines = (line for line in csv.reader(stream) if line)
        names = tuple(next(lines, ()))
        rows = sum(1 for _ in zip(range(at_most), lines, strict=False))
    return Contents(rows=rows, names=names)


def _parquet(path: FilePath, _: int) -> Contents:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    return Contents(rows=file.metadata.num_rows, names=tuple(file.schema_arrow.names))
