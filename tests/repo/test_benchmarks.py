"""docs/benchmarks.md is what the data files say, and a saved figure says what it was measured with."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmarks(monkeypatch):
    """Imports a module of benchmarks/, which is a folder of scripts and no package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_the_page_is_what_the_data_give():
    """Broken: a figure edited in the page, or new data without the page, so that readers see what nobody measured."""
    command = [sys.executable, str(ROOT / "benchmarks" / "write_docs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


def test_a_changed_figure_is_noticed(benchmarks, tmp_path):
    """Guards the test above."""
    write_docs, results = benchmarks("write_docs"), benchmarks("results")
    for run in results.load():
        content = json.loads(json.dumps(run.content))
        if content["benchmark"] == "products":
            content["rows"][0]["int8_over_float32"] += 1
        results.write(tmp_path / run.name, content)
    assert any("docs/benchmarks.md" in problem for problem in write_docs.outdated(folder=tmp_path))


def test_the_newest_run_of_a_machine_is_shown_and_other_machines_stay(benchmarks, tmp_path):
    """Broken: figures of a version long gone stand where a newer run of the same machine is there."""
    write_docs, results = benchmarks("write_docs"), benchmarks("results")
    old = next(run for run in results.load() if run.content["benchmark"] == "products")
    newer = {**old.content, "date": "2100-01-01T00:00:00+00:00", "commit": "0" * 40}
    other = {**newer, "hardware": {**newer["hardware"], "cores": 64}}
    newer["rows"] = [{**row, "int8_over_float32": 9.87} for row in newer["rows"]]
    for name, content in (("old", old.content), ("newer", newer), ("other", other)):
        results.write(tmp_path / f"{name}.json", content)
    page = write_docs.Page(results.load(tmp_path))
    shown = {
        (figure.hardware, figure.row["int8_over_float32"]) for figure in page.newest("products", by=("length", "heads"))
    }
    assert {ratio for hardware, ratio in shown if hardware.startswith("2 cores")} == {9.87}
    assert len({ratio for hardware, ratio in shown if hardware.startswith("64 cores")}) > 1


def test_an_incomplete_file_is_noticed(benchmarks, tmp_path):
    """Broken: figures whose hardware nobody knows stand in a table of figures that can be compared."""
    write_docs, results = benchmarks("write_docs"), benchmarks("results")
    [run, *_] = results.load()
    results.write(tmp_path / run.name, {key: value for key, value in run.content.items() if key != "hardware"})
    assert write_docs.outdated(folder=tmp_path) == [f"{run.name}: no 'hardware'"]


def test_a_saved_run_says_what_it_was_measured_with(benchmarks, tmp_path, monkeypatch):
    """Broken: a figure that nobody can measure again, since its command, commit, machine or versions are lost."""
    results = benchmarks("results")
    monkeypatch.setattr(results, "_foreign_cores", lambda: 0.0)
    monkeypatch.setattr(sys, "argv", ["benchmarks/int8.py", "bert6", "--save", str(tmp_path), "--seconds", "5"])
    with results.recording("int8", tmp_path) as record:
        record.rows.append({"network": "bert6", "p50_ms": 1.0})
    [run] = results.load(tmp_path)
    assert results.problems(run) == []
    assert run.content["command"] == "python benchmarks/int8.py bert6 --seconds 5"
    assert run.content["hardware"]["fingerprint"]
    assert {"python", "numpy", "onnxruntime"} <= set(run.content["versions"])
    assert run.content["quiet"] is True
    assert run.content["rows"] == [{"network": "bert6", "p50_ms": 1.0}]


def test_a_run_of_uncommitted_code_says_so(benchmarks, tmp_path, monkeypatch):
    """Broken: figures of a change that was never committed carry the commit before it."""
    results = benchmarks("results")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "code"]):
        (tmp_path / "code.py").write_text("before")
        identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True)
    commit, changed = results._commit()
    assert len(commit) == 40
    assert changed is False
    (tmp_path / "code.py").write_text("after")
    assert results._commit() == (commit, True)


def test_a_busy_machine_is_not_called_quiet(benchmarks, monkeypatch):
    """Broken: a latency that was taken beside other work is compared with one that was not."""
    results = benchmarks("results")
    content = results.describe("int8", results.Recording(), ("0" * 40, False), (0.0, 1.5))
    assert content["quiet"] is False


def test_a_run_with_an_error_saves_nothing(benchmarks, tmp_path, monkeypatch):
    """Broken: half of a benchmark's rows take the place of a whole run on the page."""
    results = benchmarks("results")
    monkeypatch.setattr(results, "_foreign_cores", lambda: 0.0)

    def measure():
        with results.recording("int8", tmp_path) as record:
            record.rows.append({"network": "bert6"})
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        measure()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "script",
    [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "ArgumentParser" in path.read_text("utf-8")],
    ids=lambda path: path.name,
)
def test_every_benchmark_can_save(script):
    """Broken: a figure that can only be copied by hand."""
    # The page; all the others; no figures; the option itself.
    without = {"write_docs.py", "goals.py", "light_models.py", "results.py"}
    assert script.name in without or "add_save_option(parser)" in script.read_text("utf-8")
