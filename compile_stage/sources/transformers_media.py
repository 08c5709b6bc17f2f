"""What a pipeline for pictures or recordings has around its network: the processor, described for a published model;
and the original's pyfunc, which that is compared with.

The processor is never copied: what it does is read from its settings, and `serving.media` does it in Pillow and NumPy.
"""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.plugins import package_versions
from compile_stage.core.records import Predictions, Processor, SourceModel
from compile_stage.core.tensors import Signature
from compile_stage.serving.media import PARAMS, MediaProcessor, read_items
from compile_stage.serving.predictions import ARRAY, answer_items, refuse_prediction
from compile_stage.sources import mlmodel
from compile_stage.sources import transformers_text as text

if TYPE_CHECKING:
    from compile_stage.core.tensors import Batch

TASKS = {
    "image-classification": "image",
    "image-feature-extraction": "image",
    "object-detection": "image",
    "audio-classification": "audio",
}
"""Pipelines of no text, and what they read."""

_ANSWERED = ("image-classification", "audio-classification")  # by MLflow's pyfunc
_COMPONENT = {"image": "image_processor", "audio": "feature_extractor"}
_SIDE = 96  # pixels of the square picture, and of those that are tried
_TOLERANCE = 1e-4  # of scores, both in FP32 in PyTorch
_MEL_FRAME = 400  # samples


def refuse(source: SourceModel, task: str) -> str | None:
    """The reason why the model's processor can't be used."""
    kind = TASKS[task]
    folder = _folder(source, kind)
    if not folder.is_dir():
        return f"it was logged without its {_COMPONENT[kind].replace('_', ' ')}, so its inputs are unknown"
    files = [path for path in folder.rglob("*") if path.is_file()]
    if strange := sorted(path.name for path in files if path.suffix not in (".json", ".md")):
        return f"beside its {_COMPONENT[kind].replace('_', ' ')} lie files that are no settings ({strange[0]})"
    if kind == "image" and importlib.util.find_spec("PIL") is None:
        return "it reads pictures, and Pillow is not installed: pip install pillow"
    return None


class MediaPipeline:
    """The processor of one model, loaded from its settings. The caller has asked `refuse`.

    Attributes:
        kind: `image` or `audio`.
        original: transformers' processor.
    """

    def __init__(self, source: SourceModel) -> None:
        import transformers

        self.source = source
        self.task = str(mlmodel.flavor(source, "transformers").get("task"))
        self.kind = TASKS[self.task]
        component = _COMPONENT[self.kind]
        name = str(mlmodel.flavor(source, "transformers").get(f"{component}_type"))
        kind = getattr(transformers, name, None) or getattr(transformers, f"{name}Pil", None)
        if not (isinstance(kind, type) and hasattr(kind, "from_pretrained")):
            raise SourceError(f"transformers {transformers.__version__} has no {name}", where=source.uri)
        try:
            self.original = kind.from_pretrained(str(_folder(source, self.kind)), local_files_only=True)
        except Exception as error:
            problem = f"transformers can't load its {component.replace('_', ' ')}: {first_line(error)}"
            raise mlmodel.not_loaded(source, problem, transformers, "transformers_version") from error

    def prepared(self, items: Sequence[Any]) -> dict[str, Any]:
        """Decoded items → what the original's processor gives for all of them, stacked. Raises SourceError where they
        become inputs of several sizes."""
        import numpy as np

        try:
            given = [self._processed(item) for item in items]
        except Exception as error:
            problem = f"its processor can't read a sample: {first_line(error)}"
            raise SourceError(problem, where=self.source.uri) from error
        if len({tuple(np.shape(array) for array in one.values()) for one in given}) > 1:
            raise SourceError(
                f"its {self.kind}s become inputs of several sizes, and samples have one",
                fix="give samples of one size",
                where=self.source.uri,
            )
        return {name: np.stack([np.asarray(one[name]) for one in given]) for name in given[0]}

    def examples(self) -> list[Any]:
        """Two inputs of one size, for a first pass."""
        if self.kind == "audio":
            return _tones(self.rate)[:1] * 2
        return _pictures()[:1] * 2

    @property
    def rate(self) -> int:
        """Samples of sound in a second."""
        return int(self.original.sampling_rate)

    def decoded(self, item: Any) -> Any:
        """A sample of a data set or example as an array: a picture's pixels in RGB, or a waveform."""
        from compile_stage.serving import audio, images

        if not isinstance(item, str | bytes):
            return item
        if self.kind == "audio":
            return audio.decode(audio.content_of(item), self.rate)
        return images.opened(item)

    def _processed(self, item: Any) -> dict[str, Any]:
        if self.kind == "audio":
            found = self.original(item, sampling_rate=self.rate, return_tensors="np")
        else:
            found = self.original(images=item, return_tensors="np")
        return {name: array[0] for name, array in found.items()}


def samples(pipeline: MediaPipeline, items: Sequence[Any], inputs: Sequence[str]) -> Batch:
    """Pictures or recordings as the network's inputs, a row each."""
    given = pipeline.prepared([pipeline.decoded(item) for item in items])
    return {name: given[name].astype("float32") for name in inputs}


def processor(pipeline: MediaPipeline, model: Any, signature: Signature, run: Callable[[Batch], Batch]) -> Processor:
    """How the published model takes pictures or recordings, proven against the original's pyfunc.

    Args:
        run: The original's network.
    """
    source = pipeline.source
    if pipeline.task not in _ANSWERED:
        return Processor(refusal=f"MLflow's own pyfunc has no answer for {pipeline.task} either")
    if (reason := text.refuse_pyfunc(source)) is not None:
        return Processor(refusal=reason)
    try:
        how = _describe(pipeline, model)
        made, original = MediaProcessor(how, signature, batch_size=4), text.original_pyfunc(source)
        asked = questions(pipeline)
    except SourceError as error:
        return Processor(refusal=error.problem)
    except Exception as error:  # noqa: BLE001 - whatever MLflow and transformers raise of a pipeline they can't make
        return Processor(refusal=f"its own pyfunc can't be loaded: {first_line(error)}")
    try:
        expected = answer_items(original.predict, **asked)
        found = answer_items(lambda data: made.predict(data, mlmodel.params(source), run), **asked)
    except Exception as error:  # noqa: BLE001 - whatever a pipeline raises of what it can't read
        return Processor(refusal=f"it can't be compared with its own pyfunc: {first_line(error)}")
    if (reason := refuse_prediction(found, expected, _TOLERANCE)) is not None:
        return Processor(refusal=f"it answers otherwise than its pyfunc: {reason}{_torchvision(pipeline.original)}")
    return Processor(media=how, runtime=package_versions("pillow") if pipeline.kind == "image" else {})


def _torchvision(original: Any) -> str:
    """What to do about a processor that resizes by torchvision, whose rounding is not Pillow's; empty for others."""
    import transformers

    by_pillow = f"{type(original).__name__}Pil"
    if getattr(original, "backend", "") != "torchvision" or not hasattr(transformers, by_pillow):
        return ""
    return (
        ". Its processor resizes by torchvision, whose pixels differ from Pillow's by up to 1 of 255, and a published "
        f"model resizes by Pillow: log it with image_processor=transformers.{by_pillow}.from_pretrained(...)"
    )


def predictions(pipeline: MediaPipeline) -> Predictions | None:
    """What the original's pyfunc answers to the model's example and to some pictures or recordings of ours."""
    asked = questions(pipeline)
    try:
        answer = answer_items(text.original_pyfunc(pipeline.source).predict, **asked)
    except Exception:  # noqa: BLE001 - it answers none
        return None
    return Predictions(texts=tuple(asked["texts"]), ids=(), answer=answer, column=asked["column"], each=asked["each"])


def questions(pipeline: MediaPipeline) -> dict[str, Any]:
    """Arguments of `answer_items`: the model's example and what is tried, in the form that its signature takes. Behind
    a signature of tensors, arrays like the example, one by one; else all in one data frame."""
    source, example = pipeline.source, example_items(pipeline.source, pipeline.kind)
    if mlmodel.has_tensor_signature(source):
        if pipeline.kind == "audio":
            return {
                "texts": [_as_text(wave) for wave in (*example, *_tones(pipeline.rate))],
                "column": "",
                "each": True,
            }
        variants = [variant for picture in example for variant in (picture, picture[::-1].copy(), picture // 2)]
        return {"texts": [_as_text(variant) for variant in variants], "column": "", "each": True}
    column = (mlmodel.columns(source) or (pipeline.kind,))[0]
    if pipeline.kind == "audio":
        return {"texts": [_as_text(wave) for wave in _tones(pipeline.rate)], "column": column, "each": False}
    encoded = [item for item in example if isinstance(item, str)]
    return {"texts": [*encoded, *map(_as_file, _pictures())], "column": column, "each": False}


def example_items(source: SourceModel, kind: str) -> list[Any]:
    """The pictures or recordings of the input example; none where there is none."""
    raw = mlmodel.raw_example(source)
    if raw is None:
        return []
    return [item for item in read_items(raw, kind)[0] if item is not None][:8]


def _folder(source: SourceModel, kind: str) -> Path:
    return Path(source.path) / "components" / _COMPONENT[kind]


def _describe(pipeline: MediaPipeline, model: Any) -> dict[str, Any]:
    """The manifest's `answer.media`. Raises SourceError for settings that `serving.media` has nothing for."""
    defaults = dict(mlmodel.flavor(pipeline.source, "python_function").get("config") or {})
    if unknown := sorted(set(defaults) - PARAMS):
        raise SourceError(f"its model_config sets {unknown[0]}, which a published model does not know")
    configuration = model.config
    labels = [str(configuration.id2label[index]) for index in range(configuration.num_labels)]
    described = _image_settings(pipeline.original) if pipeline.kind == "image" else _audio_settings(pipeline, model)
    return {
        "kind": pipeline.kind,
        "processor": described,
        "labels": labels,
        "function": _function(configuration, pipeline.kind),
        "defaults": defaults,
        "output": "logits",
    }


def _function(configuration: Any, kind: str) -> str:
    """As the pipeline chooses it: of one label alone that for pictures takes the sigmoid, and that for audio not."""
    problem = getattr(configuration, "problem_type", None)
    if problem == "regression":
        return "none"
    single = kind == "image" and configuration.num_labels == 1
    return "sigmoid" if problem == "multi_label_classification" or single else "softmax"


def _image_settings(original: Any) -> dict[str, Any]:
    def setting(name: str) -> Any:
        return getattr(original, name, None)

    if changed := [name for name in ("do_pad", "do_flip_channel_order", "do_reduce_labels") if setting(name)]:
        raise SourceError(f"its image processor does what a published model can't ({changed[0]})")
    size = {name: int(value) for name, value in dict(setting("size") or {}).items() if value}
    if setting("do_resize") and set(size) not in ({"height", "width"}, {"shortest_edge"}):
        raise SourceError(f"its image processor resizes by {', '.join(size)}, which a published model can't")
    crop = dict(setting("crop_size") or {})
    return {
        "resize": size if setting("do_resize") else None,
        "resample": int(setting("resample")) if setting("resample") is not None else 2,
        "crop_pct": setting("crop_pct"),
        "crop": [int(crop["height"]), int(crop["width"])] if setting("do_center_crop") else None,
        "rescale": float(setting("rescale_factor")) if setting("do_rescale") else None,
        "mean": [float(value) for value in setting("image_mean")] if setting("do_normalize") else None,
        "std": [float(value) for value in setting("image_std")] if setting("do_normalize") else None,
    }


def _audio_settings(pipeline: MediaPipeline, model: Any) -> dict[str, Any]:
    original = pipeline.original
    if not hasattr(original, "do_normalize"):  # Whisper's and others, whose spectrograms are of another kind
        raise SourceError(f"its feature extractor ({type(original).__name__}) computes what a published model can't")
    shared = {"sampling_rate": pipeline.rate, "normalize": bool(original.do_normalize)}
    if hasattr(original, "num_mel_bins"):
        return {
            **shared,
            "kind": "mel",
            "shortest": _MEL_FRAME,
            "bins": int(original.num_mel_bins),
            "frames": int(original.max_length),
            "mean": float(original.mean),
            "std": float(original.std),
        }
    return {**shared, "kind": "waveform", "shortest": _receptive_field(model.config)}


def _receptive_field(configuration: Any) -> int:
    """The samples that one frame of the network is made of."""
    samples = 1
    strides = getattr(configuration, "conv_stride", ())
    for kernel, stride in reversed(list(zip(getattr(configuration, "conv_kernel", ()), strides, strict=True))):
        samples = (samples - 1) * int(stride) + int(kernel)
    return samples


def _pictures() -> list[Any]:
    """Smooth and rough, of several shapes; the first is square."""
    import numpy as np

    found = []
    for height, width in ((_SIDE, _SIDE), (2 * _SIDE, _SIDE), (_SIDE // 3, _SIDE // 2)):
        down, across = np.mgrid[:height, :width]
        smooth = [down * 255 // height, across * 255 // width, 127 + 120 * np.sin(across / 9)]
        found.append(np.stack(smooth, axis=-1).astype(np.uint8))
        found.append(np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8))
    return found


def _tones(rate: int) -> list[Any]:
    """A falling tone, noise, and both, of half a second and of a whole one."""
    import numpy as np

    noise = np.random.default_rng(0).standard_normal(rate)
    seconds = np.arange(rate) / rate
    tone = np.sin(2 * np.pi * (rate / 10) * seconds * (1 - seconds / 2))
    waves = (tone, noise / 4, tone[: rate // 2] / 2, (tone + noise / 8)[: rate // 2])
    return [np.ascontiguousarray(wave, np.float32) for wave in waves]


def _as_file(pixels: Any) -> str:
    """The base64 text of a PNG."""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def _as_text(array: Any) -> str:
    import numpy as np

    content = io.BytesIO()
    np.save(content, np.asarray(array), allow_pickle=False)
    return ARRAY + base64.b64encode(content.getvalue()).decode()
