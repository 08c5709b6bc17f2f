"""ONNX Runtime's other providers: asked for by name, read back node by node, never a silent run on the CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile_stage.backends import onnxruntime_providers as providers
from compile_stage.backends.onnxruntime import OnnxRuntime, OnnxRuntimeOpenVino
from compile_stage.backends.onnxruntime_providers import CPU, PROVIDERS, Provider
from compile_stage.core import plugins
from compile_stage.core.environment import hardware
from compile_stage.core.errors import NothingCompiledError
from compile_stage.core.records import Artifact, Target
from compile_stage.testing import check_backend, models, target_for

TARGET = Target(name="cpu", threads=1)
# It is in every package of ONNX Runtime, and takes nothing but its own operator: a real provider that takes none of a
# model's nodes.
AZURE = Provider(name="AzureExecutionProvider", short="azure", devices=("cpu",), platforms="all")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.perceptron(tmp_path_factory.mktemp("model"))[0]


def asking(device: str = "cpu", **given: Any) -> Target:
    return replace(TARGET, device=device, options={"onnxruntime": given})


def compile_on(model: Any, target: Target, into: Path) -> Artifact:
    return OnnxRuntime().compile(model, OnnxRuntime().schemes(target, "fp32")[0], target, "job", into)


@pytest.mark.parametrize(
    ("provider", "device", "said"),
    [
        ("CUDAExecutionProvider", "cuda", "pip install onnxruntime-gpu, in an environment without onnxruntime"),
        ("cuda", "cuda", "has no CUDAExecutionProvider, only"),
        ("tensorrt", "cuda", "pip install onnxruntime-gpu"),
        ("directml", "cuda", "pip install onnxruntime-directml"),
        ("openvino", "cpu", "pip install onnxruntime-openvino"),
        ("webgpu", "vulkan", "pip install onnxruntime-webgpu"),
        ("qnn", "android", 'pip install "onnxruntime-qnn<2"'),
        ("XNNPACK", "cpu", "build ONNX Runtime with --use_xnnpack"),
    ],
)
def test_a_provider_that_is_not_there_is_refused_with_what_brings_it(provider: str, device: str, said: str) -> None:
    """The runtime itself would warn, and run all of it on the CPU."""
    import onnxruntime

    found = providers.find(provider)
    assert found is not None
    if found.name in onnxruntime.get_available_providers():
        pytest.skip(f"the installed onnxruntime has {found.name}")
    reason = OnnxRuntime().refuse_target(asking(device, provider=provider))
    assert reason is not None
    assert said in reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"provider": "cudda"}, "knows no provider 'cudda'; did you mean 'cuda'?"),
        ({"provider": 3}, "knows no provider 3"),
        ({"provider": "cuda"},
         "runs on the device cuda, not on 'cpu'; its option provider can be cpu, xnnpack, openvino there"),
        ({"provider": "cuda", "provider_options": {"use_tf32": 1}}, "use_tf32 is always '0' here"),
        ({"provider": "openvino", "provider_options": {"device_type": "AUTO"}}, "device_type is always 'CPU' here"),
        ({"provider": "tensorrt", "provider_options": {"trt_fp16_enable": True}},
         "no option 'trt_fp16_enable' that can be given"),
        ({"provider_options": {"x": 1}}, "CPUExecutionProvider has no option 'x' that can be given here; it has none"),
        ({"provider_options": "x"}, "must be a mapping, not 'x'"),
        ({"min_nodes_share": 0}, "above 0 and at most 1, not 0"),
        ({"min_nodes_share": True}, "above 0 and at most 1, not True"),
        ({"min_nodes_share": 1.5}, "above 0 and at most 1, not 1.5"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named(given: Mapping[str, Any], said: str) -> None:
    """Options that would change the precision are wrong ones: the graph says what is computed in what."""
    reason = OnnxRuntime().refuse_target(asking(**given))
    assert reason is not None
    assert said in reason


def test_another_device_needs_a_provider_for_it() -> None:
    """A CUDA target must not be served by the CPU provider because none was named."""
    reason = OnnxRuntime().refuse_target(replace(TARGET, device="cuda"))
    assert reason is not None
    assert "its option provider can be cuda, tensorrt, directml there" in reason
    assert OnnxRuntime().schemes(replace(TARGET, device="cuda"), "fp32") == ()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_provider_that_takes_no_node_fails_by_name(
    share: float, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real session of a real provider: at any bound, what came to lie on the CPU is an error and never an
    artifact."""
    monkeypatch.setattr(providers, "PROVIDERS", (*PROVIDERS, AZURE))
    target = asking(provider="azure", min_nodes_share=share)
    assert OnnxRuntime().refuse_target(target) is None
    with pytest.raises(
        NothingCompiledError,
        match=r"AzureExecutionProvider (does not take every node.*: it leaves .*2 Gemm|was asked for and took none)",
    ):
        compile_on(model, target, tmp_path)


def test_an_artifact_is_looked_at_again_when_it_is_opened(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it serves, the provider may not be there, or take other nodes."""
    artifact = compile_on(model, TARGET, tmp_path)
    elsewhere = replace(artifact, options={"provider": "CUDAExecutionProvider"})
    with pytest.raises(NothingCompiledError, match="has no CUDAExecutionProvider"), OnnxRuntime().open(elsewhere, 1):
        pass
    monkeypatch.setattr(providers, "PROVIDERS", (*PROVIDERS, AZURE))
    elsewhere = replace(artifact, options={"provider": "AzureExecutionProvider", "min_nodes_share": 0.1})
    with pytest.raises(NothingCompiledError, match="took none"), OnnxRuntime().open(elsewhere, 1):
        pass


@pytest.mark.gpu
@pytest.mark.parametrize(
    "asked",
    [
        {"min_nodes_share": 0.5},
        {"cuda_graphs": True},
        {"cuda_graphs": True, "provider_options": {"prefer_nhwc": True}},
    ],
    ids=["share", "recorded", "recorded-nhwc"],
)
@pytest.mark.parametrize("make", models.ALL, ids=lambda make: make.__name__)
def test_cudas_provider_conforms(make: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    """Broken: anything that the kit asks of a backend, on a GPU."""
    target = target_for(OnnxRuntime(), {"provider": "cuda", **asked}, device="cuda")
    if (reason := OnnxRuntime().refuse_target(target)) is not None or not hardware().accelerators:
        pytest.skip(reason or "there is no GPU here")
    model, samples = make(tmp_path / "model")
    findings = check_backend(OnnxRuntime(), model, samples, tmp_path / "work", target=target)
    assert {finding.case for finding in findings} == {"onnxruntime/fp32", "onnxruntime/fp16"}
    assert [f"{f.case} {f.check}: {f.reason}" for f in findings if not f.passed] == []


def test_share_is_that_of_the_provider_that_was_asked_for() -> None:
    """What lies behind it, such as CUDA behind TensorRT, is allowed and does not count as its own."""
    tensorrt = providers.find("tensorrt")
    assert tensorrt is not None
    places = {"TensorrtExecutionProvider": 8, "CUDAExecutionProvider": 1, CPU: 1}
    assert providers.demand(tensorrt, places, 0.8) == 0.8
    with pytest.raises(
        NothingCompiledError, match=r"took 8 of 10 nodes \(80 %\), and min_nodes_share asks for 90 %; 1 to CPU"
    ):
        providers.demand(tensorrt, places, 0.9)
    with pytest.raises(NothingCompiledError, match="given to AzureExecutionProvider, which nobody asked for"):
        providers.demand(tensorrt, {**places, AZURE.name: 1}, 0.1)
    with pytest.raises(NothingCompiledError, match="no node is left for Tensorrt"):
        providers.demand(tensorrt, {}, 0.1)
    with pytest.raises(NothingCompiledError, match="can't say which nodes"):
        providers.demand(tensorrt, None, 0.1)


def test_placement_of_every_node_is_read_from_the_session(model: Any, tmp_path: Path) -> None:
    """On the CPU's own session the counts must be those of the graph's nodes, or shares of other providers mean
    nothing."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = onnxruntime.InferenceSession(model.path, options, providers=[CPU])
    found = providers.placement(session)
    if found is None:
        pytest.skip("this ONNX Runtime is older than 1.24")
    nodes = [node.op_type for node in onnx.load(model.path).graph.node]
    assert found[0] == {CPU: len(nodes)}
    assert sorted(found[1].elements()) == sorted(nodes)


def test_names_and_packages_of_the_table_are_the_runtimes_own() -> None:
    """A provider whose name is misspelt would be refused for ever as one that is not installed."""
    import onnxruntime

    assert {one.name for one in PROVIDERS} <= set(onnxruntime.get_all_providers())
    assert all(one.package or one.how for one in PROVIDERS)


def test_openvinos_provider_is_missing_without_its_distribution() -> None:
    """The module of that name is here, and is another distribution's: it must not count as installed."""
    backend = OnnxRuntimeOpenVino()
    if plugins.package_versions("onnxruntime-openvino"):
        pytest.skip("onnxruntime-openvino is installed in this environment")
    assert not plugins.importable(backend)
    assert plugins.absent_to_open(backend) == ["onnxruntime-openvino"]
    assert plugins.pip_line(backend) == "compile-stage toolchain install onnxruntime-openvino"
    assert backend.refuse_target(TARGET) is None, "what is in its toolchain is asked there"


def test_planning_imports_no_runtime() -> None:
    """Asking what is installed must not load the runtime, and a GPU's libraries, into the process that plans."""
    code = (
        "import sys\n"
        "from compile_stage.backends.onnxruntime import OnnxRuntime\n"
        "from compile_stage.core.records import Target\n"
        "target = Target(name='t', device='cuda', options={'onnxruntime': {'provider': 'cuda'}})\n"
        "print(OnnxRuntime().refuse_target(target), 'onnxruntime' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")
    assert "None" in done.stdout or "onnxruntime-gpu" in done.stdout


def test_the_page_has_every_provider_with_its_package() -> None:
    """The documentation's table is what people choose by."""
    page = Path(__file__).parents[2] / "docs" / "backends" / "onnxruntime.md"
    lines = [
        line for line in page.read_text(encoding="utf-8").splitlines() if re.match(r"\| `\w+ExecutionProvider`", line)
    ]
    rows = {line.split("`")[1]: line for line in lines}
    assert set(rows) == {one.name for one in PROVIDERS}
    for one in PROVIDERS:
        cells = [cell.strip() for cell in rows[one.name].strip("|").split("|")]
        assert cells[1] == f"`{one.short}`"
        assert cells[2] == ", ".join(one.devices)
        assert one.package in cells[3]
        assert cells[4] == one.platforms
        assert (cells[6] == "never") is not one.ran
        assert one.name == CPU or cells[5] == ", ".join(one.precisions)


@pytest.mark.parametrize(
    ("provider", "options", "said"),
    [
        ("cuda", {"cudnn_conv_algo_serch": "DEFAULT"}, "did you mean 'cudnn_conv_algo_search'?"),
        ("cuda", {"cudnn_conv_algo_search": "FAST"}, "must be EXHAUSTIVE, HEURISTIC or DEFAULT, not 'FAST'"),
        ("cuda", {"gpu_mem_limit": "2 GB"}, "must be a whole number, not '2 GB'"),
        ("qnn", {"htp_performance_mode": "fastest"}, "htp_performance_mode must be default, burst"),
        ("directml", {"disable_metacommands": "yes"}, "must be true or false, not 'yes'"),
        ("tensorrt", {"trt_builder_optimization_level": True}, "must be 0, 1, 2, 3, 4 or 5, not True"),
    ],
)
def test_a_value_that_the_provider_does_not_know_is_refused_with_those_that_it_does(
    provider: str, options: Mapping[str, Any], said: str
) -> None:
    """Broken: QNN, for one, would log a warning, run with its default, and the report would say what the policy asked
    for."""
    reason = providers.refuse({"provider": provider, "provider_options": options}, "onnxruntime", "cpu")
    assert reason is not None
    assert said in reason


def test_truth_is_written_as_each_provider_reads_it() -> None:
    """Broken: OpenVINO and DirectML would end with "should be a boolean" where the policy says true."""

    def given(short: str, **options: Any) -> dict[str, str]:
        provider = providers.find(short)
        assert provider is not None
        assert providers.refuse({"provider": short, "provider_options": options}, "onnxruntime", "cpu") is None
        return providers.arguments(provider, {"provider_options": options}, 1)[0][1]

    assert given("openvino", disable_dynamic_shapes=True)["disable_dynamic_shapes"] == "true"
    assert given("directml", disable_metacommands=0)["disable_metacommands"] == "false"
    assert given("cuda", prefer_nhwc="true")["prefer_nhwc"] == "1"
    assert given("coreml", RequireStaticInputShapes=False)["RequireStaticInputShapes"] == "0"
