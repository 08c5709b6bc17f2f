"""Values that know where they were written, and the few tree operations that the policy language is made of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from compile_stage.core.error_codes import Code
from compile_stage.core.findings import Finding
from compile_stage.core.language_models import SHIPPED_DEFAULTS

Key: TypeAlias = str | int
Path: TypeAlias = tuple[Key, ...]

# The name of the shipped defaults in messages and origins.
SHIPPED = SHIPPED_DEFAULTS

_BARE_KEY = re.compile(r"[A-Za-z_][\w-]*\Z")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a value was written. `line` and `column` count from 1; `line` 0 means that `file` says it all (`--set
    a.b=1`)."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file

    @property
    def origin(self) -> str:
        """`file:line`, as reports show it."""
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def is_shipped(self) -> bool:
        """The value is that of the shipped defaults."""
        return self.file == SHIPPED


@dataclass(slots=True)
class Node:
    """A value of the tree.

    Attributes:
        value: A map of nodes, a list of nodes, or a plain scalar.
        place: Where the value begins.
        text: A scalar as it was typed, without its quotes.
        quoted: The scalar stood in quotes.
        keys: Where each key of a map was written.
        broken: The text stands for no value, which has been reported.
        replaces: A map that was laid over a null. The null took away what lies below, so this map does too.
    """

    value: Any
    place: Place
    text: str = ""
    quoted: bool = False
    keys: dict[str, Place] = field(default_factory=dict)
    broken: bool = False
    replaces: bool = False

    @property
    def is_map(self) -> bool:
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        return isinstance(self.value, list)

    def get(self, *path: Key) -> Node | None:
        """The node at that path, or None when there is none."""
        node: Node | None = self
        for key in path:
            if node is None:
                return None
            if isinstance(key, int):
                node = node.value[key] if node.is_list and key < len(node.value) else None
            else:
                node = node.value.get(key) if node.is_map else None
        return node

    def items(self, *path: Key) -> list[tuple[str, Node]]:
        """The entries of the map at that path; none when there is no map."""
        node = self.get(*path)
        return list(node.value.items()) if node is not None and node.is_map else []

    def elements(self, *path: Key) -> list[Node]:
        """The elements of the list at that path; none when there is no list."""
        node = self.get(*path)
        return list(node.value) if node is not None and node.is_list else []

    def place_of(self, path: Sequence[Key], *, of_key: bool = False) -> Place:
        """The place of the value at that path, or of its key, or of the nearest parent that is there."""
        node = self
        for position, key in enumerate(path):
            child = node.get(key)
            if child is None:
                return node.keys.get(str(key), node.place)
            if of_key and position == len(path) - 1:
                return node.keys.get(str(key), child.place)
            node = child
        return node.place

    def plain(self) -> Any:
        """The value without its places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake, located. It reads `file:line:column: path: what is wrong; what is allowed; did you mean ...`."""

    place: Place
    path: str
    wrong: str
    allowed: str = ""
    meant: str = ""
    code: Code = field(kw_only=True)

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"

    @property
    def message(self) -> str:
        """`path: what is wrong; what is allowed; did you mean ...`."""
        parts = [self.wrong, self.allowed, f"did you mean {self.meant}?" if self.meant else ""]
        subject = f"{self.path}: " if self.path else ""
        return f"{subject}{'; '.join(part for part in parts if part)}"

    def as_finding(self, level: Literal["error", "warning"]) -> Finding:
        """The same for other programs."""
        place = self.place
        return Finding(
            level=level, code=self.code, file=place.file, line=place.line, column=place.column, message=self.message
        )


def show_path(path: Sequence[Key]) -> str:
    """`targets.edge.batch_sizes[0]`; a key that is no plain word is quoted, as `--set` wants it."""
    shown = ""
    for key in path:
        if isinstance(key, int):
            shown += f"[{key}]"
        else:
            word = key if _BARE_KEY.match(key) else json.dumps(key, ensure_ascii=False)
            shown += f".{word}" if shown else word
    return shown


def a_map(entries: Mapping[str, Node], like: Node) -> Node:
    """A map of other entries in the place of `like`."""
    return Node(dict(entries), like.place, keys={key: like.keys.get(key, node.place) for key, node in entries.items()})


# A limit is given in one of these ways: a layer that gives one takes the place of a lower layer's other.
EXCLUSIVE = frozenset({"max_drop", "max_relative_drop"})


def merge(under: Node, over: Node) -> Node:
    """`over` laid on `under`: maps merge key by key, lists and scalars (null too) replace.

    What a null took away stays away, in whichever order three layers are merged: a map over a null replaces what lies
    below the null.
    """
    if over.replaces or not over.is_map:
        return over
    if not under.is_map:
        return replace(over, replaces=True) if under.value is None else over
    dropped = EXCLUSIVE - over.value.keys() if EXCLUSIVE & over.value.keys() else frozenset[str]()
    merged = {key: node for key, node in under.value.items() if key not in dropped}
    keys = {key: place for key, place in under.keys.items() if key not in dropped}
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return Node(merged, over.place, keys={**keys, **over.keys}, replaces=under.replaces)


def without(tree: Node, paths: set[Path]) -> Node:
    """The tree without the values at those paths, so that what is right can still be looked at.

    An element of a list of scalars takes the whole list with it, since a list of another length would mean something
    else.
    """
    cut = {_owner(tree, path) for path in paths}
    return _without(tree, (), cut)


def _owner(tree: Node, path: Path) -> Path:
    for position, key in enumerate(path):
        if isinstance(key, int):
            element = tree.get(*path[: position + 1])
            if element is None or not element.is_map:
                return path[:position]
    return path


def _without(node: Node, here: Path, cut: set[Path]) -> Node:
    if node.is_map:
        kept = {k: _without(n, (*here, k), cut) for k, n in node.value.items() if (*here, k) not in cut}
        return Node(kept, node.place, keys=node.keys)
    if node.is_list:
        elements = [_without(n, (*here, i), cut) for i, n in enumerate(node.value) if (*here, i) not in cut]
        return Node(elements, node.place)
    return node


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every value that is not a map, with its path. A list is one value, unless it holds maps. Empty maps are values
    too."""
    if node.is_map and node.value:
        for key, child in node.value.items():
            yield from leaves(child, (*path, key))
    elif node.is_list and any(child.is_map for child in node.value):
        for index, child in enumerate(node.value):
            yield from leaves(child, (*path, index))
    else:
        yield path, node
