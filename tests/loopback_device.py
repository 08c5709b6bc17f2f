"""A device on loopback: sshd, started by the test as its own user, and a Python environment with the runtime alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from compile_stage.core.hosts import Host

SSHD = shutil.which("sshd") or next((p for p in ("/usr/sbin/sshd", "/usr/local/sbin/sshd") if Path(p).exists()), "")
ON_THE_DEVICE = ("numpy", "numpy.libs", "onnxruntime", "onnx", "ml_dtypes", "google", "typing_extensions.py")


@dataclass(frozen=True)
class Device:
    """Attributes:
    host: As a hosts file would give it.
    hosts: Such a file.
    folder: What `folder` is on the device.
    site: The packages of its Python.
    """

    host: Host
    hosts: Path
    folder: Path
    site: Path
    home: Path

    def left(self) -> list[str]:
        """What sessions left on the device."""
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []


@pytest.fixture(scope="session")
def device_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds numpy and ONNX Runtime (and onnx, which the original needs), as links, and nothing
    else."""
    home = tmp_path_factory.mktemp("device-python")
    venv.create(home, with_pip=False, symlinks=True)
    site = next(home.glob("lib/python*/site-packages"))
    for place in {Path(sysconfig.get_path("purelib")), *map(Path, sys.path)}:
        for name in ON_THE_DEVICE:
            for found in (place / name, *place.glob(f"{name.removesuffix('.py')}-*.dist-info")):
                if found.exists() and place.name == "site-packages" and not (site / found.name).exists():
                    (site / found.name).symlink_to(found)
    return home / "bin" / "python"


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """Its folder, with the client's key and configuration, and its port."""
    if not SSHD or not shutil.which("ssh"):
        pytest.skip("OpenSSH's server or client is not installed (openssh-server, openssh-client)")
    folder = tmp_path_factory.mktemp("sshd")
    folder.chmod(0o700)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    port = _free_port()
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host_key\nPidFile {folder}/pid\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nPermitRootLogin yes\nLogLevel VERBOSE\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(parents=True, exist_ok=True)  # its own chroot, which it asks for
    log = (folder / "log").open("wb")
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stdout=log, stderr=log)
    public = (folder / "host_key.pub").read_text().split()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {public[0]} {public[1]}\n")
    write_config(folder / "config", folder, port)
    try:
        for _ in range(200):
            found = subprocess.run(
                ["ssh", "-F", folder / "config", "-o", "BatchMode=yes", "device", "exit"],
                capture_output=True,
                text=True,
            )
            if found.returncode == 0 or "denied" in found.stderr or server.poll() is not None:
                break
            time.sleep(0.2)
        if found.returncode:
            pytest.skip(f"sshd does not work here as this user: {(folder / 'log').read_text()[-300:]} {found.stderr}")
        yield folder, port
    finally:
        server.terminate()
        server.wait()
        log.close()


def write_config(path: Path, folder: Path, port: int, known_hosts: str = "known_hosts", key: str = "user_key") -> Path:
    """ssh's configuration of a client, as a user would write it."""
    path.write_text(
        f"Host device\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder / key}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder / known_hosts}\n  GlobalKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    path.chmod(0o600)
    return path


@pytest.fixture
def device(sshd: tuple[Path, int], device_python: Path, tmp_path: Path) -> Device:
    folder, _ = sshd
    there = tmp_path / "on-device"
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text(
        f"hosts:\n  board: {{ssh: device, config: {folder / 'config'}, python: {device_python}, folder: {there}}}\n"
    )
    host = Host(
        name="board", transport="ssh", address="device", config=str(folder / "config"), python=str(device_python),
        folder=str(there),
    )  # fmt: skip
    site = next(device_python.parents[1].glob("lib/python*/site-packages"))
    return Device(host=host, hosts=hosts, folder=there, site=site, home=folder)


def stand_in_for_adb(folder: Path, monkeypatch: pytest.MonkeyPatch, python: Path) -> Host:
    """A program called adb, first on the path, that knows one phone, which is a shell of this machine."""
    programs = folder / "programs"
    programs.mkdir()
    known = '[ "$1 $2 $3 $4" = "-s phone1 shell -T" ] || { echo "adb: device \'$2\' not found" >&2; exit 1; }'
    (programs / "adb").write_text(f'#!/bin/sh\n{known}\nexec sh -c "$5"\n')
    (programs / "adb").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return Host(name="phone", transport="adb", address="phone1", python=str(python), folder=str(folder / "on-phone"))


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
