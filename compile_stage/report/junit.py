"""JUnit XML: one suite a target, one case for each job and metric, so that a CI system shows which gate of which
candidate fell.

A check that could not run is an error, never a skip: a skip reads like no harm done. Only what the plan refused is
skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree.ElementTree import Element, SubElement, indent, tostring  # only written here, never parsed

from compile_stage.core.records import Candidate, Check, RunResult, TargetResult
from compile_stage.report import summary

# What XML 1.0 can't hold, not even escaped.
_UNWRITABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(result: RunResult) -> str:
    """The XML text. The suites' times are those of the steps that ran for their jobs, in seconds."""
    root = Element("testsuites", name=xml_text(f"compile-stage {result.source.uri}"), time=f"{result.duration_s:.3f}")
    for target in result.targets:
        _suite(root, result, target)
    if not result.targets:
        suite = SubElement(root, "testsuite", name="run", tests="1", failures="0", errors="1", skipped="0")
        case = SubElement(suite, "testcase", classname="run", name="any target")
        _end(case, "error", summary.headline(result), result.problem)
    for kind in ("tests", "failures", "errors", "skipped"):
        root.set(kind, str(sum(int(suite.get(kind, "0")) for suite in root)))
    indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _suite(root: Element, result: RunResult, target: TargetResult) -> None:
    name = target.policy.target.name
    jobs = {candidate.job.id for candidate in target.candidates}
    seconds = sum(event.ended_s - event.started_s for event in result.events if event.job_id in jobs)
    suite = SubElement(root, "testsuite", name=xml_text(name), time=f"{seconds:.3f}")
    _winner_case(suite, result, target)
    for row in summary.rows(result, target):
        if row.candidate is None or row.candidate.state == "refused":
            case = SubElement(suite, "testcase", classname=xml_text(row.job_id), name="plan")
            SubElement(case, "skipped", message=xml_text(row.reason))
        else:
            _candidate_cases(suite, row.candidate)
    _promotion_case(suite, result, target)
    suite.set("tests", str(len(suite)))
    for kind, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(kind, str(len(suite.findall(f"testcase/{tag}"))))


def _winner_case(suite: Element, result: RunResult, target: TargetResult) -> None:
    case = SubElement(suite, "testcase", classname=xml_text(target.policy.target.name), name="has a winner")
    if target.selection.winner is not None:
        reason = summary.reason_of(target, winner) if (winner := target.winner) is not None else ""
        SubElement(case, "system-out").text = xml_text(f"{target.selection.winner}: {reason}")
    elif target.policy.target.required:
        _end(case, "failure", summary.no_winner(result, target), summary.deciding_gate(target))
    else:
        SubElement(case, "skipped", message=xml_text(f"not required: {summary.no_winner(result, target)}"))


def _promotion_case(suite: Element, result: RunResult, target: TargetResult) -> None:
    """Only where an alias was to be moved; one that may wait, or may stay in a target that is not required, is
    skipped."""
    found = summary.promotion(result, target)
    if found is None:
        return
    state, text = found
    case = SubElement(suite, "testcase", classname=xml_text(target.policy.target.name), name="promotion")
    if state == "moved":
        SubElement(case, "system-out").text = xml_text(text)
    elif state == "failed":
        _end(case, "failure", text, "")
    else:
        SubElement(case, "skipped", message=xml_text(text))


def _candidate_cases(suite: Element, candidate: Candidate) -> None:
    job_id = xml_text(candidate.job.id)
    compiled = SubElement(suite, "testcase", classname=job_id, name="compile", time=f"{candidate.compile_s:.3f}")
    if candidate.failure is not None:
        failure = candidate.failure
        _end(compiled, "error", f"{failure.kind} in {failure.step}: {failure.problem}", failure.detail)
        return
    checks = candidate.checks
    for metric in dict.fromkeys(check.gate.metric for check in checks):
        case = SubElement(suite, "testcase", classname=job_id, name=xml_text(metric))
        _judge(case, [check for check in checks if check.gate.metric == metric])
    if not checks:
        case = SubElement(suite, "testcase", classname=job_id, name="validate")
        if candidate.not_runnable_here:
            SubElement(
                case, "skipped", message=xml_text(f"it can't be run on this machine: {candidate.not_runnable_here}")
            )
        elif candidate.state == "pruned":
            SubElement(case, "skipped", message=xml_text(candidate.reason))
        else:
            _end(case, "error", "it was not validated", "")


def _judge(case: Element, checks: list[Check]) -> None:
    """A case's end is that of its worst check; all of them are listed in its text."""
    listed = "\n".join(_line(check) for check in checks)
    failed = [check for check in checks if summary.outcome_word(check) == "failed"]
    not_run = [check for check in checks if summary.outcome_word(check) == "not run"]
    if failed:
        _end(case, "failure", failed[0].reason, listed)
    elif not_run:
        _end(case, "error", f"not run: {not_run[0].reason}", listed)
    else:
        SubElement(case, "system-out").text = xml_text(listed)


def _line(check: Check) -> str:
    place = [part for part in (check.output, f"batch {check.batch_size}" if check.batch_size else "") if part]
    waiver = check.waived
    under = f" [waived by {waiver.owner} until {waiver.expires}: {waiver.reason}]" if waiver is not None else ""
    worst = f" worst samples {', '.join(map(str, check.worst))}" if check.worst else ""
    return (
        f"{summary.outcome_word(check)}: {check.gate.metric} {' '.join(place)}: {summary.measured_text(check)}, "
        f"{summary.limit_text(check)}, {check.samples} samples. {check.reason}{worst}{under}"
    ).replace(" :", ":")


def _end(case: Element, tag: str, message: str, body: str) -> None:
    SubElement(case, tag, message=xml_text(message)).text = xml_text(body)


def xml_text(text: str | Iterable[str]) -> str:
    """A text without the characters that XML 1.0 can not hold."""
    return _UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", str(text))
