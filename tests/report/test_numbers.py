"""Numbers as people read them."""

from __future__ import annotations

import pytest

from compile_stage.report import numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "—"), (0.0, "0"), (1.0, "1"), (0.9999997, "1 − 3e-07"), (0.999996, "0.999996"), (0.9999, "0.9999"),
     (0.995, "0.995"), (0.99871, "0.9987"), (1.234e-6, "1.234e-06"),
     (float("nan"), "NaN"), (float("-inf"), "-∞"), (14.2345, "14.23"), (22056.13, "22056"), (2.5e7 + 0.5, "2.5e+07")],
)  # fmt: skip
def test_a_quantity_is_never_rounded_to_perfection(value: float | None, text: str) -> None:
    assert numbers.quantity(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "—"), (0.0000123, "12.3 µs"), (0.00041, "0.41 ms"), (0.0123, "12.3 ms"), (0.9996, "1.0 s"),
     (59.99, "60.0 s"),
     (99.96, "1 min 40 s"), (3600, "1 h 00 min"), (0.0, "0.00 µs")],
)  # fmt: skip
def test_a_duration_has_its_unit(seconds: float | None, text: str) -> None:
    assert numbers.duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "—"), (999, "999 B"), (48_200, "48.2 kB"), (97_800_000, "97.8 MB"), (5 * 10**15, "5000 TB")],
)
def test_sizes_are_in_powers_of_ten(size: int | None, text: str) -> None:
    assert numbers.size(size) == text


def test_the_ends_of_an_interval_can_be_told_apart() -> None:
    assert numbers.span((6.4, 6.612)) == "6.40 to 6.61"
    assert numbers.span((0.9991, 0.9993)) == "0.9991 to 0.9993"
    assert numbers.span((831.3, 22070.4)) == "831 to 22,070"
    assert numbers.span((0.6, 1234.0)) == "0.6 to 1,234"
    assert numbers.span((1200.3, 3400.9)) == "1,200 to 3,401"
    assert numbers.span(None) == ""


def test_rates_have_no_exponent() -> None:
    assert [numbers.rate(value) for value in (None, 493.12, 38870.4)] == ["—", "493.1", "38,870"]


def test_counts_agree_with_their_noun() -> None:
    assert [numbers.count(n, "batch") for n in (1, 2)] == ["1 batch", "2 batches"]
    assert numbers.count(1200, "sample") == "1,200 samples"
