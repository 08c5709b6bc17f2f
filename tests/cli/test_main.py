"""Arguments in, calls to the API and exit codes out. The API is replaced by what it would answer; it has its own
tests."""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import jsonschema
import pytest
from factories import POLICY_TEXT

import compile_stage.api as api
from compile_stage import __version__
from compile_stage.cli.commands import cli
from compile_stage.cli.main import main
from compile_stage.core import errors
from compile_stage.core.records import Plan, Receipt, RunResult, Verification
from compile_stage.core.records.serving import Layout, LoadPoint, ServedLoad, ServingCost
from compile_stage.report.result import result_json_schema, result_text


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    """`main` sets a signal handler and logging for a whole process; a test's end undoes both."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY_TEXT)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, result: RunResult) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What `api.run` was called with; it answers with the hand-made run."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def run(*arguments: Any, **named: Any) -> RunResult:
        found.append((arguments, named))
        named["reporter"].began("compile", "some-job")
        named["reporter"].ended("compile", "some-job", 2.1, "done")
        named["on_result"](result)
        return result

    monkeypatch.setattr(api, "run", run)
    return found


def leave(*arguments: str) -> int:
    """The exit code of the command line."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_run_hands_everything_to_the_api(
    policy: Path, tmp_path: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["run", "models:/m/1", "-p", str(policy), "-t", "edge-*", "-t", "cpu", "--set", "a.b=1", "--set", "c=2"]
    line += ["--shared-cache", "file:///shared"]
    assert (
        leave(*line, "--out", str(tmp_path / "o"), "--no-publish", "--remeasure", "--no-promote", "--engine", "local")
        == 0
    )
    [((uri, path), named)] = calls
    assert (uri, path) == ("models:/m/1", policy)
    named.pop("reporter")
    named.pop("on_result")
    assert named == {
        "targets": ("edge-*", "cpu"),
        "sets": ("a.b=1", "c=2"),
        "out": tmp_path / "o",
        "publish": False,
        "promote": False,
        "engine": "local",
        "remeasure": True,
        "shared_cache": "file:///shared",
        "policy_roots": (),
        "signing_key": None,
    }
    shown = capsys.readouterr().out
    assert "compile    some-job  done in 2.1 s" in shown
    report, following = shown.splitlines()[-2:]
    assert report == f"report: {tmp_path / 'o' / 'report.html'}"
    assert following.startswith("next: mlflow models serve -m 'models:/digits-cnn-compiled@cpu-server-prod' ")


def test_the_report_is_named_where_the_api_puts_it_by_default(
    policy: Path, calls: list[Any], result: RunResult, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave("run", "models:/digits-cnn@champion", "-p", str(policy)) == 0
    assert calls[0][1]["out"] is None
    assert f"report: {api.default_out(result.source, result.policy) / 'report.html'}" in capsys.readouterr().out


def test_json_is_alone_on_standard_output(policy: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("run", "models:/m/1", "-p", str(policy), "--json") == 0
    shown = capsys.readouterr()
    jsonschema.Draft202012Validator(result_json_schema()).validate(json.loads(shown.out))
    assert "some-job" in shown.err
    assert "report:" in shown.err


def test_json_is_printed_of_a_run_that_an_error_ends_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: `--json | jq .exit_code` would read nothing of a run whose policy is wrong or whose registry is down."""
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(POLICY_TEXT.replace("threads", "threds") + "bogus: 1\n")
    assert leave("run", "models:/m/1", "-p", str(wrong), "--json", "--out", str(tmp_path / "o")) == 2
    shown = capsys.readouterr()
    said = json.loads(shown.out)
    jsonschema.Draft202012Validator(result_json_schema()).validate(said)
    assert (said["status"], said["exit_code"], said["source"]["uri"]) == ("refused", 2, "models:/m/1")
    assert "bogus: unknown key" in said["problem"]
    assert (tmp_path / "o" / "result.json").read_text() == shown.out
    assert "bogus: unknown key" in shown.err


def test_quiet_says_only_how_it_ended(policy: Path, calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("run", "models:/m/1", "-p", str(policy), "-q") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["passed", "published", "report"]


def test_the_exit_code_of_a_run_is_the_results(
    policy: Path, monkeypatch: pytest.MonkeyPatch, factory: ModuleType
) -> None:
    failed = factory.make_result(factory.no_winner(), status="failed", exit_code=3)
    monkeypatch.setattr(api, "run", lambda *_, **__: failed)
    assert leave("run", "models:/m/1", "-p", str(policy), "-q") == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("p", fix="f", where="w"), 2),
        (errors.MissingDependencyError("p", fix='pip install "compile-stage[openvino]"'), 2),
        (errors.GateError("p"), 3),
        (errors.RegistryError("p"), 4),
        (errors.SourceError("p"), 5),
        (errors.NothingCompiledError("p"), 6),
        (errors.IntegrityError("p"), 7),
    ],
)
def test_an_error_for_people_is_two_lines_and_its_code(
    policy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: errors.CompileStageError,
    code: int,
) -> None:
    monkeypatch.setattr(api, "run", _raising(error))
    assert leave("run", "models:/m/1", "-p", str(policy)) == code
    shown = capsys.readouterr().err
    assert shown.startswith("error: w: p" if error.where else "error: p")
    assert ("fix: " + error.fix in shown) == bool(error.fix)
    assert "Traceback" not in shown


def test_a_bug_of_ours_says_so_and_keeps_the_traceback(
    policy: Path, isolated_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api, "run", _raising(ZeroDivisionError("division by zero")))
    assert leave("run", "models:/m/1", "-p", str(policy)) == 70
    shown = capsys.readouterr().err
    assert "error: ZeroDivisionError: division by zero" in shown
    assert "Traceback" not in shown
    [saved] = list((isolated_home / "cache" / "compile-stage" / "crashes").iterdir())
    assert str(saved) in shown
    assert "ZeroDivisionError" in saved.read_text()


def test_an_interruption_says_what_remains(
    policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api, "run", _raising(KeyboardInterrupt()))
    assert leave("run", "models:/m/1", "-p", str(policy)) == 130
    assert "kept what is finished; run again to resume" in capsys.readouterr().err


def test_lint_says_every_mistake_of_every_file(
    tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(POLICY_TEXT.replace("precisions", "precisionz") + "tolerancez: {}\n")
    absent = tmp_path / "absent.yaml"
    assert leave("lint", str(wrong), str(policy), str(absent)) == 2
    shown = capsys.readouterr()
    assert f"error: {wrong}:9:" in shown.err
    assert f"error: {wrong}:10:1: tolerancez" in shown.err
    assert f"error: {absent}: does not exist" in shown.err
    assert "2 of 3 policies are invalid" in shown.err
    assert shown.out == f"{policy}: ok (cpu-server, 1 target)\n"


def test_a_locale_that_can_not_name_a_path_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a path with an umlaut under LC_ALL=C is handed to a runtime that does not find it, and the model is
    blamed."""
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    monkeypatch.setenv("COMPILE_STAGE_CACHE", "cache")
    assert leave("plan", "folder:/m\udcc3\udcb6del", "-p", "p.yaml") == 2
    said = capsys.readouterr().err
    assert r"so 'folder:/m\xf6del' can't be handed on [CS0200]" in said
    assert "LC_ALL=C.UTF-8" in said


def test_lint_of_good_policies_is_0(policy: Path) -> None:
    assert leave("lint", str(policy)) == 0


def test_lint_takes_a_base_that_names_no_target(capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: the example of its own help, `lint policies/*.yaml`, would fail on the policies that we ship."""
    shipped = sorted((Path(__file__).parents[2] / "policies").glob("*.yaml"))
    assert leave("lint", *map(str, shipped)) == 0
    assert "org-base.yaml: ok (org-base, a base for others: it names no target)" in capsys.readouterr().out


def test_explain_names_where_values_come_from(
    policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert leave("explain", str(policy), "--set", "owner=me") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("owner" in line and "me" in line and "--set" in line for line in lines)
    assert any("targets.cpu-server.device" in line and "policy.yaml:9" in line for line in lines)
    assert leave("explain", str(policy), "--json") == 0
    assert {"path", "value", "origin"} <= set(json.loads(capsys.readouterr().out)[0])


@pytest.mark.parametrize("line", [["--version"], ["version"]])
def test_the_version_is_told_as_an_option_too(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: the first thing that a script asks of a program would be wrong usage."""
    assert leave(*line) == 0
    assert capsys.readouterr().out == f"compile-stage {__version__}\n"


@pytest.mark.parametrize("document", ["policy", "result"])
def test_schema_prints_a_schema(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("schema", document) == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(capsys.readouterr().out))


def test_plan_shows_jobs_and_refusals(
    policy: Path, result: RunResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = tuple(c.job for target in result.targets for c in target.candidates)
    found = Plan(source=result.source, policy=result.policy, jobs=jobs, refused=result.refused, notes=("a note",))
    monkeypatch.setattr(api, "plan", lambda *_, **__: found)
    assert leave("plan", "models:/m/1", "-p", str(policy)) == 0
    shown = capsys.readouterr().out
    assert jobs[0].id in shown
    assert "onnxruntime has no bf16 on cpu here" in shown
    assert "6 jobs, 1 refused" in shown
    assert leave("plan", "models:/m/1", "-p", str(policy), "--json") == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["id"] == jobs[0].id


def test_an_error_is_a_document_where_json_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: `plan --json` of a policy with a mistake prints nothing on standard output, and a pipeline that reads
    JSON there fails with an error of its parser in place of the mistake."""
    policy = tmp_path / "p.yaml"
    policy.write_text("apiVersion: compile-stage/v1\nkind: OptimizationPolicy\nname: p\nowner: o\nbogus: 1\n")
    assert leave("plan", "models:/m/1", "-p", str(policy), "--json") == 2
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["schema"], found["exit_code"]) == ("compile-stage/error/v1", 2)
    assert [one["code"] for one in found["problems"]] == ["CS0120", "CS0103"]
    assert found["problems"][1]["problem"].startswith(f"{policy}:5:1: bogus: unknown key")
    assert "CS0103" in shown.err
    assert leave("verify", str(tmp_path / "none"), "--json") == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "none" in problem["problem"]


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("promote", "folder:NONE", "--alias", "prod"), 4, "no model"),
        (("rollback", "models:/m"), 2, "alias"),
        (("explain", "NONE.yaml"), 2, "NONE.yaml"),
        (("compare", "NONE", "NONE"), 2, "NONE"),
        (("cache", "ls", "--shared-cache", "nowhere://x"), 2, "nowhere"),
        (("cache", "key", "-p", "NONE.yaml"), 2, "NONE.yaml"),
        (("doctor", "-p", "NONE.yaml"), 2, "--engine ray"),
        (("promote", "models:/m/1"), 2, "Missing option"),  # what click itself finds wrong
        (("plan", "models:/m/1", "--bogus"), 2, "--bogus"),
    ],
)
def test_every_command_with_json_says_its_error_there(
    words: tuple[str, ...], code: int, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a deployment that reads `promote --json` finds an empty text where the registry is away or the call is
    wrong, and fails with an error of its parser; or it finds two documents, which no parser takes."""
    here = [word.replace("NONE", str(tmp_path / "NONE")) for word in words]
    assert leave(*here, "--json") == code
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["exit_code"]) == ("compile-stage/error/v1", code)
    assert problem in f"{found['where']}: {found['problem']}"


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 7)])
def test_verify_ends_with_7_when_something_does_not_hold(
    result: RunResult, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], passed: bool, code: int
) -> None:
    verdict = result.targets[0].candidates[3].verdict
    assert verdict is not None
    found = Verification(uri="models:/x/1", passed=passed, checks=verdict.checks, notes=("digests hold",))
    monkeypatch.setattr(api, "verify", lambda uri, **options: found)
    assert leave("verify", "models:/x/1") == code
    shown = capsys.readouterr().out
    assert "digests hold" in shown
    assert "0.941 < 0.99 on the worst of 360 samples" in shown
    assert leave("verify", "models:/x/1", "--json") == code


def test_demo_says_where_everything_is(
    result: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("compile_stage.demo.demo", lambda out, reporter: [result])
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert leave("demo", "-q", "--out", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert f"report: {tmp_path / 'digits-cnn' / 'report.html'}" in shown
    assert f"registry: mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db" in shown


def test_promote_and_rollback_say_what_moved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = Receipt(
        uri="models:/x/3", name="x", version="3", digest="", created=False, promoted_to="prod", previous="2"
    )
    monkeypatch.setattr(api, "promote", lambda uri, alias, *, trusted_keys, allow_code, serve_check: receipt)
    monkeypatch.setattr(api, "rollback", lambda uri, alias: receipt)
    assert leave("promote", "models:/x/3", "--alias", "prod") == 0
    assert leave("rollback", "x", "--alias", "prod") == 0
    assert capsys.readouterr().out == "x@prod is now version 3 (before: version 2)\nx@prod is back at version 3\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["rnu"], "did you mean 'run'?"),
        (["zzz"], "one of: run, plan"),
        (["run"], "Missing argument 'MODEL_URI'"),
        (["run", "x", "--polcy", "p"], "--policy"),
        (["promote", "x"], "Missing option '--alias'"),
    ],
)
def test_wrong_usage_is_2_and_says_the_right_word(
    line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave(*line) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "fix: " in shown


@pytest.mark.parametrize(
    "command", [["run", "models:/x/1", "-p"], ["plan", "models:/x/1", "-p"], ["explain"], ["lint"]]
)
def test_a_policy_that_is_no_file_is_named_as_such(
    command: list[str], tmp_path: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave(*command, str(tmp_path)) == 2
    assert f"error: {tmp_path}: is a folder; name a policy file" in capsys.readouterr().err
    assert leave(*command, f"{policy}l") == 2
    assert f"error: {policy}l: does not exist; did you mean {policy}?" in capsys.readouterr().err


def test_an_unknown_engine_lists_those_that_there_are(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("run", "x", "-p", str(policy), "--engine", "lcal") == 2
    assert "did you mean 'local'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_help_has_an_example_that_parses_and_the_exit_codes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave(name, "--help") == 0
    shown = capsys.readouterr().out
    assert "130  interrupted" in shown
    examples = [line.strip() for line in shown.splitlines() if line.strip().startswith("compile-stage ")]
    assert examples
    for example in examples:
        words = _words(example)
        command = cli.commands[words[1]]
        with click.Context(command) as context:
            command.parse_args(context, words[2:])


def test_the_group_lists_its_commands_in_order_of_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("--help") == 0
    assert list(cli.commands) == [
        "run",
        "plan",
        "init",
        "lint",
        "rule",
        "explain",
        "policy",
        "schema",
        "report",
        "compare",
        "doctor",
        "verify",
        "validate",
        "debug",
        "profile",
        "export",
        "load-test",
        "toolchain",
        "cache",
        "promote",
        "rollback",
        "watch",
        "fleet",
        "demo",
        "version",
    ]
    assert "..." not in capsys.readouterr().out.replace("[ARGS]...", "")


def _words(example: str) -> list[str]:
    """The example as a shell would split it, up to a redirection."""
    import shlex

    words = shlex.split(example)
    return words[: words.index(">")] if ">" in words else words


def _raising(error: BaseException) -> Callable[..., RunResult]:
    def run(*_: Any, **__: Any) -> RunResult:
        raise error

    return run


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        (["models:/fraud@prod"], ("fraud", "prod")),
        (["models:/fraud", "--alias", "prod"], ("fraud", "prod")),
        (["models:/fraud@prod", "--alias", "prod"], ("fraud", "prod")),
        (["fraud", "--alias", "prod"], ("fraud", "prod")),
        (["folder:/srv/a@b/fraud", "--alias", "prod"], ("folder:/srv/a@b/fraud", "prod")),
    ],
)
def test_rollback_takes_what_the_other_commands_take(
    line: list[str], asked: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: `rollback models:/fraud@prod` was refused, though every other command takes a URI."""

    class Registry:
        def current(self, name: str, alias: str) -> None:
            return None

        def rollback(self, name: str, alias: str, *, expected: str | None) -> Receipt:
            assert (name, alias, expected) == (*asked, "")
            return Receipt(uri="", name="fraud", version="2", digest="", created=False, promoted_to=alias)

    monkeypatch.setattr("compile_stage.core.plugins.registry_for", lambda uri: Registry())
    assert leave("rollback", *line) == 0
    assert capsys.readouterr().out == "fraud@prod is back at version 2\n"


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        (["models:/fraud"], "rollback models:/fraud@ALIAS"),
        (["models:/fraud@a", "--alias", "b"], "rollback models:/fraud@ALIAS"),
        (["models:/fraud/3", "--alias", "prod"], "rollback models:/fraud@prod"),
        (["models:/fraud/3"], "rollback models:/fraud@ALIAS"),
    ],
)
def test_a_rollback_without_one_alias_is_wrong_usage(
    line: list[str], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: an alias is moved that nobody named; or the fix is a command that is refused too."""
    assert leave("rollback", *line) == 2
    assert fix in capsys.readouterr().err


def test_two_policies_do_not_share_a_folder(result: RunResult) -> None:
    """Broken: the second policy's run on a model overwrote the first one's report."""
    other = dataclasses.replace(result.policy, name="edge")
    assert api.default_out(result.source, result.policy) != api.default_out(result.source, other)


def test_export_hands_everything_to_the_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: `--push` would push nowhere, or what was pushed could not be found again."""
    from compile_stage.exports.options import Exported

    asked: list[tuple[Any, ...]] = []

    def export_version(uri: str, to: str, out: Path, **named: Any) -> Exported:
        asked.append((uri, to, out, named["options"].push, named["options"].plain_http, named["check"], named["force"]))
        return Exported(
            folder="/out", form=to, uri=uri, artifact_digest="sha256:a", proven=True, said="It answers.",
            differs=("Other threads.",), start=(), reference="oci+http://h/n@sha256:b",
        )  # fmt: skip

    monkeypatch.setattr(api, "export_version", export_version)
    line = ["export", "models:/m/1", "--to", "oci", "--out", str(tmp_path), "--push", "h/n:1", "--plain-http"]
    assert leave(*line, "--check", "--force") == 0
    assert asked == [("models:/m/1", "oci", tmp_path, "h/n:1", True, True, True)]
    said = capsys.readouterr().out
    assert "note: Other threads." in said
    assert said.endswith("next: compile-stage verify oci+http://h/n@sha256:b\n")
    assert leave(*line, "--json") == 0
    assert json.loads(capsys.readouterr().out)["artifact_digest"] == "sha256:a"


def test_validate_runs_on_the_device_that_it_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Broken: a version would be validated on this machine, and the result be taken for the device's."""
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def answer(*given: Any, **named: Any) -> Verification:
        asked.append((given, named))
        return Verification(uri="models:/m/1", passed=False, checks=(), notes=())

    monkeypatch.setattr(api, "validate_on", answer)
    hosts = tmp_path / "hosts.yaml"
    line = ["validate", "models:/m/1", "--host", "board", "--hosts", str(hosts), "--allow-code"]
    assert leave(*line) == errors.EXIT_GATE
    [(given, named)] = asked
    assert given == ("models:/m/1", "board")
    assert (named["hosts"], named["allow_code"], named["allow_pickle"]) == (hosts, True, False)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["run", "m", "-p", "p", "--promote", "--no-publish"], "--promote changes nothing with --no-publish"),
        (["doctor", "-p", "p"], "--policy changes nothing without --engine ray"),
        (["export", "m", "--to", "triton", "--runtime", "r"], "--runtime changes nothing without --to kserve"),
        (["compare", "a", "b", "--policy-root", "r"], "--policy-root changes nothing without --policy"),
        (["validate", "m", "--hosts", "h"], "--hosts changes nothing without --host"),
        (["verify", "m", "--set", "a=1"], "--set changes nothing without a policy (-p)"),
        (["init", "m", "--labels", "y"], "--labels changes nothing without --data"),
        (["profile", "m", "--precision", "int8"], "--precision changes nothing without a policy (-p)"),
        (["debug", "a.onnx", "--backend", "b", "--job", "j"], "--job changes nothing with --backend"),
        (["debug", "a.onnx", "b.onnx", "--backend", "b"], "--backend changes nothing with a second file"),
        (["load-test", "m", "--rate", "1", "--currency", "EUR"], "--currency changes nothing without --price-per-hour"),
        (
            ["watch", "--policies", "p", "--requalify-hours", "2"],
            "--requalify-hours changes nothing without --requalify",
        ),
        (["fleet", "run", "m", "-p", "p", "--ray-address", "a"], "--ray-address changes nothing without --engine ray"),
    ],
)
def test_an_option_without_effect_is_refused(line: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: who gives it believes that it did something."""
    assert leave(*line) == errors.EXIT_USAGE
    said = capsys.readouterr().err
    assert f"error: {says}" in said
    assert said.endswith("[CS0200]\nfix: leave it out\n")


def test_a_variable_that_is_set_for_other_commands_is_no_option(
    monkeypatch: pytest.MonkeyPatch, result: RunResult, tmp_path: Path
) -> None:
    """Broken: with COMPILE_STAGE_POLICY_ROOT set for all commands, `verify` ended with 2, for a --policy-root that
    nobody gave."""
    monkeypatch.setenv("COMPILE_STAGE_POLICY_ROOT", str(tmp_path))
    monkeypatch.setenv("COMPILE_STAGE_HOSTS", str(tmp_path / "hosts.yaml"))
    asked: list[dict[str, Any]] = []

    def answer(uri: str, **named: Any) -> Verification:
        asked.append(named)
        return Verification(uri=uri, passed=True, checks=(), notes=())

    monkeypatch.setattr(api, "verify", answer)
    monkeypatch.setattr(api, "validate", answer)
    assert leave("verify", "models:/m/1") == leave("validate", "models:/m/1") == 0
    assert asked[0]["policy_roots"] == ()
    (tmp_path / "result.json").write_text(result_text(result))
    assert leave("compare", str(tmp_path), str(tmp_path)) == 0


def _numbers(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Parameter]]:
    for parameter in command.params:
        if isinstance(parameter.type, click.types.FloatParamType):
            yield " ".join((*path, parameter.opts[0])), parameter
    for name, inner in getattr(command, "commands", {}).items():
        yield from _numbers(inner, (*path, name))


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_no_option_takes_what_is_no_finite_number(text: str) -> None:
    """Broken: `nan` is below no limit and above none, so what an option bounds has no bound (the age of a delivery's
    signature, the minutes of a fleet), and `load-test --rate nan` ends as a bug of ours."""
    options = dict(_numbers(cli))
    assert {"load-test --rate", "cache gc --max-age", "watch --max-age", "fleet run --budget-minutes"} <= set(options)
    for option in options.values():
        with pytest.raises(click.BadParameter, match=r"is not a finite number|is not in the range"):
            option.type.convert(text, option, None)


def test_an_option_that_is_no_finite_number_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: the message does not name the option."""
    with pytest.raises(SystemExit) as ended:
        main(["load-test", "models:/m/1", "--rate", "nan"])
    assert ended.value.code == 2
    assert "Invalid value for '--rate': nan is not a finite number. [CS0200]" in capsys.readouterr().err


def test_who_names_no_policy_is_told_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: the first command of a newcomer ends with "run --help", which does not say where a policy comes from."""
    with pytest.raises(SystemExit) as ended:
        main(["run", "models:/digits/1"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Missing option '-p' / '--policy'. [CS0200]" in said
    assert "fix: name one, such as -p shipped:cpu-server, or write a first one: compile-stage init MODEL_URI" in said


def test_a_load_test_of_which_no_rate_could_be_measured_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a job takes exit code 0 for a rate that was held, and nothing is known of it."""
    late = LoadPoint(
        kind="open", requests=64, seconds=1.0, throughput_per_s=60.0, rate=1e5, invalid="the load generator was late"
    )
    found = ServingCost(winner=ServedLoad(layout=Layout(instances=1, threads=1), points=(late,)))
    monkeypatch.setattr(api, "load_test", lambda *_, **__: found)
    with pytest.raises(SystemExit) as ended:
        main(["load-test", "models:/m/1", "--rate", "100000"])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert "no rate that was asked for could be measured: the load generator was late" in shown.err
    assert max(map(len, shown.out.split("\n\n")[0].splitlines())) <= 80, "a table is as wide as the log"


@pytest.mark.parametrize("option", ["--out", "--policy", "--policy-root", "--signing-key", "--shared-cache"])
def test_an_option_without_a_text_is_refused(policy: Path, calls, capsys, option: str) -> None:
    """Broken: `--out "$OUT"` without that variable writes into the current folder, and deletes an earlier run's reports
    there; `--signing-key "$KEY"` publishes without a signature."""
    with pytest.raises(SystemExit) as left:
        main(["run", "models:/digits/1", "-p", str(policy), option, ""])
    assert (left.value.code, calls) == (2, [])
    said = capsys.readouterr().err
    assert option in said
    assert "it is empty: is a variable of the shell not set?" in said
