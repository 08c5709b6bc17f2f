"""Olive's static int8 of one ONNX file. Runs in an environment of its own, with `olive-ai` and `onnxruntime`:

    python olive_int8.py MODEL.onnx SAMPLES.npz OUT.onnx REDUCE_RANGE

SAMPLES.npz holds one array for each input, axis 0 being the sample. `benchmarks/int8.py --olive PYTHON` calls it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from olive.data.config import DataConfig
from olive.data.registry import Registry
from olive.workflows import run


class Samples:
    """The arrays, sample by sample, each with a batch of one, as Olive's calibration reads them: inputs and a label."""

    def __init__(self, path: str) -> None:
        with np.load(path) as held:
            self.arrays = {name: held[name] for name in held.files}

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> tuple[dict[str, np.ndarray], int]:
        return {name: array[index] for name, array in self.arrays.items()}, 0


@Registry.register_dataset("file_of_samples")
def file_of_samples(data_dir: str, **_: object) -> Samples:
    return Samples(data_dir)


def main(model: str, samples: str, out: str, reduce_range: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        config = {
            "input_model": {"type": "ONNXModel", "model_path": model},
            "data_configs": [
                DataConfig(
                    name="calibration",
                    type="DataContainer",
                    load_dataset_config={"type": "file_of_samples", "data_dir": samples},
                    pre_process_data_config={"type": "skip_pre_process"},
                    post_process_data_config={"type": "skip_post_process"},
                    dataloader_config={"batch_size": 1},
                ).to_json()
            ],
            "passes": {
                "int8": {
                    "type": "OnnxStaticQuantization",
                    "data_config": "calibration",
                    "quant_format": "QDQ",
                    "per_channel": True,
                    "activation_type": "uint8",
                    "precision": "int8",
                    "reduce_range": json.loads(reduce_range),
                }
            },
            "output_dir": f"{scratch}/out",
            "cache_dir": f"{scratch}/cache",
            "log_severity_level": 3,
        }
        run(config)
        written = max(Path(scratch, "out").rglob("*.onnx"), key=lambda file: file.stat().st_size)
        shutil.copyfile(written, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
