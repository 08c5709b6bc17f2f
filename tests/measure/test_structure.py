"""What every artifact must have before a value of it is compared: the outputs, their shapes and kinds, and samples that
prove something."""

from __future__ import annotations

import numpy as np
import pytest

from compile_stage.core.records import Outcome
from compile_stage.measure.metrics import ComparedSamples, check_outputs

ENOUGH = ComparedSamples(min_samples=4, real=True)
ORIGINAL = {"y": np.ones((8, 3), np.float32), "label": np.arange(8)}


def problems(candidate: dict[str, np.ndarray], samples: ComparedSamples = ENOUGH, **baseline: np.ndarray) -> list[str]:
    """The reasons of the structural checks that did not pass."""
    checks = check_outputs((), candidate, {**ORIGINAL, **baseline}, samples, batch_size=1, seed=0)
    structural = [check for check in checks if check.gate.metric in ("samples", "outputs", "shape", "finite")]
    return [check.reason for check in structural if check.outcome is not Outcome.PASS]


def test_an_artifact_with_the_originals_outputs_has_no_problem() -> None:
    """Broken: nothing would pass."""
    assert problems(dict(ORIGINAL)) == []
    as_float16 = {**ORIGINAL, "y": ORIGINAL["y"].astype(np.float16), "label": ORIGINAL["label"].astype(np.int32)}
    assert problems(as_float16) == []


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"y": ORIGINAL["y"]}, "it lost 'label'"),
        ({**ORIGINAL, "more": np.ones(8)}, "it has 'more', which the baseline has not"),
        ({**ORIGINAL, "y": np.float32(1.0)}, "a single number has no axis of samples"),
        ({**ORIGINAL, "y": ORIGINAL["y"][:7]}, "it has answers for 7 samples, the baseline for 8"),
        ({**ORIGINAL, "y": ORIGINAL["y"].T.reshape(8, 3, 1)}, "each sample has the shape [3, 1], the baseline's [3]"),
        ({**ORIGINAL, "label": np.arange(8.0)}, "it holds float64, the baseline int64"),
        ({**ORIGINAL, "label": np.arange(8) > 3}, "it holds bool, the baseline int64"),
        ({**ORIGINAL, "y": np.where(np.eye(8, 3) > 0, np.nan, 1).astype(np.float32)}, "3 values are NaN or infinite"),
        ({**ORIGINAL, "y": np.where(np.eye(8, 3) > 0, np.inf, 1).astype(np.float32)}, "in 3 of 8 samples"),
    ],
)
def test_an_output_that_is_not_the_originals_is_a_problem(answers: dict[str, np.ndarray], says: str) -> None:
    """Broken: an output that is lost, cut short, of another shape or kind, or NaN would pass, since what is left of it
    agrees."""
    found = problems(answers)
    assert len(found) == 1
    assert says in found[0]


def test_an_output_of_the_original_that_is_not_by_samples_proves_nothing() -> None:
    """Broken: where the original itself answers with fewer rows, or none, equal answers would count as a proof."""
    (shorter,) = problems({**ORIGINAL, "z": np.ones((2, 3))}, z=np.ones((2, 3)))
    assert "the baseline has 2 answers for it, and 8 for other outputs" in shorter
    (empty,) = problems({**ORIGINAL, "z": np.ones((8, 0))}, z=np.ones((8, 0)))
    assert "it is empty (shape [8, 0]), so there is nothing to compare" in empty


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        (ComparedSamples(min_samples=8, real=True), None),
        (ComparedSamples(min_samples=9, real=True), "8 real samples are fewer than the 9 that the policy asks for"),
        (ComparedSamples(min_samples=4, real=True, distinct=4), None),
        (ComparedSamples(min_samples=5, real=True, distinct=4), "4 differ beyond rounding and have a finite answer"),
        (ComparedSamples(min_samples=1, real=False), "synthetic samples prove nothing"),
        (ComparedSamples(min_samples=4, real=True, groups=np.arange(8) // 2), None),
        (ComparedSamples(min_samples=5, real=True, groups=np.arange(8) // 2), "fewer than the 5"),
    ],
)
def test_too_few_samples_prove_nothing(samples: ComparedSamples, says: str | None) -> None:
    """Broken: copies of one sample, or rows of one patient, would count as many; or made-up samples as real ones."""
    found = problems(dict(ORIGINAL), samples)
    assert (found == []) if says is None else (len(found) == 1 and says in found[0])
