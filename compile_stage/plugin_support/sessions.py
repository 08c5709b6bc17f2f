"""What sessions and compilers of several backends do alike."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compile_stage.core.errors import UsageError

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch, Signature


def demand_call(signature: Signature, batch: Batch, *, closed: bool) -> None:
    """The first line of `Session.run`: the session is open, and the batch is what the signature asks for.

    Raises:
        UsageError: One of them is not so.
    """
    if closed:
        raise UsageError("this session is closed; call it inside its context")
    if (reason := signature.refuse(batch)) is not None:
        raise UsageError(reason)


def in_place_or_copied(array: Array) -> Array:
    """The array itself, where a runtime's tensor can lie in its memory; else a copy in C order, which can be written
    to."""
    if not (array.flags.c_contiguous and array.flags.writeable):
        return array.copy("C")
    # NumPy calls an array contiguous whatever the stride of an axis of one element is: of one reversed row it is
    # negative, which PyTorch refuses.
    odd = 1 in array.shape and any(stride < 0 or stride % array.itemsize for stride in array.strides)
    return array.copy("C") if odd else array


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Without the warnings and log lines, up to level WARNING, of packages that tell of their own insides."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)
