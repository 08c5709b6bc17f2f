"""What goes wrong around a run, and what it leaves: kills, broken networks, full disks, damaged files.

    python benchmarks/faults.py kills --count 1000        # about seven hours on two cores
    python benchmarks/faults.py network --count 40        # 20 % of the requests fail: about fifteen minutes
    python benchmarks/faults.py disks
    python benchmarks/faults.py damage --count 20000

kills: SIGKILL at a random moment, then a look at the registry (whole versions, one for each key), then the run again,
which must finish. network: `mlflow server` behind a proxy that drops connections, loses and cuts answers, and answers
500; 95 % of the runs must end well, and no run may stay RUNNING. disks: the cache, the results and the temporary folder
on a file system of some KiB; the run must name the full disk, and end well when there is room. damage: manifests,
validations, results and cache entries with one thing wrong; each must be refused by an error of ours, or change
nothing. The suite runs each a few times.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "integration")]

import faulty_proxy  # noqa: E402
import fuzz  # noqa: E402
import kill_and_resume  # noqa: E402
import results  # noqa: E402

from compile_stage.report.compare import compare  # noqa: E402
from compile_stage.serving import manifest  # noqa: E402

SHARE = 0.2  # of the requests


@contextmanager
def trial(root: Path, seed: int) -> Iterator[kill_and_resume.Trial]:
    """A real server, and models to take through the stage; MLflow's own limits are as users have them."""
    server = kill_and_resume.Server(root)
    server.start()
    os.environ |= {"MLFLOW_TRACKING_URI": server.uri, "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}
    try:
        made = kill_and_resume.Trial(root, server, seed)
        for variable in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
            made.environment.pop(variable)
        yield made
    finally:
        server.kill()


def kills(count: int, seed: int, root: Path) -> Counter[str]:
    return kill_and_resume.go(count, ("stage",), seed, root)["stage"]


def network(count: int, seed: int, root: Path, share: float = SHARE) -> Counter[str]:
    """Runs against a server of whose requests a share fails; by how they ended."""
    seen: Counter[str] = Counter()
    with trial(root, seed) as made:
        for number in range(count):
            name = f"net-{number}"
            made.register(name, seed=seed * 1000 + number)
            with faulty_proxy.FaultyProxy(made.server.port, share, seed=seed * 1000 + number).running() as proxy:
                made.environment["MLFLOW_TRACKING_URI"] = proxy.uri
                began = time.monotonic()
                code = made.stage(name).wait(timeout=900)
            state = made.look(name)
            running = running_runs(made.server.uri)
            seen[f"ended with {code}, {state}" + (", runs left RUNNING" if running else "")] += 1
            faults = ", ".join(f"{times} {kind}" for kind, times in sorted(proxy.seen.items()))
            print(f"{name}: {code} after {time.monotonic() - began:.0f} s ({faults})", flush=True)
            if code:
                print((made.root / "stage.log").read_text()[-1500:], flush=True)
    return seen


def running_runs(uri: str) -> list[str]:
    """The runs of the first experiment that nobody ended."""
    from mlflow import MlflowClient

    runs = MlflowClient(uri).search_runs(["0"], filter_string="attributes.status = 'RUNNING'")
    return [run.info.run_id for run in runs]


DISKS = {"COMPILE_STAGE_CACHE": (16, 128), "TMPDIR": (4, 64), "out": (4, 64)}
"""What lies on the small file system, and its sizes in KiB: far too small, and enough for a part of the work."""

_SMALL = 'mount -t tmpfs -o size="$1"k tmpfs "$2" && shift 2 && exec "$@"'


def disks(count: int, seed: int, root: Path) -> Counter[str]:
    """Each folder on a file system that is too small, in a user namespace of its own (Linux); then again with room."""
    seen: Counter[str] = Counter()
    with trial(root, seed) as made:
        for number, (place, size) in enumerate((place, size) for place, sizes in DISKS.items() for size in sizes):
            name = f"disk-{number}"
            made.register(name, seed=seed * 1000 + number)
            code, said = run_on_small_disk(made, name, place, size)
            if code == 0:
                seen[f"{place}: {size} KiB is enough"] += 1
                continue
            named = "the disk is full" in said or "No space left" in said
            again = made.stage(name).wait(timeout=300)
            seen[f"{place}: ended with {code}, " + ("named" if named else "NOT NAMED") + f", again {again}"] += 1
            if not named:
                print(f"{place} of {size} KiB:\n{said[-1500:]}", flush=True)
    return seen


def run_on_small_disk(made: kill_and_resume.Trial, name: str, place: str, size_kb: int) -> tuple[int, str]:
    """Exit code and standard error of a run one of whose folders is a file system of `size_kb`."""
    folder = made.root / f"small-{name}"
    folder.mkdir()
    out = folder if place == "out" else made.root / "out" / name
    environment = made.environment if place == "out" else {**made.environment, place: str(folder)}
    stage = [
        sys.executable,
        "-m",
        "compile_stage",
        "run",
        f"models:/{name}/1",
        "-p",
        str(made.policy),
        "--out",
        str(out),
    ]
    command = ["unshare", "-rm", "sh", "-c", _SMALL, "sh", str(size_kb), str(folder), *stage]
    ended = subprocess.run(
        command, env=environment, cwd=made.root, capture_output=True, text=True, timeout=300, check=False
    )
    return ended.returncode, ended.stderr


def damage(count: int, seed: int, root: Path) -> Counter[str]:
    """Damaged files of a real publication, and of a cache; findings by kind."""
    chance, seen = random.Random(seed), Counter[str]()
    bundle, result = publication(root, seed)
    data = manifest.data_folder(bundle)
    held = manifest.read_manifest(bundle)
    validation = manifest.write_validation(
        {"fingerprint": held["fingerprint"], "hardware": held["hardware"], "artifact": held["artifact"]["digest"]},
        bundle / "validations",
    )
    whole = manifest.validations(held, bundle)
    other = Path(shutil.copy2(result, root / "other.json"))
    ways: dict[str, Callable[[], str]] = {
        "manifest": lambda: fuzz.fuzz_file(data / "manifest.json", lambda: manifest.check_integrity(bundle), chance),
        "validation": lambda: fuzz.fuzz_file(validation, lambda: manifest.validations(held, bundle), chance, whole, []),
        "result": lambda: fuzz.fuzz_file(result, lambda: str(compare(result, other)), chance),
        "cache": lambda: fuzz.fuzz_cache(root / "fuzzed-cache", chance),
    }
    for number in range(count):
        kind = list(ways)[number % len(ways)]
        if problem := ways[kind]():
            seen[f"{kind}: {problem}"] += 1
        else:
            seen[f"{kind}: refused, or nothing changed"] += 1
    return seen


def publication(root: Path, seed: int) -> tuple[Path, Path]:
    """A published model's folder, and the result.json of the run that made it."""
    import mlflow

    with trial(root, seed) as made:
        made.register("whole", seed=seed)
        assert made.stage("whole").wait(timeout=300) == 0, (root / "stage.log").read_text()[-3000:]
        bundle = mlflow.artifacts.download_artifacts("models:/whole-compiled/1", dst_path=str(root / "bundle"))
    return Path(bundle), root / "out" / "whole" / "result.json"


CAMPAIGNS = {"kills": (kills, 1000), "network": (network, 40), "disks": (disks, 1), "damage": (damage, 20_000)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    results.add_save_option(parser)
    chosen = parser.parse_args()
    campaign, count = CAMPAIGNS[chosen.campaign]
    with tempfile.TemporaryDirectory() as folder, results.recording("faults", chosen.save) as record:
        record.settings = {"campaign": chosen.campaign, "count": chosen.count or count, "seed": chosen.seed}
        for what, times in sorted(campaign(chosen.count or count, chosen.seed, Path(folder)).items()):
            print(f"{times:6}  {what}")
            record.rows.append({"campaign": chosen.campaign, "ended": what, "times": times})


if __name__ == "__main__":
    main()
