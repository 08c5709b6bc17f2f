"""One finding of a linter: a mistake or a warning, located in a file."""

from __future__ import annotations

from typing import Literal

from compile_stage.core.error_codes import Code
from compile_stage.core.records import record


@record
class Finding:
    """What `lint` says of one place.

    Attributes:
        file: As it was named; `--set KEY=VALUE` for a value of the command line.
        line: From 1; 0 where there is no line.
        column: From 1; 0 where there is no line.
        message: What is wrong, what is allowed, and the nearest right word, in one sentence.
    """

    level: Literal["error", "warning"]
    code: Code
    file: str
    line: int
    column: int
    message: str
