"""The cache that machines share: on a real S3 server, with each fault that a network, a disk and an attacker have."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3, s3_server

from compile_stage.core import shared_store
from compile_stage.core.cache import Cache
from compile_stage.core.errors import MissingDependencyError, UsageError
from compile_stage.core.reuse import MACHINE_VARIABLE, Reuse
from compile_stage.core.shared_cache import NoSeal, SecretSeal, SharedCache, is_named, shared_cache
from compile_stage.core.shared_entries import pack, read_header, unpack
from compile_stage.core.shared_store import Store, open_store

KEY = {"model": "sha256:1", "backend": "onnxruntime"}
SECRET = b"s" * 32


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3_server() as started:
        yield started


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.proxy.fault = server.proxy.of = ""
    server.proxy.released.clear()
    server.proxy.waiting.clear()
    yield server
    server.proxy.fault = ""
    server.proxy.released.set()


@dataclass
class Team:
    """Machines with a disk each, and one shared cache."""

    url: str
    folder: Path
    monkeypatch: pytest.MonkeyPatch
    made: int = 0

    @cached_property
    def store(self) -> Store:
        return open_store(self.url)

    def machine(self, name: str, secret: bytes | None = SECRET, **more: Any) -> tuple[Cache, SharedCache]:
        self.monkeypatch.setenv(MACHINE_VARIABLE, name)
        shared = SharedCache(self.store, SecretSeal(secret) if secret else NoSeal())
        return Cache(self.folder / name, shared=shared, **more), shared

    def make(self, into: Path) -> dict[str, str]:
        self.made += 1
        (into / "sub").mkdir()
        (into / "sub" / "weights.bin").write_bytes(bytes(range(256)) * 40)
        (into / "model.txt").write_text("text \u00e9\n")
        return {"answer": "42"}

    def objects(self) -> list[str]:
        return [found.path for found in self.store.list()]


@pytest.fixture
def team(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Team:
    return Team(f"s3://{s3.bucket()}/cache", tmp_path, monkeypatch)


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Team:
    return Team(f"file://{tmp_path}/shared", tmp_path, monkeypatch)


@pytest.fixture(params=["s3", "file"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Team:
    if request.param == "s3":
        url = f"s3://{request.getfixturevalue('s3').bucket()}/cache"
    else:
        url = f"file://{tmp_path}/shared"
    return Team(url, tmp_path, monkeypatch)


def test_what_one_machine_made_another_takes(anywhere: Team) -> None:
    """Broken: a team compiles the same model on each of its machines."""
    first, _ = anywhere.machine("a")
    made = first.fetch("compile/1", KEY, anywhere.make)
    assert not made.hit
    assert len(anywhere.objects()) == 1
    second, shared = anywhere.machine("b")
    taken = second.fetch("compile/1", KEY, anywhere.make)
    assert (taken.hit, taken.value, taken.digest, anywhere.made) == (True, made.value, made.digest, 1)
    assert (Path(taken.path) / "sub" / "weights.bin").read_bytes() == bytes(range(256)) * 40
    assert shared.counts["taken"] == 1
    assert any("1 taken" in note for note in shared.notes())
    assert Cache(anywhere.folder / "b").read("compile/1", KEY) is not None, "it is on this disk now"
    assert second.fetch("compile/1", {**KEY, "backend": "other"}, anywhere.make).hit is False
    assert anywhere.machine("c")[0].read("compile/1", KEY) is not None


def test_an_entry_is_written_once(anywhere: Team) -> None:
    """Broken: who makes the same later replaces what others already work with, and each of two writers pays for it."""
    barrier = threading.Barrier(2)
    counts = []

    def work(cache: Cache, shared: SharedCache) -> None:
        def make(into: Path) -> dict[str, str]:
            (into / "file").write_bytes(b"same")
            barrier.wait(120)
            return {}

        cache.fetch("compile/1", KEY, make)
        counts.append(shared.counts["added"])

    threads = [threading.Thread(target=work, args=anywhere.machine(name)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert sorted(counts) == [0, 1]
    assert len(anywhere.objects()) == 1
    assert anywhere.machine("c")[0].read("compile/1", KEY) is not None


def test_a_pull_request_reads_and_writes_nothing(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a pull request's code fills the cache that the main branch builds with."""
    monkeypatch.setenv("COMPILE_STAGE_SHARED_CACHE", team.url)
    monkeypatch.setenv("COMPILE_STAGE_SHARED_CACHE_MODE", "read")
    reader = shared_cache(SecretSeal(SECRET))
    Cache(team.folder / "a", shared=reader).fetch("compile/1", KEY, team.make)
    assert team.objects() == []
    monkeypatch.delenv("COMPILE_STAGE_SHARED_CACHE_MODE")
    writer = shared_cache(SecretSeal(SECRET))
    Cache(team.folder / "b", shared=writer).fetch("compile/1", KEY, team.make)
    assert Cache(team.folder / "c", shared=reader).fetch("compile/1", KEY, team.make).hit
    monkeypatch.setenv("COMPILE_STAGE_SHARED_CACHE_MODE", "raed")
    with pytest.raises(UsageError, match="raed"):
        shared_cache(SecretSeal(SECRET))


@pytest.mark.parametrize("url", ["http://host/x", "/folder", "s3://", "cache", "sftp://host/x"])
def test_an_address_that_is_none_is_named(url: str) -> None:
    """Broken: a typing mistake is a run without a cache, which nobody notices for months."""
    with pytest.raises(UsageError, match="is no address"):
        open_store(url)


def test_an_address_holds_no_credentials() -> None:
    """Broken: a secret stands in logs, in the environment of workers and in notes of results."""
    with pytest.raises(UsageError, match="credentials") as raised:
        open_store("s3://AKIATEST:not-to-be-seen@bucket/x")
    assert "not-to-be-seen" not in f"{raised.value} {raised.value.fix}"


def test_no_address_is_no_shared_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a run that nobody gave an address asks a server."""
    monkeypatch.delenv("COMPILE_STAGE_SHARED_CACHE", raising=False)
    assert shared_cache(NoSeal()) is None
    monkeypatch.setenv("COMPILE_STAGE_SHARED_CACHE", "file:///tmp/x")
    assert is_named()
    assert not is_named("")


def test_a_missing_package_is_said_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: who has no s3fs sees a traceback."""
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(MissingDependencyError) as raised:
        open_store("az://container/x")
    assert "compile-stage[azure]" in raised.value.fix


# ------------------------------------------------------------------------------------------- damage and attackers


def test_no_flipped_byte_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a damaged object gives a wrong artifact or a wrong verdict, or a crash."""
    team = Team(f"file://{tmp_path}/shared", tmp_path, monkeypatch)
    for secret in (SECRET, None):
        made = team.machine(f"a{secret}", secret)[0].fetch("tuning/1", KEY, team.make)
        (place,) = (tmp_path / "shared").rglob("tuning/??/*")
        content = place.read_bytes()
        for at in [*range(0, len(content) - 10_248, 3), *range(len(content) - 10_248, len(content), 397)]:
            place.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            assert team.machine(f"b{secret}", secret)[0].read("tuning/1", KEY) is None
        for size in (0, 10, 100, len(content) // 2, len(content) - 1):
            place.write_bytes(content[:size])
            assert team.machine(f"b{secret}", secret)[0].read("tuning/1", KEY) is None
        place.write_bytes(content)
        held = team.machine(f"b{secret}", secret)[0].read("tuning/1", KEY)
        assert held is not None
        assert held.digest == made.digest
        place.unlink()


def test_a_refused_entry_is_made_anew_and_replaced(
    team: Team, s3: S3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken: one damaged object stays a miss for everybody for ever, or nobody hears of it."""
    team.machine("a")[0].fetch("compile/1", KEY, team.make)
    (path,) = team.objects()
    (tmp_path / "bad").write_bytes(b"compile-stage-entry 1 20\n{}")
    team.store.write(tmp_path / "bad", path, replace=True)
    cache, shared = team.machine("b")
    with caplog.at_level(logging.WARNING):
        assert cache.fetch("compile/1", KEY, team.make).hit is False
    assert [record.levelname for record in caplog.records if "refused" in record.message] == ["WARNING"]
    assert any("1 refused" in note for note in shared.notes())
    assert team.machine("c")[0].fetch("compile/1", KEY, team.make).hit


def test_nothing_that_another_key_sealed_is_used(on_disk: Team, tmp_path: Path) -> None:
    """Broken: who may write to the bucket, and has no key, decides what is published."""
    for secret in (b"x" * 32, None):
        on_disk.machine(f"attacker {secret}", secret)[0].fetch("tuning/1", KEY, on_disk.make)
        (path,) = on_disk.objects()
        cache, shared = on_disk.machine("victim")
        mine = shared.path_of(cache.locate("tuning/1", KEY).relative_to(cache.root).as_posix())
        (tmp_path / "forged").write_bytes(on_disk.store.read(path, 0, 10**6))
        on_disk.store.write(tmp_path / "forged", mine, replace=True)
        assert cache.read("tuning/1", KEY) is None
        assert shared.counts["refused"] == 1
        for found in on_disk.objects():
            on_disk.store.delete(found)


def test_without_a_key_only_artifacts_are_taken(on_disk: Team) -> None:
    """Broken: who may write to a bucket without a key writes verdicts, samples or reference answers, which nobody
    looks at again."""
    for step in ("validate/8", "sample/2", "reference/7", "benchmark/6", "export/2"):
        cache, _ = on_disk.machine("a", None)
        cache.fetch(step, KEY, on_disk.make)
        assert on_disk.machine("b", None)[0].read(step, KEY) is None
    assert on_disk.objects() == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [("../out", "names a file"), ("/etc/x", "names a file"), ("a\\b", "names a file"), ("c:x", "names a file"),
     ("x" * 300, "can't be made"), ("a//b", "names a file"), ("", "names a file")],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(on_disk: Team, tmp_path: Path, name: str, problem: str) -> None:
    """Broken: an entry writes outside of its folder."""
    from compile_stage.core.digest import canonical_json, digest_of

    cache, shared = on_disk.machine("a")
    made = cache.fetch("compile/1", KEY, on_disk.make)
    entry = json.loads((Path(made.path).parent / "entry.json").read_text())
    content = b"evil"
    listed = [[name, len(content), f"sha256:{hashlib.sha256(content).hexdigest()}"]]
    entry["files"] = digest_of({name: listed[0][2]})
    entry["digest"] = digest_of({key: value for key, value in entry.items() if key != "digest"})
    seal = shared.seal.sign(digest_of({"entry": entry, "files": listed}))
    header = canonical_json({"entry": entry, "files": listed, "seal": seal}).encode() + b"\n"
    (tmp_path / "forged").write_bytes(b"compile-stage-entry 1 %d\n" % len(header) + header + content)
    (path,) = on_disk.objects()
    on_disk.store.write(tmp_path / "forged", path, replace=True)
    fresh, shared = on_disk.machine("b")
    assert fresh.read("compile/1", KEY) is None
    assert shared.counts["refused"] == 1
    assert not list(tmp_path.rglob("out"))


@pytest.mark.parametrize(
    "header",
    [
        '{"entry": ' + '{"value": ' * 900 + "1" + "}" * 900 + ', "files": [], "seal": null}',
        '{"entry": ' + "[" * 100_000,
        '{"entry": {"value": "\\ud800", "files": "FILES"}, "files": [], "seal": null}',
        '{"entry": {"value": [' + "9" * 5000 + '], "files": "FILES"}, "files": [], "seal": null}',
        '{"entry": {"value": 1e999, "files": "FILES"}, "files": [["a", Infinity, "x"]], "seal": null}',
        '{"entry": {"step": 1, "key": [], "value": {}, "made": [], "files": "FILES"}, "files": [], "seal": null}',
        '{"entry": [], "files": {}, "seal": {}}', "[]", "null", '"x"', "",
    ],
    ids=range(11),
)  # fmt: skip
def test_no_header_ends_a_run(on_disk: Team, tmp_path: Path, header: str) -> None:
    """Broken: who may write to the bucket ends each run of the team with a traceback."""
    from compile_stage.core.digest import digest_of

    cache, shared = on_disk.machine("a", None)
    text = header.replace("FILES", digest_of({})).encode() + b"\n"
    (tmp_path / "forged").write_bytes(b"compile-stage-entry 1 %d\n" % len(text) + text)
    place = cache.locate("compile/1", KEY).relative_to(cache.root).as_posix()
    on_disk.store.write(tmp_path / "forged", shared.path_of(place), replace=False)
    assert cache.fetch("compile/1", KEY, on_disk.make).value == {"answer": "42"}
    assert shared.counts["refused"] == 1


def test_the_same_entry_gives_the_same_bytes(tmp_path: Path) -> None:
    """Broken: two machines that make the same upload different objects, and damage looks like a difference."""
    cache = Cache(tmp_path)
    made = cache.fetch("compile/1", KEY, Team("", tmp_path, pytest.MonkeyPatch()).make)
    entry = json.loads((Path(made.path).parent / "entry.json").read_text())
    for name in ("one", "two"):
        pack(entry, Path(made.path), tmp_path / name, SecretSeal(SECRET).sign)
    content = (tmp_path / "one").read_bytes()
    assert content == (tmp_path / "two").read_bytes()
    header, rest = read_header(lambda start, end: content[start:end])
    assert header.total_bytes == len(content)
    unpack(header, rest, lambda start, end: content[start:end], tmp_path / "out")
    assert (tmp_path / "out" / "model.txt").read_text() == "text \u00e9\n"


# -------------------------------------------------------------------------------------------------- a bad server


@pytest.mark.parametrize("fault", ["error 500", "truncated", "dropped", "flipped"])
def test_a_bad_answer_is_a_miss_and_the_run_goes_on(
    team: Team, s3: S3, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken: a gateway's trouble ends a run, or what it damaged is used."""
    monkeypatch.setattr(shared_store, "_PAUSES_S", (0.01, 0.01))
    team.machine("a")[0].fetch("compile/1", KEY, team.make)
    cache, shared = team.machine("b")
    s3.proxy.fault, s3.proxy.of, s3.proxy.flipped_at = fault, "GET", 9000
    with caplog.at_level(logging.WARNING):
        held = cache.fetch("compile/1", KEY, team.make)
        cache.fetch("compile/1", {**KEY, "more": 1}, team.make)
    assert (held.hit, held.value) == (False, {"answer": "42"})
    assert len([record for record in caplog.records if record.name.startswith("compile_stage")]) == 1
    assert any("went on" in note for note in shared.notes()), "S3's client compares a checksum of its own, too"
    assert "not-to-be-seen" not in caplog.text


def test_a_server_that_recovers_is_asked_again(team: Team, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: one lost connection costs a run its cache."""
    team.machine("a")[0].fetch("compile/1", KEY, team.make)
    cache, _ = team.machine("b")
    answers = iter(["error 500", "dropped"])
    monkeypatch.setattr(s3.proxy, "draw", lambda command, path: next(answers, ""))
    monkeypatch.setattr(shared_store, "_PAUSES_S", (0.01, 0.01))
    assert cache.fetch("compile/1", KEY, team.make).hit


def test_a_server_that_hangs_is_waited_for_once(
    team: Team, s3: S3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken: a run hangs with its server, or waits for it at each of a hundred steps."""
    cache, shared = team.machine("a")
    assert team.objects() == []  # the client is made
    monkeypatch.setattr(shared_store, "_REQUEST_S", 3.0)
    s3.proxy.fault = "hang"
    before = s3.proxy.seen["hang"]
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            assert not cache.fetch("compile/1", {**KEY, "number": number}, team.make).hit
    assert s3.proxy.seen["hang"] - before <= 1
    assert any("no answer within 3 s" in note for note in shared.notes())


def test_nobody_listens(team: Team, monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    """Broken: a cache server that is down stops a team's pipelines."""
    monkeypatch.setattr(shared_store, "_PAUSES_S", (0.01,))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port}")
    cache, shared = team.machine("a")
    assert not cache.fetch("compile/1", KEY, team.make).hit
    assert any("went on with this machine's cache" in note for note in shared.notes())


def test_a_bucket_that_is_not_there_is_said(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a typing mistake in the bucket's name looks like a cache that never hits."""
    team = Team("s3://no-such-bucket/x", tmp_path, monkeypatch)
    cache, shared = team.machine("a")
    assert not cache.fetch("compile/1", KEY, team.make).hit
    assert any("bucket does not exist" in note for note in shared.notes())


def test_an_upload_that_was_killed_leaves_nothing_to_find(team: Team, s3: S3, tmp_path: Path) -> None:
    """Broken: half an object is found by others, or keeps the whole one from being written."""
    code = f"""
        from pathlib import Path
        from compile_stage.core import shared_store
        from compile_stage.core.cache import Cache
        from compile_stage.core.shared_cache import SecretSeal, shared_cache

        def make(into):
            (into / "large").write_bytes(bytes(12 * 2**20))
            return {{}}

        shared_store._PIECE = 5 * 2**20
        shared = shared_cache(SecretSeal({SECRET!r}), {team.url!r})
        Cache(Path({str(tmp_path / "killed")!r}), shared=shared).fetch("compile/1", {KEY!r}, make)
    """
    s3.proxy.fault, s3.proxy.of = "hang", "partNumber=2"
    lines = "\n".join(line[8:] for line in code.splitlines())
    process = subprocess.Popen([sys.executable, "-c", lines], env={**os.environ}, start_new_session=True)
    try:
        assert s3.proxy.waiting.wait(120), "it uploads in parts"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        s3.proxy.released.set()
    s3.proxy.fault = ""
    assert team.objects() == []
    assert not team.machine("b")[0].fetch("compile/1", KEY, team.make).hit
    assert team.machine("c")[0].fetch("compile/1", KEY, team.make).hit


def test_a_large_entry_is_read_in_ranges(team: Team, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an artifact of many gigabytes is held in memory whole, or comes in the wrong order."""
    monkeypatch.setattr("compile_stage.core.shared_entries._RANGE_BYTES", 2**18)
    content = os.urandom(2**20 + 77)

    def make(into: Path) -> None:
        (into / "large").write_bytes(content)
        (into / "small").write_bytes(b"end")

    team.machine("a")[0].fetch("compile/1", KEY, make)
    before = s3.proxy.seen["passed"]
    held = team.machine("b")[0].read("compile/1", KEY)
    assert held is not None
    assert (Path(held.path) / "large").read_bytes() == content
    assert s3.proxy.seen["passed"] - before >= 4


# ------------------------------------------------------------------------------------------- what the policy says


@pytest.mark.parametrize(
    ("step", "reuse", "others", "own"),
    [
        ("compile/1", Reuse(verdicts="never", timings="never"), True, True),
        ("validate/8", Reuse(), True, True),
        ("validate/8", Reuse(verdicts="same-machine"), False, True),
        ("validate/8", Reuse(verdicts="never"), False, False),
        ("benchmark/6", Reuse(), False, True),
        ("benchmark/6", Reuse(timings="same-fingerprint"), True, True),
        ("benchmark/6", Reuse(timings="never"), False, False),
        ("not-known/1", Reuse(), False, True),
    ],
)
def test_results_of_other_machines_reach_as_far_as_the_policy_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, reuse: Reuse, others: bool, own: bool
) -> None:
    """Broken: times of another machine decide what is published here, or nothing is ever used again."""
    team = Team(f"file://{tmp_path}/shared", tmp_path, monkeypatch)
    team.machine("a")[0].fetch(step, KEY, team.make)
    assert (team.machine("b", reuse=reuse)[0].read(step, KEY) is not None) == others
    monkeypatch.setenv(MACHINE_VARIABLE, "a")
    shared = team.machine("a")[1]
    for cache in (Cache(tmp_path / "a", reuse=reuse), Cache(tmp_path / "empty", shared=shared, reuse=reuse)):
        assert (cache.read(step, KEY) is not None) == own, "of this machine, from its disk or from the bucket"


def test_an_entry_says_where_it_came_from_after_it_was_taken(on_disk: Team) -> None:
    """Broken: once a lax policy took an entry onto the disk, a strict one uses it too."""
    cache, _ = on_disk.machine("a")
    cache.fetch("benchmark/6", KEY, on_disk.make)
    assert on_disk.machine("b", reuse=Reuse(timings="same-fingerprint"))[0].read("benchmark/6", KEY) is not None
    strict = Cache(on_disk.folder / "b", reuse=Reuse())
    assert strict.read("benchmark/6", KEY) is None
    made = strict.fetch("benchmark/6", KEY, on_disk.make)
    assert not made.hit
    assert strict.read("benchmark/6", KEY) is not None


def test_an_unsigned_entry_is_not_used_where_signatures_are_demanded(on_disk: Team) -> None:
    """Broken: what nobody vouches for is published signed, since an earlier run had brought it onto the disk."""
    cache, _ = on_disk.machine("a", None)
    cache.fetch("tuning/1", KEY, on_disk.make)
    assert on_disk.machine("b", None)[0].read("tuning/1", KEY) is not None
    assert Cache(on_disk.folder / "b", reuse=Reuse(signed_only=True)).read("tuning/1", KEY) is None
    assert on_disk.machine("c", None, reuse=Reuse(signed_only=True))[0].read("tuning/1", KEY) is None


def test_nothing_is_put_there_that_every_reader_refuses(on_disk: Team) -> None:
    """Broken: without a key, each run uploads executable artifacts, and each other run warns of them."""
    cache, shared = on_disk.machine("a", None)
    cache.fetch("compile/1", KEY, on_disk.make)
    assert on_disk.objects() == []
    assert shared.counts["added"] == 0


def test_what_was_taken_is_not_put_back(on_disk: Team) -> None:
    """Broken: an entry of a stranger's bucket is sealed by this machine's key in another."""
    on_disk.machine("a", None)[0].fetch("tuning/1", KEY, on_disk.make)
    cache, _ = on_disk.machine("b", None)
    cache.read("tuning/1", KEY)
    signing = on_disk.machine("b")[1]
    cache.shared = signing
    cache._push("tuning/1", KEY, replace=False)
    assert signing.counts["added"] == 0


def test_every_step_has_its_group() -> None:
    """Broken: a new step is shared, or kept back, without anybody having thought of it."""
    import ast

    from compile_stage.core.reuse import MADE, TIMINGS, VERDICTS

    package = Path(shared_store.__file__).parents[1]
    named: set[str] = set()
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if ".cached(" not in text:
            continue
        tree = ast.parse(text)
        constants = {
            node.targets[0].id: node.value.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }  # fmt: skip
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "cached" and node.args):
                continue
            first = node.args[0]
            if isinstance(first, ast.Name):
                named.add(str(constants.get(first.id, "")))
            elif isinstance(first, ast.JoinedStr):
                named.add(str(getattr(first.values[0], "value", "")))
            elif isinstance(first, ast.Constant):
                named.add(str(first.value))
    steps = {name.partition("/")[0] for name in named}
    assert {"compile", "validate", "benchmark", "export-"} <= steps
    assert {step for step in steps if not step.startswith("export-")} <= MADE | VERDICTS | TIMINGS
    assert not MADE & VERDICTS | MADE & TIMINGS | VERDICTS & TIMINGS
