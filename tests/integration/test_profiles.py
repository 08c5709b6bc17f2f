"""Where the baseline and the winner spend their time: the runtimes' own profilers, in a run and by the command."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from command_line import command_line
from factories import policy_text

from compile_stage import api
from compile_stage.core.errors import UsageError
from compile_stage.core.records import Profile, Profiled, RunResult
from compile_stage.report.result import result_json_schema

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

WIDTH = 400
BODY = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}"


def write_planted(folder: Path) -> Path:
    """Write `folder/planted`, a small network with a useless large product planted into it, and 32 samples as
    `folder/data.npz`; returns the former.

    Conv → Relu → mean → x; x → LayerNormalization → y; x repeated to [64, 400], times [400, 400] → added to y, almost
    nothing of it.
    """
    import mlflow
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weights = {
        "kernel": rng.standard_normal((8, 3, 3, 3)).astype(np.float32),
        "bias": rng.standard_normal(8).astype(np.float32),
        "scale": np.ones(8, np.float32),
        "useless": (rng.standard_normal((WIDTH, WIDTH)) / WIDTH).astype(np.float32),
        "tiny": np.float32(1e-4),
        "axes": np.array([2, 3]),
        "columns": np.array([1]),
        "repeated": np.array([64, WIDTH]),
        "all": np.array([1, 2]),
    }
    nodes = [
        ("Conv", ["x", "kernel", "bias"], "c", {"pads": [1, 1, 1, 1]}),
        ("Relu", ["c"], "r", {}),
        ("ReduceMean", ["r", "axes"], "m", {"keepdims": 0}),
        ("LayerNormalization", ["m", "scale"], "n", {}),
        ("ReduceMean", ["m", "columns"], "one", {}),
        ("Unsqueeze", ["one", "columns"], "lifted", {}),
        ("Expand", ["lifted", "repeated"], "wide", {}),
        ("MatMul", ["wide", "useless"], "planted", {}),
        ("ReduceMean", ["planted", "all"], "left", {"keepdims": 0}),
        ("Mul", ["left", "tiny"], "nothing", {}),
        ("Unsqueeze", ["nothing", "columns"], "column", {}),
        ("Add", ["n", "column"], "y", {}),
    ]
    graph = helper.make_graph(
        [helper.make_node(op, inputs, [output], name=f"{output}_node", **more) for op, inputs, output, more in nodes],
        "planted",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    mlflow.onnx.save_model(model, str(folder / "planted"), pip_requirements=["onnx"])
    np.savez(folder / "data.npz", x=rng.standard_normal((32, 3, 8, 8)).astype(np.float32))
    return folder / "planted"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the planted model, its policy, and, in `cache`, what the run of `ran` left there."""
    folder = tmp_path_factory.mktemp("planted")
    write_planted(folder)
    target = "backends: [onnxruntime, openvino], precisions: [fp32]"
    (folder / "policy.yaml").write_text(policy_text(folder / "data.npz", target, BODY))
    return folder


@pytest.fixture(scope="module")
def ran(planted: Path) -> RunResult:
    """A run on ONNX Runtime that asks for profiles; its reports are in `out`."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOME", str(planted))
        environment.setenv("COMPILE_STAGE_CACHE", str(planted / "cache"))
        result = api.run(
            f"folder:{planted / 'planted'}", planted / "policy.yaml", publish=False, out=planted / "out",
            sets=["report.profile=true", "targets.cpu.backends=[onnxruntime]"],
        )  # fmt: skip
    assert result.exit_code == 0, result.problem
    return result


def profile_of(profiled: Profiled) -> Profile:
    assert profiled.profile is not None, profiled.reason
    return profiled.profile


def convolution(fusions: Any) -> list[tuple[str, str]]:
    """(kind, name) of the nodes that the convolution was fused of; elsewhere than on x86 its kernel is `FusedConv`."""
    return next(([(n.kind, n.name) for n in f.sources] for f in fusions if f.kind.endswith("Conv")), [])


@pytest.mark.slow
def test_a_planted_operator_is_at_the_top_of_baseline_and_winner(ran: RunResult, planted: Path) -> None:
    """Broken: the operator that takes nearly all of the time would not be the first that a report names, so people
    would optimise something else."""
    baseline, winner = ran.targets[0].profiles
    assert (baseline.name, winner.name) == ("baseline", ran.targets[0].selection.winner)
    for profiled in (baseline, winner):
        profile = profile_of(profiled)
        assert "ONNX Runtime" in profile.profiler
        assert (profile.operators[0].kind, profile.operators[0].sources[0].name) == ("MatMul", "planted_node")
        assert profile.operators[0].share > 0.5
        assert profile.operators[0].calls == profile.calls
        assert sum(operator.share for operator in profile.operators) == pytest.approx(1, abs=1e-6)
        assert convolution(profile.fusions) == [("Conv", "c_node"), ("Relu", "r_node")]
        if platform.machine() == "x86_64":  # only there in blocks of channels
            assert "ReorderOutput" in {operator.kind for operator in profile.conversions or ()}

    document = json.loads((planted / "out" / "result.json").read_text())
    jsonschema.Draft202012Validator(result_json_schema()).validate(document)
    models = document["targets"][0]["profiles"]["models"]
    for name, profiled in models.items():
        trace = json.loads((planted / "out" / profiled["trace"]).read_text())
        runs = [event for event in trace["traceEvents"] if event["name"] == "planted_node"]
        assert len(runs) == models[name]["profile"]["calls"]
        assert all(event["ph"] == "X" and event["dur"] >= 0 for event in runs)
    for report in ("report.html", "report.md"):
        text = (planted / "out" / report).read_text()
        shown = text[text.index("Hot operators") :]
        assert "planted" in shown
        assert "Conv c_node + Relu r_node → Conv" in shown.replace("\\_", "_")


@pytest.mark.slow
def test_the_command_profiles_what_is_only_compiled(
    ran: RunResult, planted: Path, isolated_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: who wants to know where the time goes would have to prove and measure everything first; or OpenVINO's
    layers would not name what they were fused of; or the table would not fit a terminal of 80 columns."""
    pytest.importorskip("openvino")
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(shutil.copytree(planted / "cache", isolated_home / "held")))
    uri, policy, out = f"folder:{planted / 'planted'}", str(planted / "policy.yaml"), str(isolated_home / "traces")
    asked = ("profile", uri, "-p", policy, "--backend", "openvino")
    done = command_line(*asked, "--json", "--out", out)
    assert done.returncode == 0, done.stderr
    models = json.loads(done.stdout)["targets"]["cpu"]["models"]
    assert [name.rpartition("--")[0] for name in models] == ["", "planted--cpu--openvino"]
    profile = models["planted--cpu--openvino--fp32"]["profile"]
    assert "OpenVINO" in profile["profiler"]
    assert "planted_node" in {node["name"] for node in profile["operators"][0]["sources"]}
    assert profile["operators"][0]["kind"] in ("MatMul", "FullyConnected")
    fused = [[node["name"] for node in fusion["sources"]] for fusion in profile["fusions"]]
    assert any({"c_node", "r_node"} <= set(names) for names in fused)
    assert {operator["kind"] for operator in profile["conversions"]} <= {"Reorder", "Convert", "Transpose"}
    assert (isolated_home / "traces" / models["planted--cpu--openvino--fp32"]["trace"]).is_file()

    table = command_line(*asked, columns=80)
    assert table.returncode == 0, table.stderr
    shown = table.stdout[table.stdout.index("target cpu") :]
    assert max(map(len, shown.splitlines())) <= 80
    assert "planted_node" in shown
    nothing = command_line("profile", uri, "-p", policy, "--backend", "tvm")
    assert nothing.returncode == 2
    assert "the policy has onnxruntime fp32, openvino fp32" in nothing.stderr


def test_a_published_version_is_profiled_with_its_original(ran: RunResult, planted: Path, isolated_home: Path) -> None:
    """Broken: where a model that serves spends its time could not be seen without its policy."""
    bundle = planted / "out" / "bundles" / "cpu"
    found = api.profile(str(bundle))
    (target,) = found.targets
    assert [profiled.name for profiled in target.profiles] == ["baseline", ran.targets[0].selection.winner]
    for profiled in target.profiles:
        assert profile_of(profiled).operators[0].sources[0].name == "planted_node"
    with pytest.raises(UsageError, match="one target and one backend"):
        api.profile(str(bundle), backends=["openvino"])


@pytest.mark.slow
@pytest.mark.usefixtures("fake_backends", "known_original")
def test_a_profiler_that_dies_changes_no_verdict(small_model: Path, write_policy: Callable[..., Path]) -> None:
    """Broken: a crash of a profiler would fail a candidate that passed, or end the run, or vanish from the report."""
    policy = write_policy("backends: [fake-dying-profiler], precisions: [fp32]", BODY)
    out = policy.parent / "out"
    result = api.run(f"folder:{small_model}", policy, out=out, publish=False, sets=["report.profile=true"])
    assert (result.exit_code, result.status) == (0, "passed")
    (target,) = result.targets
    assert target.winner is not None
    assert target.winner.verdict is not None
    assert target.winner.verdict.passed
    baseline, winner = target.profiles
    assert baseline.profile is not None
    assert winner.profile is None
    assert winner.reason.startswith("the profiler failed: ")
    assert (
        winner.reason
        in json.loads((out / "result.json").read_text())["targets"][0]["profiles"]["models"][winner.name]["reason"]
    )
    assert "No profile: the profiler failed" in (out / "report.md").read_text()
