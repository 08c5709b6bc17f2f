"""An attempt that ends when its parent does.

    python -m compile_stage.fleet.followed PARENT FOLDER COMMAND ...

What `core.attempt` does, for a parent that cannot take up the outcome once it is killed, such as a process of Ray's:
the command is then interrupted as Ctrl-C does it, and what is finished is kept.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from compile_stage.core.attempt import main

_LOOK_EVERY_S = 0.5


def follow(parent: int) -> None:
    """Until the process has another parent; then it is stopped."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=follow, args=(int(sys.argv[1]),), daemon=True).start()
    main(Path(sys.argv[2]), sys.argv[3:])
