"""`MLmodel`, which whoever logged the model wrote: it is looked at before MLflow's YAML reader gets it.

MLflow reads the whole file with a reader of some 100 kB/s, resolves aliases (`*name`) and merges (`<<`), and
later writes every value out. A file of 100 MB, or a small one whose aliases hold aliases, would take minutes or all
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MAX_BYTES = 2 * 2**20  # a table of 10,000 columns has 0.7 MB
_MAX_VALUES = 100_000  # once aliases are expanded
_MAX_DEPTH = 40
_MAX_PLAIN_CHARS = 10_000  # of an unquoted word: YAML tries to read it as a number, to the base of 60 if need be
_TOO_DEEP = "its values are nested too deeply"


class UnreadableError(ValueError):
    """The description is too large, or of no form that MLflow writes; the message says which."""


def read_text(file: Path) -> str:
    """The file's text, when MLflow's reader may have it.

    Raises:
        UnreadableError: It may not.
        OSError: The file can't be read.
    """
    with file.open("rb") as stream:
        content = stream.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise UnreadableError(f"it is larger than {_MAX_BYTES / 2**20:.0f} MiB")
    text = content.decode("utf-8")
    _demand_bounded(text)
    return text


def _demand_bounded(text: str) -> None:
    import yaml

    sizes: dict[str, int] = {}  # of what each anchor names, expanded
    open_maps: list[tuple[str | None, int]] = [(None, 0)]  # anchor and size so far, from the outermost in

    def add(size: int) -> None:
        anchor, held = open_maps[-1]
        open_maps[-1] = (anchor, held + size)
        if held + size > _MAX_VALUES:
            raise UnreadableError(f"it holds more than {_MAX_VALUES:,} values once its aliases (*name) are expanded")

    for event in _events(text):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise UnreadableError(f"its alias *{event.anchor} stands within what it names, or before it")
            add(sizes[event.anchor])
        elif isinstance(event, yaml.ScalarEvent):
            _demand_short(event)
            add(1)
            if event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_maps.append((event.anchor, 1))
            if len(open_maps) > _MAX_DEPTH:
                raise UnreadableError(_TOO_DEEP)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_maps.pop()
            add(size)
            if anchor:
                sizes[anchor] = size


def _events(text: str) -> Iterator[Any]:
    import yaml

    try:
        yield from yaml.parse(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        # PyYAML 6.0.4 and newer have a limit of their own, which they may reach before an event is handed out.
        if "nesting depth" in str(error.problem):
            raise UnreadableError(_TOO_DEEP) from error
        raise


def _demand_short(scalar: Any) -> None:
    """Raises UnreadableError for a long word without quotes, which YAML would try to read as a number."""
    if len(scalar.value) > _MAX_PLAIN_CHARS and scalar.implicit[0] and " " not in scalar.value:
        raise UnreadableError(f"it holds an unquoted word of more than {_MAX_PLAIN_CHARS:,} characters")


def _loader() -> Any:
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)
