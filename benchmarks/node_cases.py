"""Every case of the onnx package's operator tests through compile, session and verdict of every installed backend that
takes ONNX.

    python benchmarks/node_cases.py                             # all: 1,900 cases, some minutes a backend on one core
    python benchmarks/node_cases.py openvino --only reduce cast # parts of cases' names
    python benchmarks/node_cases.py --out cases.json            # every case with its reason
    python benchmarks/node_cases.py tvm --log tvm.jsonl         # in pieces: what the log has is not judged again
    python benchmarks/node_cases.py iree --sample 360           # drawn at random, the same each time; 400 hold those

Prints a table, and the reasons by how often they occur. Ends with 1 when a verdict passed an output that NumPy finds
wrong. Cases may end the process they run in: they run in children forked one after another, each of which goes on
behind the case at which the one before it died.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402

from compile_stage.core import plugins  # noqa: E402
from compile_stage.core.records import Target  # noqa: E402
from compile_stage.testing.node_cases import Finding, Found, collect, judge  # noqa: E402

CHUNK = 200
"""Cases of one child: what they leave behind in a runtime does not pile up."""
PATIENCE_S = 60.0
"""A case that says nothing for so long has hung."""


def run(backend: str, cases: list[Any], keep: Callable[[Finding], None]) -> list[Finding]:
    """A finding for every case, those included at which a process died. `keep` is given each as soon as it is there."""
    findings: list[Finding] = []
    while len(findings) < len(cases):
        waiting = cases[len(findings) :][:CHUNK]
        ours, theirs = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=_child, args=(backend, waiting, theirs))
        child.start()
        theirs.close()
        done = 0
        while done < len(waiting):
            try:
                finding = ours.recv() if ours.poll(PATIENCE_S) else None
            except EOFError:
                child.join()
                finding = Finding(case=waiting[done].name, found=Found.CRASHED, reason=_ended(child.exitcode))
            if finding is None:
                finding = Finding(case=waiting[done].name, found=Found.CRASHED, reason=f"hung for {PATIENCE_S:.0f} s")
            findings.append(finding)
            keep(finding)
            done += 1
            if finding.reason.startswith(("hung", "the process ended")):
                break
        ours.close()
        child.kill() if child.is_alive() and done < len(waiting) else None
        child.join()
        print(f"\r{backend}: {len(findings)} of {len(cases)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return findings


def _child(name: str, cases: list[Any], results_to: Connection) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)  # runtimes tell there what they also raise
    warnings.simplefilter("ignore")
    backend = plugins.load("backends", name)
    for case in cases:
        with TemporaryDirectory() as folder:
            results_to.send(judge(backend, case, Path(folder)))


def _ended(code: int | None) -> str:
    return (
        f"the process ended with signal {-code}" if code is not None and code < 0 else f"the process ended with {code}"
    )


def suited() -> tuple[list[str], dict[str, str]]:
    """Backends that take ONNX and run here, and why the others don't."""
    names, left_out = [], {}
    for name in plugins.names("backends"):
        backend = plugins.load("backends", name)
        if "onnx" not in backend.capabilities.forms:
            left_out[name] = "does not take ONNX"
        elif not plugins.importable(backend):
            left_out[name] = "not installed in this environment"
        elif (reason := backend.refuse_target(Target(name="node-cases"))) is not None:
            left_out[name] = reason
        else:
            names.append(name)
    return names, left_out


def drawn(cases: list[Any], number: int) -> list[Any]:
    """So many cases at random; a larger number adds to what a smaller one has."""
    shuffled = list(cases)
    random.Random(0).shuffle(shuffled)
    return shuffled[:number]


class Log:
    """Findings as lines of JSON, each written when it is made, so that a run that is cut off goes on where it was."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows = (
            [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path and path.exists() else []
        )

    def known(self, backend: str, versions: str) -> tuple[dict[str, Finding], float]:
        """What these versions of a backend were found to do, by case, and the seconds that it took."""
        rows = [row for row in self._rows if (row["backend"], row["versions"]) == (backend, versions)]
        findings = {
            row["case"]: Finding(case=row["case"], found=Found(row["found"]), reason=row["reason"]) for row in rows
        }
        return findings, sum(row["s"] for row in rows)

    def add(self, backend: str, versions: str, finding: Finding, seconds: float) -> None:
        if self._path is None:
            return
        row = {"backend": backend, "versions": versions, "case": finding.case, "found": str(finding.found)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "reason": finding.reason, "s": round(seconds, 3)}) + "\n")


def shape_of(reason: str) -> str:
    """A reason without what differs from case to case, so that reasons of one kind are counted together."""
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", re.sub(r"'[^']*'|/\S+", "...", reason))[:150]


def main() -> None:
    names, left_out = suited()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", default=names)
    parser.add_argument("--only", nargs="*", default=[], help="parts of cases' names")
    parser.add_argument("--out", type=Path, help="a JSON file for every case of every backend")
    parser.add_argument("--sample", type=int, help="this many cases, drawn at random")
    parser.add_argument(
        "--log", type=Path, help="a file of findings: what it has is taken from it, what is new is added"
    )
    results.add_save_option(parser)
    chosen = parser.parse_args()
    cases = [case for case in collect() if not chosen.only or any(part in case.name for part in chosen.only)]
    if chosen.sample is not None:
        cases = drawn(cases, chosen.sample)
    log = Log(chosen.log)
    for name, reason in left_out.items():
        if name not in chosen.backends:
            print(f"{name} is left out: {reason}", file=sys.stderr)
    whole: dict[str, list[Finding]] = {}
    with results.recording("node-cases", chosen.save) as record:
        record.settings["threads"] = Target(name="node-cases").threads
        if chosen.only or chosen.sample is not None:
            record.settings["partial"] = True  # such a run does not take the place of a whole one on the page
        for name in chosen.backends:
            whole[name], row = judged(name, cases, log)
            record.rows.append(row)
        print_report(record.rows, whole)
    if chosen.out:
        named = {
            name: [{"case": one.case, "found": str(one.found), "reason": one.reason} for one in findings]
            for name, findings in whole.items()
        }
        chosen.out.write_text(json.dumps(named, indent=1), encoding="utf-8")
    raise SystemExit(any(one.found is Found.PASSED_WRONG for findings in whole.values() for one in findings))


def judged(name: str, cases: list[Any], log: Log) -> tuple[list[Finding], dict[str, Any]]:
    """The findings of one backend, those of the log first, and their numbers."""
    versions = ", ".join(f"{package} {of}" for package, of in plugins.load("backends", name).toolchain().items())
    known, seconds = log.known(name, versions)
    clock = time.monotonic()

    def keep(finding: Finding) -> None:
        nonlocal clock, seconds
        now = time.monotonic()
        log.add(name, versions, finding, now - clock)
        clock, seconds = now, seconds + now - clock

    fresh = run(name, [case for case in cases if case.name not in known], keep)
    findings = [known[case.name] for case in cases if case.name in known] + fresh
    counts = Counter(finding.found for finding in findings)
    numbers = {str(kind).replace(" ", "_"): counts[kind] for kind in Found}
    return findings, {
        "backend": name,
        "versions": versions,
        "cases": len(findings),
        **numbers,
        "seconds": round(seconds),
    }


def print_report(rows: list[dict[str, Any]], whole: dict[str, list[Finding]]) -> None:
    """The table, then each backend's reasons by how often they occur."""
    print(f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|", sep="\n")
    for row in rows:
        print(f"| {' | '.join(map(str, row.values()))} |")
    for name, findings in whole.items():
        print(f"\n{name}")
        reasons = Counter((one.found, shape_of(one.reason)) for one in findings if one.found is not Found.RIGHT)
        example = {(one.found, shape_of(one.reason)): one.case for one in reversed(findings)}
        for (kind, text), count in reasons.most_common():
            print(f"  {count:4d} {kind}: {text}   ({example[kind, text]})")


if __name__ == "__main__":
    main()
