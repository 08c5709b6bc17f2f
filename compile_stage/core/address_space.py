"""Limits on a process's addresses (`ulimit -v`, `ulimit -d`), below which libraries fail in their own ways, or hang."""

from __future__ import annotations

_LITTLE_BYTES = 4_000_000_000
"""PyTorch, ONNX Runtime and MLflow in one process map 1.1 GB and use a third of it, before there is a model."""


def limit_bytes() -> int | None:
    """How many bytes of addresses a process may have; None without a limit, and where none is known."""
    return min(_limits().values(), default=None)


def said_in_mb(limit: int) -> str:
    """`a process may have 900 MB of addresses here (ulimit -v)`."""
    return f"a process may have {limit / 1e6:,.0f} MB of addresses here ({option()})"


def option() -> str:
    """The shell's command for the lowest limit: `ulimit -v`, or `ulimit -d`, which counts what can be written."""
    limits = _limits()
    return min(limits, key=limits.__getitem__, default="ulimit -v")


def _limits() -> dict[str, int]:
    try:
        import resource  # not on Windows
    except ImportError:
        return {}
    found = {
        "ulimit -v": resource.getrlimit(resource.RLIMIT_AS)[0],
        "ulimit -d": resource.getrlimit(resource.RLIMIT_DATA)[0],
    }
    return {name: limit for name, limit in found.items() if limit != resource.RLIM_INFINITY}


def warning() -> str:
    """What to say before anything runs; empty where there is no limit, or a high one."""
    limit = limit_bytes()
    if limit is None or limit >= _LITTLE_BYTES:
        return ""
    enough = f"{_LITTLE_BYTES / 1e6:,.0f} MB"
    return (
        f"{said_in_mb(limit)}: libraries map more than they use, and below {enough} they may fail, or wait for ever, "
        "as OpenBLAS does. A control group limits what is used"
    )
