"""Bounds of the text tables that samples are read from: what is beyond them would take minutes, or all memory."""

from __future__ import annotations

from pathlib import Path

MAX_COLUMNS = 100_000  # read in some five seconds
MAX_LINE_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 10_000  # of an array in a .npz, as NumPy's own reader has it

_MAX_DOUBLES = 100  # pandas numbers columns of one name, with a look at all before for each
_MAX_TEXT_BYTES = 4 * 2**30


def demand_bounded_csv(path: Path) -> None:
    """Look at a CSV file's first line, in bounded time.

    Raises:
        ValueError: It is longer, or names more columns, than any table's.
        OSError: The file can't be read.
    """
    with path.open("rb") as stream:
        line = stream.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"its first line is longer than {MAX_LINE_BYTES / 2**20:.0f} MiB")
    names = line.split(b",")
    if len(names) > MAX_COLUMNS:
        raise ValueError(f"it has {len(names):,} columns, more than {MAX_COLUMNS:,}")
    if len(names) - len(set(names)) > _MAX_DOUBLES:
        raise ValueError(f"{len(names) - len(set(names)):,} of its columns have a name that another one has")


def demand_bounded_text(name: str, count: int, longest: int) -> None:
    """Raise ValueError for texts that NumPy, which gives each the room of the longest, can't hold together.

    Args:
        count: Of texts.
        longest: In characters, of 4 bytes each.
    """
    if count * longest * 4 > _MAX_TEXT_BYTES:
        raise ValueError(
            f"column {name!r} holds a text of {longest:,} characters, and {count:,} rows of that width take "
            f"{count * longest * 4 / 2**30:.0f} GiB"
        )
