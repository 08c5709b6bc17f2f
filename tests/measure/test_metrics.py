"""Every false pass that is known of others, tried here: each must fail, or be NOT_RUN, with its own reason."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_stage.core.records import Check, Gate, Outcome, Verdict, Waiver
from compile_stage.measure.metrics import SINGLE_CALL, ComparedSamples, apply_waivers, check_outputs

PASS, FAIL, NOT_RUN = Outcome.PASS, Outcome.FAIL, Outcome.NOT_RUN
MAX_ABS = Gate(metric="max_abs", limit=0.1, direction="at_most")
COSINE = Gate(metric="cosine", limit=0.99, direction="at_least")
AGREEMENT_95 = Gate(metric="agreement", limit=0.95, direction="at_least")
AGREEMENT = Gate(metric="agreement", limit=1.0, direction="at_least")
RANDOM = np.random.default_rng(0)
SCORES = RANDOM.normal(size=(40, 5)).astype(np.float32)


def check(
    candidate: dict[str, Any],
    baseline: dict[str, Any],
    *gates: Gate,
    labels: Any = None,
    min_samples: int = 32,
    real: bool = True,
) -> tuple[Check, ...]:
    samples = ComparedSamples(min_samples=min_samples, real=real, labels=labels)
    return check_outputs(gates or (MAX_ABS,), candidate, baseline, samples, batch_size=4, seed=0)


def passed(checks: tuple[Check, ...]) -> bool:
    return Verdict(checks=checks).passed


def one(checks: tuple[Check, ...], metric: str, output: str | None = None) -> Check:
    found = [c for c in checks if c.gate.metric == metric and (output is None or c.output == output)]
    assert len(found) == 1, [c.reason for c in checks]
    return found[0]


def test_a_faithful_candidate_passes_and_each_check_says_what_it_saw() -> None:
    checks = check({"y": SCORES + 1e-3}, {"y": SCORES}, MAX_ABS, COSINE)
    assert passed(checks)
    assert {c.gate.metric for c in checks} == {"samples", "outputs", "shape", "finite", "max_abs", "cosine"}
    found = one(checks, "max_abs")
    assert found.reason == "max_abs of output 'y' is 0.001 <= 0.1 over 40 samples"
    assert (found.samples, found.batch_size, found.output) == (40, 4, "y")
    assert found.measured == pytest.approx(1e-3, rel=1e-3)
    assert len(found.worst) == 5


def test_a_missed_limit_names_the_worst_samples() -> None:
    wrong = SCORES.copy()
    wrong[7] += 1
    wrong[3] += 2
    found = one(check({"y": wrong}, {"y": SCORES}), "max_abs")
    assert found.outcome is FAIL
    assert found.worst == (3, 7)
    assert "2 > 0.1" in found.reason


# --------------------------------------------------------------------------------------- things that must never be true


def test_no_samples_is_not_run() -> None:
    empty = SCORES[:0]
    checks = check({"y": empty}, {"y": empty}, MAX_ABS, AGREEMENT)
    assert {c.outcome for c in checks} == {NOT_RUN}
    assert not passed(checks)
    assert not passed(check({}, {}))
    assert "no samples" in checks[0].reason


def test_too_few_real_samples_is_not_run_and_shows_what_was_seen() -> None:
    checks = check({"y": SCORES[:31]}, {"y": SCORES[:31]})
    assert not passed(checks)
    assert one(checks, "samples").outcome is NOT_RUN
    found = one(checks, "max_abs")
    assert found.outcome is NOT_RUN
    assert found.measured == 0
    assert "31 real samples are fewer than the 32" in found.reason
    assert passed(check({"y": SCORES[:32]}, {"y": SCORES[:32]}))


def test_synthetic_samples_never_prove() -> None:
    checks = check({"y": SCORES}, {"y": SCORES}, real=False)
    assert not passed(checks)
    assert "synthetic" in one(checks, "max_abs").reason


def test_no_gates_is_no_pass() -> None:
    checks = check_outputs((), {"y": SCORES}, {"y": SCORES}, SINGLE_CALL, batch_size=1, seed=0)
    assert not passed(checks)
    assert one(checks, "covered").outcome is NOT_RUN


def test_a_lost_output_fails() -> None:
    checks = check({"y": SCORES}, {"y": SCORES, "z": SCORES})
    assert not passed(checks)
    assert one(checks, "outputs").outcome is FAIL
    assert "it lost 'z'" in one(checks, "outputs").reason
    assert one(checks, "max_abs", "z").outcome is NOT_RUN


def test_a_renamed_output_fails() -> None:
    checks = check({"Y": SCORES}, {"y": SCORES})
    assert one(checks, "outputs").outcome is FAIL
    assert one(checks, "outputs").measured == 2
    assert not passed(checks)


def test_an_extra_output_fails() -> None:
    checks = check({"y": SCORES, "debug": SCORES}, {"y": SCORES})
    assert one(checks, "outputs").outcome is FAIL
    assert not passed(checks)


def test_a_candidate_without_outputs_fails() -> None:
    assert not passed(check({}, {"y": SCORES}))
    assert not passed(check({"y": SCORES}, {}))


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (SCORES[:39], "39 samples, the baseline for 40"),
        (SCORES[:0], "0 samples"),  # 'all of nothing is within the tolerance'
        (np.concatenate([SCORES, SCORES]), "80 samples"),
        (SCORES[:, :4], r"\[4\]"),
        (SCORES[:, :1], r"\[1\]"),  # would broadcast
        (SCORES[:, :, None], r"\[5, 1\]"),
        (SCORES.mean(), "no axis"),
        (SCORES.astype(np.int64), "int64"),
    ],
)
def test_another_shape_count_or_kind_fails(own: Any, says: str) -> None:
    checks = check({"y": np.asarray(own)}, {"y": SCORES})
    found = one(checks, "shape")
    assert found.outcome is FAIL
    assert re.search(says, found.reason), found.reason
    assert one(checks, "max_abs").outcome is NOT_RUN
    assert not passed(checks)


def test_empty_outputs_fail() -> None:
    empty = np.zeros((40, 0), np.float32)
    checks = check({"y": empty}, {"y": empty})
    assert one(checks, "shape").outcome is FAIL
    assert "nothing to compare" in one(checks, "shape").reason
    assert not passed(checks)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_only_in_the_candidate_fails(poison: float) -> None:
    """max(|NaN|) is NaN, NaN > limit is false, and so a naive check passes."""
    bad = SCORES.copy()
    bad[11, 2] = poison
    for own, expected in ((bad, SCORES), (SCORES, bad)):
        checks = check({"y": own}, {"y": expected}, MAX_ABS, COSINE)
        found = one(checks, "finite")
        assert found.outcome is FAIL
        assert found.worst == (11,)
        assert one(checks, "max_abs").outcome is NOT_RUN
        assert not passed(checks)


def test_nan_where_the_baseline_has_it_is_left_out_and_noted() -> None:
    bad = SCORES.copy()
    bad[11, 2] = np.nan
    checks = check({"y": bad}, {"y": bad})
    assert passed(checks)
    assert "1 value is the same NaN" in one(checks, "finite").reason
    off = bad.copy()
    off[11, 3] += 1  # beside the NaN, and still seen
    assert one(check({"y": off}, {"y": bad}), "max_abs").outcome is FAIL


def test_nothing_finite_is_not_run() -> None:
    nothing = np.full((40, 2), np.nan, np.float32)
    assert one(check({"y": nothing}, {"y": nothing}), "max_abs").outcome is NOT_RUN


def test_a_dead_candidate_fails() -> None:
    """All zero against a baseline that is not."""
    checks = check({"y": np.zeros_like(SCORES)}, {"y": SCORES}, COSINE)
    assert one(checks, "cosine").measured == 0
    assert not passed(checks)


def test_an_output_that_no_gate_looks_at_is_not_run() -> None:
    labels = np.arange(40)
    checks = check({"y": SCORES, "label": labels}, {"y": SCORES, "label": labels}, MAX_ABS)
    found = one(checks, "covered", "label")
    assert found.outcome is NOT_RUN
    assert "agreement" in found.reason
    assert not passed(checks)
    assert passed(check({"y": SCORES, "label": labels}, {"y": SCORES, "label": labels}, MAX_ABS, AGREEMENT))


def test_wrong_labels_fail_agreement() -> None:
    labels = np.array(["cat", "dog"] * 20)
    other = labels.copy()
    other[5] = "cat"
    found = one(check({"label": other}, {"label": labels}, AGREEMENT), "agreement")
    assert found.outcome is FAIL
    assert found.measured == pytest.approx(39 / 40)
    assert found.worst == (5,)


def test_a_gate_on_an_output_that_is_not_there_is_not_run() -> None:
    gate = Gate(metric="max_abs", limit=1, direction="at_most", output="logits")
    checks = check({"y": SCORES}, {"y": SCORES}, gate, COSINE)
    assert one(checks, "max_abs").outcome is NOT_RUN
    assert "'logits'" in one(checks, "max_abs").reason
    assert not passed(checks)


def test_a_gate_on_an_output_takes_the_place_of_the_general_one() -> None:
    loose = Gate(metric="max_abs", limit=10, direction="at_most", output="y")
    checks = check({"y": SCORES + 1, "z": SCORES}, {"y": SCORES, "z": SCORES}, MAX_ABS, loose)
    assert passed(checks)
    assert one(checks, "max_abs", "y").gate is loose
    assert one(checks, "max_abs", "z").gate is MAX_ABS


@pytest.mark.parametrize("metric", ["max_abz", "python:no.such.module:f", "python:math:nope", "python:broken"])
def test_a_metric_that_can_not_run_is_not_run(metric: str) -> None:
    checks = check({"y": SCORES}, {"y": SCORES}, Gate(metric=metric, limit=1, direction="at_most"))
    assert one(checks, metric).outcome is NOT_RUN
    assert not passed(checks)


def test_own_metrics_run_fail_raise_and_return_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ourmetrics.py").write_text(
        "def sign(candidate, baseline, labels): return ((candidate > 0) == (baseline > 0)).mean()\n"
        "def raises(candidate, baseline, labels): raise RuntimeError('no GPU')\n"
        "def nan(candidate, baseline, labels): return float('nan')\n"
        "def nothing(candidate, baseline, labels): return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(name: str, own: Any = SCORES) -> Check:
        gate = Gate(metric=f"python:ourmetrics:{name}", limit=0.9, direction="at_least")
        return one(check({"y": own}, {"y": SCORES}, gate), gate.metric)

    assert run("sign").outcome is PASS
    assert run("sign", -SCORES).outcome is FAIL
    assert "no GPU" in run("raises").reason
    assert {run(name).outcome for name in ("raises", "nan", "nothing")} == {NOT_RUN}


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("def f(:\n", "SyntaxError"),
        ("raise RuntimeError('no key')\n", "no key"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    ],
    ids=["syntax", "raises", "exits"],
)
def test_an_own_metric_whose_module_fails_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, says: str
) -> None:
    """If it failed, a metric that can't be imported would end the run, with its own exit code: 0 means passed."""
    name = f"failing_{says.partition(':')[0].replace(' ', '_').lower()}"
    (tmp_path / f"{name}.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    gate = Gate(metric=f"python:{name}:f", limit=0.9, direction="at_least")
    found = one(check({"y": SCORES}, {"y": SCORES}, gate), gate.metric)
    assert found.outcome is NOT_RUN
    assert says in found.reason


def test_an_own_metric_that_fails_when_it_is_called_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it failed, an exception of any kind, or sys.exit(), on the samples or on a resample would end the run."""
    (tmp_path / "failingcalls.py").write_text(
        "import sys\n"
        "class Own(Exception): pass\n"
        "calls = []\n"
        "def exits(candidate, baseline, labels): sys.exit(0)\n"
        "def later(candidate, baseline, labels):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 1: raise Own('one class')\n"
        "    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    exits = Gate(metric="python:failingcalls:exits", limit=0.9, direction="at_least")
    later = Gate(metric="python:failingcalls:later", limit=0.9, direction="at_least", confidence=0.95)
    found = [one(check({"y": SCORES}, {"y": SCORES}, gate), gate.metric) for gate in (exits, later)]
    assert [one.outcome for one in found] == [NOT_RUN, NOT_RUN]
    assert "SystemExit" in found[0].reason
    assert "Own: one class" in found[1].reason


def test_class_metrics_look_at_scores_only_and_say_so_when_there_are_none() -> None:
    top = Gate(metric="top1_agreement", limit=0.99, direction="at_least")
    embedding = RANDOM.normal(size=(40,)).astype(np.float32)
    both = {"y": SCORES, "norm": embedding}
    checks = check(both, both, top, MAX_ABS)
    assert passed(checks)
    assert one(checks, "top1_agreement").output == "y"
    assert one(check({"norm": embedding}, {"norm": embedding}, top, MAX_ABS), "top1_agreement").outcome is NOT_RUN


def test_confidence_of_a_mean_holds_at_its_worse_end_and_others_have_none() -> None:
    other = np.arange(40)
    other[0] = 99
    gate = Gate(metric="agreement", limit=0.97, direction="at_least", confidence=0.95)
    found = one(check({"label": other}, {"label": np.arange(40)}, gate), "agreement")
    assert found.measured == pytest.approx(0.975)
    assert found.outcome is FAIL  # 39 of 40 does not show 97 %
    assert found.interval is not None
    assert found.interval[0] < 0.97 < found.interval[1]
    worst = Gate(metric="cosine", limit=0.9, direction="at_least", confidence=0.95)
    assert one(check({"y": SCORES}, {"y": SCORES}, worst), "cosine").outcome is NOT_RUN


@pytest.mark.parametrize(("width", "equal"), [(3, 2), (5, 4), (10, 9), (50, 49)])
def test_a_share_of_exactly_its_limit_holds(width: int, equal: int) -> None:
    """The mean of fifty times 0.9 is not 0.9 in float64: the verdict would say that 0.9 is less than 0.9. With a
    confidence it would be shown by fifty equal samples, which leave room for others."""
    baseline = np.zeros((50, width), np.int64)
    own = baseline.copy()
    own[:, equal:] = 1
    gate = Gate(metric="agreement", limit=equal / width, direction="at_least")
    assert passed(check({"y": own}, {"y": baseline}, gate))
    assert not passed(check({"y": own}, {"y": baseline}, replace(gate, limit=equal / width + 1e-9)))
    assert not passed(check({"y": own}, {"y": baseline}, replace(gate, confidence=0.95)))


@pytest.mark.parametrize("right", [96, 58, 30])
def test_a_drop_of_exactly_its_limit_is_allowed(right: int) -> None:
    """0.96 - 0.95 is more than 0.01 in float64: the verdict would say that a drop of 0.01 passes a limit of 0.01."""
    labels = np.arange(100) % 10
    baseline = np.where(np.arange(100) < right, labels, (labels + 1) % 10)
    own = baseline.copy()
    own[right - 1] = (own[right - 1] + 1) % 10
    gate = Gate(metric="accuracy", limit=0.01, direction="at_most", options={"drop": "max_drop"})
    assert passed(check({"y": own}, {"y": baseline}, gate, AGREEMENT_95, labels=labels))
    assert not passed(check({"y": own}, {"y": baseline}, replace(gate, limit=0.01 - 1e-9), AGREEMENT_95, labels=labels))


def test_an_exact_limit_of_a_distance_has_no_slack() -> None:
    """What is asked to be equal to the last bit would pass with the last bit lost."""
    gate = Gate(metric="max_abs", limit=0.0, direction="at_most")
    baseline = np.ones((40, 2))
    assert passed(check({"y": baseline}, {"y": baseline}, gate))
    assert not passed(check({"y": np.nextafter(baseline, 2)}, {"y": baseline}, gate))


def test_min_samples_counts_groups() -> None:
    """Broken: 40 frames of one video would prove as much as 40 videos."""
    for groups, outcome in ((np.arange(40) // 10, NOT_RUN), (np.arange(40), PASS)):
        samples = ComparedSamples(min_samples=5, real=True, groups=groups)
        checks = check_outputs((MAX_ABS,), {"y": SCORES[:40]}, {"y": SCORES[:40]}, samples, batch_size=1, seed=0)
        assert one(checks, "samples").outcome is outcome
        assert one(checks, "max_abs").outcome is outcome
    samples = ComparedSamples(min_samples=5, real=True, groups=np.arange(40) // 10)
    checks = check_outputs((MAX_ABS,), {"y": SCORES[:40]}, {"y": SCORES[:40]}, samples, batch_size=1, seed=0)
    assert "4 groups of 40 real samples are fewer than the 5" in one(checks, "samples").reason


def test_one_sample_has_no_interval() -> None:
    """All resamples of one sample are that sample: an interval of no width would claim that the next is like it."""
    gate = Gate(metric="agreement", limit=0.5, direction="at_least", confidence=0.95)
    own, baseline = np.array([[1, 1, 0]]), np.array([[1, 1, 1]])
    found = one(check({"y": own}, {"y": baseline}, gate, min_samples=1), "agreement")
    assert found.outcome is NOT_RUN
    assert "too few" in found.reason


def test_a_half_precision_output_is_a_float_all_the_same_and_the_change_is_said() -> None:
    checks = check({"y": SCORES.astype(np.float16)}, {"y": SCORES})
    assert passed(checks)
    assert "float32" in one(checks, "shape").reason


def test_memory_mapped_outputs_are_read_as_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", SCORES)
    mapped = np.load(tmp_path / "y.npy", mmap_mode="r")
    assert passed(check({"y": mapped}, {"y": mapped}, MAX_ABS, COSINE))


def test_large_outputs_are_never_held_whole(tmp_path: Path) -> None:
    """The stage's own process stays small, however large the outputs: pages of mapped files count as resident too."""
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", RANDOM.random((64, 400_000), dtype=np.float32))  # 102 MB
    program = """if True:
        import sys
        from compile_stage.core.records import Gate
        from compile_stage.measure.memory import peak_rss_bytes
        from compile_stage.measure.metrics import SINGLE_CALL, check_outputs
        from compile_stage.measure.predict import open_outputs
        gates = [Gate(metric=m, limit=1, direction="at_most") for m in ("max_abs", "cosine", "allclose", "agreement")]
        a, b = ({"y": open_outputs({"y": f"{sys.argv[1]}/{n}.npy"})["y"]} for n in "ab")
        before = peak_rss_bytes()
        check_outputs(gates, a, b, SINGLE_CALL, batch_size=1, seed=0)
        print(peak_rss_bytes() - before)
    """
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 120_000_000


@given(st.integers(0, 39), st.sampled_from([MAX_ABS, COSINE]))
def test_one_wrong_sample_is_found_wherever_it_is(index: int, gate: Gate) -> None:
    """An average over samples would hide it."""
    wrong = SCORES.copy()
    wrong[index] = -wrong[index]
    found = one(check({"y": wrong}, {"y": SCORES}, gate), gate.metric)
    assert found.outcome is FAIL
    assert found.worst == (index,)


# -------------------------------------------------------------------------------------------------------------- waivers


def waiver(gate: str, expires: str = "2030-01-31", target: str = "edge") -> Waiver:
    return Waiver(gate=gate, target=target, reason="known", owner="ml", expires=expires)


def test_a_waiver_lets_a_failure_through_by_name_until_its_last_day() -> None:
    checks = check({"y": SCORES + 1}, {"y": SCORES})
    held = apply_waivers(checks, [waiver("max_abs")], "edge", date(2030, 1, 31))
    assert one(held, "max_abs").outcome is FAIL
    assert one(held, "max_abs").waived == waiver("max_abs")
    assert passed(held)
    assert not passed(apply_waivers(checks, [waiver("max_abs")], "edge", date(2030, 2, 1)))
    assert not passed(apply_waivers(checks, [waiver("max_abs")], "server", date(2030, 1, 1)))
    assert not passed(apply_waivers(checks, [waiver("cosine")], "edge", date(2030, 1, 1)))


def test_no_waiver_reaches_what_is_broken_or_unknown() -> None:
    today = date(2030, 1, 1)
    lost = check({}, {"y": SCORES})
    assert not passed(apply_waivers(lost, [waiver("outputs"), waiver("max_abs")], "edge", today))
    few = check({"y": SCORES[:3] + 1}, {"y": SCORES[:3]})
    assert not passed(apply_waivers(few, [waiver("samples"), waiver("max_abs")], "edge", today))


# ---------------------------------------------------------------------------------------------- regressions and classes

SHIPPED = Gate(
    metric="accuracy",
    limit=0.01,
    direction="at_most",
    confidence=0.95,
    options={"drop": "max_drop", "classes_only": True},
)
PRICES = RANDOM.normal(size=(64, 1)).astype(np.float32)


@pytest.mark.parametrize("whole", [False, True])
def test_a_regression_with_labels_is_not_asked_for_accuracy_that_nobody_asked_for(whole: bool) -> None:
    """Broken: int8 of a regression could never pass, since the shipped limit on accuracy would be NOT_RUN for ever."""
    labels = np.arange(64.0) if whole else PRICES[:, 0].astype(np.float64)
    checks = check({"y": PRICES}, {"y": PRICES}, COSINE, SHIPPED, labels=labels)
    assert passed(checks)
    assert "left out" in one(checks, "samples").reason
    asked = Gate(metric="accuracy", limit=0.01, direction="at_most", options={"drop": "max_drop"})
    assert not passed(check({"y": PRICES}, {"y": PRICES}, COSINE, asked, labels=labels))


@pytest.mark.parametrize("outputs", ["scores", "labels", "single", "both"])
def test_a_classification_is_asked_for_accuracy(outputs: str) -> None:
    """Broken: the shipped limit would be left out where it is the one that counts."""
    truth = np.arange(320) % (2 if outputs == "single" else 5)
    scores = np.eye(5, dtype=np.float32)[truth] + 0.1
    right = {
        "scores": {"s": scores},
        "labels": {"l": truth},
        "single": {"p": truth.astype(np.float32)},
        "both": {"l": truth, "s": scores},
    }[outputs]
    gates = (SHIPPED, AGREEMENT, COSINE)
    found = one(check(right, right, *gates, labels=truth), "accuracy")
    assert found.outcome is PASS
    wrong = {name: value[::-1].copy() for name, value in right.items()}
    assert one(check(wrong, right, *gates, labels=truth), "accuracy").outcome is FAIL


def test_one_value_for_each_sample_is_compared_as_a_column() -> None:
    """Broken: the cosine of a single number is its sign, so a regression would pass however wrong, or fail for a value
    near zero."""
    near_zero = PRICES.copy()
    near_zero[3] = 1e-9
    rounded = near_zero + np.float32(1e-6)
    rounded[3] = -1e-6
    found = one(check({"y": rounded}, {"y": near_zero}, COSINE), "cosine")
    assert found.outcome is PASS
    assert found.measured == pytest.approx(1, abs=1e-6)
    squeezed = np.abs(PRICES) ** 3
    assert one(check({"y": squeezed}, {"y": np.abs(PRICES)}, COSINE), "cosine").outcome is FAIL
    assert one(check({"y": np.zeros_like(PRICES)}, {"y": PRICES}, COSINE), "cosine").measured == 0
    tiny = PRICES * np.float32(1e-30)
    assert one(check({"y": tiny}, {"y": tiny * 2}, COSINE), "cosine").measured == pytest.approx(1)


def test_a_reason_shows_by_what_a_limit_is_missed() -> None:
    """Broken: "cosine is 1 < 1" reads as a fault of the tool."""
    gate = Gate(metric="cosine", limit=1.0, direction="at_least")
    own = np.ones((64, 4)) + 3e-6 * np.eye(4)[np.arange(64) % 4]
    found = next(c for c in check({"y": own}, {"y": np.ones((64, 4))}, gate) if c.gate is gate)
    assert found.outcome is Outcome.FAIL
    assert found.reason.startswith("cosine of output 'y' is 1 − 8e-13 < 1 over 64 samples")
    gate = Gate(metric="max_abs", limit=0.1, direction="at_most")
    found = next(c for c in check({"y": np.full((64, 4), 0.100001)}, {"y": np.zeros((64, 4))}, gate) if c.gate is gate)
    assert "is 0.100001 > 0.1 over 64 samples" in found.reason
