"""What a device's Python runs first, sent to its standard input: it receives the validator, and starts it.

It must be readable by Python 3.6 and later, so that an old one says so: no `match`, no `X | None`, nothing of ours. The
last line is run as it is read.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from typing import Any

UNLOCKED_S = 3600
MARK = "compile-stage-device "


def say(message: Any) -> None:
    """One line that the sender looks for, whatever the device's shell printed before."""
    sys.stdout.write("\n" + MARK + json.dumps(message) + "\n")
    sys.stdout.flush()


def refuse(problem: str, fix: str = "") -> None:
    """Say why it can't go on, and end."""
    say({"id": 0, "error": {"class": "DeviceError", "problem": problem, "fix": fix}})
    sys.exit(3)


def lock(path: str) -> Any:
    """The open file, where its lock could be had; None where another has it, or there are no locks here."""
    file = open(path, "a+b")
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        file.close()
        return None
    return file


def remove_leftovers(base: str) -> int:
    """Remove the sessions whose agents ended without doing so; returns how many."""
    removed = 0
    for name in sorted(os.listdir(base)):
        path = os.path.join(base, name)
        if not name.startswith("session-"):
            continue
        if not name.endswith(".lock"):
            if not os.path.exists(path + ".lock") and time.time() - os.stat(path).st_mtime > UNLOCKED_S:
                shutil.rmtree(path, ignore_errors=True)  # its owner ended before it had its lock
            continue
        held = lock(path)
        if held is None:
            continue
        shutil.rmtree(path[: -len(".lock")], ignore_errors=True)
        if sys.platform == "win32":  # an open file can't be removed there
            held.close()
        try:
            os.remove(path)
        except OSError:
            pass
        held.close()
        removed += 1
    return removed


def prepare(base: str) -> None:
    """The folder of all sessions, which nobody else may write into."""
    if not os.path.isdir(base):
        os.makedirs(base, 0o700)
    seen = os.stat(base)
    if sys.platform != "win32" and (seen.st_uid != os.getuid() or seen.st_mode & 0o022):
        refuse("others may write into {}".format(base), "chmod 700 it, or name another `folder` in the hosts file")


def receive(size: int, path: str, digest: str) -> None:
    """The validator, from standard input into a file. All of it is read, whatever goes wrong."""
    whole, chunks = hashlib.sha256(), []
    while size:
        chunk = sys.stdin.buffer.read(min(size, 1 << 20))
        if not chunk:
            sys.exit(4)
        size -= len(chunk)
        whole.update(chunk)
        chunks.append(chunk)
    if whole.hexdigest() != digest:
        refuse("the validator did not arrive as it was sent")
    try:
        with open(path, "wb") as file:
            file.writelines(chunks)
    except OSError as error:
        refuse("it can't take the validator: {}".format(error), "free space there, or name another `folder`")


def main() -> None:
    """Receive and start it; nothing is left where that fails."""
    asked = json.loads(sys.stdin.buffer.readline().decode("utf-8"))
    if sys.version_info < (3, 11):
        found = "{}.{} ({})".format(sys.version_info[0], sys.version_info[1], sys.executable)
        refuse("its Python is {}, and 3.11 is needed".format(found), "name another as `python` in the hosts file")
    base = os.path.abspath(os.path.expanduser(asked["folder"] or "~/.cache/compile-stage-device"))
    try:
        prepare(base)
        removed = remove_leftovers(base)
        folder = tempfile.mkdtemp(prefix="session-", dir=base)
    except OSError as error:
        refuse("it can't make a folder in {}: {}".format(base, error), "free space there, or name another `folder`")
    held = lock(folder + ".lock")
    if not os.path.isdir(folder):  # another session had the lock first, and took the folder for a leftover
        refuse("another session began at this very moment", "try again")
    archive = os.path.join(folder, "validator.pyz")
    try:
        receive(asked["size"], archive, asked["digest"])
        here = ("", os.getcwd())
        sys.path[:] = [archive] + [entry for entry in sys.path if entry not in here]
        from compile_stage.devices.agent import serve
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            held.close()
        os.remove(folder + ".lock")
        raise
    serve(folder, held, removed, MARK)


if __name__ == "__main__":
    main()
