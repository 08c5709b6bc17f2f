"""A published model refuses whole numbers and categories that its original does not take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compile_stage.core.tensors import Signature, TensorSpec
from compile_stage.serving.prediction_io import InputRefusedError, to_batch
from compile_stage.serving.refused_values import RefusedValues

RULES: dict[str, Any] = {
    "taken_values": {
        "rules": [
            {"input": "ids", "columns": [0, 2], "least": 0, "most": 9, "reason": "the original refuses any other"},
            {"input": "city", "columns": None, "values": ["Bonn", "Oslo"], "reason": "the original refuses any other"},
            {"input": "zone", "columns": [1], "values": [1.0, 5.0], "reason": "the original refuses any other"},
            {"input": "position", "columns": None, "least": None, "most": 3, "reason": "it does"},
        ]
    }
}


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"ids": np.array([[0, -7, 9]])}, None),
        (
            {"ids": np.array([[0, 99, 10]])},
            "column 2 of input 'ids' holds 10, and takes whole numbers from 0 to 9: the",
        ),
        ({"ids": np.array([[-1, 0, 3]])}, "column 0 of input 'ids' holds -1, and takes"),
        ({"ids": np.zeros((0, 3), np.int64)}, None),
        ({"city": np.array([["Oslo"], ["Rome"]], object)}, "input 'city' holds 'Rome', and takes 'Bonn', 'Oslo': the"),
        ({"zone": np.array([[7, 1], [8, 5]], np.float32)}, None),
        ({"zone": np.array([[1, 250000001.0]])}, "column 1 of input 'zone' holds 250000001, and takes 1, 5: the"),
        ({"zone": np.array([[1, np.nan]], np.float32)}, None),
        ({"position": np.array([-5, 3])}, None),
        ({"position": np.array([4])}, "input 'position' holds 4, and takes whole numbers up to 3: it does"),
    ],
)
def test_what_is_outside_is_refused_and_nothing_else(batch: Any, said: str | None) -> None:
    """Broken: an id beyond the table would be answered with whatever lies there; or a good request be refused."""
    found = RefusedValues.of(RULES).refuse(batch)
    assert found is None if said is None else found is not None and found.startswith(said)


def test_a_validation_of_this_machine_goes_before_the_manifest_and_older_models_have_neither() -> None:
    """Broken: what another machine's runtime does from the end of a table would be served here."""
    ids = {"ids": np.array([[10, 0, 0]])}
    wider = {"taken_values": {"rules": [{"input": "ids", "columns": None, "least": 0, "most": 10, "reason": ""}]}}
    assert RefusedValues.of(RULES, wider).refuse(ids) is None
    assert RefusedValues.of({}, None).refuse(ids) is None
    assert RefusedValues.of({"taken_values": None}).refuse(ids) is None


def test_predict_names_the_column_of_a_data_frame() -> None:
    """Broken: a user would be told the number of a column that has a name."""
    signature = Signature(
        inputs=(TensorSpec(name="ids", dtype="int64", shape=("batch", 3)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("batch",)),),
    )
    how = {"columns": ["user", "age", "item"]}
    rule = RefusedValues.of(RULES)
    assert to_batch([[1, 2, 3]], signature, how, rule)["ids"].tolist() == [[1, 2, 3]]
    with pytest.raises(InputRefusedError, match=r"^column 'item' of input 'ids' holds 12, and takes whole numbers"):
        to_batch([[1, 2, 12]], signature, how, rule)
