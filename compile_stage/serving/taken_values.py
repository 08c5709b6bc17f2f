"""Whole numbers and categories: which a published model takes.

Vendored into every published model beside `compile_stage.flavor`. An original mostly raises where a token id or a code
lies outside of its table, and an encoder where it does not know a category. A compiled graph may answer with another
row, or as if the category were the first. So validation asks the original (`measure.taken_values`). The manifest lists
what is taken, where not every value is:

    taken_values     {"rules": [{"input": "ids", "columns": null, "least": 0, "most": 30521, "reason": "..."},
                                {"input": "city", "columns": null, "values": ["Bonn", "Oslo"], "reason": "..."}]}

`columns` are those of a matrix, or null for the whole input; `least` or `most` is null where there is no limit. A
NaN is left to `serving.missing_numbers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compile_stage.core.records import Verdict
    from compile_stage.core.tensors import Array, Batch

TAKEN = "taken_values"
"""The check of a verdict that says which values are taken, and the manifest's field."""

_NAMED = 5  # values of a long list that a message names


class TakenValues:
    """The rules of one model.

    Attributes:
        rules: As the manifest lists them.
    """

    def __init__(self, rules: Sequence[Mapping[str, Any]]) -> None:
        self.rules = tuple(rules)
        self._known = [set(rule["values"]) if "values" in rule else None for rule in self.rules]

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> TakenValues | None:
        """The rules that a manifest, or a validation, names; None where it names none, as of earlier versions."""
        named = manifest.get(TAKEN)
        return cls(named.get("rules", ())) if isinstance(named, Mapping) else None

    def refuse(self, batch: Batch, columns: Sequence[str] | None = None) -> str | None:
        """None when every value is taken, or the first reason.

        Args:
            columns: Names of the columns of a single input, for the message.
        """
        for rule, known in zip(self.rules, self._known, strict=True):
            array = batch.get(rule["input"])
            if array is None or not array.size:
                continue
            wanted = rule.get("columns") if array.ndim == 2 else None
            looked_at = array if wanted is None else array[:, wanted]
            found = (
                _outside(looked_at, rule.get("least"), rule.get("most")) if known is None else _new(looked_at, known)
            )
            if found is not None:
                where = f"input {rule['input']!r}"
                if wanted is not None:
                    column = wanted[int((looked_at == found).any(axis=0).argmax())]
                    where = f"column {columns[column] if columns and column < len(columns) else column!r} of {where}"
                return f"{where} holds {_shown(found)}, and takes {taken_text(rule)}: {rule.get('reason', '')}"
        return None


def taken_text(rule: Mapping[str, Any]) -> str:
    """Such as `whole numbers from 0 to 30521`, or `'Bonn', 'Oslo'`."""
    if "values" in rule:
        values = [_shown(value) for value in rule["values"]]
        return ", ".join(values[:_NAMED]) + (f" and {len(values) - _NAMED} more" if len(values) > _NAMED else "")
    least, most = rule.get("least"), rule.get("most")
    if least is None:
        return f"whole numbers up to {most}"
    return f"whole numbers from {least}" + (f" to {most}" if most is not None else "")


def _shown(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else repr(value)


def place_text(rule: Mapping[str, Any]) -> str:
    """Such as `columns 0, 3 of input 'X'`."""
    columns = rule.get("columns")
    if columns is None:
        return f"input {rule['input']!r}"
    shown = ", ".join(map(str, columns[:_NAMED]))
    more = f" and {len(columns) - _NAMED} more" if len(columns) > _NAMED else ""
    return f"column{'s' if len(columns) != 1 else ''} {shown}{more} of input {rule['input']!r}"


def proven_taken(verdict: Verdict | None) -> dict[str, Any] | None:
    """What a manifest, or a validation, says under `taken_values`; None where nobody looked."""
    for check in verdict.checks if verdict is not None else ():
        if check.gate.metric == TAKEN and "rules" in check.gate.options:
            return {"rules": list(check.gate.options["rules"])}
    return None


def _outside(array: Array, least: int | None, most: int | None) -> int | None:
    """A number outside of the range, or None."""
    if least is not None and (low := int(array.min())) < least:
        return low
    if most is not None and (high := int(array.max())) > most:
        return high
    return None


def _new(array: Array, known: set[Any]) -> Any:
    """A value that is not known, or None."""
    return next((value for value in array.ravel().tolist() if value not in known and value == value), None)
