"""`locked:` keeps later layers from changing what a base decided."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compile_stage.policy.explain import explain
from compile_stage.policy.load import load_policy, read_policy

TODAY = date(2026, 6, 1)
BASE = """\
locked: [compliance, tolerances.int8, performance.min_speedup]
compliance: {allowed_backends: [onnxruntime]}
tolerances: {int8: {cosine: 0.995}}
"""
TEAM = "extends: [base.yaml]\ntargets: {edge: {}}\n"


def said(path: Path | str, *sets: str) -> list[str]:
    return [str(problem) for problem in read_policy(path, sets, today=TODAY).problems]


def by(line: str, path: str, kept: str) -> str:
    return f"{line}: {path}: is locked by base.yaml:4: it must stay {kept}; leave it out, or have base.yaml changed"


# What a team's file adds after its six lines of head and TEAM, and what is said of it.
CHANGES = {
    "a default": (
        "compliance: {allow_pickle: true}",
        by("p.yaml:6:28", "compliance.allow_pickle", "`false` (compile_stage/policy/defaults.yaml:N)"),
    ),
    "a list": (
        "compliance: {allowed_backends: [onnxruntime, openvino]}",
        by("p.yaml:6:32", "compliance.allowed_backends", "`[onnxruntime]` (base.yaml:5)"),
    ),
    "a looser limit": (
        "tolerances: {int8: {cosine: 0.5}}",
        by("p.yaml:6:29", "tolerances.int8.cosine", "`0.995` (base.yaml:6)"),
    ),
    "a stricter limit": (
        "tolerances: {int8: {max_rel: 0.1}}",
        by("p.yaml:6:30", "tolerances.int8.max_rel", "unset"),
    ),
    "a limit taken away": (
        "performance: {min_speedup: null}",
        by("p.yaml:6:28", "performance.min_speedup", "`1.0` (compile_stage/policy/defaults.yaml:N)"),
    ),
    "a precision taken away": (
        "tolerances: {int8: null}",
        by("p.yaml:6:20", "tolerances.int8", "as it is (base.yaml:6)"),
    ),
}


@pytest.mark.parametrize(("text", "message"), CHANGES.values(), ids=CHANGES)
def test_a_later_file_can_not_change_what_is_locked(write, text: str, message: str) -> None:
    """Broken: a team loosens what the organisation's base demands, and nobody is told."""
    write(BASE, "base.yaml")
    assert [re.sub(r"(defaults\.yaml):\d+", r"\1:N", problem) for problem in said(write(TEAM + text))] == [message]


def test_neither_can_a_targets_own_section_nor_set(write) -> None:
    """Broken: the lock holds at the top, and `targets.edge.tolerances` walks around it."""
    write(BASE, "base.yaml")
    own = write("extends: [base.yaml]\ntargets: {edge: {tolerances: {int8: {cosine: 0.5}}}}\n", "own.yaml")
    path = "targets.edge.tolerances.int8.cosine"
    assert said(own) == [by("own.yaml:5:46", path, "`0.995` (base.yaml:6)")]
    for key in ("tolerances.int8.cosine", path):
        place = f"--set {key}=0.5"
        assert said(write(TEAM), f"{key}=0.5") == [by(place, key, "`0.995` (base.yaml:6)")]
        assert said(write(TEAM), f"{key}=0.995") == []
    assert said(write(TEAM), "locked=[]") == ["--set locked=[]: locked: can't be set here; change it in the file"]


def test_a_lock_holds_through_files_between_and_can_not_be_taken_away(write) -> None:
    """Broken: a file in the middle says `locked: []`, and those above it are free."""
    write(BASE, "base.yaml")
    write("extends: [base.yaml]\nlocked: [budget]\n", "middle.yaml")
    path = write(
        "extends: [middle.yaml]\nlocked: []\ntargets: {edge: {}}\ncompliance: {allow_pickle: true}\nbudget: {minutes: "
        "5}\n"
    )
    assert [problem.partition(": it must")[0] for problem in said(path)] == [
        "p.yaml:7:28: compliance.allow_pickle: is locked by base.yaml:4",
        "p.yaml:8:19: budget.minutes: is locked by middle.yaml:5",
    ]


def test_another_task_metric_does_not_push_a_locked_one_out(write) -> None:
    """Broken: naming r2 drops the shipped limit on accuracy, locked or not."""
    write("locked: [tolerances.int8.accuracy]\ndata: {validation: {source: input_example, labels: y}}", "base.yaml")
    assert said(write(TEAM + "tolerances: {int8: {cosine: 0.5}}")) == []
    (problem,) = said(write(TEAM + "tolerances: {int8: {r2: 0.1}}"))
    assert "targets.edge.tolerances.int8.accuracy: is locked by base.yaml:4" in problem


def test_what_is_not_locked_and_what_is_equal_may_be_said(write) -> None:
    """Broken: a lock costs more than it protects."""
    write(BASE, "base.yaml")
    text = (
        "tolerances: {int8: {cosine: 0.995, agreement: 0.98}, fp16: {cosine: 0.9}}\nperformance: {min_speedup: 1.0, "
        "max_size_mb: 5}\n"
    )
    free = load_policy(write(TEAM + text), today=TODAY)
    write(BASE.partition("\n")[2], "base.yaml")
    assert load_policy(write(TEAM + text), today=TODAY).digest == free.digest


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("complience", "'complience' is not a key that can be locked; one of: owner, applies_to,"),
        ("compliance.allow_pikle", "did you mean compliance.allow_pickle?"),
        ("tolerances.int8.cosin", "did you mean tolerances.int8.cosine?"),
        ("locked", "is not a key that can be locked"),
        ("extends", "is not a key that can be locked"),
    ],
)
def test_a_lock_on_nothing_is_a_mistake(write, entry: str, says: str) -> None:
    """Broken: a typing error in `locked` protects nothing, in silence."""
    (problem,) = said(write(f"locked: [{entry}]\ntargets: {{t: {{}}}}"))
    assert problem.startswith("p.yaml:4:10: locked[0]: ")
    assert says in problem


def test_explain_shows_what_is_locked(write) -> None:
    """Broken: nobody sees before the error which values are not theirs to change."""
    write(BASE, "base.yaml")
    rows = {row.path: row.locked_by for row in explain(write(TEAM), today=TODAY)}
    assert rows["compliance.allow_pickle"] == rows["targets.edge.tolerances.int8.cosine"] == "base.yaml:4"
    assert rows["targets.edge.tolerances.fp16.cosine"] == rows["targets.edge.performance.max_size_mb"] == ""
    assert {row.path: row.locked_by for row in explain("base.yaml")}["tolerances.int8.cosine"] == "base.yaml:4"


LEAVES = {
    "compliance.allow_pickle": [True, False],
    "compliance.allowed_backends": [None, ["onnxruntime"], ["openvino"]],
    "performance.min_speedup": [None, 1.0, 1.5],
    "tolerances.int8.cosine": [None, 0.9, 0.99],
    "tolerances.int8.max_rel": [None, 0.1],
    "budget.minutes": [5, 60],
}
LAYER = st.dictionaries(st.sampled_from(sorted(LEAVES)), st.integers(0, 2), max_size=4).map(
    lambda chosen: {path: LEAVES[path][at % len(LEAVES[path])] for path, at in chosen.items()}
)
LOCKS = st.lists(st.sampled_from([*LEAVES, "compliance", "tolerances", "tolerances.int8", "performance"]), max_size=3)


def as_yaml(values: dict[str, object], **more: object) -> str:
    tree: dict[str, object] = dict(more)
    for path, value in values.items():
        *above, last = path.split(".")
        node = tree
        for key in above:
            node = node.setdefault(key, {})  # type: ignore[assignment]
        node[last] = value
    return yaml.safe_dump(tree) if tree else ""


def resolved(path: Path) -> dict[str, object]:
    return {row.path: row.value for row in explain(path, today=TODAY)}


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=LAYER, team=LAYER, locks=LOCKS)
def test_a_policy_is_refused_exactly_when_a_locked_value_differs(write, base, team, locks) -> None:
    """Whatever two layers say: with locks the policy either has the base's locked values, or is an error."""
    targets = {"targets": {"edge": {}}}
    write(as_yaml(base), "free.yaml")
    alone = resolved(write(as_yaml({}, extends=["free.yaml"], **targets), "alone.yaml"))
    both = resolved(write(as_yaml(team, extends=["free.yaml"], **targets), "both.yaml"))

    def is_locked(path: str) -> bool:
        return any(f"{path.removeprefix('targets.edge.')}.".startswith(f"{lock}.") for lock in locks)

    changed = {path for path in {*alone, *both} if is_locked(path) and alone.get(path) != both.get(path)}
    write(as_yaml(base, locked=locks), "base.yaml")
    problems = said(write(as_yaml(team, extends=["base.yaml"], **targets)))
    assert bool(problems) == bool(changed), (problems, changed)
    assert all("is locked by base.yaml" in problem for problem in problems)
