"""What a run decides at its edges: waivers, promised shapes, missing data, a source that fails, targets that differ,
promotion."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_stage import api
from compile_stage.core import run_context
from compile_stage.core.digest import digest_file
from compile_stage.core.errors import GateError, IntegrityError
from compile_stage.core.records import Artifact, Candidate, Outcome, RunResult
from compile_stage.pipeline import run as pipeline
from compile_stage.report.summary import headline
from compile_stage.serving.manifest import sealed

pytestmark = [
    pytest.mark.usefixtures("fake_backends", "known_original"),
    pytest.mark.filterwarnings("ignore"),  # MLflow's own deprecations are not what is tested here
]

# How fast this machine is today is not what is tested here.
FAST = "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0}"
NO_SOAK = FAST.replace("soak_seconds: 0.2", "soak_seconds: 0")
Write = Callable[..., Path]


def run(model: Path, policy: Path, out: Path, **more: Any) -> RunResult:
    return api.run(f"folder:{model}", policy, out=out, **{"publish": False, **more})


def only(result: RunResult, backend: str) -> Candidate:
    return next(c for t in result.targets for c in t.candidates if c.job.backend == backend)


WAIVER = 'waivers: [{gate: cosine, target: cpu, reason: "known", owner: me, expires: 2099-12-31}]'
MISSED = "tolerances: {fp32: null, int8: {cosine: 1.0, mean_snr_db: null}}"


def test_what_passes_under_a_waiver_is_measured_like_any_other(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: a waived tolerance would take the limits on speed with it, since what missed it is not measured."""
    policy = write_policy(
        "backends: [onnxruntime], precisions: [int8]",
        "performance: {min_speedup: 1000}\nbudget: {measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}\n"
        f"{MISSED}\n{WAIVER}",
    )
    result = run(small_model, policy, tmp_path / "out")
    assert result.exit_code == 3
    for candidate in result.targets[0].candidates:
        assert candidate.measurement is not None
        assert result.targets[0].selection.reasons[candidate.job.id].startswith("min_speedup")


@pytest.mark.slow
def test_a_waiver_holds_for_verify_and_promote_as_long_as_it_says(
    small_model: Path, write_policy: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a version could be promoted by hand for ever under an exception that ended, or never be verified while it
    holds."""
    policy = write_policy("backends: [onnxruntime], precisions: [int8]", f"{NO_SOAK}\n{MISSED}\n{WAIVER}")
    result = run(small_model, policy, tmp_path / "out", publish=True)
    (target,) = result.targets
    assert target.bundle is not None
    assert target.receipt is not None
    assert target.bundle.tags["compile_stage.verdict"] == "passed under waivers"
    verified = api.verify(target.receipt.uri)
    assert verified.passed
    assert any("waiver of cosine" in note for note in verified.notes)
    assert api.promote(target.receipt.uri, "prod").promoted_to == "prod"

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Later:
            return cls(2100, 1, 1, tzinfo=tz or UTC)

    monkeypatch.setattr(run_context, "datetime", Later)
    assert not api.verify(target.receipt.uri).passed
    with pytest.raises(GateError, match="waiver of cosine that ended on 2099-12-31"):
        api.promote(target.receipt.uri, "other")


@pytest.mark.usefixtures("known_run")
def test_verify_believes_neither_the_manifest_nor_the_cache(
    small_model: Path, write_policy: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: whoever changes a file and its digest would be told that it is verified, since the verdict of the right
    file is cached."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)
    run(small_model, policy, tmp_path / "out")
    bundle = tmp_path / "out" / "bundles" / "cpu"
    monkeypatch.chdir(tmp_path)
    assert api.verify("out/bundles/cpu").passed  # a worker has another current folder
    graph = bundle / "data" / "artifact" / "model.onnx"
    _change_a_weight(graph)
    manifest = json.loads((bundle / "data" / "manifest.json").read_text())
    manifest["files"]["artifact/model.onnx"] = digest_file(graph)
    (bundle / "data" / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(IntegrityError, match="do not have the digest that was validated"):
        api.verify(str(bundle))


def _change_a_weight(path: Path) -> None:
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(path)
    values = numpy_helper.to_array(graph.graph.initializer[0])
    graph.graph.initializer[0].CopyFrom(numpy_helper.from_array(values * 2, graph.graph.initializer[0].name))
    onnx.save(graph, path)


def test_the_largest_batch_that_the_shapes_promise_is_proven(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: a policy's `max` of 32 rows would be a promise that nobody looked at."""
    shapes = "shapes: {x: {min: [1, 8], typical: [1, 8], max: [32, 8]}}"
    policy = write_policy(
        f"backends: [fake-large-batch, onnxruntime], precisions: [fp32], batch_sizes: [1, 8], {shapes}", NO_SOAK
    )
    result = run(small_model, policy, tmp_path / "out")
    target = result.targets[0]
    assert target.selection.winner == only(result, "onnxruntime").job.id
    assert "at the shape corner max (x 32x8)" in target.selection.reasons[only(result, "fake-large-batch").job.id]


def test_what_can_not_pass_is_not_asked_for_more(small_model: Path, write_policy: Write, tmp_path: Path) -> None:
    """Broken: copies of a few samples of an expensive network would cost half as much again for what changes no
    verdict, or a report would not tell what was left out."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", FAST)
    np.savez(tmp_path / "copies.npz", x=np.tile(np.eye(8, dtype=np.float32), (8, 1)))
    copies = f"data.validation.source=file:{tmp_path / 'copies.npz'}"
    result = run(small_model, policy, tmp_path / "out", sets=[copies])
    assert result.exit_code == 3
    verdict = only(result, "onnxruntime").verdict
    assert verdict is not None
    left_out = {c.gate.metric: c for c in verdict.checks if "were not looked at" in c.reason}
    assert left_out.keys() == {"permuted_batch", "robustness"}
    for check in left_out.values():
        assert check.outcome is Outcome.NOT_RUN
        assert "samples was not run: of 64 real samples 8 differ beyond rounding" in check.reason
    assert "repeatable" not in {check.gate.metric for check in verdict.checks}


def test_without_calibration_samples_only_what_needs_them_is_refused(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: a model that was logged without an example would have no fp32 either."""
    policy = write_policy("backends: [onnxruntime], precisions: [int8, fp32]", NO_SOAK)
    result = run(small_model, policy, tmp_path / "out", sets=["data.calibration.source=input_example"])
    assert result.exit_code == 0, result.problem
    states = {c.job.scheme.precision: c.reason if c.state == "refused" else None for c in result.targets[0].candidates}
    assert states["fp32"] is None
    assert "calibration" in (states["int8"] or "")


@pytest.mark.parametrize("by_chance", [True, False])
def test_an_original_that_does_not_repeat_its_answers_is_named(
    by_chance: bool, small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: a model with chance in it fails as if its artifact were wrong, and nobody looks at the model; or a
    deterministic one is called random."""
    import onnx
    from onnx import helper

    graph = onnx.load(small_model / "model.onnx")
    last = next(node for node in graph.graph.node if node.output[0] == "y")
    last.output[0] = "y_before"
    kind, options = ("RandomNormalLike", {"scale": 9.0}) if by_chance else ("Identity", {})
    graph.graph.node.append(helper.make_node(kind, ["y_before"], ["noise"], **options))
    graph.graph.node.append(helper.make_node("Add", ["y_before", "noise"], ["y"]))
    onnx.save(graph, small_model / "model.onnx")
    policy = write_policy(
        "backends: [onnxruntime], precisions: [fp32]", f"{NO_SOAK}\ntolerances: {{fp32: {{max_abs: 0}}}}"
    )
    for _ in range(2):  # the second time from the cache
        ran = run(small_model, policy, tmp_path / "out")
        candidate = only(ran, "onnxruntime")
        says = "the cause is the original: it does not repeat its answers (output 'y' of two equal calls differs by"
        assert (says in candidate.reason) is by_chance, candidate.reason
        assert (says in headline(ran)) is by_chance, "the last line of the terminal"


@pytest.mark.parametrize("sizes", [[4], [1, 4]])
def test_an_original_whose_rows_depend_on_each_other(
    sizes: list[int], small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: an exact artifact of such a model is refused as one that lies while it is timed or soaked, and at other
    batch sizes nobody is told that it is the model."""
    import onnx
    from onnx import helper, numpy_helper

    graph = onnx.load(small_model / "model.onnx")
    last = next(node for node in graph.graph.node if node.output[0] == "y")
    last.output[0] = "y_before"
    graph.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "rows"))
    graph.graph.node.append(helper.make_node("ReduceMean", ["y_before", "rows"], ["centre"]))
    graph.graph.node.append(helper.make_node("Sub", ["y_before", "centre"], ["y"]))
    onnx.save(graph, small_model / "model.onnx")
    policy = write_policy(f"backends: [onnxruntime], precisions: [fp32], batch_sizes: {sizes}", FAST)
    candidate = only(run(small_model, policy, tmp_path / "out"), "onnxruntime")
    if len(sizes) == 1:
        assert candidate.has_passed, candidate.reason
    else:
        assert "the cause is the original: its answer to a sample depends on the rest of the batch" in (
            candidate.reason or ""
        )


def test_an_original_that_fails_is_a_refused_source_with_a_report(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: an original that can't run would end as a bug of ours, with nothing for the CI job to show."""
    import onnx
    from onnx import helper, numpy_helper

    graph = onnx.load(small_model / "model.onnx")
    graph.graph.initializer.append(numpy_helper.from_array(np.array([1, 4], np.int64), "one_row"))
    graph.graph.node[2].output[0] = "y_wide"
    graph.graph.node.append(helper.make_node("Reshape", ["y_wide", "one_row"], ["y"]))
    onnx.save(graph, small_model / "model.onnx")
    policy = write_policy("backends: [onnxruntime], precisions: [fp32], batch_sizes: [2]", FAST)
    result = run(small_model, policy, tmp_path / "out")
    assert (result.status, result.exit_code) == ("refused", 5)
    assert "original model" in result.problem
    assert (tmp_path / "out" / "result.json").is_file()


def test_nothing_compiled_is_no_pass_even_where_nothing_was_required(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: a run that made nothing would be green."""
    policy = write_policy("required: false, backends: [fake-raises], precisions: [fp32]", FAST)
    result = run(small_model, policy, tmp_path / "out")
    assert (result.status, result.exit_code) == ("failed", 6)


def test_what_the_source_has_fixed_is_one_targets_trouble(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: a second target with a shape that the model can't take would throw the first one's proof away."""
    policy = write_policy(
        "backends: [onnxruntime], precisions: [fp32]",
        "  wide: {required: false, threads: 1, backends: [onnxruntime], "
        f"shapes: {{x: {{min: [1, 9], typical: [1, 9], max: [1, 9]}}}}}}\n{NO_SOAK}",
    )
    result = run(small_model, policy, tmp_path / "out")
    assert result.exit_code == 0, result.problem
    cpu, wide = result.targets
    assert cpu.selection.winner is not None
    assert wide.selection.winner is None
    assert "the policy asks for 9" in wide.selection.reason


@pytest.mark.slow
@pytest.mark.usefixtures("known_run")
def test_an_alias_stays_when_the_new_version_can_not_be_compared_with_the_old(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: a model that was retrained on other inputs would end the run as a wrong command line, after it was
    published."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", f"{FAST}\npromote: {{alias: prod}}")
    first = run(small_model, policy, tmp_path / "first", publish=True)
    assert first.targets[0].receipt is not None
    assert first.targets[0].receipt.promoted_to == "prod"
    other = _with_an_input_called(small_model, "features", tmp_path)
    np.savez(tmp_path / "data.npz", features=np.load(tmp_path / "data.npz")["x"])
    second = run(other, policy, tmp_path / "second", publish=True)
    assert second.exit_code == 3, second.problem
    assert "does not run on this run's samples" in second.problem
    assert second.targets[0].receipt is not None
    assert second.targets[0].receipt.created
    assert second.targets[0].receipt.promoted_to is None


@pytest.mark.usefixtures("known_run")
def test_a_failed_run_says_of_what_it_published_why_the_alias_stays(
    small_model: Path, write_policy: Write, tmp_path: Path
) -> None:
    """Broken: a version is published as passed, its alias does not move, and no report says why."""
    policy = write_policy(
        "backends: [onnxruntime], precisions: [fp32]",
        "  hard: {threads: 1, backends: [onnxruntime], precisions: [fp32], performance: {p95_latency_ms: 0.000001}}\n"
        f"{FAST}\npromote: {{alias: '{{target}}-prod'}}",
    )
    result = run(small_model, policy, tmp_path / "out", publish=True)
    assert result.exit_code == 3, result.problem
    receipt = result.targets[0].receipt
    assert receipt is not None
    assert receipt.promoted_to is None
    said = "alias 'cpu-prod' stays: the run failed, without a winner for hard, and so promotes nothing"
    assert said in receipt.note
    assert said in (tmp_path / "out" / "report.md").read_text()


def _with_an_input_called(model: Path, name: str, folder: Path) -> Path:
    import mlflow
    import onnx

    graph = onnx.load(model / "model.onnx")
    graph.graph.input[0].name = graph.graph.node[0].input[0] = name
    shutil.rmtree(model)
    mlflow.onnx.save_model(graph, str(model), pip_requirements=["onnx"])
    return model


@pytest.mark.slow
@pytest.mark.usefixtures("known_run")
def test_what_the_registry_already_holds_is_what_is_promoted(
    small_model: Path, write_policy: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a run that found a version of its inputs would move the alias there by what it measured of its own files;
    or, since its figures differ, never move it."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", f"{FAST}\npromote: {{alias: prod}}")
    first = run(small_model, policy, tmp_path / "first", publish=True, promote=False)
    assert first.targets[0].receipt is not None
    assert first.targets[0].receipt.promoted_to is None
    monkeypatch.setenv("COMPILE_STAGE_CACHE", str(tmp_path / "another-machine's"))
    looked_at: list[str] = []
    shipped = pipeline.shipped

    def watched(*arguments: Any) -> Artifact:
        found = shipped(*arguments)
        looked_at.append(found.path)
        return found

    monkeypatch.setattr(pipeline, "shipped", watched)
    second = run(small_model, policy, tmp_path / "second", publish=True)
    assert second.exit_code == 0, second.problem
    (target,) = second.targets
    assert target.receipt is not None
    assert not target.receipt.created
    assert target.receipt.promoted_to == "prod"
    assert target.winner is not None
    assert target.winner.artifact is not None
    assert looked_at != [target.winner.artifact.path]  # the published files, not this run's
