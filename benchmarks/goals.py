"""All that the table of goals in docs/benchmarks.md is made of, one benchmark after the other, saved; then the page.

    python benchmarks/goals.py                  # two to three hours on two quiet cores
    python benchmarks/goals.py --only by_hand time_to_verdict

What is missing (a backend that is not installed, a peer without an environment) is left out and said to be.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BEFORE = "c17ed4a"
"""The commit that goals of speed are measured from."""

EIGHT = "[executorch, inductor, iree, litert, onnxruntime, openvino, torchscript, xla]"
"""The backends of the run that the goal on their time is measured from; `auto` would take whatever is installed."""

COMMANDS = (
    ("by_hand", "--search-minutes", "0", "--before", BEFORE),
    ("roofline",),
    ("time_to_verdict", "--before", BEFORE),
    ("backends", "resnet50", "--backends", EIGHT),
    ("stage", "start-up"),
    ("accuracy_control", "separable:50", "separable:40", "--seconds", "8"),
    ("accuracy_control", "digits:2%", "digits-wild:2%", "--seconds", "6"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(command[0] for command in COMMANDS))
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    chosen = parser.parse_args()
    failed = []
    for name, *words in COMMANDS:
        if name in chosen.only:
            print(f"== {name} {' '.join(words)}", flush=True)
            done = subprocess.run([sys.executable, str(HERE / f"{name}.py"), *words, "--save"], check=False)
            failed += [name] if done.returncode else []
    subprocess.run([sys.executable, str(HERE / "write_docs.py")], check=True)
    if failed:
        raise SystemExit(f"these ended with an error, and their figures are the earlier ones: {', '.join(failed)}")


if __name__ == "__main__":
    main()
