"""Language models in the reports: a table token by token, and what they write, which is text of others."""

from __future__ import annotations

import dataclasses
import random
from types import ModuleType
from typing import Any

import pytest

from compile_stage.core.errors import UsageError
from compile_stage.core.records import Check, Gate, Outcome, RunResult, Target, Timing, Verdict, WrittenText
from compile_stage.report.html import render_html
from compile_stage.report.language import language_rows
from compile_stage.report.markdown import render_markdown
from compile_stage.report.reading import result_of
from compile_stage.report.result import result_document, result_json_schema
from compile_stage.steps.write_texts import _laid_out, _tokens

HOSTILE = "<script>alert(1)</script> | `x` **bold** [a](http://evil) @team \x1b[31mred\u202eesrever\r\n# head"


def spoken(one: Timing) -> Timing:
    """As a language model's: a fourth of each call is its prompt's."""
    turns = (10,) * (len(one.latency_s) // 10)
    calls = one.latency_s[: 10 * len(turns)]
    draw = random.Random(1)
    first = tuple(call * (0.25 + draw.random() / 100) for call in calls)
    return dataclasses.replace(one, latency_s=calls, turns=turns, first_s=first, new_tokens=16)


def language_model(factory: ModuleType) -> RunResult:
    """The winner is a language model; what it writes is hostile."""
    target = factory.every_ending()
    winner = target.winner
    assert winner is not None
    checks = []
    for metric, value, ends in (
        ("token_kl", 0.0123, (0.0101, 0.0156)),
        ("token_top1_agreement", 0.971, (0.953, 0.984)),
        ("perplexity", 0.0089, (0.0041, 0.0132)),
    ):
        gate = Gate(metric=metric, limit=0.1, direction="at_most")
        checks.append(Check(gate=gate, outcome=Outcome.PASS, measured=value, interval=ends, reason="", samples=64))
    measurement = winner.measurement
    assert measurement is not None
    measurement = dataclasses.replace(measurement, timings=tuple(map(spoken, measurement.timings)))
    winner = dataclasses.replace(winner, verdict=Verdict(checks=tuple(checks)), measurement=measurement)
    base = dataclasses.replace(measurement, timings=(spoken(factory.timing(0.02, None)),))
    target = dataclasses.replace(
        target,
        baseline=base,
        candidates=tuple(winner if c.job.id == winner.job.id else c for c in target.candidates),
        texts=(
            WrittenText(job_id="", prompt="Once " + HOSTILE, same="upon a time"),
            WrittenText(job_id=winner.job.id, prompt="Once " + HOSTILE, same="upon a", rest=" hill " + HOSTILE),
        ),
    )
    made: RunResult = factory.make_result(target)
    return dataclasses.replace(made, baseline={target.policy.target.name: base})


@pytest.fixture
def result(factory: ModuleType) -> RunResult:
    return language_model(factory)


def test_the_table_has_times_and_distributions_with_their_intervals(result: RunResult, factory: ModuleType) -> None:
    """Broken: nobody sees how long a user waits, or how sure the divergence is."""
    original, *rows = language_rows(result, result.targets[0])
    assert (original.batch_size, original.kl) == (1, "")
    assert original.first.startswith("5.")
    won = next(row for row in rows if row.won)
    assert won.kl == "0.0123 (0.0101 to 0.0156)"
    assert won.top1 == "97.1 % (95.3 % to 98.4 %)"
    assert won.perplexity == "+0.89 % (+0.41 % to +1.32 %)"
    assert "×" in won.first
    assert "×" in won.each
    second = rows[rows.index(won) + 1]
    assert (second.batch_size, second.kl) == (8, "")
    assert language_rows(factory.make_result(factory.every_ending()), factory.every_ending()) == ()
    for report in (render_markdown(result), render_html(result)):
        assert "0.0123 (0.0101 to 0.0156)" in report
        assert won.tokens in report


def test_what_a_model_writes_is_text_and_no_markup(result: RunResult) -> None:
    """Broken: a model writes a script into the page of whoever reviews it, a link or a mention into a pull request, or
    a colour into a terminal."""
    page, text = render_html(result), render_markdown(result)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<mark> hill &lt;script" in page
    assert "upon a" in page
    assert "<script" not in text
    assert "\\[a\\](http" in text
    assert "@team" not in text
    assert "\n# head" not in text
    assert "**hill " in text


def test_it_goes_through_result_json(result: RunResult) -> None:
    """Broken: a report that is made of result.json again has lost the tokens' times, or the texts."""
    import jsonschema

    document = result_document(result)
    jsonschema.Draft202012Validator(result_json_schema()).validate(document)
    again = result_of(document)
    assert language_rows(again, again.targets[0])[1:] == language_rows(result, result.targets[0])[1:]
    assert again.targets[0].texts == result.targets[0].texts
    by_batch = document["targets"][0]["candidates"][0]["timing"]["by_batch"]
    tokens = by_batch["1"]["tokens"]
    assert tokens["ttft_s"][1] <= tokens["ttft_s"][0] <= tokens["ttft_s"][2]


class Tokenizer:
    """The worker of a source whose tokens are letters; token 27 moves a terminal's cursor."""

    def call(self, function: str, /, **arguments: Any) -> Any:
        if function == "prompt_tokens":
            return [[65, 66]]
        assert function == "texts_of_tokens"
        return ["".join(map(chr, row)) for row in arguments["tokens"]]


def test_texts_part_at_the_first_token_that_differs() -> None:
    """Broken: the mark stands elsewhere, or a control character of a model reaches a terminal or a page."""
    written = {"": [[99, 100, 101]], "mine": [[99, 27, 101]]}
    source: Any = None
    original, mine = _laid_out(Tokenizer(), source, source, [0], written, Target(name="t"))  # type: ignore[arg-type]
    assert (original.prompt, original.same, original.rest) == ("AB", "cde", "")
    assert (mine.same, mine.rest) == ("c", "\\x1be")


@pytest.mark.parametrize("answer", [None, [[1], [2]], [["1"]], [[-1]], [[1 << 40]], [[1] * 33], ["ab"]])
def test_what_a_candidate_says_it_wrote_are_tokens(answer: Any) -> None:
    """Broken: a candidate's process hands something else than tokens to the source's tokenizer."""
    with pytest.raises(UsageError):
        _tokens(answer, Target(name="t"), 1)
    assert _tokens([[1, 2]], Target(name="t"), 1) == [[1, 2]]
