"""The pages of the repository in one folder, for MkDocs: `python docs/site/build.py` writes build/site-source.

Pages name each other, and files of the repository, by relative paths. They are copied with their folders, so that every
link leads where it leads in the repository.
"""

from __future__ import annotations

import shutil
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
INTO = REPOSITORY / "build" / "site-source"

FOLDERS = (
    "docs",
    "policies",
    "examples",
    "pipelines",
    "benchmarks",
    "requirements",
    "compile_stage",
    "tests",
    ".github",
)
FILES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "pyproject.toml",
    ".pre-commit-hooks.yaml",
)


def build(into: Path = INTO) -> Path:
    """Copy what pages are made of and what they link to."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for name in FILES:
        shutil.copyfile(REPOSITORY / name, into / name)
    unwanted = shutil.ignore_patterns("__pycache__", "site")
    for name in FOLDERS:
        shutil.copytree(REPOSITORY / name, into / name, ignore=unwanted)
    return into


if __name__ == "__main__":
    print(build())
