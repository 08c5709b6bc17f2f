"""`result.json`: the fields that others read, and that every ending of a candidate fits the schema."""

from __future__ import annotations

import copy
import dataclasses
import json
from types import ModuleType

import jsonschema
import numpy as np
import pytest

from compile_stage.core.records import Gate, Measurement, Outcome, RunResult, Timing
from compile_stage.measure.performance import check_performance
from compile_stage.measure.published_figures import metrics_of
from compile_stage.report.result import result_document, result_json_schema, result_text, timing_summary


def validate(document: object) -> None:
    jsonschema.Draft202012Validator(result_json_schema()).validate(document)


def test_the_schema_is_itself_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(result_json_schema())


def test_every_way_to_end_fits_the_schema(result: RunResult) -> None:
    document = json.loads(result_text(result))
    validate(document)
    states = {c["state"] for target in document["targets"] for c in target["candidates"]}
    assert states == {"won", "lost", "failed", "refused"}


def test_a_run_that_was_refused_fits_the_schema(result: RunResult) -> None:
    refused = dataclasses.replace(
        result, status="refused", exit_code=5, targets=(), baseline={}, samples={}, events=(), problem="opaque pyfunc"
    )
    document = json.loads(result_text(refused))
    validate(document)
    assert document["problem"] == "opaque pyfunc"
    assert document["baseline"]["timing"] is None


def test_no_text_of_it_holds_a_secret(result: RunResult) -> None:
    """Broken: what is written into reports holds the password of a store; looked for in texts alone, among numbers."""
    url = "postgresql://user:s3cret@host/db"
    first = result.targets[0]
    won = first.candidates[0]
    assert won.measurement is not None
    measured = dataclasses.replace(won.measurement, notes=(url, f'said "{url}"'))
    candidates = (dataclasses.replace(won, measurement=measured), *first.candidates[1:])
    targets = (dataclasses.replace(first, candidates=candidates), *result.targets[1:])
    leaking = dataclasses.replace(result, problem=url, targets=targets)
    written = result_text(leaking)
    assert "s3cret" not in written
    assert written.count("postgresql://user@host/db") >= 3
    validate(json.loads(written))


def test_the_documented_names_are_there(result: RunResult) -> None:
    """These are the names that CI systems and dashboards were told about: losing one breaks them."""
    document = json.loads(result_text(result))
    assert document["schema"] == "compile-stage/result/v1"
    target = document["targets"][0]
    assert target["winner"] == "digits-cnn-1--cpu-server--openvino--int8-sym"
    assert target["reason"] is None
    assert {"uri", "version", "digest", "alias", "created"} <= set(target["receipt"])
    won = target["candidates"][0]
    assert won["kept"] == {"fp32": ["/fc/Gemm"]}
    assert won["cache"] == {"compile": "miss", "validate": "miss", "benchmark": "miss"}
    timing = won["timing"]["by_batch"]["1"]
    assert timing["throughput_per_s"] == pytest.approx(1 / timing["p50_s"])
    assert len(timing["samples_s"]) == 240
    check = won["verdict"]["checks"][2]
    assert (check["metric"], check["direction"], check["outcome"]) == ("accuracy", "at_most", "pass")
    assert check["interval"] == [-0.0028, 0.0083]
    assert document["baseline"]["timing"]["by_batch"]["1"]["speedup"] is None
    assert document["baseline"]["framework"] == "PyTorch (eager)"


def test_a_target_without_a_winner_says_why(result: RunResult) -> None:
    target = json.loads(result_text(result))["targets"][1]
    assert target["winner"] is None
    assert target["reason"] == "no candidate passed its gates"
    assert target["receipt"] is None


def test_a_percentile_that_the_samples_cannot_carry_is_null(result: RunResult) -> None:
    """A p99 out of 60 calls is one call's luck."""
    target = result_document(result)["targets"][0]
    slow = next(c for c in target["candidates"] if c["scheme"] == "int8-dynamic")
    timing = slow["timing"]["by_batch"]["1"]
    assert timing["p50_s"] is not None
    assert timing["p99_s"] is None


def test_a_percentile_is_given_where_its_gate_could_judge_it(result: RunResult) -> None:
    """Broken: the gate says that the calls can't carry a p95, and the reports and the registry show one."""
    random, target = np.random.default_rng(0), result.targets[0]
    gate = Gate(metric="p95_latency_ms", limit=1000, direction="at_most", unit="ms")
    for mood, known in ((0.0, True), (0.5, False)):  # whole rounds are slower, and their neighbours too
        moods = np.repeat(np.exp(mood * random.standard_normal(8)), 5)
        rounds = [0.001 * slow * np.exp(0.02 * random.standard_normal(40)) for slow in moods]
        calls = tuple(float(call) for turn in rounds for call in turn)
        timing = Timing(batch_size=1, latency_s=calls, rounds=40, turns=(40,) * 40, stable=True, environment="")
        measured = Measurement(timings=(timing,), load_s=0.1, peak_memory_bytes=1)
        (check,) = check_performance([gate], measured, None)
        assert (check.outcome is Outcome.PASS) is known, check.reason
        assert (timing_summary(timing)["p95_s"] is not None) is known
        assert timing_summary(timing)["p50_s"] is not None
        winner = dataclasses.replace(target.candidates[0], measurement=measured)
        assert ("latency_p95_ms.batch_1" in metrics_of(winner)) is known


def test_three_calls_carry_no_median(factory: ModuleType) -> None:
    measured = Measurement(timings=(factory.timing(0.001, 2.0, count=3),), load_s=0.1, peak_memory_bytes=1)
    target = factory.every_ending()
    first = dataclasses.replace(target.candidates[0], measurement=measured)
    made = factory.make_result(dataclasses.replace(target, candidates=(first,)))
    timing = result_document(made)["targets"][0]["candidates"][0]["timing"]["by_batch"]["1"]
    assert timing["p50_s"] is None
    assert timing["throughput_per_s"] is None
    validate(result_document(made))


def test_ten_thousand_timings_stand_on_one_line(result: RunResult) -> None:
    """One line a number made files of a million lines, which no editor opens and no diff shows."""
    text = result_text(result)
    assert len(text.splitlines()) < 1500
    assert text.endswith("}\n")
    assert json.loads(text) == result_document(result)


def test_what_was_measured_as_nan_is_a_string(result: RunResult) -> None:
    """Standard JSON has no NaN; a reader in another language must not choke on it, nor take it for zero."""
    text = result_text(result)
    check = json.loads(text)["targets"][1]["candidates"][0]["verdict"]["checks"][0]
    assert check["measured"] == "NaN"
    assert ": NaN" not in text


def test_a_plan_refusal_that_became_a_candidate_is_listed_once(factory: ModuleType) -> None:
    target = factory.every_ending()
    refused = dataclasses.replace(
        target.candidates[0],
        job=dataclasses.replace(target.candidates[0].job, id="digits-cnn-1--cpu-server--onnxruntime--bf16"),
        state="refused",
        reason="no bf16 here",
    )
    made = factory.make_result(dataclasses.replace(target, candidates=(*target.candidates, refused)))
    ids = [c["job_id"] for c in result_document(made)["targets"][0]["candidates"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    "path", [("schema",), ("status",), ("targets", 0, "winner"), ("targets", 0, "candidates", 0, "verdict")]
)
def test_the_schema_misses_no_field_that_others_read(result: RunResult, path: tuple[str | int, ...]) -> None:
    document = copy.deepcopy(json.loads(result_text(result)))
    owner = document
    for step in path[:-1]:
        owner = owner[step]
    del owner[path[-1]]
    with pytest.raises(jsonschema.ValidationError):
        validate(document)
