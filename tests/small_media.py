"""Small pipelines for pictures and recordings, logged as a user would: for tests of predict(), what goes in and out."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np

TASKS = {
    "vit": "image-classification",
    "vit by torchvision": "image-classification",
    "resnet": "image-classification",
    "detr": "object-detection",
    "features": "image-feature-extraction",
    "ast": "audio-classification",
    "whisper": "audio-classification",
    "wav2vec2": "audio-classification",
}
LABELS = [f"kind {number}" for number in range(7)]  # more than the five that a pipeline names of pictures
RATE = 8000


def picture(height: int = 40, width: int = 30) -> Any:
    """Pixels [height, width, 3]."""
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(pixels: Any, form: str = "PNG", **how: Any) -> str:
    """A file's content as base64 text."""
    from PIL import Image

    content = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(content, form, **how)
    return base64.b64encode(content.getvalue()).decode()


def sound(samples: int = 4000, seed: int = 0) -> Any:
    """A waveform at `RATE`."""
    return (np.random.default_rng(seed).standard_normal(samples) / 4).clip(-1, 1).astype(np.float32)


def wav(waveform: Any, rate: int = RATE, channels: int = 1) -> bytes:
    """A WAV file of 16-bit numbers."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((waveform * 32767).astype("<i2").tobytes())
    return content.getvalue()


def network(kind: str) -> Any:
    """A network with random weights, spread wide enough that its scores differ."""
    import torch
    import transformers

    labels = {"num_labels": len(LABELS), "id2label": dict(enumerate(LABELS)), "label2id": {}}
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    wide = {**small, **labels, "initializer_range": 0.5}
    torch.manual_seed(0)
    if kind.startswith("vit"):
        made = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **wide))
    elif kind == "features":  # as from a checkpoint that was trained without the pooler
        made = transformers.ViTModel(
            transformers.ViTConfig(image_size=32, patch_size=8, **small, initializer_range=0.5), add_pooling_layer=False
        )
    elif kind == "detr":
        backbone = transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"]
        )
        layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 32, "num_queries": 6}
        made = transformers.DetrForObjectDetection(
            transformers.DetrConfig(
                use_timm_backbone=False, backbone=None, backbone_config=backbone, init_std=0.5,
                **layers, **heads, **labels,
            )
        )  # fmt: skip
    elif kind == "resnet":
        made = transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", **labels
            )
        )
    elif kind == "ast":
        made = transformers.ASTForAudioClassification(transformers.ASTConfig(max_length=48, num_mel_bins=32, **wide))
    elif kind == "whisper":
        made = transformers.WhisperForAudioClassification(
            transformers.WhisperConfig(
                vocab_size=32, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=32,
                max_source_positions=50, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
                **labels,
            )
        )  # fmt: skip
    else:
        made = transformers.Wav2Vec2ForSequenceClassification(
            transformers.Wav2Vec2Config(
                conv_dim=(16, 16), conv_kernel=(10, 8), conv_stride=(5, 4), num_feat_extract_layers=2,
                num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, classifier_proj_size=16, **wide,
            )
        )  # fmt: skip
    return made.eval()


def processor(kind: str) -> Any:
    """The one that goes with `network`."""
    import transformers

    if kind in ("vit", "features"):
        return transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    if kind == "vit by torchvision":
        return transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    if kind == "detr":
        return transformers.DetrImageProcessorPil(size={"height": 32, "width": 32}, do_pad=False)
    if kind == "resnet":
        return transformers.ConvNextImageProcessorPil(size={"shortest_edge": 32})
    if kind == "ast":
        return transformers.ASTFeatureExtractor(sampling_rate=RATE, num_mel_bins=32, max_length=48)
    if kind == "whisper":
        return transformers.WhisperFeatureExtractor(sampling_rate=RATE, feature_size=32, chunk_length=1, hop_length=80)
    return transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE)


def save(path: Path, kind: str, example: Any = None, **settings: Any) -> Path:
    """Log a pipeline to a folder, as `mlflow.transformers.save_model` of a user does."""
    import mlflow
    import transformers

    task = TASKS[kind]
    part = {"feature_extractor" if task == "audio-classification" else "image_processor": processor(kind)}
    pipeline = transformers.pipeline(task, model=network(kind), **part)
    mlflow.transformers.save_model(
        pipeline, path, task=task, input_example=example, pip_requirements=["transformers"], **settings
    )
    return path
