"""Winner → whether its predict() answers as the original's, and how much faster it is: both loaded by MLflow, each in a
process of its own.

A custom pyfunc is compared within its validation (`measure.whole_predict`), and keeps that figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.baseline import baseline_target
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import CompileStageError, GateError, WorkerError
from compile_stage.core.ports import Worker
from compile_stage.core.records import Candidate, Check, Plan, PredictSpeedup, Target, TargetResult
from compile_stage.core.sample_files import as_given
from compile_stage.measure import speedups, stats
from compile_stage.measure.gates import holds
from compile_stage.measure.one_thread import THREADS_COST, say_held_up
from compile_stage.measure.performance import ratio_text
from compile_stage.measure.served_calls import slower_when_served
from compile_stage.measure.whole_predict import SPEEDUP

PAIRS = 31
_FEWEST_PAIRS = 5  # Student's t is 2.8 there; a model whose predict() takes seconds has no more
_BASELINE_OVER_PREDICT = 1.5  # one process of each was seen, and the baseline's turns alternate with those of others
_MEASURE_AGAIN = "measure again with --remeasure on an idle machine"
_SLOWER_FIX = (
    "measure again with --remeasure on an idle machine; if it is so again, the backend is slower wherever it is not "
    "measured: leave it out of the target's backends"
)
_TENSORS = ("a data frame", "an array", "a dict of arrays")  # the samples themselves; texts may be longer or shorter


@dataclass(frozen=True)
class PredictComparison:
    """The comparison of one target's winner, which is asked where it happens to be loaded for serving.

    Attributes:
        source_worker: Holds the original.
    """

    context: Context
    source_worker: Worker
    plan: Plan

    def known(self, target: TargetResult) -> PredictSpeedup | None:
        """What needs no further measurement: that of a custom pyfunc."""
        winner = target.winner
        return of_checks(winner, target.policy.target.batch_sizes[0]) if winner is not None else None

    def take(self, target: TargetResult, load: Callable[[], Worker]) -> PredictSpeedup | None:
        """The figure, from the cache or measured; None where the policy gives it no time.

        Args:
            load: Gives the worker that has the published model loaded (`load_published`, with `stays`); it is asked
                only where something is measured.
        """
        bundle, winner, budget = target.bundle, target.winner, self.plan.policy.budget
        if bundle is None or winner is None or winner.artifact is None or budget.predict_seconds <= 0:
            return None
        source, where = self.plan.source, target.policy.target
        key = {
            "bundle": bundle.digest,
            "source": source.identity,
            "samples": target.samples["validation"].digest,
            "predictions": target.predictions,
            "gates": winner.job.gates,
            "rows": where.batch_sizes[0],
            "threads": where.threads,
            "device": where.device,
            "allow_pickle": self.plan.policy.compliance.allow_pickle,
            "seconds": budget.predict_seconds,
            "made_by": plugins.cache_identity("sources", source.flavor),
            "runtime": plugins.cache_identity("backends", winner.artifact.backend),
            "packages": plugins.package_versions("mlflow", "numpy", "pandas"),
            "hardware": self.context.hardware,
        }
        try:
            made = self.context.cached(
                "predict-speedup/6",
                where.name,
                key,
                lambda _: self._measured(target, load),
                anew=self.context.remeasure,
            )
        except WorkerError as error:  # no result of the model's: not kept
            return PredictSpeedup(reason=error.problem)
        taken: PredictSpeedup = revive(PredictSpeedup, made.value)
        return taken

    def _measured(self, target: TargetResult, load: Callable[[], Worker]) -> PredictSpeedup:
        compliance, source = self.plan.policy.compliance, self.plan.source
        where, samples = baseline_target(target.policy.target), target.samples["validation"]
        samples = as_given(samples) or samples  # what people send: both round it as they do
        winner = target.winner
        assert winner is not None
        assert winner.artifact is not None
        try:
            how: dict[str, Any] = self.source_worker.call(
                "describe_predict",
                source=source,
                compliance=compliance,
                signature=winner.artifact.signature,
                predictions=target.predictions,
            )
            opening = partial(
                self.source_worker.call,
                "open_predict", source=source, compliance=compliance, target=where, samples=samples, how=how,
            )  # fmt: skip
            try:
                original, served = self._side_by_side(opening, load)
                rows = where.batch_sizes[0]
                compiled = served.call("prepare_published", samples=samples, batch_size=rows, how=how)
                self._demand_alike(target, winner, original["answers"], compiled["answers"])
                call_s = original["seconds"] + compiled["seconds"]
                pairs = self._take_turns(served, call_s)
                slowed_s = self._slowed_by_threads(where, pairs)
                if slowed_s is not None:
                    pairs = self._take_turns(served, call_s, one_thread=True)
                served_s = None if how.get("each") else self._served_alone(target, served)
            except Exception:
                # What the worker that is gone says to a further call must not take the place of what ended it. After
                # Ctrl-C it is gone always, and its word for that would be taken for a failure of the model's.
                with suppress(WorkerError):
                    self.source_worker.call("close_predict")
                raise
            self.source_worker.call("close_predict")
        except (WorkerError, GateError):
            raise
        except CompileStageError as error:
            return PredictSpeedup(reason=error.problem)
        rows = 1 if how.get("each") else where.batch_sizes[0]
        found = judge(pairs, rows, str(how["words"]), self.plan.policy.data.seed)
        return replace(found, slowed_s=slowed_s, served_s=served_s)

    def _demand_alike(
        self,
        target: TargetResult,
        winner: Candidate,
        original: Mapping[str, Mapping[str, str]],
        compiled: Mapping[str, Mapping[str, str]],
    ) -> None:
        """Raise GateError where the published predict() answers otherwise than the original's. Where a waiver let
        answers through, nobody knows how far off they may be."""
        if winner.verdict is not None and any(check.waived for check in winner.verdict.checks):
            return
        from compile_stage.measure.predict import open_outputs
        from compile_stage.measure.predict_answers import refuse_answers

        outputs = open_outputs(target.original.outputs) if target.original is not None else None
        if (reason := refuse_answers(original, compiled, winner.job.gates, outputs)) is not None:
            raise GateError(
                f"{winner.job.id} holds every gate, and predict() of its published model does not answer as the "
                f"original's: {reason}",
                fix="call both with the same rows; if the original is right, report it as a bug",
                where=self.plan.source.uri,
            )

    def _side_by_side(
        self, opening: Callable[[], dict[str, Any]], load: Callable[[], Worker]
    ) -> tuple[dict[str, Any], Worker]:
        """Both are loaded at the same time: each reads Python packages for more than a second, on one core."""
        with ThreadPoolExecutor(1, thread_name_prefix="load") as pool:
            loading = pool.submit(copy_context().run, load)
            try:
                return opening(), loading.result()
            except BaseException as error:
                if not isinstance(error, Exception):
                    self.context.engine.close()  # Ctrl-C: ends the worker that the thread waits for
                raise

    def _served_alone(self, target: TargetResult, served: Worker) -> float | None:
        """Seconds of the artifact's own call in the process that has the published model loaded; None of a language
        model, whose call is many."""
        winner, rows = target.winner, target.policy.target.batch_sizes[0]
        measured = winner.measurement if winner is not None else None
        timing = measured.timing(rows) if measured is not None else None
        if timing is None or timing.new_tokens:
            return None
        with self.context.alone():
            taken = served.call("time_published_runs", samples=target.samples["validation"], batch_size=rows)
        return stats.median([float(seconds) for seconds in taken])

    def _slowed_by_threads(self, where: Target, pairs: list[tuple[float, float]]) -> float | None:
        """Seconds of a call of the original with the target's threads, where these only hold it up; else None."""
        if where.threads == 1 or where.device != "cpu":
            return None
        with self.context.alone():
            alone_s = [self.source_worker.call("time_predict", one_thread=True) for _ in range(_FEWEST_PAIRS)]
        took_s = stats.median([pair[0] for pair in pairs])
        return took_s if took_s > THREADS_COST * stats.median(alone_s) else None

    def _take_turns(self, served: Worker, call_s: float, *, one_thread: bool = False) -> list[tuple[float, float]]:
        """Seconds of both, pair by pair; who begins alternates."""
        time_original = partial(self.source_worker.call, "time_predict", one_thread=one_thread)
        pairs: list[tuple[float, float]] = []
        with self.context.alone():
            ends = time.monotonic() + self.plan.policy.budget.predict_seconds
            while len(pairs) < PAIRS and (len(pairs) < _FEWEST_PAIRS or time.monotonic() + call_s < ends):
                if len(pairs) % 2 == 0:
                    original_s = time_original()
                    compiled_s = served.call("time_published")
                else:
                    compiled_s = served.call("time_published")
                    original_s = time_original()
                pairs.append((float(original_s), float(compiled_s)))
        return pairs


def judge(pairs: list[tuple[float, float]], rows: int, given: str, seed: int) -> PredictSpeedup:
    """The figure of calls (original, compiled) in seconds. One process of each was seen, so its interval has room for
    what processes differ by (`measure.speedups.ratio_interval`)."""
    original, compiled = ([[pair[side]] for pair in pairs] for side in (0, 1))
    ratio = speedups.ratio_interval(original, compiled, seed=seed, processes=[0] * len(pairs))
    return PredictSpeedup(
        speedup=ratio.value,
        interval=(ratio.low, ratio.high),
        stable=speedups.is_within(ratio, speedups.UNSTABLE),
        rows=rows,
        pairs=len(pairs),
        original_s=stats.median([pair[0] for pair in pairs]),
        compiled_s=stats.median([pair[1] for pair in pairs]),
        given=given,
    )


def contradicted(target: TargetResult, found: PredictSpeedup | None) -> PredictSpeedup | None:
    """The comparison with what shows that the baseline was slowed down, if anything does; it may be that nobody timed
    predict()."""
    known = found or PredictSpeedup(reason="budget.predict_seconds is 0")
    said = contradiction(target, known)
    return replace(known, contradiction=said) if said else found


def contradiction(target: TargetResult, found: PredictSpeedup) -> str:
    """What the reports say where something held the baseline up, so that each speedup over it is too large: with one
    thread it was far faster, or it took longer than the original's whole predict() of as many rows, of which it is a
    part. Empty where neither is so.

    scikit-learn's predict() computes the label or the probabilities, and the baseline both: one of several outputs may
    be all that predict() computes. The texts that predict() is given may be shorter than the samples: of these the
    threads alone tell.
    """
    winner, threads = target.winner, target.policy.target.threads
    if waiting := say_held_up(target.baseline, threads):
        return f"{waiting}; {_MEASURE_AGAIN}"
    base = target.baseline.timing(found.rows) if target.baseline is not None else None
    if base is None or not base.latency_s or found.original_s is None:
        return ""
    predict_ms = f"{found.original_s * 1e3:.3g} ms"
    slowed_ms = "" if found.slowed_s is None else f"{found.slowed_s * 1e3:.3g} ms"
    if base.new_tokens or found.given not in _TENSORS:
        if not slowed_ms:
            return ""
        return (
            f"the original's predict() took {slowed_ms} with {threads} threads, and {predict_ms} with one: its threads "
            f"waited for cores that other processes held, and the baseline has as many, so that the speedups over it "
            f"are too large; {_MEASURE_AGAIN}"
        )
    assert winner is not None
    outputs = len(winner.artifact.signature.outputs) if winner.artifact is not None else 1
    baseline_s = stats.median(base.latency_s)
    if baseline_s <= _BASELINE_OVER_PREDICT * max(outputs, 1) * found.original_s:
        return ""
    how = f" with one thread ({slowed_ms} with {threads} threads)" if slowed_ms else ""
    return (
        f"the baseline took {baseline_s * 1e3:.3g} ms, and the original's predict(), of which it is a part, "
        f"{predict_ms}{how}: something slowed the baseline down, so that the speedups over it are too large; "
        f"{_MEASURE_AGAIN}"
    )


def demand_speedup(target: TargetResult) -> None:
    """Where the baseline's latency is contradicted, or the artifact's by what it takes in the process that serves it,
    `min_speedup` is held to the speedup through predict() instead, which was measured with both in turns. So is the
    artifact's own call there to limits on its latency.

    Raises:
        GateError: That does not show the limit either.
    """
    winner, found = target.winner, target.predict_speedup
    if winner is None or winner.verdict is None or found is None:
        return
    slower = slower_when_served(winner.measurement, found)
    if not slower and not found.contradiction:
        return
    gates = [check for check in winner.verdict.checks if check.waived is None]
    if slower:
        _demand_latency(winner, gates, slower, found)
    check = next((c for c in gates if c.gate.metric == "speedup"), None)
    if check is None or (found.speedup is not None and holds(check.gate, found.speedup, found.interval)):
        return
    through = f"its predict() was not timed ({found.reason})"
    if found.interval is not None:
        low, high = map(ratio_text, found.interval)
        through = (
            f"through predict() it is {low} to {high} times as fast as the original (95 % interval), which does not "
            "show that it is"
        )
    whose, why, fix = "a baseline", found.contradiction.removesuffix(f"; {_MEASURE_AGAIN}"), _MEASURE_AGAIN
    if not why:
        whose, why, fix = "a latency of its own", slower, _SLOWER_FIX
    raise GateError(
        f"{winner.job.id} reaches min_speedup {check.gate.limit:g} by {whose} that can't be relied on: {why}; and "
        f"{through}",
        fix=fix,
    )


def _demand_latency(winner: Candidate, checks: list[Check], slower: str, found: PredictSpeedup) -> None:
    """A percentile above the median that is held to a limit is no less than the median.

    Raises:
        GateError: Half of the calls in the process that serves it miss a limit on the latency at that batch size.
    """
    for check in checks:
        gate, served_s = check.gate, found.served_s
        is_of_these = gate.metric == "p95_latency_ms" and check.batch_size == found.rows
        if is_of_these and served_s is not None and served_s * 1e3 > gate.limit:
            raise GateError(
                f"{winner.job.id} holds {gate.metric} {gate.limit:g} by a latency that can't be relied on: {slower}",
                fix=_SLOWER_FIX,
            )


def of_checks(winner: Candidate, rows: int) -> PredictSpeedup | None:
    """The figure that a custom pyfunc's validation has; None of any other model."""
    check = next((check for check in winner.checks if check.gate.metric == SPEEDUP), None)
    if check is None or check.measured is None:
        return None
    low, high = check.interval or (0.0, float("inf"))
    ratio = stats.Interval(value=check.measured, low=low, high=high, confidence=0.95)
    return PredictSpeedup(
        speedup=check.measured,
        interval=check.interval,
        stable=check.interval is not None and speedups.is_within(ratio, speedups.UNSTABLE),
        rows=rows,
        pairs=check.samples,
        given="what its own code takes",
    )
