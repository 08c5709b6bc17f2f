"""What is said of whole files: no YAML, no policy, what they extend, `--set`, `-t`; and that it is all said at once."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_stage.core.errors import PolicyError
from compile_stage.policy.explain import explain
from compile_stage.policy.folder import PolicyFolder
from compile_stage.policy.load import lint, load_policy, read_policy

TODAY = date(2026, 6, 1)
GOLDEN = Path(__file__).parents[1] / "golden" / "policy"
TARGET = "targets: {t: {}}\n"


def said(path: Path | str, *sets: str) -> list[str]:
    return [str(problem) for problem in read_policy(path, sets, today=TODAY).problems]


WHOLE_FILES = {
    "empty": (b"", "p.yaml:1:1: the file is empty; a policy starts with apiVersion: compile-stage/v1"),
    "only comments": (b"# nothing\n",
        "p.yaml:1:1: the file is empty; a policy starts with apiVersion: compile-stage/v1"),
    "a list": (b"- 1\n",
        "p.yaml:1:1: the file holds a list, not a map; a policy starts with apiVersion: compile-stage/v1"),
    "a word": (b"hello\n",
        "p.yaml:1:1: the file holds a single value, not a map; a policy starts with apiVersion: compile-stage/v1"),
    "latin-1": (b"owner: a\nname: caf\xe9\n", "p.yaml:2:10: byte 0xe9 is not UTF-8; save the file as UTF-8"),
    "too large": (b"# " + b"x" * 300_000, "p.yaml:1:1: the file is 262,145 bytes long; a policy has at most 262,144"),
    "deep": (b"[" * 5_000, "p.yaml:1:1: the file is nested too deeply; at most 40 levels"),
    "fairly deep": (b"a: " + b"[" * 60 + b"]" * 60, "p.yaml:1:1: the file is nested too deeply; at most 40 levels"),
    "an anchor in itself": (b"a: &a [*a]\n", "p.yaml:1:4: an anchor holds itself; anchors may not be recursive"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WHOLE_FILES)
def test_a_file_that_is_no_policy(write, kind):
    raw, expected = WHOLE_FILES[kind]
    assert said(write(raw)) == [expected]


def test_an_alias_bomb_is_counted_and_not_expanded(write):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    (message,) = said(write("\n".join(lines)))
    assert message.startswith("p.yaml:1:1: the file holds 1,")
    assert message.endswith(
        "values once its aliases (*name) are expanded; at most 20,000: write fewer aliases of aliases"
    )


def test_small_anchors_and_merge_keys_are_fine(write):
    text = "targets:\n  a: &a {threads: 2, batch_sizes: &b [1, 2]}\n  c: {<<: *a, threads: 3}\n  d: {batch_sizes: *b}\n"
    policy = load_policy(write(text))
    assert [(t.target.threads, t.target.batch_sizes) for t in policy.targets] == [(2, (1, 2)), (3, (1, 2)), (1, (1, 2))]


VERSIONS = {
    "kind: OptimizationPolicy\n": "p.yaml:1:1: apiVersion: is missing; write `apiVersion: compile-stage/v1`",
    "apiVersion: compile-stage/v2\nkind: OptimizationPolicy\n": (
        "p.yaml:1:13: apiVersion: 'compile-stage/v2' is not a version that this release reads; it reads "
        "compile-stage/v1; did you mean compile-stage/v1?"
    ),
    "apiVersion: compile-stage/v1\n": "p.yaml:1:1: kind: is missing; write `kind: OptimizationPolicy`",
    "apiVersion: compile-stage/v1\nkind: Deployment\n": (
        "p.yaml:2:7: kind: 'Deployment' is not a kind of document that this release reads; it reads OptimizationPolicy"
    ),
}


@pytest.mark.parametrize("head", VERSIONS)
def test_the_version_is_checked(write, head):
    assert said(write(f"{head}name: p\n{TARGET}", head=False)) == [VERSIONS[head]]


# ---------------------------------------------------------------------------------------------------------- extends


def test_files_that_extend_each_other(write):
    write("extends: [b.yaml]\n" + TARGET, "a.yaml")
    write("extends: [a.yaml]\n", "b.yaml")
    assert said("a.yaml") == [
        "b.yaml:4:11: extends[0]: the files extend each other in a circle: a.yaml -> b.yaml -> a.yaml; remove one"
    ]


def test_a_file_that_extends_itself(write):
    write("extends: [p.yaml]\n" + TARGET)
    assert said("p.yaml") == [
        "p.yaml:4:11: extends[0]: the files extend each other in a circle: p.yaml -> p.yaml; remove one"
    ]


def test_extends_that_go_too_deep(write):
    for i in range(12):
        write(f"extends: [f{i + 1}.yaml]\n" if i < 11 else "", f"f{i}.yaml")
    assert said("f0.yaml") == [
        "f7.yaml:4:11: extends[0]: f8.yaml is the 9th file of a chain of extends; at most 8 files deep"
    ]


def test_extends_of_what_is_not_there_or_not_local(write):
    write("", "org-base.yaml")
    write("extends: [orgbase.yaml, 'https://x.y/z.yaml', nothing/at.yaml]\n" + TARGET)
    assert said("p.yaml") == [
        "p.yaml:4:11: extends[0]: orgbase.yaml does not exist; did you mean org-base.yaml?",
        "p.yaml:4:25: extends[1]: https://x.y/z.yaml is not a local file; copy the file into your repository and name "
        "it here",
        "p.yaml:4:47: extends[2]: nothing/at.yaml does not exist",
    ]


def test_a_file_that_is_not_there_is_not_the_one_that_names_it(write):
    """Broken: the error about a missing `q.yaml` suggests `p.yaml`, the file that extends it."""
    write("extends: [q.yaml]\n" + TARGET)
    assert said("p.yaml") == ["p.yaml:4:11: extends[0]: q.yaml does not exist"]


def test_mistakes_of_all_files_are_told_at_once(write):
    write("ownr: x\n", "bases/one.yaml")
    write("\tx: 1\n", "bases/two.yaml")
    write("extends: [bases/one.yaml, bases/two.yaml]\ntargets: {t: {threads: 0}}")
    found = said("p.yaml")
    assert [line.split(": ")[0] for line in found] == ["bases/one.yaml:4:1", "p.yaml:5:24", "bases/two.yaml:4:1"]


def test_a_folder_a_missing_file_and_a_pipe(write, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert said("folder") == ["folder: is a folder; name a policy file"]
    assert said("pipe") == ["pipe: is not a regular file; name a policy file"]
    write(TARGET, "cpu-server.yaml")
    assert said("strict-fp32") == ["strict-fp32: does not exist; did you mean shipped:strict-fp32?"]
    assert said("cpu-servr.yaml") == ["cpu-servr.yaml: does not exist; did you mean cpu-server.yaml?"]


def test_a_file_that_can_not_be_read(write):
    write(TARGET)
    assert said("p.yaml/q.yaml") == ["p.yaml/q.yaml: can't be read: Not a directory"]
    assert said("q" * 5000) == [f"{'q' * 5000}: can't be read: File name too long"]
    assert said(write('extends: ["a\\0b.yaml"]\n' + TARGET)) == [
        "p.yaml:4:11: extends[0]: 'a\\x00b.yaml' is not a file name"
    ]
    assert "is not a data file" in said(write('data: {validation: {source: "file:a\\0.npz"}}\n' + TARGET))[0]


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(write):
    write(TARGET).chmod(0)
    assert said("p.yaml") == ["p.yaml: can't be read: Permission denied"]


# ------------------------------------------------------------------------------------------------------- --set and -t

SETS = {
    "nonsense": "--set nonsense: no KEY=VALUE; write for example --set tolerances.int8.cosine=0.98",
    ".owner=a": (
        "--set .owner=a: '.owner' is not a dotted path: a part of it is empty; write for example --set "
        "tolerances.int8.cosine=0.98"
    ),
    "budget..minutes=1": (
        "--set budget..minutes=1: 'budget..minutes' is not a dotted path: a part of it is empty; write for example "
        "--set tolerances.int8.cosine=0.98"
    ),
    "targets.t.options.openvino.device=CPU": (
        "--set targets.t.options.openvino.device=CPU: targets.t.options.openvino: the target does not use openvino, so "
        "its options would change nothing; it uses onnxruntime"
    ),
    "targets.u.threads=2": "--set targets.u.threads=2: targets.u: unknown target; one of: t",
    "targets.t.thread=2": (
        "--set targets.t.thread=2: targets.t.thread: unknown key; one of: device, backends, precisions, shapes, "
        "batch_sizes, threads, required, hardware, family, options, generation, ladder, tolerances, performance, "
        "select, fallback, promote, serving; did you mean threads?"
    ),
    "tolerances.int8.cosine=1e-1": (
        "--set tolerances.int8.cosine=1e-1: tolerances.int8.cosine: `1e-1` is text to YAML 1.1, which wants a point in "
        "it and a sign in its exponent; write 1.0e-1"
    ),
    "budget.minutes=": (
        "--set budget.minutes=: budget.minutes: has no value; a number is needed here: The whole run, in minutes"
    ),
    "tolerances.int8.cosine=": (  # of a variable that is not set
        "--set tolerances.int8.cosine=: tolerances.int8.cosine: has no value; write null if none is meant"
    ),
    "budget={minutes: 1": (
        "--set budget={minutes: 1: budget: not valid YAML: expected ',' or '}', but got '<stream end>'; a text is "
        """quoted, once more within the shell's quotes: --set 'budget="..."'"""
    ),
    "extends=[x.yaml]": "--set extends=[x.yaml]: extends: can't be set here; change it in the file",
}


@pytest.mark.parametrize("argument", SETS)
def test_a_wrong_set_is_located_by_its_argument(write, argument):
    assert said(write("targets: {t: {backends: [onnxruntime]}}\n"), argument) == [SETS[argument]]


def test_options_of_a_backend_that_the_target_uses_or_that_a_base_holds(write):
    """Broken: options that are right are refused with those that change nothing."""
    write("targets: {t: {backends: [onnxruntime, openvino], options: {openvino: {a: 1}}}}", "base.yaml")
    path = write("extends: [base.yaml]\ntargets: {t: {backends: [onnxruntime]}}")
    assert said(path) == said("base.yaml", "targets.t.options.openvino.a=2") == []
    assert said("base.yaml", "targets.t.backends=[onnxruntime]") == []
    assert said(path, "targets.t.backends=auto", "targets.t.options.openvino.a=2") == []
    (problem,) = said(path, "targets.t.options={openvino: {a: 2}}")
    assert "the target does not use openvino" in problem


@pytest.mark.parametrize("targets", ["", "extends: [absent.yaml]", "targets: [t]"])
def test_a_target_is_not_called_unknown_where_the_targets_could_not_be_read(write, targets):
    """Broken: beside the true error stands one that is not true: the target may well be there."""
    path = write(targets) if targets else "nope.yaml"
    for ask in (partial(load_policy, path, targets=["t"]), partial(explain, path, target="t")):
        with pytest.raises(PolicyError) as caught:
            ask()
        assert "matches no target" not in str(caught.value)
        assert len(caught.value.problems) == 1


def test_a_glob_that_matches_no_target(write):
    path = write("targets: {cpu-a: {}, cpu-b: {}, edge: {}}")
    assert [t.target.name for t in load_policy(path, targets=["cpu-*"]).targets] == ["cpu-a", "cpu-b"]
    assert [t.target.name for t in load_policy(path, targets=["edge", "cpu-a"]).targets] == ["cpu-a", "edge"]
    with pytest.raises(PolicyError) as caught:
        load_policy(path, targets=["egde", "cpu-*", "gpu-*"])
    assert caught.value.problems == (
        "--target egde: matches no target of the policy; one of: cpu-a, cpu-b, edge; did you mean edge?",
        "--target gpu-*: matches no target of the policy; one of: cpu-a, cpu-b, edge",
    )


# ------------------------------------------------------------------------------------------------------------ at once


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path, monkeypatch):
    """The golden file holds a policy with more than ten different mistakes, and what is said of it."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(GOLDEN / "mistakes.yaml", "mistakes.yaml")
    found = [line.replace(str(tmp_path.resolve()), "/folder") for line in said("mistakes.yaml")]
    assert found == (GOLDEN / "mistakes.txt").read_text().splitlines()
    assert len({line.split(":")[1] for line in found}) > 10


def test_the_error_carries_every_problem_and_the_exit_code_of_a_wrong_policy(write):
    with pytest.raises(PolicyError) as caught:
        load_policy(write("ownr: x\nnam: y\n" + TARGET))
    assert len(caught.value.problems) == 2
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith("the policy p.yaml has 2 mistakes:\n  p.yaml:4:1: ownr: unknown key")


def test_lint_tells_the_mistake_of_a_shared_base_once(write):
    write("ownr: x\n", "base.yaml")
    for name in ("a.yaml", "b.yaml"):
        write("extends: [base.yaml]\n" + TARGET, name)
    assert len(lint(["a.yaml", "b.yaml", "base.yaml"], today=TODAY)) == 1


@pytest.mark.parametrize("zone", ["EAST-14", "WEST+12"], ids=["14 hours ahead", "12 hours behind"])
def test_a_waiver_ends_with_its_day_in_utc_wherever_the_policy_is_read(write, monkeypatch, zone):
    """Broken: on a machine behind UTC a policy is read without a word on the evening after the waiver's last day, and
    the run fails the gate; on one ahead of UTC the policy is in error while the waiver holds."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        today = datetime.now(UTC).date()
        waiver = "waivers: [{{gate: cosine, target: t, reason: r, owner: o, expires: {}}}]"
        assert lint([write(TARGET + waiver.format(today), "holds.yaml")]) == []
        assert load_policy("holds.yaml").waivers[0].expires == today.isoformat()
        (ended,) = lint([write(TARGET + waiver.format(today - timedelta(days=1)), "ended.yaml")])
        assert "the waiver expired on" in ended
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_base_may_name_no_target_but_can_not_be_run(write):
    path = write("owner: me")
    assert lint([path]) == []
    assert load_policy(path, base=True).targets == ()
    with pytest.raises(PolicyError, match="names no target"):
        load_policy(path)


def test_a_base_may_limit_accuracy_and_leave_the_labels_to_others(write):
    """Broken: `lint policies/*.yaml` fails by a base that every policy which extends it completes, and `fleet` refuses
    the folder."""
    base = write("tolerances: {int8: {accuracy: 0.001, outputs: {y: {f1: 0.001}}}}", "base.yaml")
    labelled = write(f"extends: [base.yaml]\ndata: {{validation: {{labels: y}}}}\n{TARGET}", "labelled.yaml")
    assert lint([base, labelled], today=TODAY) == []
    assert [file.problem for file in PolicyFolder(base.resolve().parent).files()] == ["", ""]
    (accuracy, f1) = lint([write(f"extends: [base.yaml]\n{TARGET}")], today=TODAY)
    assert "tolerances.int8.accuracy: this needs labels" in accuracy
    assert "tolerances.int8.outputs.y.f1: this needs labels" in f1


# ------------------------------------------------------------------------------------------------- never a traceback

# The same examples each time; no deadline, since the machine may be busy.
STEADY = settings(derandomize=True, deadline=None, database=None)

WORDS = re.compile(r"(?<=: )[^\n#]+|(?<=[\[,] )[^\],]+|[\w-]+")
STRANGE = [
    "null",
    "[]",
    "{}",
    "-1",
    "1.5",
    "yes",
    "2026-01-01",
    "[1]",
    "[{}]",
    "{a:\xa0b}",
    "[[1]]",
    "*x",
    "&x",
    "=",
    "<<",
    '"\\0"',
    "~",
    "0x1F",
    "1:30",
    "!!binary\xa0aGk=",
    "!!bool\xa0x",
    "!!timestamp\xa0x",
    '"{"',
    '"{0}"\nauto',
    "[auto]",
    "{fp32:\xa01}",
    "{t:\xa0null}",
    "[null]",
    "{null:\xa01}",
    "{x:\xa0null}",
    "{outputs:\xa01}",
]


@STEADY
@given(st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(STRANGE)), min_size=1, max_size=4))
def test_whatever_is_written_there_is_no_traceback(tmp_path_factory, changes):
    """Words of a policy are replaced by strange ones: what comes out is a policy, or located problems."""
    text = (GOLDEN / "mistakes.yaml").read_text()
    for where, strange in changes:
        words = list(WORDS.finditer(text))
        word = words[where % len(words)]
        text = text[: word.start()] + strange.replace("\u00a0", " ").strip() + text[word.end() :]
    path = tmp_path_factory.getbasetemp() / "strange.yaml"
    path.write_text(text)
    read = read_policy(path, ["tolerances.fp32." + changes[0][1].strip() + "=1"], today=TODAY)
    assert all(str(problem.place) for problem in read.problems)
    if not read.problems:
        load_policy(path, today=TODAY)
        explain(path, today=TODAY)


def test_a_policy_written_as_json_keeps_its_characters(write) -> None:
    """Broken: what JSON writes as two escapes, an emoji, is two halves of a character, and the run ends in a crash when
    its results are written."""
    document = {"apiVersion": "compile-stage/v1", "kind": "OptimizationPolicy", "name": "p", "targets": {"t": {}}}
    policy = load_policy(write(json.dumps({**document, "owner": "ml \U0001f680"}), head=False))
    assert policy.owner == "ml \U0001f680"


def test_a_policy_that_is_not_there_is_the_only_mistake(tmp_path):
    """Broken: before it stands that `--set targets.t...` names an unknown target, one of none."""
    with pytest.raises(PolicyError) as refused:
        load_policy(tmp_path / "missing.yaml", sets=["targets.t.threads=2"])
    assert len(refused.value.problems) == 1
    assert "missing.yaml: does not exist" in refused.value.problems[0]
