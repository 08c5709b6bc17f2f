"""A lowering as a third party writes it: weights are stored in float16 and computed with in float32. It imports nothing
of ours but `core`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compile_stage.core.capabilities import LoweringCapabilities
from compile_stage.core.digest import digest_tree
from compile_stage.core.ports import Lowering
from compile_stage.core.records import PortableModel, SampleSet, Scheme


class Fp16Weights(Lowering):
    name, requires, extra = "fp16-weights", ("onnx",), ""
    capabilities = LoweringCapabilities(needs_calibration=False, complexity=5)

    def refuse(self, model: PortableModel, scheme: Scheme) -> str | None:
        return None if model.form == "onnx" else f"{self.name} works on ONNX graphs, not on {model.form}"

    def lower(
        self, model: PortableModel, scheme: Scheme, calibration: SampleSet | None, keep: Sequence[str], into: Path
    ) -> PortableModel:
        import numpy as np
        import onnx
        from onnx import TensorProto, helper, numpy_helper

        assert calibration is None, "samples were prepared for a lowering that declares that it needs none"
        loaded = onnx.load(model.path)
        graph, casts = loaded.graph, []
        kept = {name for node in graph.node if node.name in keep for name in node.input}
        for tensor in graph.initializer:
            if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) > 1 and tensor.name not in kept:
                stored, name = f"{tensor.name}.fp16", tensor.name
                values = numpy_helper.to_array(tensor).astype(np.float16)
                tensor.CopyFrom(numpy_helper.from_array(values, stored))
                casts.append(helper.make_node("Cast", [stored], [name], name=f"{name}.cast", to=TensorProto.FLOAT))
        nodes = [*casts, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        into.mkdir(parents=True, exist_ok=True)
        onnx.save(loaded, into / "model.onnx")
        return PortableModel(
            path=str(into / "model.onnx"),
            digest=digest_tree(into),
            form="onnx",
            opset=model.opset,
            precision=self.name,
            signature=model.signature,
            made_from=model.digest,
        )
