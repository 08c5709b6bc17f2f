"""`compile-stage cache`: what changes the key, and what does not; listing, verifying and deleting entries."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factories import POLICY_TEXT
from s3_server import S3, s3_server

import compile_stage.cache_keys as cache_keys
from compile_stage import api
from compile_stage.cache_keys import CacheKey, cache_key, toolchains_key
from compile_stage.cli.main import main
from compile_stage.core import plugins
from compile_stage.core.cache import Cache
from compile_stage.core.cache_folder import cache_root
from compile_stage.core.errors import UsageError
from compile_stage.core.shared_cache import SecretSeal, SharedCache
from compile_stage.core.shared_store import Store, StoreError, open_store
from compile_stage.policy.load import load_policy
from compile_stage.registry.model_files import keep


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY_TEXT, encoding="utf-8")
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["cache", "key", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_key_is_alone_on_standard_output(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: KEY=$(compile-stage cache key ...) in a CI system's script is no key, or one that GitHub refuses."""
    for more in ([], ["--toolchains"]):
        key = printed(capsys, "-p", str(policy), *more)
        assert re.fullmatch(r"[\w.-]{20,400}\n", key)
        told: dict[str, Any] = json.loads(printed(capsys, "-p", str(policy), *more, "--json"))
        assert told["key"] == key.strip()
        for beginning in told["restore_keys"]:
            assert key.startswith(beginning)
            assert beginning.endswith("-")
        assert key.strip().rpartition("-")[0] + "-" == told["restore_keys"][0]


def test_what_decides_the_content_of_the_cache_is_in_its_key(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a job restores another policy's or another machine's cache as if it were its own, or never finds its."""
    first = cache_key(load_policy(policy))
    policy.write_text(f"# a comment\n{POLICY_TEXT}", encoding="utf-8")
    assert cache_key(load_policy(policy)) == first
    other = cache_key(load_policy(policy, sets=["performance.min_speedup=7"]))
    assert differing(first, other) == {"policy"}
    assert other.key.startswith(first.restore_keys[0])
    monkeypatch.setattr(cache_keys, "code_digest", lambda: "sha256:0123")
    assert differing(first, cache_key(load_policy(policy))) == {"packages"}


def test_a_toolchains_lock_is_in_both_keys(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: after `toolchain lock` jobs would restore the environments of the lock before."""
    monkeypatch.setenv("COMPILE_STAGE_TOOLCHAINS", str(tmp_path / "toolchains"))
    wanted = load_policy(policy, sets=["targets.cpu-server.backends=[iree]"])
    before = toolchains_key(wanted), cache_key(wanted)
    assert {name for name in before[0].parts if name.startswith("lock of")} >= {"lock of iree", "lock of tensorflow"}
    assert "lock of tvm" not in before[0].parts
    shipped = plugins.lock_of("iree")
    assert shipped is not None
    own = tmp_path / "toolchains" / "locks" / "iree.txt"
    own.parent.mkdir(parents=True)
    shutil.copy(shipped, own)
    assert (toolchains_key(wanted), cache_key(wanted)) == before
    own.write_text("another==1.0\n", encoding="utf-8")
    assert differing(before[0], toolchains_key(wanted)) == {"locks", "lock of iree"}
    assert differing(before[1], cache_key(wanted)) == {"packages"}
    monkeypatch.setenv("COMPILE_STAGE_TOOLCHAINS", str(tmp_path / "elsewhere"))
    assert "python" in differing(before[0], toolchains_key(wanted))  # an environment can't be moved


def differing(one: CacheKey, other: CacheKey) -> set[str]:
    """Names of the parts in which two keys differ; the keys differ as their parts do."""
    found = {name for name in one.parts | other.parts if one.parts.get(name) != other.parts.get(name)}
    assert bool(found) == (one.key != other.key)
    return found


# -------------------------------------------------------------------------------------------- ls, verify and gc


@pytest.fixture
def two_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's cache and a shared one, with the same three entries; returns the folder of the latter."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    url = f"file://{tmp_path}/shared"
    monkeypatch.setenv("COMPILE_STAGE_CACHE_KEY", str(secret))
    monkeypatch.setenv("COMPILE_STAGE_SHARED_CACHE", url)
    cache = Cache(cache_root(), secret.read_bytes(), shared=SharedCache(open_store(url), SecretSeal(b"s" * 32)))
    for step, size in (("compile/1", 2000), ("compile/1", 3000), ("validate/8", 10)):

        def make(folder: Path, size: int = size) -> int:
            (folder / "file").write_bytes(bytes(size))
            return size

        cache.fetch(step, {"size": size}, make)
    return tmp_path / "shared"


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["cache", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("where", [[], ["--shared"]])
def test_entries_are_listed_by_step(two_caches: Path, where: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: nobody can say what fills the cache."""
    assert ended("ls", *where) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^compile +2 +0.00\d MB", shown, re.MULTILINE)
    assert re.search(r"^all +3 ", shown, re.MULTILINE)
    assert max(map(len, shown.splitlines()[1:])) <= 80
    assert ended("ls", *where, "--json") == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert sorted(entry["step"] for entry in entries) == ["compile", "compile", "validate"]
    assert all(entry["bytes"] > 0 and time.time() - 600 < entry["used"] <= time.time() + 60 for entry in entries)
    assert {entry["seal"][:4] for entry in entries} == ({"mac-"} if where else {""})


@pytest.mark.parametrize("where", [[], ["--shared"]])
def test_a_damaged_entry_is_found_and_deleted(
    two_caches: Path, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: damage in a cache is noticed by the run that needs the entry, and stays there."""
    assert ended("verify", *where) == 0
    assert "3 entries, 0 do not hold" in capsys.readouterr().out
    if where:
        damaged = sorted(two_caches.rglob("compile/*/*"))[0]
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    else:
        damaged = sorted((cache_root() / "compile").glob("??/*/files/file"))[0]
        damaged.write_bytes(b"other")
    assert ended("verify", *where, "--json") == 7
    found = json.loads(capsys.readouterr().out)
    assert (found["checked"], len(found["refused"])) == (3, 1)
    assert all("compile/" in path and reason for path, reason in found["refused"].items())
    assert ended("verify", *where, "--remove") == 7
    assert "1 do not hold, and were deleted" in capsys.readouterr().out
    assert ended("verify", *where) == 0
    assert "2 entries, 0 do not hold" in capsys.readouterr().out


def test_a_damaged_source_model_is_found_and_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: `cache verify` says that all holds where a fetched model is damaged, which `cache ls` counts."""
    fetched = []
    for weights in (b"one", b"two"):

        def fill(part: Path, weights: bytes = weights) -> Path:
            (part / "MLmodel").write_text("flavors: {onnx: {}}\n")
            (part / "model.onnx").write_bytes(weights)
            return part

        fetched.append(keep(cache_root() / "sources", "models:/m/1", fill))
    assert ended("verify") == 0
    assert "2 entries, 0 do not hold" in capsys.readouterr().out
    (fetched[0] / "model.onnx").write_bytes(b"other")
    assert ended("verify", "--remove") == 7
    said = capsys.readouterr().out
    assert f"sources/{fetched[0].name}\n  its files are not those that its name is the digest of" in said
    assert ended("verify") == 0
    assert "0 do not hold" in capsys.readouterr().out
    assert not fetched[0].exists()


@pytest.mark.parametrize("where", [[], ["--shared"]])
def test_the_oldest_entries_are_deleted(
    two_caches: Path, where: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a bucket grows for ever, or the newest entries go first."""
    days = {"compile": 40, "validate": 5}
    found = two_caches.rglob("??/*") if where else cache_root().glob("*/??/*")
    for entry in [path for path in found if len(path.name) == 64 and (path.is_file() or not where)]:
        when = time.time() - days[entry.parent.parent.name] * 24 * 3600
        os.utime(entry, (when, when))
    assert ended("gc", *where) == 2
    assert "--max-age" in capsys.readouterr().err
    assert ended("gc", *where, "--max-age", "30", "--dry-run") == 0
    assert "2 entries would be deleted" in capsys.readouterr().out
    if where:
        monkeypatch.setenv("COMPILE_STAGE_SHARED_CACHE_MODE", "read")
        assert ended("gc", *where, "--max-age", "30") == 2
        monkeypatch.delenv("COMPILE_STAGE_SHARED_CACHE_MODE")
    assert ended("gc", *where, "--max-age", "30") == 0
    assert ended("ls", *where, "--json") == 0
    left = json.loads(capsys.readouterr().out.partition("deleted\n")[2])["entries"]
    assert [entry["step"] for entry in left] == ["validate"]
    assert ended("gc", *where, "--max-gb", "0") == 0
    assert "1 entries deleted" in capsys.readouterr().out


@pytest.mark.parametrize("where", [[], ["--shared"]])
def test_an_entry_that_goes_while_all_are_read_is_not_damaged(
    two_caches: Path, where: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: `cache verify` beside a `gc`, or beside a run that makes room, ends with 7 though nothing is damaged."""
    held: Any = SharedCache if where else Cache
    real, gone = held.refuse, []

    def deleted_first(self: Any, entry: Any, *rest: Any) -> str | None:
        if not gone:
            self.store.delete(entry) if where else self.delete(entry, lambda: "it is old")
            gone.append(entry)
        reason: str | None = real(self, entry, *rest)
        return reason

    monkeypatch.setattr(held, "refuse", deleted_first)
    assert ended("verify", *where) == 0
    assert "2 entries, 0 do not hold" in capsys.readouterr().out


def test_a_shared_cache_that_does_not_answer_says_what_to_check(
    two_caches: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: with an account that has expired, `cache ls --shared` says no word on what to do."""

    def refuses(*_: object) -> None:
        raise StoreError("The provided token has expired")

    monkeypatch.setattr(Store, "list", refuses)
    assert ended("ls", "--shared") == 2
    said = capsys.readouterr().err
    assert "token has expired" in said
    assert "fix: check its address" in said


def test_a_shared_cache_that_is_not_named_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: `cache gc --shared` deletes the local cache, or says nothing."""
    monkeypatch.delenv("COMPILE_STAGE_SHARED_CACHE", raising=False)
    assert ended("ls", "--shared") == 2
    assert "COMPILE_STAGE_SHARED_CACHE" in capsys.readouterr().err


@pytest.mark.parametrize("bound", [-1.0, float("nan")])
def test_a_bound_that_is_no_number_from_0_deletes_nothing(bound: float) -> None:
    """Broken: a script whose division went wrong empties the shared cache: nothing is larger than nan."""
    with pytest.raises(UsageError, match="a bound is negative, or no number"):
        api.collect_cache(max_gb=bound)


@pytest.fixture
def in_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[S3, list[str]]]:
    """A shared cache of six entries in a bucket; yields the server and the paths of the entries."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    monkeypatch.setenv("COMPILE_STAGE_CACHE_KEY", str(secret))
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{server.bucket()}/team"
        monkeypatch.setenv("COMPILE_STAGE_SHARED_CACHE", url)
        shared = SharedCache(open_store(url), SecretSeal(b"s" * 32))
        cache = Cache(cache_root(), secret.read_bytes(), shared=shared)
        for size in range(6):

            def make(folder: Path, size: int = size) -> int:
                (folder / "file").write_bytes(bytes(1000 + size))
                return size

            cache.fetch("compile/1", {"size": size}, make)
        yield server, [found.path for found in shared.store.list()]


def test_a_log_in_page_in_place_of_entries_deletes_none(
    in_s3: tuple[S3, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: with an expired session at a gateway, `cache verify --shared --remove` deletes every whole entry."""
    server, entries = in_s3
    server.proxy.fault, server.proxy.of = "log-in page", "/team/v1/"  # the list of them is answered
    for page in (entries[0], "/team/v1/"):  # in place of one, and of all
        server.proxy.of = page
        assert ended("verify", "--shared", "--remove") == 2
        said = capsys.readouterr().err
        assert re.search(r"its answer for v1/\S+ has another size than it lists", said), said
    server.proxy.fault = ""
    assert ended("verify", "--shared") == 0
    assert "6 entries, 0 do not hold" in capsys.readouterr().out


def test_entries_that_hold_the_second_time_are_not_deleted(
    in_s3: tuple[S3, list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: one byte that was changed on the way, once, deletes a whole entry."""
    real, asked = SharedCache.refuse, []

    def refused_once(self: Any, path: str, check: Any) -> str | None:
        asked.append(path)
        return "its file file is not what its header says" if asked == [path] else real(self, path, check)

    monkeypatch.setattr(SharedCache, "refuse", refused_once)
    assert ended("verify", "--shared", "--remove") == 0
    assert ended("verify", "--shared") == 0
    assert "6 entries, 0 do not hold" in capsys.readouterr().out


def test_most_of_a_shared_cache_is_not_deleted(
    in_s3: tuple[S3, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a proxy that changes answers and keeps their size, or a trust file that went wrong, empties the cache."""
    (tmp_path / "other").write_text("not an entry")
    store = open_store(os.environ["COMPILE_STAGE_SHARED_CACHE"])
    for path in in_s3[1][:4]:
        store.write(tmp_path / "other", path, replace=True)
    assert ended("verify", "--shared", "--remove") == 7
    assert "6 entries, 4 do not hold, and were deleted" in capsys.readouterr().out
    for path in in_s3[1][:5]:
        store.write(tmp_path / "other", path, replace=True)
    assert ended("verify", "--shared", "--remove") == 2
    said = capsys.readouterr().err
    assert "5 of 6 entries do not hold, the first since it is no entry; nothing was deleted" in said
    assert "cache gc --shared --max-gb 0" in said
    assert ended("verify", "--shared") == 7
    assert ended("gc", "--shared", "--max-gb", "0") == 0
    assert ended("verify", "--shared") == 0
    assert "0 entries, 0 do not hold" in capsys.readouterr().out


def test_another_secret_does_not_empty_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: with another secret than they were made with, `cache verify --remove` deletes every whole entry."""
    cache = Cache(cache_root(), b"s" * 32)
    for number in range(6):
        cache.fetch("compile/1", {"number": number}, lambda folder: (folder / "file").write_bytes(b"whole"))
    monkeypatch.setenv("COMPILE_STAGE_CACHE_KEY", str(tmp_path / "secret"))
    (tmp_path / "secret").write_bytes(b"t" * 32)
    assert ended("verify", "--remove") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "6 of 6 entries do not hold, the first since its MAC is not one of this cache's secret" in said
    assert "nothing was deleted" in said
    assert "COMPILE_STAGE_CACHE_KEY" in said
    (tmp_path / "secret").write_bytes(b"s" * 32)
    assert ended("verify", "--remove") == 0
    assert "6 entries, 0 do not hold" in capsys.readouterr().out


def test_one_bad_read_deletes_no_entry_of_this_machine(
    two_caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a disk or a network file system that answers wrongly once has `cache verify --remove` delete whole
    entries."""
    honest, bad = Cache.refuse, {"reads": 3}

    def refuse(self: Cache, entry: Path) -> str | None:
        if bad["reads"] > 0:
            bad["reads"] -= 1
            return "its files were changed"
        return honest(self, entry)

    monkeypatch.setattr(Cache, "refuse", refuse)
    assert ended("verify", "--remove") == 0
    assert "3 entries, 0 do not hold" in capsys.readouterr().out
    assert ended("verify", "--json") == 0
    assert json.loads(capsys.readouterr().out)["checked"] == 3


def test_an_entry_that_stays_is_not_said_to_be_deleted(
    two_caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: `cache verify --remove` says that another user's entry was deleted, which is there as before."""
    damaged = next(cache_root().rglob("entry.json"))
    damaged.write_text("{", encoding="utf-8")
    monkeypatch.setattr("compile_stage.core.cache.shutil.rmtree", lambda *_, **__: None)  # tests run as root too
    assert ended("verify", "--remove") == 2
    assert str(damaged.parent) in capsys.readouterr().err


def test_too_few_open_files_are_no_damage(
    two_caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: under a small `ulimit -n`, `cache verify --remove` takes good entries for damaged and deletes them."""

    def full(_: Path) -> dict[str, Any]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("compile_stage.core.cache.read_json_object", full)
        assert ended("verify", "--remove") == 2
    assert "ulimit -n" in capsys.readouterr().err
    assert ended("verify") == 0
