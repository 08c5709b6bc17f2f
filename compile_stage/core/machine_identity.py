"""Which machine or container this is, among those that share a registry, a queue or a cluster."""

from __future__ import annotations

import platform
from pathlib import Path


def machine_identity() -> str:
    """Equal for processes with the same files. Containers of one machine have the same boot id and other names;
    machines made of one image may have the same name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text(encoding="utf-8").strip() if boot.exists() else ""
    return f"{platform.node()} {started}"
