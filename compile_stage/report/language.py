"""Of language models: how fast each writes, how far its distributions are from the original's, and what it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from compile_stage.core.language_models import LANGUAGE_METRICS
from compile_stage.core.records import Candidate, Check, RunResult, TargetResult, Timing, WrittenText, record
from compile_stage.measure.stats import Interval
from compile_stage.measure.token_times import TokenTimes, token_times
from compile_stage.report import numbers, summary


@record
class LanguageRow:
    """One model at one batch size, in words.

    Attributes:
        won: It is the winner.
        first, each: Time to the first token and per output token: the median with its bounds, and the ratio to the
            original's.
        tokens: Tokens a second.
        kl, top1, perplexity: With their intervals; empty for the original, and from the second batch size on.
    """

    label: str
    won: bool
    batch_size: int
    first: str
    each: str
    tokens: str
    memory: str
    kl: str = ""
    top1: str = ""
    perplexity: str = ""


@record
class WrittenBeside:
    """What all models write after one prompt; labels and texts, the original first."""

    prompt: str
    texts: tuple[tuple[str, WrittenText], ...]


HEAD = (
    "model", "batch", "first token", "output token", "tokens/s", "peak memory", "token_kl (nats)",
    "same likeliest token", "perplexity",
)  # fmt: skip


def language_rows(result: RunResult, target: TargetResult) -> tuple[LanguageRow, ...]:
    """Empty where the target's is no language model, or nothing of it was measured or compared."""
    return tuple(_rows(result, target))


def written_texts(result: RunResult, target: TargetResult) -> tuple[WrittenBeside, ...]:
    """By prompt."""
    labels = {"": result.baseline_framework or "original"} | {c.job.id: c.job.label for c in target.candidates}
    prompts = dict.fromkeys(text.prompt for text in target.texts)
    return tuple(
        WrittenBeside(
            prompt=prompt,
            texts=tuple((labels.get(t.job_id, t.job_id), t) for t in target.texts if t.prompt == prompt),
        )
        for prompt in prompts
    )


def _rows(result: RunResult, target: TargetResult) -> Iterator[LanguageRow]:
    compared = [c for c in target.candidates if any(k.gate.metric in LANGUAGE_METRICS for k in c.checks)]
    baseline = summary.baseline_of(result, target)
    if not compared:
        return
    of_original = {timing.batch_size: timing for timing in baseline.timings} if baseline is not None else {}
    for size, own in of_original.items():
        memory = numbers.size(baseline.peak_memory_bytes) if baseline is not None else ""
        yield _row(result.baseline_framework or "original", False, size, token_times(own), memory)
    for candidate in compared:
        measured = candidate.measurement
        timings: list[Timing | None] = [*measured.timings] if measured is not None else []
        for place, timing in enumerate(timings or [None]):
            size = timing.batch_size if timing is not None else target.policy.target.batch_sizes[0]
            times = token_times(timing, of_original.get(size)) if timing is not None else None
            memory = numbers.size(measured.peak_memory_bytes if measured is not None else None)
            row = _row(candidate.job.label, candidate.job.id == target.selection.winner, size, times, memory)
            yield _with_checks(row, candidate) if place == 0 else row


def _row(label: str, won: bool, size: int, times: TokenTimes | None, memory: str) -> LanguageRow:
    first, each, tokens = ("—", "—", "—")
    if times is not None:
        first, each = _seconds(times.first_s, times.first_ratio), _seconds(times.next_s, times.next_ratio)
        tokens = "—" if times.tokens_per_s is None else _bounds(times.tokens_per_s, numbers.quantity)
    return LanguageRow(label=label, won=won, batch_size=size, first=first, each=each, tokens=tokens, memory=memory)


def _with_checks(row: LanguageRow, candidate: Candidate) -> LanguageRow:
    found: dict[str, Check] = {}
    for check in candidate.checks:
        found.setdefault(check.gate.metric, check)
    return replace(
        row,
        kl=_measured(found.get("token_kl")),
        top1=_measured(found.get("token_top1_agreement"), percent=True),
        perplexity=_measured(found.get("perplexity"), percent=True, sign=True),
    )


def _measured(check: Check | None, *, percent: bool = False, sign: bool = False) -> str:
    if check is None or check.measured is None:
        return "—"

    def shown(value: float) -> str:
        if percent:
            return f"{100 * value:{'+' if sign else ''}.3g} %"
        return f"{value:.3g}"

    if check.interval is None:
        return shown(check.measured)
    return f"{shown(check.measured)} ({shown(check.interval[0])} to {shown(check.interval[1])})"


def _seconds(taken: Interval | None, ratio: Interval | None) -> str:
    if taken is None:
        return "—"
    text = _bounds(taken, numbers.duration)
    return text if ratio is None else f"{text}; {numbers.ratio(ratio.value)} ({numbers.span((ratio.low, ratio.high))})"


def _bounds(interval: Interval, shown: Callable[[float | None], str]) -> str:
    return f"{shown(interval.value)} ({shown(interval.low)} to {shown(interval.high)})"
