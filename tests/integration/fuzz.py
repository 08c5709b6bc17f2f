"""Damaged manifests, validations, results and cache entries, given to what reads them.

Whatever is read must be refused by an error of ours, or mean what it meant before: no other exception, no value that
nobody wrote.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from compile_stage.core.cache import Cache
from compile_stage.core.digest import canonical_json, digest_of
from compile_stage.core.errors import CompileStageError

_VALUES: tuple[Any, ...] = (
    None, True, -1, 2**70, 1e308, float("nan"), "", "x" * 5000, "\ud800", "../../etc/passwd", "/dev/zero", [], {}, [[]],
    {"": {}},
)  # fmt: skip


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content of a JSON file with one thing wrong: a value, a key, a byte, its end, or its depth."""
    kind = chance.choice(("value", "value", "key", "byte", "end", "deep", "other"))
    if kind == "byte" and content:
        at = chance.randrange(len(content))
        return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]
    if kind == "end":
        return content[: chance.randrange(len(content) + 1)]
    if kind == "deep":
        return b"[" * 200_000
    if kind == "other":
        return chance.choice((b"", b"null", b"[]", b"{}", b"\xff\xfe\x00", b'"text"'))
    document = json.loads(content)
    holder, key = chance.choice(list(_places(document)))
    if kind == "key":
        del holder[key]
    else:
        holder[key] = chance.choice(_VALUES)
    return json.dumps(document).encode("utf-8", "surrogatepass")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key, or index, within a document."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


def finding(read: Callable[[], object], *allowed: object) -> str:
    """What is wrong with how it was read, or nothing.

    Args:
        allowed: The values that it may be read as; none: any.
    """
    try:
        value = read()
    except CompileStageError:
        return ""
    except Exception as error:  # noqa: BLE001 - any other is the finding
        return f"{type(error).__name__}: {str(error)[:150]}"
    return "" if not allowed or value in allowed else f"read as {str(value)[:150]}"


def resealed(content: bytes) -> bytes:
    """The digest within a manifest or validation made to hold again, as whoever damages it on purpose would."""
    try:
        document = json.loads(content)
        document.pop("digest", None)
        return canonical_json({**document, "digest": digest_of(document)}).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return content


def fuzz_file(file: Path, read: Callable[[], object], chance: random.Random, *allowed: object) -> str:
    """Damage the file, read it, and put back what was there."""
    content = file.read_bytes()
    wrong = damaged(content, chance)
    try:
        file.write_bytes(resealed(wrong) if chance.random() < 0.5 and not allowed else wrong)
        return finding(read, *allowed)
    finally:
        file.write_bytes(content)


def fuzz_cache(root: Path, chance: random.Random) -> str:
    """One entry damaged, in its answer or in a file: it must be made anew, or read as it was."""
    cache, key = Cache(root), {"of": chance.randrange(10**9)}

    def make(into: Path) -> dict[str, Any]:
        (into / "weights.bin").write_bytes(b"0123456789" * 20)
        return {"passed": False, "measured": [0.5, 0.25], "reason": "over the limit"}

    written = cache.fetch("validate/1", key, make)
    entry = cache.locate("validate/1", key)
    file = chance.choice((entry / "entry.json", entry / "entry.json", entry / "files" / "weights.bin"))
    content = file.read_bytes()
    file.write_bytes(damaged(content, chance) if file.suffix == ".json" else content[:-1] + b"x")
    try:
        held = cache.read("validate/1", key)
        return "" if held is None or (held.value, held.digest) == (written.value, written.digest) else f"served {held}"
    except Exception as error:  # noqa: BLE001 - any other is the finding
        return f"{type(error).__name__}: {str(error)[:150]}"
    finally:
        shutil.rmtree(entry)
