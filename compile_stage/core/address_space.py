"""The limit on a process's addresses (`ulimit -v`), below which libraries fail in ways of their own, or hang."""

from __future__ import annotations

_LITTLE_BYTES = 4_000_000_000
"""PyTorch, ONNX Runtime and MLflow in one process map 1.1 GB and use a third of it, before there is a model."""


def limit_bytes() -> int | None:
    """How many bytes of addresses a process may have; None without a limit, and where none is known."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def said_in_mb(limit: int) -> str:
    """`a process may have 900 MB of addresses here (ulimit -v)`."""
    return f"a process may have {limit / 1e6:,.0f} MB of addresses here (ulimit -v)"


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
