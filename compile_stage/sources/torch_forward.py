"""The forward of a pickled module: answers that PyTorch's tracer does not take, and where in its code and why a trace
ended."""

from __future__ import annotations

import dataclasses
import re
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_UNKNOWN = "which is not a known type"  # torch.export's words for a class in an answer


def answers_plainly(module: Any) -> None:
    """Have the module answer a dict of the fields of a dataclass (or of a ModelOutput of transformers, or of a
    NamedTuple), and leave out what is None: `loss` without labels, the weights of an attention that gives none."""
    module.register_forward_hook(lambda _module, _given, answer: _plain(answer))


def has_unknown_answer(error: BaseException) -> bool:
    """Whether a trace ended at an answer whose class the tracer does not know."""
    return _UNKNOWN in str(error)


def has_absent_answer(program: ExportedProgram) -> bool:
    """Whether one of the program's answers is None."""
    arguments = [spec.arg for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    return any(type(each).__name__ == "ConstantArgument" and each.value is None for each in arguments)


def has_fields(program: ExportedProgram) -> bool:
    """Whether the program answers a NamedTuple, whose class PyTorch can't write into a file."""
    import torch

    spec = program.call_spec.out_spec
    return hasattr(torch.utils._pytree.tree_unflatten([0] * spec.num_leaves, spec), "_fields")


def _plain(answer: Any) -> Any:
    if isinstance(answer, Mapping):
        return _without_none(answer)
    if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        return _without_none({field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)})
    if isinstance(answer, tuple) and hasattr(answer, "_fields"):
        return _without_none(dict(zip(answer._fields, answer, strict=True)))
    if isinstance(answer, list | tuple):
        return type(answer)(_plain(value) for value in answer if value is not None)
    return answer


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in fields.items() if value is not None}


def place_of(error: BaseException) -> str:
    """The line of the model's code at which a trace ended, such as ` (in forward, line 31 of net.py)`; empty where the
    error came from none."""
    import torch

    error = innermost(error)
    others = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        packages = "site-packages" in frame.filename  # which lie within the standard library's folder
        if frame.filename.startswith(others[:2]) or (frame.filename.startswith(others[2]) and not packages):
            continue
        if frame.filename == "<dynamic-code>":  # what cloudpickle calls the file of a class that was in a notebook
            return f" (in {frame.name}, line {frame.lineno} of the file or cell that it was written in)"
        if not frame.filename.startswith("<"):
            return f" (in {frame.name}, line {frame.lineno} of {Path(frame.filename).name})"
    return ""


def advice(error: BaseException) -> str:
    """What to change in a forward that can't be traced."""
    if has_unknown_answer(error) and "Cache'" in str(error):
        return "have it answer without its cache (model.config.use_cache = False), or log it with mlflow.transformers"
    if has_unknown_answer(error):
        return "have its forward answer a tensor, or a tuple or dict of tensors"
    if "quantized" in str(error):
        return (
            "log the network as it was before it was quantised: the policy's precisions say what is made of it (int8)"
        )
    if _is_packed(error):
        return (
            "leave pack_padded_sequence out: give the LSTM or GRU the padded batch, and take each row's last step by "
            "its length, out[torch.arange(out.shape[0]), lengths - 1], which is the same where it has one direction "
            "(of two, the second would begin with the padding)"
        )
    return "make its forward traceable by torch.export"


_IN_OTHER_OPERATORS = {
    "aten.median": "x.median(1).values by x.sort(1).values[:, (x.shape[1] - 1) // 2]",
    "aten.kthvalue": "x.kthvalue(k, 1).values by x.sort(1).values[:, k - 1]",
    "aten.cumprod": "x.cumprod(1) by torch.stack([x[:, :i].prod(1) for i in range(1, x.shape[1] + 1)], 1)",
    "aten.searchsorted": "torch.searchsorted(edges, x) by torch.bucketize(x, edges), which is the same for edges of "
    "one axis",
}
"""Operators that PyTorch's ONNX exporter lacks → how to write them in those that it has."""


def advice_on_operator(error: BaseException) -> str:
    """What to change in a forward whose operator PyTorch's ONNX exporter lacks."""
    found = re.search(r"op='([\w.]+)'", reason(error))
    name = found[1] if found else ""
    own = _IN_OTHER_OPERATORS.get("aten.cumprod" if name == "prims.prod" else name)  # what cumprod is decomposed into
    replaced = f"replace {own}" if own else "replace the operation it names in the model's forward"
    return (
        f"{replaced}, or add a backend that starts from the PyTorch program (inductor, torchscript, executorch) to the "
        "target's backends"
    )


def _is_packed(error: BaseException) -> bool:
    """Whether a trace ended on sequences of several lengths (torch.nn.utils.rnn.pack_padded_sequence)."""
    from torch.nn.utils.rnn import PackedSequence

    frames = (frame for frame, _ in traceback.walk_tb(innermost(error).__traceback__))
    return any(isinstance(value, PackedSequence) for frame in frames for value in frame.f_locals.values())


def reason(error: BaseException) -> str:
    """The innermost cause's first line: the exporter wraps it in pages of advice."""
    return named_line(innermost(error))


def named_line(error: BaseException) -> str:
    """`TYPE: ` and the first line of what an error says; its type where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def innermost(error: BaseException) -> BaseException:
    """The error that all others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
