"""The policies and examples that come with compile-stage: beside the package in a checkout, inside of it when
installed."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from compile_stage.core.errors import UsageError

PREFIX = "shipped:"
"""`shipped:cpu-server` names a policy that comes with compile-stage, wherever a policy file is named."""

_PACKAGE = Path(__file__).parents[1]


def folder(kind: str) -> Path:
    """The folder of the shipped `policies` or `examples`.

    Raises:
        UsageError: This installation has none.
    """
    for place in (_PACKAGE / f"_{kind}", _PACKAGE.parent / kind):
        if place.is_dir():
            return place
    raise UsageError(f"this installation has no {kind}", fix="install compile-stage from its repository or its wheel")


def policy_names() -> tuple[str, ...]:
    """The names that `shipped:NAME` takes, in alphabetical order."""
    return tuple(sorted(path.stem for path in folder("policies").glob("*.yaml")))


def policy_file(named: str | os.PathLike[str]) -> Path:
    """The file that is meant: a path as it is, `shipped:NAME` as the file that comes with compile-stage.

    Raises:
        UsageError: No shipped policy has that name.
    """
    text = os.fspath(named)
    if not text.startswith(PREFIX):
        return Path(named)
    name = text.removeprefix(PREFIX)
    if name not in policy_names():
        from compile_stage.core.spelling import did_you_mean

        near = did_you_mean(name, list(policy_names()))
        hint = f"did you mean {PREFIX}{near}?" if near else f"one of: {', '.join(policy_names())}"
        raise UsageError(f"compile-stage ships no policy {name!r}", fix=hint)
    return folder("policies") / f"{name}.yaml"


def policy_text(name: str) -> str:
    """A shipped policy as a file of its own: what it extends is named by `shipped:`, so that it can be saved anywhere.

    Raises:
        UsageError: No shipped policy has that name.
    """
    text = policy_file(PREFIX + name.removeprefix(PREFIX)).read_text(encoding="utf-8")
    for other in policy_names():
        text = text.replace(f"extends: [{other}.yaml]", f'extends: ["{PREFIX}{other}"]')
    return text


def policy_summary(name: str) -> str:
    """The first sentence of the comment that a shipped policy begins with."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), policy_text(name).splitlines())
    return re.split(r"(?<=[.])\s|:\s|:$", " ".join(line.lstrip("# ") for line in comment))[0].rstrip(".")
