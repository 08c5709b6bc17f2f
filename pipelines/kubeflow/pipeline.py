"""An example pipeline: compile without promoting, and promote only when every gate held.

    python pipelines/kubeflow/pipeline.py compile-and-promote.yaml

writes the pipeline for the KFP server or its UI.
"""

import sys
from pathlib import Path

from kfp import compiler, dsl

sys.path.insert(0, str(Path(__file__).parent))

from component import compile_model, component, promote_model

compile_op = component(compile_model)
promote_op = component(promote_model)


@dsl.pipeline(name="compile-and-promote", description="Compile a registered model, and promote it where it earned it.")
def compile_and_promote(model_uri: str, policy: str, aliases: dict, tracking_uri: str) -> None:
    """Compile, then promote if the status is `passed`; between the two is the place for a canary or a person's
    approval.
    """
    compiled = compile_op(
        model_uri=model_uri, policy=policy, targets=[], arguments=["--no-promote"], tracking_uri=tracking_uri
    )
    compiled.set_cpu_request("2").set_memory_request("8G")
    # The stage has a cache of its own, which knows about hardware and tool versions; KFP's does not.
    compiled.set_caching_options(enable_caching=False)
    with dsl.If(compiled.outputs["status"] == "passed"):
        promote_op(published=compiled.outputs["published"], aliases=aliases, tracking_uri=tracking_uri)


if __name__ == "__main__":
    compiler.Compiler().compile(compile_and_promote, sys.argv[1] if len(sys.argv) > 1 else "compile-and-promote.yaml")
