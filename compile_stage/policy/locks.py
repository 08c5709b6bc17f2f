"""`locked:` in a policy file: values that no later layer may change.

A lock holds for the files that extend the one that declares it, whatever else they extend, for the target's own
sections in them, and for `--set`. It compares resolved values, so a change that comes by way of a shipped default
counts, and an equal value does not. A locked limit is compared for each output too, since a limit under `outputs` takes
its place there. `targets.*` stands for each target, also for one that only a later layer has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from compile_stage.core import plugins
from compile_stage.core.error_codes import Code
from compile_stage.core.spelling import did_you_mean
from compile_stage.policy.messages import holds_keys, keys_at
from compile_stage.policy.metrics import CUSTOM, tolerance_names
from compile_stage.policy.named_files import files_at
from compile_stage.policy.nodes import Node, Path, Place, Problem, show_path
from compile_stage.policy.schema import OVERRIDABLE

# What every file says for itself.
UNLOCKABLE = ("apiVersion", "kind", "name", "extends", "locked")

_EACH = ("targets", "*")

_WORD = re.compile(r'"([^"]+)"|([^."]+)')


def words_of(dotted: str) -> Path:
    """`tolerances.fp32."python:a.b:c"` → its keys; none where one of them is empty, or a quote is not closed."""
    words = re.fullmatch(rf"(?:{_WORD.pattern})(?:\.(?:{_WORD.pattern}))*", dotted.strip())
    return tuple(quoted or bare for quoted, bare in _WORD.findall(dotted.strip())) if words is not None else ()


@dataclass(frozen=True)
class Lock:
    """One entry of `locked`: what may not change, and where that was written."""

    path: Path
    place: Place

    @property
    def is_of_each_target(self) -> bool:
        """Whether it holds for each target, whatever its name."""
        return self.path[0] in OVERRIDABLE or self.path[:2] == _EACH

    def paths(self, targets: Iterable[str]) -> list[Path]:
        """The values or sections that it locks, where these targets are."""
        if self.path[:2] == _EACH:
            return [("targets", name, *self.path[2:]) for name in targets]
        inherited = targets if self.path[0] in OVERRIDABLE else ()
        return [self.path, *(("targets", name, *self.path) for name in inherited)]

    def covers(self, path: Path) -> bool:
        """Whether a resolved value is locked. A section that a target may override is locked in the targets too."""
        if path[: len(self.path)] == self.path:
            return True
        if self.path[:2] == _EACH and path[:1] == ("targets",) and path[1:2] not in ((), ("*",)):
            return self.covers((*_EACH, *path[2:]))
        if path[:1] == ("targets",) and self.path[0] in OVERRIDABLE and self.covers(path[2:]):
            return True
        depth = _to_precision(path)
        of_output = depth > 0 and path[depth] == "outputs" and len(path) > depth + 2
        return of_output and self.covers((*path[:depth], *path[depth + 2 :]))


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
        if not path:
            wrong = f"{element.value!r} is not a dotted path"
            yield Problem(
                element.place, show_path(("locked", index)), wrong, "such as tolerances.int8.cosine", code=Code.LOCKED
            )
        for depth, word in enumerate(path):
            above = path[:depth]
            known = _known(above)
            if "*" in str(word) and not known and path[: depth + 1] != _EACH:
                wrong = f"{element.value!r} is not a key that can be locked"
                allowed = (
                    f"`*` stands for all targets only, as in targets.*.threads: lock {show_path(above)} as a whole"
                )
                yield Problem(element.place, show_path(("locked", index)), wrong, allowed, code=Code.LOCKED)
                break
            if not known and not holds_keys(above):
                wrong = f"{element.value!r} is not a key that can be locked"
                allowed = f"{show_path(above)} holds no keys: lock it as a whole"
                yield Problem(element.place, show_path(("locked", index)), wrong, allowed, code=Code.LOCKED)
                break
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
        for path in lock.paths([name for name, _ in after.items("targets")]):
            for changed, was, now in differences(before.get(*path), after.get(*path), path):
                yield _problem(lock, changed, was, now, over, f"is locked by {lock.place.origin}")
            for limit in _of_outputs(path, before, after):
                locked = path if lock.path[:2] == _EACH else lock.path
                wrong = f"takes the place of {show_path(locked)}, which is locked by {lock.place.origin}"
                for changed, was, now in differences(_in_force(before, limit), _in_force(after, limit), limit):
                    yield _problem(lock, changed, was, now, over, wrong)


def _problem(lock: Lock, changed: Path, was: Node | None, now: Node | None, over: Node, wrong: str) -> Problem:
    # What a target inherits was changed where the section stands.
    inherited = changed[0] == "targets" and changed[2:3] and over.get(*changed[:3]) is None
    said = over.place_of(changed[2:] if inherited else changed)
    place = now.place if now is not None and _is_of(over, now.place) else said
    kept = f"must stay {quoted(was)}" + (f" ({was.place.origin})" if was is not None else "")
    if _plain(was) == _plain(now):  # the same name of another file
        kept += (
            f", which is {', '.join(files_at(changed, was) or ())}, and not {', '.join(files_at(changed, now) or ())}"
        )
    allowed = f"leave it out, or have {lock.place.file} changed"
    return Problem(place, show_path(changed), f"{wrong}: it {kept}", allowed, code=Code.LOCKED)


def _to_precision(path: Path) -> int:
    """How many words of a path lead to a precision's limits; 0 where it leads elsewhere."""
    depth = 2 if path[:1] == ("targets",) else 0
    return depth + 2 if path[depth : depth + 1] == ("tolerances",) and len(path) > depth + 2 else 0


def _of_outputs(path: Path, before: Node, after: Node) -> Iterator[Path]:
    """Where single outputs have a limit of their own, before or after, in the place of the one at that path."""
    depth = _to_precision(path)
    if not depth or path[depth] == "outputs":
        return
    group, limit = path[:depth], path[depth:]
    named = [output for tree in (before, after) for output, _ in tree.items(*group, "outputs")]
    for output in dict.fromkeys(named):
        own = (*group, "outputs", output, *limit)
        if any(_plain(tree.get(*own[: depth + 3])) is not None for tree in (before, after)):
            yield own


def _in_force(tree: Node, path: Path) -> Node | None:
    """What holds of an output: its own limit, or the general one where it has none."""
    depth = _to_precision(path)
    own = tree.get(*path[: depth + 3])
    limit = own if _plain(own) is not None else tree.get(*path[:depth], path[depth + 2])
    return None if limit is None else limit.get(*path[depth + 3 :])


def differences(was: Node | None, now: Node | None, path: Path) -> Iterator[tuple[Path, Node | None, Node | None]]:
    """Each value below a path that is not the same in both, as far down as both are maps."""
    if was is not None and now is not None and was.is_map and now.is_map:
        for key in dict.fromkeys([*was.value, *now.value]):
            yield from differences(was.get(key), now.get(key), (*path, key))
    elif _meant(path, was) != _meant(path, now):
        yield path, was, now


def _plain(node: Node | None) -> object:
    """No limit is written in two ways: left out, and null."""
    return None if node is None else node.plain()


def _meant(path: Path, node: Node | None) -> object:
    """What is compared: of the name of a file, the file. The same name means another one in another folder."""
    files = files_at(path, node)
    return _plain(node) if files is None else files


def _is_of(layer: Node, place: Place) -> bool:
    return place.file == layer.place.file or (place.line == 0 and place.file.startswith("--set"))


def quoted(node: Node | None) -> str:
    """A value as messages quote it."""
    if node is None or node.value is None:
        return "unset"
    if node.is_map:
        return "as it is"
    return f"`[{', '.join(map(str, node.plain()))}]`" if node.is_list else f"`{node.text or node.value}`"
