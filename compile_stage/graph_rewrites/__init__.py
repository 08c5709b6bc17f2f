"""Rewrites of portable ONNX graphs before they are lowered: what an exporter writes for safety or by habit, in a form
that costs less. `apply.py` applies them, one after the other, and compares the graph's answers before and after."""

from __future__ import annotations
