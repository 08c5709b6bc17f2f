"""What docs/benchmarks.md says of published models being asked."""

from __future__ import annotations

from page import Page, Row


def predict_cost(page: Page) -> None:
    page.section(
        "What does predict() cost around the runtime?",
        "CPU time of one call with one row, in microseconds: a random forest of 50 trees over 30 columns in ONNX "
        "Runtime, published. *predict* is the published pyfunc, conversion and runtime; *MLflow* is the same behind "
        "`mlflow.pyfunc`, whose checks of the signature come first; *original* is scikit-learn behind them.",
    )
    figures = page.newest("predict-cost", by=("answers", "given"))
    rows = [
        [figure.row["answers"], figure.row["given"], figure.hardware, f"{figure.row['cpu_us']:.0f}"]
        for figure in figures
    ]
    page.table(["what answers", "to", "hardware", "CPU µs"], rows, figures)


def served(page: Page) -> None:
    """Nothing before there is a run."""
    figures = page.newest("served", by=("model",))
    if not figures:
        return
    limit = figures[-1].run.content["settings"]["p99_ms"]
    page.section(
        "How many requests does a published model answer behind MLflow's server?",
        "A random forest of 50 trees over 30 columns, one row a request, one process with one thread: the published "
        "version in ONNX Runtime, a pyfunc of ten lines around the same ONNX file (*by hand*), and scikit-learn's "
        f"model (*original*), all behind the same server, in turns. The p99 limit is {limit:g} ms from a request's "
        "arrival. In brackets: the published version's figure over this one, with its 95 % interval over starts of the "
        "servers; of CPU time, below 1 is better. How it is measured: [serving-cost.md](serving-cost.md).",
    )
    kinds = list(dict.fromkeys(figure.hardware for figure in figures))
    answering = list(dict.fromkeys(figure.row["answers"] for figure in figures))
    answering.sort(key=("published", "by hand", "original").index)
    held = {(one.hardware, one.row["figure"], one.row["answers"]): one.row for one in figures}
    rows = [
        [figure, kind, *(_served_cell(held.get((kind, figure, name))) for name in answering)]
        for kind in kinds
        for figure in sorted({one.row["figure"] for one in figures if one.hardware == kind})
    ]
    page.table(["", "hardware", *answering], rows, figures)


def _served_cell(row: Row | None) -> str:
    if row is None:
        return "not found"
    over = f" ({row['published_over_it']:.2f}: {row['low']:.2f} to {row['high']:.2f})" if "low" in row else ""
    return f"{row['value']:,.0f}{over}"
