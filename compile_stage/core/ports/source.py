"""A source framework: reads models, runs the original, exports it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.errors import SourceError
from compile_stage.core.ports.plugin import Plugin, Session
from compile_stage.core.records import (
    Compliance,
    PortableModel,
    Predictions,
    Processor,
    ShapeRange,
    SourceModel,
    Target,
)

if TYPE_CHECKING:
    from compile_stage.core.tensors import Array, Batch


class Exporter(Plugin, Protocol):
    """A source framework (`compile_stage.sources`), named after the MLflow flavor it reads.

    Where its capabilities name a toolchain, `open` and `export` run in that; the other methods are asked in the stage's
    environment, and answer without the modules that it `requires`.
    """

    framework: ClassVar[str]  # for the report: "PyTorch (eager)"
    capabilities: ClassVar[SourceCapabilities]

    @abstractmethod
    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        """The reason why this model can't be exported."""

    @abstractmethod
    def open(self, source: SourceModel, target: Target) -> AbstractContextManager[Session]:
        """The ORIGINAL model in its own framework, in FP32: the baseline. It runs on `target.device`, which is one of
        the declared `capabilities.devices`, with `target.threads` threads. `Session.run` takes and gives arrays in the
        host's memory, and returns when they are there: what has only been started must not be timed. Raises SourceError
        when the device is not here; never falls back to another one."""

    def open_as_given(self, source: SourceModel, target: Target) -> AbstractContextManager[Session]:
        """Of a source that declares `computes_wider`: as `open`, with a session that rounds no input to the type of the
        signature where predict() does not. Nothing is timed with it."""
        raise SourceError(f"a {self.framework} model rounds its inputs itself", where=source.uri)

    @abstractmethod
    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        """Write `into/model.onnx` (batch symbolic where the model can) and describe it. Input and output names and
        order are the same as those of `open`'s session. Raises SourceError, with the reason, when the model can't be
        exported, or when `shapes` asks for a size that the source has fixed. Of a source that gives `stablehlo` the run
        goes on without ONNX then."""

    def export_program(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        """Write `into/model.pt2`, as `torch.export.load` reads it, of the form `torch-export`; asked of sources that
        declare that form. The signature names the tensors of the program's flattened inputs and outputs, in order, as
        that of `export` does. Raises SourceError as that."""
        raise SourceError(f"a {self.framework} model is no PyTorch program", where=source.uri)

    def export_for(self, form: str, source: SourceModel, target: Target, into: Path) -> PortableModel:
        """Write a file for each shape that the target asks for, as `plugin_support.fixed_shapes` reads them; asked of
        sources that declare the form, `stablehlo` or `tflite`. The signature is that of `open`, symbols included.
        Raises SourceError as `export`."""
        raise SourceError(f"a {self.framework} model is not given as {form}", where=source.uri)

    @abstractmethod
    def example(self, source: SourceModel) -> Batch | None:
        """The input example that was logged with the model, as named tensors; None when there is none."""

    @abstractmethod
    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        """How the source's pyfunc answers, so that the published model answers the same way; read by
        `compile_stage.flavor`:

        {"kind": "array" | "dict" | "list" | "dataframe" | "series",   what predict() returns for an array (or dict)
                                                  input; a series is an array for one, and a pandas Series for a
                                                  DataFrame; an array of several outputs is a dict
         "outputs": ["label", ...],                which graph outputs it answers with, in order
         "dtype": "float64",                       only where another type than the graph's is answered; "U3" for
                                                   NumPy's texts of up to three letters
         "columns": ["f0", ...] | None,            the data frame's columns that make up the (single) input, in order
         "frame_in_frame_out": bool,               a DataFrame is answered with a DataFrame
         "fills": {"city": {"NaN": "Rome"}},       only where missing texts are filled in: column, kind of missing text
                                                   (`serving.prediction_io.missing_kind`), and the text in its place
         "no_rows": True,                          only where predict() of no rows answers with none
         "params": {"output_margin": False}}       params of predict() that the model's own code takes, each with the
                                                  one value that is compiled; none where this is missing
        """

    def categories(self, source: SourceModel) -> Mapping[str, Mapping[int, Sequence[Any]]]:
        """Input → column → the categories that the original's encoders know there, of those that may refuse others. The
        original is asked about each."""
        return {}

    def network_inputs(self, source: SourceModel, columns: Mapping[str, Array]) -> Batch:
        """Of a source that declares `reads_raw_samples`: what its network is given while predict() answers these rows,
        one row for each. Raises SourceError, with the reason, where that can't be had."""
        raise SourceError(f"the samples of a {self.framework} model are its network's", where=source.uri)

    def whole(self, source: SourceModel, threads: int) -> AbstractContextManager[Callable[..., Any]]:
        """Of such a source: the original's predict() as a function of the same columns, and of the artifact's `run` to
        put in the network's place (None: the network itself)."""
        raise SourceError(f"a {self.framework} model has no predict() around its network", where=source.uri)

    def processor(self, source: SourceModel, into: Path) -> Processor:
        """Write, into the folder `into`, what the published model's predict() needs to take text as the source's pyfunc
        does; compared with that pyfunc before it is described. Of a source whose pyfunc takes no text an empty one."""
        return Processor()

    def predictions(self, source: SourceModel, samples: Batch) -> Predictions | None:
        """Of a source with a `processor`: what the original's pyfunc answers to texts, those of the samples among
        them; None where it answers none."""
        return None

    def tokenize(self, source: SourceModel, texts: Sequence[Any]) -> Batch | None:
        """Of a source that reads text: texts, or pairs of them, as samples of the network's inputs, one row each; None
        of any other."""
        return None

    def class_names(self, source: SourceModel) -> Sequence[str]:
        """The names of the classes in the order of the network's scores, where labels of samples may be such names."""
        return ()

    def keeps_cache(self, source: SourceModel) -> bool:
        """The graph of this model hands on a cache (`core.generation`), so its samples are windows of tokens
        (`token_windows`), and only backends whose capabilities say `caches` take it. Answered from what `MLmodel`
        says."""
        return False

    def token_windows(self, source: SourceModel, texts: Sequence[str], tokens: int) -> Sequence[Array]:
        """Of a source that `keeps_cache`: of each text its windows of exactly so many tokens, int64 [windows, tokens],
        without overlap; a text that is too short has none."""
        raise SourceError(f"a {self.framework} model reads no text token by token", where=source.uri)

    def texts_of(self, source: SourceModel, tokens: Sequence[Sequence[int]]) -> Sequence[str]:
        """Of a source that `keeps_cache`: rows of tokens as text, without special tokens."""
        raise SourceError(f"a {self.framework} model writes no text token by token", where=source.uri)

    @abstractmethod
    def packages(self) -> Mapping[str, str]:
        """Package → version of what makes the export, for cache keys."""
