"""What `import compile_stage` offers."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import compile_stage
from compile_stage import api
from compile_stage.core.errors import RegistryError, UsageError
from compile_stage.core.records import RunResult
from compile_stage.policy import layers
from compile_stage.report.notebook import NotebookResult
from compile_stage.report.result import result_text

FUNCTIONS = {"compare", "debug", "doctor", "lint", "plan", "promote", "rollback", "run", "validate", "verify"}


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    """Broken: a notebook's `compile_stage.run` would be an AttributeError, and help() empty."""
    assert set(compile_stage.__all__) >= FUNCTIONS
    assert set(compile_stage.__all__) <= set(dir(compile_stage))
    for name in set(compile_stage.__all__) - {"__version__"}:
        value = getattr(compile_stage, name)
        assert inspect.isfunction(value) or inspect.isclass(value), name
        assert (value.__doc__ or "").strip(), name
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        compile_stage.rnu  # type: ignore[attr-defined]  # noqa: B018


def test_the_names_that_type_checkers_read_are_the_same() -> None:
    stub = Path(str(compile_stage.__file__)).with_suffix(".pyi").read_text()
    assert {"__version__", *re.findall(r"import \w+ as (\w+)", stub)} == set(compile_stage.__all__)


def test_every_error_that_a_public_function_may_raise_can_be_caught_by_its_public_name() -> None:
    """Broken: a pipeline that wants to go on after a `GateError` must import from a module that no page names."""
    raised: set[str] = set()
    for name in compile_stage._FUNCTIONS:
        text = (getattr(compile_stage, name).__doc__ or "").partition("Raises:")[2]
        raised.update(re.findall(r"\b\w+Error\b", text))
    assert {"PolicyError", "GateError", "RegistryError"} <= raised
    assert raised <= set(compile_stage.__all__)
    base = compile_stage.CompileStageError
    assert all(issubclass(getattr(compile_stage, name), base) for name in compile_stage._ERRORS)


def test_the_api_names_all_that_it_offers() -> None:
    """Broken: who reads what may be called does not learn of a function that is there."""
    offered = set(re.findall(r"import \w+ as (\w+)", Path(str(api.__file__)).read_text()))
    assert offered == set(re.findall(r"`(\w+)`", api.__doc__ or ""))


def test_a_function_is_not_replaced_by_a_module_of_its_name() -> None:
    """Broken: the second `compile_stage.doctor()` would call a module."""
    package = Path(str(compile_stage.__file__)).parent
    modules = {path.stem for path in package.iterdir()}
    assert not set(compile_stage.__all__) & modules


def test_importing_it_imports_nothing_else() -> None:
    """Broken: the command line, and every program that only asks for the version, would wait for imports."""
    program = "import sys; before = set(sys.modules); import compile_stage; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [name for name in eval(done.stdout) if name.startswith("compile_stage")] == ["compile_stage"]


def test_a_notebook_shows_the_report_and_gets_a_table(result: RunResult) -> None:
    shown = NotebookResult.of(result)
    assert isinstance(shown, RunResult)
    html = shown._repr_html_()
    assert html.startswith("<iframe srcdoc=")
    assert "digits-cnn" in html
    table = shown.to_pandas()
    assert table.loc[0, ["target", "backend", "scheme", "state"]].tolist() == [
        "cpu-server",
        "openvino",
        "int8-sym",
        "won",
    ]
    assert table.loc[0, "speedup"] == 6.52
    assert set(table["state"]) == {"won", "lost", "failed", "refused"}


def test_compare_says_what_changed(result: RunResult, tmp_path: Path) -> None:
    """Broken: two runs a week apart could only be compared by eye, and noise would be taken for a change."""
    assert not compile_stage.compare(result, result).changed
    target = result.targets[0]
    winner = target.candidates[0]
    assert winner.measurement is not None
    slower = tuple(
        replace(timing, speedup=timing.speedup / 2, speedup_interval=tuple(end / 2 for end in timing.speedup_interval))
        for timing in winner.measurement.timings
        if timing.speedup and timing.speedup_interval
    )
    changed = replace(winner, measurement=replace(winner.measurement, timings=slower))
    after = replace(
        result, targets=(replace(target, candidates=(changed, *target.candidates[1:])), *result.targets[1:])
    )
    (tmp_path / "result.json").write_text(result_text(result))
    comparison = compile_stage.compare(tmp_path, after)
    assert (
        "cpu-server: openvino--int8-sym: slower beyond the noise: 6.52× -> 3.26× over the original, 0.50× of "
        in str(comparison)
    )
    assert comparison.regressed
    assert not compile_stage.compare(after, tmp_path).regressed
    unstable = replace(changed, measurement=replace(winner.measurement, timings=(replace(slower[0], stable=False),)))
    doubtful = replace(result, targets=(replace(target, candidates=(unstable, *target.candidates[1:])),))
    assert "an unstable measurement: speeds are not compared" in str(compile_stage.compare(result, doubtful))
    (tmp_path / "result.json").write_text(json.dumps({"schema": "another"}))
    with pytest.raises(UsageError, match="it is not a compile-stage/result/v1"):
        compile_stage.compare(tmp_path, result)


def test_a_run_reads_its_policy_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a file that is edited while a run begins: its report shows other values than it was judged by."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "apiVersion: compile-stage/v1\nkind: OptimizationPolicy\nname: p\ntargets: {cpu: {device: cpu}}\n"
    )
    opened: list[str] = []
    read_bytes = layers._read_bytes
    monkeypatch.setattr(layers, "_read_bytes", lambda path, chain: opened.append(path.name) or read_bytes(path, chain))
    with pytest.raises(RegistryError):
        api.run(f"folder:{tmp_path / 'absent'}", policy, out=tmp_path / "out")
    assert opened == ["policy.yaml"]
