"""The names under which MLflow keeps a model's input example: they stand in `MLmodel`, so whoever logged the model
chose them."""

from __future__ import annotations

import re

EXAMPLE_KEYS = ("artifact_path", "serving_input_path")
"""Of `saved_input_example_info` in `MLmodel`; each names a file."""

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.json")


def is_example_name(name: object) -> bool:
    """True for a JSON file of the model's folder itself. A path could lead out of the folder that is read, or out of
    the one that is written, or replace the artifact in a bundle."""
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None
