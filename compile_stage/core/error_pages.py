"""What each code means and what to do, for `compile-stage rule CODE`; `python -m compile_stage.core.error_pages >
docs/errors.md` prints them all."""

from __future__ import annotations

import sys
import textwrap
from typing import NamedTuple

from compile_stage.core.error_codes import Code


class Page(NamedTuple):
    """One code.

    Attributes:
        title: A few words, the same for every error with this code.
        means: What is so when it is printed, and why it is not let pass.
        fix: What to do, command first where there is one.
        example: Lines that have the mistake and lines without it, as `# wrong` and `# right`; empty for most.
    """

    title: str
    means: str
    fix: str
    example: str = ""


PAGES: dict[str, Page] = {
    Code.UNREADABLE_POLICY: Page(
        "a policy file can't be read",
        "The file is not there, is a folder, is empty, is larger or nested deeper than a policy may be, is not "
        "UTF-8, or holds no map at its top.",
        "Look at the path: names in `extends` are relative to the file that names them. A policy starts "
        "with `apiVersion: compile-stage/v1`; `compile-stage policy --from cpu-server > policy.yaml` "
        "writes one that is valid.",
    ),
    Code.NOT_YAML: Page(
        "a policy file is not YAML",
        "The parser stopped at this line: a tab, a second colon on the line, a wrong indentation, an "
        "unknown anchor, or a second document.",
        "Look at the line and at the one above it. Indent with blanks, and quote a text that holds `: ` "
        "or starts with one of `*&!%@{[`.",
        "# wrong\nowner: team: vision\n# right\nowner: 'team: vision'",
    ),
    Code.UNKNOWN_KEY: Page(
        "a key that the policy language does not have",
        "Unknown keys are errors, since a limit with a mistyped name would be a limit that nobody checks.",
        "Use one of the keys that the message lists; docs/policy.md has all of them. Sizes, durations and"
        " rates carry their unit in the name.",
        "# wrong\nperformance: {p95_latency: 20}\n# right\nperformance: {p95_latency_ms: 20}",
    ),
    Code.WRONG_VALUE: Page(
        "a value of a kind or size that is not allowed here",
        "The message says what is allowed. YAML reads `no` as false, `1e-4` as a text and `2026-01-31` as"
        " a date; such a value is named as what YAML made of it.",
        "Write a value of the kind that the message names; a text that looks like something else goes in "
        "quotes, a small number as `1.0e-4`.",
        "# wrong\ntolerances: {fp32: {max_abs: 1e-4}}\n# right\ntolerances: {fp32: {max_abs: 1.0e-4}}",
    ),
    Code.MISSING_KEY: Page(
        "a key that must be there is missing",
        "Neither the file nor a file that it extends says it, and there is no default that would be right"
        " for everybody.",
        "Add the key at the place that the message names.",
    ),
    Code.DUPLICATE_KEY: Page(
        "a key is given twice in one map",
        "YAML would silently keep the last one.",
        "Remove one of the two; the message has the line of the first.",
    ),
    Code.EXTENDS: Page(
        "a file that is extended can't be used, or says again what another had replaced",
        "Policies extend local files only, below their own repository or a folder that `--policy-root` "
        "names, at most a few files deep and never in a circle: what a verdict stands on must be in one "
        "place that is reviewed. Of two files of `extends`, the later replaces what the earlier says, also by "
        "what it extends itself: where both extend one base, the base's values come back, which is a warning.",
        "Copy the file into the repository and name it by a relative path, or name its folder with `--policy-root`. "
        "Of a warning: say in the file that extends both which value is meant.",
    ),
    Code.LOCKED: Page(
        "a value that a lower layer has locked, or a lock on nothing",
        "An organisation's base policy names in `locked` what no policy above it may change, not even with `--set`. "
        "A locked limit holds for every output, so a limit under `outputs` may not differ from it. "
        "An entry of `locked` that names no value would protect nothing, so it is a mistake itself.",
        "Leave the key out, or have the owner of the base change it. `compile-stage explain` shows who locks what. "
        "In `locked` write dotted paths of the policy; `targets.*` stands for all targets.",
    ),
    Code.WRONG_SET: Page(
        "a --set that can't be used",
        "`--set` takes KEY=VALUE with a dotted path, and can't change what a file is (`apiVersion`, "
        "`kind`, `extends`, `locked`). Options of a backend that the target does not use would change nothing.",
        "Write for example `--set tolerances.int8.cosine=0.98`; a text with special characters is quoted "
        "within the shell's quotes.",
    ),
    Code.UNKNOWN_NAME: Page(
        "a backend, precision, metric or target that is not known",
        "The name is spelled wrong, or belongs to a plug-in that is not installed here.",
        "Use one of the names that the message lists. `compile-stage doctor` lists backends, also those "
        "that are not installed, with the line that installs each.",
    ),
    Code.DATA_FILE: Page(
        "a file that the policy names can't be used",
        "A file of samples, groups or keys is not there, can't be read, or lacks what the policy says "
        "that it holds. A run would be refused for it later.",
        "Correct the path (it is relative to the policy file that names it) or the name of the array or column.",
    ),
    Code.TOO_FEW_SAMPLES: Page(
        "too few samples to show what is asked",
        "A drop of 0.5 % can't be shown with 32 samples, whatever the model answers: the check would say "
        "NOT_RUN or fail for every candidate. Synthetic samples never count.",
        "Give more samples, or a limit and a confidence that this many can show; the message says how many are needed.",
    ),
    Code.NO_LABELS: Page(
        "a metric needs labels, and there are none",
        "Accuracy and its like compare answers with labels. Without them the check can never pass.",
        "Name the array or column that holds them in `data.validation.labels`, or use a metric that "
        "compares with the original alone (`cosine`, `top1_agreement`, `kl`).",
    ),
    Code.LIMIT_NEVER_FAILS: Page(
        "a limit that nothing can miss",
        "The limit is so wide that any answer holds it, so the check proves nothing.",
        "Narrow it, or take it out: `null` says openly that there is no such limit.",
    ),
    Code.WAIVER: Page(
        "a waiver that does not hold",
        "It has expired, holds for years, names no gate or target that there is or a gate that another "
        "waiver lets be missed there, or all gates of a precision are waived.",
        "Have its owner renew it with a date that is near, or remove it; of two for one gate keep one.",
    ),
    Code.SHAPES: Page(
        "shapes or batch sizes that contradict each other",
        "`min`, `typical` and `max` need the same rank and must grow in every axis; batch sizes must lie between them.",
        "Correct the axis that the message names.",
    ),
    Code.WRONG_NAME: Page(
        "a name that can't be used",
        "The name, alias or template would be refused by the registry, or can't be part of a job's id, "
        "after all the work is done. So it is refused before.",
        "Use letters, digits, `_` and `-`; templates may hold the one field that the message names.",
    ),
    Code.FORBIDDEN: Page(
        "forbidden by the policy's compliance section",
        "`compliance` allows named backends only, or no Python functions in policies.",
        "Use what is allowed, or have the owner of that rule change it; the message has its file and line.",
    ),
    Code.UNKNOWN_VERSION: Page(
        "a policy of a version or kind that this release does not read",
        "`apiVersion` and `kind` say which language the file is written in.",
        "Write `apiVersion: compile-stage/v1` and `kind: OptimizationPolicy`, or install a release that reads it.",
    ),
    Code.NO_TARGET: Page(
        "a policy without targets",
        "A file that others extend may leave them out; one that is run may not.",
        "Say where the model must run, such as `targets: {cpu-server: {device: cpu}}`.",
    ),
    Code.USAGE: Page(
        "a command, an option or an argument can't be used as it is given",
        "The message names it, or the file that it names: a key, a result.json, a hosts file. Or the option would "
        "change nothing beside the others. Nothing was compiled or published.",
        "`compile-stage COMMAND --help` shows what it takes.",
    ),
    Code.UNKNOWN_COMMAND: Page(
        "a command that there is not",
        "The first word is none of the commands.",
        "`compile-stage --help` lists them.",
    ),
    Code.POLICY: Page(
        "a policy can't be applied to this model or machine",
        "The file is valid, and what it asks for does not go together with the model, its samples or this machine.",
        "`compile-stage plan MODEL_URI -p POLICY` shows what would run and what is refused, without compiling.",
    ),
    Code.MISSING_DEPENDENCY: Page(
        "a package is not installed",
        "A source or backend that is needed has its own packages, which the base installation leaves out.",
        "Run the line after `fix:`. `compile-stage doctor` lists all that is missing; backends whose "
        "packages exclude each other go into toolchains: `compile-stage toolchain install NAME`.",
    ),
    Code.STORAGE: Page(
        "a folder can't be written, or its disk is full",
        "It holds results (`--out`), the cache (`COMPILE_STAGE_CACHE`) or temporary files (`TMPDIR`); or it is the "
        "shared cache that `compile-stage cache` was asked to look after. What was finished is kept.",
        "Free some space or name another folder by that option or variable, then run again: it goes on from there. "
        "Of a shared cache, check address, account and server.",
    ),
    Code.FILES_REMOVED: Page(
        "files were removed while a run used them",
        "Somebody emptied the cache or the folder of temporary files.",
        "Run again. Let cleaners leave the folders of running jobs alone.",
    ),
    Code.KILLED: Page(
        "a process of the run was ended by SIGKILL",
        "A person, a scheduler or a container's limit did it, or the kernel, since the machine's or the container's "
        "memory was short: the message says which. It says nothing about the model.",
        "Run again: what is finished is kept. Where memory was short, free some, or give the machine or container "
        "more, first.",
    ),
    Code.DEVICE: Page(
        "a device can't be reached, or lacks something",
        "`validate --host` reaches a device by the system's own `ssh`, or by adb, and runs an artifact there. The "
        "connection was refused or lost, or the device has no such Python, package or space. Nothing was attached to "
        "the version.",
        "Try `ssh HOST python3 --version` yourself: it must work without a question. Install what the message names "
        "there; `python` and `folder` in the hosts file name another interpreter, and another disk.",
    ),
    Code.GATE: Page(
        "what is asked for did not pass its gates",
        "An alias may not move to a version that did not pass, or was not validated on this kind of machine. "
        "A run does not move it to one that is slower than what it replaces either.",
        "Read the reason in the report; change the model or, with its owner, the policy. A waiver names "
        "one gate, an owner and an end.",
    ),
    Code.REGISTRY: Page(
        "the registry refuses, or does not hold what was asked for",
        "The message has the registry's own words. What was compiled is kept in the cache.",
        "Correct what it names, then run again: nothing is compiled twice.",
    ),
    Code.REGISTRY_UNREACHABLE: Page(
        "the registry can't be reached",
        "The address did not answer, or refused the credentials, after several attempts.",
        "Look at `MLFLOW_TRACKING_URI` and the credentials' variables; `compile-stage doctor` asks the registry once.",
    ),
    Code.NOT_IN_REGISTRY: Page(
        "there is no such model, version, alias or run",
        "The registry answers, and does not have it.",
        "Look at the names that the message lists. A source is named as models:/NAME/VERSION, "
        "models:/NAME@ALIAS, models:/m-ID, runs:/RUN_ID/NAME or folder:/PATH.",
    ),
    Code.ALIAS_MOVED: Page(
        "somebody else moved the alias meanwhile",
        "What the new version was compared with is no longer what the alias points to, so the comparison says nothing.",
        "Run the stage again: it compares with what is there now. `compile-stage promote` moves the alias without a "
        "comparison.",
    ),
    Code.SOURCE: Page(
        "the source model is refused or can't be read",
        "Its flavor, its form or its own files are not what can be compiled and compared; the message "
        "says which. It was not changed.",
        "docs/sources.md says what each flavor takes and how to log a model so that it is taken.",
    ),
    Code.NOTHING_COMPILED: Page(
        "no candidate could be compiled",
        "Each backend refused the model or failed; the report has each one's reason.",
        "`compile-stage plan` shows what is refused before anything runs. Try another backend, or fp32 first.",
    ),
    Code.INTEGRITY: Page(
        "files are not what was published",
        "A digest, a manifest or a record does not fit the files. They are not opened.",
        "Fetch the model again. If it stays so, somebody changed it in the registry: go back with "
        "`compile-stage rollback`, which looks at what it goes back to, or run the stage again, which publishes a new "
        "version in the damaged one's place, and promote that.",
    ),
    Code.WORKER: Page(
        "a candidate's worker failed",
        "A compiler or runtime crashed, ran out of memory or time, or raised an error. That is one "
        "candidate's result; the others go on.",
        "The report has the traceback or the end of the log. `compile-stage debug` makes a bundle for a bug report.",
    ),
    Code.INTERNAL: Page(
        "a bug of ours",
        "Something that can't happen did.",
        "Please report it with the traceback whose file the message names.",
    ),
}

_START = """\
# Errors by code

<!-- Printed by `python -m compile_stage.core.error_pages`. Edit that module, not this file. -->

Every error and warning ends with a code in brackets, such as `[CS0103]`. A code keeps its meaning; `compile-stage rule
CS0103` prints its page. Exit codes are in [cli.md](cli.md#exit-codes).

In Python, all are a `compile_stage.CompileStageError` with `problem`, `fix`, `where`, `code` and `exit_code`. A missed
gate in `compile_stage.run` is none: the result's `exit_code` says so.
"""


def text(code: str) -> str:
    """One page for a terminal of 80 columns."""
    page = PAGES[code]
    parts = [f"{code}: {page.title}", textwrap.fill(page.means, 78), "Fix: " + textwrap.fill(page.fix, 78)]
    if page.example:
        parts.append(textwrap.indent(page.example, "    "))
    return "\n\n".join(parts) + "\n"


def markdown() -> str:
    """docs/errors.md."""
    parts = [_START]
    for code, page in PAGES.items():
        parts.append(f"## {code}\n\n**{page.title[0].upper()}{page.title[1:]}.** {page.means}\n\n{page.fix}\n")
        if page.example:
            parts.append(f"```text\n{page.example}\n```\n")
    lines = [line for part in parts[1:] for line in [*part.split("\n"), ""]]
    text_lines = "\n".join(line if line.startswith(("#", "`")) else _filled(line) for line in lines)
    return f"{parts[0]}\n{text_lines}".replace("\n\n\n", "\n\n").strip() + "\n"


def _filled(line: str) -> str:
    return textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.stdout.write(markdown())
