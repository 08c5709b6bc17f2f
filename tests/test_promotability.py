"""What `promote` by hand asks a published version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import factories
import numpy as np
import pandas as pd
import pytest
from tiny_bundle import manifest_fields, save_bundle

from compile_stage.core.digest import plain
from compile_stage.core.records import Budget, Data, DataSpec
from compile_stage.engine import calls
from compile_stage.promotability import published_samples
from compile_stage.serving.manifest import read_manifest
from compile_stage.verification import Published

pytestmark = pytest.mark.filterwarnings("ignore")  # of MLflow, which saves the bundle


class InThisProcess:
    """An engine whose workers are this process."""

    @contextmanager
    def worker(self, name: str, limits: Any) -> Iterator[Any]:
        yield self

    def call(self, function: str, /, **arguments: Any) -> Any:
        return plain(getattr(calls, function)(**{name: plain(value) for name, value in arguments.items()}))


def test_the_columns_of_a_table_are_found_without_the_original(tmp_path: Path) -> None:
    """Broken: of a model of tables, whose original is not fetched, the answers were compared on random numbers, and the
    note blamed a file of the original that was not there."""
    rows = pd.DataFrame(np.arange(160, dtype=np.float32).reshape(40, 4), columns=list("abcd"))
    rows[list("dcba")].to_csv(tmp_path / "rows.csv", index=False)
    spec = DataSpec(source=f"file:{tmp_path / 'rows.csv'}")
    fields = manifest_fields()
    fields["source"] = {**fields["source"], "flavor": "sklearn"}
    fields["data"] = {"samples": {}, "spec": plain(Data(validation=spec, calibration=spec))}
    answer = {"kind": "array", "outputs": ["y"], "columns": list("abcd"), "frame_in_frame_out": False}
    folder = save_bundle(tmp_path, **{**fields, "answer": answer})
    published = Published(
        uri="models:/m-compiled/1", folder=folder, manifest=read_manifest(folder), signed_by=None, trust=None
    )
    context = factories.run_context(tmp_path / "run", InThisProcess())
    found = published_samples(context, published, factories.job(), Budget(), 40)
    assert found is not None
    assert found.real
    np.testing.assert_array_equal(np.load(Path(found.path) / "inputs" / "x.npy"), rows.to_numpy())
