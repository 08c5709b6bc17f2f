"""What docs/benchmarks.md says of the goals: what was aimed at, and what the newest runs reached on each machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from by_hand_tables import fastest, passing
from page import Figure, Page

Reached = Callable[[Sequence[Figure]], str]


@dataclass(frozen=True)
class Goal:
    """A line of the table.

    Attributes:
        aim: In words.
        benchmark: Whose rows show it.
        by: What tells its rows apart, for which the newest run counts.
        reached: What they show; empty where they show nothing of it.
    """

    aim: str
    benchmark: str
    by: tuple[str, ...]
    reached: Reached


def _by_case(figures: Iterable[Figure]) -> list[list[Figure]]:
    cases: dict[tuple[str, int], list[Figure]] = {}
    for figure in figures:
        if figure.row.get("batch"):
            cases.setdefault((figure.row["network"], figure.row["batch"]), []).append(figure)
    return list(cases.values())


def _best_ratios(figures: Sequence[Figure]) -> list[float]:
    cases = ([figure.row for figure in case] for case in _by_case(figures))
    return [fastest(found)["over_ours"] for rows in cases if (found := passing(rows))]


def _lowest(figures: Sequence[Figure]) -> str:
    ratios = _best_ratios(figures)
    above = sum(ratio >= 1 for ratio in ratios)
    return f"lowest {min(ratios):.2f}; {above} of {len(ratios)} at least 1" if ratios else ""


def _mean(figures: Sequence[Figure]) -> str:
    ratios = _best_ratios(figures)
    return f"{geometric_mean(ratios):.2f} of {len(ratios)}" if ratios else ""


def _then(figures: Sequence[Figure]) -> str:
    ratios = [figure.row["over_ours"] for figure in figures if figure.row.get("commit") and "over_ours" in figure.row]
    return f"{geometric_mean(ratios):.2f} of {len(ratios)}" if ratios else ""


def _over_eager(figures: Sequence[Figure]) -> str:
    """From the screening: eager mode is never fast enough to be measured again."""
    found = {
        figure.network: figure.row["screened_over_ours"]
        for figure in figures
        if figure.row["recipe"] == "PyTorch eager" and figure.row["batch"] == 1 and "screened_over_ours" in figure.row
    }
    wanted = ("ResNet-50", "BERT, 6 layers")
    return ", ".join(f"{name} {found[name]:.1f}" for name in wanted if name in found)


def _verdict(figures: Sequence[Figure]) -> str:
    walls: dict[bool, list[float]] = {True: [], False: []}
    for figure in figures:
        walls[figure.row["commit"] == "this"].append(figure.row["wall_s"])
    return f"{median(walls[True]) / median(walls[False]):.1f}" if all(walls.values()) else ""


def _eight(figures: Sequence[Figure]) -> str:
    of_network = [figure for figure in figures if figure.row["network"] == "resnet50"]
    backends = {figure.row["backend"] for figure in of_network}
    if len(backends) < 7:
        return ""
    total_s = of_network[0].run.content["settings"].get("total_s", {}).get("resnet50")
    return f"{total_s} s, {len(backends)} backends" if total_s else ""


def _cached(figures: Sequence[Figure]) -> str:
    found = [figure.row["over_import_s"] for figure in figures if figure.row["command"] == "run, all cached"]
    return f"{found[-1]:.1f} s" if found and found[-1] is not None else ""


def _search(figures: Sequence[Figure]) -> str:
    """Of each network and gate, the stage's seconds over NNCF's."""
    seconds: dict[tuple[str, str], Mapping[str, float]] = {}
    for figure in figures:
        row = figure.row
        if row["network"] in ("separable", "digits", "digits-wild") and row.get("seconds"):
            key = (row["network"], row["gate"])
            seconds[key] = {**seconds.get(key, {}), row["by"]: row["seconds"]}
    ratios = [both["stage"] / both["NNCF"] for both in seconds.values() if {"stage", "NNCF"} <= set(both)]
    return f"{min(ratios):.1f} to {max(ratios):.1f}" if ratios else ""


GOALS = (
    Goal("best by hand over the winner, each network and batch: at least 1", "by-hand", ("network", "batch"), _lowest),
    Goal("the same, geometric mean: at least 1.10", "by-hand", ("network", "batch"), _mean),
    Goal("winner of c17ed4a over the winner, geometric mean: at least 1.15", "by-hand", ("network", "batch"), _then),
    Goal(
        "eager over the winner at batch 1, with VNNI: at least 7",
        "by-hand",
        ("network", "batch", "recipe"),
        _over_eager,
    ),
    Goal("time to the verdict over c17ed4a's: at most 0.5", "time-to-verdict", ("commit",), _verdict),
    Goal("ResNet-50 with eight backends: at most 327 s", "backends", ("network",), _eight),
    Goal("a cached run beyond import mlflow: at most 1.0 s", "start-up", ("command",), _cached),
    Goal("accuracy search over NNCF's, small networks: at most 1", "accuracy-control", ("network", "gate"), _search),
)


def goals(page: Page) -> None:
    """Nothing before the winner was compared with the best by hand."""
    if not page.newest("by-hand", by=("network", "batch")):
        return
    page.section(
        "What was aimed at, and what was reached",
        "`python benchmarks/goals.py` measures all of it. Empty: not measured on that machine, or not in a way that "
        "shows it.",
    )
    figures = {goal: page.newest(goal.benchmark, by=goal.by) for goal in GOALS}
    kinds = sorted({figure.hardware for found in figures.values() for figure in found})
    cells = {
        kind: [goal.reached([figure for figure in found if figure.hardware == kind]) for goal, found in figures.items()]
        for kind in kinds
    }
    shown = [kind for kind in kinds if any(cells[kind])]
    rows = [[goal.aim, *(cells[kind][place] for kind in shown)] for place, goal in enumerate(GOALS)]
    page.table(["goal", *shown], rows)
