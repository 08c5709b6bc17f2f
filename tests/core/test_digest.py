"""Canonical JSON and digests: equal values must have equal bytes, and every difference that matters another digest."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_stage.core import records as r
from compile_stage.core.digest import (
    canonical_json,
    digest_of,
    digest_tree,
    list_tree,
    load_record,
    plain,
    revive,
    tree_size,
)

text = st.text(max_size=12)
number = st.floats(allow_nan=True, allow_infinity=True)

gates = st.builds(
    r.Gate,
    metric=text,
    limit=number,
    direction=st.sampled_from(["at_most", "at_least"]),
    output=st.none() | text,
    confidence=st.none() | st.floats(0.5, 0.99),
    options=st.dictionaries(text, st.integers() | text | st.booleans()),
)
checks = st.builds(
    r.Check,
    gate=gates,
    outcome=st.sampled_from(r.Outcome),
    measured=st.none() | number,
    reason=text,
    batch_size=st.none() | st.integers(1, 64),
    interval=st.none() | st.tuples(number, number),
    worst=st.lists(st.integers(0, 100), max_size=5).map(tuple),
)
verdicts = st.builds(r.Verdict, checks=st.lists(checks, max_size=4).map(tuple))


@given(verdicts)
def test_a_record_survives_the_journey_through_json(verdict: r.Verdict) -> None:
    """Broken: a worker of another process, or the cache, would answer with something else than what was computed."""
    assert canonical_json(load_record(r.Verdict, canonical_json(verdict))) == canonical_json(verdict)


@given(st.dictionaries(text, st.integers() | text | st.lists(st.integers())))
def test_order_of_keys_does_not_matter(mapping: dict[str, object]) -> None:
    """Broken: the same policy written in another order would be compiled again."""
    backwards = dict(reversed(mapping.items()))
    assert digest_of(mapping) == digest_of(backwards)


def test_nan_equals_itself() -> None:
    """Broken: a NaN in a record could not be written as JSON at all."""
    assert digest_of({"x": math.nan}) == digest_of({"x": math.nan}) != digest_of({"x": math.inf})


@given(st.lists(st.floats() | st.integers(), max_size=6))
def test_lists_of_numbers_are_written_as_their_items_are(numbers: list[float]) -> None:
    """Broken: of many numbers at once another spelling is made than of each, such as a bare NaN, which is no JSON."""
    assert repr(plain(numbers)) == repr([plain(number) for number in numbers])
    again = revive(tuple[float, ...], plain(numbers))
    assert repr(again) == repr(tuple(map(float, numbers)))
    assert set(map(type, again)) <= {float}


def test_what_is_not_plain_is_refused() -> None:
    """Broken: an object's address would become part of a cache key."""
    with pytest.raises(TypeError, match="object can't travel"):
        plain({"x": object()})


def test_unknown_fields_of_a_newer_writer_are_ignored() -> None:
    """Broken: a manifest of the next release could not be read by this one."""
    assert load_record(r.DataSpec, '{"source": "synthetic", "from_the_future": 1}') == r.DataSpec(source="synthetic")


def test_a_value_of_the_wrong_type_is_refused() -> None:
    """Broken: garbage from a backend would travel on as if it were a record."""
    with pytest.raises((TypeError, ValueError)):
        load_record(r.DataSpec, '{"source": 3}')
    with pytest.raises((TypeError, ValueError)):
        load_record(r.Check, '{"gate": [], "outcome": "pass", "measured": null, "reason": ""}')


def test_tree_digest_sees_names_and_contents(tmp_path: Path) -> None:
    """Broken: a file that was swapped with another inside a bundle would not be noticed."""
    (tmp_path / "a").write_text("1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_text("22")
    before = digest_tree(tmp_path)
    assert list_tree(tmp_path) == ["a", "sub/b"]
    assert tree_size(tmp_path) == 3
    assert digest_tree(tmp_path, leave_out={"a"}) != before
    (tmp_path / "a").rename(tmp_path / "c")
    assert digest_tree(tmp_path) != before


def test_a_path_that_is_no_utf8_has_a_digest() -> None:
    """Broken: a policy below a folder with a name in Latin-1 would end in a bug of ours, at the first step."""
    assert digest_of({"path": os.fsdecode(b"caf\xe9")}) != digest_of({"path": "caf"})


def test_records_of_an_older_manifest_are_read_by_the_names_of_then() -> None:
    """Broken: a bundle that an older compile-stage published could not be verified or validated any more."""
    from compile_stage.core.records import Job, Scheme, Target

    job = Job(
        id="m-1--cpu--tvm--fp32", source="s", target=Target(name="cpu"), backend="tvm",
        scheme=Scheme(precision="fp32", name="fp32"), gates=(), tuning_options=("no-arena",),
        not_runnable_here="an ARM CPU",
    )  # fmt: skip
    old = plain(job)
    old["rungs"], old["elsewhere"] = old.pop("tuning_options"), old.pop("not_runnable_here")
    assert revive(Job, old) == job
