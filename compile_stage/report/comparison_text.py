"""A comparison for people: plain text of 80 columns, Markdown, and one HTML page without script."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from compile_stage.report import numbers
from compile_stage.report.compare import Comparison, Difference, Figure, TargetComparison, figure_text, input_text
from compile_stage.report.html import environment
from compile_stage.report.markdown import _cell, _table

_WIDTH = 80


def rows(found: Comparison) -> Iterator[tuple[str, str, str]]:
    """(where, verdict, sentence): the status, what the runs were given, then each target."""
    before, after = found.statuses
    yield "", "status", before if before == after else f"{before} -> {after}"
    for one in found.inputs:
        yield "", "input", input_text(one)
    if not found.inputs:
        yield "", "input", "the same policy, source, samples, hardware and packages"
    for target in found.targets:
        yield from _of_target(target)


def _of_target(target: TargetComparison) -> Iterator[tuple[str, str, str]]:
    verdicts = {figure_text(f): f.verdict for f in target.figures if f.verdict != "unchanged"}
    for change in target.changes:
        yield target.target, verdicts.get(change, "changed"), change
    for figure in target.figures:
        if figure.verdict == "unchanged" and figure.interval is not None:
            yield target.target, "unchanged", _unchanged(figure)
    for note in target.notes:
        yield target.target, "note", note
    if not target.changes:
        yield target.target, "unchanged", target.unchanged_text


def _unchanged(figure: Figure) -> str:
    return (
        f"{figure.candidate}: {figure.what} {numbers.ratio(figure.before)} -> {numbers.ratio(figure.after)}, "
        f"{numbers.ratio(figure.ratio)} of before ({numbers.span(figure.interval)}): within the noise"
    )


def render_text(found: Comparison) -> str:
    """At most 80 columns."""
    lines: list[str] = []
    last = ""
    for where, verdict, sentence in rows(found):
        if where != last:
            lines += ["", where]
        last = where
        head = f"  {verdict:<10} "
        folded = textwrap.wrap(sentence, _WIDTH - len(head), break_on_hyphens=False) or [""]
        lines += [head + folded[0], *(" " * len(head) + more for more in folded[1:])]
    return "\n".join(lines) + "\n"


def regression_text(found: Comparison) -> str:
    """What is worse in the second run, in one line: `cpu-server: openvino--fp32: slower beyond the noise: ...`; empty
    where nothing is."""
    before, after = found.statuses
    parts = [f"status: {before} -> {after}"] if before == "passed" != after else []
    parts += [f"{target.target}: {sentence}" for target in found.targets for sentence in target.regressions]
    return "; ".join(parts)


def render_policy_text(found: tuple[Difference, ...]) -> str:
    """One line for each value and job that differs."""
    return "".join(f"{input_text(one)}\n" for one in found) or "the resolved policies are the same\n"


def render_markdown(found: Comparison) -> str:
    """A table, for a pull request's comment."""
    title = "a regression" if found.regressed else "changed" if found.changed else "no difference beyond noise"
    cells = (map(_cell, row) for row in rows(found))
    return "\n".join([f"## Comparison: {title}", "", *_table(("target", "", "what"), cells)]) + "\n"


def render_html(found: Comparison) -> str:
    """The page. Every name and sentence of others is escaped by the template engine."""
    template = environment().get_template("comparison.html.j2")
    return template.render(found=found, rows=list(rows(found)))
