"""A traced TensorFlow function for fixed shapes: as TFLite for LiteRT, and as StableHLO for XLA and IREE.

Both are TensorFlow's own ways out, of the very function that is the baseline: its TFLite converter, and the program
that `tf.function(jit_compile=True)` hands to XLA. A file is made for each shape that the target asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compile_stage.core.digest import canonical_json, digest_tree
from compile_stage.core.errors import SourceError, first_line
from compile_stage.core.records import PortableModel, SourceModel, Target
from compile_stage.core.shapes import demand_shapes
from compile_stage.core.tensors import Signature
from compile_stage.plugin_support.buckets import bucket_name, buckets, refuse_buckets
from compile_stage.plugin_support.fixed_shapes import ENTRY, element_types


def write(form: str, network: Any, source: SourceModel, target: Target, into: Path) -> PortableModel:
    """The files of a form, `tflite` or `stablehlo`.

    Args:
        network: The traced original, with `function`, `specs` and `signature`.

    Raises:
        SourceError: TensorFlow can't write it so, or the target's sizes are not known.
    """
    signature: Signature = network.signature
    demand_shapes(signature, target.shapes, source)
    if (reason := refuse_buckets(form, signature, target)) is not None:
        raise SourceError(reason, where=source.uri)
    make, suffix = _MAKERS[form]
    into.mkdir(parents=True, exist_ok=True)
    modules, types = [], set[str]()
    for shapes in buckets(signature, target):
        try:
            content = make(network, shapes)
        except Exception as error:  # what fails in TensorFlow's converters shares no base class
            raise SourceError(
                f"TensorFlow can't write it as {form}: {type(error).__name__}: {first_line(error)}", where=source.uri
            ) from error
        name = f"{bucket_name(signature, shapes)}.{suffix}"
        (into / name).write_bytes(content)
        types |= element_types(content.decode()) if form == "stablehlo" else set()
        modules.append({"file": name, "shapes": [list(shape) for shape in shapes]})
    (into / ENTRY).write_text(canonical_json({"modules": modules, "types": sorted(types)}) + "\n", encoding="utf-8")
    form_: Any = form
    return PortableModel(
        path=str(into / ENTRY),
        digest=digest_tree(into),
        form=form_,
        opset=0,
        precision="fp32",
        signature=signature,
        made_from=source.digest,
    )


def _fixed(network: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[Any, list[Any]]:
    """The function traced for these shapes, and what it takes."""
    import tensorflow

    specs = [
        tensorflow.TensorSpec(shape, spec.dtype, name=f"args_{number}")
        for number, (shape, spec) in enumerate(zip(shapes, network.specs, strict=True))
    ]
    return network.function.get_concrete_function(*specs), specs


def _tflite(network: Any, shapes: Sequence[tuple[int, ...]]) -> bytes:
    import tensorflow

    concrete, _ = _fixed(network, shapes)
    holder = tensorflow.Module()  # the converter asks for what keeps the variables alive
    holder.variables_of_the_function = list(concrete.graph.variables)
    return bytes(tensorflow.lite.TFLiteConverter.from_concrete_functions([concrete], holder).convert())


def _stablehlo(network: Any, shapes: Sequence[tuple[int, ...]]) -> bytes:
    """Text, with the weights as constants: its bytecode is of the version of MLIR that TensorFlow was built with."""
    import tensorflow
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    concrete, specs = _fixed(network, shapes)
    frozen = convert_variables_to_constants_v2(concrete)
    compiled = tensorflow.function(lambda *given: frozen(*given), autograph=False, jit_compile=True)
    text: str = compiled.experimental_get_compiler_ir(*specs)(stage="stablehlo")
    # Places in files of this machine, and names with numbers that TensorFlow counts up within a process.
    text = re.sub(r'"[^"]*":\d+:\d+', "unknown", text)
    text = re.sub(r'loc\("[^"]*"', 'loc("x"', text)
    return (re.sub(r"module @\S+", "module @model", text, count=1) + "\n").encode()


_MAKERS: Mapping[str, tuple[Callable[..., bytes], str]] = {
    "tflite": (_tflite, "tflite"),
    "stablehlo": (_stablehlo, "mlir"),
}
