"""What is made of results of runs, without running anything: comparisons, and the reports once more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from compile_stage.core import plugins
from compile_stage.core.leftovers import temporary_folder
from compile_stage.core.records import RunResult
from compile_stage.core.uris import is_uri

if TYPE_CHECKING:
    from compile_stage.report.compare import Comparison

PathLike = str | os.PathLike[str]


def compare(a: RunResult | PathLike, b: RunResult | PathLike) -> Comparison:
    """What changed from one run to another: the status, and for each target the winner, verdicts, and speeds that
    differ by more than their noise.

    Speeds over the original are compared by their 95 % intervals, at the first batch size that both have, and only
    where both were measured on the same hardware and neither is unstable; what can't be compared is a note. Where
    another candidate wins, both winners are compared too.

    Args:
        a, b: Results of `run`; paths of `result.json` or of the folders that hold one; or URIs of published versions,
            whose result.json lies beside them in the registry.

    Raises:
        UsageError: A file can't be read, or is no result.json.
        RegistryError: A version, or its result.json, can't be had.
    """
    from compile_stage.report.compare import compare as compare_results

    with temporary_folder("compare") as folder:
        return compare_results(*(_known_result(given, folder / str(number)) for number, given in enumerate((a, b))))


def _known_result(given: RunResult | PathLike, into: Path) -> RunResult | PathLike:
    """A result as it is, or the file of a published version's."""
    if not isinstance(given, str) or not is_uri(given):
        return given
    into.mkdir()
    return plugins.registry_for(given).result(given, into)


def report_text(result: PathLike, kind: str = "html") -> str:
    """A report of a run as text, made again from its result.json (a file, or the folder that holds it). Raises
    UsageError where it is none."""
    from compile_stage.report.files import render
    from compile_stage.report.reading import read_result

    return render(read_result(result), kind)


def write_report(result: PathLike, kind: str = "html", out: PathLike | None = None) -> Path:
    """Make a report of a run again from its result.json; nothing is run.

    Args:
        result: The file, or the folder that holds it.
        kind: `html`, `md` or `junit`.
        out: The file to write; None for the usual name beside result.json.

    Returns:
        The file that was written.

    Raises:
        UsageError: It is no result.json of a run, or the file can't be written.
    """
    from compile_stage.report.files import write_again

    return write_again(result, kind, out)
