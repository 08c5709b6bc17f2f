"""`lint` warns of limits that hold whatever a model answers, and reports begin with it."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from compile_stage.policy.layers import shipped
from compile_stage.policy.load import lint, load_policy

from .conftest import warnings

TODAY = date(2026, 6, 1)
ROOT = Path(__file__).parents[2]
TARGET = "targets: {t: {}}\n"


def one(path: Path) -> str:
    (warning,) = warnings(path, today=TODAY)
    assert load_policy(path, today=TODAY).warnings == (warning,)
    return warning


@pytest.mark.parametrize(
    ("limit", "column", "why"),
    [
        ("cosine: -1.0", 29, "cosine can't fail with this limit: unrelated answers have a cosine of 0; a number > 0"),
        ("max_abs: 1.0e+308", 30, "max_abs can't fail with this limit: no answer is that far off; a number < 1e+30"),
        ("top1_agreement: 0.0", 37, "top1_agreement can't fail with this limit: no answer is below 0; a number > 0"),
        ("max_rel: 1.0", 30, "max_rel can't fail with this limit: an answer of zeros has 1; a number < 1"),
        ("mean_snr_db: 0.0", 34, "mean_snr_db can't fail with this limit: an answer of zeros has 0 dB; a number > 0"),
        ("column_spread: 0.0", 36, "column_spread can't fail with this limit: a constant answer has 0; a number > 0"),
        ("column_nrmse: {limit: 2.0}", 43, "column_nrmse can't fail with this limit: an answer that stays at the mean"),
        ("topk_agreement: {limit: 0.0}", 45, "topk_agreement can't fail with this limit: no answer is below 0"),
        ("allclose: {rtol: 1.0}", 38, "allclose can't fail with this limit: an answer of zeros is within an rtol of 1"),
    ],
)
def test_a_limit_that_cannot_fail_is_a_warning(write, limit: str, column: int, why: str) -> None:
    """Broken: a policy could switch its gates off one by one, and nobody would be told."""
    path = write(TARGET + f"tolerances: {{int8: {{{limit}}}}}")
    assert lint([path]) == []
    metric = limit.partition(":")[0]
    assert one(path).startswith(f"p.yaml:5:{column}: targets.t.tolerances.int8.{metric}: {why}")


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ("min_speedup: 0.001", "what is 10 times as slow as the original holds it too; a number > 0.1; null says"),
        ("p95_latency_ms: 1.0e+9", "a call that takes 900 s is ended (budget.job_minutes); a number < 900000; null"),
        ("ttft_p95_ms: 1.0e+6", "a call that takes 900 s is ended (budget.job_minutes)"),
        ("tpot_p95_ms: 1.0e+6", "a call that takes 900 s is ended (budget.job_minutes)"),
        ("min_tokens_per_s: 1.0e-9", "a call that takes 900 s is ended (budget.job_minutes); a number > 0.0011"),
        ("max_memory_mb: 1.0e+6", "no process takes a terabyte; a number < 1e+06"),
        ("max_size_mb: 1.0e+9", "no artifact has a terabyte; a number < 1e+06"),
    ],
)
def test_a_gate_on_speed_or_size_that_cannot_fail_is_a_warning(write, limit: str, why: str) -> None:
    """Broken: a gate that any artifact holds stands in the policy, and a green run says that it held."""
    metric = limit.partition(":")[0]
    path = write(f"{TARGET}performance: {{{limit}}}")
    assert lint([path]) == []
    assert one(path).startswith("p.yaml:5:")
    assert f"targets.t.performance.{metric}: {metric} can't fail with this limit: {why}" in one(path)
    of_target = write(f"targets: {{t: {{performance: {{{limit}}}}}, u: {{}}}}\n")
    assert f"targets.t.performance.{metric}: {metric} can't fail" in one(of_target)
    assert not warnings(write(f"{TARGET}performance: {{{metric}: null}}"), today=TODAY)


def test_how_long_a_call_may_take_decides_which_gate_cannot_fail(write) -> None:
    """Broken: a limit of 1000 s is called weak where a call may take an hour."""
    path = write(f"{TARGET}budget: {{job_minutes: 60}}\nperformance: {{p95_latency_ms: 1.0e+6}}")
    assert not warnings(path, today=TODAY)


@pytest.mark.parametrize(
    ("limit", "direction", "count"),
    [("1.0e+30", "at_most", 1), ("-1.0e+30", "at_most", 0), ("-1.0e+30", "at_least", 1), ("5", "at_most", 0)],
)
def test_an_own_metric_that_cannot_fail_is_a_warning(write, limit: str, direction: str, count: int) -> None:
    """Broken: an own metric's limit may be anything."""
    path = write(f"{TARGET}tolerances: {{fp32: {{'python:a.b:c': {{limit: {limit}, direction: {direction}}}}}}}")
    assert len(warnings(path, today=TODAY)) == count


def test_a_task_metric_that_may_lose_half_is_a_warning(write) -> None:
    """Broken: an accuracy that may fall to a guess would look like a gate."""
    path = write(TARGET + "data: {validation: {labels: y}}\ntolerances: {int8: {accuracy: 0.9}}")
    assert "accuracy can't fail with this limit: a model that lost 0.9 of it is of no use" in one(path)


def test_few_samples_and_endless_waivers_are_warnings(write) -> None:
    """Broken: one sample, or an exception until 2999, would pass for proof."""
    assert one(write(TARGET + "data: {min_samples: 1}")).startswith("p.yaml:5:21: data.min_samples: 1 samples prove")
    waiver = "{gate: %s, target: t, reason: r, owner: o, expires: %s}"
    path = write(TARGET + f"waivers: [{waiver % ('cosine', '2999-12-31')}]")
    assert "the waiver holds for 974 years; a day within 366 days" in one(path)
    gates = "max_rel", "cosine", "column_nrmse", "column_spread", "top1_regret", "agreement"
    path = write(TARGET + "waivers: [" + ", ".join(waiver % (gate, "2026-07-01") for gate in gates) + "]")
    assert "every gate on fp32 of target 't' is waived, so whatever it answers passes" in one(path)


def test_a_weak_limit_of_an_output_and_of_a_base_is_located_once(write) -> None:
    """Broken: a limit by output would be a way around, and each target would repeat the warning of its base."""
    write("tolerances: {int8: {outputs: {y: {cosine: 0.0}}}}\ntargets: {}\n", "base.yaml")
    path = write("extends: [base.yaml]\ntargets: {a: {}, b: {}}\n")
    assert one(path).startswith("base.yaml:4:43: targets.b.tolerances.int8.outputs.y.cosine: cosine can't fail")


def test_shipped_policies_and_defaults_have_no_weak_limit(write) -> None:
    """Broken: every report would begin with warnings that nobody can mend."""
    assert load_policy(write(TARGET)).warnings == ()
    for path in sorted((ROOT / "policies").glob("*.yaml")):
        assert load_policy(path, base=True).warnings == (), path


@pytest.mark.parametrize("limit", ["wer: 0.6", "ece: 0.5", "ndcg: {max_drop: 0.7}", "coco_map: 0.5"])
def test_a_metric_of_a_task_that_may_lose_half_is_a_warning_too(write, limit: str) -> None:
    """Broken: a speech model that mishears every second word more would hold its gate."""
    path = write(TARGET + f"data: {{validation: {{labels: y}}}}\ntolerances: {{int8: {{{limit}}}}}")
    assert f"{limit.partition(':')[0]} can't fail with this limit: a model that lost" in one(path)


@pytest.mark.parametrize("key", ["groups", "queries"])
def test_the_labels_are_no_groups(write, key: str) -> None:
    """Broken: `lint` takes one column for both, and the run says that there is no such column."""
    path = write(TARGET + f"data: {{{key}: y, validation: {{source: input_example, labels: y}}}}")
    column = 10 + len(key)
    assert lint([path]) == [
        f"p.yaml:5:{column}: data.{key}: 'y' holds the labels already (data.validation.labels, p.yaml:5); a column of "
        "its own, or null"
    ]


def test_queries_and_groups_exclude_each_other(write) -> None:
    """Broken: one of the two would be dropped in silence, and intervals count the wrong units."""
    path = write(TARGET + "data: {groups: patient, queries: query}")
    (mistake,) = lint([path])
    assert "data.queries: data.groups is named too, and the queries are the groups" in str(mistake)


def test_a_target_without_any_limit_is_a_warning(write) -> None:
    """Broken: lint says ok, and every job of the target is refused."""
    path = write(TARGET)
    place = "--set tolerances.fp32=null"
    says = (
        "no limit is left on fp32, so every job of the target is refused; keep the limits of one of them, or name a "
        "precision that has some"
    )
    assert warnings(path, [place.removeprefix("--set ")], today=TODAY) == [f"{place}: targets.t.tolerances: {says}"]
    tried_anyway = ["tolerances.int8=null", "targets.t.precisions=[int8]"]
    assert warnings(path, tried_anyway, today=TODAY) == [], "fp32 has limits, and is tried whether or not it is named"
    assert "fp32" in one(write(f"{TARGET}tolerances: {{fp32: null}}"))
    assert warnings(path, ["tolerances.fp32=null", "targets.t.precisions=[bf16]"], today=TODAY) == []
    every = ", ".join(f"{metric}: null" for metric, _ in shipped().items("tolerances", "fp32"))
    (emptied,) = warnings(write(f"{TARGET}tolerances: {{fp32: {{{every}}}}}"), today=TODAY)
    assert "no limit is left on fp32" in emptied
    assert warnings(write(f"{TARGET}tolerances: {{fp32: {{{every}, outputs: {{y: {{cosine: 0.9}}}}}}}}")) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            TARGET + "data: {robustness: {factor: 1.0e+308}}",
            "p.yaml:5:29: data.robustness.factor: at 1.0e+308 times their tolerance gates prove next to nothing: "
            "unrelated answers pass in int8; a number < 100; the shipped one is 5",
        ),
        (
            TARGET + "promote: {max_slowdown: 1.0e+300}",
            "p.yaml:5:25: targets.t.promote.max_slowdown: a version that is 1.0e+300 times as slow would still take "
            "the alias; a number < 10; 1.1 is 10 % slower",
        ),
        (
            "promote: {max_slowdown: 10}",
            "p.yaml:4:25: promote.max_slowdown: a version that is 10 times as slow would still take the alias; a "
            "number < 10; 1.1 is 10 % slower",
        ),
    ],
)
def test_a_factor_that_leaves_nothing_of_a_limit_is_a_warning(write, text: str, says: str) -> None:
    """Broken: robustness, or the guard of an alias, is looked at and can't fail, and nobody is told."""
    assert warnings(write(text), today=TODAY) == [says]


def test_options_of_a_backend_that_no_target_uses_are_a_warning(write) -> None:
    """Broken: options under the wrong backend's name are accepted in silence, and change nothing."""
    target = "targets:\n  t: {backends: [onnxruntime], options: {openvino: {num_streams: 1}, onnxruntime: {}}}\n"
    path = write(target)
    assert lint([path]) == []
    assert one(path).startswith(
        "p.yaml:5:42: targets.t.options.openvino: the target does not use openvino, so its options change nothing"
    )
    assert not warnings(write("targets:\n  t: {options: {openvino: {num_streams: 1}}}\n"), today=TODAY)


def test_a_lock_on_a_target_that_is_not_there_is_a_warning(write) -> None:
    """Broken: a misspelt lock protects nothing, and nobody sees it."""
    path = write("locked: [targets.egde.threads, targets.edge.threads]\ntargets: {edge: {}}\n")
    assert lint([path]) == []
    assert one(path).endswith("one of: edge, or * for all of them; did you mean targets.edge.threads?")
    base = write("locked: [targets.edge.threads]\n")
    assert not warnings(base, today=TODAY), "the file that extends it may name the target"
