"""Which packages the metrics of a policy need that a light install has not."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from compile_stage.core.records import Gate

PACKAGES = {"coco_map": "pycocotools", "wer": "jiwer"}
"""Metric → module, which the extra `metrics` brings."""


def missing_package(gates: Iterable[Gate]) -> str | None:
    """None when all that the gates need is installed, or the reason with the exact command."""
    for gate in gates:
        module = PACKAGES.get(gate.metric)
        if module is not None and find_spec(module) is None:
            return f'{gate.metric} needs {module}, which is not installed: pip install "compile-stage[metrics]"'
    return None
