"""What a target asks of the machine: words that no machine's field can hold."""

from __future__ import annotations

from collections.abc import Iterator

from compile_stage.core.error_codes import Code
from compile_stage.policy.nodes import Node, Path, Problem, show_path

_ONE_WORD = ("fingerprint", "system", "machine")


def hardware_problems(tree: Node, target: Path) -> Iterator[Problem]:
    """A number of cores that is none, and several words for a field that holds one."""
    for key, node in tree.items(*target, "hardware"):
        wanted, where = str(node.value), show_path((*target, "hardware", key))
        if key == "cores" and not (wanted.isascii() and wanted.isdigit() and int(wanted) > 0):
            wrong, allowed = f"no machine has {wanted!r} cores", "a whole number from 1, as `doctor` prints it"
        elif key in _ONE_WORD and len(wanted.split()) != 1:
            wrong, allowed = f"no machine's {key} is {wanted!r}", "one word, as `doctor` prints it"
        else:
            continue
        yield Problem(node.place, where, wrong, allowed, code=Code.WRONG_VALUE)
