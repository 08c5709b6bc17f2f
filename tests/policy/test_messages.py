"""Every mistake that a policy can hold has its own located message; a change of wording shows here."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from compile_stage.core.errors import SourceError
from compile_stage.policy.load import read_policy
from compile_stage.registry.model_files import _NAME_FORBIDS, check_name

TODAY = date(2026, 6, 1)
TARGET = "targets: {t: {}}\n"


def said(path: Path | str, *sets: str) -> list[str]:
    return [str(problem) for problem in read_policy(path, sets, today=TODAY).problems]


# What each field takes for a percentage: the path, what was typed, and the advice after "write ".
PERCENT = [
    ("tolerances.int8.accuracy", "1%", "0.01"),
    ("tolerances.int8.accuracy.max_relative_drop", "2 %", "0.02"),
    ("tolerances.int8.accuracy.confidence", "99%", "0.99"),
    ("tolerances.int8.r2", "1%", "0.01"),
    ("tolerances.int8.cosine", "99.5%", "0.995"),
    ("tolerances.int8.mae", "5%", "mae: {max_relative_drop: 0.05}"),
    ("tolerances.int8.log_loss.max_drop", "5%", "log_loss: {max_relative_drop: 0.05}"),
    ("performance.min_speedup", "120%", "1.2"),
    ("performance.min_speedup", "10%", "1.1"),  # 0.1 would let a model through that is ten times slower
    ("promote.max_slowdown", "2%", "1.02"),
    ("promote.max_slowdown", "102%", "1.02"),
]


@pytest.mark.parametrize(("path", "typed", "advice"), PERCENT, ids=lambda part: str(part))
def test_the_advice_on_a_percentage_can_be_followed(write, path: str, typed: str, advice: str) -> None:
    """Broken: for `accuracy: 1%` the advice was `write 1`, a drop of 100 points, which lint then accepted."""
    policy = write(TARGET + "data: {validation: {source: input_example, labels: y}}")
    (problem,) = said(policy, f"{path}={typed}")
    written = problem.partition("; write ")[2].partition(" (")[0].partition(", or ")[0]
    assert written == advice
    key, _, value = written.rpartition(": {")
    if key:
        path, written = path.partition(f".{key}")[0] + f".{key}", f"{{{value}"
    assert said(policy, f"{path}={written}") == []


@pytest.mark.parametrize("metric", ["accuracy", "f1", "roc_auc"])
@pytest.mark.parametrize("key", ["", ".max_drop", ".max_relative_drop"])
@pytest.mark.parametrize("drop", ["1", "1.0", "5", "-0.1"])
def test_a_drop_of_a_share_lies_between_0_and_1(write, metric: str, key: str, drop: str) -> None:
    """Broken: `accuracy: 1`, meant as 1 %, is accepted and lets every model pass."""
    policy = write(TARGET + "data: {validation: {source: input_example, labels: y}}")
    path = f"tolerances.int8.{metric}{key}"
    allowed = f"a drop of {metric} is at least 0 and below 1: 1 % is 0.01"
    assert said(policy, f"{path}={drop}") == [f"--set {path}={drop}: {path}: {drop} is out of range; {allowed}"]
    assert said(policy, f"{path}=0.01") == said(policy, f"{path}=0") == []
    assert said(policy, "tolerances.int8.log_loss=1.5", "tolerances.int8.r2=1.5") == []


# Each text follows three lines of head: its first line is line 4.
IN_A_FILE = {
    "unknown key": (
        "ownr: me\n" + TARGET,
        "p.yaml:4:1: ownr: unknown key; one of: apiVersion, kind, name, owner, extends, locked, applies_to, data, "
        "targets, tolerances, performance, select, fallback, budget, publish, promote, serving, report, compliance, "
        "waivers; did you mean owner?",
    ),
    "a key that is not there": (
        TARGET + "compliance: {require_signature: true, trusted_keys: [/none/ci.pub]}",
        "p.yaml:5:54: compliance.trusted_keys[0]: there is no file /none/ci.pub; a path is relative to the "
        "policy file that names it",
    ),
    "wrong unit": (
        TARGET + "performance: {p95_latency_s: 1}",
        "p.yaml:5:15: performance.p95_latency_s: unknown key; this is given in milliseconds: use p95_latency_ms",
    ),
    "unit forgotten": (
        TARGET + "performance: {max_size: 1}",
        "p.yaml:5:15: performance.max_size: unknown key; this is given in megabytes: use max_size_mb",
    ),
    "another unit alone": (
        TARGET + "budget: {hours: 1}",
        "p.yaml:5:10: budget.hours: unknown key; this is given in minutes: use minutes",
    ),
    "duplicate key": (
        TARGET + "performance:\n  min_speedup: 1.0\n  min_speedup: 2.0",
        "p.yaml:7:3: performance.min_speedup: the key is given twice (first on line 6); each key once",
    ),
    "merge key twice": (
        "targets:\n  t: &t {threads: 1}\n  u:\n    <<: *t\n    <<: {threads: 2}\n",
        'p.yaml:8:5: targets.u."<<": the key is given twice (first on line 7); merge several maps in one: <<: [*a, *b]',
    ),
    "another case of a key": (
        "targets: {t: {THREADS: 2}}",
        "p.yaml:4:15: targets.t.THREADS: unknown key; one of: device, backends, precisions, shapes, batch_sizes, "
        "threads, required, hardware, family, options, generation, ladder, tolerances, performance, select, fallback, "
        "promote, serving; did you mean threads?",
    ),
    "scientific number as text": (
        TARGET + "tolerances: {fp32: {max_abs: 1e-4}}",
        "p.yaml:5:30: tolerances.fp32.max_abs: `1e-4` is text to YAML 1.1, which wants a point in it and a sign in its "
        "exponent; write 1.0e-4",
    ),
    "scientific number where a whole one is wanted": (
        "targets: {t: {threads: 1e1}}",
        "p.yaml:4:24: targets.t.threads: `1e1` is text to YAML 1.1, which wants a point in it and a sign in its "
        "exponent; write 10",
    ),
    "a digit that octal numbers do not have": (
        "targets: {t: {threads: 08}}",
        "p.yaml:4:24: targets.t.threads: `08` is text to YAML 1.1, where a number that begins with 0 has digits below "
        "8; write 8",
    ),
    "quoted scientific number": (
        TARGET + "tolerances: {fp32: {max_abs: '1e-4'}}",
        "p.yaml:5:30: tolerances.fp32.max_abs: the number 1e-4 is in quotes, which makes it text; write 1.0e-4 without "
        "quotes",
    ),
    "a fraction of base 60": (
        TARGET + "budget: {minutes: 1:30.5}",
        "p.yaml:5:19: budget.minutes: `1:30.5` is read by YAML as 90.5; write 90.5, or quote a text",
    ),
    "half of a character": (
        TARGET + 'owner: "\\ud83d"',
        "p.yaml:5:8: owner: the character \\ud83d is half of one, and can't be written; the character itself, or \\U "
        "and eight digits",
    ),
    "quoted number": (
        TARGET + "data: {min_samples: '32'}",
        "p.yaml:5:21: data.min_samples: the number 32 is in quotes, which makes it text; write 32 without quotes",
    ),
    "unit in the value": (
        TARGET + "performance: {p95_latency_ms: 20ms}",
        "p.yaml:5:31: performance.p95_latency_ms: `20ms` is text: the unit stands in the key's name; write 20",
    ),
    "minutes by one letter": (
        TARGET + "budget: {minutes: 10m}",
        "p.yaml:5:19: budget.minutes: `10m` is text: the unit stands in the key's name; write 10",
    ),
    "memory as Kubernetes has it": (
        TARGET + "budget: {job_memory_mb: 12G}",
        "p.yaml:5:25: budget.job_memory_mb: `12G` is text: the unit stands in the key's name; write 12000",
    ),
    "another unit than the key's": (
        TARGET + "budget: {minutes: 90s}",
        "p.yaml:5:19: budget.minutes: `90s` is text: the unit stands in the key's name; write 1.5",
    ),
    "a larger unit than the key's": (
        TARGET + "performance: {max_size_mb: 1.5GB}",
        "p.yaml:5:28: performance.max_size_mb: `1.5GB` is text: the unit stands in the key's name; write 1500",
    ),
    "a unit where the key has none, and begins like one": (
        TARGET + "data: {min_samples: 32ms}",
        "p.yaml:5:21: data.min_samples: `32ms` is text, and the number has no unit here; write 32",
    ),
    "a wrong value is not said to be null where a gate needs it": (
        TARGET + "performance: {throughput_at_p99: 10}\nserving: {p99_ms: 50ms}",
        "p.yaml:6:19: serving.p99_ms: `50ms` is text: the unit stands in the key's name; write 50",
    ),
    "wrong labels are not said to be null where a gate needs them": (
        TARGET + "data: {validation: {labels: 7}}\ntolerances: {int8: {accuracy: {max_drop: 0.1}}}",
        "p.yaml:5:29: data.validation.labels: `7` is read by YAML as a number, and a text is needed; put it in quotes: "
        '"7"',
    ),
    "octal": (
        "targets: {t: {threads: 010}}",
        "p.yaml:4:24: targets.t.threads: `010` is read by YAML as 8; write 8, or quote a text",
    ),
    "infinity": (
        TARGET + "performance: {max_size_mb: .inf}",
        "p.yaml:5:28: performance.max_size_mb: `.inf` is not a finite number; a finite number, or "
        "null where no limit is meant",
    ),
    "more threads than any machine has": (
        "targets: {t: {threads: 1000000000}}",
        "p.yaml:4:24: targets.t.threads: 1000000000 is out of range; a number <= 1024",
    ),
    "float for whole number": (
        "targets: {t: {threads: 2.5}}",
        "p.yaml:4:24: targets.t.threads: 2.5 is not whole; write a whole number, without a point",
    ),
    "word for number": (
        "targets: {t: {threads: many}}",
        "p.yaml:4:24: targets.t.threads: `many` is text; write a whole number",
    ),
    "yes for number": (
        "targets: {t: {threads: yes}}",
        "p.yaml:4:24: targets.t.threads: `yes` is read by YAML as true; write a whole number",
    ),
    "target called no": (
        "targets: {no: {}}",
        'p.yaml:4:11: targets: the key `no` is read by YAML as a yes/no value, not as text; put it in quotes: "no"',
    ),
    "boolean for text": (
        "owner: on\n" + TARGET,
        'p.yaml:4:8: owner: `on` is read by YAML as true/false, and a text is needed; put it in quotes: "on"',
    ),
    "boolean for a word": (
        TARGET + "compliance: {on_hardware_mismatch: off}",
        "p.yaml:5:36: compliance.on_hardware_mismatch: `off` is read by YAML as false; one of, in quotes if need be: "
        "error, warn, ignore",
    ),
    "text for boolean": (
        TARGET + "fallback: {mixed_precision: 'yes'}",
        "p.yaml:5:29: fallback.mixed_precision: `yes` is text or a number, not a yes or no; write true or false, "
        "without quotes",
    ),
    "date for text": (
        "owner: 2026-01-01\n" + TARGET,
        "p.yaml:4:8: owner: `2026-01-01` is read by YAML as a date, and a text is needed; put it in quotes: "
        '"2026-01-01"',
    ),
    "number for text": (
        "owner: 1.10\n" + TARGET,
        'p.yaml:4:8: owner: `1.10` is read by YAML as a number, and a text is needed; put it in quotes: "1.10"',
    ),
    "text for date": (
        TARGET + "waivers: [{gate: cosine, target: t, reason: r, owner: o, expires: soon}]",
        "p.yaml:5:67: waivers[0].expires: `soon` is not a date; write YYYY-MM-DD, such as 2027-01-31",
    ),
    "no such day": (
        TARGET + "waivers: [{gate: cosine, target: t, reason: r, owner: o, expires: 2027-02-31}]",
        "p.yaml:5:67: waivers[0].expires: `2027-02-31` is not a valid date",
    ),
    "expired waiver": (
        TARGET + "waivers: [{gate: cosine, target: t, reason: r, owner: o, expires: 2026-05-30}]",
        "p.yaml:5:67: waivers[0].expires: the waiver expired on 2026-05-30, 2 days ago; remove it, or have its owner "
        "renew it",
    ),
    "waiver of no gate": (
        TARGET + "waivers: [{gate: cosin, target: t, reason: r, owner: o, expires: 2027-01-31}]",
        "p.yaml:5:18: waivers[0].gate: target 't' has no gate 'cosin'; one of: max_rel, cosine, column_nrmse, "
        "column_spread, top1_regret, agreement, token_kl, token_top1_agreement, perplexity, mean_snr_db, "
        "robustness, speedup; did you mean cosine?",
    ),
    "two waivers of one gate": (
        TARGET + "waivers: [{gate: min_speedup, target: t, reason: r, owner: o, expires: 2027-01-31},\n"
        "  {gate: speedup, target: t, reason: s, owner: p, expires: 2027-02-28}]",
        "p.yaml:6:10: waivers[1].gate: waivers[0] (line 5) lets the same gate of target 't' be missed; keep one of the "
        "two",
    ),
    "waiver of no target": (
        TARGET + "waivers: [{gate: cosine, target: u, reason: r, owner: o, expires: 2027-01-31}]",
        "p.yaml:5:34: waivers[0].target: unknown target 'u'; one of: t",
    ),
    "waiver without owner": (
        TARGET + "waivers: [{gate: cosine, target: t, reason: r, expires: 2027-01-31}]",
        "p.yaml:5:11: waivers[0].owner: is missing; Who is responsible for it",
    ),
    "too many rows": (
        "targets: {t: {batch_sizes: [1, 99999999999999999999]}}",
        "p.yaml:4:32: targets.t.batch_sizes[1]: 99999999999999999999 is out of range; a number <= 1048576",
    ),
    "too many rows of a request": (
        "targets: {t: {serving: {rows: 1048577}}}",
        "p.yaml:4:31: targets.t.serving.rows: 1048577 is out of range; a number <= 1048576",
    ),
    "too many tokens": (
        "targets: {t: {generation: {new_tokens: 2000000000}}}",
        "p.yaml:4:40: targets.t.generation.new_tokens: 2000000000 is out of range; a number <= 1048576",
    ),
    "too long a side": (
        "targets: {t: {shapes: {x: {min: [1, 1], typical: [1, 1], max: [1, 4294967296]}}}}",
        "p.yaml:4:67: targets.t.shapes.x.max[1]: 4294967296 is out of range; a number <= 2147483647",
    ),
    "too many clients": (
        TARGET + "serving: {clients: [1000000]}",
        "p.yaml:5:21: serving.clients[0]: 1000000 is out of range; a number <= 1024",
    ),
    "too many samples": (
        TARGET + "data: {calibration: {max_samples: 99999999999999999999}}",
        "p.yaml:5:35: data.calibration.max_samples: 99999999999999999999 is out of range; a number <= 2147483647",
    ),
    "more memory than there is": (
        TARGET + "budget: {job_memory_mb: 1.0e+308}",
        "p.yaml:5:25: budget.job_memory_mb: 1.0e+308 is out of range; a number <= 1e+09",
    ),
    "too large a seed": (
        TARGET + "data: {seed: 99999999999999999999}",
        "p.yaml:5:14: data.seed: 99999999999999999999 is out of range; a number <= 9007199254740991",
    ),
    "out of range": (
        TARGET + "tolerances: {int8: {cosine: 1.5}}",
        "p.yaml:5:29: tolerances.int8.cosine: 1.5 is out of range; a number <= 1",
    ),
    "shapes in the wrong order": (
        "targets: {t: {shapes: {x: {min: [1, 3], typical: [8, 3], max: [4, 3]}}}}",
        "p.yaml:4:50: targets.t.shapes.x.typical: axis 0 of typical (8) is larger than that of max (4); min <= typical "
        "<= max in every axis",
    ),
    "shapes of different ranks": (
        "targets: {t: {shapes: {x: {min: [1, 3], typical: [1], max: [4, 3]}}}}",
        "p.yaml:4:27: targets.t.shapes.x: the shapes have different ranks: min has 2, typical has 1, max has 2; equal "
        "ranks",
    ),
    "shapes that leave out the batch size that nobody wrote": (
        "targets: {t: {shapes: {x: {min: [2, 3], typical: [4, 3], max: [8, 3]}}}}",
        "p.yaml:4:27: targets.t.shapes.x: batch size 1 is outside the shapes of input 'x'; axis 0 goes from 2 to 8",
    ),
    "batch size outside of the shapes": (
        "targets: {t: {batch_sizes: [1, 16], shapes: {x: {min: [1, 3], typical: [2, 3], max: [4, 3]}}}}",
        "p.yaml:4:32: targets.t.batch_sizes[1]: batch size 16 is outside the shapes of input 'x'; axis 0 goes from 1 "
        "to 4",
    ),
    "a shape without max": (
        "targets: {t: {shapes: {x: {min: [1], typical: [1]}}}}",
        "p.yaml:4:27: targets.t.shapes.x.max: is missing; The largest shape that is promised to work; "
        "the published model refuses larger ones",
    ),
    "unknown metric": (
        TARGET + "tolerances: {int8: {outputs: {y: {cosin: 0.9}}}}",
        "p.yaml:5:35: tolerances.int8.outputs.y.cosin: unknown metric; one of: max_abs, mean_abs, max_rel, allclose, "
        "cosine, mean_cosine, snr_db, mean_snr_db, psnr_db, mean_psnr_db, kl, mean_kl, top1_agreement, topk_agreement, "
        "top1_regret, column_nrmse, column_spread, similarity_spearman, nearest_kept, agreement, accuracy, f1, "
        "class_recall, roc_auc, "
        "log_loss, mae, rmse, r2, spearman, ndcg, coco_map, wer, ece, token_kl, "
        "token_top1_agreement, perplexity, token_accuracy; did you mean cosine?",
    ),
    "own metric without function": (
        TARGET + "tolerances: {int8: {'python:metrics': {limit: 1, direction: at_most}}}",
        'p.yaml:5:21: tolerances.int8."python:metrics": is not a function path; write python:package.module:function',
    ),
    "own metric without direction": (
        TARGET + "tolerances: {int8: {'python:m:f': {limit: 1}}}",
        'p.yaml:5:35: tolerances.int8."python:m:f".direction: is missing; Which side of the limit is good',
    ),
    "unknown precision": (
        "targets: {t: {precisions: [int9]}}",
        "p.yaml:4:28: targets.t.precisions[0]: unknown value 'int9'; one of: fp32, fp16, bf16, int8, int8-dynamic, "
        "int4, fp8; did you mean int8?",
    ),
    "tolerance of an unknown precision": (
        TARGET + "tolerances: {fp23: {cosine: 0.9}}",
        "p.yaml:5:14: tolerances.fp23: unknown precision; one of: fp32, fp16, bf16, int8, int8-dynamic, int4, fp8; did "
        "you mean fp32?",
    ),
    "unknown device": (
        "targets: {t: {device: cudda}}",
        "p.yaml:4:23: targets.t.device: unknown value 'cudda'; one of: cpu, cuda, rocm, vulkan, apple, android, "
        "browser; did you mean cuda?",
    ),
    "a device by another word": (
        "targets: {t: {device: gpu}}",
        "p.yaml:4:23: targets.t.device: unknown value 'gpu'; one of: cpu, cuda, rocm, vulkan, apple, android, "
        "browser; did you mean cuda?",
    ),
    "one backend, not in a list": (
        "targets: {t: {backends: openvino}}",
        "p.yaml:4:25: targets.t.backends: `openvino` is not a list of backends; write `auto`, or a list: [openvino]",
    ),
    "auto among others": (
        "targets: {t: {backends: [auto]}}",
        "p.yaml:4:26: targets.t.backends[0]: `auto` stands alone; write `backends: auto`, or name the backends",
    ),
    "forbidden backend": (
        "targets: {t: {backends: [openvino]}}\ncompliance: {allowed_backends: [onnxruntime]}",
        "p.yaml:4:26: targets.t.backends[0]: openvino is forbidden by compliance.allowed_backends (p.yaml:5); one of: "
        "onnxruntime",
    ),
    "no backend allowed": (
        "targets: {t: {backends: [openvino]}}\ncompliance: {allowed_backends: []}",
        "p.yaml:4:26: targets.t.backends[0]: openvino is forbidden by compliance.allowed_backends (p.yaml:5); it "
        "allows none: null allows any",
    ),
    "target's name": (
        "targets: {a--b: {}}",
        "p.yaml:4:11: targets.a--b: 'a--b' is not a valid name; letters, digits, `_` and single `-`, since it becomes "
        "part of job ids and aliases",
    ),
    "no targets": (
        "targets: {}",
        "p.yaml:4:10: targets: the policy names no target; say where it must run, such as targets: {cpu-server: "
        "{device: cpu}}",
    ),
    "targets forgotten": (
        "owner: me",
        "p.yaml:1:1: targets: the policy names no target; say where it must run, such as targets: {cpu-server: "
        "{device: cpu}}",
    ),
    "nothing after the colon": (
        "targets:\n",
        "p.yaml:4:9: targets: has no value; a map such as {NAME: {device: ...}} is needed here: By name: where "
        "artifacts must run. Only a base that others extend may have none",
    ),
    "targets as a list": (
        "targets: [cpu]",
        "p.yaml:4:10: targets: is a list; a map such as {NAME: {device: ...}} is needed here: By name: where artifacts "
        "must run. Only a base that others extend may have none",
    ),
    "a metric without its precision": (
        TARGET + "tolerances: {cosine: 0.99}",
        "p.yaml:5:22: tolerances.cosine: `0.99` is a single value; a metric stands under the precision that it is for: "
        "write fp32: {cosine: ...}",
    ),
    "curly quotes, as a document or a chat makes them": (
        TARGET + "data: {validation: {source: “mlflow-dataset:held-out”}}",
        "p.yaml:5:29: data.validation.source: '“mlflow-dataset:held-out”' holds a curly quote, which is no quote to "
        'YAML; write "mlflow-dataset:held-out"',
    ),
    "a limit that a half-edited file lost": (
        TARGET + "performance:\n  min_speedup:\n",
        "p.yaml:6:15: performance.min_speedup: has no value; write null if none is meant",
    ),
    "the limits of a precision that a half-edited file lost": (
        TARGET + "tolerances:\n  int8:\n  fp32: {cosine: 0.9}\n",
        "p.yaml:6:8: tolerances.int8: has no value; write null if none is meant",
    ),
    "a currency that is no code": (
        TARGET + "serving: {currency: euro}",
        "p.yaml:5:21: serving.currency: 'euro' is not the code of a currency; three capital letters, such as USD",
    ),
    "a tag that MLflow does not take": (
        TARGET + "promote: {alias: a, approval: 'ok!'}",
        "p.yaml:5:31: promote.approval: 'ok!' can't be the name of a tag; letters, digits, blanks, and any of _ . / : "
        "-",
    ),
    "a value for a map": (
        TARGET + "budget: 60",
        "p.yaml:5:9: budget: `60` is a single value; a map such as {minutes: ...} is needed here: What a run may cost",
    ),
    "a value for a list": (
        "targets: {t: {batch_sizes: 1}}",
        "p.yaml:4:28: targets.t.batch_sizes: is not a list; write [1]",
    ),
    "empty list": (
        "targets: {t: {batch_sizes: []}}",
        "p.yaml:4:28: targets.t.batch_sizes: is empty; at least one entry: Each is validated and measured; selection "
        "looks at the first, or as `select.prefer` says. More rows are served in parts of the largest: "
        "name what users send",
    ),
    "data file that isn't there": (
        TARGET + "data: {validation: {source: 'file:/none/val.npz'}}",
        "p.yaml:5:29: data.validation.source: there is no file /none/val.npz; a path is relative to the policy file "
        "that names it",
    ),
    "data file of an unknown kind": (
        TARGET + "data: {validation: {source: 'file:val.txt'}}",
        "p.yaml:5:29: data.validation.source: 'val.txt' is not a data file that can be read; file:PATH ends in .npz, "
        ".parquet or .csv",
    ),
    "data file without file:": (
        TARGET + "data: {validation: {source: val.npz}}",
        "p.yaml:5:29: data.validation.source: 'val.npz' is not a data source; one of: input_example, "
        "synthetic, file:PATH, mlflow-dataset:NAME or python:package.module:function; did you mean file:val.npz?",
    ),
    "unknown source": (
        TARGET + "data: {validation: {source: mlflow-datset:x}}",
        "p.yaml:5:29: data.validation.source: 'mlflow-datset:x' is not a data source; one of: input_example, "
        "synthetic, file:PATH, mlflow-dataset:NAME or python:package.module:function; did you mean mlflow-dataset:x?",
    ),
    "source like no other": (
        TARGET + "data: {validation: {source: 'http://x'}}",
        "p.yaml:5:29: data.validation.source: 'http://x' is not a data source; one of: input_example, "
        "synthetic, file:PATH, mlflow-dataset:NAME or python:package.module:function",
    ),
    "source function without module": (
        TARGET + "data: {validation: {source: 'python:f'}}",
        "p.yaml:5:29: data.validation.source: 'f' is not a function path; write python:package.module:function",
    ),
    "task metric without labels": (
        TARGET + "tolerances: {int8: {f1: 0.01}}",
        "p.yaml:5:25: tolerances.int8.f1: this needs labels, and data.validation.labels is null, so it could never "
        "pass; name the array or column that holds them",
    ),
    "confidence in per cent": (  # the range of a drop would be wrong advice
        TARGET + "data: {validation: {labels: y}}\ntolerances: {int8: {accuracy: {max_drop: 0.01, confidence: 95}}}",
        "p.yaml:6:60: tolerances.int8.accuracy.confidence: 95 is out of range; a number < 1",
    ),
    "confidence of a coin": (
        TARGET + "data: {validation: {labels: y}}\ntolerances: {int8: {accuracy: {max_drop: 0.01, confidence: 0.5}}}",
        "p.yaml:6:60: tolerances.int8.accuracy.confidence: 0.5 is out of range; a number > 0.5",
    ),
    "empty name among names": (
        TARGET + "applies_to: {names: ['']}",
        "p.yaml:5:22: applies_to.names[0]: is empty; at least one character",
    ),
    "both drops": (
        TARGET + "data: {validation: {labels: y}}\ntolerances: {int8: {f1: {max_drop: 0.1, max_relative_drop: 0.1}}}",
        "p.yaml:6:25: tolerances.int8.f1: max_drop and max_relative_drop are both given; exactly one of max_drop, "
        "max_relative_drop",
    ),
    "neither drop": (
        TARGET + "data: {validation: {labels: y}}\ntolerances: {int8: {f1: {confidence: 0.9}}}",
        "p.yaml:6:25: tolerances.int8.f1: no limit is given; exactly one of max_drop, max_relative_drop",
    ),
    "unknown placeholder": (
        TARGET + "publish: {name: '{modle}-x'}",
        "p.yaml:5:17: publish.name: unknown placeholder {modle}; use {model}",
    ),
    "the source's own name": (
        TARGET + "publish: {name: '{model}'}",
        "p.yaml:5:17: publish.name: the compiled versions would become versions of the source model; use "
        "{model}-compiled",
    ),
    "broken placeholder": (
        TARGET + "publish: {name: '{model'}",
        "p.yaml:5:17: publish.name: '{model' is not a valid template: expected '}' before end of string; use {model}",
    ),
    "reserved alias": (
        TARGET + "promote: {alias: latest}",
        "p.yaml:5:18: targets.t.promote.alias: 'latest' can't be an alias; letters, digits, `_` and `-`; not `latest`, "
        "not `v1`",
    ),
    "alias that could not be moved back": (  # 250 characters of MLflow's tags, with ours before it
        TARGET + f"promote: {{alias: {'p' * 228}}}",
        "p.yaml:5:18: targets.t.promote.alias: the alias has 228 characters, and one that can be moved back at most "
        "227; use a shorter one",
    ),
    "tag": (
        "targets: {t: {threads: !!python/object:os.system 1}}",
        "p.yaml:4:24: targets.t.threads: the tag !!python/object:os.system is not allowed; plain YAML values only",
    ),
    "tag that takes a limit away": (  # a reader sees a limit of 200
        TARGET + "performance: {max_size_mb: !!null 200}",
        "p.yaml:5:28: performance.max_size_mb: the tag !!null is not allowed; plain YAML values only",
    ),
    "tag of a text": (
        TARGET + "owner: !!str 12",
        "p.yaml:5:8: owner: the tag !!str is not allowed; plain YAML values only",
    ),
    "tag without a name": (
        TARGET + "owner: ! 12",
        "p.yaml:5:8: owner: the tag ! is not allowed; plain YAML values only",
    ),
    "tag of a map": (
        "targets: !!map {t: {}}",
        "p.yaml:4:10: targets: the tag !!map is not allowed; plain YAML values only",
    ),
    "tag of a list": (
        "targets: {t: {batch_sizes: !!python/tuple [1]}}",
        "p.yaml:4:28: targets.t.batch_sizes: the tag !!python/tuple is not allowed; plain YAML values only",
    ),
    "tag of a key": (
        TARGET + "!!str owner: me",
        "p.yaml:5:1: the tag !!str is not allowed; plain YAML values only",
    ),
    "unknown hardware field": (
        "targets: {t: {hardware: {machin: x86_64}}}",
        "p.yaml:4:26: targets.t.hardware.machin: unknown hardware field; one of: fingerprint, system, machine, cpu, "
        "features, without, cores, accelerators; did you mean machine?",
    ),
    "cores in words": (
        "targets: {t: {hardware: {cores: eight}}}",
        "p.yaml:4:33: targets.t.hardware.cores: no machine has 'eight' cores; a whole number from 1, as `doctor` "
        "prints it",
    ),
    "no cores": (
        "targets: {t: {hardware: {cores: 0}}}",
        "p.yaml:4:33: targets.t.hardware.cores: no machine has '0' cores; a whole number from 1, as `doctor` prints it",
    ),
    "two words for a field of one": (
        "targets: {t: {hardware: {machine: x86_64 arm64}}}",
        "p.yaml:4:35: targets.t.hardware.machine: no machine's machine is 'x86_64 arm64'; one word, as `doctor` prints "
        "it",
    ),
    "anchor that is not there": (
        "targets: *t",
        "p.yaml:4:10: not valid YAML: found undefined alias 't'; define the anchor (&name) above its use (*name), or "
        "quote a text that begins with `*`",
    ),
    "unclosed bracket": (
        "targets: {t: {}\nowner: x\n",
        "p.yaml:5:1: not valid YAML: expected ',' or '}', but got '<scalar>' (while parsing a flow mapping, which "
        "starts on line 4)",
    ),
    "second colon": (
        "owner: a: b\n",
        "p.yaml:4:9: not valid YAML: a second `:` on this line, or a wrong indentation; quote a text that holds `: `, "
        "and put each key on its own line",
    ),
    "tab": (
        "targets:\n\tt: {}\n",
        "p.yaml:5:1: a tab stands where YAML wants blanks; indent with blanks only",
    ),
    "two documents": (
        TARGET + "---\na: 1\n",
        "p.yaml:5:1: a second YAML document starts here; a policy file holds one",
    ),
    "control character": (
        "owner: a\x07b\n",
        "p.yaml:4:9: the character U+0007 is not allowed in YAML",
    ),
    "merge key of no map": (
        "targets: {t: {<<: 1}}",
        'p.yaml:4:19: targets.t."<<": only a map can be merged in; <<: *anchor of a map',
    ),
    "key that is a list": (
        "targets: {t: {[1]: 1}}",
        "p.yaml:4:15: targets.t: a key is a list or a map; keys are plain words",
    ),
    "a blank forgotten after a colon in braces": (
        TARGET + "performance: {min_speedup:2}",
        'p.yaml:5:15: performance."min_speedup:2": unknown key; write a blank after the colon: min_speedup: 2',
    ),
    "a blank forgotten after the only colon of a map": (
        "targets:\n  t:\n    threads:2\n",
        "p.yaml:6:5: targets.t: `threads:2` is a single value; write a blank after the colon: threads: 2",
    ),
    "decimal comma": (
        TARGET + "tolerances:\n  fp32:\n    max_abs: 0,001\n",
        "p.yaml:7:14: tolerances.fp32.max_abs: `0,001` is text: a number has a decimal point, and no comma; "
        "write 0.001",
    ),
    "a comma between thousands": (
        TARGET + "data:\n  min_samples: 1,024\n",
        "p.yaml:6:16: data.min_samples: `1,024` is text: a number has no comma; write 1024",
    ),
    "a comma that may be either": (
        TARGET + "performance:\n  max_memory_mb: 1,024\n",
        "p.yaml:6:18: performance.max_memory_mb: `1,024` is text: a number has no comma; write 1024 or 1.024, "
        "whichever is meant",
    ),
    "one number for a metric that has two": (
        TARGET + "tolerances: {fp32: {allclose: 1.0e-3}}",
        "p.yaml:5:31: tolerances.fp32.allclose: `1.0e-3` is a single value; a map such as {rtol: ...} is needed here: "
        "Elementwise |a - b| <= atol + rtol * |b|",
    ),
    "backends as a map": (
        "targets: {t: {backends: {onnxruntime: {}}}}",
        "p.yaml:4:25: targets.t.backends: is a map, not a list of backends; write `auto`, or a list: [onnxruntime], "
        "their options beside it",
    ),
    "a backend with its options in the list": (
        "targets: {t: {backends: [{onnxruntime: {threads: 1}}]}}",
        "p.yaml:4:26: targets.t.backends[0]: is a map; a text is needed here",
    ),
    "a sign for times": (
        TARGET + "performance: {min_speedup: 1.5\u00d7}",
        "p.yaml:5:28: performance.min_speedup: `1.5\u00d7` is text, and the number has no unit here; write 1.5",
    ),
    "microseconds": (
        TARGET + "performance: {p95_latency_ms: 500\u00b5s}",
        "p.yaml:5:31: performance.p95_latency_ms: `500\u00b5s` is text: the unit stands in the key's name; write 0.5",
    ),
    "decimal comma in braces": (
        TARGET + "tolerances: {fp32: {max_abs: 0,001}}",
        "p.yaml:5:32: tolerances.fp32: a comma stands before `001`, and begins another key; a number has a decimal "
        "point: 0.5",
    ),
    "a limit with its direction": (
        TARGET + "tolerances: {fp32: {max_abs: <= 0.1}}",
        "p.yaml:5:30: tolerances.fp32.max_abs: `<= 0.1` is text: a limit has a direction of its own; write 0.1",
    ),
    "a limit that YAML takes for a block of text": (
        TARGET + "tolerances:\n  fp32:\n    cosine: >= 0.99\n",
        "p.yaml:7:14: not valid YAML: expected chomping or indentation indicators, but found '='; a limit is a number "
        "alone, without > or >=; a text that begins with `>` or `|` is put in quotes",
    ),
    "a number of bits for a precision": (
        "targets: {t: {precisions: [8]}}",
        "p.yaml:4:28: targets.t.precisions[0]: `8` is read by YAML as a number; one of: fp32, fp16, bf16, int8, "
        "int8-dynamic, int4, fp8",
    ),
    "what others call a precision": (
        "targets: {t: {precisions: [float16]}}",
        "p.yaml:4:28: targets.t.precisions[0]: unknown value 'float16'; one of: fp32, fp16, bf16, int8, int8-dynamic, "
        "int4, fp8; did you mean fp16?",
    ),
    "a letter of another alphabet": (
        "targets: {t: {device: \u0441pu}}",
        "p.yaml:4:23: targets.t.device: unknown value '\u0441pu', with U+0441 (CYRILLIC SMALL LETTER ES) in it; "
        "one of: cpu, cuda, rocm, vulkan, apple, android, browser; did you mean cpu?",
    ),
    "a digit of another script": (
        "targets: {t: {threads: \uff12}}",
        "p.yaml:4:24: targets.t.threads: `\uff12` is text to YAML, with U+FF12 (FULLWIDTH DIGIT TWO) in it; write 2",
    ),
    "no backends at all": (
        "targets: {t: {backends: null}}",
        "p.yaml:4:25: targets.t.backends: has no value; write `auto`, or a list of backends",
    ),
    "sizes in one text": (
        "targets: {t: {batch_sizes: 1x8}}",
        "p.yaml:4:28: targets.t.batch_sizes: is not a list; write [1, 8]",
    ),
    "one waiver without its dash": (
        TARGET + "waivers: {gate: cosine}",
        "p.yaml:5:10: waivers: is not a list; write [{gate: ...}]",
    ),
    "placeholder without quotes": (
        TARGET + "promote: {alias: {target}}",
        'p.yaml:5:18: promote.alias: is a map to YAML, since it begins with `{`; put it in quotes: "{target}"',
    ),
    "template without quotes": (
        TARGET + "publish:\n  name: {model}-fast\n",
        "p.yaml:6:16: not valid YAML: expected <block end>, but found '<scalar>'; a text that begins with `{` is put "
        "in quotes",
    ),
    "pattern without quotes": (
        TARGET + "applies_to: {names: [*-vision]}",
        "p.yaml:5:22: not valid YAML: found undefined alias '-vision'; define the anchor (&name) above its "
        "use (*name), or quote a text that begins with `*`",
    ),
    "pattern of all without quotes": (
        TARGET + "applies_to: {names: [*]}",
        "p.yaml:5:23: not valid YAML: expected alphabetic or numeric character, but found ']'; define the anchor "
        "(&name) above its use (*name), or quote a text that begins with `*`",
    ),
}


@pytest.mark.parametrize("mistake", IN_A_FILE)
def test_one_mistake_has_one_message(write, mistake):
    text, expected = IN_A_FILE[mistake]
    assert said(write(text)) == [expected]


def test_unknown_backends_name_the_nearest(write):
    found = said(
        write(
            "targets: {t: {backends: [openvnio], options: {onnxruntme: {}}}}\ncompliance: {allowed_backends: [opnvino]}"
        )
    )
    assert [line.rpartition("did you mean")[2] for line in found] == [" openvino?", " onnxruntime?", " openvino?"]
    assert found[0].startswith("p.yaml:4:26: targets.t.backends[0]: unknown backend 'openvnio'; one of: ")


@pytest.mark.parametrize(
    ("path", "name"), [("data.validation.source", "file:no.npz"), ("compliance.trusted_keys", "[no.pem]")]
)
def test_a_file_of_set_is_relative_to_the_current_folder(write, tmp_path, monkeypatch, path: str, name: str) -> None:
    """Broken: the advice sends people to the policy's folder, and a file put there is not found either."""
    policy = Path(write(TARGET)).resolve()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (problem,) = said(policy, f"{path}={name}")
    assert f"there is no file {tmp_path.resolve() / 'elsewhere' / 'no.'}" in problem
    assert problem.endswith("; in --set, a path is relative to the current folder")
    for file in ("no.npz", "no.pem"):
        (tmp_path / "elsewhere" / file).touch()
    assert said(policy, f"{path}={name}") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("compliance: {trusted_keys: [%s]}" % ("k" * 300), "trusted_keys[0]: there is no file /"),
        ("data: {validation: {source: 'file:%s.npz'}}" % ("k" * 300), "source: there is no file /"),
        ('compliance: {trusted_keys: ["a\\0b"]}', "trusted_keys[0]: 'a\\x00b' is not a file name"),
        (
            'compliance: {trusted_keys: ["-----BEGIN PUBLIC KEY-----\\nMCowBQYDK2VwAyEA"]}',
            "trusted_keys[0]: this is the text of a key; write it into a file, and name that file",
        ),
    ],
)
def test_what_can_be_no_path_is_a_mistake_with_its_place(write, text: str, says: str) -> None:
    """Broken: a key that was pasted in place of its file's name ends as a full disk, or as a bug of ours."""
    (problem,) = said(write(TARGET + text))
    assert problem.startswith("p.yaml:5:")
    assert says in problem


@pytest.mark.parametrize("name", ["file:~/x.npz", "file:${HOME}/x.npz"])
def test_a_path_with_a_variable_is_told_that_it_is_not_replaced(write, name: str) -> None:
    """Broken: the file is there, and the advice is about what the path is relative to."""
    (problem,) = said(write(f"{TARGET}data: {{validation: {{source: '{name}'}}}}"))
    assert problem.endswith("`~` and variables such as `$HOME` stand for themselves here: write the path out")


def test_a_null_that_is_written_out_takes_a_limit_away(write) -> None:
    """Broken: the advice on an empty value can't be followed."""
    text = "targets: {t: {}}\nperformance: {min_speedup: null}\ntolerances: {int8: {cosine: ~}, fp16: Null}\n"
    assert not read_policy(write(text)).problems
    assert not read_policy(write("targets: {t: {}}\n"), ["tolerances.int8.cosine=null"]).problems


@pytest.mark.parametrize("name", [*(f"a{sign}b" for sign in sorted(_NAME_FORBIDS)), "n" * 251])
def test_a_name_that_publication_refuses_is_said_by_lint(write, name: str) -> None:
    """Broken: a run compiles, proves and measures everything, and only then is told that it can't be published."""
    with pytest.raises(SourceError):
        check_name(name)
    (problem,) = said(write(TARGET + f"publish: {{name: {json.dumps(name)}}}"))
    assert ": publish.name: " in problem


@pytest.mark.parametrize(
    ("right", "typed"),
    [("name", "nam"), ("kind", "kidn"), ("apiVersion", "apiversion"), ("data", "dat"), ("targets", "targts"),
     ("performance", "performnce"), ("serving", "servng")],
)  # fmt: skip
def test_a_misspelt_section_is_the_only_mistake(write, right: str, typed: str) -> None:
    """Broken: beside `dat: unknown key; did you mean data?` lint asks for the labels that `dat` names."""
    text = (
        "data: {validation: {source: input_example, labels: y}}\n"
        "targets: {cpu: {}}\n"
        "tolerances: {fp32: {accuracy: 0.01}}\n"
        "performance: {max_cost_per_million: 2}\n"
        "serving: {price_per_hour: 1, p99_ms: 2}\n"
        "waivers: [{gate: max_cost_per_million, target: cpu, reason: a, owner: b, expires: 2099-01-01}]\n"
    )
    path = write(text)
    assert said(path) == []
    path.write_text(path.read_text().replace(f"{right}:", f"{typed}:", 1))
    (problem,) = said(path)
    assert f" {typed}: unknown key" in problem
    assert problem.endswith(f"did you mean {right}?")
