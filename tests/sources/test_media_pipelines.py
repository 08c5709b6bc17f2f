"""A published model of pictures or recordings answers what MLflow's pyfunc of the original pipeline answers: the
processor that it carries, around the original network, is laid beside that pyfunc."""

from __future__ import annotations

import base64
import json
import warnings
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import small_media

from compile_stage.core.records import Compliance, Processor, SourceModel, Target
from compile_stage.serving.media import MediaProcessor
from compile_stage.serving.prediction_io import InputRefusedError
from compile_stage.serving.predictions import plain_prediction, refuse_prediction
from compile_stage.sources.transformers import TransformersSource

from .conftest import Proof, source_of

pytest.importorskip("transformers", reason="the transformers source needs transformers")
pytest.importorskip("PIL", reason="pictures are read by Pillow")


class Pair:
    """The original's pyfunc and the processor around the original's network."""

    def __init__(self, path: Path) -> None:
        self.source = source_of(path, "transformers")
        self.made: Processor = TransformersSource().processor(self.source, path / "none")
        self.original = mlflow.pyfunc.load_model(self.source.path)

    def answer(self, data: Any, params: dict[str, Any] | None = None) -> Any:
        with TransformersSource().open(self.source, Target(name="cpu")) as session:
            return MediaProcessor(self.made.media, session.signature, batch_size=2).predict(data, params, session.run)

    def demand_same(self, data: Any, params: dict[str, Any] | None = None, *, enforced: bool = True) -> None:
        """Compare the two; `enforced=False` as behind another signature than that of the example."""
        expected = (self.original if enforced else self.original._model_impl).predict(data, params=params)
        found = self.answer(data, params)
        plain = [plain_prediction(answer, ranks_labels=True) for answer in (found, expected)]
        assert plain[0]["ranks"], "nothing was compared"
        assert refuse_prediction(*plain, 1e-5) is None, (plain, params)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Behind MLflow's signature of strings."""
    warnings.simplefilter("ignore")  # as `quiet_third_parties`
    return Pair(small_media.save(tmp_path_factory.mktemp("vit") / "model", "vit", [small_media.encoded(_PICTURE)]))


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Behind MLflow's signature of bytes."""
    warnings.simplefilter("ignore")
    return Pair(small_media.save(tmp_path_factory.mktemp("wave") / "model", "wav2vec2"))


_PICTURE = small_media.picture()


def test_pictures_are_taken_and_answered_as_by_the_pyfunc(pictures: Pair, tmp_path: Path) -> None:
    """Broken: a client that sends a picture to the published classifier gets an error, or other labels and scores."""
    from PIL import Image

    assert pictures.made.refusal == ""
    assert pictures.made.runtime.keys() == {"pillow"}
    rotated = Image.new("RGB", (1, 1)).getexif()
    rotated[0x0112] = 6  # lies on its side
    grey, clear = Image.fromarray(_PICTURE[..., 0]), Image.fromarray(_PICTURE).convert("RGBA")
    many = [
        small_media.encoded(_PICTURE),
        small_media.encoded(small_media.picture(200, 90), "JPEG", exif=rotated),
        small_media.encoded(grey),
        small_media.encoded(clear),
    ]
    file = tmp_path / "picture.png"
    file.write_bytes(base64.b64decode(many[0]))
    for data in (many, pd.DataFrame({"image": many}), [str(file)], np.array(many)):
        pictures.demand_same(data)
    for data in (many[0], str(file), _PICTURE, np.moveaxis(_PICTURE, -1, 0), {"inputs": many[0]}):
        pictures.demand_same(data, enforced=False)
    pictures.demand_same(np.stack([_PICTURE, _PICTURE // 2]), enforced=False)  # which is answered for the first
    for params in ({"top_k": 2}, {"top_k": 99}, {"function_to_apply": "sigmoid"}, {"function_to_apply": "none"}):
        pictures.demand_same(many, params, enforced=False)
    assert len(pictures.answer(many).columns) == 5


def test_what_is_no_picture_is_refused_by_name(pictures: Pair) -> None:
    """Broken: a wrong request ends in a traceback, or the server fetches an address that a client names."""
    good = small_media.encoded(_PICTURE)
    for data, message in (
        ([good, "nonsense"], "image 1: it is no picture"),
        (["https://example.org/cat.png"], "not fetched from the web"),
        ([], "nothing to classify"),
        ([np.zeros((9, 9, 9), np.uint8)], "no axis of 1, 3 or 4 channels"),
        ([3], "a picture is"),
        ({"a": good, "b": good}, "under one name"),
    ):
        with pytest.raises(InputRefusedError, match=message):
            pictures.answer(data)
    for params, message in (({"temperature": 1}, "no param 'temperature'"), ({"top_k": "all"}, "top_k")):
        with pytest.raises(InputRefusedError, match=message):
            pictures.answer(good, params)


def test_arrays_behind_a_signature_of_tensors_and_other_processors(tmp_path: Path) -> None:
    """Broken: a model that was logged with pixels as its example is published with tensors only, or a processor that
    crops is followed wrongly."""
    both = Pair(small_media.save(tmp_path / "model", "resnet", _PICTURE, model_config={"top_k": 3}))
    assert both.made.refusal == ""
    both.demand_same(_PICTURE)
    both.demand_same(small_media.picture(60, 30))
    assert len(both.answer(_PICTURE)) == 3
    asked = TransformersSource().predictions(both.source, {})
    assert asked is not None
    assert (asked.each, len(asked.answer["ranks"])) == (True, 3)


def test_recordings_are_taken_and_answered_as_by_the_pyfunc(sounds: Pair, tmp_path: Path) -> None:
    """Broken: a client that sends a recording to the published classifier gets an error, or other labels and scores."""
    assert sounds.made.refusal == ""
    assert sounds.made.runtime == {}, "recordings need no package"
    waves = [small_media.sound(), small_media.sound(seed=1), small_media.sound(3000)]
    sounds.demand_same(pd.DataFrame({"audio": waves}))
    sounds.demand_same(pd.DataFrame({"audio": waves[:1]}))
    sounds.demand_same(waves[0], enforced=False)
    sounds.demand_same(waves[0].astype(np.float64), {"top_k": 2}, enforced=False)
    sounds.demand_same(waves[0], {"function_to_apply": "sigmoid"}, enforced=False)
    file = small_media.wav(waves[0])
    (tmp_path / "sound.wav").write_bytes(file)
    same = sounds.answer((waves[0] * 32767).astype(np.int16) / np.float32(32768))
    for data in (file, base64.b64encode(file), str(tmp_path / "sound.wav"), [file]):
        pd.testing.assert_frame_equal(sounds.answer(data), same)


def test_what_is_no_recording_is_refused_by_name(sounds: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a wrong request ends in a traceback, or a file at another rate is taken for one at the model's."""
    monkeypatch.setenv("PATH", "")  # no ffmpeg
    for data, message in (
        (b"nonsense", "audio 0: it is no WAV file"),
        (small_media.wav(small_media.sound(), rate=44100), "at 8000 Hz"),
        ("nowhere.wav", "there is no file"),
        ("https://example.org/cat.wav", "not fetched from the web"),
        (small_media.sound(40), "45 samples or more"),
        ([np.zeros((2, 4000), np.float32)], "of one channel"),
    ):
        with pytest.raises(InputRefusedError, match=message):
            sounds.answer(data)


def test_mel_energies_are_those_of_the_feature_extractor(tmp_path: Path) -> None:
    """Broken: an audio transformer's published version reads another spectrogram than its original."""
    both = Pair(small_media.save(tmp_path / "model", "ast", small_media.sound()))
    assert both.made.refusal == ""
    for samples in (400, 4000, 20000):  # one frame, some, and more than it takes
        both.demand_same(small_media.sound(samples))
    with pytest.raises(InputRefusedError, match="400 samples or more"):
        both.answer(small_media.sound(399))


def test_pictures_and_recordings_become_samples(pictures: Pair, sounds: Pair) -> None:
    """Broken: validation samples that are pictures or recordings can't be used, or are prepared otherwise."""
    made = TransformersSource().tokenize(pictures.source, [_PICTURE, small_media.encoded(small_media.picture(20, 50))])
    expected = small_media.processor("vit")(images=[_PICTURE, small_media.picture(20, 50)], return_tensors="np")
    np.testing.assert_allclose(made["pixel_values"], expected["pixel_values"], atol=1e-6)
    example = TransformersSource().example(pictures.source)
    assert example is not None
    np.testing.assert_allclose(example["pixel_values"], expected["pixel_values"][:1], atol=1e-6)
    waves = [small_media.sound(), small_media.sound(seed=1)]
    assert TransformersSource().tokenize(sounds.source, waves)["input_values"].shape == (2, 4000)
    assert TransformersSource().class_names(sounds.source) == small_media.LABELS


def _changed(source: SourceModel, file: str, **settings: Any) -> None:
    path = Path(source.path) / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_a_processor_that_does_more_keeps_pictures_out(tmp_path: Path) -> None:
    """Broken: predict() is published although it reads pictures otherwise than the original; or a file beside the
    settings is read."""
    path = small_media.save(tmp_path / "model", "vit", [small_media.encoded(_PICTURE)])
    source = source_of(path, "transformers")
    settings = "components/image_processor/preprocessor_config.json"
    _changed(source, settings, do_pad=True)
    assert "do_pad" in TransformersSource().processor(source, tmp_path).refusal
    _changed(source, settings, do_pad=False, size={"shortest_edge": 32, "longest_edge": 64})
    assert "resizes by" in TransformersSource().processor(source, tmp_path).refusal
    (path / "components" / "image_processor" / "code.py").write_text("raise SystemExit")
    assert "code.py" in str(TransformersSource().refuse(source, Compliance()))


def test_another_feature_extractor_is_named(tmp_path: Path) -> None:
    """Broken: the note of a Whisper classifier said that its pyfunc can't be loaded, where it can; or its spectrogram
    is taken for another one."""
    source = source_of(small_media.save(tmp_path / "model", "whisper"), "transformers")
    reason = TransformersSource().processor(source, tmp_path).refusal
    assert reason == "its feature extractor (WhisperFeatureExtractor) computes what a published model can't"


def test_a_processor_of_torchvision_is_said_how_to_replace(tmp_path: Path) -> None:
    """Broken: whoever has torchvision installed, by which transformers then resizes, reads that scores are off, and not
    why, and gets no published version that takes pictures."""
    pytest.importorskip("torchvision", reason="transformers resizes by it where it is installed")
    example = [small_media.encoded(_PICTURE)]
    path = small_media.save(tmp_path / "torchvision", "vit by torchvision", example)
    reason = TransformersSource().processor(source_of(path, "transformers"), tmp_path).refusal
    assert "log it with image_processor=transformers.ViTImageProcessorPil.from_pretrained(...)" in reason
    followed = source_of(small_media.save(tmp_path / "pillow", "vit", example), "transformers")
    assert TransformersSource().processor(followed, tmp_path).refusal == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["detr", "features"])
def test_detectors_and_features_of_pictures_have_the_networks_outputs(kind: str, tmp_path: Path, prove: Proof) -> None:
    """Broken: a detector's raw heads, or the features of pictures, are other than the original's; or predict() is said
    to take pictures, which MLflow's own does not."""
    source = source_of(small_media.save(tmp_path / "model", kind), "transformers")
    assert TransformersSource().refuse(source, Compliance()) is None
    pixels = TransformersSource().tokenize(source, [_PICTURE, _PICTURE // 2])
    made = prove(source, pixels, sizes=(1, 2))
    outputs = [str(spec) for spec in made.signature.outputs]
    if kind == "features":
        # ViTModel makes its missing pooler of random weights at each load.
        assert outputs == ["last_hidden_state: float32[batch, 17, 32]"]
    else:
        assert outputs == ["logits: float32[batch, 6, 8]", "pred_boxes: float32[batch, 6, 4]"]
    assert "MLflow's own pyfunc has no answer" in TransformersSource().processor(source, tmp_path).refusal


def test_a_network_whose_files_lack_weights_is_refused(pictures: Pair, tmp_path: Path) -> None:
    """Broken: what transformers drew at random is taken for the model, and each load is another baseline."""
    from safetensors.torch import load_file, save_file

    path = small_media.save(tmp_path / "model", "vit")
    weights = load_file(path / "model" / "model.safetensors")
    del weights["classifier.weight"]
    save_file(weights, path / "model" / "model.safetensors", {"format": "pt"})
    reason = str(TransformersSource().refuse(source_of(path, "transformers"), Compliance()))
    assert "its weights lack 1 of the network's" in reason
    assert "classifier.weight" in reason
    assert TransformersSource().refuse(pictures.source, Compliance()) is None
