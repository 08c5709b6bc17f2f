"""What serving costs, in words."""

from __future__ import annotations

from compile_stage.core.records.serving import Layout, LoadPoint, ServedLoad, ServingCost
from compile_stage.report.serving import cost_text


def test_rates_without_a_limit_are_not_said_to_be_a_policys() -> None:
    """Broken: `load-test --rate 20` says that the policy names its rates, and there is none, or one with others."""
    text = cost_text(ServingCost(winner=ServedLoad(layout=Layout(instances=1, threads=2))))
    assert text == "served by 1 process of 2 threads under the rates that were asked for"


def test_a_rate_that_was_not_held_is_not_said_to_be_served() -> None:
    """Broken: the generator of a hundred thousand requests a second is late, or the server falls behind, and the
    verdict reads as if all were answered."""
    points = tuple(
        LoadPoint(kind="open", requests=64, seconds=1.0, throughput_per_s=60.0, rate=rate, **told)
        for rate, told in (
            (50.0, {}),
            (1000.0, {"overloaded": True}),
            (100000.0, {"invalid": "the generator was late"}),
        )
    )
    text = cost_text(ServingCost(winner=ServedLoad(layout=Layout(instances=1, threads=2), points=points)))
    assert text.endswith("; 1 of 3 trials could not be measured; 1 of 3 overloaded it")
