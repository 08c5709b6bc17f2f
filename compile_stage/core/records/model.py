"""Models, samples and artifacts: what lies on disk between two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar, Literal

from compile_stage.core.records.base import JsonMap, record
from compile_stage.core.records.policy import Generation
from compile_stage.core.tensors import Signature


@record
class PortableModel:
    """A model in a portable form.

    Attributes:
        path: The file (`model.onnx`, `model.pt2`, or the `model.json` that names StableHLO modules); external data lies
            beside it.
        digest: Of the folder that holds the file.
        form: `onnx`, `torch-export`, `stablehlo` or `tflite`.
        precision: `fp32`, or what a lowering made of it.
        kept: Per precision, the node names that stay in it although the rest was lowered.
        made_from: Digest of what it was made from.
        notes: What a reader of the report should know (`3 nodes stay in FP32: they overflow float16`).
        places: Tokens that a text of a language model has at most, with what is written; None where nobody knows.
        smallest: Input → the smallest size of each axis that it is right for, where its trace says so: the forward may
            take another way for smaller ones. None for an axis without such a limit.
        largest: The same of the largest size.
        conditions: What else sizes must hold for it to be right (`serving.size_conditions`).
    """

    path: str
    digest: str
    form: Literal["onnx", "torch-export", "stablehlo", "tflite"]
    opset: int
    precision: str
    signature: Signature
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    made_from: str = ""
    notes: tuple[str, ...] = ()
    places: int | None = None
    smallest: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    largest: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()


@record
class Processor:
    """What a published model's predict() has around the graph, so that it takes and gives what the source's does.

    Attributes:
        text: How texts become inputs and outputs become answers, the manifest's `answer.text`
            (`compile_stage.serving.text`); empty where predict() takes the graph's tensors.
        media: The same of pictures and recordings, the manifest's `answer.media` (`compile_stage.serving.media`).
        runtime: Package → version that it needs where the model is served.
        refusal: Why there is none though the source takes more than tensors; empty otherwise.
        path: Folder of its files.
    """

    text: JsonMap = field(default_factory=dict)
    media: JsonMap = field(default_factory=dict)
    runtime: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    path: str = ""


@record
class Origin:
    """What a source says of itself.

    Attributes:
        framework: Of the baseline, for people: `PyTorch (eager)`.
        prediction_format: How its pyfunc answers (`core.ports.Exporter.prediction_format`).
        processor: What a published predict() needs beside the graph.
    """

    framework: str
    prediction_format: JsonMap
    processor: Processor = field(default_factory=Processor)

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know of it."""
        notes = []
        if self.processor.refusal:
            notes.append(f"the published predict() takes the network's tensors alone: {self.processor.refusal}")
        if self.prediction_format.get("python_model", {}).get("streams"):
            notes.append("predict_stream() of the original is not published: its answers are compared with nothing")
        return tuple(notes)


@record
class Answers:
    """What the original answered for all samples.

    Attributes:
        outputs: Output name → `.npy` file, axis 0 being the sample.
        mixed_batch: Where its answer to a sample depends on the rest of the batch: it was given the samples in order,
            in batches of so many. None where it does not.
    """

    outputs: dict[str, str]
    digest: str
    samples: SampleSet
    seed: int
    mixed_batch: int | None = None


@record
class Predictions:
    """What the original's predict() answers to some texts, pictures or recordings.

    Attributes:
        texts: Or what was written as text (`compile_stage.serving.predictions.answer_items`).
        ids: The tokens of each, by the original's tokenizer; of texts only.
        answer: As `compile_stage.serving.predictions.plain_prediction` writes it.
        column: Of the data frame that all were given in; empty for a list.
        pair: A second column of that, which has them once more, each one place further; empty for none.
        each: They were given one by one.
        params: That predict() was given beside them, past MLflow's signature: of a language model that it does not draw
            its tokens at random.
    """

    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    answer: JsonMap
    column: str = ""
    pair: str = ""
    each: bool = False
    params: JsonMap = field(default_factory=dict)


@record
class SampleSet:
    """Samples on disk, one `.npy` per input, so that no process has to hold them whole.

    Attributes:
        path: Folder, laid out as `core.sample_files` says.
        count: Number of samples.
        real: False for synthetic data, which never proves anything.
        source: As in the policy.
        groups: How many groups the samples come in; 0 where each is independent.
    """

    path: str
    digest: str
    count: int
    real: bool
    source: str
    has_labels: bool = False
    notes: tuple[str, ...] = ()
    groups: int = 0

    @property
    def independent(self) -> int:
        """What counts for `min_samples` and for intervals: groups where there are any, else samples."""
        return self.groups or self.count

    @property
    def unit(self) -> str:
        """What `independent` counts."""
        return "groups of samples" if self.groups else "samples"


@record
class Artifact:
    """What a backend compiled: a folder.

    Attributes:
        path: The folder.
        entry: The file in it that the backend opens.
        toolchain: Package → version of all that had a say in the bytes or runs them.
        hardware: Fingerprint of the machine it was compiled on (`core.environment`).
        options: What `Backend.open` needs beside the files (threads, hints).
        executed: What the runtime says it really runs: `{"providers": {...}, "ops": {...}, "precision": {...}}`.
        not_runnable_here: Why this machine can't run it: it was compiled for another. Empty when it can.
        generation: Of a graph with a cache (`core.generation`): what a call of it reads and writes. None of others.
    """

    FORMER_NAMES: ClassVar = {"elsewhere": "not_runnable_here"}

    path: str
    entry: str
    digest: str
    job_id: str
    backend: str
    precision: str
    toolchain: Mapping[str, str]
    hardware: str
    signature: Signature
    size_bytes: int
    made_from: str = ""
    options: JsonMap = field(default_factory=dict)
    executed: JsonMap = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    not_runnable_here: str = ""
    generation: Generation | None = None
