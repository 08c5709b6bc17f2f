"""The section of docs/benchmarks.md about fleets."""

from __future__ import annotations

from page import Page, Row, number


def fleets(page: Page) -> None:
    page.section(
        "What does a fleet cost?",
        "`fleet plan` of registered models in SQLite, as a process of its own; the scheduler, the journal and the loop "
        "of a fleet with simulated tasks on nodes that fail, for each job; and a fleet of small networks whose process "
        "is killed with SIGKILL and started again: versions that are missing after it, or were published twice.",
    )
    figures = page.newest("fleet", by=("what",))
    rows = [[figure.run.hardware, WORDS[figure.row["what"]](figure.row)] for figure in figures]
    page.table(["hardware", "what was found"], sorted(rows, key=lambda row: row[1]), figures)


def _plan(row: Row) -> str:
    return (
        f"plan: {row['models']:,} models × {row['targets']} targets in **{number(row['wall_s'], 1)} s** "
        f"({number(row['cpu_s'], 1)} s of CPU), peak memory **{number(row['peak_mb'], 0)} MB**"
    )


def _simulate(row: Row) -> str:
    return (
        f"simulate: {row['jobs']:,} jobs over {row['nodes']} nodes, {row['node_failures']:,} failures of nodes, "
        f"{row['late_ends']:,} ends that came too late to count: **{number(row['overhead_ms'], 2)} ms** a job, "
        f"**{row['lost']}** lost, **{row['doubled']}** doubled; half way the owners had "
        f"{number(row['share_low'], 2)} to {number(row['share_high'], 2)} of a fair share"
    )


def _run(row: Row) -> str:
    return (
        f"run: {row['models']:,} models × {row['targets']} targets on {row['engine']}, killed {row['kills']} times, "
        f"{row['attempts']:,} attempts: **{row['missing']}** versions missing, **{row['doubled']}** published twice, "
        f"{number(row['wall_s'], 0)} s"
    )


WORDS = {"plan": _plan, "simulate": _simulate, "run": _run}
