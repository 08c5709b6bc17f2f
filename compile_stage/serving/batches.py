"""The batch sizes that a published model runs: those that were proven, however many rows it is asked for.

Vendored into every published model beside `compile_stage.flavor`. A size is proven when a validation compared the
artifact's answers in a batch of that size with the original's: the sizes that the policy names, and those between them
that the artifact takes (`measure.behaviour`). The manifest lists them:

    batches     {"sizes": [1, 2, 4, 7, 8], "splits": true}

A request of another size is cut into batches of the largest; what remains is filled up with copies of its rows to the
next larger size, and the answers to these are dropped. That is right where an answer depends on its own row alone.
Validation makes one such request, and compares with what the original answers to all its rows at once; where that
differs, or the original's graph takes rows together (`measure.graph_rows`), `splits` is false, and requests of other
sizes are refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import UsageError

if TYPE_CHECKING:
    from compile_stage.core.records import Target, Verdict
    from compile_stage.core.tensors import Array, Batch

OTHER_SIZES, LARGER = "other_batch_sizes", "larger_batches"
"""The checks of a verdict that say which sizes were proven, beside those of the policy."""


class ProvenBatches:
    """The rule of one model.

    Attributes:
        sizes: Proven batch sizes, ascending; at least one.
        splits: Requests of other sizes are answered in parts.
    """

    def __init__(self, sizes: Iterable[int], *, splits: bool) -> None:
        self.sizes = tuple(sorted(set(sizes)))
        self.splits = splits
        self._known = frozenset(self.sizes)

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> ProvenBatches | None:
        """The rule that a manifest, or a validation, names; None where it names none, as of earlier versions."""
        named = manifest.get("batches")
        if not isinstance(named, Mapping) or not named.get("sizes"):
            return None
        return cls(map(int, named["sizes"]), splits=bool(named.get("splits")))

    def takes(self, rows: int) -> bool:
        """True for a proven size."""
        return rows in self._known

    def parts(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """(first row, end, size of the batch that is run) of each part of a request, in order."""
        largest = self.sizes[-1]
        for start in range(0, rows, largest):
            end = min(start + largest, rows)
            yield start, end, self.sizes[bisect_left(self.sizes, end - start)]

    def run(self, run: Callable[[Batch], Batch], batch: Batch) -> dict[str, Array]:
        """The answer to a request of at least one row, whose arrays all have as many, in batches of proven sizes.

        Args:
            run: Answers a batch of a proven size.

        Raises:
            UsageError: The size was not proven, and parts may not be answered by themselves; or an output has not one
                row for each of the input.
        """
        rows = len(next(iter(batch.values())))
        if self.takes(rows):
            return dict(run(batch))
        self._demand_parts(rows)
        return self._joined(run, batch, rows)

    def run_lists(self, run: Callable[[Array], list[list[int]]], rows: Array) -> list[list[int]]:
        """As `run`, of rows `[rows, ...]`, at least one, of which each has a list as its answer."""
        if self.takes(len(rows)):
            return run(rows)
        self._demand_parts(len(rows))
        parts = self.parts(len(rows))
        return [one for start, end, size in parts for one in run(_filled(rows[start:end], size))[: end - start]]

    def _demand_parts(self, rows: int) -> None:
        if not self.splits:
            raise UsageError(
                f"a batch of {rows} was not proven: batches of {_listed(self.sizes)} were, and this model is not run "
                "in parts, since nothing shows that the original's answer to a row is independent of the other rows",
                fix="name that size in the target's batch_sizes and run compile-stage again",
            )

    def _joined(self, run: Callable[[Batch], Batch], batch: Batch, rows: int) -> dict[str, Array]:
        import numpy as np

        answers: list[dict[str, Array]] = []
        for start, end, size in self.parts(rows):
            part = {name: _filled(array[start:end], size) for name, array in batch.items()}
            answers.append({name: _cut(name, array, size, end - start) for name, array in run(part).items()})
        if len(answers) == 1:
            return answers[0]
        try:
            return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}
        except (KeyError, ValueError) as error:
            raise UsageError(f"the answers to parts of a batch of {rows} can't be put together: {error}") from error


def proven_batches(verdict: Verdict | None, target: Target) -> dict[str, Any]:
    """What a manifest, or a validation, says under `batches`.

    Args:
        verdict: None where nothing was validated: then the sizes are those that the policy asks for, for whoever
            validates it.
    """
    sizes, splits = set(target.batch_sizes), False
    if verdict is not None and verdict.passed:
        # The smallest and the largest shapes of a policy promise a batch of their own (`measure.corners`).
        for end in ("min", "max"):
            sizes.add(
                max((getattr(shape, end)[0] for shape in target.shapes.values() if getattr(shape, end)), default=0)
            )
        for check in verdict.checks:
            if check.gate.metric == OTHER_SIZES:
                sizes |= set(check.batch_sizes)
            elif check.gate.metric == LARGER:
                splits = bool(check.batch_sizes)
    return {"sizes": sorted(sizes - {0}), "splits": splits}


def _filled(array: Array, size: int) -> Array:
    """The rows, again from the first until there are so many."""
    if len(array) == size:
        return array
    import numpy as np

    filled: Array = array[np.arange(size) % len(array)]
    return filled


def _cut(name: str, array: Array, size: int, rows: int) -> Array:
    if not getattr(array, "shape", ()) or len(array) != size:
        raise UsageError(
            f"output {name!r} has not one row for each of the batch, so no part of a batch can be answered"
        )
    return array[:rows]


def _listed(sizes: tuple[int, ...]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, sizes[:-1])), str(sizes[-1]))))
