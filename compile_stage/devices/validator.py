"""The validator that is sent to a device: a zipapp of our own modules, the same bytes from the same files.

It needs Python 3.11, numpy, and the one runtime of the artifact, which is opened by the loader that its version
carries. It holds neither the judging nor the registry: those stay here.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from compile_stage.core.digest import list_tree
from compile_stage.core.leftovers import temporary_folder
from compile_stage.serving.vendoring import copy_modules

_MODULES = ("compile_stage.devices.agent", "compile_stage.devices.worker", "compile_stage.devices.calls")
_MAIN = "from compile_stage.devices.worker import main\n\nmain()\n"
_WHEN = (1980, 1, 1, 0, 0, 0)  # the first that a zip file can say


@cache
def build_validator(modules: Sequence[str] = ()) -> bytes:
    """The zipapp's bytes.

    Args:
        modules: Of ours, that it is to hold beside its own with all that they import: a source's, where the original is
            run on the device.
    """
    with temporary_folder("validator") as home:
        folder = Path(home)
        copy_modules((*_MODULES, *modules), folder / "compile_stage")
        (folder / "__main__.py").write_text(_MAIN, encoding="utf-8")
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as written:
            for name in sorted(list_tree(folder)):
                entry = zipfile.ZipInfo(name, date_time=_WHEN)
                entry.create_system, entry.external_attr = 3, 0o644 << 16
                written.writestr(entry, (folder / name).read_bytes(), zipfile.ZIP_DEFLATED, 9)
        return archive.getvalue()
