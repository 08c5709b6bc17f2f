"""How many samples a confidence needs is said before anything is run."""

from __future__ import annotations

from dataclasses import replace

from compile_stage.core.records import Gate, Job, Scheme, Target
from compile_stage.core.sample_sizes import confidence_notes, samples_for_gate

ACCURACY = Gate(
    metric="accuracy", limit=0.01, direction="at_most", confidence=0.95, options={"drop": "max_relative_drop"}
)


def job(precision: str, *gates: Gate) -> Job:
    scheme = Scheme(precision=precision, name=precision)
    return Job(id=precision, source="", target=Target(name="t"), backend="b", scheme=scheme, gates=gates)


def test_a_note_says_how_many_samples_a_limit_needs() -> None:
    """Broken: `plan` says nothing, and an hour later the run says NOT_RUN."""
    jobs = [
        job("fp32", Gate(metric="cosine", limit=0.9, direction="at_least")),
        job("int8", ACCURACY),
        job("int4", ACCURACY),
    ]
    (enough,) = confidence_notes(jobs, 512)
    assert enough == (
        "int8, int4: accuracy: a limit of 0.01 at a confidence of 0.95 needs at least 299 samples: enough are there "
        "(512)"
    )
    (few,) = confidence_notes(jobs, 100)
    assert "needs at least 299 samples, and there are 100: validate on more" in few
    (unknown,) = confidence_notes(jobs, None)
    assert unknown.endswith("needs at least 299 samples")
    (never,) = confidence_notes([job("int8", replace(ACCURACY, limit=0.0))], 512)
    assert "can't be shown by any number of samples" in never
    assert confidence_notes([job("int8", replace(ACCURACY, confidence=None))], 100) == ()


def test_a_note_says_how_many_samples_the_confidence_of_the_winner_needs() -> None:
    """Broken: who asks for it hears after an hour that 300 samples, which are enough for each, are too few."""
    jobs = [job("fp32"), *(job(precision, ACCURACY) for precision in ("int8", "int8-dynamic", "int4"))]
    (note,) = confidence_notes(jobs, 512, of_winner=True)
    assert note.endswith(
        "needs at least 299 samples: enough are there (512); a winner beside 2 that miss it takes up to 449"
    )
    assert confidence_notes(jobs[:2], 512, of_winner=True) == confidence_notes(jobs[:2], 512)


def test_a_note_says_how_many_prompts_the_same_tokens_need() -> None:
    """Broken: who asks for 99 % of the same tokens with a confidence hears of the 299 prompts after the run, in which
    fp32, whose tokens are all the same, does not pass."""
    same = Gate(metric="token_top1_agreement", limit=0.99, direction="at_least", confidence=0.95)
    (few,) = confidence_notes([job("fp32", same)], 100)
    assert few == (
        "token_top1_agreement: a limit of 0.99 at a confidence of 0.95 needs about 299 samples where fewer than 10 "
        "answers change; there are 100"
    )
    assert confidence_notes([job("fp32", same)], 299) == ()
    assert confidence_notes([job("fp32", replace(same, confidence=None))], 100) == ()
    (never,) = confidence_notes([job("fp32", replace(same, limit=1.0))], 100)
    assert "can't be shown by any number of samples: give a limit below 1" in never


def test_a_limit_that_an_outputs_own_takes_the_place_of_is_not_noted() -> None:
    """Broken: a run begins with a number of samples that nothing will ask for."""
    narrow = replace(ACCURACY, limit=0.001)
    (note,) = confidence_notes([job("int8", narrow, replace(ACCURACY, output="label"))], 512)
    assert "a limit of 0.01 " in note
    (other,) = confidence_notes([job("int8", narrow, replace(ACCURACY, metric="f1", output="label"))], 512)
    assert "a limit of 0.001 " in other


def test_a_share_of_a_poor_baseline_takes_more_samples() -> None:
    """Broken: 1 % of an accuracy of 0.5 is half a point, and would be asked of 299 samples."""
    assert samples_for_gate(ACCURACY, 0.5) == 598
