"""A compiler in a process of its own that somebody else ends: the kernel where memory runs out, or `kill`."""

from __future__ import annotations

from compile_stage.core.errors import NothingCompiledError


class CompilerKilledError(NothingCompiledError):
    """It was killed, and killed again when it was run once more. That says nothing of what it compiled."""

    def __init__(self, compiler: str) -> None:
        super().__init__(
            f"{compiler} was killed, and killed again when it was run once more: memory may have run out",
            fix="allow more memory (budget.job_memory_mb, the container's limit), or find out who ends its processes",
        )
