"""Machines that are reached from here: what a hosts file says of one (`policy.hosts` reads it)."""

from __future__ import annotations

from typing import Literal

from compile_stage.core.records.base import record

BaselineKind = Literal["original", "fp32", "none"]


@record
class Host:
    """A device, and how it is reached.

    Attributes:
        name: As the command line names it.
        transport: `ssh`, by the system's OpenSSH client, or `adb`.
        address: What `ssh` takes (`board`, `pi@board.lan`), or adb's serial number.
        port: ssh's; 0 for what the user's configuration says.
        config: A configuration file of ssh in place of the user's own; empty for that.
        python: The interpreter on the device.
        folder: Where files go on the device; empty for `.cache/compile-stage-device` in its home folder.
        baseline: What a speedup is over: the original, run on the device; the source's graph in fp32 on ONNX Runtime
            there; or nothing, so that a gate on the speedup is not run.
    """

    name: str
    transport: Literal["ssh", "adb"]
    address: str
    port: int = 0
    config: str = ""
    python: str = "python3"
    folder: str = ""
    baseline: BaselineKind = "original"
