"""A result's files, each written whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from compile_stage.core.errors import UsageError
from compile_stage.core.records import RunResult
from compile_stage.core.redaction import redacted

NAMES = {"html": "report.html", "md": "report.md", "junit": "junit.xml"}
"""Kind of report → its file beside result.json."""

FILES = ("result.json", *NAMES.values())
"""All that a run writes of its result."""

_CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f]")
"""What a name or a message of others may hold, and a terminal that shows the file would act on."""


def write(result: RunResult, out: Path) -> dict[str, Path]:
    """Write `result.json`, `report.html`, `report.md` and `junit.xml` into the folder `out`, which is made if need be.

    Each is written under a temporary name, flushed and renamed, so that a reader, or a run that is cut short, never
    sees half a file. Traces of profiles are copied beside them, into `profiles/`.

    Returns:
        File name → path.
    """
    from compile_stage.report.profiles import write_traces
    from compile_stage.report.result import result_text

    out.mkdir(parents=True, exist_ok=True)
    texts = {"result.json": result_text(result)} | {NAMES[kind]: render(result, kind) for kind in NAMES}
    write_traces(result, out)
    return {name: write_text(out / name, text) for name, text in texts.items()}


def remove(out: Path) -> None:
    """Delete the reports that an earlier run wrote into the folder `out`, and the traces that belong to them: nobody
    shall take them for those of the run that begins. Raises OSError where they can't be."""
    from compile_stage.report.profiles import FOLDER, TRACE

    for file in (*(out / name for name in FILES), *(out / FOLDER).glob(f"*{TRACE}")):
        file.unlink(missing_ok=True)
    with suppress(OSError):  # there is none, or it holds something else
        (out / FOLDER).rmdir()


def render(result: RunResult, kind: str) -> str:
    """The text of one report: `html`, `md` or `junit`."""
    from compile_stage.report.html import render_html
    from compile_stage.report.junit import render_junit
    from compile_stage.report.markdown import render_markdown

    return {"html": render_html, "md": render_markdown, "junit": render_junit}[kind](result)


def write_again(result: str | os.PathLike[str], kind: str, out: str | os.PathLike[str] | None = None) -> Path:
    """Make a report again from a `result.json`, or from that in a folder.

    Args:
        kind: `html`, `md` or `junit`.
        out: The file; None for the usual name beside result.json.

    Returns:
        The file that was written.

    Raises:
        UsageError: It is no result.json of a run, or the file can't be written.
    """
    from compile_stage.report.reading import read_result

    text = render(read_result(result), kind)
    folder = Path(result) if Path(result).is_dir() else Path(result).parent
    file = Path(out) if out is not None else folder / NAMES[kind]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return write_text(file, text)
    except OSError as error:
        raise UsageError(f"it can't be written: {error.strerror}", where=str(file), fix="name another --out") from error


def write_text(path: Path, text: str) -> Path:
    """Replace a file's content in one step, without the secrets of addresses and control characters in it; readable by
    all whom the umask lets."""
    descriptor, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
            # A lone surrogate in a file's name must not cost the report.
            stream.write(_CONTROLS.sub("\ufffd", redacted(text)).encode("utf-8", "backslashreplace").decode())
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(part).chmod(0o666 & ~umask)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return path
