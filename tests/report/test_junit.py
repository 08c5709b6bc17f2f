"""`junit.xml`: what a CI system shows as tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from xml.etree import ElementTree

from compile_stage.core.records import Promotion, RunResult, Verdict
from compile_stage.report.junit import render_junit
from compile_stage.report.markdown import render_markdown


def cases(result: RunResult) -> dict[tuple[str, str], list[str]]:
    """(class name, name) → tags of the case's end."""
    root = ElementTree.fromstring(render_junit(result))
    return {(c.get("classname", ""), c.get("name", "")): [child.tag for child in c] for c in root.iter("testcase")}


def test_the_text(result: RunResult, golden: Callable[[str, str], None]) -> None:
    golden("junit.xml", render_junit(result))


def test_a_check_that_could_not_run_is_an_error_and_a_refusal_is_skipped(result: RunResult) -> None:
    found = cases(result)
    job = "digits-cnn-1--cpu-server--{}"
    assert found[job.format("onnxruntime--int8-u8s8"), "accuracy"] == ["error"]
    assert found[job.format("onnxruntime--int8-u8s8"), "cosine"] == ["failure"]
    assert found[job.format("openvino--bf16"), "compile"] == ["error"]
    assert found[job.format("onnxruntime--bf16"), "plan"] == ["skipped"]
    assert found[job.format("openvino--int8-sym"), "max_rel"] == ["system-out"]  # waived, and the text says by whom
    assert found["edge", "has a winner"] == ["skipped"]


def test_a_candidate_about_which_nothing_was_checked_is_an_error(factory: ModuleType) -> None:
    target = factory.no_winner()
    empty = dataclasses.replace(target.candidates[0], verdict=Verdict(checks=()))
    made = factory.make_result(dataclasses.replace(target, candidates=(empty,)))
    assert cases(made)["digits-cnn-1--edge--onnxruntime--int8-u8s8", "validate"] == ["error"]


def test_a_required_target_without_a_winner_is_a_failure(factory: ModuleType) -> None:
    target = factory.no_winner()
    policy = dataclasses.replace(target.policy, target=dataclasses.replace(target.policy.target, required=True))
    made = factory.make_result(dataclasses.replace(target, policy=policy), status="failed", exit_code=3)
    assert cases(made)["edge", "has a winner"] == ["failure"]


def test_a_run_that_never_reached_a_target_is_an_error(result: RunResult) -> None:
    refused = dataclasses.replace(result, status="refused", targets=(), problem="no such framework")
    root = ElementTree.fromstring(render_junit(refused))
    assert root.get("errors") == "1"
    assert "no such framework" in str(root.find(".//error").get("message"))  # type: ignore[union-attr]


def test_counts_are_those_of_the_cases(result: RunResult) -> None:
    root = ElementTree.fromstring(render_junit(result))
    assert root.get("tests") == str(len(list(root.iter("testcase"))))
    assert root.get("failures") == str(len(list(root.iter("failure"))))
    assert root.get("errors") == str(len(list(root.iter("error"))))


def test_what_xml_cannot_hold_is_replaced(result: RunResult) -> None:
    """A worker's log may hold control characters; the file must still be readable XML."""
    made = dataclasses.replace(result, targets=(), problem="bell \x07 null \x00 escape \x1b[31m <tag> & \ud800")
    root = ElementTree.fromstring(render_junit(made))
    assert "<tag> &" in str(root.find(".//error").get("message"))  # type: ignore[union-attr]


def test_a_promotion_that_a_gate_stopped_is_a_failure(result: RunResult) -> None:
    """Broken: a new version slower than the promoted one ended the run with 3, and junit.xml held no failure of it."""
    first = result.targets[0]
    why = "not promoted to 'prod': at batch size 1 its p50 is 1.120 times that of models:/x/3, at most 1.02 allowed"
    stays = dataclasses.replace(first.receipt, promoted_to=None, note=why)
    policy = dataclasses.replace(first.policy, promote=Promotion(alias="prod"))
    hurt = dataclasses.replace(first, policy=policy, receipt=stays)
    made = dataclasses.replace(result, targets=(hurt,), status="failed", exit_code=3, problem=f"models:/x/4: {why}")
    assert cases(result)["cpu-server", "promotion"] == ["system-out"]
    assert cases(made)["cpu-server", "promotion"] == ["failure"]
    assert why in render_junit(made).replace("&apos;", "'")
    assert "1.120 times that of models:/x/3" in render_markdown(made)
    waits = dataclasses.replace(made, status="passed", exit_code=0, problem="")  # as for an approval
    assert cases(waits)["cpu-server", "promotion"] == ["skipped"]
    without = dataclasses.replace(hurt, receipt=dataclasses.replace(stays, note=""))  # --no-promote
    assert ("cpu-server", "promotion") not in cases(dataclasses.replace(waits, targets=(without,)))
