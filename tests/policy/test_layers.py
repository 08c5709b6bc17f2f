"""Layering: the laws of merging, and who wins over whom."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_stage.policy.explain import explain
from compile_stage.policy.layers import read_layers, resolve, shipped
from compile_stage.policy.load import load_policy
from compile_stage.policy.nodes import EXCLUSIVE, Node, Place, leaves, merge

from .conftest import warnings

# The same examples each time; no deadline, since the machine may be busy.
STEADY = settings(derandomize=True, deadline=None, database=None)

# Trees of one shape: what is a map in one layer is a map in all, as the schema makes it.
SHAPE = {"a": None, "b": None, "c": {"a": None, "d": None, "e": {"f": None}}, "g": {}}
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.text("xyz", max_size=2), st.lists(st.integers(0, 3))
)


def of_shape(shape: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={k: SCALARS if v is None else of_shape(v) for k, v in shape.items()})


def tree(value: Any, layer: str = "x") -> Node:
    place = Place(layer, 1, 1)
    if isinstance(value, dict):
        return Node({k: tree(v, layer) for k, v in value.items()}, place, keys=dict.fromkeys(value, place))
    return Node([tree(v, layer) for v in value] if isinstance(value, list) else value, place)


TREES = of_shape(SHAPE).map(tree)


@STEADY
@given(TREES, TREES, TREES)
def test_merging_is_associative(a, b, c):
    assert merge(merge(a, b), c).plain() == merge(a, merge(b, c)).plain()


@STEADY
@given(TREES)
def test_merging_with_itself_or_with_nothing_changes_nothing(a):
    empty = tree({})
    assert merge(a, a).plain() == merge(a, empty).plain() == merge(empty, a).plain() == a.plain()


@STEADY
@given(TREES, TREES)
def test_every_value_of_the_upper_layer_survives_and_the_rest_is_the_lower_ones(a, b):
    merged = dict(leaves(merge(a, b)))
    lower = dict(leaves(a))
    upper = {path: node for path, node in leaves(b) if not node.is_map}
    for path, node in merged.items():
        if not node.is_map:
            assert node is upper.get(path, lower.get(path))
    assert upper.keys() <= merged.keys()


@STEADY
@given(TREES, TREES)
def test_merging_leaves_its_arguments_alone(a, b):
    before = a.plain(), b.plain()
    merge(a, b)
    assert (a.plain(), b.plain()) == before


LIMITS = st.dictionaries(st.sampled_from([*sorted(EXCLUSIVE), "confidence"]), st.integers(0, 9)).filter(
    lambda limits: not limits.keys() >= EXCLUSIVE
)


@STEADY
@given(LIMITS, LIMITS, LIMITS)
def test_of_two_ways_to_give_a_limit_the_upper_layers_wins(a, b, c):
    merged = merge(merge(tree(a), tree(b)), tree(c))
    assert merged.plain() == merge(tree(a), merge(tree(b), tree(c))).plain()
    last = next((layer for layer in (c, b, a) if layer.keys() & EXCLUSIVE), {})
    assert merged.value.keys() & EXCLUSIVE == last.keys() & EXCLUSIVE


def with_nulls(shape: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    entries = {k: SCALARS if v is None else st.one_of(st.none(), with_nulls(v)) for k, v in shape.items()}
    return st.fixed_dictionaries({}, optional=entries)


NULLED = with_nulls(SHAPE).map(tree)


@STEADY
@given(NULLED, NULLED, NULLED)
def test_a_null_below_a_map_takes_away_the_same_in_whichever_order_layers_are_merged(a, b, c):
    """Broken: a map over a null brings back what the null took away."""
    assert merge(merge(a, b), c).plain() == merge(a, merge(b, c)).plain()


@pytest.mark.parametrize("layer", ["file", "target", "set", "same layer"])
def test_limits_over_a_null_are_all_there_are(write, layer):
    """Broken: the shipped limits, which a lower layer took away with a null, come back with the first new limit."""
    limits = "tolerances: {int8: {cosine: 0.5, accuracy: 0.02}}"
    base, top, sets = "tolerances: {int8: null}", "", []
    if layer == "file":
        top = f"{limits}\n"
    elif layer == "target":
        base, top = f"targets: {{t: {{{base}}}}}", f"targets: {{t: {{{limits}}}}}\n"
    else:
        sets = ["tolerances.int8.cosine=0.5", "tolerances.int8.accuracy=0.02"]
    if layer == "same layer":
        base, sets = "", ["tolerances.int8=null", *sets]
    write(f"{base}\n", "base.yaml")
    targets = "" if layer == "target" else "targets: {t: {}}\n"
    write(f"extends: [base.yaml]\ndata: {{validation: {{source: 'mlflow-dataset:v', labels: y}}}}\n{targets}{top}")
    gates = load_policy("p.yaml", sets).targets[0].tolerances["int8"]
    assert {gate.metric: gate.limit for gate in gates} == {"cosine": 0.5, "accuracy": 0.02}
    assert next(gate for gate in gates if gate.metric == "accuracy").confidence == 0.95, "what is left out is filled in"


def test_a_limit_over_a_null_is_filled_in_as_any_other(write):
    """Broken: a limit that a base took away, and that the file gives again, is judged by the mean alone: its
    `confidence` is lost. So is the `k` of classes, and the run ends with an error."""
    write("tolerances: {int8: {accuracy: null, topk_agreement: null}}\n", "base.yaml")
    data = "data: {validation: {source: 'mlflow-dataset:v', labels: y}}"
    limits = "tolerances: {int8: {accuracy: 0.02, topk_agreement: 0.9}}"
    write(f"extends: [base.yaml]\n{data}\ntargets: {{t: {{}}}}\n{limits}\n")
    gates = {gate.metric: gate for gate in load_policy("p.yaml").targets[0].tolerances["int8"]}
    assert (gates["accuracy"].limit, gates["accuracy"].confidence) == (0.02, 0.95)
    assert (gates["topk_agreement"].limit, gates["topk_agreement"].options["k"]) == (0.9, 5)


# ------------------------------------------------------------------------------------------------------- who wins

PATHS = ("performance.p95_latency_ms", "tolerances.int8.cosine", "fallback.max_minutes")


def test_shipped_limits_of_precisions_that_a_target_does_not_try_are_not_explained(write):
    """Broken: a reader finds 80 limits on fp16, int4 and fp8 among those that decide, or misses one of the file."""
    own = "tolerances: {int4: {cosine: 0.9}}\nlocked: [tolerances.fp8.cosine]\n"
    write(f"targets: {{t: {{precisions: [int8]}}, u: {{}}}}\n{own}")
    limits = [tuple(row.path.split(".")[1:]) for row in explain("p.yaml") if ".tolerances." in row.path]
    assert {limit[2] for limit in limits if limit[0] == "t"} == {"fp32", "int8", "int4", "fp8"}
    assert {limit[2] for limit in limits if limit[0] == "u"} == {"fp32", "int4", "fp8"}
    assert {limit[3] for limit in limits if limit[2] in ("int4", "fp8")} == {"cosine"}


@pytest.mark.parametrize("path", PATHS)
def test_the_order_of_the_layers(write, path):
    """One value, given by one layer more each time: the layer that was added must win."""
    section, _, rest = path.partition(".")
    key = rest.split(".")
    inner = "".join(f"{{{k}: " for k in key)
    close = "}" * len(key)

    def given_as(value: float) -> str:
        return f"{section}: {inner}{value}{close}\n"

    def value(*sets: str) -> tuple[float, str]:
        (row,) = [row for row in explain("top.yaml", sets) if row.path == f"targets.t.{path}"]
        return row.value, row.origin

    write("", "one.yaml")
    write("", "two.yaml")
    write("extends: [one.yaml, two.yaml]\ntargets: {t: {precisions: [int8]}, u: {}}\n", "top.yaml")
    assert value()[1].startswith("compile_stage/policy/defaults.yaml:")
    write(given_as(0.11), "one.yaml")
    assert value() == (0.11, "one.yaml:4")
    write(given_as(0.12), "two.yaml")
    assert value() == (0.12, "two.yaml:4")
    write("extends: [one.yaml, two.yaml]\ntargets: {t: {}, u: {}}\n" + given_as(0.13), "top.yaml")
    assert value() == (0.13, "top.yaml:6")
    write(
        "targets:\n  t:\n    " + given_as(0.14), "one.yaml"
    )  # the target's own block wins, though a lower file holds it
    assert value() == (0.14, "one.yaml:6")
    assert value(f"{path}=0.15") == (0.15, f"--set {path}=0.15")
    both = f"targets.t.{path}=0.16", f"{path}=0.15"
    assert value(*both) == (0.16, f"--set {both[0]}")


def test_a_target_overrides_for_itself_alone(write):
    text = (
        "targets:\n  a: {tolerances: {int8: {cosine: 0.5}}, select: {prefer: size}, promote: {alias: x}, performance: "
        "{min_speedup: 2}}\n  b: {}\n"
    )
    a, b = load_policy(write(text)).targets
    assert (a.prefer, b.prefer) == ("size", "latency")
    assert (a.promote.alias, b.promote.alias) == ("x", None)
    assert (a.performance[0].limit, b.performance[0].limit) == (2.0, 1.0)
    assert [g.limit for t in (a, b) for g in t.tolerances["int8"] if g.metric == "cosine"] == [0.5, 0.99]


def test_lists_replace_and_maps_merge(write):
    write(
        "targets: {t: {precisions: [int8, fp32], hardware: {machine: x86_64}}}\napplies_to: {tags: {a: '1', b: '2'}}",
        "base.yaml",
    )
    policy = load_policy(
        write(
            "extends: [base.yaml]\ntargets: {t: {precisions: [bf16], hardware: {system: Linux}}}\napplies_to: {tags: "
            "{b: '3'}}"
        )
    )
    assert policy.targets[0].target.precisions == ("bf16",)
    assert policy.targets[0].target.hardware == {"machine": "x86_64", "system": "Linux"}
    assert policy.applies_to.tags == {"a": "1", "b": "3"}


def test_a_file_that_two_extend_is_read_once(write):
    write("owner: base", "base.yaml")
    write("extends: [base.yaml]\nowner: one", "one.yaml")
    write("extends: [base.yaml]", "two.yaml")
    policy = load_policy(write("extends: [one.yaml, two.yaml]\ntargets: {t: {}}"))
    assert policy.owner == "base"  # the second of `extends` wins, with what it extends
    assert policy.files[1:] == ("base.yaml", "one.yaml", "two.yaml", "p.yaml")


def test_a_limit_that_a_shared_base_takes_back_is_warned_of(write):
    """Broken: a team's stricter limit is lost in silence, since another file of `extends` has the same base."""
    write("performance: {min_speedup: 1.0, max_memory_mb: 100}", "base.yaml")
    write("extends: [base.yaml]\nperformance: {min_speedup: 1.5}", "strict.yaml")
    write("extends: [base.yaml]\ntargets: {t: {}}", "targets.yaml")
    [warning] = warnings(write("extends: [strict.yaml, targets.yaml]"))
    assert warning == (
        "p.yaml:4:24: performance.min_speedup: targets.yaml extends base.yaml too, whose `1.0` (base.yaml:4) replaces "
        "`1.5` (strict.yaml:5); say in p.yaml which is meant"
    )
    assert warnings(write("extends: [strict.yaml, targets.yaml]\nperformance: {min_speedup: 1.5}")) == []
    assert warnings(write("extends: [targets.yaml, strict.yaml]")) == []
    assert warnings(write("extends: [strict.yaml, base.yaml]\ntargets: {t: {}}")) == []  # named to be laid over it


@STEADY
@given(st.floats(-1, 1, allow_nan=False).map(lambda x: round(x, 6)))
def test_set_wins_over_everything(tmp_path_factory, limit):
    path = tmp_path_factory.getbasetemp() / "set.yaml"
    path.write_text(
        "apiVersion: compile-stage/v1\nkind: OptimizationPolicy\nname: p\ntolerances: {int8: {cosine: 0.7}}\n"
        "targets: {t: {tolerances: {int8: {cosine: 0.8}}}}\n"
    )
    text = f"{limit:.6f}"
    gates = load_policy(path, [f"tolerances.int8.cosine={text}"]).targets[0].tolerances["int8"]
    assert next(g for g in gates if g.metric == "cosine").limit == float(text)


def test_a_quoted_key_of_set_may_hold_points(write):
    path = write("targets: {t: {}}\ntolerances: {fp32: {'python:a.b:c': {limit: 1, direction: at_most}}}")
    assert "python:a.b:c" in [g.metric for g in load_policy(path).targets[0].tolerances["fp32"]]
    gates = load_policy(path, ['tolerances.fp32."python:a.b:c"=null']).targets[0].tolerances["fp32"]
    assert "python:a.b:c" not in [g.metric for g in gates]


def test_every_option_has_a_shipped_default(write):
    """An option without a default would be read as missing: only the name has none."""
    write("", head=True)
    whole = resolve(read_layers(write("targets: {t: {}}")))
    from compile_stage.policy.schema import PolicyDocument, Target

    assert set(PolicyDocument.model_fields) - {key for key, _ in whole.items()} == set()
    assert set(PolicyDocument.model_fields) - {key for key, _ in shipped().items()} == {"name"}
    assert set(Target.model_fields) == {key for key, _ in whole.items("targets", "t")}
