"""`fleet.json`: what a fleet is and what became of it, from its journal, under names that others rely on.

docs/fleets.md describes the fields; within `compile-stage/fleet/v1` they keep name and meaning, and more may be added.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from compile_stage.core.environment import hardware
from compile_stage.core.errors import EXIT_GATE, EXIT_INTERRUPTED, EXIT_OK
from compile_stage.fleet.journal import Journal

SCHEMA = "compile-stage/fleet/v1"
_OUTCOMES = ("passed", "compiled", "failed", "refused", "unknown")


def fleet_json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that every `fleet.json` of this version satisfies."""
    text = files("compile_stage.fleet").joinpath("fleet-v1.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def fleet_document(journal: Journal, fleet: int, *, interrupted: bool = False) -> dict[str, Any]:
    """All that is known of a fleet now, as plain JSON values. Those that failed come first among its jobs."""
    row = journal.fleet(fleet)
    jobs = sorted(_jobs(journal, fleet), key=lambda job: (_RANK[job["status"]], job["name"], job["policy"]))
    code = exit_code(journal, fleet, interrupted=interrupted)
    counts = {status: sum(job["status"] == status for job in jobs) for status in _RANK}
    return {
        "schema": SCHEMA,
        "kind": row["kind"],
        "fleet": fleet,
        "status": "interrupted" if interrupted else "passed" if code == EXIT_OK else "failed",
        "exit_code": code,
        # What a requalification finds holds for this machine, also where it ran on nodes that are like it.
        "given": row["given"] | ({"machine": hardware().fingerprint} if row["kind"] == "requalify" else {}),
        "began_at": _time(row["began_at"]),
        "ended_at": _time(row["ended_at"]),
        "seconds": sum(job["seconds"] for job in jobs),
        "counts": {
            "jobs": len(jobs),
            **counts,
            "same": sum(job["same_as"] is not None for job in jobs),
            "regressed": sum(bool(target["regressed"]) for job in jobs for target in job["targets"]),
            "skipped": row["skipped"],
        },
        "jobs": jobs,
        "targets": list(_targets(journal, fleet)),
        "owners": list(_owners(journal, fleet)),
        "steps": list(_steps(journal, fleet)),
        "nodes": list(_nodes(journal, fleet)),
    }


_RANK = {"failed": 0, "refused": 1, "not begun": 2, "passed": 3}


def exit_code(journal: Journal, fleet: int, *, interrupted: bool = False) -> int:
    """One exit code: 0 where every job passed; the code that all others share; else 3. What was not begun counts as
    3: a required target has no winner."""
    if interrupted:
        return EXIT_INTERRUPTED
    codes = {
        EXIT_GATE if state != "done" or code is None else int(code)
        for state, code in journal.select("SELECT DISTINCT state, exit_code FROM jobs WHERE fleet=?", fleet)
    } - {EXIT_OK}
    if not codes:
        return EXIT_OK
    return codes.pop() if len(codes) == 1 else EXIT_GATE


def _jobs(journal: Journal, fleet: int) -> Iterator[dict[str, Any]]:
    targets = _outcomes(journal, fleet)
    held: tuple[int, list[dict[str, Any]]] | None = next(targets, None)
    query = (
        "SELECT id, uri, name, version, policy, owner, state, passed, exit_code, seconds, attempt, losses, same_as, "
        "problem, why, targets FROM jobs WHERE fleet=? ORDER BY id"
    )
    for row in journal.select(query, fleet):
        while held is not None and held[0] < row[0]:
            held = next(targets, None)
        found = held[1] if held is not None and held[0] == row[0] else []
        if not found:
            found = [
                _target(name, required, "not begun" if row[6] != "done" else "unknown", row[13])
                for name, required in json.loads(row[15])
            ]
        yield {
            "job": row[0], "uri": row[1], "name": row[2], "version": row[3], "policy": row[4], "owner": row[5],
            "status": _status(row[6], row[7], found), "exit_code": row[8], "seconds": row[9], "attempts": row[10],
            "lost": row[11], "same_as": row[12], "problem": row[13], "why": row[14], "targets": found,
        }  # fmt: skip


def _status(state: str, passed: int | None, targets: list[dict[str, Any]]) -> str:
    if state != "done":
        return "not begun"
    if passed:
        return "passed"
    missed = {target["outcome"] for target in targets if target["outcome"] not in ("passed", "compiled")}
    if missed == {"not begun"}:
        return "not begun"
    return "refused" if targets and all(target["outcome"] == "refused" for target in targets) else "failed"


def _outcomes(journal: Journal, fleet: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Job → its targets, in the order of jobs."""
    query = (
        "SELECT o.job, o.target, o.required, o.outcome, o.reason, o.winner, o.speedup, o.published, o.note, "
        "o.regressed FROM outcomes o JOIN jobs j ON j.id=o.job WHERE j.fleet=? ORDER BY o.job, o.target"
    )
    job, found = 0, list[dict[str, Any]]()
    for row in journal.select(query, fleet):
        if row[0] != job:
            if found:
                yield job, found
            job, found = row[0], []
        found.append(_target(*row[1:]))
    if found:
        yield job, found


def _target(target: str, required: Any, outcome: str, reason: str, winner: str = "", *rest: Any) -> dict[str, Any]:
    speedup, published, note, regressed = rest or (None, "", "", "")
    return {
        "target": target, "required": bool(required), "outcome": outcome, "reason": reason, "winner": winner,
        "speedup": speedup, "published": published, "note": note, "regressed": regressed,
    }  # fmt: skip


def _targets(journal: Journal, fleet: int) -> Iterator[dict[str, Any]]:
    sums = ", ".join(f"sum(o.outcome='{outcome}')" for outcome in _OUTCOMES)
    query = (
        f"SELECT j.policy, o.target, {sums}, sum(o.regressed!='') FROM jobs j JOIN outcomes o ON o.job=j.id "  # noqa: S608
        "WHERE j.fleet=? GROUP BY j.policy, o.target ORDER BY j.policy, o.target"
    )
    for policy, target, *counts, regressed in journal.select(query, fleet):
        yield {"policy": policy, "target": target, **dict(zip(_OUTCOMES, counts, strict=True)), "regressed": regressed}


def _owners(journal: Journal, fleet: int) -> Iterator[dict[str, Any]]:
    query = (
        "SELECT owner, count(*), sum(passed=1), sum(state='done' AND passed=0), sum(seconds) FROM jobs WHERE fleet=? "
        "GROUP BY owner ORDER BY sum(seconds) DESC, owner"
    )
    for owner, jobs, passed, failed, seconds in journal.select(query, fleet):
        yield {"owner": owner, "jobs": jobs, "passed": passed or 0, "failed": failed or 0, "seconds": seconds}


def _steps(journal: Journal, fleet: int) -> Iterator[dict[str, Any]]:
    query = (
        "SELECT s.step, sum(s.seconds), sum(s.ran), sum(s.cached) FROM steps s JOIN jobs j ON j.id=s.job "
        "WHERE j.fleet=? GROUP BY s.step ORDER BY sum(s.seconds) DESC"
    )
    for step, seconds, ran, cached in journal.select(query, fleet):
        yield {"step": step, "seconds": seconds, "ran": ran, "cached": cached}


def _nodes(journal: Journal, fleet: int) -> Iterator[dict[str, Any]]:
    query = (
        "SELECT a.node, count(*), sum(a.exit_code IS NULL), sum(a.ended_at-a.began_at) FROM attempts a JOIN jobs j ON "
        "j.id=a.job WHERE j.fleet=? GROUP BY a.node ORDER BY a.node"
    )
    for node, attempts, lost, seconds in journal.select(query, fleet):
        yield {"node": node, "attempts": attempts, "lost": lost or 0, "seconds": seconds or 0.0}


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
