"""onnx's conversion of a graph to another operator set: how it fails."""

from __future__ import annotations


def converter_errors() -> tuple[type[Exception], ...]:
    """What `onnx.version_converter` and the checker behind it raise of a graph that can't be converted."""
    import onnx

    return (
        RuntimeError,
        ValueError,
        IndexError,  # of an operator that the converter does not know, before onnx 1.20
        onnx.checker.ValidationError,
        onnx.version_converter.ConvertError,
    )
