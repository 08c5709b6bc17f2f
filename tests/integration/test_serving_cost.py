"""A real model behind MLflow's own server, under load, in a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from compile_stage import api
from compile_stage.core.errors import UsageError
from compile_stage.core.records import Outcome, Serving
from compile_stage.report.result import result_json_schema

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own deprecations are not what is tested here

# No machine is so slow, or so busy, that 5 minutes are not held; what a p99 can show in so short a time is far less.
BODY = (
    "performance: {min_speedup: null, throughput_at_p99: 0.001}\n"
    "budget: {measure_seconds: 0.3, soak_seconds: 0, predict_seconds: 0}\n"
    "serving: {p99_ms: 300000, clients: [1, 3], instances: [1], seconds: 20, price_per_hour: 0.36}\n"
    # What a busy machine leaves too uncertain does not hide what is packaged.
    'waivers: [{gate: throughput_at_p99, target: cpu, reason: "busy", owner: me, expires: 2099-12-31}]'
)
# What `known_run` knows, and a rate, which is measured on any machine, in time or not.
RATE = (
    "performance: {min_speedup: null}\nbudget: {measure_seconds: 0.3, soak_seconds: 0.2, predict_seconds: 0}\n"
    "serving: {rates: [100], clients: [1], instances: [1], seconds: 1}"
)


@pytest.mark.slow
@pytest.mark.usefixtures("known_original")
def test_the_winner_is_served_under_load(small_model: Path, write_policy: Callable[..., Path]) -> None:
    """Broken: what serving costs is not measured where the policy asks, right answers count as wrong, or reports,
    the verdict and the manifest say nothing of it."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32], batch_sizes: [2]", BODY)
    result = api.run(f"folder:{small_model}", policy, out=policy.parent / "out", publish=False)
    (target,) = result.targets
    cost = target.serving
    assert cost is not None
    assert cost.reason == ""
    assert (cost.rows, cost.limit_s, cost.production) == (2, 300, None)
    assert "mlflow models serve: mlflow" in cost.server
    load = cost.winner
    assert load is not None
    kinds = [(point.kind, point.clients) for point in load.points[:4]]
    assert kinds == [("closed", 1), ("closed", 3), ("predict", 1), ("predict", 3)]
    for point in load.points:
        assert (point.wrong, point.errors) == (0, 0)
        assert point.requests > 0
        if point.p50_s is not None and point.p99_s is not None:
            assert 0 < point.p50_s <= point.p99_s
    assert load.points[0].server_cpu_s
    assert load.energy
    (candidate,) = target.candidates
    assert candidate.verdict is not None
    (check,) = [check for check in candidate.verdict.checks if check.gate.metric == "throughput_at_p99"]
    if check.outcome is Outcome.NOT_RUN:  # a slow or busy machine, and a waiver lets through what is known alone
        assert load.throughput_per_s is None or load.interval is None
        assert load.reason in check.reason
        assert check.waived is None
        assert (target.winner, target.bundle) == (None, None)
        assert result.exit_code == 3
    else:
        assert result.exit_code == 0, result.problem
        assert target.bundle is not None
        checks = target.bundle.manifest["verdict"]["checks"]
        (packaged,) = [one for one in checks if one["gate"]["metric"] == "throughput_at_p99"]
        assert packaged["outcome"] == check.outcome.value
        assert load.interval is not None
        assert load.throughput_per_s is not None
        low, high = load.interval
        assert load.requests >= 299
        assert low <= load.throughput_per_s <= high
        assert check.interval == load.interval
        if load.throughput_per_s:
            assert cost.cost_per_million == pytest.approx(0.36 / 3600 / (2 * load.throughput_per_s) * 1e6)
    written = json.loads((policy.parent / "out" / "result.json").read_text())
    jsonschema.validate(written, result_json_schema())
    assert written["targets"][0]["serving"]["winner"]["points"][0]["clients"] == 1
    assert "What serving costs" in (policy.parent / "out" / "report.html").read_text()
    assert "under load" in (policy.parent / "out" / "report.md").read_text()
    assert 'name="throughput_at_p99"' in (policy.parent / "out" / "junit.xml").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("known_run")
def test_serving_is_measured_once_and_by_hand(small_model: Path, write_policy: Callable[..., Path]) -> None:
    """Broken: each run of the same thing serves it again; or a bundle can't be measured by hand,
    or is answered from the cache."""
    policy = write_policy("backends: [onnxruntime], precisions: [fp32]", RATE)
    first, again = (
        api.run(f"folder:{small_model}", policy, out=policy.parent / "out", publish=False).targets[0] for _ in "12"
    )
    assert first.serving is not None
    assert first.serving.winner is not None, first.serving.reason
    assert [point.kind for point in first.serving.winner.points] == ["closed", "predict", "open"]
    assert again.serving == first.serving  # latencies too, which no two measurements share
    assert again.bundle is not None
    by_hand = Serving(rates=(100.0,), clients=(1,), instances=(1,), rows=3, seconds=1)
    found = api.load_test(again.bundle.path, by_hand)
    assert found.winner is not None, found.reason
    assert [point.kind for point in found.winner.points] == ["closed", "predict", "open"]
    assert found.rows == 3
    assert all((point.wrong, point.errors) == (0, 0) for point in found.winner.points)
    assert found.winner.points != first.serving.winner.points


def test_a_load_test_without_a_load_is_refused() -> None:
    """Broken: a command that measures nothing starts servers, and ends as if it had."""
    with pytest.raises(UsageError, match="no load is named"):
        api.load_test("models:/m/1", Serving())
