"""The section of docs/benchmarks.md about the cost of a cache hit."""

from __future__ import annotations

from page import Page, number

WAYS = {
    "local": "found on this machine's disk",
    "shared": "taken from the server",
    "put": "put there, by who made it",
    "miss": "looked for there in vain",
}


def cache_hits(page: Page) -> None:
    page.section(
        "What does a cache hit cost?",
        "An entry of one file of random bytes, sealed by a secret and verified whole: read from this machine's disk, "
        "taken from an S3 server of the same machine (moto's, written in Python, so its share of the wall time is more "
        "than a real server's) into an empty cache, put there, and looked for in vain. Medians of wall time (and of "
        "CPU time of the process that asks), in ms.",
    )
    figures = page.newest("cache-hits", by=("entry", "way"))
    entries = list(dict.fromkeys(figure.row["entry"] for figure in figures))
    rows = []
    for hardware in dict.fromkeys(figure.run.hardware for figure in figures):
        found = {(f.row["way"], f.row["entry"]): f.row for f in figures if f.run.hardware == hardware}
        for way, words in WAYS.items():
            cells = [
                f"{number(row['wall_ms'], 1)} ({number(row['cpu_ms'], 1)})" if row else ""
                for row in (found.get((way, entry)) for entry in entries)
            ]
            rows.append([hardware, words, *cells])
    page.table(["hardware", "", *entries], rows, figures)
