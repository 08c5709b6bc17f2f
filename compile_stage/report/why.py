"""What a reader asks first of a target: why this candidate won, and how it is served."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable

from compile_stage.core.records import Receipt, RunResult, TargetResult
from compile_stage.report import numbers, summary
from compile_stage.serving.trust import TRUST_VARIABLE


def why_it_won(result: RunResult, target: TargetResult) -> tuple[str, ...]:
    """Three sentences: what was tried and what held, how fast the winner is, what the next best was. Empty without a
    winner."""
    winner = target.winner
    if winner is None:
        return ()
    rows = summary.rows(result, target)
    won = next(row for row in rows if row.job_id == winner.job.id)
    states = [row.state for row in rows]
    held = states.count("won") + states.count("lost")
    tried = f"{numbers.count(len(rows), 'candidate')}: {held} held every gate{_but_waived(rows)}"
    ended = ((states.count("failed"), "failed"), (states.count("refused"), "refused"),
             (states.count("compiled_not_validated"), "not validated"))  # fmt: skip
    tried += "".join(f", {number} {word}" for number, word in ended if number) + "."
    speed = summary.winner_speed(result, target)
    error = f"; {summary.error_text(won.error)}" if won.error is not None else ""
    return (tried, f"{won.label}: {speed or won.reason}{error}.", _next_best(target, rows, won))


def _but_waived(rows: tuple[summary.Row, ...]) -> str:
    """A waived gate was missed: nobody shall read that it held."""
    verdicts = [row.candidate.verdict for row in rows if row.state in ("won", "lost") and row.candidate is not None]
    return " that is not waived" if any(verdict is not None and verdict.waivers for verdict in verdicts) else ""


def _next_best(target: TargetResult, rows: tuple[summary.Row, ...], won: summary.Row) -> str:
    others = [row for row in rows if row.state == "lost"]
    if not others:
        return f"No other candidate held every gate{_but_waived(rows)}."
    if target.policy.prefer != "latency":
        return f"Next: {others[0].label}: {others[0].reason}."
    timed = [(median, row) for row in others if (median := summary.median_s(row.timing)) is not None]
    own = summary.median_s(won.timing)
    if not timed or own is None:
        return f"Next: {others[0].label}: {others[0].reason}."
    median, row = min(timed, key=lambda entry: entry[0])
    if row.timing is not None and won.timing is not None and row.timing.rounds != won.timing.rounds:
        return f"Next: {row.label}, {numbers.duration(median)}: {row.reason}."  # medians tell no ratio
    ratio = f"{median / own:.2f} times the winner's median" if median >= own else "no slower by its median"
    return f"Next: {row.label}, {numbers.duration(median)}, {ratio}: {row.reason}."


def trusted_files(result: RunResult) -> tuple[str, ...]:
    """The files of trusted keys, as the policy writes them, where it demands a signature; without one of them no such
    version is loaded. Empty where it demands none, or names none itself."""
    values = {value.path: value.value for value in result.policy_values}
    return tuple(values.get("compliance.trusted_keys") or ()) if values.get("compliance.require_signature") else ()


def with_trust(command: str, files: Iterable[str]) -> str:
    """The shell command with the variable that names these files of trusted keys; as it is where there are none."""
    named = os.pathsep.join(files)
    return f"{TRUST_VARIABLE}={shlex.quote(named)} {command}" if named else command


def serve_command(receipt: Receipt, trusted: Iterable[str] = ()) -> str:
    """The shell command that serves a published version over HTTP; by its alias where one points to it.

    Args:
        trusted: Files of trusted keys, where the version's policy demands a signature.
    """
    uri = f"models:/{receipt.name}@{receipt.promoted_to}" if receipt.promoted_to else receipt.uri
    quoted = "'" + uri.replace("'", "'\\''") + "'"
    return with_trust(f"mlflow models serve -m {quoted} --env-manager local --port 5000", trusted)
