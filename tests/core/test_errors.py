"""Errors: one exit code per class, one sentence per part."""

from __future__ import annotations

import re

from compile_stage.core import errors


def test_exit_codes_are_one_per_family() -> None:
    """Broken: a CI job could not tell a missed gate from an unreachable registry."""
    families = [
        errors.PolicyError,
        errors.GateError,
        errors.RegistryError,
        errors.SourceError,
        errors.NothingCompiledError,
        errors.IntegrityError,
        errors.InternalError,
    ]
    codes = [family.exit_code for family in families]
    assert codes == [2, 3, 4, 5, 6, 7, 70]
    assert len(set(codes)) == len(codes)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Broken: the drawing that newcomers read first would lie."""
    drawn = dict(re.findall(r"── (\w+Error) +(\d+|-)", errors.__doc__ or ""))
    for name, code in drawn.items():
        error = getattr(errors, name)
        assert issubclass(error, errors.CompileStageError)
        if code != "-":
            assert error.exit_code == int(code)


def test_a_message_holds_where_what_and_how_to_mend() -> None:
    """Broken: a user would be told that something is wrong, but not where or what to do."""
    error = errors.SourceError("the model has no signature", fix="log it with signature=...", where="models:/x/1")
    assert str(error) == "models:/x/1: the model has no signature\n  fix: log it with signature=..."


def test_an_error_without_words_is_named_by_its_type() -> None:
    """Broken: an error that says nothing becomes "list index out of range" where it is reported."""
    assert errors.first_line(MemoryError()) == "MemoryError"
    assert errors.first_line(ValueError("\n the reason\n  File a.py, line 3")) == "the reason"
    assert len(errors.first_line(ValueError("x" * 1000))) == 300
