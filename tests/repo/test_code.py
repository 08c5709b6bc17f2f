"""House rules that the code keeps everywhere: layers, lazy imports, reasons for skips, nothing of one person's
machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "compile_stage"
HEAVY = {
    "ai_edge_litert", "ai_edge_quantizer", "alembic", "executorch", "iree", "lightgbm", "litert_torch", "mlflow",
    "nncf", "onnx", "onnxmltools", "onnxruntime", "onnxscript", "openvino", "pandas", "scipy", "skl2onnx", "sklearn",
    "sqlalchemy", "tensorrt", "torch", "torchao", "transformers", "xgboost",
}  # fmt: skip

# What another package loads, and nothing of ours imports, may import that package.
LOADED_BY = {"deployments.py": {"mlflow"}}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_at_once(tree: ast.Module) -> Iterator[str]:
    """Top-level packages that importing the module imports: not those inside functions or under TYPE_CHECKING."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def tracked_files() -> list[Path]:
    """Everything that is, or is about to be, in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so there is no list of the repository's files")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_the_five_rules_hold():
    """Layers, independent steps, independent backends, plug-ins by name, YAML only in policy/ (see pyproject.toml)."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def texts_in_the_locale_s_encoding(tree: ast.Module) -> Iterator[int]:
    """The lines that read or write text and leave its encoding to the locale."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        words = {word.arg for word in node.keywords}
        of_a_process = node.func.attr in ("run", "Popen", "check_output") and "text" in words
        of_a_file = (node.func.attr, len(node.args)) in {("read_text", 0), ("write_text", 1)}
        if (of_a_process or of_a_file) and "encoding" not in words:
            yield node.lineno


# Of hundreds of files each rule is one test, which names them: with a test for each file, collecting these would take
# longer than running them.
@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {path.relative_to(PACKAGE).as_posix(): tree_of(path) for path in PACKAGE.rglob("*.py")}


def test_text_has_its_encoding_named(trees: dict[str, ast.Module]) -> None:
    """Broken: in a container whose locale is not UTF-8, a minus sign in a measured note ends the run as a bug of ours,
    and a cache that was written under one locale can't be read under another."""
    found = {name: list(texts_in_the_locale_s_encoding(tree)) for name, tree in trees.items()}
    assert found.pop("graph_debug/scripts/load.py")  # runs where the bug report is read
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_heavy_packages_are_imported_inside_functions(trees: dict[str, ast.Module]) -> None:
    """`--help` and `lint` answer at once, and a missing extra is noticed only by the plug-in that needs it."""
    heavy = {name: HEAVY & set(imported_at_once(tree)) for name, tree in trees.items()}
    assert {name: packages for name, packages in heavy.items() if packages} == LOADED_BY


def test_every_module_says_what_it_is_for(trees: dict[str, ast.Module]) -> None:
    assert [name for name, tree in trees.items() if not ast.get_docstring(tree)] == []


def reasonless_skips(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called, keywords = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
            positional = bool(node.args) and not called.endswith("skipif")
            if re.search(r"^pytest\.(mark\.)?(skip|skipif|xfail)$", called) and not (
                positional or "reason" in keywords
            ):
                yield node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bare = (ast.unparse(decorator) for decorator in node.decorator_list)
            yield from (node.lineno for name in bare if re.search(r"mark\.(skip|xfail)$", name))


def test_every_skip_gives_its_reason() -> None:
    found = {path.relative_to(ROOT): list(reasonless_skips(tree_of(path))) for path in ROOT.glob("tests/**/*.py")}
    assert {str(path): lines for path, lines in found.items() if lines} == {}


def test_a_skip_without_a_reason_is_found():
    """Guards the test above."""
    source = "@pytest.mark.skip\ndef a():\n    pytest.skip()\n@pytest.mark.skipif(True)\ndef b(): ...\n"
    assert len(list(reasonless_skips(ast.parse(source)))) == 3


UNWANTED = {
    "a path of one machine": r"(?<![\w./-])/(?:work|root|Users)/\w",
    "a folder outside of the repository": r"\.\./shared\b|(?<![\w/.-])shared/\w+[./]",
    "the host of a package index": r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs\.org",
    "unfinished work": r"\b(?:TODO|FIXME|XXX)\b",
}


def test_every_file_of_the_repository_is_text():
    """Broken: what was downloaded or built in the checkout is committed, such as the wheels of a `pip download`."""

    def is_text(path):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return False
        return True

    assert [str(path.relative_to(ROOT)) for path in tracked_files() if not is_text(path)] == []


@pytest.mark.parametrize("what", UNWANTED)
def test_the_repository_holds_no(what):
    """Paths, hosts and notes that mean something to one person only."""
    found = []
    for path in tracked_files():
        text = path.read_text(encoding="utf-8")
        if path != Path(__file__):
            found += [
                f"{path.relative_to(ROOT)}: {line.strip()[:100]}"
                for line in text.splitlines()
                if re.search(UNWANTED[what], line)
            ]
    assert found == []
