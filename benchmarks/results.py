"""Results of benchmarks as data: `--save` writes one JSON file for a run, and docs/benchmarks.md is made from these
files.

A file says what was measured (`rows`), by which command, of which commit, on which hardware, with which package
versions, when, and whether the machine was quiet. What is not known is null; nothing is guessed. `python
benchmarks/write_docs.py` makes the page.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results"
SCHEMA = "compile-stage/benchmark/v1"
KEYS = (
    "schema", "benchmark", "date", "command", "commit", "uncommitted_changes", "hardware", "versions", "quiet",
    "settings", "notes", "rows",
)  # fmt: skip
PACKAGES = (
    "mlflow", "numpy", "onnx", "onnxruntime", "onnxruntime-openvino", "openvino", "nncf", "torch", "transformers",
    "scikit-learn", "apache-tvm", "iree-base-compiler", "jax", "executorch", "litert-torch", "tensorrt",
)  # fmt: skip
QUIET_CORES = 0.25
"""A machine is quiet when other processes use fewer cores than this, in the two seconds before and after the run."""


@dataclass
class Recording:
    """What a benchmark fills in while it runs: one flat row for each figure, and the settings that have a say in it."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def add_save_option(parser: argparse.ArgumentParser) -> None:
    """`--save [FOLDER]`, the same for every benchmark."""
    parser.add_argument(
        "--save",
        nargs="?",
        const=FOLDER,
        type=Path,
        metavar="FOLDER",
        help="write the figures as JSON, with commit, hardware and versions; without FOLDER into benchmarks/results",
    )


def workspace(keep: Path | None, scratch: str, name: str) -> tuple[Path, dict[str, str]]:
    """A folder for one model's run, below `keep` if given; and an environment with a registry there and an empty
    cache, where Python keeps bytecode as it does for users."""
    work = (keep or Path(scratch)).absolute() / name
    work.mkdir(parents=True, exist_ok=True)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "MLFLOW_TRACKING_URI": f"sqlite:///{work}/mlflow.db",
        "COMPILE_STAGE_CACHE": tempfile.mkdtemp(dir=scratch),
    }
    return work, environment


@contextmanager
def checkout(commit: str, folder: Path) -> Iterator[Path]:
    """A commit of this repository in a folder, which is removed in the end."""
    _git("worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        write_bytecode(folder)
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def write_bytecode(folder: Path) -> None:
    """Compile the package in a checkout, as pip does when it installs one: where PYTHONDONTWRITEBYTECODE is set, each
    process would compile 300 modules anew, for 0.4 s."""
    compileall.compile_dir(folder / "compile_stage", quiet=2)


@contextmanager
def recording(benchmark: str, into: Path | None) -> Iterator[Recording]:
    """Collect rows; when the block ends without an error, has rows, and `into` is given, write them there as one
    file."""
    record = Recording()
    write_bytecode(ROOT)
    if into is None:
        yield record
        return
    before, state = _foreign_cores(), _commit()
    yield record
    if not record.rows:
        return
    after = _foreign_cores()
    path = into / f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}-{benchmark}.json"
    write(path, describe(benchmark, record, state, (before, after)))
    print(f"figures: {path}", file=sys.stderr)


def describe(
    benchmark: str, record: Recording, commit: tuple[str | None, bool | None], foreign_cores: tuple[float, float]
) -> dict[str, Any]:
    """The content of a file.

    Args:
        benchmark: Which table the figures belong to.
        record: The rows, settings and notes.
        commit: The code's commit and whether the checkout differs from it, as they were before the run.
        foreign_cores: How many cores other processes used before and after the run.
    """
    from compile_stage.core.digest import plain
    from compile_stage.core.environment import hardware, python_version

    machine = hardware()
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *without_folders(sys.argv[1:])]),
        "commit": commit[0],
        "uncommitted_changes": commit[1],
        "hardware": {**plain(machine), "fingerprint": machine.fingerprint},
        "versions": {"python": python_version(), **_versions()},
        "quiet": max(foreign_cores) < QUIET_CORES,
        "foreign_cores": [round(cores, 2) for cores in foreign_cores],
        "settings": record.settings,
        "notes": record.notes,
        "rows": record.rows,
    }


def without_folders(arguments: list[str]) -> list[str]:
    """The arguments without `--save FOLDER` and `--keep FOLDER`: a folder of this machine means nothing to a reader."""
    kept, after = [], False
    for argument in arguments:
        folder = after and not argument.startswith("-")
        after = argument in ("--save", "--keep")
        if not (after or folder or argument.startswith(("--save=", "--keep="))):
            kept.append(argument)
    return kept


def candidate_rows(network: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each candidate of the first target of a `result.json` that was compiled, at batch size 1."""
    rows = []
    for candidate in result["targets"][0]["candidates"]:
        if candidate["state"] == "refused":
            continue
        row = {
            "network": network,
            **{key: candidate[key] for key in ("backend", "scheme", "state", "reason", "compile_s")},
        }
        timing = (candidate["timing"] or {}).get("by_batch", {}).get("1")
        if timing and timing["speedup"]:
            low, high = timing["speedup_interval"]
            row |= {"speedup": timing["speedup"], "speedup_low": low, "speedup_high": high, "stable": timing["stable"]}
            row["peak_mb"] = candidate["timing"]["peak_memory_bytes"] / 1e6
            if timing["p50_s"] is not None:  # too few calls: it was pruned
                row["p50_ms"] = timing["p50_s"] * 1e3
        checks = (candidate["verdict"] or {"checks": []})["checks"]
        cosines = [c["measured"] for c in checks if c["metric"] == "cosine" and isinstance(c["measured"], float)]
        if cosines:
            row["cosine_distance"] = 1 - min(cosines)
        if candidate["size_bytes"] is not None:
            row["size_mb"] = candidate["size_bytes"] / 1e6
        rows.append({key: value for key, value in row.items() if value is not None})
    return rows


def write(path: Path, content: dict[str, Any]) -> None:
    """One row a line, so that a change of one figure is a change of one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({key: value for key, value in content.items() if key != "rows"}, indent=1, ensure_ascii=False)
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in content["rows"])
    path.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n', encoding="utf-8")


@dataclass(frozen=True)
class Run:
    """One file.

    Attributes:
        name: The file's name.
        content: Its JSON.
    """

    name: str
    content: dict[str, Any]

    @property
    def when(self) -> str:
        """Sorts runs by time: of figures that were converted, when they entered the repository decides within a day."""
        entered = self.content.get("entered") or {}
        return f"{self.content['date'][:10]} {entered.get('at') or self.content['date']}"

    @property
    def hardware(self) -> str:
        """The kind of hardware, in words that a reader compares by: `2 cores, AVX2`."""
        machine = self.content["hardware"]
        features = set(machine["features"])
        names = {
            "AVX2": {"avx2"} <= features and not {"avx512f"} & features,
            "AVX-512": {"avx512f"} <= features,
            "VNNI": bool({"avx512_vnni", "avx_vnni"} & features),
            # With the short vectors' too, and without AMX: an EPYC of 2024 or later, twice as fast as those before.
            "AVX-VNNI": {"avx512_vnni", "avx_vnni"} <= features and not {"amx_int8"} & features,
            "BF16": bool({"avx512_bf16", "amx_bf16", "bf16"} & features),
            "AMX": {"amx_int8"} <= features,
            "i8mm": {"i8mm"} <= features,
        }
        sets = " ".join(name for name, there in names.items() if there)
        gpus = [accelerator.partition(" (")[0] for accelerator in machine["accelerators"]]
        return ", ".join(filter(None, [f"{machine['cores']} cores", sets or machine["machine"], *gpus]))


def load(folder: Path = FOLDER) -> list[Run]:
    """All files of a folder, the oldest first."""
    paths = sorted(folder.glob("*.json"))
    runs = [Run(name=path.name, content=json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return sorted(runs, key=lambda run: run.when)


def problems(run: Run) -> list[str]:
    """What a file lacks; empty when it is complete."""
    missing = [f"{run.name}: no {key!r}" for key in KEYS if key not in run.content]
    if not missing and run.content["schema"] != SCHEMA:
        missing.append(f"{run.name}: schema {run.content['schema']!r} is not {SCHEMA!r}")
    if not missing and not run.content["rows"]:
        missing.append(f"{run.name}: no rows")
    if not missing and run.content["commit"] is None and "entered" not in run.content:
        missing.append(f"{run.name}: neither 'commit' nor 'entered' says which code was measured")
    return missing


def _foreign_cores() -> float:
    """Cores that are busy while this process waits for two seconds; time that a hypervisor took away counts."""
    shares = psutil.cpu_times_percent(interval=2.0)
    busy = 100.0 - shares.idle - getattr(shares, "iowait", 0.0)
    return max(0.0, busy / 100.0 * (psutil.cpu_count() or 1))


def _commit() -> tuple[str | None, bool | None]:
    """The checkout's commit, and whether tracked files differ from it; (None, None) outside of a checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return head, bool(changed)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed
