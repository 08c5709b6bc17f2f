"""Protobuf messages that strangers wrote, read field by field without the package that defines them.

Nothing is built but what is asked for: a field is a number and a view into the file, so a file costs no more memory
than it has bytes, and what lies in it is skipped unless somebody looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

Value: TypeAlias = int | memoryview

_VARINT, _EIGHT_BYTES, _MESSAGE, _FOUR_BYTES = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class MalformedError(ValueError):
    """The bytes are no protobuf message."""


def fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """Number and value of each field in the order of the file: a whole number, or the bytes of a text, a nested message
    or a number of fixed size.

    Raises:
        MalformedError: The bytes end too early, or hold what no writer of today writes.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _MESSAGE:
            length, at = _varint(message, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            length = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise MalformedError(f"field {number} has the wire type {kind}")
        if length > len(message) - at:
            raise MalformedError(f"field {number} ends after its message")
        yield number, message[at : at + length]
        at += length


def nested(message: memoryview, number: int) -> Iterator[memoryview]:
    """The nested messages, or texts, of one field."""
    for found, value in fields(message):
        if found == number:
            if isinstance(value, int):
                raise MalformedError(f"field {number} holds a number where a message belongs")
            yield value


def text(message: memoryview, number: int) -> str:
    """The text of one field; empty where it is absent. The last one counts, as in every reader of protobuf."""
    found = memoryview(b"")
    for value in nested(message, number):
        found = value
    try:
        return str(found, "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError(f"field {number} holds no text") from error


def number(message: memoryview, wanted: int) -> int:
    """The whole number of one field; 0 where it is absent. The last one counts."""
    answer = 0
    for found, value in fields(message):
        if found == wanted:
            if not isinstance(value, int):
                raise MalformedError(f"field {wanted} holds no number")
            answer = value
    return answer


def signed(value: int) -> int:
    """A varint as the signed number of 64 bits that it stands for: -1 is an open dimension."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for count in range(_MAX_VARINT_BYTES):
        if at >= len(message):
            raise MalformedError("the message ends within a number")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, at
    raise MalformedError("a number has more than ten bytes")
