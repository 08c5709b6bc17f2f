"""What the schema finds wrong, in words: located, with what is allowed and the nearest right word."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import date
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from compile_stage.core.error_codes import Code
from compile_stage.core.quantities import percent
from compile_stage.core.spelling import did_you_mean, look_alike
from compile_stage.policy.limits import CustomLimit, ShareDrop
from compile_stage.policy.metrics import CUSTOM, METRICS, tolerance_names
from compile_stage.policy.nodes import Node, Path, Problem, leaves, show_path, without
from compile_stage.policy.schema import PolicyDocument
from compile_stage.policy.values import (
    AS_LIST,
    AS_MAP,
    AS_NUMBER,
    AS_WORD,
    CURRENCY,
    FUNCTION_METRIC,
    SHIPPED_PRECISIONS,
    SOURCE,
    TAG_KEY,
)

_TAGS = {AS_LIST, AS_MAP, AS_NUMBER, AS_WORD}
_KEY = "[key]"  # pydantic's mark of an error in a map's key
_NUMBER_WITH_UNIT = re.compile(r"([-+]?\d[\d_.]*)\s*([A-Za-z%×µμ]+)\Z")
_SCIENTIFIC = re.compile(r"([-+]?\d+)(\.\d*)?[eE]([-+]?)(\d+)\Z")
_YAML_NUMBER = re.compile(r"[-+]?([1-9][0-9_]*|0|[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?)\Z")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+\Z")
_UNITS = {
    "s": "seconds", "sec": "seconds", "secs": "seconds", "second": "seconds", "seconds": "seconds",
    "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds", "millis": "milliseconds",
    "µs": "microseconds", "μs": "microseconds",
    "min": "minutes", "mins": "minutes", "minute": "minutes", "minutes": "minutes", "m": "minutes", "h": "hours",
    "hr": "hours", "hour": "hours", "hours": "hours",
    "b": "bytes", "bytes": "bytes", "kb": "kilobytes", "mb": "megabytes", "gb": "gigabytes", "mib": "mebibytes",
    "kib": "kibibytes", "tb": "terabytes", "tib": "tebibytes",
    "gib": "gibibytes", "g": "gigabytes", "gi": "gibibytes", "db": "decibels", "percent": "per cent", "pct": "per cent",
}  # fmt: skip
_SIZES = {
    "microseconds": ("time", 1e-6), "milliseconds": ("time", 1e-3), "seconds": ("time", 1.0), "minutes": ("time", 60.0),
    "hours": ("time", 3600.0), "nanoseconds": ("time", 1e-9), "bytes": ("size", 1.0), "kilobytes": ("size", 1e3),
    "megabytes": ("size", 1e6), "gigabytes": ("size", 1e9), "mebibytes": ("size", 2.0**20),
    "gibibytes": ("size", 2.0**30), "kibibytes": ("size", 2.0**10), "terabytes": ("size", 1e12),
    "tebibytes": ("size", 2.0**40),
}  # fmt: skip
_PERCENT = ("%", "percent", "pct")


def check_schema(
    tree: Node, *, whole: bool, forgiven: Collection[Path] = ()
) -> tuple[list[Problem], set[Path], PolicyDocument | None]:
    """Hold the tree against the schema.

    Args:
        whole: Nothing may be missing. A single layer may leave out anything.
        forgiven: Paths whose absence has been explained already.

    Returns:
        The problems, the paths of the values that are wrong, and the document when nothing is.
    """
    problems, bad = _unknown_metrics(tree)
    document, details = None, []
    try:
        document = PolicyDocument.model_validate(without(tree, bad).plain())
    except ValidationError as error:
        details = error.errors(include_url=False)
    for item in details:
        path = tuple(key for key in item["loc"] if key not in _TAGS and key != _KEY)
        if item["type"] == "missing":
            if whole and not any(cut[: len(path)] == path for cut in forgiven):
                wrong_and_allowed = "is missing", _about(path)
                problems.append(
                    Problem(tree.place_of(path[:-1]), show_path(path), *wrong_and_allowed, code=Code.MISSING_KEY)
                )
            continue
        if path in bad or (item["type"] == "too_short" and any(cut[: len(path)] == path for cut in forgiven)):
            continue  # an entry of a list that was wrong has been said, and cut out
        bad.add(path)
        node = tree.get(*path)
        if node is not None and node.broken:
            continue
        problems.append(_problem(tree, path, item["type"], item.get("ctx", {}), in_key=_KEY in item["loc"]))
    _refuse_empty(tree, problems, bad)
    return problems, bad, document


def _refuse_empty(tree: Node, problems: list[Problem], bad: set[Path]) -> None:
    """Add what has no value at all where null is allowed. YAML reads both alike, and a limit that a variable of the
    shell was to hold, or that a half-edited file lost, would be taken away without a word."""
    for path, node in leaves(tree):
        if node.value is not None or node.text or node.quoted or node.broken:
            continue
        if not any(path[: len(cut)] == cut for cut in bad):
            bad.add(path)
            wrong, allowed = "has no value", "write null if none is meant"
            problems.append(Problem(node.place, show_path(path), wrong, allowed, code=Code.WRONG_VALUE))


def _unknown_metrics(tree: Node) -> tuple[list[Problem], set[Path]]:
    """Own metrics make `Limits` take any key, so words that are no metric are looked for here."""
    problems: list[Problem] = []
    bad: set[Path] = set()

    def look(path: Path, known: tuple[str, ...]) -> None:
        for key, _ in tree.items(*path):
            if key in known or re.match(FUNCTION_METRIC, key):
                continue
            here = (*path, key)
            bad.add(here)
            place = tree.place_of(here, of_key=True)
            if key.startswith(CUSTOM):
                wrong_and_allowed = "is not a function path", "write python:package.module:function"
                problems.append(Problem(place, show_path(here), *wrong_and_allowed, code=Code.UNKNOWN_NAME))
            else:
                problems.append(_unknown_key(tree, here, known, "metric"))

    sections: list[Path] = [("tolerances",)]
    sections += [("targets", name, "tolerances") for name, _ in tree.items("targets")]
    for section in sections:
        for precision, _ in tree.items(*section):
            look((*section, precision), (*tolerance_names(), "outputs"))
            for output, _ in tree.items(*section, precision, "outputs"):
                look((*section, precision, "outputs", output), tolerance_names())
    return problems, bad


def correct_sections(tree: Node) -> tuple[Node, list[Problem]]:
    """A file's tree with each misspelt key of the top level as it was probably meant, and a problem for each: what
    stands there is checked, and nothing else is wrong only because it is not found."""
    known, problems = keys_at(()), []
    meant: dict[str, str] = {}
    for key in tree.value:
        if key in known:
            continue
        problem = _unknown_key(tree, (key,), known, "key")
        if problem.meant and problem.meant not in (*tree.value, *meant.values()):
            meant[key] = problem.meant
            problems.append(problem)
    if not meant:
        return tree, []
    values = {meant.get(key, key): node for key, node in tree.value.items()}
    places = {meant.get(key, key): place for key, place in tree.keys.items()}
    return replace(tree, value=values, keys=places), problems


def _problem(tree: Node, path: Path, kind: str, context: dict[str, Any], *, in_key: bool) -> Problem:
    shown = show_path(path)
    if kind == "extra_forbidden":
        return _unknown_key(tree, path, keys_at(path[:-1]), "key")
    if in_key:
        return _bad_key(tree, path, kind, context)
    node = tree.get(*path)
    place = tree.place_of(path)
    if node is None:  # a wrong value is always there; this guards the message, not the policy
        return Problem(place, shown, kind.replace("_", " "), code=Code.WRONG_VALUE)
    wrong, allowed, meant = _explain(node, path, kind, context)
    return Problem(place, shown, wrong, allowed, meant, code=Code.WRONG_VALUE)


def _unknown_key(tree: Node, path: Path, known: Sequence[str], what: str) -> Problem:
    key = str(path[-1])
    place = tree.place_of(path, of_key=True)
    shown = show_path(path)
    if (right := _with_right_unit(key, known)) is not None:
        unit = _UNITS.get(right.rpartition("_")[2], "another unit")
        return Problem(place, shown, f"unknown {what}", f"this is given in {unit}: use {right}", code=Code.UNKNOWN_KEY)
    word, colon, value = key.partition(":")
    if colon and word in known:
        advice = f"write a blank after the colon: {word}: {value or '...'}"
        return Problem(place, shown, f"unknown {what}", advice, code=Code.UNKNOWN_KEY)
    wrong, near = f"unknown {what}{look_alike(key)}", did_you_mean(key, list(known))
    return Problem(place, shown, wrong, f"one of: {', '.join(known)}", near, code=Code.UNKNOWN_KEY)


def _with_right_unit(key: str, known: Sequence[str]) -> str | None:
    """The known key that says the same with another unit, or with a unit at all."""
    stem = _stem(key)
    return next((k for k in known if k != key and _stem(k) == stem and _stem(k) != k), None)


def _stem(key: str) -> str:
    head, _, tail = key.rpartition("_")
    return head if tail in _UNITS else key


def _bad_key(tree: Node, path: Path, kind: str, context: dict[str, Any]) -> Problem:
    key, place, shown = str(path[-1]), tree.place_of(path, of_key=True), show_path(path)
    if kind == "literal_error":
        words = _words(context)
        what = "hardware field" if path[-2] == "hardware" else "key"
        return Problem(
            place,
            shown,
            f"unknown {what}",
            f"one of: {', '.join(words)}",
            did_you_mean(key, list(words)),
            code=Code.UNKNOWN_KEY,
        )
    if kind == "string_pattern_mismatch":
        return Problem(place, shown, f"{key!r} is not a valid name", _NAMES, code=Code.WRONG_NAME)
    return Problem(place, shown, f"{key!r} is not a valid name", "between 1 and 64 characters", code=Code.WRONG_NAME)


_CURLY_QUOTES = "“”„‟‘’‚‛«»"

_NAMES = "letters, digits, `_` and single `-`, since it becomes part of job ids and aliases"


def _explain(node: Node, path: Path, kind: str, context: dict[str, Any]) -> tuple[str, str, str]:
    """(what is wrong, what is allowed, did you mean) of one value."""
    text = node.text or repr(node.plain())
    if kind in ("literal_error", "string_pattern_mismatch") and set(_CURLY_QUOTES) & set(str(node.value)):
        plain = str(node.value).strip(_CURLY_QUOTES)
        return f"{node.value!r} holds a curly quote, which is no quote to YAML", f'write "{plain}"', ""
    if kind == "literal_error":
        words = _words(context)
        if words == ("auto",) and node.value is None:
            return "has no value", "write `auto`, or a list of backends", ""
        if words == ("auto",) and isinstance(node.value, dict):
            listed = f"[{', '.join(node.value)}]"
            return "is a map, not a list of backends", f"write `auto`, or a list: {listed}, their options beside it", ""
        if words == ("auto",):
            return f"`{text}` is not a list of backends", f"write `auto`, or a list: [{text}]", ""
        if isinstance(node.value, bool):
            return (
                f"`{text}` is read by YAML as {str(node.value).lower()}",
                f"one of, in quotes if need be: {', '.join(words)}",
                "",
            )
        if isinstance(node.value, dict | list):
            return f"is a {'map' if node.is_map else 'list'}, not one word", f"one of: {', '.join(words)}", ""
        unknown = f"unknown value {node.value!r}{look_alike(text)}" if node.value is not None else "has no value"
        return unknown, f"one of: {', '.join(words)}", did_you_mean(text, list(words))
    if kind in _RANGES:
        if (drop := _share_drop(path)) is not None:
            return f"{text} is out of range", f"a drop of {drop} is at least 0 and below 1: 1 % is 0.01", ""
        word, key = _RANGES[kind]
        end = context[key] if isinstance(context[key], int) else f"{context[key]:g}"
        return f"{text} is out of range", f"a number {word} {end}", ""
    if kind == "string_pattern_mismatch":
        return _explain_pattern(node, context)
    if kind in ("too_short", "string_too_short"):
        about = _about(path)
        what = "entry" if kind == "too_short" else "character"
        return "is empty", f"at least one {what}{': ' if about else ''}{about}", ""
    if kind == "string_too_long":
        return "is too long", f"at most {context['max_length']} characters", ""
    return (*_explain_type(node, text, kind, path), "")


_RANGES = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}


_OTHER_PATTERNS = {
    CURRENCY: ("{value!r} is not the code of a currency", "three capital letters, such as USD"),
    TAG_KEY: ("{value!r} can't be the name of a tag", "letters, digits, blanks, and any of _ . / : -"),
}


def _explain_pattern(node: Node, context: dict[str, Any]) -> tuple[str, str, str]:
    if context["pattern"] in _OTHER_PATTERNS:
        wrong, allowed = _OTHER_PATTERNS[context["pattern"]]
        return wrong.format(value=node.value), allowed, ""
    if context["pattern"] != SOURCE:
        return f"{node.value!r} is not a valid name", _NAMES, ""
    forms = "input_example, synthetic, file:PATH, mlflow-dataset:NAME or python:package.module:function"
    kind, colon, rest = str(node.value).partition(":")
    if kind == "file" and rest:
        return f"{rest!r} is not a data file that can be read", "file:PATH ends in .npz, .parquet or .csv", ""
    if kind == "python" and rest:
        return f"{rest!r} is not a function path", "write python:package.module:function", ""
    if not colon and str(node.value).endswith((".npz", ".parquet", ".csv")):
        return f"{node.value!r} is not a data source", f"one of: {forms}", f"file:{node.value}"
    near = did_you_mean(kind, ["input_example", "synthetic", "file", "mlflow-dataset", "python"])
    return (
        f"{node.value!r} is not a data source",
        f"one of: {forms}",
        f"{near}{colon}{rest}" if near and near != kind else "",
    )


def _explain_type(node: Node, text: str, kind: str, path: Path) -> tuple[str, str]:
    value, wanted = node.value, _WANTED.get(kind, f"another kind of value ({kind.replace('_', ' ')})")
    if value is None:
        return "has no value", _needed(wanted, path)
    if kind in ("float_type", "int_type", "int_from_float", "finite_number"):
        return _explain_number(node, text, wanted, path)
    if kind == "bool_type":
        return f"`{text}` is text or a number, not a yes or no", "write true or false, without quotes"
    if kind == "string_type" and not isinstance(value, dict | list):
        what = "true/false" if isinstance(value, bool) else "a date" if isinstance(value, date) else "a number"
        if "precisions" in path:
            return f"`{text}` is read by YAML as {what}", f"one of: {', '.join(SHIPPED_PRECISIONS)}"
        return f"`{text}` is read by YAML as {what}, and a text is needed", f'put it in quotes: "{text}"'
    if kind.startswith("date"):
        return f"`{text}` is not a date", "write YYYY-MM-DD, such as 2027-01-31"
    if kind == "list_type":
        return "is not a list", f"write {_as_list(value, text, path)}"
    if (
        kind == "string_type"
        and isinstance(value, dict)
        and len(value) == 1
        and node.value[next(iter(value))].value is None
    ):
        name = f'"{{{next(iter(value))}}}"'
        return "is a map to YAML, since it begins with `{`", f"put it in quotes: {name}"
    if isinstance(value, str) and (joined := re.match(r"([A-Za-z_]\w*):(\S.*)", text)) and joined[1] in keys_at(path):
        return f"`{text}` is a single value", f"write a blank after the colon: {joined[1]}: {joined[2]}"
    if isinstance(value, dict | list):
        return f"is a {'map' if isinstance(value, dict) else 'list'}", _needed(wanted, path)
    return f"`{text}` is a single value", _needed(wanted, path)


def _as_list(value: Any, text: str, path: Path) -> str:
    """What was probably meant, as a list."""
    element = _step(_kind_at(path), 0)
    if isinstance(value, dict):
        return f"[{{{next(iter(value), '')}: ...}}]" if _model_in(element) else f"[{', '.join(value)}]"
    sizes = re.fullmatch(r"\s*\d+(\s*[x,; ]\s*\d+)*\s*", text) if int in _alternatives(element) else None
    return f"[{', '.join(re.findall(r'[0-9]+', text))}]" if sizes else f"[{text}]"


def _needed(wanted: str, path: Path) -> str:
    """What must stand there, how it is written, and what for; an entry under a name of the user's own has no
    description."""
    about = _about(path)
    if str(path[-1]) in METRICS and path[-2:-1] == ("tolerances",):
        return f"a metric stands under the precision that it is for: write fp32: {{{path[-1]}: ...}}"
    if wanted == _WANTED["dict_type"]:
        keys, inner = keys_at(path), keys_at((*path, "NAME"))
        wanted += f" such as {{{keys[0]}: ...}}" if keys else f" such as {{NAME: {{{inner[0]}: ...}}}}" if inner else ""
    return f"{wanted} is needed here{': ' if about else ''}{about}"


_WANTED = {
    "float_type": "a number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "date_type": "a date",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
}


def _share_drop(path: Path) -> str | None:
    """The metric whose drop stands at that path, where that drop is a share: `accuracy`, or its `max_drop`; None at its
    `confidence`."""
    if _model_at(path) is ShareDrop:
        return str(path[-1])
    is_drop = path[-1] in ("max_drop", "max_relative_drop") and _model_at(path[:-1]) is ShareDrop
    return str(path[-2]) if is_drop else None


def _explain_percent(number: str, path: Path, wanted: str) -> str:
    """What to write in place of `5%`: that depends on what the number means there."""
    key, share = str(path[-1]), float(number.replace("_", "")) / 100
    metric = METRICS.get(key) or METRICS.get(str(path[-2]) if len(path) > 1 else "")
    if key == "max_slowdown":
        return f"write {share if share >= 1 else 1 + share:.12g} ({percent(share if share < 1 else share - 1)} slower)"
    if metric is not None and metric.better and metric.unbounded and key != "max_relative_drop":
        return f"write {metric.name}: {{max_relative_drop: {share:.12g}}}, or a number in the metric's own unit"
    is_share = metric is not None and not metric.unit and metric.name not in ("max_abs", "mean_abs", "allclose")
    if (
        key == "min_speedup" and share < 0.5
    ):  # as the ratio that it is, it would let a model through that is as much slower
        return f"write {1 + share:.12g} ({percent(share)} faster)"
    if is_share or key in ("min_speedup", "confidence"):
        return f"write {share:.12g}"
    return f"write {wanted}: {_about(path)}"


def _explain_number(node: Node, text: str, wanted: str, path: Path) -> tuple[str, str]:
    value = node.value
    if isinstance(value, bool):
        return f"`{text}` is read by YAML as {str(value).lower()}", f"write {wanted}"
    if isinstance(value, float):
        return f"{text} is not whole", "write a whole number, without a point"
    if not isinstance(value, str):
        return f"is {'a map' if node.is_map else 'a list' if node.is_list else 'no number'}", f"write {wanted}"
    if (with_unit := _NUMBER_WITH_UNIT.match(text)) and with_unit[2].lower() in {*_UNITS, *_PERCENT, "x", "×"}:
        if with_unit[2].lower() in _PERCENT:
            return f"`{text}` is text, and numbers have no percent sign", _explain_percent(with_unit[1], path, wanted)
        number, unit = with_unit.groups()
        if _unit_of(path) is None:  # `min_samples: 32ms`, `min_speedup: 1.5x`
            return f"`{text}` is text, and the number has no unit here", f"write {number}"
        return f"`{text}` is text: the unit stands in the key's name", f"write {_in_unit_of(path, number, unit)}"
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        alone = re.fullmatch(r"[<>]=?\s*([-+]?\d[\d.]*)|([-+]?\d+,\d+)", text)
        if alone is None:
            return f"`{text}` is text", f"write {wanted}"
        if alone[1]:
            return f"`{text}` is text: a limit has a direction of its own", f"write {alone[1]}"
        fraction, thousands = text.replace(",", "."), text.replace(",", "")
        if not re.fullmatch(r"[-+]?[1-9]\d{0,2},\d{3}", text):
            return f"`{text}` is text: a number has a decimal point, and no comma", f"write {fraction}"
        meant = thousands if wanted == _WANTED["int_type"] else f"{thousands} or {fraction}, whichever is meant"
        return f"`{text}` is text: a number has no comma", f"write {meant}"
    if not text.isascii():
        return f"`{text}` is text to YAML{look_alike(text)}", f"write {number:.12g}"
    whole = wanted == _WANTED["int_type"]
    if whole:
        written = str(int(number)) if number.is_integer() else wanted
    else:
        written = text if _YAML_NUMBER.match(text) else _yaml_float(text)
    if node.quoted:
        return f"the number {text} is in quotes, which makes it text", f"write {written} without quotes"
    if _LEADING_ZERO.match(text):
        return f"`{text}` is text to YAML 1.1, where a number that begins with 0 has digits below 8", f"write {written}"
    return f"`{text}` is text to YAML 1.1, which wants a point in it and a sign in its exponent", f"write {written}"


def _unit_of(path: Path) -> str | None:
    """The unit that ends a key's name; None where the number has none, or is one per unit: the `min` of `min_samples`
    is no minute, and `min_tokens_per_s` is no time."""
    words = str(path[-1]).split("_") if path else [""]
    return None if "per" in words else _UNITS.get(words[-1])


def _in_unit_of(path: Path, number: str, unit: str) -> str:
    """A number with a unit as the key wants it: `1h` of minutes is 60."""
    given, wanted = _UNITS.get(unit.lower(), ""), _unit_of(path) or ""
    if given == wanted or given not in _SIZES or wanted not in _SIZES or _SIZES[given][0] != _SIZES[wanted][0]:
        return number
    return f"{float(number) * _SIZES[given][1] / _SIZES[wanted][1]:.12g}"


def _yaml_float(text: str) -> str:
    """A number as YAML 1.1 wants it: `1e-4` is 1.0e-4."""
    parts = _SCIENTIFIC.match(text)
    if parts is None:
        return repr(float(text))
    whole, fraction, sign, exponent = parts.groups()
    return f"{whole}{fraction if fraction and fraction != '.' else '.0'}e{sign or '+'}{exponent}"


def _words(context: dict[str, Any]) -> tuple[str, ...]:
    return tuple(re.findall(r"'([^']*)'", str(context.get("expected", ""))))


def _about(path: Path) -> str:
    """The schema's own description of a field, its first sentence."""
    model = _model_at(path[:-1])
    info = model.model_fields.get(str(path[-1])) if model and path else None
    return (info.description or "").rstrip(".") if info else ""


def keys_at(path: Path) -> tuple[str, ...]:
    """The keys that the map at that path may have; none when any may stand there."""
    model = _model_at(path)
    return tuple(model.model_fields) if model else ()


def holds_keys(path: Path) -> bool:
    """Whether a map may stand at that path; true where anything may."""
    kinds = list(_alternatives(_kind_at(path)))
    return any(kind in (None, Any) or get_origin(kind) is dict for kind in kinds) or _model_at(path) is not None


def _model_at(path: Path) -> type[BaseModel] | None:
    return _model_in(_kind_at(path))


def _kind_at(path: Path) -> Any:
    """The type of what stands at that path; None where it is not known."""
    kind: Any = PolicyDocument
    for key in path:
        kind = _step(kind, key)
    return kind


def _step(kind: Any, key: str | int) -> Any:
    """The type of a map's entry or a list's element."""
    if isinstance(key, int):
        return next((get_args(k)[0] for k in _alternatives(kind) if get_origin(k) is list), None)
    model = _model_in(kind)
    if model is not None:
        info = model.model_fields.get(key)
        return info.annotation if info else CustomLimit if key.startswith(CUSTOM) else None
    return next((get_args(k)[1] for k in _alternatives(kind) if get_origin(k) is dict), None)


def _model_in(kind: Any) -> type[BaseModel] | None:
    return next((k for k in _alternatives(kind) if isinstance(k, type) and issubclass(k, BaseModel)), None)


def _alternatives(kind: Any) -> Iterator[Any]:
    """The members of a type that may be a union, annotated, or both."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _alternatives(get_args(kind)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(kind):
            yield from _alternatives(member)
    else:
        yield kind
