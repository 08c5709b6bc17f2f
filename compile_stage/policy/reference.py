"""docs/policy.md, printed from the schema, the metrics and the shipped defaults: `python -m
compile_stage.policy.reference > docs/policy.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from compile_stage.core.performance_keys import PERFORMANCE_KEYS
from compile_stage.policy.json_schema import json_schema
from compile_stage.policy.layers import MAX_EXTENDS
from compile_stage.policy.metrics import METRICS
from compile_stage.policy.parse import MAX_BYTES, MAX_VALUES
from compile_stage.policy.schema import OVERRIDABLE
from compile_stage.policy.versions import API_VERSION

_START = f"""\
# The policy language

<!-- Printed by `python -m compile_stage.policy.reference`. Edit the schema, the metrics or defaults.yaml, not this
file. -->

A policy says which targets a model is compiled for, which precisions may be tried, which tolerances must hold against
the original model, and which speed is worth shipping. Ready ones to copy are in [policies/](../policies).

```yaml
apiVersion: {API_VERSION}
kind: OptimizationPolicy
name: cpu-server
owner: ml-platform
data:
  validation: {{source: "mlflow-dataset:validation", labels: y}}
  calibration: {{source: "mlflow-dataset:calibration", labels: y}}
targets:
  cpu-server:
    backends: [onnxruntime, openvino]
    precisions: [int8, bf16, fp32]
    batch_sizes: [1, 8]
    threads: 2
tolerances:
  int8: {{cosine: 0.99, outputs: {{logits: {{cosine: 0.995}}}}}}
performance: {{p95_latency_ms: 20}}
promote: {{alias: "{{target}}-prod"}}
```

    compile-stage lint POLICY...          every mistake of a file at once, as file:line:column
    compile-stage explain POLICY          each resolved value, and the file:line it came from
    compile-stage schema                  this language as JSON Schema, for editors

In an editor with the YAML language server, a policy's first line may be
`# yaml-language-server: $schema=policy.schema.json`.

## Layers

    shipped defaults < extends, in order < the file < the target's own block < --set key=value

- Maps merge key by key. Lists and scalars replace. `null` replaces too: it takes an inherited limit away.
  A map over a `null` stands alone: over `int8: null`, `int8: {{cosine: 0.99}}` has that limit and no shipped one.
- A target may carry its own {", ".join(f"`{name}`" for name in OVERRIDABLE)}: they are laid over the sections of the
  same name. They win over the section wherever it stands, except in `--set`, which wins over all.
- `max_drop` and `max_relative_drop` exclude each other: a layer that gives one takes the place of a lower layer's
  other.
- `extends` names local files, relative to the file that names them, or a shipped policy as `shipped:NAME`, at most
  {MAX_EXTENDS} deep and in no circle. Every file says its `apiVersion` and `kind`. Of `[a, b]`, b replaces what a says,
  also by what b itself extends; `lint` warns where both extend one file, whose value so replaces that of `a`.
- `locked: [compliance, tolerances.int8]` in a file keeps files that extend it, targets' own sections in them, and
  `--set` from changing these values: that is an error which names both places. An equal value is none; a stricter one
  is. Locks add up, and no layer takes one away. They hold wherever the file stands among `extends`. A locked limit
  holds for every output: one under `outputs` that takes its place is an error, unless it is equal. Of files
  (`trusted_keys`, `data`) the file is compared, not its name. Each precision has limits of its own: lock `tolerances`
  where a team may choose the precision (`int8-dynamic`) and not its limits.
  Waivers and data are values of their own: lock `waivers` and `data` where a team may not waive a gate or choose the
  samples (and `data.robustness`). `targets.*.threads` is locked of all targets: of one that only a later file names it
  stays the default. `*` means nothing elsewhere, and is an error there. `explain` shows what is locked.
- A `file:` data source is relative to the policy file that names it; in `--set`, to the current folder.
- `--set targets.edge.threads=4` takes a dotted path and a YAML value. A key that holds a point is quoted:
  `--set 'tolerances.fp32."python:a.b:c"=null'`.
- The policy's digest is that of the resolved values: comments, order, and which file says what do not change it.

## YAML

Safe YAML only. Refused, each with its own message: duplicate keys, tags, recursive anchors, aliases that expand to more
than {MAX_VALUES:,} values, files over {MAX_BYTES // 1024} KiB, numbers given as text (`1e-4` is text to YAML 1.1: write
`1.0e-4`), `no`, `on` and dates where a text is wanted, numbers that YAML reads in another base (`010`, `1:30`), half of
a character (`"\\ud83d"`), a unit in a value (`20ms`: the unit stands in the key's name), a key without a value
(`cosine:`, `--set x=`: write `null`). Small anchors and `<<:` are fine.
"""

_METRICS = """\
## Metrics

`a` is the candidate's output, `b` the original model's, over all samples and at every batch size. All limits of a
precision must hold. A bare number is the limit in the metric's own direction. What could not be measured is NOT_RUN,
which never passes.
"""

_LIMITS = """\
- Metrics of floats look at each floating output; `agreement` looks at each integer, bool and text output.
- `allclose: {rtol: 1.0e-3, atol: 1.0e-4}`, `topk_agreement: {limit: 0.99, k: 5}`,
  `column_nrmse: {limit: 0.5, floor: 0.1}`. What is left out is taken from `each_limit` below.
- Task metrics compare with the true labels: `accuracy: 0.01` is `accuracy: {max_drop: 0.01}`, the largest loss against
  the original model on the same samples; `max_relative_drop` is a share of the original's value. For metrics where
  lower is better, a rise is the loss. With `confidence`, the worse end of the interval of the loss must hold, not its
  mean; `confidence: null` looks at the mean. With fewer samples than can ever show the limit (299 for an accuracy of
  0.01 at 0.95, 300 to 600 for an r2 of 0.01, docs/proof.md), the check is NOT_RUN and says how many it needs. They
  need `data.validation.labels`.
- Language models are judged by metrics of their own, on the distribution of each new token after the tokens before it:
  `token_kl: 0.01` is `token_kl: {limit: 0.01}`, `perplexity: 0.02` is `perplexity: {max_relative_increase: 0.02}`.
  Their intervals are over prompts. The shipped limits on them hold for language models alone, in the place of the
  other shipped limits on floats and classes ([proof.md](proof.md#language-models)).
- `coco_map` and `wer` need `pip install "compile-stage[metrics]"`; a plan without it refuses the candidates. What their
  labels look like, and those of `spearman`, `ndcg` and `ece`: [proof.md](proof.md#rankings-boxes-words-confidence).
- An own metric is `python:package.module:function: {limit: 0.1, direction: at_most}`; the function takes (candidate,
  baseline, labels) arrays, and answers with one number, or with one for each sample, whose mean counts. With
  `confidence: 0.95` the worse end of a paired bootstrap's interval must hold. For one number the function is called up
  to 1,400 times. A plan imports the function, and refuses the candidates where it can't.
- By output: `outputs: {logits: {cosine: 0.995}}`. A limit on an output takes the place of the general limit of the same
  metric, for that output.
- `null` takes an inherited limit away (under `outputs`, the general limit then holds again). `int8: null` takes all
  limits of a precision away, and then no candidate of it can pass. That is how fp32, else always a candidate, is
  forbidden.
- A task metric that names no output reads the one that fits the labels. Where several outputs fit, say which:
  `outputs: {logits: {accuracy: 0.01}}`.
- The shipped limits on `accuracy` hold only where `data.validation.labels` is named, and the policy names no task
  metric for that precision itself, neither for all outputs nor for one. Labels that are no classes of an output (a
  regression) leave them out, and the check `samples` says so: for a regression say `int8: {r2: 0.01}`.

### Performance gates
"""

_SHIPPED = """\
## Shipped defaults

The lowest layer of every policy, with the source of each number. `each_target` and `each_limit` exist in this file
only.
"""

_WAIVERS = """\
## Waivers

    waivers:
      - {gate: accuracy, target: edge, reason: "new sensor, labels follow", owner: ml-platform, expires: 2027-01-31}

A waiver lets one gate be missed on one target, and is the only one for these two. It names the metric (or the key under
`performance`), has a reason and an owner, and holds to the end of its last day. After that day the policy is in error
until the waiver is removed or renewed. While it holds, the check still says FAIL, and the published version says that
it was waived. A check that was NOT_RUN can't be waived: nothing is known.
"""


def reference() -> str:
    """The text of docs/policy.md."""
    schema = json_schema()
    parts = [_START, "## Fields\n", *_sections(schema), _METRICS, _metric_table(), _LIMITS, _performance_table()]
    parts += [_WAIVERS, _SHIPPED, f"```yaml\n{_defaults_text().strip()}\n```\n"]
    return "\n".join(parts)


def _defaults_text() -> str:
    return files("compile_stage.policy").joinpath("defaults.yaml").read_text(encoding="utf-8")


def _sections(schema: dict[str, Any]) -> Iterator[str]:
    definitions = schema["$defs"]
    yield _section("A policy", schema, schema, "")
    for title, name in (
        ("`applies_to`", "AppliesTo"),
        ("`data`", "Data"),
        ("`data.validation`, `data.calibration`", "DataSet"),
        ("`data.robustness`", "Robustness"),
        ("`targets.NAME`", "Target"),
        ("`targets.NAME.shapes.INPUT`", "ShapeRange"),
        ("`targets.NAME.generation`", "Generation"),
        ("`tolerances.PRECISION`", "Tolerance"),
        ("`allclose`", "Closeness"),
        ("`topk_agreement`, `nearest_kept`", "TopK"),
        ("`column_nrmse`, `column_spread`", "ColumnLimit"),
        ("`python:package.module:function`", "CustomLimit"),
        ("`log_loss`, `mae`, `rmse`, `r2`", "Drop"),
        ("`accuracy`, `f1`, `class_recall`, `roc_auc`, `token_accuracy`", "ShareDrop"),
        ("`spearman`", "RankDrop"),
        ("`ndcg`", "GainDrop"),
        ("`coco_map`", "BoxDrop"),
        ("`wer`", "WordDrop"),
        ("`ece`", "BinDrop"),
        ("`token_kl`", "DivergenceLimit"),
        ("`token_top1_agreement`", "TokenShare"),
        ("`perplexity`", "Increase"),
        ("`performance`", "Performance"),
        ("`select`", "Select"),
        ("`fallback`", "Fallback"),
        ("`budget`", "Budget"),
        ("`serving`", "Serving"),
        ("`report`", "Report"),
        ("`publish`", "Publish"),
        ("`promote`", "Promote"),
        ("`compliance`", "Compliance"),
        ("`waivers[]`", "Waiver"),
    ):
        yield _section(title, definitions[name], schema, definitions[name]["description"])


def _section(title: str, model: dict[str, Any], root: dict[str, Any], text: str) -> str:
    lines = [f"### {title}\n"]
    if text:
        lines.append(f"{text}\n")
    lines += ["| key | value | default | |", "|---|---|---|---|"]
    for key, field in model["properties"].items():
        default = f"`{json.dumps(field['default'], ensure_ascii=False)}`" if "default" in field else ""
        lines.append(f"| `{key}` | {_kind(field, root)} | {default} | {_cell(field.get('description', ''))} |")
    return "\n".join(lines) + "\n"


def _kind(field: dict[str, Any], root: dict[str, Any]) -> str:
    """What a field takes, in words."""
    if "$ref" in field:
        return "map" if root["$defs"][field["$ref"].rpartition("/")[2]].get("type") == "object" else "value"
    for union in ("anyOf", "oneOf"):
        if union in field:
            return " or ".join(dict.fromkeys(_kind(member, root) for member in field[union]))
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{word}`" for word in field["enum"])
    kind = field.get("type", "any")
    if kind == "array":
        return f"list of {_kind(field['items'], root)}"
    words = {"string": "text", "integer": "whole number", "object": "map", "boolean": "true, false"}
    return words.get(kind, str(kind)) + _range(field)


def _range(field: dict[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    ends = {key: field[key] for key in signs if key in field}
    return "".join(f" {signs[key]} {end if isinstance(end, int) else f'{end:g}'}" for key, end in ends.items())


def _metric_table() -> str:
    lines = ["| metric | of | formula | the limit is | unit |", "|---|---|---|---|---|"]
    what = {"elementwise": "floats", "discrete": "integers, bools, texts", "task": "labels", "tokens": "tokens"}
    for metric in METRICS.values():
        if metric.family in what:
            side = f"the largest loss ({metric.better} is better)" if metric.better else _side(metric.direction)
            lines.append(
                f"| `{metric.name}` | {what[metric.family]} | {_cell(metric.formula)} | {side} | {metric.unit} |"
            )
    return "\n".join(lines) + "\n"


def _performance_table() -> str:
    lines = ["| key | gate | formula | the limit is | unit |", "|---|---|---|---|---|"]
    for key, name in PERFORMANCE_KEYS.items():
        metric = METRICS[name]
        lines.append(f"| `{key}` | `{name}` | {_cell(metric.formula)} | {_side(metric.direction)} | {metric.unit} |")
    return "\n".join(lines) + "\n"


def _side(direction: str) -> str:
    return {"at_most": "the largest allowed", "at_least": "the smallest allowed"}[direction]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
