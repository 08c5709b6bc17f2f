"""The policy language as JSON Schema, for editors: completion, descriptions and mistakes while typing.

`policy.schema.json` beside this file is what `python -m compile_stage.policy.json_schema` prints; a test holds them
together.
"""

from __future__ import annotations

import json
from typing import Any

from compile_stage.core import plugins
from compile_stage.policy.layers import shipped
from compile_stage.policy.metrics import tolerance_names
from compile_stage.policy.nodes import Node
from compile_stage.policy.schema import PolicyDocument
from compile_stage.policy.values import FUNCTION_METRIC, SHIPPED_PRECISIONS

# What has to be said whole where it is said at all; of everything else a file may say a part, and inherit the rest.
_ALWAYS_WHOLE = {"Waiver", "CustomLimit"}


def json_schema() -> dict[str, Any]:
    """The schema of one policy file (draft 2020-12), with the precisions of the lowerings that are installed."""
    schema = PolicyDocument.model_json_schema()
    for name, model in schema["$defs"].items():
        if name not in _ALWAYS_WHOLE:
            model.pop("required", None)
    for name in ("Limits", "Tolerance"):
        limits = schema["$defs"][name]
        # Any other key is an own metric.
        limits["patternProperties"] = {FUNCTION_METRIC: limits["additionalProperties"]}
        limits["additionalProperties"] = False
        for key in tolerance_names():
            limits["properties"][key].pop("default", None)
    schema["required"] = ["apiVersion", "kind"]
    # Those that only a backend has are left out: to ask it, its packages would have to be loaded.
    _list_precisions(schema, list(dict.fromkeys([*SHIPPED_PRECISIONS, *plugins.names("lowerings")])))
    _add_defaults(schema, schema, shipped())
    _add_defaults(schema, schema["$defs"]["Target"], shipped().value["each_target"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "compile-stage policy"}


def _list_precisions(node: Any, known: list[str]) -> None:
    """Put what is installed in the place of what we ship, so that an editor knows a plug-in's precision too."""
    if isinstance(node, dict):
        if node.get("enum") == list(SHIPPED_PRECISIONS):
            node["enum"] = known
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            _list_precisions(child, known)


def _add_defaults(root: dict[str, Any], model: dict[str, Any], defaults: Node) -> None:
    """Write each field's shipped default beside it."""
    for key, field in model.get("properties", {}).items():
        node = defaults.get(key)
        if node is None or key in ("tolerances", "apiVersion", "kind", "validation", "calibration"):
            continue  # the two data sets share one model, so their different defaults can't stand in it
        reference = field.get("$ref")
        if reference is None:
            field["default"] = node.plain()
            continue
        referred = root["$defs"][reference.rpartition("/")[2]]
        field.setdefault("description", referred["description"])  # pydantic leaves it out where both are the same
        _add_defaults(root, referred, node)


def render() -> str:
    """The text of `policy.schema.json`."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(render(), end="")
