"""Protobuf's text format, as far as Triton's `config.pbtxt` needs it: written from plain values, and read again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from compile_stage.core.errors import UsageError


class Word(str):
    """The name of an enumeration's value, written without quotes."""

    __slots__ = ()


def write(message: Mapping[str, Any]) -> str:
    """A message as text. A list is a repeated field, or a map of `key` and `value`."""
    return "".join(f"{line}\n" for line in _lines(message))


def _lines(message: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in message.items():
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Mapping):
                yield f"{indent}{name} {{"
                yield from _lines(item, indent + "  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {_scalar(item)}"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Word) or not isinstance(value, str):
        return str(value)
    return json.dumps(value)


_TOKEN = re.compile(r'\s+|#[^\n]*|(?P<text>"(?:[^"\\]|\\.)*")|(?P<sign>[{}:\[\],])|(?P<word>[^\s{}:\[\],"#]+)')


def read(text: str) -> dict[str, list[Any]]:
    """A message of text that `write` wrote: every field is a list, in order. Raises UsageError for other text."""
    tokens = []
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise UsageError(f"this is no text of protobuf: {text[place : place + 40]!r}")
        place = found.end()
        if found.lastgroup is not None:
            tokens.append((found.lastgroup, found[0]))
    try:
        return _message(iter([*tokens, ("end", "")]), "end")
    except StopIteration as error:
        raise UsageError("this text of protobuf ends within a message") from error


def _message(tokens: Iterator[tuple[str, str]], end: str) -> dict[str, list[Any]]:
    fields: dict[str, list[Any]] = {}
    for kind, piece in tokens:
        if end in (piece, kind):
            return fields
        if kind == "end":
            break
        _, sign = next(tokens)
        if kind != "word" or sign not in (":", "{"):
            raise UsageError(f"this is no text of protobuf near {piece!r}")
        value = _message(tokens, "}") if sign == "{" else _value(*next(tokens))
        fields.setdefault(piece, []).append(value)
    raise UsageError("this text of protobuf ends within a message")


def _value(kind: str, piece: str) -> Any:
    if kind == "text":
        return json.loads(piece)
    if piece in ("true", "false"):
        return piece == "true"
    for number in (int, float):
        try:
            return number(piece)
        except ValueError:
            continue
    return Word(piece)
