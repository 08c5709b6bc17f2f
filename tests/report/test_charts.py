"""The charts hold for the smallest, the largest and the strangest of values."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from compile_stage.core.records import Event
from compile_stage.report.charts import Bar, Distribution, latency_chart, speedup_chart, timeline_chart


@pytest.mark.parametrize("speedup", [1e-4, 0.4, 1.0, 7.3, 950.0])
def test_a_speedup_lies_within_its_chart(speedup: float) -> None:
    drawn = ElementTree.fromstring(
        speedup_chart([Bar(label="a", state="won", speedup=speedup, interval=(0.0, speedup * 2))])
    )
    circle = drawn.find("circle")
    assert circle is not None
    assert 210 <= float(circle.get("cx", "")) <= 690


def test_an_interval_that_has_no_end_is_drawn_without_one() -> None:
    bar = Bar(label="a", state="lost", speedup=2.0, interval=(float("nan"), float("inf")), stable=False)
    assert "nan" not in speedup_chart([bar])
    assert "hollow" in speedup_chart([bar])


def test_nothing_measured_draws_nothing() -> None:
    assert speedup_chart([]) == ""
    assert latency_chart([Distribution(label="a", state="won", latency_s=())]) == ""
    assert timeline_chart([], {}) == ""


def test_equal_latencies_are_one_peak() -> None:
    """Broken: a spread of zero, by which the axis is divided, or a histogram with more than one bar of full height."""
    drawn = ElementTree.fromstring(latency_chart([Distribution(label="a", state="won", latency_s=(0.001,) * 9)]))
    paths = [element for element in drawn.iter() if element.tag.endswith(("path", "polygon"))]
    assert len(paths) == 1
    numbers = [float(number) for number in re.findall(r"-?[0-9.]+", paths[0].get("d") or paths[0].get("points") or "")]
    assert numbers
    assert all(math.isfinite(number) for number in numbers)
    heights = numbers[1::2]
    assert heights.count(min(heights)) <= 2  # the top of one bar
    assert "1.00 ms" in "".join(drawn.itertext())


def test_labels_are_escaped() -> None:
    drawn = latency_chart([Distribution(label="<b>&", state="won", latency_s=(0.001, 1.0))])
    assert "<b>" not in drawn
    assert "&lt;b&gt;&amp;" in drawn


def test_a_cached_step_is_told_apart() -> None:
    drawn = timeline_chart([Event(step="compile", job_id="j", started_s=0.0, ended_s=0.0, cached=True)], {"j": "label"})
    assert "from the cache" in drawn
    assert "label" in drawn
