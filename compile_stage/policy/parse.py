"""YAML text → a tree of values that know their places. YAML's traps are met here, each with its own message.

Only the safe subset is read: no tags, no duplicate keys, no aliases that blow up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from compile_stage.core.error_codes import Code
from compile_stage.policy.nodes import Node, Path, Place, Problem, show_path

MAX_BYTES = 256 * 1024  # a policy is written by people; the largest one known is a hundredth of this
MAX_VALUES = 20_000  # after aliases are expanded
MAX_DEPTH = 40

_TAG = "tag:yaml.org,2002:"
_SCALARS = ("null", "bool", "int", "float", "str", "timestamp")
_PLAIN_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)\Z")
_KINDS = {"bool": "a yes/no value", "int": "a number", "float": "a number", "timestamp": "a date", "null": "nothing"}


def parse_bytes(raw: bytes, file: str) -> tuple[Node | None, list[Problem]]:
    """The tree of a file's bytes, and what is wrong with it. `file` is the name that messages use.

    The tree is None when the text is no YAML at all; it is as complete as can be when single values are wrong.
    """
    if len(raw) > MAX_BYTES:
        return None, [_whole(file, f"is {len(raw):,} bytes long", f"a policy has at most {MAX_BYTES:,}")]
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        place = Place(file, before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1)
        return None, [
            Problem(
                place,
                "",
                f"byte 0x{raw[error.start]:02x} is not UTF-8",
                "save the file as UTF-8",
                code=Code.UNREADABLE_POLICY,
            )
        ]
    return parse_text(text, file)


def parse_text(text: str, file: str, *, located: bool = True) -> tuple[Node | None, list[Problem]]:
    """The same for text. With `located=False` every value's place is the file alone, as for `--set`."""
    try:
        root, tags = _compose(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = Place(file, before.count("\n") + 1, error.position - (before.rfind("\n") + 1) + 1)
        return None, [
            Problem(
                place, "", f"the character U+{ord(text[error.position]):04X} is not allowed in YAML", code=Code.NOT_YAML
            )
        ]
    except yaml.MarkedYAMLError as error:
        return None, [_syntax(error, text, file)]
    except RecursionError:
        return None, [_whole(file, "is nested too deeply", f"at most {MAX_DEPTH} levels")]
    if root is None:
        return None, [_whole(file, "is empty", "a policy starts with apiVersion: compile-stage/v1")]
    if (bomb := _refuse_bomb(root, file)) is not None:
        return None, [bomb]
    reader = _Reader(file, located, tags)
    return reader.read(root, ()), reader.problems


class _Loader(yaml.SafeLoader):
    """Keeps the tags that were written: a resolved node doesn't tell `!!null 5` from `null`.

    Attributes:
        tags: By the id of a node, which is unique as long as the tree lives.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tags: dict[int, str] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: object = self.peek_event()  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        tag = None if isinstance(event, yaml.AliasEvent) else getattr(event, "tag", None)
        if tag is not None:
            self.tags[id(node)] = tag
        return node


def _compose(text: str) -> tuple[yaml.Node | None, Mapping[int, str]]:
    """The nodes of the one document of a text, and the tags that were written in it."""
    loader = _Loader(text)
    try:
        return loader.get_single_node(), loader.tags
    finally:
        loader.dispose()


def _whole(file: str, wrong: str, allowed: str = "") -> Problem:
    return Problem(Place(file, 1, 1), "", f"the file {wrong}", allowed, code=Code.UNREADABLE_POLICY)


def _syntax(error: yaml.MarkedYAMLError, text: str, file: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    place = Place(file, line + 1, column + 1)
    problem = error.problem or "can't be read"
    lines = text.splitlines()
    here = lines[line] if line < len(lines) else ""
    if "\t" in here[: len(here) - len(here.lstrip())] or "'\\t'" in problem:
        return Problem(place, "", "a tab stands where YAML wants blanks", "indent with blanks only", code=Code.NOT_YAML)
    if "expected a single document" in problem or "expected a single document" in (error.context or ""):
        return Problem(place, "", "a second YAML document starts here", "a policy file holds one", code=Code.NOT_YAML)
    advice = ""
    if "undefined alias" in problem or error.context == "while scanning an alias":
        advice = "define the anchor (&name) above its use (*name), or quote a text that begins with `*`"
    elif error.context == "while scanning a block scalar":
        advice = "a limit is a number alone, without > or >=; a text that begins with `>` or `|` is put in quotes"
    elif re.search(r":\s*\{\w+\}$", here[:column].rstrip()):
        advice = "a text that begins with `{` is put in quotes"
    if advice:
        return Problem(place, "", f"not valid YAML: {problem}", advice, code=Code.NOT_YAML)
    if "mapping values are not allowed" in problem:
        advice = "quote a text that holds `: `, and put each key on its own line"
        return Problem(
            place, "", "not valid YAML: a second `:` on this line, or a wrong indentation", advice, code=Code.NOT_YAML
        )
    if error.context and error.context_mark is not None and error.context_mark.line != line:
        problem += f" ({error.context}, which starts on line {error.context_mark.line + 1})"
    return Problem(place, "", f"not valid YAML: {problem}", code=Code.NOT_YAML)


def _refuse_bomb(root: yaml.Node, file: str) -> Problem | None:
    """Count what expanding the aliases would make, without expanding them."""
    sizes: dict[int, int] = {}
    depths: dict[int, int] = {}
    open_now: set[int] = set()

    def measure(node: yaml.Node) -> Problem | None:
        if id(node) in open_now:
            return Problem(
                _place(node, file), "", "an anchor holds itself", "anchors may not be recursive", code=Code.NOT_YAML
            )
        if id(node) in sizes:
            return None
        open_now.add(id(node))
        size = depth = 1
        for child in _children(node):
            if (problem := measure(child)) is not None:
                return problem
            size += sizes[id(child)]
            depth = max(depth, depths[id(child)] + 1)
        open_now.discard(id(node))
        sizes[id(node)], depths[id(node)] = size, depth
        return None

    try:
        problem = measure(root)
    except RecursionError:
        return _whole(file, "is nested too deeply", f"at most {MAX_DEPTH} levels")
    if problem is not None:
        return problem
    if sizes[id(root)] > MAX_VALUES:
        message = f"holds {sizes[id(root)]:,} values once its aliases (*name) are expanded"
        return _whole(file, message, f"at most {MAX_VALUES:,}: write fewer aliases of aliases")
    if depths[id(root)] > MAX_DEPTH:
        return _whole(file, "is nested too deeply", f"at most {MAX_DEPTH} levels")
    return None


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _place(node: yaml.Node, file: str) -> Place:
    return Place(file, node.start_mark.line + 1, node.start_mark.column + 1)


class _Reader:
    """Makes the tree, collecting problems instead of stopping at the first."""

    def __init__(self, file: str, located: bool, tags: Mapping[int, str]) -> None:
        self.problems: list[Problem] = []
        self._file = file
        self._located = located
        self._tags = tags
        self._scalars = yaml.constructor.SafeConstructor()

    def read(self, node: yaml.Node, path: Path) -> Node:
        place = self._place(node)
        tagged = self._refuse_tag(node, path, place)
        if isinstance(node, yaml.MappingNode):
            read = self._map(node, path, place)
        elif isinstance(node, yaml.SequenceNode):
            read = Node([self.read(child, (*path, index)) for index, child in enumerate(node.value)], place)
        elif tagged:
            read = Node(str(node.value), place, text=str(node.value))
        else:
            read = self._scalar(node, path, place)
        read.broken |= tagged
        return read

    def _refuse_tag(self, node: yaml.Node, path: Path, place: Place) -> bool:
        """A tag makes another value of what is read there: `max_size_mb: !!null 200` is no limit."""
        tag = self._tags.get(id(node))
        if tag is not None:
            self._report(place, path, f"the tag {_short(tag)} is not allowed", "plain YAML values only")
        return tag is not None

    def _place(self, node: yaml.Node) -> Place:
        return _place(node, self._file) if self._located else Place(self._file)

    def _report(
        self, place: Place, path: Path, wrong: str, allowed: str = "", *, code: Code = Code.WRONG_VALUE
    ) -> None:
        self.problems.append(Problem(place, show_path(path), wrong, allowed, code=code))

    def _map(self, node: yaml.MappingNode, path: Path, place: Place) -> Node:
        mapping = Node({}, place)
        inherited: dict[str, Node] = {}
        merges: Place | None = None
        for key_node, value_node in node.value:
            key_place = self._place(key_node)
            if key_node.tag == f"{_TAG}merge":
                if merges is not None:
                    self._report_twice(key_place, merges, (*path, "<<"), "merge several maps in one: <<: [*a, *b]")
                    continue
                merges = key_place
                inherited = self._merged(value_node, path)
                continue
            if _is_decimal_comma(key_node, value_node):
                wrong = f"a comma stands before `{key_node.value}`, and begins another key"
                self._report(key_place, path, wrong, "a number has a decimal point: 0.5")
                continue
            key = self._key(key_node, path, key_place)
            if key is None:
                continue
            if key in mapping.value:
                self._report_twice(key_place, mapping.keys[key], (*path, key), "each key once")
                continue
            mapping.value[key] = self.read(value_node, (*path, key))
            mapping.keys[key] = key_place
        for key, child in inherited.items():
            if key not in mapping.value:
                mapping.value[key], mapping.keys[key] = child, child.place
        return mapping

    def _report_twice(self, place: Place, first: Place, path: Path, allowed: str) -> None:
        where = f" (first on line {first.line})" if first.line else ""
        self._report(place, path, f"the key is given twice{where}", allowed, code=Code.DUPLICATE_KEY)

    def _merged(self, node: yaml.Node, path: Path) -> dict[str, Node]:
        """What `<<: *anchor` brings; of several anchors the first one wins, as YAML says."""
        brought: dict[str, Node] = {}
        for source in reversed(node.value) if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(source, yaml.MappingNode):
                self._report(self._place(source), (*path, "<<"), "only a map can be merged in", "<<: *anchor of a map")
                continue
            brought |= self.read(source, path).value
        return brought

    def _key(self, node: yaml.Node, path: Path, place: Place) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self._report(place, path, "a key is a list or a map", "keys are plain words")
            return None
        if self._refuse_tag(node, path, place):
            return None
        node.value = _joined(str(node.value))
        kind = node.tag.removeprefix(_TAG)
        if kind != "str":
            message = f"the key `{node.value}` is read by YAML as {_KINDS.get(kind, _short(node.tag))}, not as text"
            self._report(place, path, message, f'put it in quotes: "{node.value}"')
        elif self._refuse_surrogate(str(node.value), path, place):
            return None
        return str(node.value)

    def _refuse_surrogate(self, text: str, path: Path, place: Place) -> bool:
        """Half of a character, as `"\\ud83d"` alone gives it: no file, no registry and no terminal takes it."""
        half = next((character for character in text if "\ud800" <= character <= "\udfff"), "")
        if half:
            wrong = f"the character \\u{ord(half):04x} is half of one, and can't be written"
            self._report(place, path, wrong, "the character itself, or \\U and eight digits")
        return bool(half)

    def _scalar(self, node: yaml.Node, path: Path, place: Place) -> Node:
        node.value = text = _joined(str(node.value))
        kind = node.tag.removeprefix(_TAG)
        scalar = Node(text, place, text=text, quoted=getattr(node, "style", None) in ("'", '"', "|", ">"))
        if self._refuse_surrogate(text, path, place):
            scalar.value, scalar.text, scalar.broken = None, "", True
            return scalar
        if kind not in _SCALARS:  # `=` and `<<` are no text in YAML 1.1, and plain text to everybody else
            return scalar
        try:
            scalar.value = self._construct(node)
        # What PyYAML raises for `!!bool x`, `!!timestamp x`.
        except (ValueError, LookupError, AttributeError, yaml.YAMLError):
            scalar.value, scalar.broken = None, True
            self._report(place, path, f"`{text}` is not a valid {'date' if kind == 'timestamp' else 'value'}")
            return scalar
        if (kind == "int" and not _PLAIN_INT.match(text)) or (kind == "float" and ":" in text):
            self._report(
                place, path, f"`{text}` is read by YAML as {scalar.value}", f"write {scalar.value}, or quote a text"
            )
        if isinstance(scalar.value, float) and not math.isfinite(scalar.value):
            self._report(
                place, path, f"`{text}` is not a finite number", "a finite number, or null where no limit is meant"
            )
            scalar.value, scalar.broken = None, True
        return scalar

    def _construct(self, node: yaml.Node) -> Any:
        value = self._scalars.construct_object(node)
        self._scalars.constructed_objects = {}
        return value


def _is_decimal_comma(key: yaml.Node, value: yaml.Node) -> bool:
    """Whether a map in braces has digits as a key without a value: `{max_abs: 0,001}`."""
    number = key.tag == f"{_TAG}int" and getattr(key, "style", "") is None
    return number and value.tag == f"{_TAG}null" and value.value == ""


def _joined(text: str) -> str:
    """The text with each pair of halves as the one character that JSON means by it: `"\\ud83d\\ude00"`."""
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:  # a half alone
        return text


def _short(tag: str) -> str:
    return "!!" + tag.removeprefix(_TAG) if tag.startswith(_TAG) else tag
