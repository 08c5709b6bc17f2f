"""Missing numbers (NaN): the inputs in which a published model takes them.

Vendored into every published model beside `compile_stage.flavor`. Many originals refuse a NaN, and others take it in
some columns only (imputers, trees); a compiled graph computes with it whatever the original does. So validation asks
the original, and compares the answers where it takes one (`measure.missing`). The manifest lists what is refused:

    missing     {"refused": [{"input": "X", "columns": [0, 3], "reason": "..."}]}

`columns` are those of a matrix, or null for the whole input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compile_stage.core.records import Verdict
    from compile_stage.core.tensors import Array, Batch

MISSING = "missing_numbers"
"""The check of a verdict that says where NaN is refused."""


class MissingNumbers:
    """The rule of one model.

    Attributes:
        refused: Input → (columns, or None for all of it; reason) each.
    """

    def __init__(self, refused: Sequence[Mapping[str, Any]]) -> None:
        self.refused: dict[str, list[tuple[list[int] | None, str]]] = {}
        for entry in refused:
            columns = entry.get("columns")
            found = None if columns is None else [int(column) for column in columns]
            self.refused.setdefault(str(entry["input"]), []).append((found, str(entry.get("reason", ""))))

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> MissingNumbers | None:
        """The rule that a manifest, or a validation, names; None where it names none, as of earlier versions."""
        named = manifest.get("missing")
        return cls(named.get("refused", ())) if isinstance(named, Mapping) else None

    def refuse(self, batch: Batch, columns: Sequence[str] | None = None) -> str | None:
        """None when the batch holds no NaN where it is refused, or the first reason.

        Args:
            columns: Names of the columns of a single input, for the message.
        """
        for name, entries in self.refused.items():
            if name in batch and (missing := _with_nan(batch[name])) is not None:
                for wanted, reason in entries:
                    if wanted is None or missing.ndim != 1:
                        where = f"input {name!r}"
                    elif hit := [column for column in wanted if column < len(missing) and missing[column]]:
                        named = columns is not None and hit[0] < len(columns)
                        where = f"column {columns[hit[0]] if named and columns else hit[0]!r} of input {name!r}"
                    else:
                        continue
                    return f"{where} holds a missing number (NaN), which is refused: {reason}; fill it in first"
        return None


def proven_missing(verdict: Verdict | None) -> dict[str, Any] | None:
    """What a manifest, or a validation, says under `missing`; None where nobody looked."""
    for check in verdict.checks if verdict is not None else ():
        if check.gate.metric == MISSING:
            return {"refused": list(check.gate.options["refused"])}
    return None


def _with_nan(array: Array) -> Array | None:
    """Which columns of a matrix hold a NaN, or a truth value for other arrays; None where there is none."""
    import numpy as np

    if array.dtype.kind != "f":
        return None
    missing = np.isnan(array)
    if not missing.any():
        return None
    return np.asarray(missing.any(axis=0) if array.ndim == 2 else True)
