"""Load the graph beside this file in the runtime that could not. Ends with 0 when it still can't, with 1 when it can.

Needs onnxruntime or openvino, whichever `facts.json` names. The attempt runs in a process of its own, since it may
crash.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def load(path: str, backend: str) -> None:
    """Load and compile; raises, or dies, as the runtime does."""
    if backend == "openvino":
        import openvino

        core = openvino.Core()
        core.compile_model(core.read_model(path), "CPU")
    else:
        import onnxruntime

        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def main() -> int:
    """Try, and say what happened."""
    facts = json.loads((HERE / "facts.json").read_text(encoding="utf-8"))
    path = str(HERE / facts["files"]["model"])
    if "--here" in sys.argv:
        load(path, facts["backend"])
        return 0
    done = subprocess.run(  # noqa: S603 - this very file
        [sys.executable, __file__, "--here"], capture_output=True, text=True, check=False
    )
    print(facts["summary"])
    if done.returncode == 0:
        print("it loads here")
        return 1
    print((done.stderr.strip().splitlines() or [f"it died with {done.returncode}"])[-1])
    print("seen again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
