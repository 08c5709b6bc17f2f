"""How often an artifact passes that ruins a few answers, and one that only rounds, on simulated samples.

    python benchmarks/ruined_answers.py --save               # some minutes on two cores
    python benchmarks/ruined_answers.py --metric mae
    python benchmarks/ruined_answers.py --labels lognormal

Seeded: the same figures on every machine. The artifact gives a share of the samples the answer to another one, so that
it loses 5 % more than the limit allows with `confidence: 0.95`. Beside it: how often it passed by the bootstrap
alone, as artifacts in floats did until 2026-11-28; and how often artifacts hold the same limit that move each answer by
a hundred thousandth of what answers differ by, or by 3 % of it, as 8 bits do.

- **Numbers** (`mae`, `rmse`, `r2`, `spearman`): labels are normal, or lognormal; the original explains 80 % of their
  variance.
- **Classes** (`log_loss`, `roc_auc`, `f1`): two of them, one with half of the samples or a tenth. *rare*: only
  answers to samples of the last class are ruined.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402

from compile_stage.core.records import Gate, Outcome  # noqa: E402
from compile_stage.measure import task_intervals  # noqa: E402
from compile_stage.measure.metrics import ComparedSamples, check_outputs  # noqa: E402
from compile_stage.measure.skewed_means import Means  # noqa: E402
from compile_stage.measure.stats import Interval, bootstrap  # noqa: E402
from compile_stage.measure.tasks import HIGHER_IS_BETTER, measure_task  # noqa: E402

OVER = 1.05
ROUNDING, EIGHT_BITS = 1e-5, 0.03
EXPLAINED = 0.8
POPULATION = 400_000
SAMPLES = (40, 100, 300, 1000)

Labels = Literal["normal", "lognormal", "even", "rare"]


@dataclass(frozen=True)
class Case:
    """Labels, and which answers are ruined.

    Attributes:
        share: Of the answers; of `rare` labels, of those to samples of the last class.
    """

    metric: str
    labels: Labels
    share: float

    def draw(self, count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Labels `[count]`, and the original's answers: numbers, or scores of the second class."""
        if self.labels in ("even", "rare"):
            truth = (generator.random(count) < (0.5 if self.labels == "even" else 0.1)).astype(np.int64)
            truth[:2] = 0, 1
            return truth, 2.0 * (2 * truth - 1) + 1.5 * generator.standard_normal(count)
        numbers = generator.standard_normal(count)
        numbers = np.exp(numbers) if self.labels == "lognormal" else numbers
        spread = 2.161 if self.labels == "lognormal" else 1.0
        return numbers, numbers + spread * np.sqrt(1 / EXPLAINED - 1) * generator.standard_normal(count)

    def ruined(
        self, truth: np.ndarray, answers: np.ndarray, others: np.ndarray, generator: np.random.Generator
    ) -> np.ndarray:
        """Some answers are those to another sample."""
        hit = generator.random(len(answers)) < self.share
        hit &= (truth == 1) | (self.labels != "rare")
        own = moved(answers, ROUNDING, others, generator)
        own[hit] = generator.choice(others, int(hit.sum()))
        return own

    def read(self, answers: np.ndarray) -> np.ndarray:
        """As the metric reads them: scores as probabilities, or as labels."""
        if self.metric == "f1":
            return (answers > 0).astype(np.int64)
        return 1 / (1 + np.exp(-answers)) if self.metric in ("log_loss", "roc_auc") else answers


CASES = (
    *(Case(metric, "normal", share) for metric in ("mae", "rmse", "r2", "spearman") for share in (0.05, 0.01)),
    *(Case(metric, "lognormal", 0.03) for metric in ("mae", "rmse", "r2")),
    *(Case(metric, "even", 0.05) for metric in ("log_loss", "roc_auc", "f1")),
    *(Case(metric, "rare", 0.1) for metric in ("log_loss", "roc_auc", "f1")),
)


def moved(answers: np.ndarray, by: float, others: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Each answer a little off."""
    return np.asarray(answers + by * others.std() * generator.standard_normal(len(answers)))


def cell(case: Case, samples: int, trials: int, *, alone: bool = False) -> dict[str, float]:
    """Shares of the trials in which each artifact passes, and in which the check of the one that rounds is NOT_RUN.

    Args:
        alone: Look at the one that ruins answers, and at no other: `passes` is all that is known then.
    """
    generator = np.random.default_rng([samples, int(1e4 * case.share), *case.metric.encode(), *case.labels.encode()])
    truth, others = case.draw(POPULATION, generator)
    limit = loses(case, truth, case.ruined(truth, others, others, generator), others) / OVER
    gate = Gate(metric=case.metric, limit=limit, direction="at_most", confidence=0.95, options={"drop": "max_drop"})
    counts = dict.fromkeys(("passes", "bootstrap_passes", "rounded_passes", "eight_bits_pass", "not_run"), 0)
    for trial in range(trials):
        truth, answers = case.draw(samples, generator)
        ruined = case.ruined(truth, answers, others, generator)
        rounding, small = (moved(answers, by, others, generator) for by in (ROUNDING, EIGHT_BITS))
        counts["passes"] += outcome(case, gate, truth, ruined, answers, trial) is Outcome.PASS
        if alone:
            continue
        with (
            patch.object(task_intervals, "_parts", lambda *_: []),
            patch.object(task_intervals, "means_interval", by_bootstrap),
        ):
            counts["bootstrap_passes"] += outcome(case, gate, truth, ruined, answers, trial) is Outcome.PASS
        rounded = outcome(case, gate, truth, rounding, answers, trial)
        counts["rounded_passes"] += rounded is Outcome.PASS
        counts["not_run"] += rounded is Outcome.NOT_RUN
        counts["eight_bits_pass"] += outcome(case, gate, truth, small, answers, trial) is Outcome.PASS
    shares = {key: count / trials for key, count in counts.items()}
    return {"limit": limit} | ({"passes": shares["passes"]} if alone else shares)


def by_bootstrap(metric: Means, **options: Any) -> Interval | None:
    """As intervals of means were until commit 85185c7: the bootstrap's, which sees no tail."""
    return bootstrap(metric.weighted, len(metric.columns), **options)


def loses(case: Case, truth: np.ndarray, own: np.ndarray, base: np.ndarray) -> float:
    """What the gate would measure of all samples that there are."""
    gate = Gate(metric=case.metric, limit=0.0, direction="at_most", options={"drop": "max_drop"})
    result = measure_task(gate, case.read(own), case.read(base), truth, seed=0)
    return (result.baseline - result.candidate) * (1 if HIGHER_IS_BETTER[case.metric] else -1)


def outcome(case: Case, gate: Gate, truth: np.ndarray, own: np.ndarray, base: np.ndarray, seed: int) -> Outcome:
    """Of the gate's check, as a run has it."""
    samples = ComparedSamples(min_samples=8, real=True, labels=truth)
    checks = check_outputs([gate], {"y": case.read(own)}, {"y": case.read(base)}, samples, batch_size=1, seed=seed)
    return next(check.outcome for check in checks if check.gate.metric == case.metric)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows, and save them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=150, help="simulated validations of a cell")
    parser.add_argument("--metric", choices=sorted({case.metric for case in CASES}), help="only this one")
    parser.add_argument("--labels", choices=sorted({case.labels for case in CASES}), help="only these")
    results.add_save_option(parser)
    options = parser.parse_args(arguments)
    with results.recording("ruined-answers", options.save) as record, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's on few samples of a class
        record.settings |= {"trials": options.trials}
        for case in CASES:
            if options.metric not in (None, case.metric) or options.labels not in (None, case.labels):
                continue
            for samples in SAMPLES:
                row: dict[str, Any] = {
                    "metric": case.metric, "labels": case.labels, "ruined": case.share, "samples": samples,
                    **cell(case, samples, options.trials),
                }  # fmt: skip
                record.rows.append(row)
                print(row, flush=True)


if __name__ == "__main__":
    main()
