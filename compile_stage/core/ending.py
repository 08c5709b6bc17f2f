"""Which signals end a command in order: workers stopped, finished work kept."""

from __future__ import annotations

import signal


def ending_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, a scheduler's SIGTERM, and SIGHUP of a terminal that is closed, unless `nohup` has that ignored."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else []))
