"""A run in the words of its readers: one row a candidate, one sentence a verdict.

The terminal, the HTML page, the Markdown and the JUnit file all draw from here, so that they can't disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compile_stage.core.quantities import in_order, told_apart
from compile_stage.core.records import (
    Candidate,
    Check,
    Measurement,
    Outcome,
    ResultState,
    RunResult,
    TargetResult,
    Timing,
    is_ratio_known,
    record,
    surely_faster,
)
from compile_stage.report import numbers

PERFORMANCE_METRICS = (
    "speedup", "p95_latency_ms", "ttft_p95_ms", "tpot_p95_ms", "tokens_per_s", "throughput_at_p99", "cost_per_million",
    "size_mb", "memory_mb", "max_slowdown",
)  # fmt: skip

# The error that stands for a candidate in a table's one cell: what a user of the model feels comes first.
_HEADLINE_METRICS = (
    "token_kl", "perplexity", "accuracy", "f1", "roc_auc", "log_loss", "mae", "rmse", "r2",
    "top1_agreement", "topk_agreement", "agreement", "cosine", "snr_db", "psnr_db", "max_rel", "allclose", "max_abs",
)  # fmt: skip

_STATE_ORDER: tuple[ResultState, ...] = ("won", "lost", "failed", "compiled_not_validated", "refused")

STATE_WORDS: dict[ResultState, str] = {
    "won": "won",
    "lost": "lost",
    "failed": "failed",
    "compiled_not_validated": "not validated",
    "refused": "refused",
}


@record
class Row:
    """One candidate of one target.

    Attributes:
        scheme: Name of the scheme, or the precision of a job that was refused before it had one.
        timing: At the batch size at which selection looked at the winner; None when nothing was measured.
        error: The check that stands for its error; None when nothing was checked.
        candidate: None for a job that the plan refused.
    """

    job_id: str
    backend: str
    precision: str
    scheme: str
    state: ResultState
    reason: str
    timing: Timing | None = None
    error: Check | None = None
    size_bytes: int | None = None
    candidate: Candidate | None = None

    @property
    def label(self) -> str:
        """As sentences and charts name it within a target: `openvino int8-u8`."""
        return f"{self.backend} {self.scheme}"


def rows(result: RunResult, target: TargetResult) -> tuple[Row, ...]:
    """All candidates of a target, those that the plan refused among them: the winner first, then by state and speed."""
    listed = [_row(target, candidate) for candidate in target.candidates]
    known = {row.job_id for row in listed}
    listed += [
        Row(
            job_id=refusal.job_id,
            backend=refusal.backend,
            precision=refusal.precision,
            scheme=refusal.precision,
            state="refused",
            reason=refusal.reason,
        )
        for refusal in result.refused
        if refusal.target == target.policy.target.name and refusal.job_id not in known
    ]
    return tuple(sorted(listed, key=lambda row: (_STATE_ORDER.index(row.state), -_speedup(row), row.job_id)))


def headline(result: RunResult) -> str:
    """The run in one sentence. Where a target has no winner, it names the gate that decided."""
    if result.problem:
        gates = [gate for target in result.targets if target.policy.target.required and (gate := deciding_gate(target))]
        return "; ".join([result.problem, *gates])
    parts = []
    for target in result.targets:
        name, winner = target.policy.target.name, target.winner
        if winner is None:
            gate = deciding_gate(target)
            parts.append(f"{name}: no winner" + (f" ({gate})" if gate else ""))
            continue
        speed = winner_speed(result, target)
        through = f", {_through_predict(target)}" if speed and _is_predict_measured(target) else ""
        if contradicted := target.contradiction:
            through = f": {contradicted}; {_through_predict(target)}"
        speed = f", {speed}" if speed else ""
        parts.append(f"{name}: {winner.job.label} selected{_under_waivers(winner)}{speed}{through}")
    return "; ".join(parts) or "no target was run"


def _under_waivers(winner: Candidate) -> str:
    """` under a waiver of accuracy`: who reads one line has to learn that a gate was missed."""
    gates = [waiver.gate for waiver in winner.verdict.waivers] if winner.verdict is not None else []
    return f" {numbers.under_waivers(gates)}" if gates else ""


def winner_speed(result: RunResult, target: TargetResult) -> str:
    """As `how_fast`, of the winner; `speedup in the runtime not known` where something slowed the baseline down."""
    winner = target.winner
    if target.contradiction:
        return "speedup in the runtime not known"
    timing = main_timing(target, winner.measurement) if winner is not None else None
    return how_fast(timing, main_timing(target, baseline_of(result, target)))


def how_fast(timing: Timing | None, baseline: Timing | None) -> str:
    """`6.52× the baseline's speed (median 0.31 ms, baseline 2.02 ms)`; of an unstable measurement only the range; empty
    without a speedup."""
    if timing is None or timing.speedup is None:
        return ""
    medians = ""
    if (own := median_s(timing)) and (base := median_s(baseline)):
        medians = f" (median {numbers.duration(own)}, baseline {numbers.duration(base)}"
        medians += ")" if _agrees(timing, base / own) else f": {numbers.ratio(base / own)} by these medians)"
    if not timing.stable:
        known = is_ratio_known(timing.speedup_interval) or surely_faster(timing.speedup_interval)
        span = f"{numbers.ratio_span(timing.speedup_interval)} times" if known else "not known how many times"
        return f"unstable: {span} the baseline's speed{medians}"
    return f"{numbers.ratio(timing.speedup)} the baseline's speed{medians}"


def speedup_text(timing: Timing | None, *, interval: bool = True) -> str:
    """`6.52× (6.32 to 6.65)`; `0.40 to 0.42×, unstable` of an unstable measurement, which no single figure stands for,
    and `unstable` alone where even the interval says nothing; a dash where there is none."""
    if timing is None or timing.speedup is None:
        return numbers.DASH
    if not timing.stable:
        return unstable_text(timing.speedup_interval)
    span = f" ({numbers.span(timing.speedup_interval)})" if interval and timing.speedup_interval is not None else ""
    return numbers.ratio(timing.speedup) + span


def row_speedup_text(target: TargetResult, row: Row, *, interval: bool = True) -> str:
    """As `speedup_text`, of a table's row; `not known` where something slowed the baseline down."""
    if target.contradiction and row.timing is not None:
        return "not known"
    return speedup_text(row.timing, interval=interval)


def unstable_text(interval: tuple[float, float] | None) -> str:
    """`0.40 to 0.42×, unstable`, `at least 12.5×, unstable`, or `unstable` alone: as much as the interval tells."""
    known = is_ratio_known(interval) or surely_faster(interval)
    return f"{numbers.ratio_span(interval)}×, unstable" if known else "unstable"


def predict_text(target: TargetResult) -> str:
    """`6.52× in the runtime, 3.10× through predict() (2.90 to 3.30): a data frame of 1 row takes 745 µs, and took 2.31
    ms`; why it was not measured; empty where the run did not come to it."""
    from compile_stage.measure.served_calls import slower_when_served

    found, winner = target.predict_speedup, target.winner
    if found is None or winner is None:
        return ""
    timing = main_timing(target, winner.measurement)
    runtime = "" if timing is None else f"{_in_a_sentence(speedup_text(timing, interval=False))} in the runtime, "
    if target.contradiction:
        runtime = "speedup in the runtime not known, "
    if not _is_predict_measured(target):
        return f"{runtime}through predict() not measured: {found.reason}"
    span = f" ({numbers.span(found.interval)})" if found.interval is not None and found.stable else ""
    rows = f"{found.given}, {numbers.count(found.rows, 'row')}"
    medians = f"{numbers.duration(found.original_s)} before, {numbers.duration(found.compiled_s)} after, "
    words = f"{medians if found.original_s is not None else ''}given {rows}"
    if found.slowed_s is not None:
        threads = target.policy.target.threads
        words += f", the original with one thread (with {threads} it took {numbers.duration(found.slowed_s)})"
    slower = "; predict() is slower than the original's" if found.interval and found.interval[1] < 1 else ""
    if contradicted := target.contradiction:
        slower += f"; {contradicted}"
    if said := slower_when_served(winner.measurement, found):
        slower += f"; {said}"
    return f"{runtime}{_through_predict(target)}{span}: {words}{slower}"


def _is_predict_measured(target: TargetResult) -> bool:
    return target.predict_speedup is not None and target.predict_speedup.speedup is not None


def _through_predict(target: TargetResult) -> str:
    """`3.10× through predict()`; of an unstable measurement the range."""
    found = target.predict_speedup
    if found is None:
        return ""
    if found.stable or found.interval is None:
        return f"{numbers.ratio(found.speedup)} through predict()"
    return f"{_in_a_sentence(unstable_text(found.interval))} through predict()"


def _in_a_sentence(speedup: str) -> str:
    """`0.40 to 0.42× (unstable)`: with a comma, "unstable" would belong to the words that follow."""
    return speedup.replace("×, unstable", "× (unstable)")


def promotion(result: RunResult, target: TargetResult) -> tuple[str, str] | None:
    """What became of the alias that the policy moves: `moved`, `failed` (a gate kept it where it is) or `waits` (for an
    approval, or at a newer version), and a sentence. None where nothing was to be promoted."""
    receipt = target.receipt
    if receipt is None or (target.policy.alias is None and not receipt.promoted_to):
        return None
    if receipt.promoted_to:
        before = f" (before: version {receipt.previous})" if receipt.previous else ""
        return "moved", f"{receipt.name}@{receipt.promoted_to} points to {receipt.uri}{before}"
    if not receipt.note:
        return None
    # A run says why a required target was not promoted; a note that it does not repeat stopped nothing.
    return ("failed" if receipt.note in result.problem else "waits"), receipt.note


def baseline_text(result: RunResult, target: TargetResult) -> str:
    """What every speedup of a target is over: `baseline pytorch: 2.02 ms at batch 1`, or `123 ms at batch 1, in only 4
    calls`; empty where it was not measured."""
    from compile_stage.measure import stats

    timing = main_timing(target, baseline_of(result, target))
    if timing is None or not timing.latency_s:
        return ""
    name, few = f"baseline {result.baseline_framework}".rstrip(), ""
    if median_s(timing) is None:  # the speedups are over it all the same
        few = f", in only {numbers.count(len(timing.latency_s), 'call')}"
    return f"{name}: {numbers.duration(stats.median(timing.latency_s))} at batch {timing.batch_size}{few}"


def _agrees(timing: Timing, quotient: float) -> bool:
    """Whether the speedup is what a reader gets who divides the medians beside it."""
    return timing.speedup is not None and abs(quotient / timing.speedup - 1) < 0.05


def deciding_gate(target: TargetResult) -> str:
    """Of a target without a winner, the candidate that failed the fewest checks, of these the one nearest to the limit
    that they miss, and its gate:
    `openvino int8-sym: cosine 0.941 < 0.99 (output logits, batch 1; policy.yaml:21)`; empty where no candidate was
    checked. Where some are only too uncertain, the sentence on these; where the original is the cause, that and what to
    do."""
    from compile_stage.measure.original_cause import cause_of

    if target.selection.winner is not None:
        return ""
    if uncertain := too_uncertain(target):
        return uncertain
    failed = [
        (candidate, missed)
        for candidate in target.candidates
        if candidate.failure is None
        if (missed := _missed_by(candidate))
    ]
    if not failed:
        return ""
    fewest = min(len(missed) for _, missed in failed)
    closest = [(candidate, _first_of(missed)) for candidate, missed in failed if len(missed) == fewest]
    candidate, check = closest[0]
    # Of those that missed the same gate, the one that is nearest to its limit.
    same = [entry for entry in closest if entry[1].gate == check.gate and entry[1].measured is not None]
    if check.measured is not None:
        candidate, check = max(same, key=lambda entry: _margin(entry[1]))
    if check.gate.metric == "samples":  # of too few samples no other gate can be judged, whatever they measure
        return f"{candidate.job.label}: {check.reason}"
    return f"{candidate.job.label}: {missed_text(check)}{cause_of(check)}"


def _first_of(missed: Sequence[Check]) -> Check:
    """The check to name of those that keep a candidate from passing."""
    return min(missed, key=lambda c: (outcome_word(c) != "failed", c.gate.metric != "samples", _rank(c)))


def check_name(check: Check) -> str:
    """What was measured: `cosine`, `accuracy drop`, `robustness (noise)` for the samples it was measured on."""
    name = f"{check.gate.metric}{' drop' if 'drop' in check.gate.options else ''}"
    samples = check.gate.options.get("samples")
    return f"{name} ({samples})" if isinstance(samples, str) else name


def missed_text(check: Check) -> str:
    """A check that did not pass, the figure first: `cosine 0.941 < 0.99 (output logits, batch 1; policy.yaml:21)`.
    Where the mean holds and the worse end of the interval does not, that end is named."""
    places = [f"output {check.output}" if check.output else "", f"batch {check.batch_size}" if check.batch_size else ""]
    where = "; ".join(filter(None, [", ".join(filter(None, places)), check.gate.origin]))
    return f"{check_name(check)} {_against_limit(check)}{f' ({where})' if where else ''}"


def _against_limit(check: Check) -> str:
    gate, measured = check.gate, check.measured
    if measured is None or outcome_word(check) != "failed":
        return f"not judged: {check.reason}; the limit is {limit_text(check)}"
    beyond, at_least = ("<", True) if gate.direction == "at_least" else (">", False)
    shown, limit = (_labelled(text, gate.unit) for text in told_apart(measured, gate.limit))
    if (measured < gate.limit) if at_least else (measured > gate.limit):
        return f"{shown} {beyond} {limit}"
    if check.interval is not None:
        end = _labelled(told_apart(check.interval[0 if at_least else 1], gate.limit)[0], gate.unit)
        return f"{measured_text(check)}, its interval's end {end} {beyond} {limit}"
    return f"{measured_text(check)}, {limit_text(check)} required"


def too_uncertain(target: TargetResult) -> str:
    """One sentence on all candidates that failed for nothing but the width of their intervals, with what to do; empty
    without one."""
    unsure = [candidate for candidate in target.candidates if _is_too_uncertain(target, candidate)]
    served = [candidate for candidate in unsure if _is_served_too_uncertainly(candidate)]
    timed = [candidate for candidate in unsure if candidate not in served]
    sentences = (_too_uncertain_in_speed(timed) if timed else "", _too_uncertain_served(served) if served else "")
    return "; ".join(filter(None, sentences))


def _too_uncertain_in_speed(unsure: Sequence[Candidate]) -> str:
    from compile_stage.measure.request import MOST_TRIES

    timings = [timing for c in unsure if c.measurement is not None for timing in c.measurement.timings]
    rounds, starts = [timing.rounds for timing in timings], [len(set(timing.processes)) or 1 for timing in timings]
    many, are = numbers.count(len(unsure), "candidate"), "is" if len(unsure) == 1 else "are"
    shown = f"{_least_to_most(rounds, 'round')} in {_least_to_most(starts, 'process')} of each"
    tries = max((c.measurement.tries for c in unsure if c.measurement is not None), default=1)
    again, shown = "run again", shown if tries == 1 else f"{shown}, in the last of {tries} measurements"
    if tries >= MOST_TRIES:  # what is run again without it takes these figures from the cache
        again = "run again with --remeasure"
    return (
        f"{many} held every tolerance and {are} too uncertain in speed to pass, with {shown}: {again} when the "
        "machine is quieter, or with a larger budget.measure_seconds"
    )


def _too_uncertain_served(unsure: Sequence[Candidate]) -> str:
    """What was served is cached, also where it is uncertain: running again alone would say the same."""
    many, are = numbers.count(len(unsure), "candidate"), "is" if len(unsure) == 1 else "are"
    return (
        f"{many} held every tolerance and {are} too uncertain under load to pass: run again with --remeasure when the "
        "machine is quieter, or with a larger serving.seconds"
    )


def _is_served_too_uncertainly(candidate: Candidate) -> bool:
    """Of one that is too uncertain: whether it is only under load. Its speed then passed; else it was not served."""
    from compile_stage.measure.served_load import SERVED_GATES

    return all(check.gate.metric in SERVED_GATES for check in _missed_by(candidate))


def _least_to_most(counts: Sequence[int], noun: str) -> str:
    """`1 to 2 processes`: who is far behind is not started again, and has fewer."""
    least, most = min(counts), max(counts)
    return numbers.count(most, noun) if least == most else f"{least} to {numbers.count(most, noun)}"


def grouped_reasons(target: TargetResult, listed: Sequence[Row]) -> tuple[tuple[str, str], ...]:
    """`openvino int8-u8, openvino fp32` → why, in the order of the rows: what is said of several is said once. What
    they are to do about uncertainty is left to `too_uncertain`."""
    groups: dict[str, list[str]] = {}
    for row in listed:
        unsure = row.candidate is not None and _is_too_uncertain(target, row.candidate)
        reason = _uncertain_at(row.candidate) if unsure and row.candidate is not None else row.reason
        groups.setdefault(reason, []).append(row.label)
    return tuple((", ".join(names), reason) for reason, names in groups.items())


def _uncertain_at(candidate: Candidate) -> str:
    """The batch sizes are named: the row shows one of them, whose own interval may be clear."""
    if _is_served_too_uncertainly(candidate):
        return "what it serves under load is too uncertain to pass"
    sizes = sorted({check.batch_size for check in _missed_by(candidate) if check.batch_size is not None})
    where = f" at batch {'size' if len(sizes) == 1 else 'sizes'} {', '.join(map(str, sizes))}" if sizes else ""
    return f"its speed{where} is too uncertain to pass"


def _is_too_uncertain(target: TargetResult, candidate: Candidate) -> bool:
    from compile_stage.measure.performance import is_too_uncertain

    missed = _missed_by(candidate)
    failed = state_of(target, candidate) == "failed" and candidate.failure is None
    return failed and bool(missed) and all(is_too_uncertain(check) for check in missed)


def no_winner(result: RunResult, target: TargetResult) -> str:
    """Why a target has no winner, with the jobs that the plan refused counted too."""
    tried = {candidate.job.id for candidate in target.candidates}
    refused = sum(r.target == target.policy.target.name and r.job_id not in tried for r in result.refused)
    reason = target.selection.reason
    if not tried or not refused:
        return reason
    return f"{reason}; the plan refused {numbers.count(refused, 'more job')}"


def main_timing(target: TargetResult, measurement: Measurement | None) -> Timing | None:
    """The timing that a target's tables show: at `shown_batch_size`, or the first that there is."""
    return timing_at(measurement, shown_batch_size(target))


def shown_batch_size(target: TargetResult) -> int:
    """The batch size at which selection looked at the winner, and the first of the target where there is none: one for
    all candidates, so that their figures can be compared."""
    from compile_stage.measure.speedups import deciding_timing

    winner = target.winner
    timing = deciding_timing(winner.measurement, target.policy) if winner is not None else None
    return timing.batch_size if timing is not None else target.policy.target.batch_sizes[0]


def timing_at(measurement: Measurement | None, batch_size: int) -> Timing | None:
    """The timing at that batch size, or the first that there is."""
    if measurement is None or not measurement.timings:
        return None
    return measurement.timing(batch_size) or measurement.timings[0]


def median_s(timing: Timing | None) -> float | None:
    """The median in seconds; None without a timing, or with too few calls to carry it."""
    from compile_stage.measure.quantiles import percentile

    return None if timing is None else percentile(timing, 0.5)


def baseline_of(result: RunResult, target: TargetResult) -> Measurement | None:
    """The baseline's measurement for a target."""
    return result.baseline.get(target.policy.target.name)


def measurement_notes(result: RunResult, target: TargetResult) -> tuple[str, ...]:
    """What a reader should know of all measurements of a target, such as that the machine was busy, or that an unstable
    one came from the cache."""
    taken = baseline_of(result, target)
    return taken.notes if taken is not None else ()


def run_notes(result: RunResult) -> tuple[str, ...]:
    """The notes of a run, without those that stand beside the measurements of a target."""
    told = {note for target in result.targets for note in measurement_notes(result, target)}
    return tuple(note for note in result.notes if note not in told)


def state_of(target: TargetResult, candidate: Candidate) -> ResultState:
    """What selection made of a candidate, or its own state where selection never saw it."""
    return target.selection.states.get(candidate.job.id, candidate.result_state)


def reason_of(target: TargetResult, candidate: Candidate) -> str:
    """One sentence on why a candidate is in its state."""
    if reason := target.selection.reasons.get(candidate.job.id):
        return reason
    return target.selection.reason if candidate.job.id == target.selection.winner else candidate.reason


def _missed_by(candidate: Candidate) -> list[Check]:
    """The checks that keep a candidate from passing."""
    return [check for check in candidate.checks if outcome_word(check) in ("failed", "not run")]


def measured_text(check: Check) -> str:
    """`0.9991`, `14.2 dB`, `not measured`; with as many digits as tell it from the limit, which it would else seem to
    hold, or to miss."""
    if check.measured is None:
        return "not measured"
    return _labelled(_beside_each_other(check.measured, check.gate.limit)[0], check.gate.unit)


def limit_text(check: Check) -> str:
    """`at most 0.01`, `at least 20 dB`."""
    limit = check.gate.limit
    shown = limit if check.measured is None else check.measured
    text = _labelled(_beside_each_other(shown, limit)[1], check.gate.unit)
    return f"{check.gate.direction.replace('_', ' ')} {text}"


def error_text(check: Check | None) -> str:
    """`cosine 0.9991`; a dash for None. A task metric is a drop against the baseline and says so."""
    if check is None:
        return numbers.DASH
    return f"{check_name(check)} {measured_text(check)}"


def outcome_counts(checks: Iterable[Check]) -> str:
    """`12 passed`, `11 passed, 1 failed`, `3 passed, 1 not run, 1 waived`."""
    tally = {"passed": 0, "failed": 0, "not run": 0, "waived": 0}
    for check in checks:
        tally[outcome_word(check)] += 1
    return ", ".join(f"{number} {word}" for word, number in tally.items() if number) or "no checks"


def outcome_word(check: Check) -> str:
    """`passed`, `failed`, `not run`, or `waived` for a failure that a waiver lets through."""
    if check.outcome is Outcome.PASS:
        return "passed"
    if check.outcome is Outcome.NOT_RUN:
        return "not run"
    return "waived" if check.waived is not None else "failed"


def is_performance(check: Check) -> bool:
    """True for gates on speed and size, false for gates on numerical error."""
    return check.gate.metric in PERFORMANCE_METRICS


def _row(target: TargetResult, candidate: Candidate) -> Row:
    return Row(
        job_id=candidate.job.id,
        backend=candidate.job.backend,
        precision=candidate.job.scheme.precision,
        scheme=candidate.job.scheme.name,
        state=state_of(target, candidate),
        reason=reason_of(target, candidate),
        timing=main_timing(target, candidate.measurement),
        error=_headline_check(candidate.checks),
        size_bytes=candidate.artifact.size_bytes if candidate.artifact is not None else None,
        candidate=candidate,
    )


def _headline_check(checks: Sequence[Check]) -> Check | None:
    """A check that did not pass, if there is one; else the most telling metric's, at its tightest."""
    errors = [check for check in checks if not is_performance(check)]
    if not errors:
        return None
    broken = [check for check in errors if outcome_word(check) != "passed"]
    if broken:
        # A measured failure says more than a check that could not run.
        return min(broken, key=lambda check: (check.measured is None, _rank(check)))
    return min(errors, key=lambda check: (_rank(check), _margin(check)))


def _rank(check: Check) -> int:
    metric = check.gate.metric.removeprefix("mean_")
    return _HEADLINE_METRICS.index(metric) if metric in _HEADLINE_METRICS else len(_HEADLINE_METRICS)


def _margin(check: Check) -> float:
    if check.measured is None:
        return float("-inf")
    gap = check.measured - check.gate.limit
    return gap if check.gate.direction == "at_least" else -gap


def _speedup(row: Row) -> float:
    """What rows are sorted by: where the speedups over the baseline are not known, calls a second."""
    if row.timing is not None and row.timing.speedup is not None:
        return row.timing.speedup
    return 1 / median if (median := median_s(row.timing)) else 0.0


def _beside_each_other(value: float, limit: float) -> tuple[str, str]:
    texts = numbers.quantity(value), numbers.quantity(limit)
    return texts if in_order(texts, value, limit) else told_apart(value, limit)


def _labelled(text: str, unit: str) -> str:
    return f"{text}×" if unit == "ratio" else f"{text} {unit}".rstrip()
