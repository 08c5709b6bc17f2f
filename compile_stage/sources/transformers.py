"""Hugging Face transformers: the model of a pipeline, behind its tokenizer or its processor.

MLflow's signature is of text, pictures or recordings in and labels out. What can be compiled is the network between the
processing and the task's own post-processing, so the inputs are token ids, pixels or samples of sound, and the outputs
are the network's.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.capabilities import SourceCapabilities
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.generation import LOGITS
from compile_stage.core.plugins import package_versions
from compile_stage.core.ports import Exporter, Session
from compile_stage.core.records import (
    Compliance,
    PortableModel,
    Predictions,
    Processor,
    ShapeRange,
    SourceModel,
    Target,
)
from compile_stage.plugin_support.torch_programs import threads_restored, use_threads
from compile_stage.serving.generation import GenerationSession
from compile_stage.serving.text import TextProcessor
from compile_stage.sources import mlmodel, torch_portable, torch_signature
from compile_stage.sources import transformers_generation as generation
from compile_stage.sources import transformers_inputs as network_inputs
from compile_stage.sources import transformers_language as language
from compile_stage.sources import transformers_media as media
from compile_stage.sources import transformers_text as text
from compile_stage.sources.session import SourceSession
from compile_stage.sources.torch_device import DEVICES, place
from compile_stage.sources.torch_size_limits import with_size_limits
from compile_stage.sources.transformers_inputs import NetworkInputs

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compile_stage.core.tensors import Array, Batch

_TEXT_TASKS = (
    "text-classification",
    "sentiment-analysis",
    "token-classification",
    "ner",
    "feature-extraction",
    "fill-mask",
    "question-answering",
)
_TASKS = (*_TEXT_TASKS, *media.TASKS, generation.TASK)
# What a task that takes several passes can be logged as.
_INSTEAD = {
    "zero-shot-classification": "; its network takes one pass for each pair of a text and a hypothesis: log it as "
    "text-classification, with a data frame of text and text_pair as the input example, and send these pairs"
}

_just_traced: dict[str, tuple[Any, Any, ExportedProgram]] = {}
"""Path of a source → what `refuse` traced, for the export that follows in the same process, and what is asked between
them. A trace takes a quarter of the time of an export."""


class TransformersSource(Exporter):
    """Models that `mlflow.transformers` logged, of tasks with one forward pass over text, a picture or a recording; and
    causal language models (`sources.transformers_generation`)."""

    name = "transformers"
    requires = ("transformers", "torch", "onnxscript")
    extra = "transformers"
    framework = "PyTorch (eager), transformers"
    capabilities = SourceCapabilities(
        forms=("onnx", "torch-export"),
        devices=DEVICES,
        profiler="compile_stage.plugin_support.torch_profiler:profile_source",
    )

    def refuse(self, source: SourceModel, compliance: Compliance) -> str | None:
        configuration = mlmodel.flavor(source, "transformers")
        task = str(configuration.get("task", ""))
        if task not in _TASKS:
            problem = f"its task {task!r} is none of those that can be compiled: {', '.join(_TASKS)}"
            return f"{problem}{_INSTEAD.get(task, '')}"
        folder = _model_folder(source)
        if (reason := mlmodel.missing_file(folder / "config.json", source)) is not None:
            return reason
        if self.keeps_cache(source) and not list(folder.glob("*.safetensors")):
            return "its weights are a pickle, and a language model's are taken as safetensors only"
        if not list(folder.glob("*.safetensors")) and not compliance.allow_pickle:
            return "its weights are a pickle: save them as safetensors, or set compliance.allow_pickle in the policy"
        if list(folder.glob("*.py")) and not compliance.allow_pickle:
            return (
                "it brings Python code of its own (trust_remote_code): set compliance.allow_pickle in the policy if "
                "you trust it"
            )
        if task in media.TASKS:
            if (reason := media.refuse(source, task)) is not None:
                return reason
        elif _tokenizer_folder(source) is None:
            return "it was logged without a tokenizer, so its inputs are unknown"
        try:
            traced = self._trace(source)
        except SourceError as error:
            return error.reason
        _just_traced[source.path] = traced
        return None

    @contextmanager
    def open(self, source: SourceModel, target: Target) -> Iterator[Session]:
        import torch

        with threads_restored(), place(target.device) as there:
            use_threads(target.threads)
            if target.device != "cpu":
                _just_traced.clear()  # what is moved to a device is not exported
            model = _load(source)
            if self.keeps_cache(source):
                generation.demand_length(source, model, target.generation.tokens)
                network = generation.OriginalSession(generation.CausalNetwork.of(source, model), there)
                yield GenerationSession(network, target.generation)
                return
            inputs = _inputs(source, model)
            signature = inputs.signature(model)
            outputs = [spec.name for spec in signature.outputs]
            network = there.module(model)

            def call(arrays: Sequence[Any]) -> list[Any]:
                tensors = [there.tensor(torch.from_numpy(array.copy())) for array in arrays]
                with torch.no_grad():
                    predicted = network(**dict(zip(inputs.names, tensors, strict=True)))
                return there.arrays([predicted[name] for name in outputs])

            yield SourceSession(signature, call)

    def export(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        model, inputs, program = self._traced(source)
        if isinstance(inputs, generation.CausalNetwork):
            return _with_note(inputs.export(source, program, shapes, into), source)
        signature = inputs.signature(model)
        exported = torch_portable.export_graph(program, signature, source, {}, into, symbols=inputs.symbols(program))
        limited = with_size_limits(exported, program, inputs.tensors_only(model), shapes, source)
        return _with_note(limited, source)

    def export_program(self, source: SourceModel, shapes: Mapping[str, ShapeRange], into: Path) -> PortableModel:
        """Its one argument is a dict, whose values are the inputs in order."""
        if self.keeps_cache(source):
            raise SourceError("a language model is given as ONNX with its cache only", where=source.uri)
        model, inputs, program = self._traced(source)
        outputs = [spec.name for spec in inputs.signature(model).outputs]
        signature = torch_signature.signature_of(program, inputs.names, outputs, inputs.symbols(program))
        saved = torch_portable.save_program(program, signature, source, shapes, into)
        limited = with_size_limits(saved, program, inputs.tensors_only(model), shapes, source)
        return _with_note(limited, source)

    def _traced(self, source: SourceModel) -> tuple[Any, Any, ExportedProgram]:
        """As `_trace`, by `refuse` where that came just before. Who takes the program may change it."""
        return _just_traced.pop(source.path) if source.path in _just_traced else self._trace(source)

    def _trace(self, source: SourceModel) -> tuple[Any, Any, ExportedProgram]:
        """The network, what it takes (NetworkInputs, or a CausalNetwork), and its program. Raises SourceError."""
        model = _load(source)
        if self.keeps_cache(source):
            decoder = generation.CausalNetwork.of(source, model)
            return model, decoder, decoder.trace(source)
        inputs = _inputs(source, model)
        return model, inputs, inputs.trace(source, model)

    def example(self, source: SourceModel) -> Batch | None:
        """What was logged, through the model's own tokenizer or processor; of a language model the texts."""
        import numpy as np

        if (kind := _media(source)) is not None:
            items = media.example_items(source, kind)
            return self.tokenize(source, items) if items else None
        texts = text.example_texts(mlmodel.raw_example(source))
        if not texts:
            return None
        if self.keeps_cache(source):
            return {"text": np.array(texts)}
        inputs = _inputs(source, _load(source))
        encoded = _tokenizer(source)(texts, padding=True, truncation=True, return_tensors="np")
        return {name: encoded[name].astype("int64") for name in inputs.names}

    def prediction_format(self, source: SourceModel) -> Mapping[str, Any]:
        """A dict: the source's pyfunc answers with labels, which the network alone can't."""
        if self.keeps_cache(source):
            return {"kind": "dict", "outputs": [LOGITS], "columns": None, "frame_in_frame_out": False}
        model = _load(source)
        outputs = [spec.name for spec in _inputs(source, model).signature(model).outputs]
        return {"kind": "dict", "outputs": outputs, "columns": None, "frame_in_frame_out": False}

    def processor(self, source: SourceModel, into: Path) -> Processor:
        """The tokenizer or processor, and how its pipeline makes answers of the network's outputs; each proven against
        the original's pyfunc."""
        if _media(source) is not None:
            with self.open(source, Target(name="cpu")) as session:
                return media.processor(media.MediaPipeline(source), _load(source), session.signature, session.run)
        if (reason := text.refuse(source, _tokenizer_folder(source) or Path())) is not None:
            return Processor(refusal=reason)
        if self.keeps_cache(source):
            return language.processor(source, _tokenizer(source), into)
        model, tokenizer = _load(source), _tokenizer(source)
        signature = _inputs(source, model).signature(model)
        try:
            text.write_tokenizer(tokenizer, into)
            how = text.describe(source, model, tokenizer, signature)
            made = TextProcessor(into, how, signature, batch_size=4)
            tried = text.tried_texts(text.example_texts(mlmodel.raw_example(source)), how.get("mask_token"))
            original = text.original_pyfunc(source)
        except SourceError as error:
            return Processor(refusal=error.problem)
        except Exception as error:  # noqa: BLE001 - whatever MLflow and transformers raise of a pipeline they can't make
            return Processor(refusal=f"its own pyfunc can't be loaded: {first_line(error)}")
        with self.open(source, Target(name="cpu")) as session:
            refusal = text.refuse_answers(
                made, session.run, original, tried, mlmodel.params(source), text.asked_columns(source), how["task"]
            )
        return Processor(refusal=refusal) if refusal else Processor(text=how, runtime=package_versions("tokenizers"))

    def predictions(self, source: SourceModel, samples: Batch) -> Predictions | None:
        """What the original's pyfunc answers: to the samples' tokens, as text; to pictures or recordings of ours."""
        if _media(source) is not None:
            return media.predictions(media.MediaPipeline(source))
        tokenizer = _tokenizer(source)
        if self.keeps_cache(source):
            return language.predictions(source, tokenizer, samples)
        task = text.TASKS[str(mlmodel.flavor(source, "transformers").get("task"))]
        tried = text.tried_texts(
            text.example_texts(mlmodel.raw_example(source)), tokenizer.mask_token if task == "fill-mask" else None
        )
        if (columns := text.asked_columns(source)) is None:
            return None
        texts = [*tried, *text.decoded(tokenizer, samples)]
        return text.predictions_of(text.original_pyfunc(source), tokenizer, task, texts, columns)

    def keeps_cache(self, source: SourceModel) -> bool:
        return str(mlmodel.flavor(source, "transformers").get("task")) == generation.TASK

    def token_windows(self, source: SourceModel, texts: Sequence[str], tokens: int) -> Sequence[Array]:
        return generation.windows(_tokenizer(source), texts, tokens)

    def texts_of(self, source: SourceModel, tokens: Sequence[Sequence[int]]) -> Sequence[str]:
        tokenizer = _tokenizer(source)
        return [str(tokenizer.decode(list(row), skip_special_tokens=True)) for row in tokens]

    def tokenize(self, source: SourceModel, texts: Sequence[Any]) -> Batch:
        """Texts, or pairs of them, as the network's inputs: padded to the longest, cut at what the network takes.
        Pictures and recordings (arrays, or files as base64 text) by the model's own processor."""
        model = _load(source)
        inputs = _inputs(source, model)
        if _media(source) is not None:
            return media.samples(media.MediaPipeline(source), texts, inputs.names)
        tokenizer = _tokenizer(source)
        longest = text.longest_input(model, inputs.names) or text.length_of(tokenizer)
        return text.tokenized(tokenizer, texts, inputs.names, longest)

    def class_names(self, source: SourceModel) -> Sequence[str]:
        """The classifier's labels, in the order of its scores."""
        configuration = _load(source).config
        if self.keeps_cache(source):
            return ()
        return [str(configuration.id2label[index]) for index in range(configuration.num_labels)]

    def packages(self) -> Mapping[str, str]:
        return package_versions("transformers", "torch", "onnxscript", "onnx", "tokenizers", "mlflow")


def _model_folder(source: SourceModel) -> Path:
    return mlmodel.within(source, mlmodel.flavor(source, "transformers").get("model_binary") or "model")


def _tokenizer_folder(source: SourceModel) -> Path | None:
    folder = Path(source.path) / "components" / "tokenizer"
    return folder if folder.is_dir() else None


def _tokenizer(source: SourceModel) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_tokenizer_folder(source), local_files_only=True, trust_remote_code=False)


def _load(source: SourceModel) -> Any:
    """The network in evaluation mode and FP32, of the class that was logged. Never from the network."""
    import torch
    import transformers

    if source.path in _just_traced:
        return _just_traced[source.path][0]
    _just_traced.clear()  # no second network is held for an export that doesn't come
    name = str(mlmodel.flavor(source, "transformers").get("pipeline_model_type") or "AutoModel")
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and hasattr(kind, "from_pretrained")):
        raise SourceError(f"transformers {transformers.__version__} has no model class {name}", where=source.uri)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside the loader
            folder = _model_folder(source)
            safe = bool(list(folder.glob("*.safetensors"))) or None  # what `refuse` looked at is what is loaded
            how = {"local_files_only": True, "dtype": torch.float32, "use_safetensors": safe}
            model, drawn = _loaded(kind, folder, how)
    except Exception as error:
        problem = f"transformers can't load it: {first_line(error)}"
        raise mlmodel.not_loaded(source, problem, transformers, "transformers_version") from error
    if drawn:
        raise SourceError(
            f"its weights lack {len(drawn)} of the network's, which transformers draws anew at each load ({drawn[0]})",
            fix="train what is new, or log the model class that was trained",
            where=source.uri,
        )
    return model.eval()


def _with_note(model: PortableModel, source: SourceModel) -> PortableModel:
    """With a word on it where the network was logged in a narrower type than its baseline computes in."""
    configuration = json.loads((_model_folder(source) / "config.json").read_text(encoding="utf-8"))
    narrow = configuration.get("dtype") or configuration.get("torch_dtype")  # as transformers before 4.56 calls it
    return replace(model, notes=(*model.notes, _IN_FP32.format(narrow))) if narrow in _NARROW else model


_NARROW = ("bfloat16", "float16")
_IN_FP32 = (
    "The original was logged in {0}, and answers are compared with those of its network in FP32: the original as "
    "MLflow loads it rounds to {0}"
)


def _loaded(kind: Any, folder: Path, how: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The network, and the names of the weights that are drawn at random since its files lack them. A pooler that was
    left out is left out here too: its output would be noise."""
    import torch

    model, info = kind.from_pretrained(folder, output_loading_info=True, **how)
    missing = sorted(info["missing_keys"])
    if not missing:
        return model, []
    can_do_without = "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    if can_do_without and all("pooler." in name for name in missing):
        return kind.from_pretrained(folder, add_pooling_layer=False, **how), []
    weights, again = model.state_dict(), kind.from_pretrained(folder, **how).state_dict()
    return model, [name for name in missing if name in weights and not torch.equal(weights[name], again[name])]


def _media(source: SourceModel) -> str | None:
    """What it reads, where that is no text: `image` or `audio`."""
    return media.TASKS.get(str(mlmodel.flavor(source, "transformers").get("task")))


def _inputs(source: SourceModel, model: Any) -> NetworkInputs:
    if _media(source) is None:
        return network_inputs.of_text(source, model, _tokenizer(source).model_input_names)
    pipeline = media.MediaPipeline(source)
    return network_inputs.of_media(source, model, pipeline.prepared(pipeline.examples()), pipeline.task)
