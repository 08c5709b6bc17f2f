"""What a hit of the cache costs, on this machine's disk and in a shared cache on an S3 server of this machine.

    python benchmarks/cache_hits.py                 # about a minute

An entry of one file of random bytes, of 10 kB to 100 MB, sealed by a secret. `local` reads it from the disk's cache
with all digests; `shared` takes it from the server (moto's, a process of its own) into an empty cache; `put` is what
uploading it adds for who made it; `miss` is a look at the server for what is not there. The ways take turns, and each
round has new entries. Reported are medians: wall time, and CPU time of the process that asks, which a busy machine
changes less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402

from compile_stage.core.cache import Cache  # noqa: E402
from compile_stage.core.shared_cache import SecretSeal, SharedCache  # noqa: E402
from compile_stage.core.shared_store import open_store  # noqa: E402

SECRET = b"s" * 32
SIZES = {"10 kB": 10_000, "1 MB": 1_000_000, "100 MB": 100_000_000}
SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
server._thread.join()
"""


@contextmanager
def bucket() -> Iterator[str]:
    """The address of a bucket on a server that ends with the context."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        uri = f"http://127.0.0.1:{int(process.stdout.readline())}"
        os.environ |= {"AWS_ENDPOINT_URL": uri, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
        urllib.request.urlopen(urllib.request.Request(f"{uri}/bench", method="PUT")).close()
        yield "s3://bench/cache"
    finally:
        process.kill()
        process.wait(30)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    assert work() is not None
    return time.perf_counter() - wall, time.process_time() - cpu


def one_round(size: int, number: int, shared: SharedCache, work: Path) -> dict[str, tuple[float, float]]:
    """Each way once, for an entry of its own."""
    key = {"size": size, "number": number}

    def make(into: Path) -> None:
        (into / "file").write_bytes(os.urandom(size))

    first, second = Cache(work / f"first-{size}-{number}"), Cache(work / f"second-{size}-{number}", shared=shared)
    found = {"miss": timed(lambda: second.read("compile/1", {"none": number}) is None or None)}
    first.fetch("compile/1", key, make)
    first.shared = shared
    found["put"] = timed(lambda: first._push("compile/1", key, replace=False) is None or None)
    found["shared"] = timed(lambda: second.read("compile/1", key))
    found["local"] = timed(lambda: second.read("compile/1", key))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    results.add_save_option(parser)
    chosen = parser.parse_args()
    with (
        results.recording("cache-hits", chosen.save) as record,
        tempfile.TemporaryDirectory() as scratch,
        bucket() as url,
    ):
        record.settings |= {"rounds": chosen.rounds, "server": "moto, a process of this machine"}
        shared = SharedCache(open_store(url), SecretSeal(SECRET))
        one_round(1000, -1, shared, Path(scratch))  # makes the client
        times: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for number in range(chosen.rounds):
            for name, size in SIZES.items():
                for way, taken in one_round(size, number, shared, Path(scratch)).items():
                    times.setdefault((name, way), []).append(taken)
        for (name, way), taken in times.items():
            wall, cpu = (statistics.median(one) * 1e3 for one in zip(*taken, strict=True))
            record.rows.append({"entry": name, "way": way, "wall_ms": round(wall, 1), "cpu_ms": round(cpu, 1)})
            print(f"{name:>7} {way:<7} {wall:9.1f} ms wall {cpu:9.1f} ms CPU", flush=True)


if __name__ == "__main__":
    main()
