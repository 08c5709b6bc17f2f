"""What docs/benchmarks.md says of the winner beside the peers' best by hand, and of how near it is to what the machine
can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean

from page import Figure, Page, Row, ordered

CONTROL = "ours, once more"


def by_hand(page: Page) -> None:
    """Nothing before there is a run."""
    figures = [figure for figure in page.newest("by-hand", by=("network", "batch")) if figure.row["batch"]]
    if not figures:
        return
    page.section(
        "The winner against the best by hand",
        "The published winner of one run of the stage, and the fastest of what a skilled user gets by hand from each "
        "peer with the same samples: ONNX Runtime, OpenVINO and NNCF, PyTorch's compilers, LiteRT, ExecuTorch "
        "([the recipes](../benchmarks/peers)). All in turns, in fresh processes, arrays in and out. A ratio is the "
        "peer's median latency over ours, with its 95 % interval over starts: above 1 ours is faster. *Passes*: the "
        "answers meet the same tolerances that the policy asks of ours in that precision; a recipe that misses them "
        "is named where it is faster than those that pass. *Control*: ours against itself.",
    )
    cases: dict[tuple[str, int, str], list[Row]] = {}
    for figure in ordered(figures):
        cases.setdefault((figure.network, figure.row["batch"], figure.hardware), []).append(figure.row)
    rows = [[network, str(batch), kind, *_cells(of_case)] for (network, batch, kind), of_case in cases.items()]
    head = ["network", "batch", "hardware", "ours", "best by hand that passes", "ratio", "faster, but misses a limit"]
    page.table([*head, "control"], rows, figures)
    page.text.append(_means(cases))
    _before(page, figures)
    if missing := left_out(page.newest("by-hand", by=("network", "batch"))):
        page.text.append(f"\nLeft out: {missing}.\n")


def _before(page: Page, figures: Sequence[Figure]) -> None:
    """The winners of an earlier commit, where they took part."""
    then = [figure for figure in ordered(figures) if figure.row.get("commit") and "over_ours" in figure.row]
    if not then:
        return
    commits = ", ".join(sorted({figure.row["commit"] for figure in then}))
    page.text.append(
        f"\nBeside what commit {commits} publishes of the same model by the same policy, in the same turns:\n"
    )
    head = ["network", "batch", "hardware", "now", "then", "then over now"]
    page.table(head, [_then_cells(figure) for figure in then], then)
    ratios = [figure.row["over_ours"] for figure in then]
    page.text.append(f"\nThe geometric mean of these {len(ratios)} ratios is **{geometric_mean(ratios):.2f}**.\n")


def _then_cells(figure: Figure) -> list[str]:
    row = figure.row
    then = row["recipe"].split(",")[0]
    return [figure.network, str(row["batch"]), figure.hardware, row["ours"], then, f"**{ratio_words(row)}**"]


def _means(cases: Mapping[tuple[str, int, str], Sequence[Row]]) -> str:
    """A sentence for each kind of hardware."""
    best: dict[str, list[float]] = {}
    for (_, _, kind), rows in cases.items():
        if passed := passing(rows):
            best.setdefault(kind, []).append(fastest(passed)["over_ours"])
    return "".join(
        f"\n{kind}: the geometric mean of {len(ratios)} ratios is **{geometric_mean(ratios):.2f}**, the lowest "
        f"{min(ratios):.2f}; {sum(ratio >= 1 for ratio in ratios)} are at least 1.\n"
        for kind, ratios in best.items()
    )


def _peers(rows: Sequence[Row]) -> list[Row]:
    """Those with a ratio."""
    return [row for row in rows if "over_ours" in row and row["recipe"] != CONTROL and not row.get("commit")]


def passing(rows: Sequence[Row]) -> list[Row]:
    """Of these, those whose answers meet the tolerances."""
    return [row for row in _peers(rows) if row["passes"]]


def _cells(rows: Sequence[Row]) -> list[str]:
    passed = passing(rows)
    control = next((ratio_words(row) for row in rows if row["recipe"] == CONTROL and "over_ours" in row), "")
    ours = f"{rows[0]['ours']}, {rows[0]['ours_p50_ms']:.3g} ms"
    if not passed:
        return [ours, "none", "", "", control]
    best = fastest(passed)
    quicker = [row for row in _peers(rows) if not row["passes"] and row["over_ours"] < best["over_ours"]]
    missed = "; ".join(f"{row['recipe']}: {ratio_words(row)}, {row['refusal'].split(':')[0]}" for row in quicker[:1])
    return [ours, f"{best['recipe']}, {best['p50_ms']:.3g} ms", f"**{ratio_words(best)}**", missed, control]


def fastest(rows: Sequence[Row]) -> Row:
    """Of rows with a ratio."""
    return min(rows, key=lambda row: row["over_ours"])


def ratio_words(row: Row) -> str:
    return f"{row['over_ours']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def left_out(figures: Sequence[Figure]) -> str:
    """Peers and recipes that could not take part, with the networks and the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for figure in ordered(figures):
        if reason := figure.row.get("left_out"):
            networks = found.setdefault((figure.row["recipe"], " ".join(reason.split())[:90]), [])
            networks.extend([figure.network] if figure.network not in networks else [])
    return "; ".join(f"{recipe} ({', '.join(networks)}: {why})" for (recipe, why), networks in found.items())


def roofline(page: Page) -> None:
    """Nothing before there is a run."""
    figures = page.newest("roofline", by=("what", "network", "batch"))
    if not figures:
        return
    page.section(
        "How near is the winner to what the machine can do?",
        "Highest rates that were measured here: products of matrices in OpenVINO, ONNX Runtime and PyTorch, and "
        "memory, two threads.",
    )
    peaks = [figure for figure in figures if figure.row["what"] != "network"]
    rows = [[figure.row["what"], figure.hardware, _rate(figure.row), figure.row["by"]] for figure in peaks]
    page.table(["", "hardware", "highest rate", "where"], rows, peaks)
    networks = ordered(figure for figure in figures if figure.row["what"] == "network")
    page.text.append(
        "\n*At least*: the longer of the time for the operations of convolutions, matrix products and LSTMs at the "
        "rate\nof the winner's precision, and that for reading its weights, inputs and outputs once. "
        "*Of the roofline*: that over\nthe winner's latency.\n"
    )
    page.table(
        ["network", "batch", "hardware", "GFLOP", "MB", "winner", "at least, ms", "winner, ms", "of the roofline"],
        [
            [figure.network, str(figure.row["batch"]), figure.hardware, *_network_cells(figure.row)]
            for figure in networks
        ],
        networks,
    )


def _rate(row: Row) -> str:
    return f"{row['gb_per_s']:.1f} GB/s" if "gb_per_s" in row else f"{row['gflops']:.0f} GFLOP/s"


def _network_cells(row: Row) -> list[str]:
    cost = [f"{row['gflop']:.2f}", f"{row['mb']:.1f}"]
    if "winner" not in row:
        return [*cost, "not measured", "", "", ""]
    least = f"{row['least_ms']:.3f} ({row['bound_by']})"
    return [*cost, row["winner"], least, f"{row['p50_ms']:.3f}", f"{100 * row['share']:.0f} %"]
