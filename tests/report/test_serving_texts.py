"""What serving costs, in words."""

from __future__ import annotations

from compile_stage.core.records.serving import Layout, ServedLoad, ServingCost
from compile_stage.report.serving import cost_text


def test_rates_without_a_limit_are_not_said_to_be_a_policys() -> None:
    """Broken: `load-test --rate 20` says that the policy names its rates, and there is none, or one with others."""
    text = cost_text(ServingCost(winner=ServedLoad(layout=Layout(instances=1, threads=2))))
    assert text == "served by 1 process of 2 threads at the rates that were asked for"
