"""Causal language models: the exported graph with its cache, its session, and the samples that are made of texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import small_lms

from compile_stage.backends import onnxruntime_decoder
from compile_stage.backends.onnxruntime_attention import DecoderGraph
from compile_stage.core import plugins
from compile_stage.core.errors import PolicyError, SourceError, UsageError
from compile_stage.core.generation import session_signature
from compile_stage.core.records import Compliance, DataSpec, Generation, PortableModel, ShapeRange, SourceModel, Target
from compile_stage.graph_rewrites.apply import REWRITES
from compile_stage.measure.readers import SampleRequest
from compile_stage.measure.samples import FromModel, open_samples, prepare
from compile_stage.precision.onnx_graph import finish
from compile_stage.serving.chat import render, without_identity
from compile_stage.serving.generation import GenerationSession, opened_as_called
from compile_stage.serving.prediction_io import InputRefusedError
from compile_stage.serving.text_generation import GenerationProcessor
from compile_stage.sources import transformers as transformers_source
from compile_stage.sources.transformers_generation import CausalNetwork
from compile_stage.sources.transformers_text import longest_input

pytest.importorskip("transformers", reason="the models are transformers pipelines")
pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's and PyTorch's own deprecations

GENERATION = Generation(prompt_tokens=10, new_tokens=6)
TARGET = Target(name="cpu", generation=GENERATION)
MODEL_CONFIG = {"max_new_tokens": 12, "do_sample": False}
TEXT = "A call of it reads a prompt, and writes what follows, token by token."


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    path = small_lms.save(tmp_path_factory.mktemp(request.param) / "model", request.param, model_config=MODEL_CONFIG)
    return SourceModel(uri=f"folder:{path}", name="m", version="", flavor="transformers", path=str(path), digest="d")


@pytest.fixture(scope="module")
def exporter() -> Any:
    return plugins.load("sources", "transformers")


@pytest.fixture(scope="module")
def portable(source: SourceModel, exporter: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    assert exporter.refuse(source, Compliance()) is None
    return exporter.export(source, {}, tmp_path_factory.mktemp("graph"))


def _without_cache(source: SourceModel, ids: Any) -> Any:
    """The distributions of the new tokens, of one pass of the original over all tokens."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(Path(source.path) / "model").eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)).logits.numpy()
    return logits[:, GENERATION.prompt_tokens - 1 : -1]


Exported = Callable[[str], tuple[SourceModel, PortableModel]]


@pytest.fixture(scope="module")
def exported(exporter: Any, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Gives a logged model of a kind and its graph, which is written once: PyTorch's exporter takes 6 CPU seconds."""

    @cache
    def export(kind: str) -> tuple[SourceModel, PortableModel]:
        folder = tmp_path_factory.mktemp(kind)
        path = small_lms.save(folder / "model", kind)
        source = SourceModel(
            uri=f"folder:{path}", name="m", version="", flavor="transformers", path=str(path), digest="d"
        )
        return source, exporter.export(source, {}, folder / "graph")

    return export


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_generations_through_the_cache_are_the_originals(
    source: SourceModel, exporter: Any, portable: Any, backend: str, tmp_path: Path
) -> None:
    """Broken: what goes through the cache of the graph, or of the baseline, is not what one pass without a cache says:
    a position, a mask or a layer's cache is wrong, or the tokens that are generated differ."""
    assert [spec.name for spec in portable.signature.inputs][:4] == [
        "input_ids", "attention_mask", "position_ids", "past_key_values.0.key",
    ]  # fmt: skip
    (window,) = exporter.token_windows(source, [TEXT * 2], GENERATION.tokens)
    expected = _without_cache(source, window)
    compiler = plugins.load("backends", backend)
    artifact = compiler.compile(portable, compiler.schemes(TARGET, "fp32")[0], TARGET, "job", tmp_path / "artifact")
    with (
        exporter.open(source, TARGET) as original,
        opened_as_called(compiler, replace(artifact, generation=GENERATION), 1) as compiled,
    ):
        assert compiled.signature == original.signature == session_signature(portable.signature, GENERATION)
        for session in (original, compiled, compiled):  # twice: nothing of the first call is left in the cache
            np.testing.assert_allclose(session.run({"input_ids": window})["logits"], expected, atol=2e-4)
        few = window[:3, :5]
        tokens = original.generate(few, 9)
        assert compiled.generate(few, 9) == tokens
        stop = tokens[0][4]
        ended = compiled.generate(few, 9, stops=[stop])
        assert ended[0] == tokens[0][: tokens[0].index(stop) + 1]
        with pytest.raises(UsageError, match="does not fit"):
            compiled.run({"input_ids": window[:, 1:]})


@pytest.mark.parametrize("kind", ["mistral", "mixtral", "gemma2", "phi"])
def test_other_architectures_are_the_originals_and_get_the_runtimes_attention(
    kind: str, exporter: Any, exported: Exported, tmp_path: Path
) -> None:
    """Broken: a model with a sliding window is refused, or its graph looks at tokens that have left the window; the
    experts' products are what the exporter knows no operator for; capped scores, or heads of which a part is turned,
    leave the attention in single operators or are computed otherwise."""
    source, portable = exported(kind)
    (window,) = exporter.token_windows(source, [TEXT * 2], GENERATION.tokens)
    compiler = plugins.load("backends", "onnxruntime")
    artifact = compiler.compile(portable, compiler.schemes(TARGET, "fp32")[0], TARGET, "job", tmp_path / "artifact")
    layers = 1 if kind in small_lms.OF_ONE_LAYER else 2
    assert artifact.executed["ops"].get("com.microsoft.GroupQueryAttention", 0) == layers
    assert "rotary positions come from a table of 128 places" in artifact.notes
    with (
        exporter.open(source, TARGET) as original,
        opened_as_called(compiler, replace(artifact, generation=GENERATION), 1) as compiled,
    ):
        for session in (original, compiled):
            logits = session.run({"input_ids": window})["logits"]
            np.testing.assert_allclose(logits, _without_cache(source, window), atol=2e-4)


@pytest.mark.parametrize("window", [0, 5, 7])
def test_a_window_of_another_length_is_not_put_into_the_graph(
    window: int, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a window is read off the graph wrongly, and tokens outside of it are looked at, or one inside is not."""
    (_, portable), compiler = exported("mistral"), plugins.load("backends", "onnxruntime")  # its window has 6
    monkeypatch.setattr(DecoderGraph, "_window", lambda self, mask: window)
    artifact = compiler.compile(portable, compiler.schemes(TARGET, "fp32")[0], TARGET, "job", tmp_path / "artifact")
    assert "com.microsoft.GroupQueryAttention" not in artifact.executed["ops"]


def test_a_session_without_a_way_for_the_cache_is_given_arrays(
    source: SourceModel, exporter: Any, portable: Any, tmp_path: Path
) -> None:
    """Broken: a third party's backend, whose session has `run` alone, can't serve a language model."""
    compiler = plugins.load("backends", "onnxruntime")
    artifact = compiler.compile(portable, compiler.schemes(TARGET, "fp32")[0], TARGET, "job", tmp_path / "artifact")
    (window,) = exporter.token_windows(source, [TEXT], GENERATION.tokens)

    class OnlyRun:
        def __init__(self, session: Any) -> None:
            self.signature, self.run = session.signature, session.run

    with compiler.open(artifact, 1) as session:
        by_arrays, by_steps = (GenerationSession(one, GENERATION) for one in (OnlyRun(session), session))
        one, other = (each.run({"input_ids": window})["logits"] for each in (by_arrays, by_steps))
        with pytest.raises(UsageError, match="at least one token"):
            by_steps.generate(window[:0], 2)  # a whole process ends where ONNX Runtime is asked for that
    np.testing.assert_array_equal(one, other)


def test_attention_is_the_runtimes_own_and_its_cache_grows_in_place(
    source: SourceModel, portable: Any, tmp_path: Path
) -> None:
    """Broken: a layer's attention stays in dozens of operators, which cost more than the products at each token; or a
    text that is longer than the cache's first buffer is answered otherwise than without one."""
    compiler, longer = plugins.load("backends", "onnxruntime"), Generation(prompt_tokens=20, new_tokens=100)
    ids = np.random.default_rng(0).integers(1, 200, (2, longer.tokens))
    answers = {}
    for fused in (True, False):
        target = Target(
            name="cpu", generation=longer, options={"onnxruntime": {} if fused else {"fused_attention": False}}
        )
        into = tmp_path / str(fused)
        artifact = compiler.compile(portable, compiler.schemes(target, "fp32")[0], target, "job", into)
        layers = artifact.executed["ops"].get("com.microsoft.GroupQueryAttention", 0)
        assert (layers, bool(artifact.options.get("cache_in_place"))) == ((2, True) if fused else (0, False))
        with opened_as_called(compiler, replace(artifact, generation=longer), 1) as session:
            answers[fused] = session.run({"input_ids": ids})["logits"]
    np.testing.assert_allclose(answers[True], answers[False], atol=2e-4)


def test_what_was_traced_to_see_whether_it_can_be_is_exported(
    exporter: Any, exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a network is loaded and traced twice before it is compiled; or a second export gets a program that the
    first has changed; or the network is held for good."""
    source, portable = exported("phi")
    traces, trace = [], CausalNetwork.trace
    monkeypatch.setattr(CausalNetwork, "trace", lambda self, of: traces.append(of.path) or trace(self, of))
    assert exporter.refuse(source, Compliance()) is None
    assert transformers_source._load(source) is transformers_source._load(source)
    first = exporter.export(source, {}, tmp_path / "a")
    assert not transformers_source._just_traced
    second = exporter.export(source, {}, tmp_path / "b")
    assert len(traces) == 2  # for both exports, not three
    assert {Path(one.path).read_bytes() for one in (first, second)} == {Path(portable.path).read_bytes()}


def test_positions_that_are_computed_are_not_tried() -> None:
    """Broken: a model of 32,768 places is called with as many tokens when it is published: minutes, and 20 GB."""
    model = small_lms.network("llama", small_lms.bytes_tokenizer())
    model.config.max_position_embeddings = 2**40
    assert longest_input(model, ["input_ids"]) == 2**40


def test_positions_relative_to_each_other_have_no_longest_text() -> None:
    """Broken: a published DeBERTa refuses texts that its original answers, or takes tensors alone."""
    from transformers import DebertaV2Config, DebertaV2Model

    sizes = {
        "vocab_size": 9,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 4,
    }
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
    for absolute, longest in ((False, None), (True, 16)):
        config = DebertaV2Config(**sizes, **relative, max_position_embeddings=16, position_biased_input=absolute)
        assert longest_input(DebertaV2Model(config).eval(), ["input_ids", "attention_mask"]) == longest


@pytest.mark.parametrize("source", ["llama"], indirect=True)
def test_eight_bits_are_by_blocks_and_nearer_to_the_original_than_four(
    source: SourceModel, portable: Any, exporter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: dynamic int8 takes one scale for a whole prompt, expands its weights to floats, leaves attention in
    single operators, or is no better than int4, which it takes more time than."""
    (window,) = exporter.token_windows(source, [TEXT * 2], GENERATION.tokens)
    compiler = plugins.load("backends", "onnxruntime")
    answers = {}
    for precision in ("fp32", "int8-dynamic", "int4"):
        scheme, graph, into = compiler.schemes(TARGET, precision)[0], portable, tmp_path / precision
        if precision != "fp32":
            into.mkdir()
            graph = plugins.load("lowerings", precision).lower(portable, scheme, None, (), into)
        artifact = compiler.compile(graph, scheme, TARGET, "job", into / "artifact")
        if precision == "int8-dynamic":
            # Five products a layer, of which three of attention and two of the gate are one, and the last.
            assert artifact.executed["precision"]["matrix_and_convolution"] == {"int8": 9, "float": 2}
            assert artifact.executed["ops"]["com.microsoft.GroupQueryAttention"] == 2
        with opened_as_called(compiler, replace(artifact, generation=GENERATION), 1) as session:
            answers[precision] = session.run({"input_ids": window})["logits"]
    monkeypatch.setattr(onnxruntime, "__version__", "1.24.4")  # expands 8-bit blocks at each call
    scheme = compiler.schemes(TARGET, "int8-dynamic")[0]
    older = plugins.load("lowerings", "int8-dynamic").lower(portable, scheme, None, (), tmp_path)
    assert "MatMulInteger" in {node.op_type for node in onnx.load(older.path).graph.node}
    error = {one: np.abs(answers[one] - answers["fp32"]).max() for one in ("int8-dynamic", "int4")}
    assert 0 < error["int8-dynamic"] < 0.2 * error["int4"]


def _compiled(source: SourceModel, graph: Any, into: Path) -> Any:
    """The artifact in fp32, which must answer as the original does."""
    compiler, exporter = plugins.load("backends", "onnxruntime"), plugins.load("sources", "transformers")
    artifact = compiler.compile(graph, compiler.schemes(TARGET, "fp32")[0], TARGET, "job", into)
    (window,) = exporter.token_windows(source, [TEXT], GENERATION.tokens)
    with (
        exporter.open(source, TARGET) as original,
        opened_as_called(compiler, replace(artifact, generation=GENERATION), 1) as compiled,
    ):
        answers: list[Any] = [one.run({"input_ids": window})["logits"] for one in (compiled, original)]
    np.testing.assert_allclose(*answers, atol=2e-4)
    return artifact


def test_a_decoders_products_of_one_input_are_one(source: SourceModel, portable: Any, tmp_path: Path) -> None:
    """Broken: at each token the same input is rounded three times, and positions are computed anew in every layer; or
    it is said of a graph that has no such products."""
    artifact = _compiled(source, portable, tmp_path)
    ops, said = artifact.executed["ops"], " ".join(artifact.notes)
    if "llama" in Path(source.path).parent.name:
        assert (ops["MatMul"], ops["Split"]) == (9, 2)  # of gate and up; attention takes its three as one tensor
        assert "10 products are computed as 4" in said
        assert "com.microsoft.RotaryEmbedding" not in ops
    else:
        assert "products are computed" not in said
        assert "rotary" not in said


def test_a_wrong_table_of_positions_is_found(
    source: SourceModel, portable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a rewrite is taken that answers otherwise."""
    tables = onnxruntime_decoder._tables

    def shifted(*given: Any) -> Any:
        return {names: (cosines[1:], sines[1:]) for names, (cosines, sines) in tables(*given).items()}

    monkeypatch.setattr(onnxruntime_decoder, "_tables", shifted)
    artifact = _compiled(source, portable, tmp_path)
    assert artifact.executed["ops"]["com.microsoft.GroupQueryAttention"] == 2
    assert "rotary" not in " ".join(artifact.notes)


@pytest.mark.parametrize("places", [None, 10**9])
def test_positions_are_computed_where_nobody_knows_how_many_or_they_are_too_many(
    places: int | None, source: SourceModel, portable: Any, tmp_path: Path
) -> None:
    """Broken: texts end at a place that nobody named; or a table takes gigabytes."""
    artifact = _compiled(source, replace(portable, places=places), tmp_path)
    assert "rotary" not in " ".join(artifact.notes)


def test_positions_that_depend_on_the_texts_length_get_no_table(exporter: Any, tmp_path: Path) -> None:
    """Broken: long texts are answered with the frequencies of short ones."""
    path = small_lms.save(tmp_path / "model", "phi3")  # others from 12 tokens on
    source = SourceModel(uri=f"folder:{path}", name="m", version="", flavor="transformers", path=str(path), digest="d")
    portable = exporter.export(source, {}, tmp_path / "graph")
    artifact = _compiled(source, portable, tmp_path / "artifact")
    assert artifact.executed["ops"]["com.microsoft.GroupQueryAttention"] == 1
    assert "rotary" not in " ".join(artifact.notes)


def test_graph_rewrites_leave_attention_what_the_runtime_knows(portable: Any, tmp_path: Path) -> None:
    """Broken: a rewrite that gains 1 % hides the attention, and each token costs twice as much."""
    compiler = plugins.load("backends", "onnxruntime")
    graph = onnx.load(portable.path)
    places = {name: rewrite(graph) for name, rewrite in REWRITES.items()}
    assert places["early-selection"] == 0, "a cache wants keys and queries of as many tokens"
    rewritten = finish(graph, portable, tmp_path / "rewritten", "fp32")
    artifact = compiler.compile(rewritten, compiler.schemes(TARGET, "fp32")[0], TARGET, "job", tmp_path / "artifact")
    assert artifact.executed["ops"].get("com.microsoft.GroupQueryAttention", 0) == 2, places


def test_texts_become_windows_with_their_last_tokens_as_labels(
    source: SourceModel, exporter: Any, portable: Any, tmp_path: Path
) -> None:
    """Broken: samples of a language model are not windows of the text, a text that is too short is padded or lost
    without a word, or perplexity has no tokens to judge by."""
    import pandas as pd

    file = tmp_path / "texts.csv"
    pd.DataFrame({"text": [TEXT, "too short", TEXT[::-1]]}).to_csv(file, index=False)
    signature = session_signature(portable.signature, GENERATION)
    request = SampleRequest(spec=DataSpec(source=f"file:{file}"), signature=signature, seed=0)
    model = FromModel(windows=lambda texts, tokens: exporter.token_windows(source, texts, tokens))
    samples = prepare(request, tmp_path / "samples", model)
    opened = open_samples(samples)
    assert samples.count == 2 * (len(TEXT) // GENERATION.tokens)
    assert "1 that are too short were left out" in " ".join(samples.notes)
    assert exporter.texts_of(source, opened.inputs["input_ids"])[0] == TEXT[: GENERATION.tokens]
    np.testing.assert_array_equal(opened.labels, opened.inputs["input_ids"][:, GENERATION.prompt_tokens :])
    longer = replace(
        request, signature=session_signature(portable.signature, Generation(prompt_tokens=800, new_tokens=100))
    )
    with pytest.raises(PolicyError, match="none of the 3 texts has 900 tokens"):
        prepare(longer, tmp_path / "none", model)
    ids = np.array(opened.inputs["input_ids"])
    ids[1, 3] = 9000
    np.savez(tmp_path / "ids.npz", input_ids=ids)
    foreign = replace(request, spec=DataSpec(source=f"file:{tmp_path}/ids.npz"))
    with pytest.raises(PolicyError, match="the token 9000, and the model knows 0 to 256"):  # no fault of the model
        prepare(foreign, tmp_path / "foreign", model)


def test_what_a_language_model_can_not_have_is_refused(source: SourceModel, exporter: Any, tmp_path: Path) -> None:
    """Broken: a policy that asks for more tokens than the network has places gets an index error of PyTorch's, or
    shapes for a graph whose lengths are free are silently ignored."""
    too_long = replace(TARGET, generation=Generation(prompt_tokens=120, new_tokens=9))
    with pytest.raises(SourceError, match=r"129 tokens .* takes 128"), exporter.open(source, too_long):
        pass
    shape = ShapeRange(min=(1, 1), typical=(1, 8), max=(1, 16))
    with pytest.raises(SourceError, match="lengths are free"):
        exporter.export(source, {"input_ids": shape}, tmp_path)
    with pytest.raises(SourceError, match="as ONNX with its cache only"):
        exporter.export_program(source, {}, tmp_path)


@pytest.fixture(scope="module")
def served(source: SourceModel, exporter: Any, portable: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """predict() as a published version has it, around ONNX Runtime, and the flavor's own of the original."""
    import mlflow.pyfunc

    folder = tmp_path_factory.mktemp("served")
    described = exporter.processor(source, folder)
    assert described.refusal == ""
    compiler = plugins.load("backends", "onnxruntime")
    artifact = compiler.compile(portable, compiler.schemes(TARGET, "fp32")[0], TARGET, "job", folder / "artifact")
    processor = GenerationProcessor(folder, described.text)
    original = mlflow.pyfunc.load_model(source.path)._model_impl
    with opened_as_called(compiler, replace(artifact, generation=GENERATION), 1) as session:
        yield lambda data, params=None: processor.predict(data, params, session.generate), original.predict


def test_prompts_are_answered_as_the_originals_pyfunc_answers_them(served: Any) -> None:
    """Broken: whoever sends prompts to the published model gets other texts than from its source, in another form, or
    a param that the source knows is refused or has no effect."""
    import pandas as pd

    ours, theirs = served
    prompts = small_lms.PROMPTS
    asked: list[tuple[Any, Any]] = [
        (prompts, None),
        (prompts[0], None),
        (pd.DataFrame({"text": prompts}), None),
        (prompts, {"return_full_text": False, "max_new_tokens": 5}),
        (prompts[:1], {"include_prompt": False, "collapse_whitespace": True}),
    ]
    for data, params in asked:
        answered = ours(data, params)
        assert answered == theirs(data, params)
        assert isinstance(answered, list)


def test_a_text_ends_at_its_stop_and_not_beyond_the_networks_places(source: SourceModel, served: Any) -> None:
    """Broken: generation runs on behind the token that ends a text, a prompt that does not fit answers with an index
    error of the runtime, or what is drawn at random is not among the likeliest."""
    ours, _ = served
    (one,) = ours(["What is "], {"do_sample": True, "top_k": 1})
    assert [one] == ours(["What is "])
    assert ours(["What is "], {"do_sample": True, "temperature": 5.0, "top_p": 1e-6}) == [one]
    drawn = {ours(["What is "], {"do_sample": True, "temperature": 100.0})[0] for _ in range(5)}
    assert len(drawn) > 1
    with pytest.raises(InputRefusedError, match="places for 128"):
        ours(["x" * 120])
    with pytest.raises(InputRefusedError, match="has no param 'num_beams'"):
        ours(["x"], {"num_beams": 4})


def test_an_empty_prompt_is_continued_from_the_token_that_begins_a_text(served: Any) -> None:
    """Broken: the published version refuses a request that the original answers, or begins with another token."""
    ours, theirs = served
    for prompts in ([""], ["", "What is "]):
        assert ours(prompts) == theirs(prompts)
    assert ours([""], {"max_new_tokens": None, "max_length": 9}) == theirs(
        [""], {"max_new_tokens": None, "max_length": 9}
    )


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({}, "max_new_tokens is a whole number, not None"),
        ({"temperature": 0}, "say do_sample: false"),
        ({"temperature": "hot"}, "temperature is a number"),
        ({"temperature": float("nan")}, "temperature is a number"),
        ({"top_p": 1.5}, "top_p is a share"),
        ({"top_k": -1}, "top_k is above 0"),
        ({"max_new_tokens": "many"}, "max_new_tokens is a number"),
        ({"max_length": float("inf")}, "max_length is a number"),
    ],
)
def test_settings_of_a_draw_are_taken_at_their_word(served: Any, setting: dict[str, Any], reason: str) -> None:
    """Broken: a temperature of 0, which asks for the likeliest token, is read as none and draws any; or what is no
    number ends in a traceback of Python's."""
    ours, _ = served
    with pytest.raises(InputRefusedError, match=reason):
        ours(["What is "], {"do_sample": bool(setting), "max_new_tokens": None, **setting})


def test_a_share_of_nothing_leaves_the_likeliest_token(served: Any) -> None:
    """Broken: top_p: 0, with which the original writes the likeliest token, draws among all of them."""
    ours, theirs = served
    drawn = {"do_sample": True, "temperature": 100.0, "top_k": 0, "top_p": 0.0, "max_new_tokens": 12}
    assert ours(["What is "], drawn) == ours(["What is "], {"max_new_tokens": 12}) == theirs(["What is "], drawn)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["llama"], indirect=True)
def test_large_weights_lie_beside_the_graph(
    source: SourceModel, exporter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a model of more than 2 GiB, as most language models are, is copied in memory until it is short, or its
    graph is written without its weights."""
    monkeypatch.setattr("compile_stage.sources.graph.EXTERNAL_DATA_ABOVE", 1000)
    large = exporter.export(source, {}, tmp_path / "graph")
    files = {file.name: file.stat().st_size for file in (tmp_path / "graph").iterdir()}
    assert set(files) == {"model.onnx", "model.onnx.data"}
    assert files["model.onnx.data"] > 60_000
    compiler = plugins.load("backends", "onnxruntime")
    artifact = compiler.compile(large, compiler.schemes(TARGET, "fp32")[0], TARGET, "job", tmp_path / "artifact")
    (window,) = exporter.token_windows(source, [TEXT], GENERATION.tokens)
    with opened_as_called(compiler, replace(artifact, generation=GENERATION), 1) as session:
        found = session.run({"input_ids": window})["logits"]
    np.testing.assert_allclose(found, _without_cache(source, window), atol=2e-4)


@pytest.mark.parametrize("task", ["llm/v1/chat", "llm/v1/completions"])
def test_requests_of_an_inference_task_are_answered_as_before(task: str, exporter: Any, tmp_path: Path) -> None:
    """Broken: a chat model's published version takes no messages, renders them otherwise than the tokenizer's template,
    or answers without the usage, the reason of its end, or the role that clients read."""
    import mlflow.pyfunc
    import pandas as pd

    chats = task == "llm/v1/chat"
    tokenizer = small_lms.bytes_tokenizer(chat_template=small_lms.TEMPLATE) if chats else small_lms.bytes_tokenizer()
    path = small_lms.save(tmp_path / "model", "llama", tokenizer=tokenizer, task=task, model_config=MODEL_CONFIG)
    source = SourceModel(uri="folder:m", name="m", version="", flavor="transformers", path=str(path), digest="d")
    described = exporter.processor(source, tmp_path / "tokenizer")
    assert described.refusal == ""
    assert ("jinja2" in described.runtime) == chats
    served = GenerationProcessor(tmp_path / "tokenizer", described.text)
    asked: list[Any] = ["", "Why"]  # an empty prompt's usage is transformers' own
    if chats:
        asked = [[{"role": "user", "content": "Who?"}], [{"role": "user", "content": None, "name": None}]]
    data = pd.DataFrame({"messages" if chats else "prompt": asked, "max_tokens": [7, 7], "temperature": [None, None]})
    expected = mlflow.pyfunc.load_model(str(path))._model_impl.predict(data)
    with exporter.open(source, TARGET) as session:
        answers = served.predict(data, None, session.generate)
        with pytest.raises(InputRefusedError, match="takes messages" if chats else "takes prompt"):
            served.predict(3, None, session.generate)
        for none in () if chats else (["a", "b"], None):
            with pytest.raises(InputRefusedError, match="each prompt is a text"):
                served.predict({"prompt": none}, None, session.generate)
    assert without_identity(answers) == without_identity(expected)
    assert [set(one) for one in answers] == [set(one) for one in expected]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
        "{% for m in messages %}{{ loop.index }}{% if m.name is defined %}{{ m | tojson }}{% endif %}{% endfor %}",
    ],
    ids=["marks what is learned", "asks for fields"],
)
def test_a_chat_template_is_rendered_as_transformers_does(template: str) -> None:
    """Broken: a template with a tag of transformers' own is refused; or a field that is null, as clients send it, is
    written as "None" or taken for one that is there, and the model continues another prompt than the original."""
    tokenizer = small_lms.bytes_tokenizer(chat_template=template)
    for message in ({"role": "user", "content": "Who?"}, {"role": "user", "content": None, "name": None}):
        expected = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        assert render([message], template, {}) == expected


def test_a_chat_model_without_a_template_says_so(exporter: Any, tmp_path: Path) -> None:
    """Broken: a chat model whose tokenizer has no template is published as if it took messages."""
    path = small_lms.save(tmp_path / "model", "llama", task="llm/v1/chat", model_config=MODEL_CONFIG)
    source = SourceModel(uri="folder:m", name="m", version="", flavor="transformers", path=str(path), digest="d")
    assert "no chat template" in exporter.processor(source, tmp_path / "tokenizer").refusal
