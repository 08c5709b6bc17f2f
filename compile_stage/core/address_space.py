"""Limits on a process's addresses (`ulimit -v`, `ulimit -d`), below which libraries fail in their own ways, or hang."""

from __future__ import annotations

from compile_stage.core.errors import UsageError

_LITTLE_BYTES = 4_000_000_000
"""PyTorch, ONNX Runtime and MLflow in one process map 1.1 GB and use a third of it, before there is a model."""

_LEAST_BYTES = {"ulimit -v": 600_000_000, "ulimit -d": 350_000_000}
"""Below them OpenBLAS, which NumPy loads, waits for ever in a call that no signal ends (on two cores with 410 to
512 MB, and 307 MB), or SciPy and ONNX Runtime can't be imported (594 and 348 MB). With 819 and 410 MB a small
scikit-learn model is planned. More cores take more."""


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


def demand_enough() -> None:
    """Raise UsageError below the limits at which no library that the stage needs can be loaded."""
    for name, limit in _limits().items():
        if limit < (least := _LEAST_BYTES[name]):
            raise UsageError(
                f"a process may have {limit / 1e6:,.0f} MB of addresses here ({name}); below {least / 1e6:,.0f} MB "
                "libraries such as NumPy can't be loaded, or wait for ever",
                fix=f"{name} unlimited; a control group limits what is used",
            )


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
