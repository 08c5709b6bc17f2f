"""The page in a real browser, in a frame as MLflow shows it: `sandbox="allow-scripts"`, no address of its own, no
network."""

from __future__ import annotations

import dataclasses
import html
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from compile_stage.core.records import OutputErrors, PolicyValue, RunResult, SamplePreview, WorstAnswer
from compile_stage.report import fleet_page, write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><script>document.title='run'</script>"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="


def whole_result(factory: ModuleType) -> RunResult:
    """A run that has every part of the page, with a hostile name and a hostile reason among its candidates."""
    target = factory.with_option_tuning()
    errors = tuple(0.0001 * (index + 1) for index in range(40))
    worst = (WorstAnswer(sample=39, error=0.004, original="largest at 3: 0.9", candidate="largest at 5: 0.5"),)
    shown = OutputErrors(output="logits", errors=errors, worst=worst)
    candidates = []
    for index, one in enumerate(target.candidates):
        timings = one.measurement.timings if one.measurement is not None else ()
        turned = tuple(dataclasses.replace(t, turns=(10,) * (len(t.latency_s) // 10), processes=()) for t in timings)
        measured = dataclasses.replace(one.measurement, timings=turned) if timings else one.measurement
        scaled = dataclasses.replace(shown, errors=tuple(error * (index + 1) for error in errors))
        candidates.append(dataclasses.replace(one, measurement=measured, errors=(scaled,)))
    job = candidates[-1].job
    candidates[-1] = dataclasses.replace(candidates[-1], job=dataclasses.replace(job, backend=HOSTILE))
    target = dataclasses.replace(
        target,
        candidates=tuple(candidates),
        previews=(SamplePreview(sample=39, kind="picture", content=PIXEL, label="3"),),
    )
    made: RunResult = factory.make_result(target, factory.no_winner())
    return dataclasses.replace(
        made,
        notes=(HOSTILE,),
        started_at="2026-11-23T20:05:16Z",
        environment={**made.environment, "load": {"start": 0.5, "end": 1.9}},
        policy_values=(PolicyValue(path="select.prefer", value="latency", origin="policy.yaml:3", is_default=False),),
    )


@pytest.fixture(scope="module")
def folder(factory: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report's files, and `frame.html` with the report in a sandboxed frame."""
    made = tmp_path_factory.mktemp("page")
    page = write(whole_result(factory), made)["report.html"].read_text()
    frame = f'<iframe title="report" sandbox="allow-scripts" srcdoc="{html.escape(page)}"></iframe>'
    style = "html, body, iframe {margin: 0; border: 0; width: 100%; height: 98vh}"
    (made / "frame.html").write_text(f"<!DOCTYPE html><html lang=en><title>x</title><style>{style}</style>{frame}")
    return made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for all tests here."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("no chromium is installed: the page is not looked at in a browser")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(browser: Any, file: Path, width: int = 1280, colours: str = "light") -> tuple[Any, list[str]]:
    """The page once its charts are drawn, and what its console says."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=colours)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(file.as_uri())
    where = page if file.name == "report.html" else page.frames[1]
    where.wait_for_selector("html[data-ready]", state="attached", timeout=120_000)
    return page, said


def test_in_a_sandboxed_frame_it_draws_sorts_and_filters(browser: Any, folder: Path) -> None:
    """Broken: in MLflow's frame a script is refused, names of others run, or tables and charts don't answer."""
    page, said = opened(browser, folder / "frame.html")
    frame = page.frames[1]
    assert said == []
    assert page.title() == "x"
    assert frame.locator("figure.drawn").count() == 3
    rows = frame.locator("#target-1 ~ .card table.candidates tbody tr")
    states = [row.get_attribute("data-state") for row in rows.all()]
    assert states[0] == "won"
    assert HOSTILE in "".join(rows.all_text_contents())
    heading = frame.locator("table.candidates th", has_text="Size").first
    heading.get_by_role("button").press("Enter")
    sizes = [row.locator("td").nth(6).get_attribute("data-sort") for row in rows.all()]
    known = [float(size) for size in sizes if size]
    assert (known, heading.get_attribute("aria-sort")) == (sorted(known), "ascending")
    assert sizes == [*sizes[: len(known)], *[""] * (len(sizes) - len(known))]
    frame.get_by_label("Filter").first.fill("openvino int8")
    visible = [row for row in rows.all() if row.is_visible()]
    assert 0 < len(visible) < len(states)
    assert all("openvino" in row.text_content() for row in visible)
    frame.locator("nav.contents a", has_text="Proof").first.click()
    assert frame.locator("#target-1-proof").evaluate("e => Math.abs(e.getBoundingClientRect().top) < innerHeight")
    assert said == []
    page.close()


def test_the_plot_answers_to_the_mouse_and_to_the_keyboard(browser: Any, folder: Path) -> None:
    """Broken: a point does not say which candidate it is, or a reader without a mouse can't ask."""
    page, said = opened(browser, folder / "report.html")
    plot = page.locator("figure[data-chart=pareto]").first
    plot.scroll_into_view_if_needed()
    plot.locator(".drawing").focus()
    page.keyboard.press("ArrowRight")
    first = plot.locator(".readout").text_content()
    page.keyboard.press("ArrowRight")
    assert first
    assert plot.locator(".readout").text_content() not in ("", first)
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.matches('tr.found')")
    plot.locator("select").select_option("size")
    page.wait_for_function("document.querySelector('figure[data-chart=pareto] svg').textContent.includes('size of')")
    plot.scroll_into_view_if_needed()
    box = plot.locator("svg g.mark-symbol path[aria-label]").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
    page.wait_for_selector("#vg-tooltip-element.visible", timeout=60_000)
    assert "median" in page.locator("#vg-tooltip-element").text_content()
    assert said == []
    page.close()


@pytest.mark.parametrize(("width", "colours"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_axe_finds_nothing_serious_and_nothing_lies_off_the_screen(
    browser: Any, folder: Path, width: int, colours: str
) -> None:
    """Broken: a reader with a screen reader, a keyboard, or a telephone misses a part."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page, said = opened(browser, folder / "report.html", width, colours)
    found = [one for one in axe.Axe().run(page).response["violations"] if one["impact"] in ("serious", "critical")]
    assert [(one["id"], node["html"][:200]) for one in found for node in one["nodes"]] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    why = page.locator("table.candidates td.why").first.bounding_box()
    assert why["x"] + why["width"] <= width
    assert said == []
    page.close()


def fleet(jobs: int) -> dict[str, Any]:
    """The document of a fleet, with a hostile name, a long one, and one regression."""

    def target(name: str, outcome: str, regressed: str = "") -> dict[str, Any]:
        return {
            "target": name, "required": True, "outcome": outcome, "reason": HOSTILE if outcome != "passed" else "",
            "winner": "w", "speedup": 2.5, "published": "models:/x-compiled/1", "note": "", "regressed": regressed,
        }  # fmt: skip

    rows = []
    for number in range(jobs):
        failed = number < 2
        targets = [target("cpu-server", "failed" if failed else "passed", "passed before" if not number else "")]
        targets.append(target("edge", ("compiled", "refused", "unknown", "not begun")[number % 4]))
        rows.append({
            "job": number, "uri": f"models:/{HOSTILE if number == 1 else 'm-' + 'x' * 200}/{number}", "name": "m",
            "version": "1", "policy": "p", "owner": "o", "status": "failed" if failed else "passed", "exit_code": 0,
            "seconds": 3.0, "attempts": 1, "lost": 0, "same_as": 1 if number == 3 else None, "problem": HOSTILE,
            "why": "", "targets": targets,
        })  # fmt: skip
    sums = {"passed": 1, "compiled": 0, "failed": 2, "refused": 0, "unknown": 0, "regressed": 1}
    return {
        "schema": "compile-stage/fleet/v1", "kind": "run", "fleet": 1, "status": "failed", "exit_code": 3,
        "given": {"pattern": "*"}, "began_at": "2026-11-24T00:00:00Z", "ended_at": None, "seconds": 9.0,
        "counts": {"jobs": jobs, "passed": jobs - 2, "failed": 2, "refused": 0, "not begun": 0, "same": 1,
                   "regressed": 1, "skipped": 1},
        "jobs": rows, "targets": [{"policy": "p", "target": "cpu-server", **sums}],
        "owners": [{"owner": "", "jobs": jobs, "passed": 1, "failed": 2, "seconds": 9.0}],
        "steps": [{"step": "compile", "seconds": 6.0, "ran": 3, "cached": 0}],
        "nodes": [{"node": "local", "attempts": jobs, "lost": 0, "seconds": 9.0}],
    }  # fmt: skip


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_a_fleet_is_whole_for_everybody(browser: Any, tmp_path: Path, width: int) -> None:
    """Broken: the page of a fleet runs what a model's name holds, asks the network, or hides a part on a telephone."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    file = fleet_page.write(fleet(8), tmp_path)["fleet.html"]
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(file.as_uri())
    assert page.title().startswith("Fleet 1: 6 of 8 jobs passed, 2 failed; 1 target regressed")
    assert page.locator("#regressed ~ .card").first.locator("tbody tr").count() == 1
    assert page.locator("#models ~ .card tbody tr").count() == 8
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = [one for one in axe.Axe().run(page).response["violations"] if one["impact"] in ("serious", "critical")]
    assert [(one["id"], node["html"][:200]) for one in found for node in one["nodes"]] == []
    assert said == []
    page.close()
