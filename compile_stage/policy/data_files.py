"""What `lint` looks up in the data files that a policy names: how many samples there are, whether they are enough for
the confidence that limits ask for, and whether the labels are there.

Headers are read, and no more lines than it takes to know. The files may differ where the policy runs, so these are
warnings.
"""

from __future__ import annotations

import ast
import csv
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path as FilePath

from compile_stage.core.error_codes import Code
from compile_stage.core.language_models import LANGUAGE_METRICS
from compile_stage.core.sample_sizes import samples_for_drop, samples_for_winner
from compile_stage.core.table_files import MAX_HEADER_BYTES, MAX_LINE_BYTES, demand_bounded_csv
from compile_stage.policy.named_files import data_file
from compile_stage.policy.nodes import Node, Path, Problem, show_path
from compile_stage.policy.tried_precisions import tried_precisions

# What the readers raise for files that are not what their names say.
_UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    LookupError,
    TypeError,
    MemoryError,
    RecursionError,
    zipfile.BadZipFile,
    csv.Error,
)
_INPUT_IDS = "input_ids"  # the array of a language model's windows, where a file holds these and no texts
_SO_NONE_PASSES = "so no candidate can pass"


@dataclass(frozen=True)
class Contents:
    """Of a data file.

    Attributes:
        rows: How many samples it holds, counted up to what was asked for; None where that is not known.
        names: Of its arrays or columns.
    """

    rows: int | None
    names: tuple[str, ...]


def data_warnings(tree: Node) -> Iterator[Problem]:
    """What is wrong with the data of a resolved policy, as far as it lies on this machine."""
    needed = tree.get("data", "min_samples")
    minimum = needed.value if needed is not None and isinstance(needed.value, int) else 0
    limits = _limits_with_confidence(tree)
    yield from _never_shown(limits)
    for role in ("validation", "calibration"):
        path: Path = ("data", role, "source")
        source = tree.get(*path)
        if source is None:
            continue
        taken = _too_few_taken(tree, minimum) if role == "validation" else None
        if taken is not None:
            yield taken
        file = data_file(source)
        if file is None or not FilePath(file).is_file():
            if role == "validation" and taken is None:
                yield from _too_few_to_show(tree, limits, None)
                yield from _too_few_for_winners(tree, None)
            continue
        try:
            contents = read_contents(FilePath(file), max(minimum, _most_that_matters(limits)))
        except ImportError:
            wrong = "parquet files are read with pyarrow, which is not installed here"
            yield Problem(
                source.place, show_path(path), wrong, 'pip install "compile-stage[parquet]"', code=Code.DATA_FILE
            )
            continue
        except _UNREADABLE as error:
            yield Problem(source.place, show_path(path), f"{file} can't be read: {error}", code=Code.DATA_FILE)
            continue
        if not _rows_are_samples(tree, contents):
            contents = replace(contents, rows=None)
        if role == "validation" and contents.rows is not None and contents.rows < minimum:
            wrong = f"{file} holds {contents.rows} samples, fewer than data.min_samples ({minimum}), {_SO_NONE_PASSES}"
            yield Problem(
                source.place, show_path(path), wrong, "name a file with more samples", code=Code.TOO_FEW_SAMPLES
            )
        elif role == "validation" and taken is None:
            yield from _too_few_to_show(tree, limits, contents.rows, file)
            yield from _too_few_for_winners(tree, contents.rows, file)
        if role == "validation":
            yield from _groups_that_are_not_there(tree, file, contents)
        labels = tree.get("data", role, "labels")
        if labels is not None and labels.value is not None and labels.value not in contents.names:
            wrong = f"{file} has no labels {labels.value!r}, so every run is refused"
            held = ", ".join(contents.names) or "nothing"
            yield Problem(
                labels.place, show_path(("data", role, "labels")), wrong, f"it has {held}", code=Code.NO_LABELS
            )


def _rows_are_samples(tree: Node, contents: Contents) -> bool:
    """False for the texts of a language model, as far as the policy says that it is for one: each is cut into windows
    of tokens, and every window is a sample."""
    if _INPUT_IDS in contents.names:
        return True
    own: list[Node | None] = []
    for target, settings in tree.items("targets"):
        own += [node for _, node in settings.items("generation")]
        for precision, _ in settings.items("tolerances"):
            own += [tree.get("targets", target, "tolerances", precision, metric) for metric in LANGUAGE_METRICS]
    return all(node is None or node.value is None or node.place.is_shipped for node in own)


def _groups_that_are_not_there(tree: Node, file: str, contents: Contents) -> Iterator[Problem]:
    for key in ("groups", "queries"):
        named = tree.get("data", key)
        if named is not None and named.value is not None and named.value not in contents.names:
            wrong = f"{file} has no {key} {named.value!r}, so every run is refused"
            yield Problem(
                named.place,
                f"data.{key}",
                wrong,
                f"it has {', '.join(contents.names) or 'nothing'}",
                code=Code.DATA_FILE,
            )


@dataclass(frozen=True)
class _Limit:
    """A limit with a confidence, of a precision that a target asks for.

    Attributes:
        needed: The least number of samples that can show it; None when none can.
    """

    node: Node
    path: Path
    needed: int | None

    @property
    def metric(self) -> str:
        return str(self.path[-1])

    @property
    def unit(self) -> str:
        return "samples" if self.metric == "accuracy" else "prompts"


def _limits_with_confidence(tree: Node) -> list[_Limit]:
    """Of all targets, each limit once though several inherit it."""
    limits: dict[tuple[str, int | None], _Limit] = {}
    for target, _ in tree.items("targets"):
        for limit in _limits_of(tree, target):
            limits.setdefault((str(limit.node.place), limit.needed), limit)
    return list(limits.values())


def _limits_of(tree: Node, target: str) -> Iterator[_Limit]:
    for precision, metric in product(tried_precisions(tree, target), _LIMITS):
        base: Path = ("targets", target, "tolerances", precision)
        of_outputs: list[Path] = [(*base, "outputs", output) for output, _ in tree.items(*base, "outputs")]
        named = [path for path in of_outputs if (own := tree.get(*path, metric)) and own.value is not None]
        # Labels, and logits of tokens, are those of one output: where it is named, the general limit looks at none.
        for path in named or [base]:
            node = tree.get(*path, metric)
            limit = _LIMITS[metric](node, (*path, metric)) if node is not None and node.is_map else None
            if limit is not None:
                yield limit


def _most_that_matters(limits: list[_Limit]) -> int:
    """The rows of a file are counted up to here."""
    return max((samples_for_winner(limit.needed) for limit in limits if limit.needed is not None), default=0)


def _limit_on_drop(node: Node, path: Path) -> _Limit | None:
    drops = [child for key in ("max_drop", "max_relative_drop") if (child := node.get(key)) is not None]
    return _limit(node, path, next((child.value for child in drops if child.value is not None), None))


def _limit_on_same_tokens(node: Node, path: Path) -> _Limit | None:
    share = node.get("limit")
    same = share.value if share is not None else None
    return _limit(node, path, 1 - same if isinstance(same, int | float) else None)


def _limit(node: Node, path: Path, drop: object) -> _Limit | None:
    """`drop`: the largest that the limit allows; None where nothing is limited."""
    confidence = node.get("confidence")
    if confidence is None or not isinstance(confidence.value, float) or not isinstance(drop, int | float):
        return None
    return _Limit(node, path, samples_for_drop(float(drop), confidence.value))


_LIMITS: Mapping[str, Callable[[Node, Path], _Limit | None]] = {
    "accuracy": _limit_on_drop,
    "token_accuracy": _limit_on_drop,
    "token_top1_agreement": _limit_on_same_tokens,
}


def _never_shown(limits: list[_Limit]) -> Iterator[Problem]:
    for limit in limits:
        if limit.needed is None:
            same = limit.metric == "token_top1_agreement"
            asked = "that all tokens are the same" if same else "a drop of at most 0"
            yield Problem(
                limit.node.place,
                show_path(limit.path),
                f"no number of {limit.unit} shows {asked} with a confidence, so it is never shown",
                f"a limit {'below 1' if same else 'above 0'}, or confidence: null",
                code=Code.TOO_FEW_SAMPLES,
            )


def _too_few_to_show(tree: Node, limits: list[_Limit], rows: int | None, file: str = "") -> Iterator[Problem]:
    """`rows`: of the file; None where they are not known. One warning a limit, whatever leaves it too few samples."""
    source, taken = tree.get("data", "validation", "source"), tree.get("data", "validation", "max_samples")
    if source is None or taken is None or not isinstance(taken.value, int):
        return
    for limit in limits:
        if limit.needed is None or min(taken.value, taken.value if rows is None else rows) >= limit.needed:
            continue
        few_taken = f"{taken.value} {limit.unit} are taken (max_samples)" if taken.value < limit.needed else ""
        few_held = f"{file} holds {rows} {limit.unit}" if rows is not None and rows < limit.needed else ""
        holds = f"{few_held}, and at most {few_taken}" if few_held and few_taken else few_held or few_taken
        # Where prompts differ, each a little, a bootstrap shows the limit with fewer.
        when = "" if limit.metric == "accuracy" else " where fewer than 10 prompts change"
        wrong = (
            f"{holds}, and {limit.path[3]} {limit.metric} needs at least {limit.needed} to be shown at its confidence"
            f"{when}, so it would be NOT_RUN"
        )
        here = limit.node.place if not limit.node.place.is_shipped else (source if few_held else taken).place
        yield Problem(
            here,
            show_path(limit.path),
            wrong,
            f"more {limit.unit}, a wider limit, or confidence: null",
            code=Code.TOO_FEW_SAMPLES,
        )


def _too_few_for_winners(tree: Node, rows: int | None, file: str = "") -> Iterator[Problem]:
    """Targets that ask for the confidence of the winner, with samples that are enough for one candidate alone."""
    taken = tree.get("data", "validation", "max_samples")
    if taken is None or not isinstance(taken.value, int):
        return
    count = taken.value if rows is None else min(taken.value, rows)
    for target, _ in tree.items("targets"):
        path: Path = ("targets", target, "select", "confidence_of")
        asked = tree.get(*path)
        shown = [limit for limit in _limits_of(tree, target) if limit.needed is not None and limit.needed <= count]
        hardest = max(shown, key=lambda limit: limit.needed or 0, default=None)
        if asked is None or asked.value != "winner" or hardest is None or hardest.needed is None:
            continue
        wanted = samples_for_winner(hardest.needed)
        if count >= wanted:
            continue
        unit = hardest.unit
        counted = f"{file} holds {count} {unit}" if count != taken.value else f"{count} {unit} are taken (max_samples)"
        wrong = (
            f"{counted}, and with fewer than about {wanted:,} a candidate that holds {hardest.path[3]} "
            f"{hardest.metric} is often refused where others miss it"
        )
        allowed = f"more {unit}, a wider limit, or confidence_of: candidate"
        yield Problem(asked.place, show_path(path), wrong, allowed, code=Code.TOO_FEW_SAMPLES)


def _too_few_taken(tree: Node, minimum: int) -> Problem | None:
    """What lets no candidate pass, whatever a file holds."""
    source, taken = tree.get("data", "validation", "source"), tree.get("data", "validation", "max_samples")
    if source is not None and source.value == "synthetic":
        wrong = f"synthetic samples prove nothing, {_SO_NONE_PASSES}"
        return Problem(source.place, "data.validation.source", wrong, "name real samples", code=Code.TOO_FEW_SAMPLES)
    if taken is not None and isinstance(taken.value, int) and taken.value < minimum:
        wrong = f"{taken.value} samples are fewer than data.min_samples ({minimum}), {_SO_NONE_PASSES}"
        return Problem(
            taken.place, "data.validation.max_samples", wrong, f"a number >= {minimum}", code=Code.TOO_FEW_SAMPLES
        )
    return None


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
                    if size > MAX_HEADER_BYTES:
                        raise ValueError(f"the header of {member} has {size:,} bytes")
                    header = ast.literal_eval(stream.read(size).decode("latin-1"))
                shapes[member.removesuffix(".npy")] = header["shape"]
    return Contents(rows=min((shape[0] for shape in shapes.values() if shape), default=0), names=tuple(shapes))


def _csv(path: FilePath, at_most: int) -> Contents:
    demand_bounded_csv(path)
    with path.open(newline="", encoding="utf-8") as stream:
        bounded = iter(lambda: stream.readline(MAX_LINE_BYTES), "")
        lines = (line for line in csv.reader(bounded) if line)
        names = tuple(next(lines, ()))
        rows = sum(1 for _ in zip(range(at_most), lines, strict=False))
    return Contents(rows=rows, names=names)


def _parquet(path: FilePath, _: int) -> Contents:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    return Contents(rows=file.metadata.num_rows, names=tuple(file.schema_arrow.names))
