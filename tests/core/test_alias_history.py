"""What an alias pointed to before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_stage.core.alias_history import History, followed, parse, write

_VERSIONS = st.lists(st.integers(1, 9), min_size=1, max_size=30)


def _promote(tags: dict[str, str], now: str, version: str) -> str:
    """An alias moves on, as registries move it."""
    if version != now:
        tags[version] = write(followed(now, tags.get).moved_on(now) if now else History())
    return version


def _roll_back(tags: dict[str, str], now: str) -> str:
    history = followed(now, tags.get)
    if history.previous and (earlier := history.moved_back()) is not None:
        tags[history.previous] = write(earlier)
    return history.previous


@given(_VERSIONS)
def test_rollbacks_go_back_through_every_promotion_to_the_first(promoted: list[int]) -> None:
    """Broken: a version that came twice leads forth again, and the versions before its first time are out of reach."""
    tags: dict[str, str] = {}
    now, pointed_to = "", []
    for version in map(str, promoted):
        now = _promote(tags, now, version)
        if not pointed_to or pointed_to[-1] != version:
            pointed_to.append(version)
    back = [now]
    while now := _roll_back(tags, now):
        back.append(now)
    assert back == pointed_to[::-1]


def test_tags_of_early_releases_lead_on_from_version_to_version() -> None:
    """Broken: after an update, rollbacks of what an early release promoted are impossible, or go to a wrong version."""
    tags = {"2": "1", "3": "2"}
    now = _promote(tags, "3", "4")
    assert tags["4"] == "3 2 1 none"
    assert [now := _roll_back(tags, now) for _ in range(4)] == ["3", "2", "1", ""]


@pytest.mark.parametrize(
    ("tags", "promoted", "back"),
    [
        ({"2": "1", "3": "2"}, "2", ["3", "2", "1", ""]),  # 1, 2, 3, then 2 again
        ({"2": "3", "3": "2"}, "4", ["3", "2", "3", ""]),  # an early release lost what came before
    ],
)
def test_a_version_of_an_early_release_that_comes_again_ends_no_history(
    tags: dict[str, str], promoted: str, back: list[str]
) -> None:
    """Broken: after an update, rollbacks go from 3 to 2 and from 2 to 3 for ever, and never to 1."""
    now = _promote(tags, "3", promoted)
    assert [now := _roll_back(tags, now) for _ in back] == back


def test_two_versions_in_turn_for_longer_than_a_tag_remembers_end() -> None:
    """Broken: rollbacks go round in circles between them."""
    tags: dict[str, str] = {}
    now = ""
    for count in range(151):
        now = _promote(tags, now, "12"[count % 2])
    back = [now]
    while (now := _roll_back(tags, now)) and len(back) < 500:
        back.append(now)
    assert 100 <= len(back) <= 151


def test_a_long_history_is_cut_and_goes_on_with_the_tag_of_its_last_version() -> None:
    """Broken: a tag outgrows what MLflow takes, and no promotion is possible any more; or the cut end says that nothing
    came before."""
    tags: dict[str, str] = {}
    now = ""
    for version in range(1, 251):
        now = _promote(tags, now, str(version))
    assert len(tags["250"].split()) == 100
    back = [now]
    while now := _roll_back(tags, now):
        back.append(now)
    assert back == [str(version) for version in range(250, 0, -1)]


@pytest.mark.parametrize(
    ("value", "versions", "complete"),
    [
        (None, (), True),
        ("", (), True),
        ("2", ("2",), False),
        ("3 2 none", ("3", "2"), True),
        ("none", (), True),
        ("2 ", ("2 ",), False),
        ("3 ../2 none", ("3 ../2 none",), False),
        ("latest", ("latest",), False),
    ],
)
def test_what_a_tag_says(value: str | None, versions: tuple[str, ...], complete: bool) -> None:
    """Broken: a tag is read as what nobody wrote."""
    assert parse(value) == History(versions, complete)
