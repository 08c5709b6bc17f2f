"""`locked:` in a policy file: values that no later layer may change.

A lock holds for the files that extend the one that declares it, for the target's own sections in them, and for `--set`.
It compares resolved values, so a change that comes by way of a shipped default counts, and an equal value does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from compile_stage.core import plugins
from compile_stage.core.error_codes import Code
from compile_stage.core.spelling import did_you_mean
from compile_stage.policy.messages import keys_at
from compile_stage.policy.metrics import CUSTOM, tolerance_names
from compile_stage.policy.nodes import Node, Path, Place, Problem, show_path
from compile_stage.policy.schema import OVERRIDABLE

# What every file says for itself.
UNLOCKABLE = ("apiVersion", "kind", "name", "extends", "locked")

_WORD = re.compile(r'"([^"]*)"|([^."]+)')


def words_of(dotted: str) -> Path:
    """`tolerances.fp32."python:a.b:c"` → its keys."""
    return tuple(quoted or bare for quoted, bare in _WORD.findall(dotted))


@dataclass(frozen=True)
class Lock:
    """One entry of `locked`: what may not change, and where that was written."""

    path: Path
    place: Place

    def covers(self, path: Path) -> bool:
        """Whether a resolved value is locked. A section that a target may override is locked in the targets too."""
        if path[: len(self.path)] == self.path:
            return True
        in_target = path[:1] == ("targets",) and self.path[0] in OVERRIDABLE
        return in_target and path[2 : 2 + len(self.path)] == self.path


def locks_of(tree: Node) -> tuple[Lock, ...]:
    """The locks that a tree carries."""
    elements = tree.elements("locked")
    return tuple(Lock(words_of(e.value), e.place) for e in elements if isinstance(e.value, str) and words_of(e.value))


def joined(under: Node, over: Node) -> Node | None:
    """The entries of both `locked` lists, since a later layer can't take a lock away; None when there are none."""
    entries = [*under.elements("locked"), *over.elements("locked")]
    place = next((node.place for node in (over.get("locked"), under.get("locked")) if node is not None), None)
    return Node(list({str(e.value): e for e in reversed(entries)}.values())[::-1], place) if place is not None else None


def unknown_locks(tree: Node) -> Iterator[Problem]:
    """Entries that name nothing: they would protect nothing."""
    for index, element in enumerate(tree.elements("locked")):
        path = words_of(str(element.value))
        for depth, word in enumerate(path):
            known = _known(path[:depth])
            if known and word not in known and not (path[0] == "tolerances" and str(word).startswith(CUSTOM)):
                near = did_you_mean(str(word), list(known))
                wrong = f"{element.value!r} is not a key that can be locked"
                allowed = f"after {show_path(path[:depth])}, one of" if depth else "one of"
                meant = show_path((*path[:depth], near, *path[depth + 1 :])) if near else ""
                yield Problem(
                    element.place,
                    show_path(("locked", index)),
                    wrong,
                    f"{allowed}: {', '.join(known)}",
                    meant,
                    code=Code.LOCKED,
                )
                break


def _known(above: Path) -> tuple[str, ...]:
    """The words that may follow; none where any may."""
    if not above:
        return tuple(key for key in keys_at(()) if key not in UNLOCKABLE)
    if above == ("tolerances",):
        return plugins.precisions()
    if above[0] == "tolerances" and len(above) in (2, 4):
        return (*tolerance_names(), "outputs") if len(above) == 2 else tolerance_names()
    return keys_at(above)


def broken(locks: tuple[Lock, ...], before: Node, after: Node, over: Node) -> Iterator[Problem]:
    """A problem for each locked value that a layer changes.

    Args:
        before: The resolved whole without the layer.
        after: The resolved whole with it.
        over: The layer itself, for the place of what it changes.
    """
    for lock in locks:
        paths = [lock.path]
        if lock.path[0] in OVERRIDABLE:
            paths += [("targets", name, *lock.path) for name, _ in after.items("targets")]
        for path in paths:
            for changed, was, now in _differences(before.get(*path), after.get(*path), path):
                place = now.place if now is not None and _is_of(over, now.place) else over.place_of(changed)
                kept = f"must stay {_shown(was)}" + (f" ({was.place.origin})" if was is not None else "")
                message = f"is locked by {lock.place.origin}: it {kept}"
                yield Problem(
                    place,
                    show_path(changed),
                    message,
                    f"leave it out, or have {lock.place.file} changed",
                    code=Code.LOCKED,
                )


def _differences(was: Node | None, now: Node | None, path: Path) -> Iterator[tuple[Path, Node | None, Node | None]]:
    if was is not None and now is not None and was.is_map and now.is_map:
        for key in dict.fromkeys([*was.value, *now.value]):
            yield from _differences(was.get(key), now.get(key), (*path, key))
    elif _plain(was) != _plain(now):
        yield path, was, now


def _plain(node: Node | None) -> object:
    """No limit is written in two ways: left out, and null."""
    return None if node is None else node.plain()


def _is_of(layer: Node, place: Place) -> bool:
    return place.file == layer.place.file or (place.line == 0 and place.file.startswith("--set"))


def _shown(node: Node | None) -> str:
    if node is None or node.value is None:
        return "unset"
    if node.is_map:
        return "as it is"
    return f"`[{', '.join(map(str, node.plain()))}]`" if node.is_list else f"`{node.text or node.value}`"
