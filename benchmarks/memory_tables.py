"""The section of docs/benchmarks.md about the memory of a whole run."""

from __future__ import annotations

from collections.abc import Callable

from page import Figure, Page, number

SOURCES = {"onnx": "ONNX", "pytorch": "PyTorch's exported program"}
STEPS: tuple[tuple[str, Callable[[str, str], bool]], ...] = (
    ("the stage's own process", lambda worker, call: worker == "stage"),
    ("export and rewriting", lambda worker, call: worker == "source" and call in ("export", "rewrite_graph")),
    ("running the original", lambda worker, call: worker in _ORIGINAL and call in _RUNNING),
    ("lowering, static int8", lambda worker, call: call == "lower" and "int8" in worker and "dynamic" not in worker),
    ("lowering, dynamic int8", lambda worker, call: call == "lower" and "dynamic" in worker),
    ("lowering, int4", lambda worker, call: call == "lower" and "int4" in worker),
    ("compiling", lambda worker, call: call == "compile_model"),
    ("running an artifact", lambda worker, call: worker not in _ORIGINAL and call in _RUNNING),
    ("files of the cache, at the end", lambda worker, call: worker == "cache"),
)
_ORIGINAL = ("source", "measure--baseline")
_RUNNING = ("open_source", "open_artifact", "open_served", "predict", "make_calls", "warm_up", "call_untimed", "soak")


def memory(page: Page) -> None:
    """Nothing before there is a run."""
    figures = page.newest("memory", by=("source",))
    if not figures:
        return
    page.section(
        "How much memory does a run take?",
        "A stack of linear layers with random weights through fp32, int8, dynamic int8 and int4 in ONNX Runtime and "
        "OpenVINO, one job at a time, without a cache (`benchmarks/memory.py`). The peak of a step's worker, with all "
        "that it started: anonymous and shared pages and swap, without pages of mapped files; and that over the "
        "model's weights. Of several workers, the largest.",
    )
    rows = []
    for (hardware, source), found in _by_source(figures).items():
        model_mb = found[0].run.content["settings"]["model_mb"]
        for step, belongs in STEPS:
            of_step = [f.row for f in found if belongs(f.row["worker"], f.row["call"])]
            if of_step:
                largest = max(of_step, key=lambda row: row["peak_mb"])
                cells = [number(largest["peak_mb"], 0), f"{largest['models']:.2f}"]
                rows.append([f"{SOURCES[source]}, {model_mb} MB", hardware, step, *cells])
    page.table(["model", "hardware", "step", "peak MB", "times the model"], rows, figures)


def _by_source(figures: list[Figure]) -> dict[tuple[str, str], list[Figure]]:
    found: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        found.setdefault((figure.hardware, figure.row["source"]), []).append(figure)
    return found
