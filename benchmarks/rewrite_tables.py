"""What docs/benchmarks.md says of graph rewrites."""

from __future__ import annotations

from page import Page


def graph_rewrites(page: Page) -> None:
    page.section(
        "What do graph rewrites gain?",
        "The graph as it was exported beside the rewritten one "
        "([which rewrites](lowerings.md#before-it-graph-rewrites)), in turns in one process, batch 1, two threads, "
        "fixed shapes in OpenVINO. Above 1 the rewritten graph is faster.",
    )
    figures = page.newest("graph-rewrites")
    rows = [
        [
            figure.network,
            figure.row["runtime"],
            figure.hardware,
            f"{figure.row['exported_ms']:.2f}",
            f"{figure.row['rewritten_ms']:.2f}",
            "{:.2f} ({:.2f} to {:.2f})".format(figure.row["ratio"], *figure.row["interval"]),
        ]
        for figure in figures
    ]
    page.table(["network", "runtime", "hardware", "exported, ms", "rewritten, ms", "ratio"], rows, figures)
