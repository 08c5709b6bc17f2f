"""Messages get there and back unchanged, and errors keep what people need."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_stage.core import errors
from compile_stage.core.errors import CompileStageError, PolicyError, SourceError, WorkerError
from compile_stage.engine.protocol import decode, describe_error, encode, revive_error, says_out_of_memory

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
sentences = st.text(max_size=60)


@given(number=st.integers(min_value=0), value=anything)
def test_message_round_trip(number: int, value: Any) -> None:
    """A value that changes on the way, or a message that is not exactly one line, would garble every later answer."""
    line = encode({"id": number, "result": value})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == {"id": number, "result": value}


def test_any_text_travels() -> None:
    """A file name that is not UTF-8 (lone surrogates), and line ends of other alphabets, must not break a message."""
    value = "a\udcffb\n\r\u2028\u2029\x00é😀"
    assert decode(encode({"id": 1, "result": value}))["result"] == value


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(noise: bytes) -> None:
    """Whatever a plug-in writes into the pipe, reading it raises ValueError or yields an object with an id, never
    anything else."""
    try:
        message = decode(noise)
    except ValueError:
        return
    assert isinstance(message["id"], int)


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"null\n", b"[1]\n", b'{"id": "1"}\n', b'{"result": 1}\n', b"[" * 100_000]
)
def test_almost_messages_are_refused(line: bytes) -> None:
    """JSON is not yet a message."""
    with pytest.raises(ValueError):
        decode(line)


ERRORS = sorted(
    (
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, CompileStageError) and cls is not WorkerError
    ),
    key=lambda cls: cls.__name__,
)


@given(cls=st.sampled_from(ERRORS), problem=sentences, fix=sentences, where=sentences)
def test_our_errors_travel_by_class(cls: type[CompileStageError], problem: str, fix: str, where: str) -> None:
    """The exit code depends on the class, the message on the fields."""
    message = decode(encode({"id": 1, "error": describe_error(cls(problem, fix=fix, where=where))}))
    revived = revive_error(message["error"])
    assert type(revived) is cls
    assert (revived.problem, revived.fix, revived.where) == (problem, fix, where)


def test_fields_of_their_own_travel() -> None:
    """A policy's located problems, and a worker error's kind and detail, are not in the base class."""
    policy = revive_error(describe_error(PolicyError("2 mistakes", problems=("a:1: x", "a:2: y"))))
    assert isinstance(policy, PolicyError)
    assert policy.problems == ("a:1: x", "a:2: y")
    worker = revive_error(describe_error(WorkerError("timeout", "too long", detail="log", fix="wait")))
    assert isinstance(worker, WorkerError)
    assert (worker.kind, worker.problem, worker.detail, worker.fix) == ("timeout", "too long", "log", "wait")


def test_plugin_class_becomes_the_nearest_of_ours() -> None:
    """The stage does not have a plug-in's modules, but it knows what they derive from."""

    class TooOldError(SourceError):
        pass

    assert type(revive_error(describe_error(TooOldError("made by version 1")))) is SourceError


@pytest.mark.parametrize("described", [{}, {"class": "os"}, {"class": "Mapping"}, {"class": None, "kind": "strange"}])
def test_unknown_description_is_still_an_error(described: dict[str, Any]) -> None:
    """A newer worker's class, or nonsense, must raise something that a job's result can hold."""
    revived = revive_error(described)
    assert isinstance(revived, WorkerError)
    assert revived.kind == "exception"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "out_of_memory"),
        (RuntimeError("std::bad_alloc"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "out_of_memory"),
        (RuntimeError("Failed to allocate memory for requested buffer of size 9"), "out_of_memory"),
        (OSError(12, "Cannot allocate memory"), "out_of_memory"),
        (ValueError("shape mismatch"), "exception"),
        (OSError(2, "No such file"), "exception"),
    ],
)
def test_kind_of_an_exception(error: Exception, kind: str) -> None:
    """Runtimes have many words for a lack of memory; each must be named so, and nothing else."""
    assert describe_error(error)["kind"] == kind


def test_one_sentence_and_the_rest() -> None:
    """A compiler's ten pages belong in the detail; the sentence stays one line that fits a table."""
    described = describe_error(RuntimeError("line one\n  line two\n" + "x" * 100_000))
    assert described["problem"].startswith("RuntimeError: line one line two xxx")
    assert len(described["problem"]) <= 400
    assert "characters left out" in described["detail"]
    assert len(described["detail"]) < 21_000


def test_rust_and_cpp_say_it_in_the_log() -> None:
    """These abort without an exception; only their last words tell."""
    assert says_out_of_memory("terminate called after throwing an instance of 'std::bad_alloc'")
    assert says_out_of_memory("memory allocation of 53687091200 bytes failed")
    assert not says_out_of_memory("segmentation fault")
