"""What every plug-in is, and what a source and a backend open."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from compile_stage.core.capabilities import Capabilities
from compile_stage.core.tensors import Signature

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch


class Plugin(Protocol):
    """What every plug-in says of itself without importing its packages."""

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]]  # importable modules that must be there
    extra: ClassVar[str]  # the extra of compile-stage that brings them; "" when the base install does
    capabilities: ClassVar[Capabilities]  # of the kind that the port names


@runtime_checkable
class Session(Protocol):
    """A model ready to run. No call outside its context."""

    @property
    def signature(self) -> Signature:
        """Names, dtypes and shapes as the runtime itself reports them."""

    def run(self, batch: Batch) -> Batch:
        """All outputs by name. The arrays belong to the caller: a later `run` does not overwrite them."""
