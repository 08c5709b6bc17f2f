"""`locked:` keeps later layers from changing what a base decided."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compile_stage.core.error_codes import Code
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
        ("budget.minutes.most", "'budget.minutes.most' is not a key that can be locked; budget.minutes holds no keys"),
        ("tolerances.int8.cosine.limit", "tolerances.int8.cosine holds no keys"),
        ("locked", "is not a key that can be locked"),
        ("extends", "is not a key that can be locked"),
        (".owner", "'.owner' is not a dotted path"),
        ("compliance..allow_pickle", "'compliance..allow_pickle' is not a dotted path"),
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
    team = "extends: [base.yaml]\ntargets: {edge: {precisions: [int8, fp16]}}\n"
    rows = {row.path: row.locked_by for row in explain(write(team), today=TODAY)}
    assert rows["compliance.allow_pickle"] == rows["targets.edge.tolerances.int8.cosine"] == "base.yaml:4"
    assert rows["targets.edge.tolerances.fp16.cosine"] == rows["targets.edge.performance.max_size_mb"] == ""
    assert {row.path: row.locked_by for row in explain("base.yaml")}["tolerances.int8.cosine"] == "base.yaml:4"


LABELS = "data: {validation: {source: input_example, labels: y}}"
OF_OUTPUTS = """\
locked: [tolerances.int8.accuracy, tolerances.fp32.cosine, waivers, applies_to]
data: {validation: {source: input_example, labels: y}}
tolerances: {int8: {accuracy: {max_drop: 0.001}}}
"""
UNDER_OUTPUTS = "takes the place of tolerances.int8.accuracy, which is locked by base.yaml:4"


@pytest.mark.parametrize(
    "text",
    [
        "targets: {edge: {}}\ntolerances: {int8: {outputs: {label: {accuracy: 0.4}}}}",
        "targets: {edge: {tolerances: {int8: {outputs: {label: {accuracy: 0.4}}}}}}",
        "targets: {edge: {}}\ntolerances: {int8: {outputs: {label: {accuracy: {max_drop: 0.001, confidence: null}}}}}",
    ],
)
def test_a_locked_limit_holds_for_each_output(write, text: str) -> None:
    """Broken: a team names the output, and the limit there takes the place of the locked one."""
    write(OF_OUTPUTS, "base.yaml")
    (problem,) = read_policy(write(f"extends: [base.yaml]\n{text}\n"), today=TODAY).problems
    assert problem.code == Code.LOCKED
    assert UNDER_OUTPUTS in str(problem)
    assert str(problem).startswith("p.yaml:")
    assert "must stay `0." in str(problem)


def test_a_second_set_of_a_locked_key_is_told_the_locked_value(write) -> None:
    """Broken: the message on the second says that the key must stay as in the first, refused one; and one that says the
    locked value is refused for it."""
    write(BASE, "base.yaml")
    key, kept = "tolerances.int8.cosine", "`0.995` (base.yaml:6)"
    first, second = (by(f"--set {key}={value}", key, kept) for value in (0.5, 0.7))
    assert said(write(TEAM), f"{key}=0.5", f"{key}=0.7") == [first, second]
    assert said(write(TEAM), f"{key}=0.5", f"{key}=0.995") == [first]


def test_neither_does_set_go_by_way_of_an_output(write) -> None:
    """Broken: `--set` loosens the limit of the only output that the metric reads."""
    write(OF_OUTPUTS, "base.yaml")
    for path in ("tolerances.int8.outputs.label.accuracy", "targets.edge.tolerances.int8.outputs.label.accuracy"):
        (problem,) = said(write(TEAM), f"{path}=0.4")
        assert problem.startswith(f"--set {path}=0.4: {path}.max_drop: {UNDER_OUTPUTS}"), problem
        assert said(write(TEAM), f"{path}={{max_drop: 0.001}}") == []


def test_a_lock_inside_a_targets_section_holds_for_each_output_too(write) -> None:
    """Broken: what is locked of one target alone is loosened under its outputs."""
    target = "targets: {edge: {precisions: [int8], tolerances: {int8: {accuracy: 0.001}}}}"
    write(f"locked: [targets.edge.tolerances.int8.accuracy.max_drop]\n{LABELS}\n{target}", "base.yaml")
    (problem,) = said(write("extends: [base.yaml]\ntolerances: {int8: {outputs: {label: {accuracy: 0.4}}}}"))
    assert "targets.edge.tolerances.int8.outputs.label.accuracy.max_drop: takes the place of " in problem


def test_an_output_may_be_named_with_the_locked_limit_and_with_others(write) -> None:
    """Broken: a model with two outputs that could be meant can't be judged at all under a lock, since the output that
    the labels are for may not be named."""
    write(OF_OUTPUTS, "base.yaml")
    text = "tolerances: {int8: {outputs: {label: {accuracy: 0.001, cosine: 0.5}, other: null}}}"
    assert said(write(TEAM + text)) == []


def test_the_bases_own_limit_of_an_output_is_kept(write) -> None:
    """Broken: the narrower limit that the base gives to one output is taken away, and the general one is left."""
    base = "tolerances: {int8: {accuracy: 0.01, outputs: {label: {accuracy: 0.001}}}}"
    write(f"locked: [tolerances.int8.accuracy]\n{LABELS}\n{base}", "base.yaml")
    assert said(write(TEAM)) == []
    for text in ("{label: {accuracy: null}}", "{label: null}", "null"):
        problems = said(write(TEAM + f"tolerances: {{int8: {{outputs: {text}}}}}"))
        assert problems, text
        assert all("it must stay `0.001` (base.yaml:6)" in problem for problem in problems), text


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("tolerances: {fp32: null}", "tolerances.fp32.cosine"),
        ("tolerances: {fp32: {outputs: {y: {cosine: -1}}}}", "tolerances.fp32.outputs.y.cosine"),
        ("waivers: [{gate: accuracy, target: edge, reason: r, owner: o, expires: 2026-06-30}]", "waivers"),
        ("applies_to: {names: [mine]}", "applies_to.names"),
    ],
)
def test_other_ways_round_a_lock_are_closed(write, text: str, path: str) -> None:
    """Broken: the limit stays as it is, and a precision, a waiver or another scope takes it away."""
    write(OF_OUTPUTS, "base.yaml")
    (problem,) = said(write(TEAM + text))
    assert f": {path}: " in problem
    assert "locked by base.yaml:4" in problem


def test_a_lock_on_all_tolerances_holds_for_every_precision_and_output(write) -> None:
    """Broken: `locked: [tolerances]` leaves precisions and outputs free that the base does not name."""
    write("locked: [tolerances]", "base.yaml")
    for limits in ("int4: {cosine: 0.1}", "int8: {outputs: {label: {cosine: 0.1}}}", "fp8: null", "fp32: null"):
        assert said(write(TEAM + f"tolerances: {{{limits}}}")), limits
        (whole,) = said(write(TEAM), f"tolerances={{{limits}}}")
        assert "is locked by base.yaml:4" in whole


@pytest.mark.parametrize("order", ["loose.yaml, base.yaml", "base.yaml, loose.yaml"])
def test_a_lock_holds_against_a_file_that_is_extended_beside_it(write, order: str) -> None:
    """Broken: a team extends a file of its own before the base, which does not say what that file says, so it stays."""
    write(f"{OF_OUTPUTS}compliance: {{allow_pickle: false}}\n", "base.yaml")
    waiver = "waivers: [{gate: accuracy, target: edge, reason: r, owner: o, expires: 2026-06-30}]"
    write(f"{waiver}\ntolerances: {{int8: {{outputs: {{label: {{accuracy: 0.4}}}}}}}}\n", "loose.yaml")
    problems = said(write(f"extends: [{order}]\ntargets: {{edge: {{}}}}"))
    assert [problem.partition(" by base.yaml:4")[0] for problem in problems] == [
        "loose.yaml:4:10: waivers: is locked",
        "loose.yaml:5:49: tolerances.int8.outputs.label.accuracy.max_drop: takes the place of "
        "tolerances.int8.accuracy, which is locked",
    ]


def test_a_locked_file_is_the_same_file_not_the_same_name(write) -> None:
    """Broken: a team says the base's words in its own folder, and has its own signing key trusted, or its own samples
    taken, though the base locks both."""
    Path(".git").mkdir()  # one repository holds both folders
    for folder in ("org", "team"):
        Path(folder).mkdir()
        Path(folder, "ci.pub").write_text("key")
        np.savez(Path(folder, "val.npz"), x=np.zeros((40, 1)))
    named = "data: {validation: {source: 'file:val.npz'}}\ncompliance: {trusted_keys: [ci.pub]}\n"
    write(f"locked: [compliance, data]\n{named}", "org/base.yaml")
    of_team = write(f"extends: [../org/base.yaml]\ntargets: {{edge: {{}}}}\n{named}", "team/p.yaml")
    data, keys = said(of_team)
    assert data.startswith("team/p.yaml:6:29: data.validation.source: is locked by org/base.yaml:4: ")
    assert f"which is {Path('org/val.npz').resolve()}, and not {Path('team/val.npz').resolve()}" in data
    assert keys.startswith("team/p.yaml:7:28: compliance.trusted_keys: is locked by org/base.yaml:4: ")
    of_org = named.replace("val.npz", "../org/val.npz").replace("ci.pub", "../org/ci.pub")
    equal = write(f"extends: [../org/base.yaml]\ntargets: {{edge: {{}}}}\n{of_org}", "team/p.yaml")
    assert said(equal, "compliance.trusted_keys=[org/ci.pub]") == []
    (set_,) = said(equal, "compliance.trusted_keys=[team/ci.pub]")
    assert "compliance.trusted_keys: is locked by org/base.yaml:4" in set_


def test_two_files_of_one_base_may_be_extended_together(write) -> None:
    """Broken: files that each keep to a base's locks are held to break them where one policy extends both."""
    write(OF_OUTPUTS, "base.yaml")
    write("extends: [base.yaml]\ntargets: {edge: {}}\nbudget: {minutes: 5}", "a.yaml")
    write("extends: [base.yaml]\ntargets: {cloud: {}}\ntolerances: {int8: {cosine: 0.9}}", "b.yaml")
    assert said(write("extends: [a.yaml, b.yaml]")) == []


def test_explain_says_that_a_limit_under_outputs_is_locked(write) -> None:
    """Broken: nobody sees before the error that an output's limit is not theirs to change."""
    outputs = "tolerances: {int8: {outputs: {label: {accuracy: 0.001, cosine: 0.9}}}}"
    write(f"locked: [tolerances.int8.accuracy]\n{LABELS}\n{outputs}", "base.yaml")
    rows = {row.path: row.locked_by for row in explain(write(TEAM), today=TODAY)}
    label = "targets.edge.tolerances.int8.outputs.label"
    assert rows[f"{label}.accuracy.max_drop"] == "base.yaml:4"
    assert rows[f"{label}.cosine"] == ""


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
    targets = {"targets": {"edge": {"precisions": ["int8"]}}}
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


FOR_EACH = "locked: [targets.*.threads, targets.*.tolerances.int8.cosine]\ntargets: {edge: {threads: 2}}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "targets: {edge: {threads: 4}}",
            "targets.edge.threads: is locked by base.yaml:4: it must stay `2` (base.yaml:5)",
        ),
        ("targets: {mine: {threads: 4}}", "targets.mine.threads: is locked by base.yaml:4: it must stay `1` (compile_"),
        ("tolerances: {int8: {cosine: 0.5}}", "targets.edge.tolerances.int8.cosine: is locked by base.yaml:4"),
        ("targets: {edge: {tolerances: {int8: {cosine: 0.5}}}}", "targets.edge.tolerances.int8.cosine: is locked"),
        (
            "targets: {mine: {tolerances: {int8: {outputs: {y: {cosine: 0.5}}}}}}",
            "targets.mine.tolerances.int8.outputs.y.cosine: takes the place of targets.mine.tolerances.int8.cosine",
        ),
    ],
)
def test_a_lock_holds_for_all_targets(write, text: str, says: str) -> None:
    """Broken: `targets.*.threads` is taken for a target called `*`, and locks nothing."""
    write(FOR_EACH, "base.yaml")
    (problem,) = said(write(f"extends: [base.yaml]\n{text}\n"))
    assert f": {says}" in problem
    assert problem.startswith("p.yaml:5:")


def test_a_lock_for_all_targets_holds_against_set_and_leaves_the_rest_free(write) -> None:
    """Broken: `--set` goes round it, it costs more than it protects, or `explain` does not show it."""
    write(FOR_EACH, "base.yaml")
    path = write("extends: [base.yaml]\ntargets: {edge: {batch_sizes: [4]}, mine: {threads: 1, ladder: true}}")
    assert said(path) == []
    (problem,) = said(path, "targets.mine.threads=4")
    assert "targets.mine.threads: is locked by base.yaml:4: it must stay `1` (p.yaml:5)" in problem
    rows = {row.path: row.locked_by for row in explain(path, today=TODAY)}
    assert rows["targets.edge.threads"] == rows["targets.mine.tolerances.int8.cosine"] == "base.yaml:4"
    assert rows["targets.edge.batch_sizes"] == ""


@pytest.mark.parametrize("entry", ["targets.edge-*.threads", "targets.t.shapes.*.min", "targets.*.options.*"])
def test_a_star_that_would_lock_nothing_is_a_mistake(write, entry: str) -> None:
    """Broken: another pattern than `targets.*` is taken for a name, and protects nothing."""
    (problem,) = said(write(f"locked: ['{entry}']\ntargets: {{t: {{}}}}"))
    assert "`*` stands for all targets only, as in targets.*.threads" in problem
