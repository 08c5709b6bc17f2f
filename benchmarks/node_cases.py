"""Every case of the onnx package's operator tests through compile, session and verdict of every installed backend that takes ONNX.

    python benchmarks/node_cases.py                                   # all of them: about 1,900 cases, some minutes a backend on one core
    python benchmarks/node_cases.py openvino --only reduce cast       # parts of cases' names
    python benchmarks/node_cases.py --out cases.json                  # every case with its reason

Prints a table, and the reasons by how often they occur. Ends with 1 when a verdict passed an answer that NumPy finds wrong. Cases may end the process they
run in: they run in children forked one after another, each of which goes on behind the case at which the one before it died.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compile_stage.core import plugins
from compile_stage.core.records import Target
from compile_stage.testing.node_cases import Finding, Found, collect, judge

CHUNK = 200
"""Cases of one child: what they leave behind in a runtime does not pile up."""
PATIENCE_S = 60.0
"""A case that says nothing for so long has hung."""


def run(backend: str, cases: list[Any]) -> list[Finding]:
    """A finding for every case, those included at which a process died."""
    found: list[Finding] = []
    while len(found) < len(cases):
        waiting = cases[len(found) :][:CHUNK]
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
            found.append(finding)
            done += 1
            if finding.reason.startswith(("hung", "the process ended")):
                break
        ours.close()
        child.kill() if child.is_alive() and done < len(waiting) else None
        child.join()
        print(f"\r{backend}: {len(found)} of {len(cases)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def _child(name: str, cases: list[Any], answers: Connection) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)  # runtimes tell there what they also raise
    warnings.simplefilter("ignore")
    backend = plugins.load("backends", name)
    for case in cases:
        with TemporaryDirectory() as folder:
            answers.send(judge(backend, case, Path(folder)))


def _ended(code: int | None) -> str:
    return (
        f"the process ended with signal {-code}" if code is not None and code < 0 else f"the process ended with {code}"
    )


def suited() -> tuple[list[str], dict[str, str]]:
    """Backends that take ONNX and run here, and why the others don't."""
    names, left_out = [], {}
    for name in plugins.names("backends"):
        backend = plugins.load("backends", name)
        if "onnx" not in backend.forms:
            left_out[name] = "does not take ONNX"
        elif not plugins.importable(backend):
            left_out[name] = "not installed in this environment"
        elif (reason := backend.refuse_target(Target(name="node-cases"))) is not None:
            left_out[name] = reason
        else:
            names.append(name)
    return names, left_out


def shape_of(reason: str) -> str:
    """A reason without what differs from case to case, so that reasons of one kind are counted together."""
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", re.sub(r"'[^']*'|/\S+", "...", reason))[:150]


def main() -> None:
    names, left_out = suited()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", default=names)
    parser.add_argument("--only", nargs="*", default=[], help="parts of cases' names")
    parser.add_argument("--out", type=Path, help="a JSON file for every case of every backend")
    chosen = parser.parse_args()
    cases = [case for case in collect() if not chosen.only or any(part in case.name for part in chosen.only)]
    for name, reason in left_out.items():
        if name not in chosen.backends:
            print(f"{name} is left out: {reason}", file=sys.stderr)
    table = [f"| backend | cases | {' | '.join(Found)} | s |", "|---" * (len(Found) + 3) + "|"]
    whole: dict[str, list[dict[str, str]]] = {}
    told: list[str] = []
    for name in chosen.backends:
        began = time.monotonic()
        found = run(name, cases)
        counts = Counter(finding.found for finding in found)
        listed = " | ".join(str(counts[kind]) for kind in Found)
        versions = ", ".join(
            f"{package} {version}" for package, version in plugins.load("backends", name).toolchain().items()
        )
        table.append(f"| {name} ({versions}) | {len(found)} | {listed} | {time.monotonic() - began:.0f} |")
        whole[name] = [{"case": one.case, "found": str(one.found), "reason": one.reason} for one in found]
        told.append(f"\n{name}")
        reasons = Counter((one.found, shape_of(one.reason)) for one in found if one.found is not Found.RIGHT)
        example = {(one.found, shape_of(one.reason)): one.case for one in reversed(found)}
        told += [
            f"  {count:4d} {kind}: {text}   ({example[kind, text]})" for (kind, text), count in reasons.most_common()
        ]
    print("\n".join([*table, *told]))
    if chosen.out:
        chosen.out.write_text(json.dumps(whole, indent=1), encoding="utf-8")
    raise SystemExit(any(one["found"] == Found.PASSED_WRONG for rows in whole.values() for one in rows))


if __name__ == "__main__":
    main()
