"""What the network of a transformers pipeline takes and gives, whatever it reads: texts, pictures or recordings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.records import SourceModel
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.torch_programs import tracing
from compile_stage.sources import graph, torch_signature

if TYPE_CHECKING:
    from torch.export import ExportedProgram

TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
SEQUENCE = "sequence"
SAMPLES = "samples"

_NO_TENSORS = ("hidden_states", "attentions", "past_key_values")  # asked for by flags that stay off
_HEADS = ("logits", "pred_boxes")  # of a detector; what it was made from is not asked for
_LONGER = 1600  # samples of a second recording, to see which outputs follow its length


@dataclass(frozen=True)
class NetworkInputs:
    """The network's inputs.

    Attributes:
        example: Name → a tensor of a batch of two, in the network's own order.
        open_axis: The name of axis 1 where its length is open, as `sequence`; empty where all but the batch is fixed.
        heads: The outputs that are asked for; none for all.
    """

    example: Mapping[str, Any]
    open_axis: str = ""
    heads: Sequence[str] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """In order."""
        return tuple(self.example)

    def signature(self, model: Any) -> Signature:
        """From one small pass, and one of longer inputs: sizes that follow the batch or the open axis are symbols."""
        answer, longer = self._answers(model, self.example), None
        if self.open_axis:
            longer = self._answers(model, self._longer())
        outputs = []
        for name, tensor in answer.items():
            others = longer[name].shape if longer is not None else tensor.shape
            sizes = [
                graph.BATCH if axis == 0 else (size if size == others[axis] else self._followed)
                for axis, size in enumerate(tensor.shape)
            ]
            outputs.append(TensorSpec(name=name, dtype=_dtype(tensor), shape=tuple(sizes)))
        inputs = tuple(
            TensorSpec(name=name, dtype=_dtype(tensor), shape=(graph.BATCH, *self._sizes(tensor)))
            for name, tensor in self.example.items()
        )
        return Signature(inputs=inputs, outputs=tuple(outputs))

    def trace(self, source: SourceModel, model: Any) -> ExportedProgram:
        """The network as a program whose one argument is a dict of the inputs. Raises SourceError."""
        import torch

        dynamic = dict.fromkeys((0, 1) if self.open_axis else (0,), torch.export.Dim.DYNAMIC)
        sizes = {name: dict(dynamic) for name in self.example}
        try:
            with tracing(), torch.no_grad():
                network = self.tensors_only(model)
                return torch.export.export(network, (dict(self.example),), dynamic_shapes=(sizes,))
        except Exception as error:
            which = "batch and sequence" if self.open_axis else "batch"
            raise SourceError(
                f"torch.export can't trace it with an open {which}: {first_line(error)}",
                fix="log it with attn_implementation='eager', or log the network by itself with mlflow.pytorch",
                where=source.uri,
            ) from error

    def symbols(self, program: ExportedProgram) -> dict[str, str]:
        """Symbol of the exporter → ours: axis 0 of every input is the batch, axis 1 the open one, though the exporter
        may give each input its own symbols."""
        return {
            str(size): (graph.BATCH, self.open_axis)[axis]
            for spec in islice(torch_signature.tensors(program), len(program.graph_signature.user_inputs))
            for axis, size in enumerate(spec.shape[:2])
            if not isinstance(size, int)
        }

    @property
    def _followed(self) -> str:
        """A recording's outputs have frames of several samples each."""
        return "frames" if self.open_axis == SAMPLES else self.open_axis

    def _sizes(self, tensor: Any) -> list[int | str]:
        return [self.open_axis if axis == 1 and self.open_axis else size for axis, size in enumerate(tensor.shape)][1:]

    def _longer(self) -> dict[str, Any]:
        import torch

        more = _LONGER if self.open_axis == SAMPLES else 1
        return {
            name: torch.cat([tensor, torch.ones((tensor.shape[0], more, *tensor.shape[2:]), dtype=tensor.dtype)], dim=1)
            for name, tensor in self.example.items()
        }

    def _answers(self, model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        with torch.no_grad():
            return self._kept(model(**tensors))

    def _kept(self, answer: Any) -> dict[str, Any]:
        import torch

        tensors = {k: v for k, v in answer.items() if isinstance(v, torch.Tensor) and k not in _NO_TENSORS}
        return (
            {name: tensors[name] for name in self.heads} if set(self.heads) <= set(tensors) and self.heads else tensors
        )

    def tensors_only(self, model: Any) -> Any:
        """The network without the fields of its answer that are no tensors, or not asked for."""
        import torch

        kept = self._kept

        class Network(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, tensors: dict[str, Any]) -> Any:
                return kept(self.model(**tensors))

        return Network().eval()


def of_text(source: SourceModel, model: Any, given: Sequence[str]) -> NetworkInputs:
    """What the tokenizer gives and the network takes, in the network's own order."""
    import torch

    taken = [name for name in inspect.signature(model.forward).parameters if name in TEXT_INPUTS and name in given]
    if "input_ids" not in taken:
        raise SourceError("its network takes no input_ids, so it does not read text", where=source.uri)
    return NetworkInputs({name: torch.ones((2, 7), dtype=torch.int64) for name in taken}, SEQUENCE)


def of_media(source: SourceModel, model: Any, given: Mapping[str, Any], task: str) -> NetworkInputs:
    """The main input that the processor gives for two pictures or recordings. A mask is not taken: of pictures or
    recordings of one size it hides nothing."""
    import torch

    name = str(model.main_input_name)
    if name not in given:
        raise SourceError(f"its processor gives no {name}, which its network takes", where=source.uri)
    example = torch.from_numpy(given[name]).to(torch.float32)
    heads = _HEADS if task == "object-detection" else ()
    return NetworkInputs({name: example}, SAMPLES if example.ndim == 2 else "", heads)


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
