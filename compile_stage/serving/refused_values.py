"""All values that a published model refuses because its original does, or answers them otherwise.

Vendored into every published model beside `compile_stage.flavor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compile_stage.serving.missing_numbers import MissingNumbers
from compile_stage.serving.taken_values import TakenValues

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch


class RefusedValues:
    """The rules of one model.

    Attributes:
        missing: Where a NaN is refused; None where nobody asked the original.
        taken: Which whole numbers and categories are taken; None likewise.
    """

    def __init__(self, missing: MissingNumbers | None, taken: TakenValues | None) -> None:
        self.missing = missing
        self.taken = taken

    @classmethod
    def of(cls, manifest: Mapping[str, Any], validation: Mapping[str, Any] | None = None) -> RefusedValues:
        """By what a validation found on such a machine as this; where it says nothing, by the manifest."""
        said = validation or {}
        return cls(
            MissingNumbers.of(said) or MissingNumbers.of(manifest), TakenValues.of(said) or TakenValues.of(manifest)
        )

    def refuse(self, batch: Batch, columns: Sequence[str] | None = None, *, is_finite: bool = False) -> str | None:
        """None when the batch holds no value that is refused, or the first reason.

        Args:
            columns: Names of the columns of a single input, for the message.
            is_finite: It is known to hold no NaN.
        """
        for rule in (None if is_finite else self.missing, self.taken):
            if rule is not None and (reason := rule.refuse(batch, columns)) is not None:
                return reason
        return None
