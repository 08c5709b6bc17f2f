"""First token and output token of a compiled language model, beside the peers' own way: PyTorch (eager, transformers'
own cache) and ONNX Runtime GenAI (its model builder's graph, its own generator).

    python benchmarks/language_model.py                     # Llama, 4 layers, 256 wide, random weights; a minute
    python benchmarks/language_model.py --layers 8 --width 512 --save

GenAI takes part where `pip install onnxruntime-genai` is there. All have one thread, write greedily after the same
prompt, and take turns in one process: a round holds one generation of each, in a shuffled order and then its mirror.
A ratio is the peer's median over ours, with its interval over rounds: above 1 ours is faster. Where a peer writes other
tokens than ours of that precision, its row says so: int4 rounds differently.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]

import results  # noqa: E402
import small_lms  # noqa: E402

from compile_stage.core import plugins  # noqa: E402
from compile_stage.core.records import Generation, SourceModel, Target  # noqa: E402
from compile_stage.measure import speedups, stats, timing  # noqa: E402
from compile_stage.serving.generation import opened_as_called  # noqa: E402

PROMPT, NEW = 64, 32
BLOCKS = {"int8": 32, "int4": 32, "int4-128": 128}
"""Weights that share a scale: GenAI's default, and as many as both are faster with."""

LOWERED = {"int8": "int8-dynamic", "int4": "int4", "int4-128": "int4"}
"""Ours of the same kind."""

OURS = "compile-stage, ONNX Runtime"

Write = Callable[[np.ndarray, int], list[int]]
"""A prompt [1, tokens] and a number of tokens → those that are written."""


def log_model(folder: Path, layers: int, width: int) -> Path:
    """A Llama with random weights, as a user logs a pipeline."""
    import mlflow
    import torch
    import transformers

    tokenizer = small_lms.bytes_tokenizer()
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    configuration = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 128), max_position_embeddings=256,
        pad_token_id=tokenizer.eos_token_id, **ends,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configuration).eval()
    model.save_pretrained(folder / "hf")
    tokenizer.save_pretrained(folder / "hf")
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    mlflow.transformers.save_model(
        pipeline, folder / "model", task="text-generation", pip_requirements=["transformers"]
    )
    return folder / "model"


def compiled(stack: ExitStack, folder: Path, model: Path) -> dict[str, Write]:
    """The original, and ours in fp32 and by blocks."""
    target = Target(name="cpu", generation=Generation(prompt_tokens=PROMPT, new_tokens=NEW))
    source = SourceModel(uri=str(model), name="m", version="", flavor="transformers", path=str(model), digest="d")
    exporter, backend = plugins.load("sources", "transformers"), plugins.load("backends", "onnxruntime")
    (folder / "graph").mkdir()
    portable = exporter.export(source, {}, folder / "graph")
    sessions = {"PyTorch (eager) fp32": stack.enter_context(exporter.open(source, target))}
    for precision in ("fp32", *BLOCKS):
        lowered = LOWERED.get(precision, precision)
        scheme, graph = backend.schemes(target, lowered)[0], portable
        if precision in BLOCKS:
            (folder / precision).mkdir()
            if lowered == "int4":
                scheme = replace(scheme, options={**scheme.options, "block": BLOCKS[precision]})
            graph = plugins.load("lowerings", lowered).lower(portable, scheme, None, (), folder / precision)
        artifact = backend.compile(graph, scheme, target, "job", folder / f"artifact-{precision}")
        opened = opened_as_called(backend, replace(artifact, generation=target.generation), 1)
        sessions[f"{OURS} {precision}"] = stack.enter_context(opened)

    def writer(session: Any) -> Write:
        return lambda ids, new: list(session.generate(ids, new)[0])

    return {name: writer(session) for name, session in sessions.items()}


def genai(folder: Path, precision: str) -> Write:
    """GenAI's own graph and generator."""
    import onnxruntime_genai as og

    into = folder / f"genai-{precision}"
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(folder / "hf"), "-o", str(into)]
    own = ["-p", precision.partition("-")[0], "-e", "cpu"]
    if precision in BLOCKS:
        own += ["--extra_options", f"block_size={BLOCKS[precision]}"]
    subprocess.run([*command, *own], check=True, capture_output=True)
    if precision in BLOCKS and _block_sizes(into / "model.onnx") != {BLOCKS[precision]}:
        raise RuntimeError(f"onnxruntime-genai did not take block_size={BLOCKS[precision]}")
    settings = json.loads((into / "genai_config.json").read_text())
    settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = 1
    (into / "genai_config.json").write_text(json.dumps(settings))
    model = og.Model(str(into))

    def write(ids: np.ndarray, new: int) -> list[int]:
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(max_length=PROMPT + NEW, min_length=PROMPT + NEW, do_sample=False)
        generator = og.Generator(model, parameters)
        generator.append_tokens(ids[0].astype(np.int32))
        for _ in range(new):
            generator.generate_next_token()
        return [int(token) for token in generator.get_sequence(0)[PROMPT:]]

    return write


def _block_sizes(graph: Path) -> set[int]:
    """Of all matrices in 4 bits."""
    import onnx

    nodes = onnx.load(graph, load_external_data=False).graph.node
    sizes = [one.i for node in nodes for one in node.attribute if one.name == "block_size"]
    return set(sizes)


def rounds(writers: dict[str, Write], ids: np.ndarray, count: int) -> dict[str, list[tuple[float, float]]]:
    """By model, of each round: seconds of the first token alone, and of a whole generation."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in writers}
    for write in writers.values():
        write(ids, NEW)
    for number in range(count):
        for name in timing.schedule(tuple(writers), number, seed=0):
            seconds = []
            for new in (1, NEW):
                began = time.perf_counter()
                writers[name](ids, new)
                seconds.append(time.perf_counter() - began)
            timing.settle()
            taken[name].append((seconds[0], seconds[1]))
    return taken


def rows(
    network: str, taken: dict[str, list[tuple[float, float]]], tokens: dict[str, list[int]]
) -> list[dict[str, Any]]:
    """Each peer beside ours of the same precision."""

    def parts(name: str) -> dict[str, list[list[float]]]:
        after = [[max(whole - first, 1e-9) / (NEW - 1)] for first, whole in taken[name]]
        return {"ttft": [[first] for first, _ in taken[name]], "tpot": after}

    made = []
    for name in taken:
        if name.startswith(OURS):
            continue
        precision = name.rpartition(" ")[2]
        own = f"{OURS} {precision}"
        row: dict[str, Any] = {"network": network, "precision": precision, "peer": name.removesuffix(f" {precision}")}
        for what, peer in parts(name).items():
            ratio = speedups.ratio_interval(peer, parts(own)[what], seed=0)
            row |= {f"{what}_over_ours": ratio.value, f"{what}_interval": [ratio.low, ratio.high]}
            row |= {f"{what}_ms": 1e3 * stats.median([turn[0] for turn in parts(own)[what]])}
        made.append({**row, "same_tokens": tokens[name] == tokens[own]})
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows, and save them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    results.add_save_option(parser)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    network = f"Llama, {options.layers} layers, {options.width} wide"
    with results.recording("language-model", options.save) as record, tempfile.TemporaryDirectory() as here:
        record.settings |= {"prompt_tokens": PROMPT, "new_tokens": NEW, "threads": 1, "rounds": options.rounds}
        folder = Path(here)
        model = log_model(folder, options.layers, options.width)
        with ExitStack() as stack:
            writers = compiled(stack, folder, model)
            if find_spec("onnxruntime_genai"):
                writers |= {
                    f"ONNX Runtime GenAI {precision}": genai(folder, precision) for precision in ("fp32", *BLOCKS)
                }
            else:
                record.notes.append("onnxruntime-genai is not installed")
            ids = np.random.default_rng(0).integers(1, 256, (1, PROMPT))
            tokens = {name: write(ids, NEW) for name, write in writers.items()}
            record.rows += rows(network, rounds(writers, ids, options.rounds), tokens)
    for row in record.rows:
        print(row)


if __name__ == "__main__":
    main()
