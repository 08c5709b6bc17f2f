"""`debug.html` and `debug.json`: one page without script or outside assets, and the same in full for programs."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path

from compile_stage.core.digest import plain
from compile_stage.core.errors import UsageError
from compile_stage.core.json_files import read_json_object
from compile_stage.graph_debug.diagnosis import Diagnosis
from compile_stage.graph_debug.trace import NodeError, Trace
from compile_stage.report import numbers
from compile_stage.report.charts import error_chart
from compile_stage.report.files import write_text
from compile_stage.report.html import environment

SHOWN = 40
"""Nodes of a table; a larger graph shows those around the first that departs, and those with the largest drops."""


def write(diagnosis: Diagnosis, out: Path) -> dict[str, Path]:
    """Write both files into the folder `out`, which is made if need be; file name → path."""
    out.mkdir(parents=True, exist_ok=True)
    document = {"schema": "compile-stage/debug/v1", "headline": diagnosis.headline, **plain(diagnosis)}
    texts = {
        "debug.json": json.dumps(document, indent=2, ensure_ascii=False) + "\n",
        "debug.html": render(diagnosis),
    }
    return {name: write_text(out / name, text) for name, text in texts.items()}


def render(diagnosis: Diagnosis) -> str:
    """The page."""
    from compile_stage import __version__

    template = environment().get_template("debug.html.j2")
    chart = (
        error_chart(diagnosis.trace, diagnosis.kept.nodes or () if diagnosis.kept else ()) if diagnosis.trace else ""
    )
    rows = notable(diagnosis.trace) if diagnosis.trace else ()
    return template.render(found=diagnosis, chart=chart, rows=rows, decibels=decibels, version=__version__)


def notable(trace: Trace) -> tuple[NodeError, ...]:
    """The nodes worth a line, in the order in which they run: all of a small graph."""
    if len(trace.nodes) <= SHOWN:
        return trace.nodes
    first = next((i for i, error in enumerate(trace.nodes) if error.node == trace.first), None)
    around = trace.nodes[max(0, first - 4) : first + 5] if first is not None else ()
    worst = sorted(trace.nodes, key=lambda error: -error.drop_db)[: SHOWN - len(around)]
    chosen = {error.position for error in (*around, *worst)}
    return tuple(error for error in trace.nodes if error.position in chosen)


def decibels(value: float) -> str:
    """`38.2 dB`, `exact`, `not finite`."""
    if value == float("inf"):
        return "exact"
    return "not finite" if value == float("-inf") else f"{numbers.quantity(round(value, 1))} dB"


def read_result(path: Path, job: str, policy: str | os.PathLike[str] | None) -> tuple[str, str, str]:
    """A run's own result → model URI, policy file, and the id of the first job that matches and did not hold.

    Args:
        job: Glob over job ids.
        policy: Takes the place of the run's policy.

    Raises:
        UsageError: It is no result, or no job of it is to be looked into.
    """
    try:
        document = read_json_object(path)
        uri, files = str(document["source"]["uri"]), document["policy"]["files"]
        candidates = [candidate for target in document["targets"] for candidate in target["candidates"]]
        jobs = {str(candidate["job_id"]): str(candidate["state"]) for candidate in candidates}
    except OSError as error:
        raise UsageError(f"the result can't be read: {error.strerror}", where=str(path)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError("this is not the result.json of a run", where=str(path)) from error
    matching = {name: state for name, state in jobs.items() if fnmatchcase(name, job)}
    broken = [name for name, state in matching.items() if state in ("failed", "compiled_not_validated")]
    if not matching:
        raise UsageError(f"no job matches {job!r}", fix=f"the result has {', '.join(jobs) or 'none'}", where=str(path))
    if not broken and len(matching) > 1:
        raise UsageError("no job of this run failed", fix=f"name one: {', '.join(matching)}", where=str(path))
    chosen = str(policy) if policy is not None else next((f for f in reversed(files) if Path(f).is_file()), "")
    if not chosen:
        raise UsageError("the run's policy file is not there any more", fix="name one with -p", where=str(path))
    return uri, chosen, broken[0] if broken else next(iter(matching))
