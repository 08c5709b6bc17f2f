"""What the original and the candidates of a language model write after the first prompts: for reports, and decides
nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.context import Context
from compile_stage.core.digest import revive
from compile_stage.core.errors import SourceError, UsageError, WorkerError
from compile_stage.core.ports import Worker, WorkerLimits
from compile_stage.core.records import Budget, Candidate, SampleSet, SourceModel, Target, WrittenText

PROMPTS = 3


def write_texts(
    context: Context,
    source_worker: Worker,
    source: SourceModel,
    candidates: Sequence[Candidate],
    samples: SampleSet,
    limits: tuple[Target, Budget],
) -> tuple[WrittenText, ...]:
    """By prompt, the original's text first. A candidate that can't write is left out, and all are where the original
    can't.

    Args:
        limits: The target, and what a worker may use.
    """
    target, budget = limits
    rows = list(range(min(PROMPTS, samples.count)))
    asked: dict[str, Any] = {"samples": samples, "rows": rows, "generation": target.generation}
    writing = [c for c in candidates if c.has_passed and c.artifact is not None and c.artifact.generation is not None]
    if not writing:
        return ()
    key = {
        "source": source.identity,
        "made_by": plugins.cache_identity("sources", source.flavor),
        "artifacts": {c.job.id: c.artifact.digest for c in writing if c.artifact is not None},
        "samples": samples.digest,
        "target": target,
        "hardware": context.hardware,
    }

    def make(_: Path) -> tuple[WrittenText, ...]:
        source_worker.call("open_source", source=source, target=target)
        written = {"": _tokens(source_worker.call("write_tokens", **asked), target, len(rows))}
        for candidate in writing:
            worker_limits = WorkerLimits.within(budget, target.threads, plugins.interpreter_of(candidate.job.backend))
            try:
                with context.worker(f"{candidate.job.id}--texts", worker_limits) as worker:
                    worker.call("open_artifact", artifact=candidate.artifact, threads=target.threads)
                    written[candidate.job.id] = _tokens(worker.call("write_tokens", **asked), target, len(rows))
            except (WorkerError, UsageError):
                continue
        return _laid_out(source_worker, source, samples, rows, written, target)

    try:
        made: tuple[WrittenText, ...] = revive(
            tuple[WrittenText, ...], context.cached("texts/1", target.name, key, make).value
        )
        return made
    except (WorkerError, SourceError, UsageError):
        return ()


def _tokens(answer: Any, target: Target, count: int) -> list[list[int]]:
    """Of each prompt. Raises UsageError where an answer is no such thing: it comes from a candidate's own process."""
    most = target.generation.new_tokens
    if not isinstance(answer, list) or len(answer) != count:
        raise UsageError("it answered other prompts")
    for row in answer:
        if (
            not isinstance(row, list)
            or len(row) > most
            or any(not isinstance(t, int) or not 0 <= t < 2**31 for t in row)
        ):
            raise UsageError("what it wrote are no tokens")
    return answer


def _laid_out(
    worker: Worker,
    source: SourceModel,
    samples: SampleSet,
    rows: list[int],
    written: dict[str, list[list[int]]],
    target: Target,
) -> tuple[WrittenText, ...]:
    asked: list[list[int]] = worker.call("prompt_tokens", samples=samples, rows=rows, generation=target.generation)
    original = written[""]
    parts = {
        name: [_same(own, base) for own, base in zip(texts, original, strict=True)] for name, texts in written.items()
    }
    tokens = [*asked]
    for name, texts in written.items():
        for own, same in zip(texts, parts[name], strict=True):
            tokens += [own, own[:same]]
    texts_of = iter([_printable(text) for text in worker.call("texts_of_tokens", source=source, tokens=tokens)])
    prompts = [next(texts_of) for _ in asked]
    made = []
    for name in written:
        for prompt in prompts:
            whole, shared = next(texts_of), next(texts_of)
            if not whole.startswith(shared):  # a letter of several tokens, of which they share the first
                shared = ""
            made.append(WrittenText(job_id=name, prompt=prompt, same=shared, rest=whole[len(shared) :]))
    return tuple(made)


def _same(own: Sequence[int], base: Sequence[int]) -> int:
    """So many tokens at the beginning are the same."""
    pairs = list(zip(own, base, strict=False))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _printable(text: str) -> str:
    """Text of a model: whatever moves a cursor, turns the direction or can't be seen is written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
