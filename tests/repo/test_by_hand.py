"""The table of the winner beside the best by hand says what was measured, and the roofline counts what a network
computes."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmarks(monkeypatch):
    """Imports a module of benchmarks/, which is a folder of scripts and no package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module
    for name in [name for name in sys.modules if name == "peers" or name.startswith("peers.")]:
        del sys.modules[name]


def row(recipe, over=None, *, passes=True, **others):
    figures = {} if over is None else {"over_ours": over, "low": over - 0.1, "high": over + 0.1, "p50_ms": over}
    refusal = {} if passes else {"refusal": "cosine: it is 0.9"}
    case = {"network": "small", "batch": 1, "recipe": recipe, "ours": "openvino int8-sym", "ours_p50_ms": 1.0}
    return {**case, "passes": passes, **figures, **refusal, **others}


def page_of(benchmarks, tmp_path, name, rows):
    results, page = benchmarks("results"), benchmarks("page")
    hardware = {"features": ["avx2"], "cores": 2, "accelerators": [], "machine": "x86_64"}
    content = {"benchmark": name, "settings": {}, "notes": [], "date": "2026-11-24", "hardware": hardware, "rows": rows}
    return page.Page([results.Run(name="one.json", content=content)])


def test_the_fastest_that_passes_is_the_best_by_hand(benchmarks, tmp_path):
    """Broken: a recipe whose answers are wrong is what the winner is compared with, or its speed is not told at all."""
    rows = [
        row("ours, once more", 1.0), row("slow", 2.0), row("good", 1.2), row("wrong", 0.5, passes=False),
        row("not raced"), {"network": "small", "batch": 0, "recipe": "executorch", "left_out": "not installed"},
    ]  # fmt: skip
    page = page_of(benchmarks, tmp_path, "by-hand", rows)
    benchmarks("by_hand_tables").by_hand(page)
    text = "".join(page.text)
    [line] = [line for line in text.splitlines() if line.startswith("| small CNN")]
    assert "| good, 1.2 ms | **1.20 (1.10 to 1.30)** |" in line
    assert "wrong: 0.50 (0.40 to 0.60), cosine" in line
    assert line.endswith("| 1.00 (0.90 to 1.10) |")
    assert "executorch (small CNN: not installed)" in text


def test_an_earlier_commit_is_no_peer(benchmarks, tmp_path):
    """Broken: what the stage published a day ago is taken for the best by hand, or how much it gained is not shown."""
    then = {"recipe": "onnxruntime fp32, published by c17ed4a", "commit": "c17ed4a"}
    rows = [row("good", 1.2), row("", 0.5) | then, row("") | then | {"batch": 8, "left_out": "it can't be opened"}]
    page = page_of(benchmarks, tmp_path, "by-hand", rows)
    benchmarks("by_hand_tables").by_hand(page)
    text = "".join(page.text)
    assert "| good, 1.2 ms | **1.20 (1.10 to 1.30)** |" in text
    assert "| openvino int8-sym | onnxruntime fp32 | **0.50 (0.40 to 0.60)** |" in text
    assert "The geometric mean of these 1 ratios is **0.50**" in text


def test_goals_are_held_against_what_was_measured(benchmarks, tmp_path):
    """Broken: a goal that was missed reads as reached, or the winner of an earlier commit is its best by hand."""
    results, page = benchmarks("results"), benchmarks("page")
    by_hand = [row("good", 1.2), row("good", 0.9, batch=8), row("", 0.8) | {"recipe": "then", "commit": "c17ed4a"}]
    by_hand += [row("PyTorch eager", network=name) | {"screened_over_ours": 5.0} for name in ("resnet50", "bert6")]
    verdicts = [
        {"network": "digits", "commit": commit, "wall_s": s} for commit, s in (("this", 30.0), ("c17ed4a", 20.0))
    ]
    runs = [
        results.Run(f"{name}.json", {**page_of(benchmarks, tmp_path, name, rows).runs[0].content})
        for name, rows in (("by-hand", by_hand), ("time-to-verdict", verdicts))
    ]
    made = page.Page(runs)
    benchmarks("goal_tables").goals(made)
    cells = [line.split(" | ")[1].rstrip(" |") for line in "".join(made.text).splitlines() if line.startswith("| ")]
    assert cells[1:6] == [
        "lowest 0.90; 1 of 2 at least 1", "1.04 of 2", "0.80 of 1", "ResNet-50 5.0, BERT, 6 layers 5.0", "1.5",
    ]  # fmt: skip
    assert cells[6:] == ["", "", ""]


def test_who_may_be_the_fastest_is_started_again(benchmarks):
    """Broken: the fastest that passes, or the fastest at all, is not in the rounds that count."""
    by_hand = benchmarks("by_hand")
    screened = {"ours": (0.5, ""), "a": (1.0, ""), "b": (1.1, ""), "c": (3.0, ""), "d": (0.2, "cosine"), "e": (0.9, "")}
    assert by_hand.contenders(screened) == ["e", "a", "d"]


def test_a_ratio_is_the_peers_median_over_ours(benchmarks):
    """Broken: the ratio is upside down, so that a slower winner looks faster."""
    by_hand = benchmarks("by_hand")
    taken = {"ours": [[[1.0, 1.0]] * 4] * 3, "peer": [[[2.0, 2.0]] * 4] * 3}
    assert by_hand.row_of(taken, "peer")["over_ours"] == 2.0


def test_every_recipe_says_whose_tolerances_it_must_meet(benchmarks):
    """Broken: a recipe whose precision has no tolerances can't be judged, or two recipes share a name, and so files."""
    from compile_stage.policy.layers import shipped

    process = benchmarks("by_hand_process")
    recipes = [recipe for peer in process.PEERS for recipe in process.recipes(peer)]
    known = {name for name, _ in shipped().items("tolerances")}
    assert {recipe.precision for recipe in recipes} <= known
    assert len({recipe.name for recipe in recipes}) == len(recipes)


def test_the_stage_is_given_a_valid_policy_with_a_target_for_each_batch_size(benchmarks, tmp_path):
    """Broken: half an hour of measuring ends with an error in the policy, or both batch sizes have one winner."""
    from compile_stage.policy.load import load_policy

    chosen = Namespace(batches=(1, 8), stage_seconds=5.0, backends=["onnxruntime", "openvino"], search_minutes=1.0)
    for minutes in (1.0, 0.0):
        chosen.search_minutes = minutes
        (tmp_path / "policy.yaml").write_text(benchmarks("by_hand").policy_text(chosen))
        targets = load_policy(tmp_path / "policy.yaml").targets
        assert [(one.target.name, one.target.batch_sizes) for one in targets] == [("batch1", (1,)), ("batch8", (8,))]
        assert [one.ladder for one in targets] == 2 * [minutes > 0]


def test_recipes_that_make_the_same_share_their_files(benchmarks, tmp_path):
    """Broken: the same quantisation is made four times, or a recipe opens the files of another."""
    process, recipe = benchmarks("by_hand_process"), benchmarks("peers.recipe")
    given = recipe.Given("small", tmp_path, 2)
    folders = {one.name: process.folder_of("openvino", given, one) for one in process.recipes("openvino")}
    assert folders["OpenVINO, NNCF, bf16 hint"] == folders["OpenVINO, NNCF"] != folders["OpenVINO"]


def test_operations_of_a_graph_are_counted(benchmarks):
    """Broken: how near a winner is to the roofline is of another network's size."""
    weights = {
        "kernel": np.zeros((8, 2, 3, 3), np.float32),  # two groups of two channels
        "matrix": np.zeros((8, 5), np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["c"], group=2, pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("MatMul", ["f", "matrix"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    cost = benchmarks("graph_cost").cost(model, {"x": np.zeros((3, 4, 6, 6), np.float32)})
    assert dict(cost.by_operator) == {"Conv": 3 * 2 * 8 * 36 * 2 * 9, "MatMul": 3 * 2 * 8 * 5}
    assert cost.weights == 8 * 2 * 9 + 40
    assert cost.bytes_at("int8") == cost.weights + 4 * 3 * (4 * 36 + 5)


def test_operations_of_an_lstm_are_counted(benchmarks):
    """Broken: the recurrent part, which is nearly all of such a network, counts as nothing."""
    cost = benchmarks("graph_cost")
    taken = [(64, 2, 32), (1, 512, 32), (1, 512, 128)]
    assert cost._lstm(taken, (64, 1, 2, 128), {}) == 2 * 64 * 2 * 512 * (32 + 128)


def test_a_network_is_held_to_the_slower_of_its_operations_and_its_bytes(benchmarks):
    """Broken: a share of the roofline above 100 %, or one of the wrong precision's rate."""
    roofline, graph_cost = benchmarks("roofline"), benchmarks("graph_cost")
    rows = [
        {"what": "fp32", "gflops": 100.0}, {"what": "int8", "gflops": 400.0},
        {"what": "memory, triad", "mb": 768, "gb_per_s": 12.0},
        {"what": "memory, read 1 MB", "mb": 1, "gb_per_s": 50.0},
        {"what": "memory, read 256 MB", "mb": 256, "gb_per_s": 10.0},
    ]  # fmt: skip
    heavy = graph_cost.Cost(flops=10**9, weights=10**6, ends=0, by_operator={})
    assert roofline.bound(heavy, "fp32", rows) == (pytest.approx(0.01), "operations")
    assert roofline.bound(heavy, "int8", rows) == (pytest.approx(0.0025), "operations")
    wide = graph_cost.Cost(flops=10**6, weights=3 * 10**8, ends=0, by_operator={})
    assert roofline.bound(wide, "int8", rows) == (pytest.approx(0.3 / 12), "bytes")
    assert roofline.read_rate(rows, 0.2) == 50.0
    assert list(map(roofline.precision_of, ("openvino int8-sym", "openvino bf16", "onnxruntime fp32-fused"))) == [
        "int8", "bf16", "fp32",
    ]  # fmt: skip


def test_the_roofline_of_a_winner_is_shown(benchmarks, tmp_path):
    """Broken: how near a winner is to what the machine can do stands in a file that nobody reads."""
    rows = [
        {"what": "int8", "gflops": 400.0, "by": "OpenVINO, 1024 × 1024"},
        {"what": "network", "network": "small", "batch": 1, "gflop": 0.0126, "mb": 0.1, "winner": "openvino int8-sym",
         "least_ms": 0.03, "bound_by": "operations", "p50_ms": 0.1, "share": 0.3},
    ]  # fmt: skip
    page = page_of(benchmarks, tmp_path, "roofline", rows)
    benchmarks("by_hand_tables").roofline(page)
    text = "".join(page.text)
    assert "| int8 | 2 cores, AVX2 | 400 GFLOP/s | OpenVINO, 1024 × 1024 |" in text
    assert "| openvino int8-sym | 0.030 (operations) | 0.100 | 30 % |" in text
