"""What is attached to a bug report: the graphs, their inputs and outputs, and a script that needs public packages
only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compile_stage.core.digest import plain
from compile_stage.graph_debug.comparison import Comparison
from compile_stage.graph_debug.graphs import find_tensors, open_graph, pair_outputs
from compile_stage.measure.samples import open_samples

SAMPLES = 4
"""A report needs a few samples that show the error, not a data set."""

_SCRIPTS = Path(__file__).parent / "scripts"


def write_trace_bundle(
    pair: Comparison, tensor: str, facts: Mapping[str, Any], into: Path, *, fixed_batch: int | None = None
) -> None:
    """`reference/`, `candidate/`, `inputs.npz`, `answers.npz`, `facts.json` and `reproduce.py` in the folder `into`.

    Args:
        tensor: In the reference: the one at which the error departs.
        facts: For people and for the script; versions, what was measured.
        fixed_batch: The one batch size that the graphs take.
    """
    reference, candidate = Path(pair.reference), Path(pair.candidate)
    shown = {"reference": _copy(reference, into / "reference"), "candidate": _copy(candidate, into / "candidate")}
    batch = open_samples(pair.samples).some(pair.order(fixed_batch or min(SAMPLES, pair.samples.count)))
    graphs = {"reference": open_graph(reference), "candidate": open_graph(candidate, hint=pair.hint)}
    shared = find_tensors(graphs["reference"], graphs["candidate"])
    pairs = pair_outputs(graphs["reference"], graphs["candidate"], shared)
    outputs = {"reference": list(pairs), "candidate": list(pairs.values())}
    own = shared.get(tensor, tensor)
    seen = graphs["candidate"].round_trips(own)
    watched = {"reference": tensor, "candidate": seen[0][0] if seen[1] and seen[0] else own}
    answers: dict[str, Any] = {}
    for role, graph in graphs.items():
        wanted = list(dict.fromkeys([*graph.outputs, watched[role]]))
        with graph.open(wanted, 1) as run:
            outputs_of = run(batch)
        answers |= {f"{role}/output_{i}": outputs_of[name] for i, name in enumerate(outputs[role])}
        answers[f"{role}/tensor"] = outputs_of[watched[role]]
    inputs: dict[str, Any] = {f"input_{i}": array for i, array in enumerate(batch.values())}
    np.savez(into / "inputs.npz", **inputs)
    np.savez(into / "answers.npz", **answers)
    described = {
        **facts,
        "files": shown,
        "hint": pair.hint,
        "inputs": list(batch),
        "fed": {role: list(graph.inputs) for role, graph in graphs.items()},
        "outputs": outputs,
        "tensor": watched,
    }
    _write(into, described, "reproduce.py")


def write_failure_bundle(graph: Path, backend: str, facts: Mapping[str, Any], into: Path) -> None:
    """`model.onnx`, `facts.json` and a script that loads it, in the folder `into`."""
    into.mkdir(parents=True, exist_ok=True)
    shown = {"model": _copy(graph, into / "model")}
    _write(into, {**facts, "files": shown, "backend": backend}, "load.py")


def _copy(path: Path, into: Path) -> str:
    """The file and what lies beside it under the same name (weights); its place in the bundle."""
    into.mkdir(parents=True, exist_ok=True)
    for file in path.parent.iterdir():
        if file.is_file() and (file == path or file.name.startswith(path.stem + ".")):
            shutil.copyfile(file, into / file.name)
    return f"{into.name}/{path.name}"


def _write(into: Path, facts: Mapping[str, Any], script: str) -> None:
    (into / "facts.json").write_text(json.dumps(plain(facts), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.copyfile(_SCRIPTS / script, into / script)
    (into / "README.md").write_text(_readme(facts, script), encoding="utf-8")


def _readme(facts: Mapping[str, Any], script: str) -> str:
    versions: Mapping[str, str] = facts.get("packages", {})
    lines: Sequence[str] = (
        f"# {facts.get('title', 'A model that goes wrong')}",
        "",
        str(facts.get("summary", "")),
        "",
        f"    python {script}",
        "",
        "says whether it still does here (exit code 0: it does; 1: it does not). What it needs stands at its "
        "beginning.",
        "",
        f"Seen with {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "",
    )
    return "\n".join(lines)
