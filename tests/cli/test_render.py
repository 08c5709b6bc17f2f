"""What people see, on wide and narrow terminals, in logs, and without colours or Unicode."""

from __future__ import annotations

import dataclasses
import io
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from compile_stage.cli.render import Display
from compile_stage.core.events import EventLog
from compile_stage.core.records import Plan, PolicyValue, RunResult, Verification
from compile_stage.installation import DoctorEntry, DoctorReport
from compile_stage.report import numbers, summary


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Log(io.StringIO):
    """A stream that is not."""

    encoding = "utf-8"


class Ascii(io.StringIO):
    encoding = "ascii"


def plan_of(result: RunResult) -> Plan:
    jobs = tuple(c.job for target in result.targets for c in target.candidates)
    return Plan(source=result.source, policy=result.policy, jobs=jobs, refused=result.refused, notes=("a note",))


def show(stream: io.StringIO, result: RunResult, width: int | None = None) -> str:
    display = Display(stream, width=width)
    display.show_plan(plan_of(result))
    display.show_result(result, Path("out"))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("width", [72, 140])
def test_the_tables(result: RunResult, golden: Callable[[str, str], None], width: int) -> None:
    text = show(Log(), result, width)
    golden(f"terminal-{width}.txt", text)


def test_without_unicode_everything_is_ascii(result: RunResult, golden: Callable[[str, str], None]) -> None:
    text = show(Ascii(), result, 110)
    assert text.isascii()
    golden("terminal-ascii.txt", text)


def test_no_color_is_respected(result: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;32m" in show(Terminal(), result, 100)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in show(Terminal(), result, 100)


def test_a_log_gets_one_line_a_step() -> None:
    stream = Log()
    display = Display(stream, width=100)
    log = EventLog(display)
    with log.step("compile", "digits--cpu--openvino--int8"):
        log.progress("compile", "digits--cpu--openvino--int8", "half done")
    with log.step("resolve") as mark:
        mark.cached = True
    with pytest.raises(ValueError, match="bad"), log.step("validate", "digits--cpu--openvino--int8"):
        raise ValueError("bad [red]output[/red]")
    display.close()
    display.close()
    first, third, last = stream.getvalue().splitlines()
    assert first.split("s] ")[1].startswith("compile    digits--cpu--openvino--int8  done in ")
    assert "bad [red]output[/red] (" in third
    assert last.endswith("cache      (run)  1 step from the cache")


def test_a_log_fits_80_columns_and_counts_what_the_cache_held(
    result: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a run that found all in the cache wrote a long line for each step, after a table of its plan."""
    monkeypatch.delenv("COLUMNS", raising=False)
    plan = plan_of(result)
    stream = Log()
    display = Display(stream)
    display.planned(plan)
    for job in plan.jobs:
        for step in ("lower", "compile", "validate"):
            display.ended(step, job.id, 0.01, "cached")
    display.ended("benchmark", plan.jobs[-1].id + "--lean", 2.0, "done")
    display.ended("compile", plan.jobs[0].id, 2.0, "the worker died of signal 11 (SIGSEGV) " * 4)
    display.close()
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[1] == "6 jobs, 1 refused"
    assert "  refused: onnxruntime bf16: onnxruntime has no bf16 on cpu here" in lines
    told = [line.partition("s] ")[2] for line in lines if line.startswith("[")]
    assert told[0] == "cache      cpu-server  15 steps from the cache"
    assert told[1] == "benchmark  edge onnxruntime int8-u8s8--lean  done in 2.0 s"
    assert told[2] == "cache      edge  3 steps from the cache"
    assert told[3].startswith("compile    cpu-server openvino int8-sym  the worker died")


def test_verbose_names_each_step_that_the_cache_held_and_each_job(result: RunResult) -> None:
    """Broken: nothing would say which step came from the cache."""
    stream = Log()
    display = Display(stream, verbose=True)
    plan = plan_of(result)
    display.planned(plan)
    display.ended("compile", plan.jobs[0].id, 0.01, "cached")
    display.close()
    assert all(job.id in stream.getvalue() for job in plan.jobs)
    assert "compile    cpu-server openvino int8-sym  cached (" in stream.getvalue()
    assert "from the cache" not in stream.getvalue()


def test_the_final_table_fits_with_the_longest_names(result: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a long backend's name pushed figures out of the table, which ended in the middle of a column."""
    monkeypatch.delenv("COLUMNS", raising=False)
    first = result.targets[0]
    long = dataclasses.replace(
        first.candidates[0].job,
        backend="onnxruntime-mobile",
        scheme=dataclasses.replace(first.candidates[0].job.scheme, name="int8-static-entropy+arena-off"),
    )
    renamed = dataclasses.replace(first.candidates[0], job=long)
    hurt = dataclasses.replace(result, targets=(dataclasses.replace(first, candidates=(renamed,)),))
    table = show(Log(), hurt).split("\ncpu-server\n")[1].split("\nbaseline ")[0]
    assert max(map(len, table.splitlines())) <= 80
    whole = "".join(table.split())
    for cell in ("onnxruntime-mobile", "0.31ms", "6.52×", "18.4kB"):
        assert cell in whole, table


def test_verbose_tells_beginnings_and_progress() -> None:
    stream = Log()
    log = EventLog(Display(stream, verbose=True))
    with log.step("benchmark"):
        log.progress("benchmark", "", "round 3, interval 4 %")
    assert [line.split("  ")[-1] for line in stream.getvalue().splitlines()][:2] == ["began", "round 3, interval 4 %"]


def test_quiet_draws_nothing_while_it_works(result: RunResult) -> None:
    stream = Log()
    display = Display(stream, quiet=True)
    display.planned(plan_of(result))
    display.began("compile", "j")
    display.ended("compile", "j", 1.0, "done")
    assert stream.getvalue() == ""


def test_a_terminal_shows_a_live_table_and_takes_it_away(result: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    display = Display(stream, width=100)
    display.planned(plan_of(result))
    first = plan_of(result).jobs[0].id
    display.began("compile", first)
    display.close()
    display.close()
    shown = stream.getvalue()
    assert "waiting" in shown
    assert "running" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # the cursor is back


def test_the_live_table_names_jobs_as_the_log_does(result: RunResult) -> None:
    """Broken: at 80 columns each row began with the model's and the target's name, and its end was on a second line."""
    stream = Log()
    display = Display(stream, width=80)
    plan = plan_of(result)
    display.planned(plan)
    display.console.print(display._table())
    job = plan.jobs[0]
    drawn = stream.getvalue().split("step")[-1]
    assert f"{job.backend} {job.scheme.name} " in drawn
    assert job.id not in drawn


def test_more_jobs_than_lines_hides_those_that_ended(result: RunResult) -> None:
    stream = Log()
    display = Display(stream, width=80)
    for number in range(200):
        display.began("compile", f"job-{number}")
        if number != 7:
            display.ended("compile", f"job-{number}", 0.1, "done")
    display.console.print(display._table())
    drawn = stream.getvalue().split("job  ")[-1]
    assert "job-7 " in drawn
    assert "that ended" in drawn


def test_events_may_come_from_several_threads(result: RunResult) -> None:
    stream = Log()
    log = EventLog(Display(stream))

    def work(number: int) -> None:
        for _ in range(20):
            with log.step("compile", f"job-{number}"):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 160
    assert all(line.startswith("[") and "done in" in line for line in lines)


def test_control_characters_of_others_are_shown_not_obeyed(result: RunResult) -> None:
    """A model's name could otherwise clear the screen, or colour a failure green."""
    hurt = dataclasses.replace(result, source=dataclasses.replace(result.source, uri="models:/x\x1b[2J\x07/1"))
    stream = Log()
    Display(stream, width=100).show_plan(plan_of(hurt))
    assert "\x1b" not in stream.getvalue()
    assert "models:/x\\x1b[2J\\x07/1" in stream.getvalue()


def test_doctor_says_how_to_get_what_is_missing(golden: Callable[[str, str], None]) -> None:
    entries = (
        DoctorEntry(kind="backend", name="onnxruntime", ready=True, version="onnxruntime 1.31.0"),
        DoctorEntry(
            kind="backend",
            name="openvino",
            ready=False,
            reason="openvino needs openvino, nncf, which are not installed",
            fix='pip install "compile-stage[openvino]"',
        ),
        DoctorEntry(kind="registry", name="mlflow", ready=False, version="mlflow 3.17.0", reason="connection refused"),
    )
    stream = Log()
    Display(stream, width=80).show_doctor(
        DoctorReport(machine={"cpu": "Example"}, hardware_fingerprint="x", entries=entries, cache="/cache")
    )
    golden("doctor.txt", "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n")


def with_scheme(result: RunResult, name: str) -> RunResult:
    """Its first target alone, whose first candidate is of a scheme with that name."""
    [target, *_] = result.targets
    first = target.candidates[0]
    job = dataclasses.replace(first.job, scheme=dataclasses.replace(first.job.scheme, name=name))
    renamed = dataclasses.replace(target, candidates=(dataclasses.replace(first, job=job), *target.candidates[1:]))
    return dataclasses.replace(result, targets=(renamed,))


def test_a_scheme_with_settings_is_folded_between_them(result: RunResult) -> None:
    """Broken: at 80 columns a terminal shows int8-u8s8+ha and lf-threads below it."""
    stream = Log()
    Display(stream, width=80).show_result(with_scheme(result, "int8-u8s8+half-threads+no-arena"), Path("out"))
    words = stream.getvalue().split()
    assert "+half-threads" in words
    assert "+no-arena" in words


@pytest.mark.parametrize("width", [40, 60, 72, 80, 96, 119, 140])
def test_no_figure_is_cut_off_whatever_the_width(result: RunResult, width: int) -> None:
    """Broken: at 80 columns a table with a folded scheme was 82 wide, and its sizes ended in `74.7 k`."""
    shown = with_scheme(result, "int8-u8s8+half-threads")
    stream = Log()
    Display(stream, width=width).show_result(shown, Path("out"))
    text = stream.getvalue()
    table = text[: text.index("baseline ")]
    assert max(map(len, table.splitlines())) <= width
    whole = " ".join(table.split())
    timed = [row for row in summary.rows(shown, shown.targets[0]) if row.timing]
    assert len(timed) > 1
    for row in timed:
        assert numbers.size(row.size_bytes) in whole
        assert numbers.duration(summary.median_s(row.timing)) in whole


def test_a_log_is_as_wide_as_columns_says(result: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: tables of 140 columns and more in a log, whatever COLUMNS said, so that each line of them was folded by
    the viewer."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert Display(Log()).console.width == 80
    monkeypatch.setenv("COLUMNS", "72")
    text = show(Log(), result)
    tables = [line for line in text.splitlines() if not line.startswith(("passed: ", "published: "))]
    assert max(map(len, tables)) <= 72
    for job in plan_of(result).jobs:
        assert job.id in text  # whole, for whoever searches the log


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("1", 20), ("19", 20)])
def test_a_width_in_which_nothing_has_room_hides_nothing(
    result: RunResult, monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    """Broken: where COLUMNS is 0, as some containers and CI machines set it, each command prints nothing and ends with
    0; where it is 2, reasons and tables are left out."""
    monkeypatch.setenv("COLUMNS", columns)
    assert Display(Log()).console.width == width
    assert "onnxruntime" in show(Log(), result)


def test_quiet_names_the_gate_that_decided(factory: ModuleType) -> None:
    """Broken: `-q` ended with "no candidate passed its gates", which sends everybody back for a second run."""
    result = factory.make_result(factory.no_winner(), status="failed", exit_code=3)
    stream = Log()
    Display(stream, quiet=True).show_result(result, Path("out"))
    assert "onnxruntime int8-u8s8: cosine NaN, at least 0.99 required (cpu-server.yaml:21)" in stream.getvalue()


def test_refused_jobs_are_all_counted(factory: ModuleType, result: RunResult) -> None:
    """Broken: "1 refused" under a table of three refused rows."""
    target = factory.no_winner()
    other = dataclasses.replace(result.refused[0], target=target.policy.target.name, job_id="another")
    hurt = dataclasses.replace(result, targets=(target,), refused=(other, dataclasses.replace(other, job_id="a third")))
    stream = Log()
    Display(stream).show_result(hurt, Path("out"))
    assert "no winner: no candidate passed its gates; the plan refused 2 more jobs" in stream.getvalue()


def test_verify_tells_its_rows_apart(factory: ModuleType) -> None:
    """Broken: a check at two batch sizes was printed as the same row twice."""
    stream = Log()
    Display(stream).show_verification(
        Verification(uri="models:/x/1", passed=True, checks=factory.good_checks(0.999), notes=())
    )
    rows = [line for line in stream.getvalue().splitlines() if "cosine" in line]
    assert len(rows) == 2 == len(set(rows))


def test_policy_values_are_readable_on_a_narrow_terminal() -> None:
    """Broken: the keys leave no room, and each value and where it is from is a column of single letters."""
    of_target = "targets.cpu-server.tolerances.int8-dynamic.outputs.logits.cosine"
    rows = [
        PolicyValue(path=of_target, value=0.99, origin="p.yaml:12", is_default=False, locked_by="b.yaml:3"),
        PolicyValue(path="owner", value="me", origin="compile_stage/policy/defaults.yaml:4", is_default=True),
    ]
    for width, lines in ((80, 4), (160, 4)):  # of a table one for its head, and a rule
        stream = Terminal()
        Display(stream, width=width).show_values(rows)
        shown = stream.getvalue()
        assert len(shown.splitlines()) == lines
        assert "0.99" in shown
        assert "p.yaml:12, locked by b.yaml:3" in shown


def test_a_plan_says_what_the_policy_is_warned_of(result: RunResult) -> None:
    """Broken: who plans a run learns only after it that a gate of the policy can't fail."""
    warned = dataclasses.replace(
        result, policy=dataclasses.replace(result.policy, warnings=("p.yaml:5:1: min_speedup can't fail",))
    )
    full, brief = io.StringIO(), io.StringIO()
    Display(full, width=100).show_plan(plan_of(warned))
    Display(brief, width=100).show_plan(plan_of(warned), brief=True)
    assert "warning: p.yaml:5:1: min_speedup can't fail" in full.getvalue()
    assert "warning" not in brief.getvalue()
