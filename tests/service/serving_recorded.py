"""The service with `recorded.py` in place of the stage.

python serving_recorded.py FOLDER PORT DRAIN_S
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from compile_stage.service.server import serve
from compile_stage.service.settings import Settings

SECRET = "0123456789abcdef0123456789abcdef"

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    folder = Path(sys.argv[1])
    settings = Settings(
        policies=folder / "policies",
        state=folder / "state",
        secrets=(SECRET,),
        aliases=("go",),
        poll_s=3600,
        drain_s=float(sys.argv[3]),
        command=(sys.executable, str(Path(__file__).with_name("recorded.py")), str(folder)),
    )
    serve(settings, "127.0.0.1", int(sys.argv[2]), lambda line: print(line, flush=True))
