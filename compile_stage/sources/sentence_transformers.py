"""sentence-transformers: text → one vector. Transformer, pooling and normalisation are one graph; the tokenizer goes
with the published model.

MLflow's own pyfunc of this flavor loads with `trust_remote_code=True`, always. So it is never called here: the original
is `SentenceTransformer.encode`, which that pyfunc calls, on files that were looked at first.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.json_files import read_json_object
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Exporter, Session
from compile_stage.core.records import (
    Compliance,
    Gate,
    PortableModel,
    Predictions,
    Processor,
    ShapeRange,
    SourceModel,
    Target,
)
from compile_stage.core.shapes import demand_shapes
from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.plugin_support.torch_programs import threads_restored, tracing, use_threads
from compile_stage.serving.text import TextProcessor
from compile_stage.sources import graph, mlmodel, torch_portable, torch_signature
from compile_stage.sources import transformers_text as text
from compile_stage.sources.session import SourceSession
from compile_stage.sources.torch_device import DEVICES, place
from compile_stage.sources.torch_size_limits import with_size_limits

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compile_stage.core.tensors import Batch

OUTPUT = "sentence_embedding"
_FLAVOR = "sentence_transformers"
_MODULES = ("Transformer", "Pooling", "Normalize", "Dense", "LayerNorm", "Dropout")
"""Modules of sentence-transformers whose files are configuration and weights alone."""
_ALLOWED = {".json", ".txt", ".model", ".md", ".safetensors"}
_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
_SEQUENCE = "sequence"
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


class SentenceTransformersSource(Exporter):
    """Models that `mlflow.sentence_transformers` logged: one vector for each text."""

    name = _FLAVOR
    requires = ("sentence_transformers", "transformers", "torch", "onnxscript")
    extra = "sentence-transformers"
    framework = "PyTorch (eager), sentence-transformers"
    capabilities = SourceCapabilities(
        forms=("onnx", "torch-export"),
        devices=DEVICES,
        profiler="compile_stage.plugin_support.torch_profiler:profile_source",
        # Which texts are near is what vectors are for (docs/decisions/0049).
        gates=(
            Gate(metric="similarity_spearman", limit=0.98, direction="at_least"),
            Gate(metric="nearest_kept", limit=0.85, direction="at_least", options={"k": 10}),
        ),
    )

    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        folder = _folder(source)
        if (reason := mlmodel.missing_file(folder / "modules.json", source)) is not None:
            return reason
        if (reason := _refuse_files(folder)) is not None:
            return reason
        try:
            if (reason := _refuse_cross_encoder(folder) or _refuse_modules(folder)) is not None:
                return reason
            _trace(_Loaded(source))
        except SourceError as error:
            return error.reason
        return None

    @contextmanager
    def open(self, source: SourceModel, target: Target) -> Iterator[Session]:
        import torch

        with threads_restored(), place(target.device) as there:
            use_threads(target.threads)
            loaded = _Loaded(source)
            network = there.module(loaded.model)

            def call(arrays: Sequence[Any]) -> list[Any]:
                tensors = [there.tensor(torch.from_numpy(array.copy())) for array in arrays]
                with torch.no_grad():
                    features = network(dict(zip(loaded.inputs, tensors, strict=True)))
                return there.arrays([features[OUTPUT]])

            yield SourceSession(loaded.signature, call)

    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        loaded = _Loaded(source)
        demand_shapes(loaded.signature, shapes, source)
        program = _trace(loaded)
        model = torch_portable.export_graph(program, loaded.signature, source, {}, into, symbols=_symbols(program))
        return with_size_limits(model, program, _network(loaded), shapes, source)

    def export_program(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        """Its one argument is a dict, whose values are the inputs in order."""
        loaded = _Loaded(source)
        program = _trace(loaded)
        signature = torch_signature.signature_of(program, loaded.inputs, [OUTPUT], _symbols(program))
        model = torch_portable.save_program(program, signature, source, shapes, into)
        return with_size_limits(model, program, _network(loaded), shapes, source)

    def example(self, source: SourceModel) -> Batch | None:
        """The logged texts, through the model's own tokenizer."""
        texts = text.example_texts(mlmodel.raw_example(source))
        return self.tokenize(source, texts) if texts else None

    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        """To tensors an array: the vectors."""
        return {"kind": "array", "outputs": [OUTPUT], "columns": None, "frame_in_frame_out": False}

    def processor(self, source: SourceModel, into: Path) -> Processor:
        """The tokenizer, proven on texts against `SentenceTransformer.encode`."""
        loaded = _Loaded(source)
        if (reason := _refuse_text(source, loaded.model)) is not None:
            return Processor(refusal=reason)
        how = {
            "task": "sentence-embedding",
            **text.describe_tokenizer(loaded.tokenizer, loaded.signature, loaded.longest),
            "output": OUTPUT,
            "defaults": {"truncation": True, "max_length": loaded.longest},
        }
        try:
            text.write_tokenizer(loaded.tokenizer, into)
        except SourceError as error:
            return Processor(refusal=error.problem)
        tried = text.tried_texts(text.example_texts(mlmodel.raw_example(source)), None)
        with self.open(source, Target(name="cpu")) as session:
            made = TextProcessor(into, how, session.signature, batch_size=4)
            refusal = text.refuse_answers(made, session.run, loaded, tried, loaded.params)
        return Processor(refusal=refusal) if refusal else Processor(text=how, runtime=package_versions("tokenizers"))

    def predictions(self, source: SourceModel, samples: Batch) -> Predictions | None:
        """What `SentenceTransformer.encode` answers to the samples' tokens, as text."""
        loaded = _Loaded(source)
        decoded = text.decoded(loaded.tokenizer, samples)
        tried = text.tried_texts(text.example_texts(mlmodel.raw_example(source)), None)
        if (columns := text.asked_columns(source)) is None:
            return None
        return text.predictions_of(loaded, loaded.tokenizer, "sentence-embedding", [*tried, *decoded], columns)

    def tokenize(self, source: SourceModel, texts: Sequence[Any]) -> Batch:
        """Texts as the network's inputs: padded to the longest, cut at the model's `max_seq_length`."""
        loaded = _Loaded(source)
        return text.tokenized(loaded.tokenizer, texts, loaded.inputs, loaded.longest)

    def packages(self) -> Mapping[str, str]:
        return package_versions("sentence-transformers", "transformers", "torch", "onnxscript", "onnx", "tokenizers")


class _Loaded:
    """The original in evaluation mode and FP32, and what is known of it.

    Raises:
        SourceError: It can't be loaded, or does not read text.
    """

    def __init__(self, source: SourceModel) -> None:
        import sentence_transformers
        import torch

        self.source = source
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecations inside the loader
                self.model = sentence_transformers.SentenceTransformer(
                    str(_folder(source)), device="cpu", trust_remote_code=False, local_files_only=True,
                    model_kwargs={"dtype": torch.float32, "use_safetensors": True},
                ).eval()  # fmt: skip
        except Exception as error:
            problem = f"sentence-transformers can't load it: {first_line(error)}"
            raise mlmodel.not_loaded(source, problem, sentence_transformers, "sentence_transformers_version") from error
        self.tokenizer = self.model.tokenizer
        given = set(self.tokenizer.model_input_names)
        taken = inspect.signature(self.model[0].auto_model.forward).parameters
        self.inputs = tuple(name for name in _TEXT_INPUTS if name in taken and name in given)
        if "input_ids" not in self.inputs:
            raise SourceError("its network takes no input_ids, so it does not read text", where=source.uri)

    @property
    def params(self) -> dict[str, Any]:
        """Of predict(), with their defaults."""
        return mlmodel.params(self.source)

    @property
    def longest(self) -> int:
        """Where texts are cut, in tokens."""
        return int(self.model.max_seq_length or text.length_of(self.tokenizer))

    @property
    def signature(self) -> Signature:
        """Token ids in, one vector out."""
        import torch

        with torch.no_grad():
            answer = self.model({name: torch.ones((2, 7), dtype=torch.int64) for name in self.inputs})[OUTPUT]
        sequence = (graph.BATCH, _SEQUENCE)
        return Signature(
            inputs=tuple(TensorSpec(name=name, dtype="int64", shape=sequence) for name in self.inputs),
            outputs=(TensorSpec(name=OUTPUT, dtype="float32", shape=(graph.BATCH, int(answer.shape[1]))),),
        )

    def predict(self, data: Any) -> Any:
        """As MLflow's pyfunc, which hands on the params of the signature, and encodes a list, or of a data frame the
        first column alone."""
        texts = list(data.iloc[:, 0]) if hasattr(data, "iloc") else list(data)
        return self.model.encode(texts, **{"show_progress_bar": False, **self.params})


def _folder(source: SourceModel) -> Path:
    return mlmodel.within(source, mlmodel.flavor(source, "python_function").get("data") or "model.sentence_transformer")


def _refuse_files(folder: Path) -> str | None:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if pickles := [path.name for path in files if path.suffix in _PICKLES]:
        return f"its weights are a pickle ({pickles[0]}): save them as safetensors (save_pretrained does)"
    if strange := [path.name for path in files if path.suffix not in _ALLOWED]:
        return f"it brings files that are neither weights nor configuration ({', '.join(strange[:3])})"
    return None


def _refuse_cross_encoder(folder: Path) -> str | None:
    """The reason for a model that scores pairs of texts. MLflow loads it as any other of the flavor, with the mean of
    the tokens' vectors in the place of its last layer, and the scores are lost without a word."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file() or read_json_object(path).get("model_type") != "CrossEncoder":
        return None
    return (
        "it is a CrossEncoder, and its pyfunc gives vectors of single texts in the place of scores of pairs: MLflow "
        "loads it as a SentenceTransformer. Log "
        "pipeline('text-classification', model=encoder.transformers_model, tokenizer=encoder.tokenizer) "
        "with mlflow.transformers, and a data frame with the columns text and text_pair as its input example"
    )


def _refuse_modules(folder: Path) -> str | None:
    """Only modules of sentence-transformers' own, each of which is configured by data. A class that `modules.json` or
    a `config.json` names would be imported."""
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        named = [(str(module["type"]), _module_folder(folder, str(module["path"]))) for module in modules]
        for kind, path in named:
            package, _, name = kind.rpartition(".")
            if package.partition(".")[0] != _FLAVOR or name not in _MODULES:
                return f"its module {kind} is none that can be compiled; these can: {', '.join(_MODULES)}"
            settings = read_json_object(path / "config.json") if (path / "config.json").is_file() else {}
            function = str(settings.get("activation_function", "torch.nn.modules."))
            if not function.startswith("torch.nn.modules."):
                return f"its activation function {function} is none of PyTorch's"
            if "auto_map" in settings:
                return "it names Python code of its own (auto_map)"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return f"its modules.json can't be read: {first_line(error)}"
    if not named or not named[0][0].endswith(".Transformer"):
        return "its first module is no Transformer"
    return None


def _module_folder(folder: Path, name: str) -> Path:
    """A module's folder. Raises ValueError for one outside of the model's."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"the module's folder {name} is not the model's own")
    return path


def _refuse_text(source: SourceModel, model: Any) -> str | None:
    """The reason when the published model can't take text as the source's pyfunc does."""
    if (mlmodel.flavor(source, "python_function").get("config") or {}).get("task"):
        return "it was logged with an inference task of MLflow's"
    if model.default_prompt_name and model.prompts.get(model.default_prompt_name):
        return f"it puts a prompt before each text ({model.default_prompt_name})"
    return None


def _network(loaded: _Loaded) -> Any:
    """The module whose one argument is a dict of the inputs."""
    import torch

    class Network(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
        def __init__(self) -> None:
            super().__init__()
            self.model = loaded.model

        def forward(self, tensors: dict[str, Any]) -> Any:
            return {OUTPUT: self.model(dict(tensors))[OUTPUT]}

    return Network().eval()


def _trace(loaded: _Loaded) -> ExportedProgram:
    import torch

    example = {name: torch.ones((2, 7), dtype=torch.int64) for name in loaded.inputs}
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    try:
        with tracing(), torch.no_grad():
            return torch.export.export(
                _network(loaded), (example,), dynamic_shapes=(dict.fromkeys(loaded.inputs, dynamic),)
            )
    except Exception as error:
        raise SourceError(
            f"torch.export can't trace it with an open batch and sequence: {first_line(error)}",
            where=loaded.source.uri,
        ) from error


def _symbols(program: ExportedProgram) -> dict[str, str]:
    return text.axes_of(program, _SEQUENCE)
