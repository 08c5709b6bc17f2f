"""What a recipe is, and what all recipes of a network are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]
Run = Callable[[Batch], np.ndarray]
"""One call: inputs by name, axis 0 being the sample → the network's one output."""

BATCHES = (1, 8)
SAMPLES = 64
TRANSFORMERS = ("bert6", "vit")
CONVOLUTIONAL = ("resnet50", "separable", "small")


@dataclass(frozen=True)
class Given:
    """One network and its samples, in a folder that `write` fills; the same for every peer.

    Attributes:
        folder: `model.onnx` (free batch), `program-BATCH.pt2` (PyTorch programs of a fixed batch), `calibration.npz`,
            `validation.npz`, and `original.npy`, the FP32 original's answers to the validation samples.
    """

    network: str
    folder: Path
    threads: int

    def write(self) -> None:
        """Export the network and ask it, once for all peers. Samples are those that the stage is given."""
        import networks
        import onnx
        import torch

        self.folder.mkdir(parents=True, exist_ok=True)
        for name, seed in (("validation", 1), ("calibration", 2)):
            np.savez(self.folder / f"{name}.npz", **networks.samples(self.network, SAMPLES, seed))
        onnx.save(networks.export(self.network), str(self.onnx))
        torch.set_num_threads(self.threads)
        module = self.module
        with torch.no_grad():
            answers = [module(*self.tensors(at, 8)).numpy() for at in range(0, SAMPLES, 8)]
        np.save(self.folder / "original.npy", np.concatenate(answers))
        for batch in BATCHES:
            with torch.no_grad():
                program = torch.export.export(module, self.tensors(0, batch))
            torch.export.save(program, self.folder / f"program-{batch}.pt2")

    @property
    def onnx(self) -> Path:
        return self.folder / "model.onnx"

    @cached_property
    def validation(self) -> Batch:
        return dict(np.load(self.folder / "validation.npz"))

    @cached_property
    def calibration(self) -> Batch:
        return dict(np.load(self.folder / "calibration.npz"))

    def rows(self, start: int, count: int = 1) -> Batch:
        """Calibration samples, `count` from `start` on."""
        return {name: array[start : start + count] for name, array in self.calibration.items()}

    @cached_property
    def module(self) -> Any:
        """The network in PyTorch, in evaluation mode."""
        import networks

        return networks.NETWORKS[self.network]()

    def tensors(self, start: int, count: int) -> tuple[Any, ...]:
        """Validation samples as positional inputs of the module."""
        import torch

        return tuple(torch.from_numpy(array[start : start + count]) for array in self.validation.values())

    def program(self, batch: int) -> Any:
        """The network as a PyTorch program of that batch size, where the network's own code is not at hand."""
        import torch

        return torch.export.load(self.folder / f"program-{batch}.pt2")


@dataclass(frozen=True)
class Recipe:
    """One way to run a network by hand.

    Attributes:
        name: With the peer's own words.
        precision: Whose tolerances of the policy it must meet.
        make: Writes its files into a folder, once for all starts.
        open: The folder, the batch size and the threads → the call that is timed. Arrays in, an array out, as in the
            stage's own sessions.
        networks: It is meant for these; empty for all.
        batches: It is meant for these batch sizes.
    """

    name: str
    precision: str
    make: Callable[[Given, Path], None]
    open: Callable[[Given, Path, int], Run]
    networks: tuple[str, ...] = ()
    batches: tuple[int, ...] = BATCHES

    def suits(self, network: str, batch: int) -> bool:
        return (not self.networks or network in self.networks) and batch in self.batches


def nothing(given: Given, folder: Path) -> None:
    """Of a recipe that is made when it is opened."""
