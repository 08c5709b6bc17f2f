"""Documents and code use the field's words: those that readers had to guess at do not come back."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
BANNED = {
    "hasty": "pruned",
    "hopeless(ly)?": "far slower",
    "set aside": "pruned, or: kept apart",
    "first look": "quick comparison",
    "rungs?": "tuning option",
    "ladders?": "option tuning",
    "climb(s|ed|ing)?": "try, accept",
    "(lend|lends|lent|lending)": "link",
    "deeds?": "what it does",
    "(given|gives?|giving) back": "kept in higher precision",
    "roundings": "Q/DQ pairs, or: quantisation errors",
    "obey(s|ed)?": "valid, followed",
    "told(?! apart)": "reported, said",
    "at fault": "cause",
    "mend(s|ed|ing)?": "fix",
    "died while": "crashed during",
    "(race|races|raced|racing)": "interleaved measurement",
    "foretells?|foretold": "predict",
}
"""What is not said, as a pattern of whole words → what is said instead."""
NAMES_OF_OTHERS = {
    "compile_stage/core/records/plan.py": {"rungs"},  # in FORMER_NAMES: a field of plans that are in caches
    "compile_stage/core/records/policy.py": {"ladder"},  # the policy's key
    "compile_stage/core/records/result.py": {"ladder"},  # the field of result.json
    "compile_stage/pipeline/option_tuning.py": {"ladder"},  # the event's name
    "compile_stage/policy": {"ladder"},
    "compile_stage/report/reading.py": {"ladder", "climbed"},  # fields of result.json
    "compile_stage/report/result.py": {"ladder", "climbed"},
}
"""File or folder → names in it that files of users hold, so that they stay."""
# Fields of files that others read keep their names.
ALLOWED = re.compile(r"^```.*?^```|`[^`\n]*`|^    .*$|<!--.*?-->", re.MULTILINE | re.DOTALL)
DOCUMENTS = sorted(
    [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("pipelines/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md",
     ROOT / "examples/README.md"]
)  # fmt: skip

CODE = sorted([*(ROOT / "compile_stage").rglob("*.py"), *(ROOT / "compile_stage").rglob("*.j2")])
TEXT = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def prose_of(code: str) -> str:
    """Comments, docstrings and other literals of a module, each on its line; the rest is left out."""
    lines = [""] * (code.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type in TEXT:
            for number, line in enumerate(token.string.splitlines(), token.start[0]):
                lines[number - 1] += line.strip() + " "
    return "\n".join(lines)


def banned_in(text: str) -> list[str]:
    """`line: word (say: other words)` for each, outside of code."""
    prose = ALLOWED.sub(lambda code: "\n" * code[0].count("\n"), text)
    return [
        f"{number}: {match[0]} (say: {instead})"
        for number, line in enumerate(prose.splitlines(), 1)
        for word, instead in BANNED.items()
        for match in re.finditer(rf"\b(?:{word})\b", line, flags=re.IGNORECASE)
    ]


def test_documents_use_the_terms_of_the_field():
    """Broken: a reader has to learn words that exist in this project only."""
    found = {str(path.relative_to(ROOT)): banned_in(path.read_text(encoding="utf-8")) for path in DOCUMENTS}
    assert {path: words for path, words in found.items() if words} == {}


def banned_in_code(path: Path) -> list[str]:
    within = {str(folder.relative_to(ROOT)) for folder in (path, *path.parents) if folder.is_relative_to(ROOT)}
    allowed = set().union(*(NAMES_OF_OTHERS.get(folder, set()) for folder in within))
    code = path.read_text(encoding="utf-8")
    words = banned_in(prose_of(code) if path.suffix == ".py" else code)
    return [line for line in words if line.split(": ")[1].partition(" (")[0] not in allowed]


def test_code_uses_the_terms_of_the_field():
    """Broken: a message, a report or a docstring has words that exist in this project only."""
    found = {str(path.relative_to(ROOT)): banned_in_code(path) for path in CODE}
    assert {path: words for path, words in found.items() if words} == {}


def test_percentages_are_written_in_one_way():
    """Broken: a run says `95 % interval` in one line and `(95% bounds` in the next."""
    tight = re.compile(r"\.\d%\}|[0-9}]%(?= [a-z]|[),.:])")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in CODE
        if path.suffix == ".py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if tight.search(re.sub(r"`[^`]*`", "", line))
    ]
    assert found == []


def test_prose_of_code_is_searched():
    """Guards the test above: comments, docstrings and messages are searched, names and text in backticks are not."""
    code = (
        'ladder = 1  # a rung\n\ndef climb():\n    """Of `ladder`,\n    not obeyed, told apart.\n    """\n'
        '    return f"told {name}"\n'
    )
    assert [line.partition(" (")[0] for line in banned_in(prose_of(code))] == ["1: rung", "5: obeyed", "7: told"]


def test_a_banned_word_is_noticed():
    """Guards the test above: prose is searched, code is not."""
    text = "The next rung\n\n```yaml\nladder: true\n```\n\nof `ladder` is\nobeyed.\n"
    assert [line.partition(" (")[0] for line in banned_in(text)] == ["1: rung", "8: obeyed"]
