"""Which files have a say, and how they are laid over each other.

shipped defaults < `extends`, in order < the file < the target's own block < `--set key=value`. Maps merge, lists and
scalars replace.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path as FilePath
from typing import TypeAlias

from compile_stage.core.error_codes import Code
from compile_stage.core.errors import InternalError, UsageError
from compile_stage.core.shipped import PREFIX, policy_file, policy_names
from compile_stage.core.spelling import did_you_mean
from compile_stage.policy.locks import UNLOCKABLE, broken, differences, joined, locks_of, quoted, words_of
from compile_stage.policy.messages import check_schema, correct_sections
from compile_stage.policy.metrics import METRICS
from compile_stage.policy.nodes import SHIPPED, Node, Path, Place, Problem, a_map, merge, show_path, without
from compile_stage.policy.parse import MAX_BYTES, parse_bytes, parse_text
from compile_stage.policy.roots import Roots
from compile_stage.policy.schema import OVERRIDABLE
from compile_stage.policy.versions import check_version

MAX_EXTENDS = 8  # files deep
Change: TypeAlias = Callable[[str, Node], Node]
NodeChange: TypeAlias = Callable[[Node], Node]
PathLike: TypeAlias = str | os.PathLike[str]

_DEFAULTS = FilePath(__file__).parent / "defaults.yaml"
_STARTS_WITH = "a policy starts with apiVersion: compile-stage/v1"
_POLICY_START = b"apiVersion: compile-stage/"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


@dataclass(frozen=True)
class Restored:
    """A value of a base that two files of one `extends` share, which so replaces what the earlier of the two says.

    Attributes:
        named: Where `extends` names the later one.
        by: That file.
        was: What the earlier one says.
        now: What the base says.
    """

    named: Place
    by: str
    path: Path
    was: Node
    now: Node


@dataclass
class Layers:
    """What was read.

    Attributes:
        files: All files' values, merged in layer order, without the shipped defaults.
        sets: What `--set` says.
        names: Every file that had a say, in layer order.
        cut: Paths of values that were wrong and are left out, so that the rest can be checked.
        incomplete: A file could not be read at all.
        restored: Values of shared bases that replaced what an earlier file of `extends` says.
    """

    files: Node
    sets: Node
    names: tuple[str, ...] = ()
    problems: list[Problem] = field(default_factory=list)
    cut: set[Path] = field(default_factory=set)
    incomplete: bool = False
    restored: list[Restored] = field(default_factory=list)


@cache
def shipped() -> Node:
    """The shipped defaults, with `each_target` and `each_limit`."""
    tree, problems = parse_bytes(_DEFAULTS.read_bytes(), SHIPPED)
    if tree is None or problems:
        raise InternalError(f"the shipped defaults are damaged: {problems[0]}")
    return tree


def read_layers(path: PathLike, sets: Sequence[str] = (), roots: Sequence[PathLike] = ()) -> Layers:
    """Read a policy, all that it extends and the `--set` arguments; problems are collected, not raised.

    Args:
        roots: Folders beside the policy's own root that `extends` may name files of (`policy.roots`).
    """
    reader = _FileReader(Roots(path, roots))
    tree = reader.read(os.fspath(path), (), None, "")
    layers = Layers(
        files=tree or Node({}, Place(os.fspath(path), 1, 1)),
        sets=Node({}, Place("--set")),
        names=(SHIPPED, *reader.names),
        problems=reader.problems,
        cut=reader.cut,
        incomplete=reader.incomplete,
        restored=reader.restored,
    )
    for argument in sets:
        _add_set(layers, argument)
    return layers


def restored_values(layers: Layers) -> Iterator[Problem]:
    """A warning for each value of a shared base that is still in force."""
    for one in layers.restored:
        stands = layers.files.get(*one.path)
        if stands is None or stands.place != one.now.place:
            continue
        base, by = one.now.place.file, FilePath(one.by).name
        wrong = (
            f"{by} extends {FilePath(base).name} too, whose {quoted(one.now)} ({one.now.place.origin}) replaces "
            f"{quoted(one.was)} ({one.was.place.origin})"
        )
        allowed = f"say in {FilePath(one.named.file).name} which is meant"
        yield Problem(one.named, show_path(one.path), wrong, allowed, code=Code.EXTENDS)


class _FileReader:
    """Reads a file and, before it, what it extends. Each file is read once, however many extend it."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self.problems: list[Problem] = []
        self.cut: set[Path] = set()
        self.names: list[str] = []
        self.incomplete = False
        self.restored: list[Restored] = []
        self._done: dict[str, Node | None] = {}
        self._extends: dict[str, set[str]] = {}  # by file as it is shown: itself, and all that it extends

    def read(self, shown: str, chain: tuple[str, ...], named: Place | None, path: str) -> Node | None:
        """The file's values laid over those it extends; None when it can't be read."""
        tree = self._read(shown, chain, named, path)
        self.incomplete |= tree is None
        return tree

    def _read(self, shown: str, chain: tuple[str, ...], named: Place | None, path: str) -> Node | None:
        place = named or Place(shown)
        if "\0" in shown:
            return self._refused(Problem(place, path, f"{shown!r} is not a file name", code=Code.EXTENDS))
        real = os.path.realpath(shown)
        if real in chain:
            circle = " -> ".join(FilePath(p).name for p in (*chain[chain.index(real) :], real))
            wrong = f"the files extend each other in a circle: {circle}"
            return self._refused(Problem(place, path, wrong, "remove one", code=Code.EXTENDS))
        if real in self._done:
            return self._done[real]
        if len(chain) >= MAX_EXTENDS:
            wrong = f"{shown} is the {len(chain) + 1}th file of a chain of extends"
            return self._refused(Problem(place, path, wrong, f"at most {MAX_EXTENDS} files deep", code=Code.EXTENDS))
        merged = self._done[real] = self._read_file(shown, chain, named, path)
        return merged

    def _read_file(self, shown: str, chain: tuple[str, ...], named: Place | None, path: str) -> Node | None:
        place = named or Place(shown)
        if named is not None and not self._roots.hold(shown):  # nor is it said whether it is there
            wrong = f"{shown} lies outside of {self._roots.own}, the root of this policy"
            allowed = "a file below it, or below a folder that --policy-root names"
            return self._refused(Problem(place, path, wrong, allowed, code=Code.EXTENDS))
        raw = _read_bytes(FilePath(shown), chain)
        if isinstance(raw, str):
            wrong = raw if named is None else f"{shown} {raw}"
            return self._refused(Problem(place, path, wrong, code=Code.UNREADABLE_POLICY))
        top = Place(shown, 1, 1)
        if not self._roots.hold(shown) and _POLICY_START not in raw:  # a link to a file that is not to be quoted
            wrong = "the file is not a policy"
            return self._refused(Problem(top, "", wrong, _STARTS_WITH, code=Code.UNREADABLE_POLICY))
        tree, problems = parse_bytes(raw, shown)
        self.problems += problems
        if tree is None:
            return None
        if not tree.is_map:
            wrong = f"the file holds {'a list' if tree.is_list else 'a single value'}, not a map"
            return self._refused(Problem(top, "", wrong, _STARTS_WITH, code=Code.UNREADABLE_POLICY))
        return self._checked(tree, shown, (*chain, os.path.realpath(shown)))

    def _refused(self, problem: Problem) -> Node | None:
        """None, as the values of a file that has this problem."""
        self.problems.append(problem)
        return None

    def _checked(self, tree: Node, shown: str, chain: tuple[str, ...]) -> Node:
        tree, misspelt = correct_sections(tree)
        version = check_version(tree)
        self.problems += [*misspelt, *version]
        tree = without(tree, {(problem.path,) for problem in version})
        problems, bad, _ = check_schema(tree, whole=False)
        self.problems += problems
        self.cut |= bad
        self.cut |= {(problem.path,) for problem in version}
        own = normalise(without(tree, bad))
        merged: Node | None = None
        below: set[str] = set()
        for index, element in enumerate(own.elements("extends")):
            under = self._extended(element, shown, chain, f"extends[{index}]")
            if under is None:
                continue
            file = under.place.file
            laid = under if merged is None else self._laid(merged, under, beside=True)
            if merged is not None:
                self.restored += _restored(element.place, file, merged, laid, below - {file})
            merged, below = laid, below | self._extends[file]
        self._extends[shown] = {shown, *below}
        if shown not in self.names:
            self.names.append(shown)
        return own if merged is None else self._laid(merged, own)

    def _laid(self, under: Node, over: Node, *, beside: bool = False) -> Node:
        """One laid over the other, with the locks of both; what breaks a lock of the lower one is a problem.

        Args:
            beside: One file extends both, so that it may not go round the locks of either: what the upper one does not
                say would stay as the lower one says it.
        """
        merged = merge(under, over)
        if (locked := joined(under, over)) is not None:
            merged.value["locked"] = locked
        self.problems += _broken_locks(under, over, merged)
        if beside:
            self.problems += _broken_locks(over, under, merged)
        return merged

    def _extended(self, element: Node, shown: str, chain: tuple[str, ...], path: str) -> Node | None:
        name = str(element.value)
        if _URL.match(name):
            message = f"{name} is not a local file"
            self.problems.append(
                Problem(
                    element.place,
                    path,
                    message,
                    "copy the file into your repository and name it here",
                    code=Code.EXTENDS,
                )
            )
            return None
        if name.startswith(PREFIX):
            try:
                return self.read(os.fspath(policy_file(name)), chain, element.place, path)
            except UsageError as error:
                self.problems.append(Problem(element.place, path, error.problem, error.fix or "", code=Code.EXTENDS))
                return None
        return self.read(os.path.normpath(FilePath(shown).parent / name), chain, element.place, path)


def _restored(named: Place, by: str, before: Node, after: Node, below: set[str]) -> Iterator[Restored]:
    """Values of shared bases that one of `extends` lays over what the earlier ones say.

    Args:
        before, after: The values without it and with it.
        below: The files of the earlier ones, less itself: where it is one of them, it was named to be laid over them.
    """
    for path, was, now in differences(before, after, ()):
        if was is not None and now is not None and now.place.file in below and path[0] not in UNLOCKABLE:
            yield Restored(named, by, path, was, now)


def _read_bytes(path: FilePath, extending: Sequence[str]) -> bytes | str:
    """The file's bytes, or why there are none. It is not taken for a misspelt one of those that extend it."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return "is a folder; name a policy file"
        if not stat.S_ISREG(mode):
            return "is not a regular file; name a policy file"
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return _no_such_file(path, extending)
    except OSError as error:
        return f"can't be read: {error.strerror}"


def _no_such_file(path: FilePath, extending: Sequence[str]) -> str:
    if path.name == str(path) and path.stem in policy_names():
        return f"does not exist; did you mean {PREFIX}{path.stem}?"
    others = {FilePath(file).name for file in extending if FilePath(file).parent == path.parent.resolve()}
    try:
        near = did_you_mean(path.name, sorted({sibling.name for sibling in path.parent.iterdir()} - others))
    except OSError:
        near = ""
    return f"does not exist; did you mean {path.with_name(near)}?" if near else "does not exist"


# ----------------------------------------------------------------------------------------------------------- --set


def _add_set(layers: Layers, argument: str) -> None:
    """Lay one `--set key=value` over the ones before."""
    place = Place(f"--set {argument}")
    key, equals, text = argument.partition("=")
    words = tuple(map(str, words_of(key)))
    if not equals or not words:
        wrong = f"{key!r} is not a dotted path: a part of it is empty" if equals and key.strip() else "no KEY=VALUE"
        allowed = "write for example --set tolerances.int8.cosine=0.98"
        layers.problems.append(Problem(place, "", wrong, allowed, code=Code.WRONG_SET))
        return
    value, problems = parse_text(text, place.file, located=False) if text.strip() else (Node(None, place), [])
    if value is None or problems:
        first = problems[0]
        allowed = first.allowed or f"""a text is quoted, once more within the shell's quotes: --set '{key}="..."'"""
        layers.problems.append(Problem(place, show_path(words), first.wrong, allowed, code=Code.WRONG_SET))
        return
    if words[0] in ("apiVersion", "kind", "extends", "locked"):
        layers.problems.append(
            Problem(place, words[0], "can't be set here", "change it in the file", code=Code.WRONG_SET)
        )
        return
    node = value
    for word in reversed(words):
        node = Node({word: node}, place, keys={word: place})
    if words[0] == "targets" and len(words) > 1 and layers.files.get("targets", words[1]) is None:
        if layers.incomplete:  # the file that can't be read may have it, and is the mistake to fix
            return
        known = [name for name, _ in layers.files.items("targets")]
        wrong_and_allowed = "unknown target", f"one of: {', '.join(known) or 'none'}"
        layers.problems.append(
            Problem(
                place, show_path(words[:2]), *wrong_and_allowed, did_you_mean(words[1], known), code=Code.UNKNOWN_NAME
            )
        )
        return
    schema_problems, bad, _ = check_schema(node, whole=False)
    layers.problems += schema_problems
    layers.cut |= bad
    node = normalise(without(node, bad))
    over = merge(layers.sets, node)
    locks = locks_of(layers.files)
    if locks:
        before, after = resolve(layers), resolve(replace(layers, sets=over))
        if found := list(broken(locks, before, after, node)):
            layers.problems += found
            return  # or the next one of the same key would be compared with it
    layers.sets = over


# ------------------------------------------------------------------------------------------------ the resolved whole


def resolve(layers: Layers) -> Node:
    """The whole policy: every option has a value, every target its own resolved sections, every value its place."""
    defaults = shipped()
    base = {key: node for key, node in defaults.value.items() if key not in ("each_target", "each_limit")}
    top = merge(normalise(a_map(base, defaults)), layers.files)
    resolved = merge(top, layers.sets)
    resolved.place = layers.files.place
    labels = resolved.get("data", "validation", "labels")
    has_labels = labels is not None and labels.value is not None
    targets = {name: _target(name, top, layers, has_labels) for name, _ in layers.files.items("targets")}
    holder = a_map(targets, top.value["targets"])
    sections = {"targets": holder, "tolerances": _filled(resolved.value["tolerances"])}
    return Node({**resolved.value, **sections}, resolved.place, keys=resolved.keys)


def _broken_locks(locking: Node, other: Node, merged: Node) -> Iterator[Problem]:
    """What `other` changes of what `locking` has locked, where they are laid over each other."""
    locks = locks_of(locking)
    if not locks:
        return
    # A target that only the other has is compared with what it would have without sections of its own.
    bare = Node({name: Node({}, node.place) for name, node in other.items("targets")}, other.place)
    data = {"data": merged.value["data"]} if merged.get("data") is not None else {}
    without_other = merge(locking, Node({"targets": bare, **data}, other.place))
    nothing = Node({}, other.place)
    after = resolve(Layers(files=merged, sets=nothing))
    own = tuple(lock for lock in locks if not lock.is_of_each_target)
    yield from broken(own, resolve(Layers(files=locking, sets=nothing)), after, other)
    inherited = tuple(lock for lock in locks if lock.is_of_each_target)
    yield from broken(inherited, resolve(Layers(files=without_other, sets=nothing)), after, other)


def _target(name: str, top: Node, layers: Layers, has_labels: bool) -> Node:
    """One target's block over the defaults of a target, and its own sections over the policy's."""
    own = layers.files.get("targets", name)
    over = layers.sets.get("targets", name)
    each = shipped().value["each_target"]
    block = each if own is None else merge(each, own)
    sections = {}
    for section in OVERRIDABLE:
        node = top.value[section]
        for layer in (own and own.get(section), layers.sets.get(section), over and over.get(section)):
            node = merge(node, layer) if layer is not None else node
        sections[section] = _over_map(_filled(node), partial(_fitting, has_labels)) if section == "tolerances" else node
    merged = block if over is None else merge(block, over)
    return Node({**merged.value, **sections}, merged.place, keys=merged.keys)


_OF_CLASSES = {"accuracy", "f1", "class_recall", "ece"}
"""Task metrics that read an output as classes."""


def _fitting(has_labels: bool, limits: Node) -> Node:
    """The limits of a precision without the shipped task metric where that makes no sense.

    It is for data with labels, and gives way to a task metric that the policy chose itself, for all outputs or for one:
    nobody who asks for r2 wants accuracy too. The limit on the recall of a class stays beside metrics that count
    classes too. Whether the labels are classes is seen only when they are read
    (`measure.label_needs.CLASSES_ONLY`).
    """
    tasks = dict(_task_limits(limits))
    chosen = [*tasks.values()]
    for output, _ in limits.items("outputs"):
        chosen += [node for _, node in _task_limits(limits, "outputs", output)]
    if has_labels and all(node.place.is_shipped or node.value is None for node in chosen):
        return limits
    own = {key for key, node in tasks.items() if not node.place.is_shipped}
    counts_classes = has_labels and len(chosen) == len(tasks) and own <= _OF_CLASSES
    dropped = {key for key in tasks.keys() - own if not (counts_classes and key == "class_recall")}
    return a_map({key: node for key, node in limits.items() if key not in dropped}, limits) if limits.is_map else limits


def _task_limits(limits: Node, *path: str) -> list[tuple[str, Node]]:
    return [(key, node) for key, node in limits.items(*path) if key in METRICS and METRICS[key].family == "task"]


_AS_LIMIT = (
    "topk_agreement", "nearest_kept", "column_nrmse", "column_spread", "token_kl", "token_top1_agreement",
)  # fmt: skip


def normalise(tree: Node) -> Node:
    """Short forms written out, so that layers merge: `accuracy: 0.01` is {max_drop: 0.01}, `topk_agreement: 0.9` is
    {limit: 0.9}."""
    return _each_tolerance(tree, _written_out)


def _written_out(metric: str, node: Node) -> Node:
    if isinstance(node.value, bool) or not isinstance(node.value, int | float):
        return node
    if metric == "token_accuracy" or (metric in METRICS and METRICS[metric].family == "task"):
        return Node({"max_drop": node}, node.place, keys={"max_drop": node.place})
    if metric == "perplexity":
        return Node({"max_relative_increase": node}, node.place, keys={"max_relative_increase": node.place})
    if metric in _AS_LIMIT:
        return Node({"limit": node}, node.place, keys={"limit": node.place})
    return node


def _filled(tolerances: Node) -> Node:
    """What a limit does not say, from `each_limit`."""
    defaults = shipped().value["each_limit"]

    def fill(metric: str, node: Node) -> Node:
        family = METRICS[metric].family if metric in METRICS else ""
        default = defaults.get(family if family in ("task", "tokens") else metric)
        # A limit that was laid over a null leaves out as much as any other.
        return merge(default, replace(node, replaces=False)) if default is not None and node.is_map else node

    holder = Node({"tolerances": tolerances}, tolerances.place)
    filled: Node = _each_tolerance(holder, fill).value["tolerances"]
    return filled


def _each_tolerance(tree: Node, change: Change) -> Node:
    """The tree with every limit changed, wherever tolerances stand."""

    def limits(node: Node) -> Node:
        if not node.is_map:
            return node
        changed = {
            key: _over_map(child, limits) if key == "outputs" else change(key, child)
            for key, child in node.value.items()
        }
        return Node(changed, node.place, keys=node.keys)

    def section(node: Node) -> Node:
        if not node.is_map or "tolerances" not in node.value:
            return node
        return Node(
            {**node.value, "tolerances": _over_map(node.value["tolerances"], limits)}, node.place, keys=node.keys
        )

    tree = section(tree)
    if tree.get("targets") is not None:
        targets = _over_map(tree.value["targets"], section)
        tree = Node({**tree.value, "targets": targets}, tree.place, keys=tree.keys)
    return tree


def _over_map(node: Node, change: NodeChange) -> Node:
    if not node.is_map:
        return node
    return Node({key: change(child) for key, child in node.value.items()}, node.place, keys=node.keys)
