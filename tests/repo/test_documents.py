"""What the documents promise exists: links, make targets, commands, policies, decisions."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "compile_stage"
# A name below one of these, in a document, is a file of the repository; the package's own folders may be named without
# it.
FOLDERS = {path.name for path in (*ROOT.iterdir(), *PACKAGE.iterdir()) if path.is_dir()}
GROUPS = {"backends", "sources", "lowerings", "registries", "engines"} - FOLDERS  # of entry points
TAGS = {
    "family",
    "family_after",
    "family_key",
    "key",
    "digest",
    "source",
    "policy_digest",
    "target",
    "verdict",
    "history_of",
    "previous",
    "push",
    "records",
    "approval",
} - FOLDERS  # of versions
SUFFIXES = {
    "py",
    "md",
    "json",
    "txt",
    "toml",
    "yaml",
    "yml",
    "onnx",
    "in",
    "html",
    "xml",
    "csv",
    "npz",
    "bin",
    "db",
    "sh",
}
SKIPPED_FOLDERS = {".git", ".venv", ".venv-dev", "node_modules", "build", "dist"}
DOCUMENTS = sorted(
    path for path in ROOT.rglob("*.md") if not SKIPPED_FOLDERS & set(path.relative_to(ROOT).parts) and path.is_file()
)
DECISIONS = ROOT / "docs" / "decisions"


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose_of(path: Path) -> str:
    """The document without its code, where brackets mean something else."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", text_of(path), flags=re.DOTALL)


def code_of(path: Path) -> str:
    """Only the code: fenced blocks, indented blocks and inline spans, one per line."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text_of(path), flags=re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", text_of(path), flags=re.DOTALL | re.MULTILINE)
    return "\n".join([*fenced, *re.findall(r"^    (.*)$", rest, flags=re.MULTILINE), *re.findall(r"`([^`\n]+)`", rest)])


def wrong_in(documents: Iterable[Path], look: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    """Of each document in which `look` finds anything: its name → what was found.

    A rule is one test for all documents: collecting a test for each would take longer than running them."""
    found = {str(path.relative_to(ROOT)): look(path) for path in documents}
    return {name: wrong for name, wrong in found.items() if wrong}


def anchors_of(path: Path) -> set[str]:
    """The anchors that a renderer gives the document's headings."""
    headings = re.findall(r"^#+ (.+)$", text_of(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(document: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose_of(document)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        there = (document.parent / name).resolve() if name else document
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors_of(there)):
            broken.append(link)
    return broken


def test_relative_links_lead_somewhere():
    assert wrong_in(DOCUMENTS, broken_links) == {}


def unknown_targets(document: Path) -> list[str]:
    targets = set(re.findall(r"^([a-z][\w-]*):", text_of(ROOT / "Makefile"), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|[\s(])make ([a-z][\w-]*)", code_of(document), flags=re.MULTILINE))
    return sorted(named - targets)


def test_make_targets_exist():
    """A document that tells to type `make x` is right."""
    assert wrong_in(DOCUMENTS, unknown_targets) == {}


def unknown_commands(document: Path) -> list[str]:
    from compile_stage.cli.main import cli

    named = set(re.findall(r"^\s*(?:\$ )?compile-stage ([a-z][\w-]*)", code_of(document), flags=re.MULTILINE))
    return sorted(named - set(cli.commands))


def test_commands_exist():
    """A document that shows `compile-stage x` shows a command of ours."""
    assert wrong_in(DOCUMENTS, unknown_commands) == {}


def unknown_policies(document: Path) -> list[str]:
    named = set(re.findall(r"(?<![\w./-])policies/[\w.-]+\.yaml", text_of(document)))
    return [name for name in sorted(named) if not (ROOT / name).exists()]


def test_policies_exist():
    """A policy that a document names is one that we ship."""
    # pipelines/ shows callers, whose policies lie in their own repositories
    ours = [path for path in DOCUMENTS if path.parent.name != "pipelines"]
    assert wrong_in(ours, unknown_policies) == {}


def unknown_options(document: Path) -> list[str]:
    from compile_stage.cli.main import cli

    unknown = []
    for line in code_of(document).splitlines():
        match = re.match(r"^\s*(?:\$ )?compile-stage ((?:[a-z][\w-]* )+)(.*)$", line.partition(" #")[0] + " ")
        command = cli
        for word in match[1].split() if match else ():
            command = getattr(command, "commands", {}).get(word, command)
        known = {o for parameter in command.params for o in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
        given = set(re.findall(r"(?<![\w-])(--?[a-z][\w-]*)", match[2])) if match else set()
        unknown += [f"{line.strip()}: {option}" for option in sorted(given - known) if option not in ("-vv",)]
    return unknown


def test_options_exist():
    """Broken: a command that is copied from a page ends with "No such option"."""
    assert wrong_in(DOCUMENTS, unknown_options) == {}


# The change log and the decisions speak of the code of their day.
PRESENT = [path for path in DOCUMENTS if path.name != "CHANGELOG.md" and path.parent != DECISIONS]


def gone_files(document: Path) -> list[str]:
    gone = []
    for span in re.findall(r"`([^`\n]+)`", text_of(document)):
        for name in re.findall(r"(?<![\w./<-])((?:[\w-]+/)+[\w.-]*\.(?:py|yaml|txt|in|toml))\b", span):
            if name.split("/")[0] in FOLDERS and not any((root / name).exists() for root in (ROOT, PACKAGE)):
                gone.append(name)
    return gone


def test_files_of_ours_exist():
    """Broken: a reader is sent to a module that was moved or renamed."""
    assert wrong_in(PRESENT, gone_files) == {}


def gone_names(document: Path) -> list[str]:
    gone = []
    for name in re.findall(r"`((?:compile_stage\.)?(?:[a-z_]+\.)+\w+)(?:\([^`]*\))?`", text_of(document)):
        parts = name.removeprefix("compile_stage.").split(".")
        is_module = (PACKAGE / parts[0]).is_dir() or (PACKAGE / f"{parts[0]}.py").exists()
        is_module = is_module and parts[0] != "jax"  # `jax.export` is JAX's own; ours is `compile_stage.jax`
        other = parts[-1] in SUFFIXES or parts[0] in GROUPS | TAGS
        if (name.startswith("compile_stage.") or is_module) and not other and not resolves(parts):
            gone.append(name)
    records = importlib.import_module("compile_stage.core.records")
    for name, attribute in re.findall(r"`([A-Z]\w+)\.([a-z_]+)\b[^`]*`", text_of(document)):
        if hasattr(records, name) and not hasattr(getattr(records, name), attribute):
            gone.append(f"{name}.{attribute}")
    return gone


def test_names_of_ours_exist():
    """Broken: a plug-in is written against a protocol that has another name now."""
    assert wrong_in(PRESENT, gone_names) == {}


def resolves(parts: list[str]) -> bool:
    """True when the dotted name, below our package, is a module or an attribute of one, or a name of the package."""
    for length in range(len(parts), -1, -1):
        try:
            place: object = importlib.import_module(".".join(["compile_stage", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            if not hasattr(place, attribute) and attribute not in getattr(place, "__annotations__", {}):
                return False
            place = getattr(place, attribute, None)
        return True
    return False


def policies_of(document: Path) -> list[str]:
    """The policies, whole or in part, that a page shows; not the shipped defaults, which are no policy by
    themselves."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", text_of(document), flags=re.DOTALL | re.MULTILINE)
    return [
        block
        for block in blocks
        if re.search(r"^(targets|tolerances):", block, re.MULTILINE) and "each_target:" not in block
    ]


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if policies_of(path)], ids=lambda path: str(path.relative_to(ROOT))
)
def test_policies_that_a_page_shows_are_valid(document, tmp_path):
    """Broken: a policy that is copied from a page is refused by `lint`."""
    from compile_stage.policy.load import load_policy

    for number, block in enumerate(policies_of(document)):
        missing = {"apiVersion": "compile-stage/v1", "kind": "OptimizationPolicy", "name": "page", "owner": "docs"}
        header = "".join(f"{key}: {value}\n" for key, value in missing.items() if f"{key}:" not in block)
        path = tmp_path / f"{number}.yaml"
        path.write_text(header + block, encoding="utf-8")
        load_policy(path)


def test_the_engine_page_shows_a_call_that_works(tmp_path, monkeypatch):
    """Broken: the page's example called `compile`, which no worker knows."""
    import onnx
    from onnx import TensorProto, helper

    shape = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")}
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], name="relu")], "page", [shape["x"]], [shape["y"]])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "model.onnx"
    )
    monkeypatch.chdir(tmp_path)
    [example] = re.findall(
        r"^```python\n(.*?)^```", text_of(ROOT / "docs" / "engine.md"), flags=re.DOTALL | re.MULTILINE
    )
    names: dict[str, object] = {}
    exec(example.replace('"model.onnx"', repr(str(tmp_path / "model.onnx"))), names)
    assert names["nodes"] == [["relu", "Relu"]]


def test_pages_that_the_code_names_exist():
    """Broken: an error message or a comment sends its reader to a page, or a heading, that is gone."""
    gone = []
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "policies").glob("*.yaml")]:
        for name, anchor in re.findall(r"(docs/[\w/.-]+\.md)(?:#([\w-]+))?", text_of(path)):
            if not (ROOT / name).exists() or (anchor and anchor not in anchors_of(ROOT / name)):
                gone.append(f"{path.relative_to(ROOT)}: {name}{anchor and '#'}{anchor}")
    assert gone == []


def test_the_readme_tells_how_to_see_it_work_and_how_to_test_it():
    code = code_of(ROOT / "README.md")
    assert "make demo" in code
    assert "make test" in code


def test_the_changelog_has_a_place_for_what_is_not_released():
    headings = re.findall(r"^## (.+)$", text_of(ROOT / "CHANGELOG.md"), flags=re.MULTILINE)
    assert headings[0] == "[Unreleased]"


def test_every_page_is_in_the_index():
    """A page that the index does not link to is found by nobody."""
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", text_of(ROOT / "docs" / "README.md")))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} == linked


def test_every_step_of_the_log_is_explained():
    """Broken: who reads the log finds a step that is said nowhere, as `cover` was."""
    names = re.compile(r"""(?:context\.cached\(|events\.step\(|^_STEP =)\s*f?"([\w{}-]+)""", re.MULTILINE)
    steps = {
        name.replace("{form}", "FORM")
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "cluster"
        for name in names.findall(path.read_text(encoding="utf-8"))
    }
    assert {"validate", "compile", "export-FORM", "publish"} <= steps
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8").partition("| `step`, ")[2].partition("\n\n")[0]
    assert sorted(step for step in steps if f"`{step}`" not in page) == []


def test_every_module_of_the_package_is_in_the_index_of_the_code():
    """Broken: a newcomer looks for a folder's purpose in a table that leaves it out, or that names one that is gone."""
    table = text_of(ROOT / "docs" / "README.md").partition("## The code")[2]
    first_cells = "".join(re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE))
    listed = {name.rstrip("/") for name in re.findall(r"`([\w./]+)`", first_cells)} - {"compile_stage"}
    there = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert listed == {name for name in there if not name.startswith("_")}
    pipeline = re.findall(r"`(\w+\.py)`", next(line for line in table.splitlines() if line.startswith("| `pipeline/`")))
    assert [name for name in pipeline if not (PACKAGE / "pipeline" / name).exists()] == []


def test_every_decision_is_in_the_index():
    listed = re.findall(r"\[(\d{4})\]\(([^)]+)\)", text_of(DECISIONS / "README.md"))
    files = sorted(path.name for path in DECISIONS.glob("[0-9]*.md"))
    assert [name for _, name in listed] == files
    assert all(name.startswith(number) for number, name in listed)


def test_decisions_are_short_and_dated():
    for decision in sorted(DECISIONS.glob("[0-9]*.md")):
        lines = text_of(decision).splitlines()
        assert lines[0].startswith(f"# {decision.name[:4]} ")
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", lines[2]), f"{decision.name}: the third line is its date"
        assert len(lines) <= 45, f"{decision.name} has {len(lines)} lines"


@pytest.mark.parametrize("arguments", [{"PYTHON": "/bin/false"}, {"CANDIDATES": "python-that-is-not-there"}])
def test_make_says_what_it_needs_when_there_is_no_python(tmp_path, arguments):
    """Without a usable Python, one sentence and the way out, and no half-made environment."""
    for name in ("Makefile", "pyproject.toml", "requirements/dev-constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text_of(ROOT / name), encoding="utf-8")
    command = ["make", "-C", str(tmp_path), "demo", *(f"{key}={value}" for key, value in arguments.items())]
    # The suite itself may run below `make test PYTHON=...`, which hands its settings down.
    outer = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    done = subprocess.run(command, env=outer, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert "make demo PYTHON=" in done.stderr
    assert next(iter(arguments.values())) in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_ci_script_is_valid_bash():
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)
