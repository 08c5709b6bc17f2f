"""`lint` warns of settings that change nothing in their policy."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date

import pytest

from compile_stage.core import plugins
from compile_stage.policy.load import lint

from .conftest import warnings

TODAY = date(2026, 6, 1)
T = "targets: {t: {}}\n"
UNUSED = {
    "limits on a precision beside the one that is tried": (
        "targets: {t: {precisions: [int8-dynamic]}}\ntolerances: {int8: {cosine: 0.9999}}",
        "p.yaml:5:29: targets.t.tolerances.int8: int8 is not tried, and int8-dynamic is, by the shipped limits and not "
        "by these; limits on int8-dynamic, or int8 among the precisions",
    ),
    "the same in a target's own block": (
        "targets: {t: {precisions: [int8], tolerances: {int8-dynamic: {cosine: 0.9999}}}}",
        "p.yaml:4:71: targets.t.tolerances.int8-dynamic: int8-dynamic is not tried, and int8 is, by the shipped limits "
        "and not by these; limits on int8, or int8-dynamic among the precisions",
    ),
    "serving without a measurement": (
        T + "serving: {seconds: 30, price_per_hour: 2}",
        "p.yaml:5:20: targets.t.serving.seconds: it changes nothing: without p99_ms and rates nothing is measured "
        "under load; name serving.p99_ms or serving.rates, or leave it out",
    ),
    "approval of no alias": (
        T + "promote: {approval: release.approval}",
        "p.yaml:5:21: targets.t.promote.approval: nobody is asked: promote.alias is null, so no alias moves; name "
        "promote.alias, or leave it out",
    ),
    "limits on a search that is not made": (
        "targets: {t: {precisions: [int8]}}\nfallback: {mixed_precision: false, max_evaluations: 50}",
        "p.yaml:5:53: targets.t.fallback.max_evaluations: it changes nothing: fallback.mixed_precision is false, so "
        "nothing is searched; say mixed_precision: true, or leave it out",
    ),
    "minutes of a search that is not made": (
        T + "budget: {search_minutes: 30}",
        "p.yaml:5:26: budget.search_minutes: it changes nothing: no target says ladder: true, and only then settings "
        "of the runtime are searched; say ladder: true in a target, or leave it out",
    ),
    "seconds in the place of minutes": (
        T + "budget: {minutes: 20, measure_seconds: 1800}",
        "p.yaml:5:40: budget.measure_seconds: it is longer than the whole run, which has 20 minutes (budget.minutes); "
        "at most 1200, or more budget.minutes",
    ),
    "a worker's call that is longer than the run": (
        T + "budget: {minutes: 2, job_minutes: 2.5}",
        "p.yaml:5:35: budget.job_minutes: it is longer than the whole run, which has 2 minutes (budget.minutes); at "
        "most 2, or more budget.minutes",
    ),
    "elsewhere without a family": (
        T + "publish: {elsewhere: portable-fp32}",
        "p.yaml:5:22: publish.elsewhere: it changes nothing: no target is in a family, and only a version that holds "
        "one has it; give the targets a family, or leave it out",
    ),
}


@pytest.mark.parametrize(("text", "message"), UNUSED.values(), ids=UNUSED.keys())
def test_a_setting_that_changes_nothing_is_a_warning(write, text: str, message: str) -> None:
    """Broken: a limit, a person's approval or a measurement stands in the policy, and no run heeds it or says so."""
    path = write(text)
    assert lint([path]) == []
    assert warnings(path, today=TODAY) == [message]


@pytest.mark.parametrize(
    "text",
    [
        "targets: {t: {precisions: [int8-dynamic]}, u: {precisions: [int8]}}\ntolerances: {int8: {cosine: 0.9}}",
        "targets: {t: {precisions: [int8-dynamic]}}\ntolerances: {int8: {cosine: 0.9}, int8-dynamic: {cosine: 0.9}}",
        "targets: {t: {precisions: [fp16]}}\ntolerances: {int8: {cosine: 0.9}}",
        T + "serving: {rates: [5], seconds: 30}",
        "targets: {t: {ladder: true}, u: {}}\nbudget: {search_minutes: 30}",
        "targets: {t: {precisions: [int8]}}\nfallback: {max_evaluations: 50}",
        "targets: {t: {precisions: [int8]}}\nfallback: {mixed_precision: false}",
        T + "promote: {alias: prod, approval: release.approval}",
        "targets: {t: {family: f}}\npublish: {elsewhere: portable-fp32}",
        T + "budget: {minutes: 1}",
        T + "budget: {minutes: 20, measure_seconds: 1200}",
    ],
)
def test_what_is_heeded_is_no_warning(write, text: str) -> None:
    """Broken: `lint` cries wolf, and nobody reads it any more."""
    assert warnings(write(text), today=TODAY) == []


def test_what_a_base_says_for_others_is_no_warning(write) -> None:
    """Broken: every policy of a team is warned of what the organisation's base says for all."""
    says = "promote: {approval: ok}\nserving: {seconds: 30}\npublish: {elsewhere: portable-fp32}\n"
    base = write(says + "budget: {job_minutes: 10}\ntolerances: {int8: {cosine: 0.9}}", "base.yaml")
    team = write("extends: [base.yaml]\nbudget: {minutes: 3}\ntargets: {t: {precisions: [int8-dynamic]}}")
    assert warnings(base, today=TODAY) == warnings(team, today=TODAY) == []


def test_a_flavor_that_no_model_can_have_is_a_warning(write) -> None:
    """Broken: `flavors: [torch]` matches no model, so a service and a fleet leave them all out, without a word."""
    path = write(T + "applies_to: {flavors: [torch, sklearn]}")
    assert lint([path]) == []
    (said,) = warnings(path, today=TODAY)
    assert said.startswith(
        "p.yaml:5:24: applies_to.flavors[0]: no installed source reads models of flavor 'torch', so no model has it; "
    )
    assert said.endswith("; did you mean pytorch?")


def test_an_option_that_a_backend_does_not_have_is_a_warning(write) -> None:
    """Broken: a typo refuses the backend, another one wins, and the run passes as if nobody had asked for the first."""
    target = "{backends: [onnxruntime, openvino], options: {onnxruntime: {spining: false, memory_arena: 3}}}"
    path = write("targets: {t: " + target + "}")
    assert lint([path]) == []
    unknown, wrong = warnings(path, today=TODAY)
    assert unknown.startswith(
        "p.yaml:4:74: targets.t.options.onnxruntime.spining: onnxruntime has no option 'spining', so the target does "
        "without onnxruntime; one of: graph_optimization, spinning, "
    )
    assert unknown.endswith("; did you mean spinning?")
    assert wrong == (
        "p.yaml:4:104: targets.t.options.onnxruntime.memory_arena: onnxruntime's option memory_arena must be true or "
        "false, not 3, so the target does without onnxruntime"
    )


@pytest.mark.parametrize("backend", plugins.names("backends"))
def test_every_backend_of_ours_lists_its_options(backend: str) -> None:
    """Broken: a typo in the options of one backend alone is no warning."""
    if plugins.third_party("backends", backend):
        pytest.skip("a third party's")
    assert isinstance(plugins.load("backends", backend).options, Mapping)
