"""The codes of errors and warnings that people meet. A code keeps its number and its meaning; `compile-stage rule CODE`
prints its page (`core.error_pages`), and docs/errors.md holds them all."""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """The first digit after the letters is the exit code's family; 01 is policy files, 08 one job, 09 ours."""

    UNREADABLE_POLICY = "CS0101"
    NOT_YAML = "CS0102"
    UNKNOWN_KEY = "CS0103"
    WRONG_VALUE = "CS0104"
    MISSING_KEY = "CS0105"
    DUPLICATE_KEY = "CS0106"
    EXTENDS = "CS0107"
    LOCKED = "CS0108"
    WRONG_SET = "CS0109"
    UNKNOWN_NAME = "CS0110"
    DATA_FILE = "CS0111"
    TOO_FEW_SAMPLES = "CS0112"
    NO_LABELS = "CS0113"
    LIMIT_NEVER_FAILS = "CS0114"
    WAIVER = "CS0115"
    SHAPES = "CS0116"
    WRONG_NAME = "CS0117"
    FORBIDDEN = "CS0118"
    UNKNOWN_VERSION = "CS0119"
    NO_TARGET = "CS0120"

    USAGE = "CS0200"
    UNKNOWN_COMMAND = "CS0201"
    POLICY = "CS0202"
    MISSING_DEPENDENCY = "CS0210"
    STORAGE = "CS0220"
    FILES_REMOVED = "CS0221"
    KILLED = "CS0222"
    DEVICE = "CS0230"

    GATE = "CS0300"

    REGISTRY = "CS0400"
    REGISTRY_UNREACHABLE = "CS0401"
    NOT_IN_REGISTRY = "CS0402"
    ALIAS_MOVED = "CS0403"

    SOURCE = "CS0500"

    NOTHING_COMPILED = "CS0600"

    INTEGRITY = "CS0700"

    WORKER = "CS0800"

    INTERNAL = "CS0900"


PASSING = frozenset({Code.STORAGE, Code.FILES_REMOVED, Code.KILLED})
"""Trouble of the machine that may be over when the same command runs again, of those with the exit code of wrong
usage."""
