"""What docs/benchmarks.md is put together from: rows with their runs, sections, tables, and which run is the newest."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from results import Run

NETWORKS = {
    "resnet50": "ResNet-50",
    "bert6": "BERT, 6 layers",
    "vit": "vision transformer",
    "separable": "separable CNN",
    "separable-224": "separable CNN, 224",
    "small": "small CNN",
    "lstm": "LSTM",
    "boosting": "gradient boosting",
    "digits": "digits CNN",
    "digits-wild": "digits CNN, uneven channels",
    "products": "8 products, 1024²",
}
Row = dict[str, Any]
Cells = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A row with the run that it is from."""

    run: Run
    row: Row

    @property
    def hardware(self) -> str:
        return self.run.hardware

    @property
    def network(self) -> str:
        return NETWORKS.get(self.row["network"], self.row["network"])


@dataclass
class Page:
    """The page while it is made: its text, its pictures, and the runs that the last table used."""

    runs: list[Run]
    text: list[str] = field(default_factory=list)
    pictures: dict[str, str] = field(default_factory=dict)

    def newest(self, *benchmarks: str, by: tuple[str, ...] = ("network",)) -> list[Figure]:
        """All rows of the newest run for each hardware and value of `by`."""
        chosen: dict[tuple[str, ...], Run] = {}
        for run in self.runs:  # the oldest first, so that the last one stays
            if run.content["benchmark"] in benchmarks and not run.content["settings"].get("partial"):
                chosen |= {(run.hardware, *(str(row.get(key)) for key in by)): run for row in run.content["rows"]}
        return [
            Figure(run, row)
            for key, run in chosen.items()
            for row in run.content["rows"]
            if key == (run.hardware, *(str(row.get(name)) for name in by))
        ]

    def section(self, title: str, words: str) -> None:
        self.text.append(f"\n## {title}\n\n{wrapped(words)}\n")

    def picture(self, name: str, alternative: str, svg: str) -> None:
        self.pictures[name] = svg
        self.text.append(f"\n![{alternative}](pictures/{name})\n")

    def table(self, head: Sequence[str], rows: Cells, figures: Iterable[Figure] = ()) -> None:
        """A table; below it the notes and the numbers of the runs that its figures are from."""
        lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        self.text.append("\n" + "\n".join(lines) + "\n")
        used = list({figure.run.name: figure.run for figure in figures}.values())
        places = {1 + self.runs.index(run): run for run in used}
        notes = [f"Run {place}: {note}" for place in sorted(places) for note in places[place].content["notes"]]
        if notes:
            self.text.append("\n" + "\n".join(wrapped(note, "- ") for note in notes) + "\n")
        if used:
            self.text.append(f"\n[Runs](#runs): {', '.join(map(str, sorted(places)))}.\n")


def ordered(figures: Iterable[Figure]) -> list[Figure]:
    """By network as NETWORKS lists them, then by hardware."""
    places = list(NETWORKS)
    return sorted(figures, key=lambda figure: (places.index(figure.row["network"]), figure.hardware))


def by_network(figures: Sequence[Figure], key: str, cell: Callable[[Row], str]) -> tuple[list[str], list[list[str]]]:
    """A row for each value of `key`, a column for each network and, where there are several, hardware."""
    kinds = {figure.hardware for figure in figures}
    columns = list(dict.fromkeys((figure.network, figure.hardware) for figure in figures))
    held = {(figure.row[key], figure.network, figure.hardware): cell(figure.row) for figure in figures}
    names = list(dict.fromkeys(figure.row[key] for figure in figures))
    head = [network if len(kinds) == 1 else f"{network}<br>{kind}" for network, kind in columns]
    return ["", *head], [[name, *(held.get((name, *column), "") for column in columns)] for name in names]


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def wrapped(words: str, first: str = "") -> str:
    """Prose in lines of at most 120 columns, which a change of one word does not move far."""
    return textwrap.fill(
        words,
        120,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
