"""In place of the stage: writes its arguments down as one line, and ends with the code in `exit-code`, if there is one.

python recorded.py FOLDER ...
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    line = json.dumps(sys.argv[2:]).encode() + b"\n"
    descriptor = os.open(folder / "runs.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, line)
    os.close(descriptor)
    if (folder / "slow").exists():
        try:
            time.sleep(120)
        except KeyboardInterrupt:
            sys.exit(130)
    code = folder / "exit-code"
    sys.exit(int(code.read_text()) if code.exists() else 0)
