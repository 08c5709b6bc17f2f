"""Predictions over all samples: batch sizes are really run, and what can't be laid out by sample is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_stage.core.errors import IntegrityError, SourceError
from compile_stage.core.tensors import Dim, Signature, TensorSpec
from compile_stage.measure.predict import open_outputs, predict
from compile_stage.measure.samples import Samples

X = np.arange(30, dtype=np.float32).reshape(10, 3)


class Model:
    """A session over a plain function that remembers the sizes it was run at."""

    def __init__(
        self,
        function: Callable[[Any], Mapping[str, Any]],
        outputs: tuple[str, ...] = ("y",),
        batch: Dim = "batch",
    ) -> None:
        self.function = function
        self.sizes: list[int] = []
        self.signature = Signature(
            inputs=(TensorSpec(name="x", dtype="float32", shape=(batch, 3)),),
            outputs=tuple(TensorSpec(name=n, dtype="float32", shape=(batch, 3)) for n in outputs),
        )

    def run(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        self.sizes.append(len(batch["x"]))
        return self.function(batch["x"])


def samples(x: Any = X) -> Samples:
    return Samples(len(x), {"x": x}, None)


def twice(x: Any) -> dict[str, Any]:
    return {"y": x * 2}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_every_sample_is_answered_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, count: int, size: int, fixed: bool
) -> None:
    x = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    model = Model(twice, batch=size if fixed else "batch")
    written = predict(model, samples(x), size, tmp_path_factory.mktemp("out"))
    assert np.array_equal(open_outputs(written)["y"], x * 2)
    assert set(model.sizes) == {size}  # the batch size that is judged was really run, and no other


def test_another_fixed_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="batches of 4 only"):
        predict(Model(twice, batch=4), samples(), 8, tmp_path)
    with pytest.raises(SourceError, match="no samples"):
        predict(Model(twice), samples(X[:0]), 8, tmp_path)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: {"y": x.sum()}, "axis 0 must be the batch"),
        (lambda x: {"y": x.sum(axis=0)}, "axis 0 must be the batch"),  # [3] for a batch of 4
        (lambda x: {"y": x[:0]}, "axis 0 must be the batch"),
        (lambda x: {"y": x[:1]}, "axis 0 must be the batch"),
        (lambda x: {}, "answered with nothing"),
        (lambda x: {"z": x}, "'z'"),
        (lambda x: {"y": x, "z": x}, "'z'"),
        (lambda x: {"y": np.zeros((len(x), int(x[0, 0]) + 1))}, "depends on the values"),
        (lambda x: {"y": x.astype(np.float64) if x[0, 0] > 5 else x}, "float64"),
        (lambda x: {"y": np.array([[None]] * len(x))}, "Python objects"),
    ],
)
def test_what_can_not_be_laid_out_by_sample_is_refused(function: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=says):
        predict(Model(function), samples(), 4, tmp_path)


def test_text_of_any_length_and_odd_names(tmp_path: Path) -> None:
    """The longest label of the first batch must not cut those of later ones."""
    names = np.array(["a", "bb", "a rather long label"])

    def label(x: Any) -> dict[str, Any]:
        found = names[(x[:, 0] // 12).astype(int)]
        return {"out/label:0": found.astype(object), "OUT/label:0": x}

    written = predict(Model(label, ("out/label:0", "OUT/label:0")), samples(), 4, tmp_path)
    found = open_outputs(written)
    assert found["out/label:0"].tolist() == label(X)["out/label:0"].tolist()
    assert np.array_equal(found["OUT/label:0"], X)
    assert all(Path(path).parent == tmp_path for path in written.values())


def test_bfloat16_is_kept_exactly(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="comes with onnx")
    written = predict(Model(lambda x: {"y": x.astype(ml_dtypes.bfloat16)}), samples(), 4, tmp_path)
    assert np.array_equal(open_outputs(written)["y"], X)


def test_outputs_of_a_folder_and_lost_files(tmp_path: Path) -> None:
    written = predict(Model(twice), samples(), 4, tmp_path)
    assert list(open_outputs(tmp_path)) == ["y"]
    Path(written["y"]).write_bytes(b"cut")
    with pytest.raises(IntegrityError):
        open_outputs(written)


def test_many_small_outputs_are_open_at_once_and_a_large_one_is_not_read(tmp_path: Path) -> None:
    """Broken: a model with 30 outputs ends with "Too many open files", or one of large outputs fills the memory."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("what is open is read from /proc")
    files = {str(number): str(tmp_path / f"{number}.npy") for number in range(50)}
    for file in files.values():
        np.save(file, X)
    np.save(tmp_path / "large.npy", np.zeros(300_000))
    before = len(list(Path("/proc/self/fd").iterdir()))
    opened = open_outputs({**files, "large": str(tmp_path / "large.npy")})
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
    assert isinstance(opened["large"], np.memmap)
    assert np.array_equal(opened["7"], X)
    assert not opened["7"].flags.writeable
