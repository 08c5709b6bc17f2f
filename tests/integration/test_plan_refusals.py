"""What is always refused is refused by `plan`, with the exit code of `run`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest

from compile_stage import api
from compile_stage.cli.main import main
from compile_stage.core.errors import CompileStageError
from compile_stage.core.records import Plan

pytestmark = [
    pytest.mark.usefixtures("known_original"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

FAST = (
    "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.5, soak_seconds: 0.2, predict_seconds: 0}\n"
    "fallback: {mixed_precision: false}"
)
ONE = "backends: [onnxruntime], precisions: [fp32]"
HEAD = "apiVersion: compile-stage/v1\nkind: OptimizationPolicy\nname: own\n"
Write = Callable[..., Path]


def both(model: Path, policy: Path, out: Path, *sets: str) -> tuple[int, str, int]:
    """(plan's exit code, its message, run's exit code)."""
    plan = None
    try:
        plan = api.plan(f"folder:{model}", policy, sets=sets)
        planned, message = plan.exit_code, plan.problem
        assert bool(message) == bool(planned)
        if planned:
            assert not plan.jobs
            assert {refusal.reason for refusal in plan.refused}
    except CompileStageError as error:
        planned, message = error.exit_code, str(error)
    try:
        result = api.run(f"folder:{model}", policy, out=out, publish=False, sets=sets)
        ran = result.exit_code
        if plan is not None and not plan.jobs:
            assert result.refused == plan.refused
            assert not [candidate for target in result.targets for candidate in target.candidates]
            assert not {"lower", "compile", "validate"} & {event.step for event in result.events}
    except CompileStageError as error:
        ran = error.exit_code
    return planned, message, ran


def leave(*arguments: str) -> object:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


@pytest.mark.parametrize(
    ("sets", "code", "says"),
    [
        ([], 0, ""),
        (["data.min_samples=100"], 3, "there are 64 validation samples, fewer than the 100"),
        (["data.validation.max_samples=8"], 3, "there are 8 validation samples, fewer than the 32"),
        (["data.validation.source=synthetic"], 3, "synthetic"),
        (["data.validation.labels=truth"], 2, "there are no labels 'truth' in the samples, which have 'x'"),
        (["data.groups=patient"], 2, "there are no groups 'patient' in the validation samples"),
        (["data.queries=patient"], 2, "there are no queries 'patient' in the validation samples"),
        (
            ["data.validation.source=file:{folder}/groups.npz", "data.groups=g"],
            3,
            "there are 3 groups of validation samples",
        ),
        (["data.validation.source=file:{folder}/other.npz"], 2, "the samples have no array for input 'x'"),
        (["data.validation.source=input_example"], 5, "logged without one"),
        (["data.validation.source=python:no_such_package.samples:make"], 2, "No module named 'no_such_package'"),
        (
            ["tolerances.fp32.outputs.Y.cosine=0.9"],
            3,
            "and the model has 'y', 'z', so it could not pass; did you mean 'y'?",
        ),
        (
            ["tolerances.fp32.topk_agreement={{limit: 0.9, k: 100}}"],
            3,
            "topk_agreement compares the 100 best classes (k)",
        ),
        (["tolerances.fp32.perplexity=0.1"], 3, "perplexity is asked of a language model, and no output of this model"),
        (["performance.ttft_p95_ms=100"], 3, "ttft_p95_ms is asked of a language model, and no output of this model"),
        (['tolerances.fp32."python:no_such_package.metrics:error"={{limit: 1, direction: at_most}}'], 3, "can't be"),
        (['tolerances.fp32."python:math:pi"={{limit: 1, direction: at_most}}'], 3, "python:math:pi is no function"),
        (
            ["data.validation={{source: 'file:{folder}/classes.npz', labels: c}}", "tolerances.fp32.mae=0.1"],
            3,
            "mae can't be measured: no output can be read for mae",
        ),
        (
            ["data.validation={{source: 'file:{folder}/classes.npz', labels: c}}", "tolerances.fp32.outputs.y.mae=0.1"],
            3,
            "mae can't be measured: no output can be read for mae",
        ),
        (
            [
                "data.validation={{source: 'file:{folder}/classes.npz', labels: many}}",
                "tolerances.fp32.outputs.z.accuracy=0.1",
            ],
            3,
            "the output has 2 classes and the labels have 4 values",
        ),
        (["tolerances.fp32=null", "tolerances.fp32={{agreement: 0.9}}"], 3, "no limit of fp32 looks at output 'y'"),
        (
            [
                "data.validation={{source: 'file:{folder}/classes.npz', labels: many}}",
                "tolerances.fp32=null",
                "tolerances.fp32={{outputs: {{y: {{accuracy: 0.1}}}}}}",
            ],
            3,
            "no limit of fp32 looks at output 'z'",
        ),
        (["targets.cpu.shapes.w={{min: [1, 8], typical: [1, 8], max: [8, 8]}}"], 5, "an input 'w' that the model does"),
    ],
    ids=[
        "fine",
        "too few",
        "too few taken",
        "synthetic",
        "no labels",
        "no groups",
        "no queries",
        "few groups",
        "no array",
        "no example",
        "no package of samples",
        "no output",
        "no classes",
        "no text",
        "no tokens",
        "no own metric",
        "no function",
        "no regression",
        "no regression of that output",
        "other classes",
        "no limit on floats",
        "no limit on one output",
        "no input",
    ],
)
def test_samples_that_can_prove_nothing_are_refused_by_plan(
    small_model: Path, write_policy: Write, tmp_path: Path, sets: list[str], code: int, says: str
) -> None:
    """Broken: plan says `run`, and an hour later the run says that it never could have passed; or result.json says that
    a model failed of which nothing was tried, since the policy is wrong."""
    np.savez(tmp_path / "other.npz", a=np.zeros((64, 8), np.float32), b=np.zeros((64, 8), np.float32))
    of_x, many = np.zeros((64, 8), np.float32), np.arange(64) % 4
    np.savez(tmp_path / "classes.npz", x=of_x, c=many % 2, many=many)
    np.savez(tmp_path / "groups.npz", x=np.zeros((64, 8), np.float32), g=np.arange(64) // 24)
    sets = [text.format(folder=tmp_path) for text in sets]
    planned, message, ran = both(small_model, write_policy(ONE, FAST), tmp_path / "out", *sets)
    assert (planned, ran) == (code, code)
    assert says in message
    if code in (2, 5):
        assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "refused"


@pytest.mark.parametrize(("source", "code"), [("synthetic", 3), ("file:{folder}/uneven.parquet", 2)])
def test_samples_that_can_prove_nothing_are_refused_before_the_export(
    small_model: Path, write_policy: Write, tmp_path: Path, source: str, code: int
) -> None:
    """Broken: a run exports the model first, 20 s and more of a text model, and refuses then."""
    pandas.DataFrame({"x": [[1.0] * (8 - row % 2) for row in range(64)]}).to_parquet(tmp_path / "uneven.parquet")
    chosen = f"data.validation.source={source.format(folder=tmp_path)}"
    planned, message, ran = both(small_model, write_policy(ONE, FAST), tmp_path / "out", chosen)
    assert (planned, ran) == (code, code)
    assert ("synthetic" if code == 3 else "the lists in column 'x' differ in length") in message
    events = json.loads((tmp_path / "out" / "result.json").read_text())["events"]
    assert not {"export", "sample"} & {event["step"] for event in events}


@pytest.mark.parametrize("key", ["validation.labels", "groups"])
def test_the_advice_on_labels_and_groups_holds_under_a_base(
    small_model: Path, write_policy: Write, tmp_path: Path, key: str
) -> None:
    """Broken: the advice is to leave out of the policy what its base says, and that leaves it as it is."""
    section, _, word = key.rpartition(".")
    write_policy(ONE, FAST).rename(tmp_path / "base.yaml")

    def plan(value: str) -> Plan:
        said = f"{section}: {{{word}: {value}}}" if section else f"{word}: {value}"
        (tmp_path / "middle.yaml").write_text(f"{HEAD}extends: [base.yaml]\ndata: {{{said}}}\n")
        return api.plan(f"folder:{small_model}", tmp_path / "middle.yaml")

    with pytest.raises(CompileStageError) as caught:
        plan("truth")
    assert f"or write `{word}: null` where" in caught.value.fix
    assert plan("null").exit_code == 0


def test_a_run_refuses_the_jobs_that_its_plan_refuses(
    small_model: Path, write_policy: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: plan says that nothing would run; the run says `2 jobs`, compiles both and lets them fail. Or a target
    that is not required, the only one, has another exit code."""
    optional = write_policy("required: false, backends: [onnxruntime], precisions: [fp32, int8]", FAST)
    out, few = tmp_path / "out", "data.min_samples=100"
    assert both(small_model, optional, out, few)[::2] == (3, 3)
    command = ("run", f"folder:{small_model}", "-p", str(optional), "--no-publish", "--out", str(out), "--set", few)
    capsys.readouterr()
    assert leave(*command) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "0 jobs, 2 refused" in said
    assert "fewer than the 100" in said
    candidates = json.loads((out / "result.json").read_text())["targets"][0]["candidates"]
    assert [one["state"] for one in candidates] == ["refused", "refused"]


def test_a_target_that_asks_for_a_batch_that_the_model_does_not_take_is_refused_by_plan(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: as above; and one target's trouble would be taken for all targets'."""
    import mlflow
    import onnx

    model = onnx.load(small_model / "model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    mlflow.onnx.save_model(model, str(tmp_path / "fixed"), pip_requirements=["onnx"])
    policy = write_policy(ONE, f"  more: {{batch_sizes: [1, 4], required: false, {ONE}}}\n{FAST}")
    plan = api.plan(f"folder:{tmp_path / 'fixed'}", policy)
    assert [job.target.name for job in plan.jobs] == ["cpu"]
    assert [(refusal.target, "batches of 1 only" in refusal.reason) for refusal in plan.refused] == [("more", True)]
    assert plan.exit_code == 0
    assert both(tmp_path / "fixed", policy, tmp_path / "out", "targets.cpu.batch_sizes=[2]")[::2] == (5, 5)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ("{min: [1, 8], typical: [1, 8], max: [4, 8]}", "fixed batch 1, the policy asks for batch 4"),
        ("{min: [1, 4], typical: [1, 8], max: [1, 8]}", "dimension 1 of input 'x' to 8, the policy asks for 4"),
        ("{min: [1, 8, 1], typical: [1, 8, 1], max: [1, 8, 1]}", "gives input 'x' 3 dimensions"),
    ],
)
def test_shapes_that_the_model_does_not_take_are_refused_by_plan(
    small_model: Path, write_policy: Write, tmp_path: Path, shape: str, says: str
) -> None:
    """Broken: `plan` ends with 0 for sizes that the file has fixed, and `run` with 5; or says to log an ONNX file with
    another input example, which opens nothing in it."""
    import mlflow
    import onnx

    model = onnx.load(small_model / "model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    mlflow.onnx.save_model(model, str(tmp_path / "fixed"), pip_requirements=["onnx"])
    policy = write_policy(ONE, FAST)
    planned, message, ran = both(tmp_path / "fixed", policy, tmp_path / "out", f"targets.cpu.shapes={{x: {shape}}}")
    assert (planned, ran) == (5, 5)
    assert says in message
    assert "input example" not in message


def keras(into: Path) -> None:
    into.mkdir()
    (into / "MLmodel").write_text("flavors:\n  keras: {data: data}\n  python_function: {loader_module: mlflow.keras}\n")


def pyfunc(into: Path) -> None:
    import mlflow

    class Model(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
        def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
            return model_input

    mlflow.pyfunc.save_model(str(into), python_model=Model(), pip_requirements=["mlflow"])


def text_columns(into: Path) -> None:
    pytest.importorskip("sklearn", reason="the model is a scikit-learn one")
    import mlflow
    import pandas as pd
    from sklearn.linear_model import LogisticRegression

    frame = pd.DataFrame({"word": ["a", "b"] * 8, "number": np.arange(16.0)})
    model = LogisticRegression().fit(frame[["number"]], [0, 1] * 8)
    signature = mlflow.models.infer_signature(frame, np.zeros(16, int))
    mlflow.sklearn.save_model(model, str(into), signature=signature, pip_requirements=["scikit-learn"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "says"), [(keras, "keras"), (pyfunc, "it marks no network to compile"), (text_columns, "word")]
)
def test_a_model_that_no_run_takes_is_refused_by_plan(
    write_policy: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], save: Callable[[Path], None], says: str
) -> None:
    """Broken: CI asks plan, is told that all is well, and the run refuses the model."""
    model = tmp_path / "model"
    save(model)
    np.savez(tmp_path / "data.npz", x=np.zeros((64, 8), np.float32))
    policy = write_policy(ONE, f"{FAST}\ncompliance: {{allow_pickle: true}}")
    assert leave("plan", f"folder:{model}", "-p", str(policy)) == 5
    assert says in capsys.readouterr().err
    assert api.run(f"folder:{model}", policy, out=tmp_path / "out", publish=False).exit_code == 5


def test_the_command_shows_the_plan_and_ends_with_the_runs_code(
    small_model: Path, write_policy: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: the table says refused, and a script goes on."""
    policy = write_policy(ONE, FAST)
    arguments = ["plan", f"folder:{small_model}", "-p", str(policy)]
    assert leave(*arguments) == 0
    assert leave(*arguments, "--set", "data.min_samples=65") == 3
    assert "a run would fail: required target 'cpu' can have no winner" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_plan_says_which_backend_does_not_take_the_graph_of_a_classifier(tmp_path: Path) -> None:
    """Broken: `plan` promised a job for each precision of OpenVINO, which knows no operator of ai.onnx.ml, and ended
    with 0; the run ended with 6."""
    sklearn = pytest.importorskip("mlflow.sklearn")
    tree = pytest.importorskip("sklearn.tree")
    from mlflow.models import infer_signature

    rows = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    labels = (rows[:, 0] > 0).astype(np.int64)
    model = tree.DecisionTreeClassifier(max_depth=3).fit(rows, labels)
    signature = infer_signature(rows, model.predict(rows))
    sklearn.save_model(
        model,
        tmp_path / "m",
        signature=signature,
        input_example=rows[:2],
        serialization_format="skops",
        skops_trusted_types=["sklearn.tree._tree.Tree"],
    )
    np.savez(tmp_path / "data.npz", input=rows, y=labels)
    policy = tmp_path / "p.yaml"
    policy.write_text(
        f"{HEAD}owner: o\ndata: {{validation: {{source: 'file:data.npz', labels: y}}}}\n"
        f"targets: {{cpu: {{device: cpu, backends: [openvino], precisions: [fp32], threads: 1}}}}\n{FAST}\n"
    )
    plan = api.plan(f"folder:{tmp_path / 'm'}", policy)
    assert not plan.jobs
    assert [one.reason for one in plan.refused if "TreeEnsembleClassifier" in one.reason]
    result = api.run(f"folder:{tmp_path / 'm'}", policy, out=tmp_path / "out", publish=False)
    assert (plan.exit_code, result.exit_code) == (6, 6), (plan.problem, result.problem)
    several = api.plan(f"folder:{tmp_path / 'm'}", policy, sets=["targets.cpu.backends=[onnxruntime, openvino]"])
    assert {job.backend for job in several.jobs} == {"onnxruntime"}
    assert several.exit_code == 0


def test_a_plan_says_which_backend_does_not_take_an_onnx_graph(tmp_path: Path) -> None:
    """Broken: `plan` promised a job of OpenVINO for an ONNX model with an operator of ai.onnx.ml, and the run refused
    it after the samples had been read and the original asked."""
    mlflow_onnx = pytest.importorskip("mlflow.onnx")
    from mlflow.models import infer_signature
    from onnx import TensorProto, helper

    rows = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    node = helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[0.5], scale=[2.0])
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 4])],
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=9)
    mlflow_onnx.save_model(model, tmp_path / "m", signature=infer_signature(rows, rows), input_example=rows)
    policy = tmp_path / "p.yaml"
    policy.write_text(
        f"{HEAD}owner: o\ndata: {{validation: {{source: input_example}}}}\n"
        "targets: {cpu: {device: cpu, backends: [onnxruntime, openvino], precisions: [fp32], threads: 1}}\n"
        f"{FAST}\n"
    )
    plan = api.plan(f"folder:{tmp_path / 'm'}", policy)
    assert {job.backend for job in plan.jobs} == {"onnxruntime"}
    assert [one.reason for one in plan.refused if "ai.onnx.ml.Scaler" in one.reason]
    assert plan.exit_code == 0
