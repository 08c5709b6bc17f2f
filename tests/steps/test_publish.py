"""What a run pushes to a registry, and to which versions it gives its reports. The registry is a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import run_context, target_policy
from small_versions import bundle_of, write_model

from compile_stage.core.context import Context
from compile_stage.core.records import Bundle, Receipt, Selection, SourceModel, TargetResult, UnvalidatedBundle
from compile_stage.registry.folder import FolderRegistry
from compile_stage.steps.publish import attach_reports, publish


@pytest.fixture
def context(tmp_path: Path) -> Context:
    (tmp_path / "scratch").mkdir()
    return run_context(tmp_path / "scratch")


@pytest.fixture
def ours(tmp_path: Path) -> SourceModel:
    model = write_model(tmp_path / "models" / "net", "weights", "onnx")
    return FolderRegistry().resolve(f"folder:{model}", tmp_path / "sources")


def target_of(bundle: Bundle | None = None, *unvalidated: Bundle) -> TargetResult:
    return TargetResult(
        policy=target_policy(),
        candidates=(),
        selection=Selection(target="cpu", winner=None, reason="", reasons={}, states={}),
        bundle=bundle,
        unvalidated=tuple(UnvalidatedBundle(job_id=one.key, bundle=one) for one in unvalidated),
    )


def report(tmp_path: Path, text: str) -> dict[str, Path]:
    (tmp_path / "report.md").write_text(text)
    return {"report.md": tmp_path / "report.md"}


def reported(receipt: Receipt | None) -> str:
    """The report that lies with a published version."""
    assert receipt is not None
    return (Path(receipt.uri.removeprefix("folder:")) / "files" / "report.md").read_text()


def test_a_version_that_holds_other_files_is_kept_with_its_report(
    context: Context, ours: SourceModel, tmp_path: Path
) -> None:
    """Broken: a run that was made again tells of its own files as published, or its report lies with those of the
    first."""
    first = publish(context, ours, target_of(bundle_of(tmp_path, "measured")), report(tmp_path, "first"))
    again = publish(context, ours, target_of(bundle_of(tmp_path, "measured again")), report(tmp_path, "again"))
    assert first.receipt is not None
    assert again.receipt is not None
    assert (first.receipt.created, again.receipt.created) == (True, False)
    assert again.receipt.uri == first.receipt.uri
    assert first.receipt.note == ""
    assert "it was kept, and this run's files were not pushed" in again.receipt.note
    assert [event.cached for event in context.events.events if event.step == "publish"] == [False, True]
    attach_reports(ours, [again], report(tmp_path, "again"))
    assert reported(again.receipt) == "first"
    attach_reports(ours, [first], report(tmp_path, "final"))
    assert reported(first.receipt) == "final"


def test_the_same_files_pushed_again_are_no_other_version(context: Context, ours: SourceModel, tmp_path: Path) -> None:
    """Broken: a run whose publication was complete already says that its files were not pushed."""
    bundle = bundle_of(tmp_path, "measured")
    first, again = (publish(context, ours, target_of(bundle), report(tmp_path, "one")).receipt for _ in "12")
    assert first is not None
    assert again is not None
    assert (again.uri, again.created, again.note) == (first.uri, False, "")


def test_what_was_compiled_for_other_hardware_is_published_one_by_one_with_reports(
    context: Context, ours: SourceModel, tmp_path: Path
) -> None:
    """Broken: of several artifacts for a machine that is not there one alone is published, or one has the report that
    was written before anything was published."""
    drafts = [bundle_of(tmp_path, "of a phone", key) for key in ("int8", "fp16")]
    target = publish(context, ours, target_of(None, *drafts), report(tmp_path, "before"))
    receipts = [one.receipt for one in target.unvalidated]
    assert [one.version for one in receipts if one is not None] == ["1", "2"]
    assert [one.tags["compile_stage.key"] for one in receipts if one is not None] == ["int8", "fp16"]
    assert target.receipt is None
    attach_reports(ours, [target], report(tmp_path, "final"))
    assert [reported(one) for one in receipts] == ["final", "final"]
