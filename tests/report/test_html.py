"""`report.html`: self-contained, complete, and safe whatever a model or a policy is called."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from hashlib import sha256
from html.parser import HTMLParser
from types import ModuleType

import pytest

from compile_stage.core.language_models import SHIPPED_DEFAULTS
from compile_stage.core.records import Failure, OutputErrors, PolicyValue, Refusal, RunResult, WorstAnswer
from compile_stage.report.html import render_html

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Tags, attributes and text; `problems` names tags that do not close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.problems: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_every_tag_closes(result: RunResult) -> None:
    page = Page(render_html(result))
    assert page.problems == []
    assert page.open == []


def scripts_of(page: str) -> list[str]:
    """The content of each script that a browser would run."""
    return re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)


def test_nothing_is_loaded_and_no_script_but_ours_runs(result: RunResult) -> None:
    """Broken: opened from disk, or in MLflow's sandboxed frame, the page misses an asset, or its policy lets a script
    run that is none of ours."""
    page = render_html(result)
    parsed = Page(page)
    assert not {"link", "iframe", "object"} & set(parsed.tags)
    assert {value[:1] for name, value in parsed.attributes if name == "href"} == {"#"}
    assert not [name for name, _ in parsed.attributes if name in ("src", "style") or name.startswith("on")]
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "url(" not in own
    assert "@import" not in own
    hashes = {base64.b64encode(sha256(script.encode()).digest()).decode() for script in scripts_of(page)}
    policy = next(value for name, value in parsed.attributes if value.startswith("default-src"))
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == hashes
    assert len(hashes) == 2
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")


def test_the_file_stays_small(result: RunResult) -> None:
    """Broken: a report no longer fits a mail, or a registry's page."""
    assert len(render_html(result)) < 3_000_000
    assert len(render_html(result, scripts=False)) < 200_000


def test_without_scripts_the_page_is_whole(result: RunResult) -> None:
    """Broken: a reader without scripts, such as a notebook's frame, misses a part that others have."""
    plain, scripted = Page(render_html(result, scripts=False)), Page(render_html(result))
    assert "script" not in plain.tags
    without = Page(re.sub(r"<script.*?</script>", "", render_html(result), flags=re.DOTALL))
    assert plain.text == without.text
    assert plain.tags == [tag for tag in scripted.tags if tag != "script"]


def test_the_contents_lead_to_each_part(result: RunResult) -> None:
    """Broken: an entry of the list of contents leads nowhere, or a heading has none."""
    parsed = Page(render_html(result))
    ids = [value for name, value in parsed.attributes if name == "id"]
    leads = [value[1:] for name, value in parsed.attributes if name == "href"]
    assert len(ids) == len(set(ids))
    assert set(leads) <= set(ids)
    assert {"target-1", "target-1-why", "target-2-proof", "timeline", "environment"} <= set(leads)


def test_everything_a_reader_needs_is_there(result: RunResult) -> None:
    text = Page(render_html(result)).text
    for expected in (
        "cpu-server: openvino int8-sym selected under a waiver of max_rel, "
        "6.52× the baseline's speed (median 0.31 ms, baseline 2.03 ms), "
        "1.84× through predict(); edge: no winner",
        "passed, but 2.00× slower than the winner",
        "Worst samples: 17, 203, 5",
        "onnxruntime has no bf16 on cpu here",
        "6.52× in the runtime, 1.84× through predict() (1.71 to 1.97): 2.62 ms before, 1.42 ms after",
        "max_rel is waived until 2027-01-31 by vision-team",
        "models:/digits-cnn-compiled/3",
        "the worker died of signal 11 (SIGSEGV)",
        "segmentation fault",
        "No winner. no candidate passed its gates",
        "Example CPU @ 2.10GHz",
        "file:val.npz: 360 samples, real, with labels",
        "1 node stays in fp32: /fc/Gemm",
        "not run",
        "cpu-server.yaml:21",
    ):
        assert expected in text


def test_the_charts_are_drawn(result: RunResult) -> None:
    page = render_html(result)
    # Plot, speedups and latencies of the target that was measured, latencies of the other, timeline.
    assert render_html(result, scripts=False).count("<svg") == 5
    assert "Speedup over the baseline with 95 % intervals" in page


HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}'


def test_hostile_names_stay_text(factory: ModuleType) -> None:
    """Model names, reasons and tracebacks come from others; none may become markup or a template expression."""
    target = factory.every_ending()
    job = dataclasses.replace(target.candidates[0].job, backend=HOSTILE, id=HOSTILE)
    hurt = dataclasses.replace(
        target.candidates[0],
        job=dataclasses.replace(job, scheme=dataclasses.replace(job.scheme, name=HOSTILE)),
        failure=Failure(kind="exception", step=HOSTILE, problem=HOSTILE, detail=HOSTILE),
    )
    selection = dataclasses.replace(
        target.selection, winner=HOSTILE, states={HOSTILE: "won"}, reasons={HOSTILE: HOSTILE}
    )
    made = factory.make_result(dataclasses.replace(target, candidates=(hurt,), selection=selection))
    made = dataclasses.replace(
        made,
        source=dataclasses.replace(made.source, name=HOSTILE, uri=HOSTILE, version=HOSTILE),
        policy=dataclasses.replace(made.policy, name=HOSTILE, owner=HOSTILE, files=(HOSTILE,)),
        notes=(HOSTILE,),
        baseline_framework=HOSTILE,
        refused=(Refusal(job_id="x", target="cpu-server", backend=HOSTILE, precision=HOSTILE, reason=HOSTILE),),
        environment={"hardware": {HOSTILE: HOSTILE}, "packages": {HOSTILE: HOSTILE}},
        events=tuple(dataclasses.replace(event, step=HOSTILE, job_id=HOSTILE) for event in made.events),
    )
    page = render_html(made)
    parsed = Page(page)
    assert scripts_of(page) == scripts_of(render_html(factory.make_result()))
    assert parsed.tags.count("script") == 3
    assert "img" not in parsed.tags
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', page, flags=re.DOTALL)[1])  # type: ignore[index]
    assert {point["label"] for point in data[0]["pareto"]["points"]} >= {f"{HOSTILE} {HOSTILE}"}
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert parsed.problems == []
    assert HOSTILE in " ".join(parsed.words)


@pytest.mark.parametrize("status", ["failed", "refused"])
def test_a_run_without_targets_still_gives_a_page(result: RunResult, status: str) -> None:
    empty = dataclasses.replace(
        result,
        status=status,
        targets=(),
        events=(),
        samples={},
        environment={"hardware": {}, "packages": {}},
        problem="why",
    )  # type: ignore[arg-type]
    page = Page(render_html(empty))
    assert "why" in page.text
    assert page.problems == []


def test_samples_that_are_not_shown_say_why(result: RunResult) -> None:
    """Broken: of a winner whose answers are exact, a report advises `report: {samples: true}`, which the
    policy says."""
    target = result.targets[0]

    def page(worst: tuple[WorstAnswer, ...]) -> str:
        errors = (OutputErrors(output="logits", errors=(0.0,) * 3, worst=worst),)
        won = tuple(dataclasses.replace(c, errors=errors if c is target.winner else ()) for c in target.candidates)
        changed = dataclasses.replace(target, candidates=won, previews=())
        return Page(render_html(dataclasses.replace(result, targets=(changed,)), scripts=False)).text

    exact = "openvino int8-sym answers every sample as the original does"
    assert exact in page(())
    assert "samples: true" not in page(()).partition("Error by output")[2].partition("Cost of")[0]
    hidden = page((WorstAnswer(sample=1, error=0.5, original="", candidate=""),))
    assert "The samples themselves are not shown" in hidden
    assert exact not in hidden


def test_what_a_policy_sets_is_set_by_its_own_files_and_by_set(factory: ModuleType) -> None:
    """Broken: values that --set gave are said to be those of the files, and the shipped defaults to set values."""
    made = factory.make_result(factory.every_ending())
    policy = dataclasses.replace(made.policy, files=(SHIPPED_DEFAULTS, "base.yaml", "own.yaml"))
    origins = {"budget.minutes": "--set budget.minutes=3", "data.seed": "own.yaml:4", "data.min_samples": "d.yaml:1"}
    values = tuple(
        PolicyValue(path=path, value=3, origin=origin, is_default=origin == "d.yaml:1", locked_by="")
        for path, origin in origins.items()
    )
    given = dataclasses.replace(made, policy=policy, policy_values=values)
    assert "2 values set by base.yaml, own.yaml, --set; the rest are shipped defaults." in render_html(given)
    unset = dataclasses.replace(given, policy_values=values[1:])
    assert "1 value set by base.yaml, own.yaml; the rest are shipped defaults." in render_html(unset)
