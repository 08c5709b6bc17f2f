"""A session with a device: what is sent arrives, nothing is left, and each trouble has its own words. Over a real sshd
where ssh matters, else over a stand-in for adb, which starts a shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from loopback_device import Device, stand_in_for_adb, write_config

from compile_stage.core.environment import hardware
from compile_stage.core.errors import CompileStageError, DeviceError, IntegrityError
from compile_stage.core.hosts import Host
from compile_stage.devices.link import Link, open_link
from compile_stage.devices.validator import build_validator

ROOT = Path(__file__).parents[2]


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_python: Path) -> Host:
    """What the stand-in for adb reaches: a shell of this machine."""
    return stand_in_for_adb(tmp_path, monkeypatch, device_python)


@pytest.fixture
def wrapped(tmp_path: Path, device_python: Path) -> Callable[[str], str]:
    """A program that is called as the device's Python, and runs these lines of a shell before it; `$PYTHON` is it."""

    def write(lines: str) -> str:
        path = tmp_path / "python-of-the-device"
        path.write_text(f'#!/bin/sh\nPYTHON={device_python}\n{lines}\nexec $PYTHON "$@"\n')
        path.chmod(0o755)
        return str(path)

    return write


def agents(folder: str) -> list[psutil.Process]:
    """The processes of sessions in a folder, the agent first."""
    mine = [p for p in psutil.process_iter(["cmdline", "open_files"]) if "-c" in (p.info["cmdline"] or [])]
    return [p for p in mine if any(f.path.startswith(folder) for f in (p.info["open_files"] or []))]


def wait_until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.1)


def test_a_session_reads_the_hardware_takes_files_and_leaves_nothing(device: Device, tmp_path: Path) -> None:
    """Broken: a device would be taken for another, get other bytes, or be left with our files; or MLflow would be
    needed there."""
    sent = tmp_path / "sent"
    sent.write_bytes(bytes(range(256)) * 5000)
    with open_link(device.host, build_validator()) as link:
        assert link.hardware == hardware()
        link.put(sent, "in/1/a/b.bin")
        link.fetch("in/1", tmp_path / "back")
        assert (tmp_path / "back" / "a" / "b.bin").read_bytes() == sent.read_bytes()
        found = link.request("describe", modules=["numpy", "mlflow", "scipy", "compile_stage.cli"], distributions=[])
        assert found["absent"] == ["mlflow", "scipy", "compile_stage.cli"]
        assert len(device.left()) == 2
        for path in ("../beside", "in/../../beside", "/etc/hosts", "in//x", "C:/x", ""):
            with pytest.raises(IntegrityError, match="no path below the session"):
                link.put(sent, path)
            with pytest.raises(IntegrityError, match="no path below the session"):
                link.request("remove", path=path)
    assert device.left() == []


@pytest.mark.parametrize(
    ("change", "says", "fix"),
    [
        ("known_hosts", "its host key is not known here", "ssh device once by hand"),
        ("changed_key", "its host key is another one than before", "ssh-keygen -R device"),
        ("key", "it refuses our key", "ssh-copy-id device"),
        ("name", "ssh finds no machine called no..such.invalid", "`ssh` of board in the hosts file"),
        ("port", "nothing listens there", "port"),
        ("config", "ssh refuses its configuration", "the file that it names"),
    ],
)
def test_ssh_says_in_its_way_why_it_does_not_connect(
    device: Device, sshd: tuple[Path, int], tmp_path: Path, change: str, says: str, fix: str, free_port: int
) -> None:
    """Broken: a strange host would be trusted, a question would hang, or a person would not know what to do."""
    folder, port = sshd
    host = device.host
    if change == "name":
        host = replace(host, address="no..such.invalid")  # no name server is asked
    elif change == "port":
        host = replace(host, port=free_port)
    elif change == "config":
        (tmp_path / "config").write_text("NoSuchOption yes\n")
        host = replace(host, config=str(tmp_path / "config"))
    else:
        stranger = tmp_path / "stranger"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)], check=True)
        kind, key = (tmp_path / "stranger.pub").read_text().split()[:2]
        (tmp_path / "others").write_text(f"[127.0.0.1]:{port} {kind} {key}\n" if change == "changed_key" else "")
        known = "known_hosts" if change == "key" else str(tmp_path / "others")
        key = str(stranger) if change == "key" else "user_key"
        host = replace(host, config=str(write_config(tmp_path / "config", folder, port, known, key)))
    with pytest.raises(DeviceError, match=says) as raised, open_link(host, b""):
        pass
    assert fix in raised.value.fix
    assert raised.value.where == "board"


@pytest.mark.parametrize(
    ("lines", "says", "fix"),
    [
        ("exec /no/such/python", "it has no Python called", "name it as `python`"),
        ('OLD="import sys;sys.version_info=(3,9,2);"; exec $PYTHON -u -c "$OLD$3"', "its Python is 3.9", "`python`"),
        ("ulimit -f 0", "it can't take the validator: .*File too large", "free space there"),
        ("exit 7", "adb ended with code 7 and said nothing", ""),
    ],
)
def test_a_python_that_can_not_do_it_says_why(
    phone: Host, wrapped: Callable[[str], str], lines: str, says: str, fix: str
) -> None:
    """Broken: whoever has a bare board would see a traceback of another machine, and files would stay there."""
    refused = pytest.raises(DeviceError, match=says)
    with refused as raised, open_link(replace(phone, python=wrapped(lines)), build_validator()):
        pass
    assert fix in raised.value.fix
    assert not any(Path(phone.folder).glob("*"))


def test_what_a_shell_prints_first_is_no_answer_and_a_full_disk_is_named(
    phone: Host, wrapped: Callable[[str], str], tmp_path: Path
) -> None:
    """Broken: a greeting would break the protocol, or an artifact would arrive in part."""
    sent = tmp_path / "sent"
    sent.write_bytes(os.urandom(3_000_000))
    noisy = replace(phone, python=wrapped('echo "Welcome to the board"; ulimit -f 2000'))
    with open_link(noisy, build_validator()) as link:
        with pytest.raises(CompileStageError, match="File too large"):
            link.put(sent, "in/large")
        assert link.request("machine")["at_s"] > 0  # what follows is understood
    assert not any(Path(phone.folder).glob("*"))


def test_another_serial_number_is_refused_by_adb(phone: Host) -> None:
    """Broken: a phone that is not there would be a crash."""
    with pytest.raises(DeviceError, match="adb has no such device"), open_link(replace(phone, address="other"), b""):
        pass


def test_a_device_that_hangs_is_let_go(phone: Host) -> None:
    """Broken: a hung board would hold its caller for ever."""
    with open_link(phone, build_validator()) as link:
        (agent,) = agents(phone.folder)
        agent.suspend()
        with pytest.raises(DeviceError, match="took longer than 1 s"):
            link.request("machine", within_s=1)
    assert any(Path(phone.folder).glob("session-*"))
    with open_link(phone, build_validator()) as link:
        assert link.hello["removed"] == 1  # what a killed agent left goes with the next contact
    assert not any(Path(phone.folder).glob("*"))


def test_nothing_is_left_on_a_device_whose_sender_was_killed(device: Device) -> None:
    """Broken: each run that CI kills would leave a model on the board."""
    code = (
        "import time\nfrom compile_stage.core.hosts import Host\n"
        "from compile_stage.devices.link import open_link\n"
        "from compile_stage.devices.validator import build_validator\n"
        f"with open_link({device.host!r}, build_validator()) as link:\n"
        "    link.request('start', worker='w', threads=1)\n    print('there', flush=True)\n    time.sleep(600)\n"
    )
    sender = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True)
    assert sender.stdout is not None
    assert sender.stdout.readline() == b"there\n"
    assert device.left()
    sender.send_signal(signal.SIGKILL)
    sender.wait()
    sender.stdout.close()
    wait_until(lambda: device.left() == [])


def test_a_lost_connection_is_told(device: Device) -> None:
    """Broken: a board that was switched off would be a bug of ours, or a verdict."""
    with open_link(device.host, build_validator()) as link:
        kill_client(link)
        with pytest.raises(DeviceError, match="the connection was lost"):
            link.request("machine")
    wait_until(lambda: device.left() == [])


def kill_client(link: Link) -> None:
    link._kill()
    link._process.wait()
