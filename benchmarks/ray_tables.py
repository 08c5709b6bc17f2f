"""The section of docs/benchmarks.md about jobs on a Ray cluster."""

from __future__ import annotations

from page import Page

WAYS = {
    "first": "the first task on a node",
    "empty": "a task that does nothing",
    "here": "the job in the driver's process",
    "node": "the job on the node",
    "more": "the difference of a round",
}


def ray_overhead(page: Page) -> None:
    figures = page.newest("ray-overhead", by=("backend", "way"))
    if not figures:
        return
    page.section(
        "What does a job on a Ray cluster cost beyond the job?",
        "A small convolutional network is exported and compiled in FP32 with nothing in the cache, in the driver's "
        "process and as a task on a node of the same machine, in turns, by the same confined workers. The first task "
        "starts a process on the node, which imports compile-stage. Medians, and the least and most.",
    )
    rows = []
    for figure in figures:
        row = figure.row
        sign = "+" if row["way"] == "more" else ""
        seconds = f"{row['median_s']:{sign}.3f} ({row['low_s']:{sign}.3f} to {row['high_s']:{sign}.3f})"
        rows.append([figure.hardware, row["backend"], WAYS[row["way"]], seconds])
    page.table(["hardware", "backend", "", "s (least to most)"], rows, figures)
