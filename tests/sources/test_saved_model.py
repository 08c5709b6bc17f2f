"""SavedModels made by hand, byte by byte: what does more than compute is refused with the reason, without
TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_stage.sources import protobuf, saved_model


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def node(operator: str, calls: str = "", in_list: bool = False) -> bytes:
    """A NodeDef; `calls` names a function in one of its attributes."""
    content = field(1, f"node/{operator}") + field(2, operator)
    if calls:
        function = field(1, calls)
        value = field(1, field(9, function)) if in_list else field(10, function)
        content += field(5, field(1, "f") + field(2, value))
    return content


def function(name: str, *nodes: bytes) -> bytes:
    return field(1, field(1, name)) + b"".join(field(3, one) for one in nodes)


def tensor(name: str, kind: int, *sizes: int) -> bytes:
    shape = b"".join(field(2, field(1, size)) for size in sizes)
    return field(1, name) + field(2, field(1, f"{name}:0") + field(2, kind) + field(3, shape))


def signature(name: str, inputs: Sequence[bytes], outputs: Sequence[bytes]) -> bytes:
    sides = b"".join(field(1, one) for one in inputs) + b"".join(field(2, one) for one in outputs)
    return field(1, name) + field(2, sides)


SERVING = signature("serving_default", [tensor("x", 1, -1, 4)], [tensor("output_0", 1, -1, 2)])
SAVER = function("__inference__traced_save_1", node("SaveV2"), node("MergeV2Checkpoints"))


def written(
    folder: Path,
    functions: Iterable[bytes],
    objects: Iterable[bytes] = (),
    nodes: Iterable[bytes] = (),
    signatures: Iterable[bytes] = (SERVING,),
) -> Path:
    """A SavedModel with these functions, objects, nodes of its outer graph, and signatures."""
    library = b"".join(field(1, one) for one in functions)
    graph = b"".join(field(1, one) for one in nodes) + field(2, library)
    items = field(1, field(6, field(1, "__inference_call_1"))) + b"".join(field(1, one) for one in objects)
    meta = field(2, graph) + b"".join(field(5, one) for one in signatures) + field(7, items)
    (folder / "saved_model.pb").write_bytes(field(1, 1) + field(2, meta))
    (folder / "variables").mkdir()
    (folder / "variables" / "variables.index").write_bytes(b"index")
    return folder


CALL = function("__inference_call_1", node("MatMul"), node("ReadVariableOp"), node("Relu"))


def test_a_graph_that_computes_is_taken_with_its_signature(tmp_path: Path) -> None:
    """Broken: every SavedModel would be refused, since each holds operators that write checkpoints."""
    folder = written(tmp_path, [CALL, SAVER], nodes=[node("VarHandleOp"), node("StatefulPartitionedCall", "save")])
    assert saved_model.refuse(folder) is None
    assert saved_model.signature(folder) == saved_model.SavedSignature(
        "serving_default",
        (saved_model.Tensor("x", "float32", (None, 4)),),
        (saved_model.Tensor("output_0", "float32", (None, 2)),),
    )


@pytest.mark.parametrize("operator", ["PyFunc", "PyFuncStateless", "EagerPyFunc"])
@pytest.mark.parametrize("trusted", [False, True])
def test_a_python_function_is_refused_also_where_the_policy_trusts_it(
    tmp_path: Path, operator: str, trusted: bool
) -> None:
    """Broken: a SavedModel with a py_function would be run, or fail with a message about a missing token."""
    reason = saved_model.refuse(written(tmp_path, [function("__inference_call_1", node(operator))]), trusted=trusted)
    assert reason is not None
    assert "calls Python code" in reason
    assert "tf.py_function" in reason


@pytest.mark.parametrize(
    "operator", ["ReadFile", "WriteFile", "PrintV2", "LookupTableFindV2", "RandomUniform", "XlaLaunch", "Evil", ""]
)
def test_an_operator_that_is_not_known_to_compute_is_refused(tmp_path: Path, operator: str) -> None:
    """Broken: loading or calling a registered model could read and write the worker's files."""
    folder = written(tmp_path, [function("__inference_call_1", node("MatMul"), node(operator))])
    reason = saved_model.refuse(folder)
    assert reason is not None
    assert f"the operator {operator!r}" in reason
    assert "compliance.allow_pickle" in reason
    assert saved_model.refuse(folder, trusted=True) is None


@pytest.mark.parametrize("in_list", [False, True])
def test_a_checkpoint_is_written_by_nothing_that_the_model_calls(tmp_path: Path, in_list: bool) -> None:
    """Broken: SaveV2, which is in every SavedModel, would write where a call of the model says."""
    caller = function("__inference_call_1", node("PartitionedCall", "__inference__traced_save_1", in_list))
    reason = saved_model.refuse(written(tmp_path, [caller, SAVER]))
    assert reason is not None
    assert "reads or writes files, and the model calls it" in reason


@pytest.mark.parametrize(
    "item",
    [
        field(6, field(1, "__inference__traced_save_1")),
        field(8, field(1, "__inference__traced_save_1")),
    ],
)
def test_an_object_is_not_called_by_a_function_that_writes(tmp_path: Path, item: bytes) -> None:
    """Broken: the signature itself could be the function that writes a file."""
    reason = saved_model.refuse(written(tmp_path, [CALL, SAVER], objects=[item]))
    assert reason is not None
    assert "reads or writes files" in reason


@pytest.mark.parametrize(
    ("item", "says"),
    [(field(5, b""), "a file of its own"), (field(10, b""), "a table"), (field(11, b""), "a saver of its own")],
)
def test_objects_that_loading_runs_functions_for_are_refused(tmp_path: Path, item: bytes, says: str) -> None:
    """Broken: a table reads its file, and a saver calls its function, as soon as the model is loaded."""
    reason = saved_model.refuse(written(tmp_path, [CALL], objects=[item]))
    assert reason is not None
    assert says in reason


def test_the_outer_graph_and_gradients_are_looked_at(tmp_path: Path) -> None:
    """Broken: what the functions may not do, the graph around them could."""
    reason = saved_model.refuse(written(tmp_path, [CALL], nodes=[node("PyFunc")]))
    assert reason is not None
    assert "calls Python code" in reason


def test_a_model_of_tensorflow_1_is_refused(tmp_path: Path) -> None:
    """Broken: TensorFlow would load it in another way than the one that was looked at."""
    meta = field(2, field(2, field(1, CALL))) + field(5, SERVING)
    (tmp_path / "saved_model.pb").write_bytes(field(2, meta))
    reason = saved_model.refuse(tmp_path)
    assert reason is not None
    assert "TensorFlow 1" in reason


def test_tensorflow_gets_only_what_was_looked_at(tmp_path: Path) -> None:
    """Broken: TensorFlow prefers `saved_model.cpb`, which nobody would have looked at."""
    folder = written(tmp_path, [CALL])
    (folder / "saved_model.cpb").write_bytes(b"another graph")
    (folder / "assets").mkdir()
    with saved_model.checked(folder) as copy:
        assert sorted(path.name for path in copy.rglob("*")) == ["saved_model.pb", "variables", "variables.index"]
        assert (copy / "variables" / "variables.index").read_bytes() == b"index"
    with (
        pytest.raises(saved_model.RefusedError, match="ReadFile"),
        saved_model.checked(written((tmp_path / "assets"), [function("f", node("ReadFile"))])),
    ):
        pass


@pytest.mark.parametrize(
    ("signatures", "says"),
    [
        ([], "it has none"),
        ([signature("train", [], []), signature("other", [], [])], "it has other, train"),
        ([signature("serve", [tensor("x", 20, -1)], [])], "a type (number 20) that no backend takes"),
    ],
)
def test_a_model_without_a_signature_to_serve_is_told_how_to_get_one(
    tmp_path: Path, signatures: list[bytes], says: str
) -> None:
    """Broken: the user of a tf.Module would see a KeyError of TensorFlow's."""
    with pytest.raises(saved_model.RefusedError) as caught:
        saved_model.signature(written(tmp_path, [CALL], signatures=signatures))
    assert says in str(caught.value)


def test_of_several_signatures_the_served_one_is_taken(tmp_path: Path) -> None:
    """Broken: the model would answer with another of its functions than it is served with."""
    init = signature("__saved_model_init_op", [], [field(1, "NoOp") + field(2, field(2, 0))])
    train = signature("train", [tensor("y", 3, 1)], [])
    assert saved_model.signature(written(tmp_path, [CALL], signatures=[train, init, SERVING])).name == "serving_default"


@given(content=st.binary(max_size=300))
def test_any_bytes_are_an_answer(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Broken: a damaged file would end the run as a bug of ours, or never end."""
    folder = tmp_path_factory.mktemp("any")
    (folder / "saved_model.pb").write_bytes(content)
    assert saved_model.refuse(folder) is not None


@given(at=st.integers(0, 400), value=st.integers(0, 255))
def test_a_changed_byte_is_an_answer(at: int, value: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Broken: as above, deeper in the file."""
    folder = written(tmp_path_factory.mktemp("changed"), [CALL, SAVER], nodes=[node("VarHandleOp")])
    content = bytearray((folder / "saved_model.pb").read_bytes())
    content[at % len(content)] = value
    (folder / "saved_model.pb").write_bytes(content)
    reason = saved_model.refuse(folder)
    assert reason is None or isinstance(reason, str)


@pytest.mark.parametrize(
    "content", [b"\x0a\xff\xff\xff\xff\x0f", b"\xff" * 20, b"\x0b", b"\x0a\x05abc", b"\x09abc", b"\x80"]
)
def test_malformed_messages_are_named(content: bytes) -> None:
    """Broken: a length that lies would be taken for a shorter field, and what follows would be read otherwise than
    TensorFlow reads it."""
    with pytest.raises(protobuf.MalformedError):
        list(protobuf.fields(memoryview(content)))
