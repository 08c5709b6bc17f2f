"""What `/metrics` shows, in Prometheus' text format.

The figures come from the tables, so they outlive a restart, and no library has to count beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from compile_stage.service.queue import Figures

BUCKETS_S = (5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 21600.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "compile_stage_watch_"
_Samples = Iterable[tuple[Mapping[str, Any], float]]


def exposition(figures: Figures, policies: Mapping[str, int], polled_at: float, *, poll_failed: bool) -> str:
    """The page.

    Args:
        policies: `ok` and `broken` → how many.
        polled_at: When the registry was last searched, in seconds since 1970; 0 for never.
    """
    jobs = [({"kind": kind, "state": state}, count) for kind, state, count in figures.jobs]
    exits = [({"kind": kind, "exit_code": _code(code)}, count) for kind, code, count in figures.exits]
    deliveries = [({"result": label}, count) for label, count in figures.deliveries.items() if " " not in label]
    parts = [
        _metric("deliveries_total", "counter", "Webhook deliveries by what became of them.", deliveries),
        _metric("looks", "gauge", "Versions that wait to be looked at in the registry.", [({}, figures.looks)]),
        _metric("jobs", "gauge", "Jobs by kind and state; the queue's length is that of the state queued.", jobs),
        _metric("attempts_total", "counter", "Ended attempts by exit code of the stage.", exits),
        _histogram(figures),
        _metric("policies", "gauge", "Policy files by state.", [({"state": s}, n) for s, n in policies.items()]),
        _metric(
            "poll_timestamp_seconds", "gauge", "When the registry was last searched to the end.", [({}, polled_at)]
        ),
        _metric("poll_failed", "gauge", "1 where the last search did not reach the end.", [({}, int(poll_failed))]),
    ]
    return "".join(parts)


def _metric(name: str, kind: str, about: str, samples: _Samples) -> str:
    head = f"# HELP {_PREFIX}{name} {about}\n# TYPE {_PREFIX}{name} {kind}\n"
    return head + "".join(f"{_PREFIX}{name}{_labels(labels)} {value:.15g}\n" for labels, value in samples)


def _histogram(figures: Figures) -> str:
    name = f"{_PREFIX}attempt_seconds"
    lines = [f"# HELP {name} How long attempts took.", f"# TYPE {name} histogram"]
    for kind, count, seconds, *within in figures.durations:
        for bound, so_many in zip(BUCKETS_S, within, strict=True):
            lines.append(f"{name}_bucket{_labels({'kind': kind, 'le': f'{bound:g}'})} {so_many}")
        lines.append(f"{name}_bucket{_labels({'kind': kind, 'le': '+Inf'})} {count}")
        lines += [
            f"{name}_sum{_labels({'kind': kind})} {seconds:.15g}",
            f"{name}_count{_labels({'kind': kind})} {count}",
        ]
    return "\n".join(lines) + "\n"


def _code(code: int | None) -> str:
    return "killed" if code is None else str(code)


def _labels(labels: Mapping[str, Any]) -> str:
    def escaped(value: object) -> str:
        return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{key}="{escaped(value)}"' for key, value in labels.items()) + "}" if labels else ""
