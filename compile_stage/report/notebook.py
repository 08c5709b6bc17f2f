"""A run's result as a notebook shows it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from compile_stage.core.records import RunResult
from compile_stage.report import summary

if TYPE_CHECKING:
    import pandas as pd


class NotebookResult(RunResult):
    """A `RunResult` that a notebook renders as the report, and that gives its candidates as a table. The records
    themselves know no report."""

    __slots__ = ()

    @classmethod
    def of(cls, result: RunResult) -> NotebookResult:
        """The same result."""
        return cls(**{field.name: getattr(result, field.name) for field in fields(RunResult)})

    def _repr_html_(self) -> str:
        """The page of `report.html`, in a frame of its own, so that its styles don't reach the notebook."""
        from html import escape

        from compile_stage.report.html import render_html

        page = escape(render_html(self, scripts=False), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:640px;border:0" sandbox></iframe>'

    def to_pandas(self) -> pd.DataFrame:
        """One row a candidate, those that were refused too, in the order of the report.

        Columns: target, job_id, backend, precision, scheme, state, reason, batch_size, p50_s (seconds), speedup,
        speedup_low and speedup_high (its 95 % interval), stable, size_bytes, peak_memory_bytes. What was not measured
        is missing.
        """
        import pandas as pd

        rows = [_cells(target.policy.target.name, row) for target in self.targets for row in summary.rows(self, target)]
        return pd.DataFrame(rows, columns=list(_COLUMNS))


_COLUMNS = (
    "target", "job_id", "backend", "precision", "scheme", "state", "reason", "batch_size", "p50_s", "speedup",
    "speedup_low", "speedup_high", "stable", "size_bytes", "peak_memory_bytes",
)  # fmt: skip


def _cells(target: str, row: summary.Row) -> dict[str, Any]:
    timing = row.timing
    measured = row.candidate.measurement if row.candidate is not None else None
    low, high = timing.speedup_interval if timing and timing.speedup_interval else (None, None)
    return {
        "target": target,
        **{name: getattr(row, name) for name in ("job_id", "backend", "precision", "scheme", "state", "reason")},
        "batch_size": timing.batch_size if timing else None,
        "p50_s": summary.median_s(timing),
        "speedup": timing.speedup if timing else None,
        "speedup_low": low,
        "speedup_high": high,
        "stable": timing.stable if timing else None,
        "size_bytes": row.size_bytes,
        "peak_memory_bytes": measured.peak_memory_bytes if measured else None,
    }
