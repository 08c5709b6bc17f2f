"""What is printed from the schema is in step with it; the ready policies load; nothing heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from compile_stage.measure.classes import CLASS_METRICS
from compile_stage.measure.columns import COLUMN_METRICS
from compile_stage.measure.elementwise import DISTANCE_METRICS
from compile_stage.measure.similarity import SIMILARITY_METRICS
from compile_stage.measure.tasks import HIGHER_IS_BETTER
from compile_stage.measure.tokens import TEXT_METRICS, TOKEN_METRICS
from compile_stage.policy import json_schema, reference
from compile_stage.policy.explain import explain
from compile_stage.policy.limits import Limits
from compile_stage.policy.load import lint, load_policy
from compile_stage.policy.metrics import METRICS, tolerance_names

ROOT = Path(__file__).parents[2]
POLICIES = sorted((ROOT / "policies").glob("*.yaml"))


@pytest.fixture(scope="module")
def for_editors() -> jsonschema.Draft202012Validator:
    """Holds policies to the JSON Schema. Made once: `jsonschema.validate` looks through the whole schema at each call,
    0.3 CPU seconds."""
    schema = json_schema.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_shipped_json_schema_is_in_step():
    shipped = ROOT / "compile_stage" / "policy" / "policy.schema.json"
    assert shipped.read_text() == json_schema.render(), (
        "run: python -m compile_stage.policy.json_schema > compile_stage/policy/policy.schema.json"
    )


def test_the_reference_is_in_step():
    page = ROOT / "docs" / "policy.md"
    assert page.read_text() == reference.reference(), "run: python -m compile_stage.policy.reference > docs/policy.md"


def test_the_reference_has_a_table_of_every_map_of_the_language():
    """Broken: a key says `map`, and no page says what stands in it (`targets.NAME.generation`)."""
    page = reference.reference()
    without = {
        name
        for name, model in json_schema.json_schema()["$defs"].items()
        if not all(f"\n| `{key}` | " in page for key in model["properties"])
        or f"\n{model['description']}\n" not in page
    }
    assert without == {"Limits"}  # of a single output: as `Tolerance`, without `outputs`


def test_the_policy_in_the_reference_is_one(write):
    block = reference.reference().partition("```yaml\n")[2].partition("```")[0]
    assert lint([write(block, head=False)]) == []


def test_every_metric_of_the_language_can_be_measured():
    task = {name for name, metric in METRICS.items() if metric.family == "task"}
    assert set(tolerance_names()) - task == {
        *DISTANCE_METRICS,
        *CLASS_METRICS,
        *COLUMN_METRICS,
        *SIMILARITY_METRICS,
        "allclose",
        "agreement",
        *TOKEN_METRICS,
        *TEXT_METRICS,
    }
    assert {name: METRICS[name].better == "higher" for name in task} == HIGHER_IS_BETTER
    assert tuple(Limits.model_fields) == tolerance_names()


def test_every_field_is_described():
    def look(model: dict, path: str) -> list[str]:
        return [f"{path}.{key}" for key, field in model.get("properties", {}).items() if not field.get("description")]

    schema = json_schema.json_schema()
    bare = [name for key, model in schema["$defs"].items() for name in look(model, key)]
    assert look(schema, "") + bare == []


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_a_ready_policy_loads_and_is_valid_for_editors(path, for_editors):
    assert lint([path]) == []
    policy = load_policy(path, base=True)
    assert policy.name == path.stem
    assert policy.owner == "ml-platform"
    assert [t.target.name for t in policy.targets] == ([] if path.stem == "org-base" else [path.stem])
    for target in policy.targets:
        assert all(target.tolerances.get(precision) for precision in target.target.precisions)
        assert target.promote.alias == "{target}-prod"
    for_editors.validate(yaml.safe_load(path.read_text()))


def test_the_ready_policies_are_all_there():
    expected = ["apple", "cpu-low-latency", "cpu-server", "edge-arm", "nvidia-gpu", "org-base", "strict-fp32"]
    assert [path.stem for path in POLICIES] == expected


def test_strict_fp32_lets_nothing_else_pass():
    (target,) = load_policy(ROOT / "policies" / "strict-fp32.yaml").targets
    assert list(target.tolerances) == ["fp32"]


def test_the_json_schema_refuses_what_lint_refuses(for_editors):
    good = {"apiVersion": "compile-stage/v1", "kind": "OptimizationPolicy", "targets": {"t": {}}}
    for_editors.validate(good)
    for_editors.validate({**good, "tolerances": {"int8": {"python:a.b:c": {"limit": 1, "direction": "at_most"}}}})
    for_editors.validate({**good, "tolerances": {"int8": {"accuracy": 0.1, "outputs": {"y": {"cosine": None}}}}})
    for wrong in (
        {"ownr": "x"},
        {"tolerances": {"int8": {"cosin": 1}}},
        {"tolerances": {"in8": {}}},
        {"targets": {"t": {"device": "cpuu"}}},
        {"waivers": [{"gate": "cosine"}]},
        {"performance": {"min_speedup": -1}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            for_editors.validate({**good, **wrong})


def test_explain_lists_every_value_with_its_origin(write):
    write("performance: {min_speedup: 1.5}", "base.yaml")
    path = write("extends: [base.yaml]\ntargets: {a: {threads: 2}, b: {tolerances: {int8: {cosine: null}}}}")
    rows = {row.path: row for row in explain(path, ["budget.minutes=5"])}
    assert (rows["targets.a.threads"].value, rows["targets.a.threads"].origin) == (2, "p.yaml:5")
    assert rows["targets.b.performance.min_speedup"].origin == "base.yaml:4"
    assert (rows["targets.b.tolerances.int8.cosine"].value, rows["targets.b.tolerances.int8.cosine"].is_default) == (
        None,
        False,
    )
    assert (rows["budget.minutes"].value, rows["budget.minutes"].origin) == (5, "--set budget.minutes=5")
    assert rows["targets.a.device"].is_default
    assert rows["targets.a.backends"].value == "auto"
    assert not [path for path in rows if path.startswith(("tolerances", "performance", "each_"))]
    only = [row.path for row in explain(path, target="a")]
    assert "targets.a.threads" in only
    assert not [path for path in only if path.startswith("targets.b")]
    json.dumps([row.value for row in rows.values()])


def test_nothing_heavy_is_imported_to_lint_and_explain():
    script = (
        "import sys\nfrom compile_stage.policy import load, explain, json_schema\n"
        "assert load.lint([sys.argv[1]]) == [], "
        "load.lint([sys.argv[1]])\nexplain.explain(sys.argv[1])\njson_schema.json_schema()\nheavy = {'mlflow', "
        "'onnxruntime', 'onnx', 'sklearn', 'numpy', 'pandas', 'torch', 'openvino', 'jinja2', 'click', "
        "'rich'}\nprint(sorted(heavy & sys.modules.keys()))"
    )
    path = str(ROOT / "policies" / "cpu-server.yaml")
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
