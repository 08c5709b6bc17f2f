"""`lint` for other programs, and what the codes of errors mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from factories import POLICY_TEXT

from compile_stage.cli.main import main
from compile_stage.core import error_pages
from compile_stage.core.error_codes import Code

REPOSITORY = Path(__file__).parents[2]


def leave(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy with an unknown key on its tenth line, in a folder whose name needs escaping, below the current one."""
    folder = tmp_path / "team, 100% a:b"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    policy = folder / "p.yaml"
    policy.write_text(POLICY_TEXT + "tolerancez: {}\n")
    return policy.relative_to(tmp_path)


LINE = POLICY_TEXT.count("\n") + 1


def test_annotations_for_github_name_file_line_and_rule(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: a pull request shows no mark beside the line, or one beside another file, since a name's `,`, `:` or `%`
    ends the property."""
    assert leave("lint", str(wrong), "--format", "github") == 2
    shown = capsys.readouterr().out
    assert shown.startswith(f"::error file=team%2C 100%25 a%3Ab/p.yaml,line={LINE},col=1,title=CS0103 a key that ")
    assert "::tolerancez: unknown key; one of:" in shown
    assert shown.count("\n") == 1


def test_code_quality_for_gitlab_keeps_a_fingerprint_when_lines_move(
    wrong: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a merge request says that an old mistake is new whenever a line was added above it."""
    reports = []
    for text in ("", "# a line more\n"):
        wrong.write_text(text + wrong.read_text())
        assert leave("lint", str(wrong), "--format", "gitlab") == 2
        reports.append(json.loads(capsys.readouterr().out))
    [first], [second] = reports
    assert first["fingerprint"] == second["fingerprint"]
    assert first["location"] == {"path": "team, 100% a:b/p.yaml", "lines": {"begin": LINE}}
    assert second["location"]["lines"] == {"begin": LINE + 1}
    assert (first["check_name"], first["severity"]) == ("CS0103", "critical")


def test_sarif_has_a_rule_for_each_result(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: code scanning refuses the upload, or shows results without what they mean."""
    wrong.write_text(wrong.read_text().replace("cpu-server:\n", "cpu-server:\n    batch_sizes: [none]\n"))
    assert leave("lint", str(wrong), "--format", "sarif") == 2
    document = json.loads(capsys.readouterr().out)
    assert document["version"] == "2.1.0"
    assert document["$schema"].endswith("sarif-schema-2.1.0.json")
    [run] = document["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert {rule["id"] for rule in rules} >= {"CS0103"}
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"] == {"uri": "team%2C%20100%25%20a%3Ab/p.yaml"}
        assert place["region"]["startLine"] >= 1
        assert result["level"] == "error"


def test_json_holds_warnings_of_a_valid_policy_and_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a limit that can't fail is seen by people only, or fails a job that has no mistake."""
    policy = tmp_path / "weak.yaml"
    policy.write_text(POLICY_TEXT + "tolerances: {fp32: {cosine: 0.0}}\n")
    assert leave("lint", str(policy), "--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "compile-stage/findings/v1"
    assert [(found["level"], found["code"]) for found in document["findings"]] == [("warning", "CS0114")]


def test_a_finding_without_a_line_has_the_first_in_sarif(capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: GitHub refuses the whole file of a policy that is not there, since a result has no line."""
    assert leave("lint", "nowhere.yaml", "--format", "sarif") == 2
    [found] = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    assert found["locations"][0]["physicalLocation"]["region"] == {"startLine": 1, "startColumn": 1}


@pytest.mark.parametrize("form", ["json", "github", "gitlab", "sarif"])
def test_a_good_policy_gives_an_empty_document(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: the next step of a job, which reads the document, fails on a policy that is right."""
    policy = tmp_path / "good.yaml"
    policy.write_text(POLICY_TEXT)
    assert leave("lint", str(policy), "--format", form) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    empty = {"json": {"schema": "compile-stage/findings/v1", "findings": []}, "gitlab": [], "sarif": []}
    if form == "github":
        assert shown.out == ""
    else:
        document = json.loads(shown.out)
        assert (document["runs"][0]["results"] if form == "sarif" else document) == empty[form]


def test_an_error_ends_with_the_code_whose_page_rule_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: a code that a user meets leads nowhere."""
    assert leave("lnit") == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: unknown command 'lnit' [CS0201]\n")
    assert leave("rule", "cs0201") == 0
    assert capsys.readouterr().out.startswith("CS0201: a command that there is not\n")


def test_a_code_that_there_is_not_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: a mistyped code gets a traceback."""
    assert leave("rule", "CS0113x") == 2
    assert "fix: did you mean CS0113?" in capsys.readouterr().err


def test_every_code_has_a_page_and_is_given_by_some_error() -> None:
    """Broken: `rule` has no answer to a code, or explains one that nobody ever sees."""
    assert list(error_pages.PAGES) == list(Code)
    sources = "".join(
        file.read_text(encoding="utf-8")
        for file in (REPOSITORY / "compile_stage").rglob("*.py")
        if not file.name.startswith("error_")
    ) + (REPOSITORY / "compile_stage" / "core" / "errors.py").read_text(encoding="utf-8")
    assert [code for code in Code if f"Code.{code.name}" not in sources] == []


def test_the_page_of_all_codes_is_in_step() -> None:
    """Broken: docs/errors.md says something else than `rule`."""
    page = REPOSITORY / "docs" / "errors.md"
    assert page.read_text(encoding="utf-8") == error_pages.markdown(), (
        "run: python -m compile_stage.core.error_pages > docs/errors.md"
    )
