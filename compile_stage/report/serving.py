"""What serving a winner costs, in words and rows (docs/serving-cost.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from compile_stage.core.digest import plain
from compile_stage.core.records import LoadPoint, ServedLoad, ServingCost, TargetResult
from compile_stage.report import numbers

HEAD = ("load", "requests", "right answers/s", "p50", "p95", "p99", "not answered rightly in time", "CPU a request")


def serving_document(cost: ServingCost) -> dict[str, Any]:
    """As `result.json` has it: the record itself."""
    document: dict[str, Any] = plain(cost)
    return document


def serving_text(target: TargetResult) -> str:
    """`served: 386 requests/s with 99 % of them within 100 ms (237 to 628), by 1 process of 1 thread; 0.245 USD for a
    million inferences (0.150 to 0.399)`; why it was not measured; empty where the policy does not ask."""
    return cost_text(target.serving) if target.serving is not None else ""


def cost_text(cost: ServingCost) -> str:
    """As `serving_text`, of one that was measured."""
    if cost.winner is None:
        return f"served: not measured: {cost.reason}"
    parts = [_throughput(cost, cost.winner)]
    if cost.cost_per_million is not None:
        span = f" ({numbers.span(cost.cost_interval)})" if cost.cost_interval is not None else ""
        parts.append(f"{cost.cost_per_million:.3g} {cost.currency} for a million inferences{span}")
    if cost.ratio is not None:
        span = f" ({numbers.span(cost.ratio_interval)})" if cost.ratio_interval is not None else ""
        parts.append(f"{numbers.ratio(cost.ratio)} the throughput of what the alias points to now{span}")
    return "; ".join(filter(None, parts))


def _throughput(cost: ServingCost, load: ServedLoad) -> str:
    layout = f"{numbers.count(load.layout.instances, 'process')} of {numbers.count(load.layout.threads, 'thread')}"
    if cost.limit_s is None:
        asked = [point for point in load.points if point.kind == "open"]
        untold = sum(bool(point.invalid) for point in asked)
        too_much = sum(point.overloaded and not point.invalid for point in asked)
        parts = [f"served by {layout} under the rates that were asked for"]
        if untold:
            parts.append(f"{untold} of {len(asked)} trials could not be measured")
        if too_much:
            parts.append(f"{too_much} of {len(asked)} overloaded it")
        return "; ".join(parts)
    within = f"99 % of them within {numbers.duration(cost.limit_s)}"
    if load.throughput_per_s is None:
        return f"served: the requests/s with {within} are not known: {load.reason}"
    span = f" ({numbers.span(load.interval)})" if load.interval is not None else ""
    return f"served: {numbers.rate(load.throughput_per_s)} requests/s with {within}{span}, by {layout}"


def serving_remarks(cost: ServingCost) -> list[str]:
    """What a reader should know beside the figures."""
    remarks = [cost.server, *cost.notes]
    if (load := cost.winner) is not None:
        if load.requests:
            margin = 1.96 * math.sqrt(0.99 * 0.01 / load.requests)
            remarks.append(
                f"{load.requests:,} requests in the trials that decided show the share in time to ±{100 * margin:.2g} "
                "points; MLPerf asks for 262,742, which show it to ±0.05"
            )
        if load.held:
            remarks.append(f"the interval of the throughput begins at 0: {load.held}")
        spent = "" if load.joules is None else f"{load.joules:.3g} J a request, by "
        remarks.append(f"energy: {spent}{load.energy}" if load.energy else "")
    return [remark for remark in remarks if remark]


def serving_rows(cost: ServingCost | None) -> list[tuple[str, ...]]:
    """The winner's trials: closed loops, predict() alone, then arrivals by rate. Empty where nothing was measured."""
    if cost is None or cost.winner is None:
        return []
    return [_row(point) for point in _ordered(cost.winner)]


def _ordered(load: ServedLoad) -> Iterator[LoadPoint]:
    for kind in ("closed", "predict"):
        yield from (point for point in load.points if point.kind == kind)
    yield from sorted((p for p in load.points if p.kind == "open"), key=lambda point: point.rate or 0.0)


def _row(point: LoadPoint) -> tuple[str, ...]:
    missed = f"{point.missed} ({numbers.percent(point.missed / point.requests)})" if point.requests else numbers.DASH
    state = "; invalid: the load generator was late" if point.invalid else "; overloaded" if point.overloaded else ""
    return (
        _load_words(point),
        f"{point.requests:,}",
        numbers.rate(point.throughput_per_s),
        *(numbers.duration(value) for value in (point.p50_s, point.p95_s, point.p99_s)),
        missed + state,
        numbers.duration(point.server_cpu_s),
    )


def _load_words(point: LoadPoint) -> str:
    if point.kind == "open":
        return f"{numbers.rate(point.rate)} requests/s arrive"
    if point.kind == "predict":
        return f"predict() alone, {numbers.count(point.clients, 'thread')}"
    return numbers.count(point.clients, "client")
