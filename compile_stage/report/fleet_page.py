"""`fleet.html`, `fleet.json` and `fleet.junit.xml`: one report of a whole fleet, from its document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring  # only written here, never parsed

from compile_stage.core.records import JsonMap
from compile_stage.report.files import write_text
from compile_stage.report.html import environment
from compile_stage.report.junit import xml_text

_SLOWEST = 10


def write(document: JsonMap, out: Path) -> dict[str, Path]:
    """Write the three files into the folder `out`, which is made if need be; file name → path."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {
        "fleet.json": json.dumps(document, indent=2, ensure_ascii=False) + "\n",
        "fleet.html": render(document),
        "fleet.junit.xml": junit(document),
    }
    return {name: write_text(out / name, text) for name, text in texts.items()}


def render(document: JsonMap) -> str:
    """The page: no script, no outside assets."""
    from compile_stage import __version__

    jobs: list[dict[str, Any]] = document["jobs"]
    return (
        environment()
        .get_template("fleet.html.j2")
        .render(
            fleet=document,
            headline=headline(document),
            bad=[job for job in jobs if job["status"] in ("failed", "refused")],
            regressed=[(job, target) for job in jobs for target in job["targets"] if target["regressed"]],
            slowest=sorted(jobs, key=lambda job: -job["seconds"])[:_SLOWEST],
            most=max((step["seconds"] for step in document["steps"]), default=0.0),
            version=__version__,
        )
    )


def headline(document: JsonMap) -> str:
    """`198 of 200 jobs passed, 1 failed, 1 was refused; 1 target regressed`."""
    counts = document["counts"]
    parts = [f"{counts['passed']:,} of {counts['jobs']:,} jobs passed"]
    parts += [f"{counts[status]:,} {status}" for status in ("failed", "refused", "not begun") if counts[status]]
    said = ", ".join(parts)
    if counts["regressed"]:
        said += f"; {counts['regressed']:,} target{'s' * (counts['regressed'] > 1)} regressed"
    return said


def junit(document: JsonMap) -> str:
    """A suite for each job, a case for each of its targets."""
    root = Element("testsuites", name=f"compile-stage fleet {document['fleet']}", time=f"{document['seconds']:.3f}")
    for job in document["jobs"]:
        name = xml_text(f"{job['uri']} {job['policy']}".strip())
        suite = SubElement(root, "testsuite", name=name, time=f"{job['seconds']:.3f}")
        for target in job["targets"]:
            case = SubElement(suite, "testcase", classname=name, name=xml_text(target["target"]))
            _judge(case, target)
        suite.set("tests", str(len(suite)))
        for kind, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            suite.set(kind, str(len(suite.findall(f"testcase/{tag}"))))
    for kind in ("tests", "failures", "errors", "skipped"):
        root.set(kind, str(sum(int(suite.get(kind, "0")) for suite in root)))
    indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _judge(case: Element, target: dict[str, Any]) -> None:
    outcome, reason = target["outcome"], xml_text(target["regressed"] or target["reason"])
    if outcome == "passed":
        SubElement(case, "system-out").text = xml_text(target["published"] or target["winner"])
    elif outcome == "compiled":
        SubElement(case, "skipped", message=f"to be validated on its hardware: {reason}")
    elif outcome in ("unknown", "not begun"):
        SubElement(case, "error", message=reason or outcome)
    elif target["required"]:
        SubElement(case, "failure", message=reason).text = xml_text(target["reason"])
    else:
        SubElement(case, "skipped", message=f"not required: {reason}")
