"""What people see: a live table on a terminal, plain lines elsewhere, and the same tables at the end.

Names come from models and policies of others: they are never read as markup, and control characters in them are shown
escaped.
"""

from __future__ import annotations

import json
import os
import shutil
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from compile_stage.cli.live import LiveConsole, LiveTable, ProgressBoard, Work, left_text
from compile_stage.cli.next_step import Asked, next_step
from compile_stage.cli.step_lines import CachedSteps, StepNames, group_reasons, work_of
from compile_stage.cli.tables import fit, lines
from compile_stage.core.records import Job, Plan, Profiled, Refusal, RunResult, TargetResult
from compile_stage.report import numbers, profiles, serving, summary
from compile_stage.report.option_tuning import option_tuning_line

if TYPE_CHECKING:
    from compile_stage.core.records import PolicyValue, ServingCost, Verification
    from compile_stage.graph_debug.diagnosis import Diagnosis
    from compile_stage.graph_debug.trace import Trace
    from compile_stage.installation import DoctorReport

_STATE_STYLES = {"won": "bold green", "failed": "red", "refused": "yellow", "compiled_not_validated": "red"}
_OUTCOME_STYLES = {"done": "green", "cached": "cyan"}
_ASCII = str.maketrans({"×": "x", "—": "-", "…": "...", "·": "|", "µ": "u", "∞": "inf", "−": "-", "→": "->"})
_LOG_WIDTH = 80  # a log has no width of its own; COLUMNS names another
_NARROWEST = 20  # COLUMNS that says less is taken for 20: Rich leaves out what has no room
_ONE_LINE = 4096
_BESIDE_KEYS = 60  # columns that a policy's value and its place need beside the longest key
_ROOM_FOR_WORDS = 36  # columns that a sentence beside a job's id needs to be readable
_LONG_NAME = 18  # a scheme's name that is longer is folded where the figures beside it would have no room
_LONG_PART = 13  # `+half-threads`: a part of a scheme's name is not folded, where the backends' names leave room
_WIDE = 120  # from here on a table has room for a column of sentences


class Display:
    """A `core.events.Reporter` that draws, and the tables that commands end with. Safe for several threads."""

    def __init__(
        self, stream: IO[str], *, quiet: bool = False, verbose: bool = False, width: int | None = None
    ) -> None:
        """Args:
        stream: Standard output, or standard error when output is for a program.
        width: Columns; None takes the terminal's, those of the environment's COLUMNS, or 80.
        """
        columns = os.environ.get("COLUMNS", "")
        if width is None and columns.isdecimal() and int(columns) > 0:
            width = max(int(columns), _NARROWEST)
        self._folds = width is not None or Console(file=stream).is_terminal
        if not self._folds:
            width = _LOG_WIDTH
        elif width is None and columns.isdecimal():  # 0: not known, and Rich would write nothing
            width = shutil.get_terminal_size((_LOG_WIDTH, 25)).columns
        self.console = LiveConsole(file=stream, width=width, highlight=False, markup=False, emoji=False)
        self.quiet = quiet
        self.verbose = verbose
        self._unicode = (self.console.encoding or "").lower().startswith("utf")
        self._box = box.SIMPLE_HEAD if self._unicode else box.ASCII2
        self._live = LiveTable(self.console, self._table)
        self._draws_live = self.console.is_terminal and not self.console.is_dumb_terminal and not quiet
        self._board = ProgressBoard()
        self._names, self._cached = StepNames(), CachedSteps()
        self._started = time.monotonic()

    # ------------------------------------------------------------------------------------------------ Reporter

    def planned(self, plan: Plan) -> None:
        jobs, policy = {job.id: job.target.name for job in plan.jobs}, plan.policy
        elsewhere = frozenset(job.id for job in plan.jobs if job.not_runnable_here)
        foreseeable = not elsewhere and not any(target.ladder for target in policy.targets)
        self._board.planned(Work(jobs, policy.budget.measure_seconds, elsewhere, foreseeable))
        self._names.planned(plan)
        if not self.quiet:
            self.show_plan(plan, brief=not self.verbose)

    def began(self, step: str, job_id: str) -> None:
        self._board.began(step, job_id)
        if self._draws_live:
            self._live.start()
        elif self.verbose:
            self._line(step, job_id, "began")

    def progressed(self, step: str, job_id: str, message: str) -> None:
        self._board.progressed(step, job_id, message)
        if self.verbose and not self._draws_live:
            self._line(step, job_id, message)

    def ended(self, step: str, job_id: str, seconds: float, outcome: str) -> None:
        self._board.ended(step, job_id, seconds, outcome)
        if self.quiet or self._draws_live:
            return
        if (held := self._cached.enter(self._names.target(job_id))) is not None:
            self._line("cache", *held)
        if outcome == "cached" and not self.verbose:
            self._cached.add()
            return
        took = numbers.duration(seconds)
        self._line(step, job_id, f"done in {took}" if outcome == "done" else f"{outcome} ({took})")

    def close(self) -> None:
        """Take the live table away, and say what the cache held. Calling it twice does no harm."""
        self._live.stop()
        if (held := self._cached.end()) is not None:
            self._line("cache", *held)

    # -------------------------------------------------------------------------------------------------- tables

    def show_plan(self, plan: Plan, *, brief: bool = False) -> None:
        """Jobs by target, what is refused and why.

        Args:
            brief: Without a line for each job: a run's own lines name it.
        """
        source, policy = plan.source, plan.policy
        self._say(f"{source.uri} ({source.flavor}) · policy {policy.name}", style="bold")
        refused = f", {len(plan.refused)} refused" if plan.refused else ""
        self._say(f"{numbers.count(len(plan.jobs), 'job')}{refused}")
        for warning in () if brief else policy.warnings:  # a run says them beside its verdict
            self._say(f"warning: {warning}", style="yellow")
        for target_policy in policy.targets:
            target = target_policy.target
            batches = ", ".join(map(str, target.batch_sizes))
            if not brief:
                self._say("")
            self._say(
                f"target {target.name} · {target.device} · {numbers.count(target.threads, 'thread')} · batch {batches}"
            )
            jobs = [job for job in plan.jobs if job.target.name == target.name]
            refusals = [refusal for refusal in plan.refused if refusal.target == target.name]
            if brief:
                self._show_reasons(jobs, refusals)
            else:
                self._show_jobs(plan, jobs, refusals)
        for note in plan.notes:
            self._say(f"note: {note}", style="dim")
        if plan.problem:
            self._say(f"a run would fail: {plan.problem}", style="bold red")

    def show_result(self, result: RunResult, folder: Path, asked: Asked | None = None) -> None:
        """All candidates by target, the receipts, where the report is, and what to do next.

        Args:
            asked: What the run was asked for; None to say nothing of what comes next.
        """
        if not self.quiet:
            for target in result.targets:
                self._show_target(result, target)
            for note in summary.run_notes(result):
                self._say(f"note: {note}", style="dim")
        for warning in result.policy.warnings:
            self._say(f"warning: {warning}", style="yellow")
        style = "bold green" if result.status == "passed" else "bold red"
        self._say(f"{result.status}: {summary.headline(result)}", style=style)
        for target in result.targets:
            if (receipt := target.receipt) is not None:
                words = "published" if receipt.created else "already published, unchanged"
                alias = f", {receipt.name}@{receipt.promoted_to} points to it" if receipt.promoted_to else ""
                self._say(f"{words}: {receipt.uri}{alias}")
                if receipt.note:
                    promoted = summary.promotion(result, target)
                    stays = promoted is not None and promoted[0] == "failed"
                    self._say(f"  {receipt.note}", style="bold red" if stays else "")
            for unvalidated in target.unvalidated:
                if unvalidated.receipt is not None:
                    words = (
                        "published, not validated"
                        if unvalidated.receipt.created
                        else "already published, not validated"
                    )
                    self._say(f"{words}: {unvalidated.receipt.uri} ({unvalidated.job_id})")
                    self._say(f"  where it will run: compile-stage validate {unvalidated.receipt.uri}", style="dim")
        self._say(f"report: {folder / 'report.html'}")
        if asked is not None and not self.quiet and (line := next_step(result, folder, asked)):
            self._say(f"next: {line}")

    def show_values(self, rows: Iterable[PolicyValue]) -> None:
        """Resolved policy values; those that the shipped defaults gave are dimmed. A terminal that is too narrow for
        three columns gets two lines for each value."""
        rows = list(rows)
        if self._folds and self.console.width < max((len(row.path) for row in rows), default=0) + _BESIDE_KEYS:
            for row in rows:
                style = "dim" if row.is_default else ""
                self._say(f"{row.path}: {_scalar(row.value)}", style)
                self._say(f"    from {row.origin}{f', locked by {row.locked_by}' if row.locked_by else ''}", "dim")
            return
        table = self._grid("key", "value", "from", whole=("key",))
        for row in rows:
            style = "dim" if row.is_default else ""
            origin = f"{row.origin}, locked by {row.locked_by}" if row.locked_by else row.origin
            table.add_row(*(self._text(cell, style) for cell in (row.path, _scalar(row.value), origin)))
        # For another program, each value and where it comes from stay on one line.
        width = self.console.width
        try:
            self.console.width = width if self._folds else _ONE_LINE
            self._print(table)
        finally:
            self.console.width = width

    def show_doctor(self, report: DoctorReport) -> None:
        """This machine, then plug-ins and the registry, each with what is missing and how to get it."""
        self._say("machine", style="bold")
        table = self._grid("", "")
        for key, text in report.machine.items():
            table.add_row(self._text(key, "dim"), self._text(text))
        self._print(table)
        for kind in ("backend", "source", "precision", "engine", "registry"):
            entries = [entry for entry in report.entries if entry.kind == kind]
            if not entries:
                continue
            table = self._grid(kind, "", "version", whole=(kind,))
            for entry in entries:
                state = self._text("ready", "green") if entry.ready else self._text("missing", "yellow")
                table.add_row(self._text(entry.name), state, self._text(entry.version))
            self._say("")
            self._print(table)
            for entry in (one for one in entries if one.reason):
                lead = "" if entry.reason.startswith(f"{entry.name} ") else f"{entry.name}: "
                self._say(f"  {lead}{entry.reason}{':' if entry.fix else ''}")
                if entry.fix:
                    self._say(f"    {entry.fix}")
        self._say(f"\ncache: {report.cache}")

    def show_verification(self, verification: Verification, word: str = "verified") -> None:
        """Every check, then one word: what it is when it passed."""
        wide = self.console.width >= _WIDE
        columns = ("", "check", "output", "batch", "measured", "limit", *(("why",) if wide else ()))
        table = self._grid(*columns, right=("batch",), whole=("", "check", "batch"))
        for check in verification.checks:
            outcome = summary.outcome_word(check)
            cells = [
                summary.check_name(check), check.output or "", str(check.batch_size or ""),
                summary.measured_text(check), summary.limit_text(check), *((check.reason,) if wide else ()),
            ]  # fmt: skip
            table.add_row(self._text(outcome, "green" if outcome == "passed" else "red"), *map(self._text, cells))
        if verification.checks:
            self._print(table)
        for check in verification.checks if not wide else ():
            if (outcome := summary.outcome_word(check)) != "passed":
                self._say(f"  {summary.check_name(check)} {outcome}: {check.reason}")
        for note in verification.notes:
            self._say(f"note: {note}", style="dim")
        verdict = word if verification.passed else f"NOT {word}"
        self._say(f"{verdict}: {verification.uri}", style="bold green" if verification.passed else "bold red")

    def show_load(self, cost: ServingCost) -> None:
        """The trials as a table, what they show, and what a reader should know."""
        table = self._grid(*serving.HEAD, right=serving.HEAD[1:6], whole=serving.HEAD[3:6])
        for row in (trials := serving.serving_rows(cost)):
            table.add_row(*map(self._text, row))
        if trials:
            self._print(table)
            self._say("")
        for line in (serving.cost_text(cost), *serving.serving_remarks(cost)):
            self._say(line)

    def show_diagnosis(self, diagnosis: Diagnosis) -> None:
        """The error of each node that is worth a line, what to keep in fp32, and the finding."""
        if diagnosis.trace is not None and not self.quiet:
            self._show_trace(diagnosis.trace)
        if diagnosis.kept is not None and not self.quiet:
            for trial in diagnosis.kept.trials:
                self._say(
                    f"  {'passed' if trial.passed else 'failed'}, {len(trial.kept)} in {trial.float_type}: "
                    f"{trial.decisive.reason if trial.decisive else trial.problem}"
                )
        if not self.quiet:
            for text in (*diagnosis.misses, *diagnosis.notes, *(diagnosis.trace.notes if diagnosis.trace else ())):
                self._say(f"note: {text}", style="dim")
        self._say(diagnosis.headline, style="bold")
        if diagnosis.failed is not None and diagnosis.failed.reduced is not None:
            self._say(f"it fails with: {diagnosis.failed.problem}")
        if diagnosis.kept is not None:
            if diagnosis.kept.nodes is not None:
                less = ", and no fewer of them do" if diagnosis.kept.minimal else ""
                self._say(f"in fp32 these make it pass{less}: {', '.join(diagnosis.kept.nodes)}")
            if diagnosis.kept.note:
                self._say(diagnosis.kept.note)
        if diagnosis.bundle:
            self._say(f"to attach to a bug report: {diagnosis.bundle}")

    def show_profiles(self, targets: Mapping[str, Sequence[Profiled]], out: Path | None) -> None:
        """The kernels with the most time of each model, what was fused, and where the traces are."""
        for target, profiled in targets.items():
            self._say(f"\ntarget {target}")
            for one in profiled:
                self._show_profile(profiles.view(target, one), out)

    def _show_profile(self, view: profiles.ProfileView, out: Path | None) -> None:
        self._say(f"\n{view.title}", style="bold")
        if view.profile is None:
            self._say(f"no profile: {view.reason}", style="yellow")
            return
        table = self._grid(
            "share", "mean", "runs", "kind", "kernel", right=("share", "mean", "runs"), whole=("share", "mean", "runs")
        )
        for operator in view.operators:
            cells = (numbers.percent(operator.share), numbers.duration(operator.mean_s), str(operator.calls))
            table.add_row(*map(self._text, (*cells, operator.kind, profiles.operator_name(operator))))
        self._print(table)
        for fusion in view.fusions if not self.quiet else ():
            self._say(f"  fused: {fusion}")
        for text in (*view.lines, *(view.profile.notes if self.verbose else ())):
            self._say(f"  {text}", style="dim")
        if view.trace and out is not None:
            self._say(f"  trace: {out / view.trace}")

    # ------------------------------------------------------------------------------------------------- drawing

    def _show_trace(self, trace: Trace) -> None:
        """The error of each node that is worth a line, then that of each output."""
        from compile_stage.report.debug_page import decibels, notable

        columns = ("", "node", "operator", "SNR", "worst input", "drop", "of what")
        table = self._grid(*columns, right=("SNR", "worst input", "drop"))
        for error in notable(trace):
            departs = error.node == trace.first
            drop = decibels(error.drop_db) if 0 < error.drop_db < 1e9 else ("∞" if error.drop_db > 0 else "")
            cells = (
                "departs" if departs else "", error.node, error.op, decibels(error.snr_db), decibels(error.input_db),
                drop, error.kind if error.drop_db > 3 else "",
            )  # fmt: skip
            table.add_row(*(self._text(cell, "red" if departs else "") for cell in cells))
        self._print(table)
        for output, (graph_db, served_db) in trace.outputs.items():
            self._say(f"output {output}: {decibels(graph_db)} as the graph says, {decibels(served_db)} as it is served")

    def _show_reasons(self, jobs: Sequence[Job], refusals: Sequence[Refusal]) -> None:
        """A line for each reason why a job is refused, or is not validated here."""
        for what, why in group_reasons([(f"{r.backend} {r.precision}", r.reason) for r in refusals]):
            self._say(f"  refused: {what}: {why}")
        there = [(job.label, job.not_runnable_here) for job in jobs if job.not_runnable_here]
        for what, why in group_reasons(there):
            self._say(f"  not validated here: {what}: {why}")

    def _show_jobs(self, plan: Plan, jobs: Sequence[Job], refusals: Sequence[Refusal]) -> None:
        """A table where it fits; else a line a job, and what is done with it below."""
        if not jobs and not refusals:
            self._say("no jobs")
            return
        entries = [
            (("run", "green") if todo else ("cached", "cyan"), job.id, job.scheme.precision, words)
            for job in jobs
            for todo, words in [work_of(job, plan.cached_steps.get(job.id, ()))]
        ]
        entries += [(("refused", "yellow"), r.job_id, r.precision, r.reason) for r in refusals]
        taken = sum(max((len(entry[part]) for entry in entries), default=0) for part in (1, 2)) + len("refused   ")
        if taken + _ROOM_FOR_WORDS <= self.console.width:
            table = self._grid("", "job", "precision", "what", whole=("", "job", "precision"))
            for (mark, style), *cells in entries:
                table.add_row(self._text(mark, style), *map(self._text, cells))
            self._print(table)
            return
        for (mark, style), job_id, precision, words in entries:
            self.console.print(self._text(f"{mark:<8}", style) + self._text(job_id), soft_wrap=True)
            self._say(f"        {precision}: {words}")

    def _show_target(self, result: RunResult, target: TargetResult) -> None:
        rows = summary.rows(result, target)
        wide = self.console.width >= _WIDE
        spec = target.policy.target
        self._say(f"\n{spec.name}{'' if spec.required else ' (not required)'}", style="bold")
        long = max((len(row.scheme) for row in rows), default=0) > _LONG_NAME
        columns = ["state", "backend", "scheme", "p50", "speedup", "error", "size"]
        table = self._grid(
            *columns,
            *(["why"] if wide else []),
            right=("p50", "size"),
            whole=("state", "backend", "p50", "size", *(() if long else ("scheme",))),
        )
        # A long scheme is folded between its settings.
        schemes = [row.scheme.replace("+", " +") if long else row.scheme for row in rows]
        if long and max(len(row.backend) for row in rows) <= _LONG_PART:
            longest = max(len(part) for scheme in schemes for part in scheme.split())
            table.columns[columns.index("scheme")].min_width = min(longest, _LONG_PART)
        for row, scheme in zip(rows, schemes, strict=True):
            style = _STATE_STYLES.get(row.state, "")
            cells = [summary.STATE_WORDS[row.state], row.backend, scheme, *self._figures(target, row, wide)]
            if wide:
                cells.append(row.reason)
            table.add_row(*map(self._text, cells), style=style if row.state == "won" else "")
            table.columns[0]._cells[-1] = self._text(cells[0], style)
        self._print(table)
        if not wide:
            for names, reason in summary.grouped_reasons(target, rows):
                self._say(f"  {names}: {reason}")
        if target.selection.winner is None:
            self._say(f"no winner: {summary.no_winner(result, target)}", style="red")
        elif line := summary.too_uncertain(target):  # where there is no winner, the last line says it
            self._say(f"note: {line}", style="yellow")
        if line := summary.baseline_text(result, target):
            self._say(line)
        if line := summary.predict_text(target):
            self._say(f"  {line}")  # folded: it is longer than a line
        for note in summary.measurement_notes(result, target):
            self._say(f"note: {note}", style="yellow")
        if line := option_tuning_line(result, target):
            self._say(line)

    def _figures(self, target: TargetResult, row: summary.Row, wide: bool) -> list[str]:
        """p50, speedup, error and size of a row."""
        return [
            numbers.duration(summary.median_s(row.timing)),
            summary.row_speedup_text(target, row, interval=wide),
            summary.error_text(row.error),
            numbers.size(row.size_bytes),
        ]

    def _table(self) -> RenderableType:
        """The live table: what runs now, what ended, as much as the screen has room for."""
        jobs = [job for job in self._board.snapshot() if job.step or job.job_id]
        room = max(3, self.console.height - 4)
        ended = [job for job in jobs if not job.running]
        hidden = ended[: max(0, len(jobs) - room)]
        table = self._grid("job", "step", "state", "in all", right=("in all",), whole=("step", "in all"))
        for job in jobs:
            if job in hidden:
                continue
            state = "running" if job.running else (job.outcome or "waiting")
            style = _OUTCOME_STYLES.get(state, "" if state in ("running", "waiting") else "red")
            took = numbers.duration(job.elapsed_s) if job.step else ""
            table.add_row(
                self._text(self._names.label(job.job_id) if job.job_id else "run"),
                self._text(job.step),
                self._text(job.message or state, style),
                self._text(took),
            )
        ended_jobs, all_jobs = self._board.counted()
        parts = (
            f"{ended_jobs} of {numbers.count(all_jobs, 'job')}" if all_jobs else "",
            left_text(self._board.left_s()),
            f"{len(hidden)} that ended are not shown" if hidden else "",
        )
        return Group(table, self._text("  " + " · ".join(filter(None, parts)), "dim"))

    def _grid(self, *columns: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
        """An empty table. The columns `right` hold numbers; a cell of the columns `whole` stays on one line."""
        table = Table(
            box=self._box,
            padding=(0, 1, 0, 0) if self._unicode else (0, 1),
            pad_edge=False,
            show_edge=False,
            show_header=any(columns),
            header_style="dim",
        )
        for name in columns:
            table.add_column(name, justify="right" if name in right else "left", no_wrap=name in whole, overflow="fold")
        return table

    def _print(self, table: Table) -> None:
        """The table, or its rows as lines where the terminal is too narrow for its columns."""
        if fit(self.console, table):
            self.console.print(table)
            return
        for line in lines(table):
            self._say(f"  {line}")

    def _line(self, step: str, job_id: str, text: str) -> None:
        elapsed = time.monotonic() - self._started
        words = f"[{elapsed:6.1f}s] {step:<10} {self._names.label(job_id)}  {text}"
        # A name of others may be wider than the line; it stays whole, for whoever searches the log.
        fold = textwrap.TextWrapper(self.console.width, subsequent_indent=" " * 10, break_long_words=False,
                                    break_on_hyphens=False)  # fmt: skip
        self.console.print(self._text(fold.fill(words)), soft_wrap=True)

    def _say(self, text: str, style: str = "") -> None:
        lead = len(text) - len(text.lstrip(" "))
        body = self._text(text.lstrip(" "), style)
        self.console.print(Padding(body, (0, 0, 0, lead), expand=False) if lead else body, soft_wrap=not lead)

    def _text(self, text: str, style: str = "") -> Text:
        clean = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
        return Text(clean if self._unicode else clean.translate(_ASCII), style=style)


def _scalar(value: Any) -> str:
    """As YAML would have it on one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
