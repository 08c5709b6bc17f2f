"""Findings of `lint` in the forms that other programs read: JSON, GitHub annotations, GitLab code quality, SARIF."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from compile_stage import __version__
from compile_stage.core.error_pages import PAGES
from compile_stage.core.findings import Finding

SCHEMA = "compile-stage/findings/v1"

_SARIF = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def render(findings: Sequence[Finding], form: str) -> str:
    """The text of one document, or of lines.

    Args:
        form: `json`; `github` (workflow commands, which a runner shows beside the lines); `gitlab` (a code quality
            report); `sarif` (2.1.0, for code scanning).
    """
    return {"json": _json, "github": _github, "gitlab": _gitlab, "sarif": _sarif}[form](findings)


def _json(findings: Sequence[Finding]) -> str:
    listed = [
        {
            "level": finding.level,
            "code": finding.code,
            "file": finding.file,
            "line": finding.line or None,
            "column": finding.column or None,
            "message": finding.message,
        }
        for finding in findings
    ]
    return _document({"schema": SCHEMA, "findings": listed})


def _github(findings: Sequence[Finding]) -> str:
    """https://docs.github.com/actions/reference/workflow-commands-for-github-actions"""
    lines = []
    for finding in findings:
        place = [f"file={_property(_relative(finding.file))}"]
        if finding.line:
            place += [f"line={finding.line}", f"col={finding.column}"]
        place.append(f"title={_property(f'{finding.code} {PAGES[finding.code].title}')}")
        lines.append(f"::{finding.level} {','.join(place)}::{_data(finding.message)}\n")
    return "".join(lines)


def _gitlab(findings: Sequence[Finding]) -> str:
    """https://docs.gitlab.com/ci/testing/code_quality/#code-quality-report-format"""
    report = []
    for finding in findings:
        path = _relative(finding.file)
        identity = f"{path}:{finding.code}:{finding.message}"  # the same when lines move
        report.append(
            {
                "description": finding.message,
                "check_name": finding.code,
                "fingerprint": hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest(),
                "severity": "critical" if finding.level == "error" else "minor",
                "location": {"path": path, "lines": {"begin": max(1, finding.line)}},
            }
        )
    return _document(report)


def _sarif(findings: Sequence[Finding]) -> str:
    codes = sorted({finding.code for finding in findings})
    driver = {
        "name": "compile-stage",
        "version": __version__,
        "rules": [
            {
                "id": code,
                "shortDescription": {"text": PAGES[code].title},
                "fullDescription": {"text": PAGES[code].means},
                "help": {"text": PAGES[code].fix},
            }
            for code in codes
        ],
    }
    results = [
        {
            "ruleId": finding.code,
            "ruleIndex": codes.index(finding.code),
            "level": finding.level,
            "message": {"text": finding.message},
            "locations": [{"physicalLocation": _sarif_place(finding)}],
        }
        for finding in findings
    ]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return _document({"$schema": _SARIF, "version": "2.1.0", "runs": [run]})


def _sarif_place(finding: Finding) -> dict[str, Any]:
    from urllib.parse import quote

    # GitHub wants a line of each result: what has none, such as a file that is not there, gets the first.
    return {
        "artifactLocation": {"uri": quote(_relative(finding.file))},
        "region": {"startLine": max(1, finding.line), "startColumn": max(1, finding.column)},
    }


def _relative(file: str) -> str:
    """As the code host knows it: from the folder in which the job runs, with `/`."""
    try:
        inside = Path(file).absolute().relative_to(Path.cwd())
    except ValueError:
        return PurePath(file).as_posix()
    return os.path.normpath(inside).replace(os.sep, "/")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _document(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
