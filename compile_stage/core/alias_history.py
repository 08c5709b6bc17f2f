"""What an alias pointed to before it came to a version: a tag of that version, so that each rollback goes one back.

The value is the versions, newest first, and `none` where nothing came before the last of them: `3 2 1 none`. Without
`none`, as early releases wrote it and where a history was cut, the tag of the last version named goes on with it
(`followed`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_TAG = "compile_stage.previous."
OWNER_TAG = "compile_stage.history_of"
"""On a version that was copied from another with its tags, the time in ms that it was made at: its histories are its
own then, and not those that came with the copy, whose numbers are of other versions."""
LONGEST_ALIAS = 250 - len(_TAG)
"""Characters of an alias that can be moved back: MLflow takes aliases of 255, and names of tags of 250."""
_FIRST = "none"
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_LONGEST = 100  # versions: far more than anybody goes back, and far less than the 5,000 characters of MLflow's tags


@dataclass(frozen=True)
class History:
    """Attributes:
    versions: What the alias pointed to before, newest first.
    complete: Whether nothing came before the last of them. Else that version's own tag tells.
    """

    versions: tuple[str, ...] = ()
    complete: bool = True

    @property
    def previous(self) -> str:
        """What a rollback goes to, empty for none."""
        return self.versions[0] if self.versions else ""

    def moved_on(self, version: str) -> History:
        """The history after a promotion, where this one is that of `version`, to which the alias pointed."""
        versions = (version, *self.versions)
        return History(versions[:_LONGEST], self.complete and len(versions) <= _LONGEST)

    def moved_back(self) -> History | None:
        """The history of `previous` once the alias is back there; None where its own tag tells."""
        earlier = History(self.versions[1:], self.complete)
        return earlier if earlier.versions or earlier.complete else None


def previous_tag(alias: str) -> str:
    """The tag of a version that says what the alias pointed to before it pointed here."""
    return _TAG + alias


def without_copied(tags: Mapping[str, str], made_at: str) -> dict[str, str]:
    """The tags of a copied version without the histories that came with the copy."""
    own = tags.get(OWNER_TAG) == made_at
    return {key: value for key, value in tags.items() if own or not key.startswith(_TAG)}


def is_version(word: str) -> bool:
    """True for the number of a version, and nothing else that whoever may write tags can write there."""
    return _VERSION.fullmatch(word) is not None


def parse(value: str | None) -> History:
    """The history that a tag's value says; of none, and of an empty one, that nothing came before. One that no
    promotion wrote is taken for a version as a whole, which whoever looks for that version finds out."""
    if not value:
        return History()
    words = value.split(" ")
    complete = words[-1] == _FIRST
    versions = tuple(words[:-1] if complete else words)
    if not all(map(is_version, versions)):
        return History((value,), complete=False)
    return History(versions, complete)


def followed(version: str, tag_of: Callable[[str], str | None]) -> History:
    """The history of a version to which the alias points, with what the tags of the versions before add to it. The tag
    of one that came again later tells of that time, so the history ends there, and no rollback goes round in circles.

    Args:
        tag_of: Of a version, the tag's value; None where there is none, or no such version.
    """
    history = parse(tag_of(version))
    while not history.complete and len(history.versions) < _LONGEST and is_version(history.versions[-1]):
        last = history.versions[-1]
        again = last in (version, *history.versions[:-1])
        further = History() if again else parse(tag_of(last))
        versions = (*history.versions, *further.versions)
        history = History(versions[:_LONGEST], further.complete and len(versions) <= _LONGEST)
    return history


def write(history: History) -> str:
    """The value of the tag, empty where nothing came before."""
    if not history.versions:
        return ""
    return " ".join((*history.versions, _FIRST) if history.complete else history.versions)
