"""How a program is started on a device with pipes to it: over OpenSSH's client, or over adb. And what their messages
mean."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from typing import Literal, NamedTuple

from compile_stage.core.errors import DeviceError
from compile_stage.core.hosts import Host

START = "import sys;i=getattr(sys.stdin,'buffer',sys.stdin);exec(i.read(int(i.readline())))"
"""What the device's Python is given on its command line: without a character that a shell of any system would read
otherwise within double quotes. All else follows on standard input."""

# The user's own configuration decides where and as whom; these make sure that it never asks, and notices a dead line.
_SSH = (
    "-T", "-x", "-a", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15",
    "-o", "ServerAliveCountMax=4", "-o", "ClearAllForwardings=yes", "-o", "RequestTTY=no",
)  # fmt: skip


class Known(NamedTuple):
    """A message of a client, and what it means.

    Attributes:
        pattern: Searched in what the client and the device's shell wrote, whatever the case.
    """

    pattern: str
    problem: str
    fix: str


_MESSAGES: Mapping[Literal["ssh", "adb"], tuple[Known, ...]] = {
    "ssh": (
        Known(
            "remote host identification has changed",
            "its host key is another one than before",
            "find out why; if it was made anew, ssh-keygen -R {address}, and connect once by hand",
        ),
        Known(
            "host key verification failed|no .* host key is known",
            "its host key is not known here",
            "ssh {address} once by hand, compare the fingerprint that it shows, and accept it",
        ),
        Known(
            r"permission denied \(|too many authentication failures",
            "it refuses our key",
            "ssh-copy-id {address}, or name the key for it in ~/.ssh/config; ssh -o BatchMode=yes {address} must work",
        ),
        Known(
            "could not resolve hostname|name or service not known",
            "ssh finds no machine called {address}",
            "give its address as `ssh` of {name} in the hosts file (hosts.yaml, or --hosts FILE), or in ~/.ssh/config",
        ),
        Known("connection refused", "nothing listens there: is sshd running, on that port?", "look at its `port`"),
        Known(
            "connection timed out|no route to host|network is unreachable|operation timed out",
            "it does not answer",
            "is it on, and in this network? ssh {address} tries the same",
        ),
        Known(
            "bad configuration option|can't open user config|bad owner or permissions",
            "ssh refuses its configuration",
            "look at the file that it names",
        ),
    ),
    "adb": (
        Known("device unauthorized", "it does not trust this computer", "accept the key on its screen"),
        Known("device offline", "it is offline", "adb reconnect"),
        Known(
            "device .* not found|no devices/emulators|more than one device",
            "adb has no such device",
            "adb devices lists those that it has; their serial number is `adb` in the hosts file",
        ),
    ),
}
_NO_PYTHON = Known(
    "not found|no such file or directory|is not recognized|inaccessible or not found|not executable",
    "it has no Python called {python}",
    "install Python 3.11 or newer there, or name it as `python` in the hosts file",
)


def command_of(host: Host) -> list[str]:
    """The command, with its arguments, whose pipes are those of `START` on the device.

    Raises:
        DeviceError: The client is not installed here.
    """
    if shutil.which(host.transport) is None:
        package = "OpenSSH's client" if host.transport == "ssh" else "Android's platform tools"
        raise DeviceError(f"{host.transport} is not installed here", fix=f"install {package}", where=host.name)
    python = f'"{host.python}"' if " " in host.python else host.python
    there = f'{python} -u -c "{START}"'
    if host.transport == "adb":
        return ["adb", "-s", host.address, "shell", "-T", there]
    options = [*_SSH]
    options += ["-F", host.config] if host.config else []
    options += ["-p", str(host.port)] if host.port else []
    return ["ssh", *options, "--", host.address, there]


def explain(host: Host, code: int | None, said: str) -> DeviceError:
    """What it means that the client ended so before the device's agent spoke.

    Args:
        code: Its exit code.
        said: What it, and the device's shell, wrote.
    """
    of_client = host.transport == "adb" or code == 255
    known = [*(_MESSAGES[host.transport] if of_client else ()), *(() if code == 255 else (_NO_PYTHON,))]
    for message in known:
        if re.search(message.pattern, said, re.IGNORECASE):
            words = {"name": host.name, "address": host.address, "python": host.python}
            return DeviceError(message.problem.format(**words), fix=message.fix.format(**words), where=host.name)
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    return DeviceError(
        f"{host.transport} ended with code {code}" + (f": {last[:300]}" if last else " and said nothing"),
        fix=f"try by hand: ssh {host.address} {host.python} --version" if host.transport == "ssh" else "",
        where=host.name,
    )
