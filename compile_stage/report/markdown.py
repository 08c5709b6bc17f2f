"""The run as Markdown: for a pull request's comment, a job summary and MLflow's note."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from compile_stage.core.records import Check, RunResult, TargetResult
from compile_stage.report import numbers, profiles, summary
from compile_stage.report.language import HEAD, LanguageRow, WrittenBeside, language_rows, written_texts
from compile_stage.report.option_tuning import KIND_WORDS, OptionTuningRow, option_tuning_rows, winner_elsewhere
from compile_stage.report.serving import HEAD as SERVING_HEAD
from compile_stage.report.serving import serving_rows, serving_text

GITHUB_COMMENT_LIMIT = 65_536  # characters; MLflow's tags hold more

_MARKS = {"passed": "✅", "failed": "❌", "refused": "🚫"}
_STATE_MARKS = {"won": "🏆 won", "lost": "lost", "failed": "❌ failed", "compiled_not_validated": "❌ not validated"}


def render_markdown(result: RunResult, limit: int = GITHUB_COMMENT_LIMIT) -> str:
    """The text, most important parts first.

    Args:
        limit: Characters at most. Sections that no longer fit are left out from the end, and the text says so.
    """
    sections = ["\n".join(section) for section in _sections(result)]
    cut = "\n_Cut here: the rest is in report.html and result.json._\n"
    text = sections[0] + "\n"
    for section in sections[1:]:
        if len(text) + len(section) + len(cut) + 2 > limit:
            return text[: limit - len(cut)] + cut
        text += "\n" + section + "\n"
    return text if len(text) <= limit else text[: limit - len(cut)] + cut


def _sections(result: RunResult) -> Iterator[list[str]]:
    source, policy = result.source, result.policy
    yield [
        f"## {_MARKS[result.status]} {_cell(f'{source.name} {source.version}'.rstrip())}: {result.status}",
        "",
        "  \n".join(map(_cell, summary.headline(result).splitlines())),  # each of a run's problems is a line
        "",
        *(f"> ⚠️ {_cell(warning)}" for warning in policy.warnings),
        *([""] if policy.warnings else []),
        f"Source {_code(source.uri)}{f' ({_cell(source.flavor)})' if source.flavor else ''}, "
        f"{f'policy {_code(policy.name)}, ' if policy.name else ''}"
        f"{numbers.duration(result.duration_s)}, exit code {result.exit_code}. {_data(result)}",
    ]
    for target in result.targets:
        yield _target(result, target)
    for target in result.targets:
        if language := language_rows(result, target):
            yield [f"### {_cell(target.policy.target.name)}, token by token", "", *_language(language)]
        if texts := written_texts(result, target):
            yield list(_written(texts))
    for target in result.targets:
        if trials := serving_rows(target.serving):
            title = f"{_cell(target.policy.target.name)} under load"
            rows_of = _table(SERVING_HEAD, (tuple(map(_cell, row)) for row in trials))
            yield ["<details><summary>" + title + "</summary>", "", *rows_of, "", "</details>"]
    for target in result.targets:
        if rows := option_tuning_rows(result, target):
            yield _option_tuning(target, rows, winner_elsewhere(result, target, rows))
    for target in result.targets:
        if found := profiles.views(target):
            title = f"Hot operators of {_cell(target.policy.target.name)}"
            yield ["<details><summary>" + title + "</summary>", *_profiles(found), "", "</details>"]
    for target in result.targets:
        if broken := list(_broken(target)):
            title = f"Checks of {_cell(target.policy.target.name)} that did not pass"
            yield ["<details><summary>" + title + "</summary>", "", *broken, "", "</details>"]
    hardware = result.environment.get("hardware", {})
    packages = ", ".join(f"{name} {version}" for name, version in result.environment.get("packages", {}).items())
    yield [
        f"Measured on {_cell(str(hardware.get('cpu', 'an unknown CPU')))} "
        f"({_code(str(result.environment.get('hardware_fingerprint', '')))})"
        f"{f' against {_cell(result.baseline_framework)}' if result.baseline_framework else ''}. "
        f"{_cell(packages)}",
        *(f"- {_cell(note)}" for note in summary.run_notes(result)),
    ]


def _data(result: RunResult) -> str:
    sentences = [
        f"{_cell(role).capitalize()}: {samples.count} {'real' if samples.real else '**synthetic**'} samples "
        f"{f'in {samples.groups} groups ' if samples.groups else ''}of {_code(samples.source)}."
        for role, samples in result.samples.items()
    ]
    return " ".join(sentences)


def _target(result: RunResult, target: TargetResult) -> list[str]:
    spec = target.policy.target
    lines = [f"### {_cell(spec.name)}{'' if spec.required else ' (not required)'}", ""]
    if target.selection.winner is None:
        lines += [f"**No winner:** {_cell(summary.no_winner(result, target))}", ""]
    lines += _table(
        ("", "backend", "scheme", f"p50, batch {summary.shown_batch_size(target)}", "speedup", "error", "size", "why"),
        (
            (
                _STATE_MARKS.get(row.state, row.state),
                _cell(row.backend),
                _cell(row.scheme),
                numbers.duration(summary.median_s(row.timing)),
                summary.row_speedup_text(target, row),
                _cell(summary.error_text(row.error)),
                numbers.size(row.size_bytes),
                _cell(row.reason),
            )
            for row in summary.rows(result, target)
        ),
    )
    remarks = [
        summary.baseline_text(result, target),
        summary.predict_text(target),
        serving_text(target),
        *summary.measurement_notes(result, target),
    ]
    if any(remarks):
        lines += ["", _cell(". ".join(filter(None, remarks))) + "."]
    if (receipt := target.receipt) is not None:
        what = "Published" if receipt.created else "Already published"
        alias = f", {_code(f'{receipt.name}@{receipt.promoted_to}')} points to it" if receipt.promoted_to else ""
        before = f" (before: version {_cell(receipt.previous)})" if receipt.promoted_to and receipt.previous else ""
        promoted = summary.promotion(result, target)
        stays = promoted is not None and promoted[0] == "failed"
        note = f"❌ **{_cell(receipt.note)}**" if stays else _cell(receipt.note)
        lines += ["", f"{what}: {_code(receipt.uri)}{alias}{before}. {note}".rstrip()]
    for unvalidated in target.unvalidated:
        if unvalidated.receipt is not None:
            there = f"where it will run, {_code(f'compile-stage validate {unvalidated.receipt.uri}')} validates it"
            lines += [
                "",
                f"Published, not validated: {_code(unvalidated.receipt.uri)} ({_cell(unvalidated.job_id)}); {there}.",
            ]
    winner = target.winner
    for waiver in winner.verdict.waivers if winner is not None and winner.verdict is not None else ():
        lines += [
            "",
            f"⚠️ **{_cell(waiver.gate)} is waived** until {_cell(waiver.expires)} by {_cell(waiver.owner)}: "
            f"{_cell(waiver.reason)}",
        ]
    return lines


def _language(rows: Iterable[LanguageRow]) -> list[str]:
    return _table(
        HEAD,
        (
            (
                _cell(row.label) + (" 🏆" if row.won else ""),
                str(row.batch_size),
                *map(_cell, (row.first, row.each, row.tokens, row.memory, row.kl, row.top1, row.perplexity)),
            )
            for row in rows
        ),
    )


def _written(texts: Iterable[WrittenBeside]) -> Iterator[str]:
    """Bold from the first token on that is not the original's."""
    yield "<details><summary>What they write: the likeliest token each time, bold where it is no longer the original's"
    yield "</summary>"
    for beside in texts:
        yield ""
        yield f"After “{_cell(beside.prompt)}”:"
        yield ""
        yield from _table(
            ("model", "text"),
            ((_cell(label), _cell(text.same) + (f" **{_cell(text.rest)}**" if text.rest.strip() else ""))
             for label, text in beside.texts),
        )  # fmt: skip
    yield ""
    yield "</details>"


def _option_tuning(target: TargetResult, rows: Iterable[OptionTuningRow], remark: str) -> list[str]:
    header = ("step", "", "p50", "over the step before", "peak memory", "size", "error", "why")
    return [
        f"### Option tuning of {_cell(target.policy.target.name)}",
        "",
        *_table(
            header,
            (
                (
                    KIND_WORDS[row.kind] + (" 🏆" if row.state == "won" else ""),
                    _cell(row.what) + (f" ({row.outcome})" if row.outcome else ""),
                    numbers.duration(row.p50_s),
                    _ratio(row.speedup, row.speedup_interval),
                    numbers.size(row.peak_memory_bytes),
                    numbers.size(row.size_bytes),
                    _cell(summary.error_text(row.error)),
                    _cell(row.reason),
                )
                for row in rows
            ),
        ),
        *(["", _cell(remark)] if remark else []),
    ]


def _profiles(found: Iterable[profiles.ProfileView]) -> Iterator[str]:
    for one in found:
        yield from ("", f"**{_cell(one.title)}**", "")
        if one.profile is None:
            yield f"No profile: {_cell(one.reason)}"
            continue
        yield from _table(
            ("kind", "kernel (nodes that it computes)", "share", "runs", "mean"),
            (
                (
                    _cell(operator.kind),
                    _cell(profiles.operator_name(operator)),
                    numbers.percent(operator.share),
                    str(operator.calls),
                    numbers.duration(operator.mean_s),
                )
                for operator in one.operators
            ),
        )
        if one.fusions:
            yield from ("", "Fused:", "", *(f"- {_cell(fusion)}" for fusion in one.fusions))
        yield from ("", _cell(" ".join(one.lines)))


def _broken(target: TargetResult) -> Iterator[str]:
    rows = [
        (candidate.job.backend, candidate.job.scheme.name, check)
        for candidate in target.candidates
        for check in candidate.checks
        if summary.outcome_word(check) != "passed"
    ]
    if not rows:
        return
    yield from _table(
        ("backend", "scheme", "check", "measured", "limit", "outcome", "why"),
        (
            (
                _cell(backend),
                _cell(scheme),
                _cell(_place(check)),
                summary.measured_text(check),
                summary.limit_text(check),
                summary.outcome_word(check),
                _cell(check.reason),
            )
            for backend, scheme, check in rows
        ),
    )


def _place(check: Check) -> str:
    batch = f"batch {check.batch_size}" if check.batch_size else ""
    return " ".join(part for part in (summary.check_name(check), check.output or "", batch) if part)


def _ratio(value: float | None, interval: tuple[float, float] | None) -> str:
    return numbers.ratio(value) + (f" ({numbers.ratio_span(interval)})" if interval is not None else "")


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(header)
    lines = [_row(names), _row(["---"] * len(names))]
    return lines + [_row(row) for row in rows]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    """Text of others in a table's cell: it can neither end the cell nor be read as markup, a link or a mention."""
    flat = " ".join(text.split())
    flat = re.sub(r"([\\`*\[\]|~#])", r"\\\1", flat)
    return flat.replace("<", "&lt;").replace(">", "&gt;").replace("@", "@\u200b")


def _code(text: str) -> str:
    """Text of others as code, however many backticks it holds."""
    flat = " ".join(text.split()).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", flat)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if longest else ""
    return f"{fence}{pad}{flat}{pad}{fence}"
