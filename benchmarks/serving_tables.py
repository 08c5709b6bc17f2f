"""What docs/benchmarks.md says of published models being asked."""

from __future__ import annotations

from page import Page


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
