"""The section of docs/benchmarks.md on language models: from `benchmarks/language_model.py`."""

from __future__ import annotations

from page import Page, Row


def language_models(page: Page) -> None:
    """First token and output token of each peer, over ours."""
    page.section(
        "How fast do language models write?",
        "Greedy generations of 32 tokens after a prompt of 64, one thread, in turns in one process. A peer's time over "
        "ours, with the interval over rounds: above 1 ours is faster, below 1 the peer. ONNX Runtime GenAI runs the "
        "graph of its own model builder, whose attention is one fused operator that writes the cache in place. "
        "`int4` and `int8` (ours: int8-dynamic) have blocks of 32 weights, `int4-128` of 128. Weights are random; all "
        "write the same tokens where it says so.",
    )
    figures = page.newest("language-model")
    head = ["network", "precision", "peer", "first token", "output token", "ours, per token", "same tokens"]
    page.table(head, [cells(figure.row) for figure in figures], figures)


def cells(row: Row) -> list[str]:
    def ratio(what: str) -> str:
        low, high = row[f"{what}_interval"]
        return f"{row[f'{what}_over_ours']:.2f} ({low:.2f} to {high:.2f})"

    same = "yes" if row["same_tokens"] else "no"
    return [
        row["network"], row["precision"], row["peer"], ratio("ttft"), ratio("tpot"), f"{row['tpot_ms']:.2f} ms", same,
    ]  # fmt: skip
