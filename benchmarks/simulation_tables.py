"""The sections of docs/benchmarks.md on what intervals, gates and the choice of the winner hold: from
`benchmarks/simulations.py`, `benchmarks/selection.py` and `benchmarks/neighbour.py`."""

from __future__ import annotations

from page import Figure, Page, Row


def statistics(page: Page) -> None:
    """Speedups, accuracy, p95, tokens."""
    page.section(
        "Do intervals and gates hold what they say?",
        "Simulated with the stage's own functions, so the hardware has no say. Before: those of commit c17ed4a. What "
        "is simulated is written in `benchmarks/simulations.py`.",
    )
    figures = page.newest("simulations", by=("question",))
    speedups(page, [figure for figure in figures if figure.row["question"] == "speedup"])
    # The rows of commits before 53da894 do not say by how much.
    two_speeds(page, [figure for figure in figures if figure.row["question"] == "speeds" and "slows" in figure.row])
    if of_stalls := [figure for figure in figures if figure.row["question"] == "stalls"]:
        stalls(page, of_stalls)
    accuracy(page, [figure for figure in figures if figure.row["question"] == "accuracy"])
    if of_candidates := [figure for figure in figures if figure.row["question"] == "candidates"]:
        candidates(page, of_candidates)
    if of_mixed := [figure for figure in figures if figure.row["question"] == "mixed"]:
        mixed(page, of_mixed)
    if of_searches := [figure for figure in figures if figure.row["question"] == "searches"]:
        searches(page, of_searches)
    if of_groups := [figure for figure in figures if figure.row["question"] == "groups"]:
        groups(page, of_groups)
    percentiles(page, [figure for figure in figures if figure.row["question"] == "p95"])
    undecided(page, [figure for figure in figures if figure.row["question"] == "undecided"])
    if of_tries := [figure for figure in figures if figure.row["question"] == "tries"]:
        tries(page, of_tries)
    if found := [figure for figure in figures if figure.row["question"] == "served"]:
        served(page, found)
    perplexity(page, [figure for figure in figures if figure.row["question"] == "perplexity"])
    own_metrics(page, [figure for figure in figures if figure.row["question"] == "own"])
    tokens(page, [figure for figure in figures if figure.row["question"] == "tokens"])


def speedups(page: Page, figures: list[Figure]) -> None:
    head = [
        "autocorrelation of rounds", "processes differ by", "interval holds the truth", "5 starts", "before",
        "median half width", "5 starts", "before", "unstable", "5 starts", "3 % slower passes", "5 starts", "before",
    ]  # fmt: skip
    page.table(head, [speedup_cells(figure.row) for figure in figures], figures)


def speedup_cells(row: Row) -> list[str]:
    return [
        f"{row['memory']:g}",
        f"{row['processes']:.0%}",
        percent(row, "held"),
        percent(row, "more_held"),
        percent(row, "before_held"),
        *(f"±{row[key]:.1%}" if key in row else "" for key in ("half_width", "more_half_width", "before_half_width")),
        percent(row, "unstable"),
        percent(row, "more_unstable"),
        percent(row, "slower_passes"),
        percent(row, "more_slower_passes"),
        percent(row, "before_slower_passes"),
    ]


def accuracy(page: Page, figures: list[Figure]) -> None:
    head = [
        "samples", "in groups of", "loses", "changes either way beside it", "passes a limit of 1 % at 0.95", "before",
    ]  # fmt: skip
    rows = [
        [
            str(row["samples"]),
            str(row["group"]) if row["group"] > 1 else "",
            f"{row['loses']:.1%}",
            f"{row['changes']:.0%}",
            percent(row, "passes"),
            percent(row, "before_passes"),
        ]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def groups(page: Page, figures: list[Figure]) -> None:
    head = [
        "groups", "their sizes", "loses", "gains", "alike within a group", "at its limit passes",
        "sizes not looked at", "half of the limit passes", "sizes not looked at",
    ]  # fmt: skip
    rows = [
        [
            str(row["number"]),
            row["sizes"],
            f"{row['loses']:.0%}",
            f"{row['gains']:.0%}",
            f"{row['alike']:g}",
            *(percent(row, key) for key in ("at", "by_groups_at", "half", "by_groups_half")),
        ]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def two_speeds(page: Page, figures: list[Figure]) -> None:
    head = [
        "a neighbour's period", "it works", "calls then take", "interval of 5 starts holds the truth",
        "around all calls alone", "10 % slower passes", "around all calls alone",
    ]  # fmt: skip
    rows = [
        [
            f"{row['period_s']:g} s",
            f"{row['duty']:.0%}",
            f"{row['slows']:g} times as long",
            *(percent(row, key) for key in ("held", "centred_held", "slower_passes", "centred_slower_passes")),
        ]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def stalls(page: Page, figures: list[Figure]) -> None:
    head = [
        "starts", "of the time the original waits", "it then takes", "an artifact as fast is said to be faster",
        "by Student's t", "10 % slower passes", "by Student's t", "ten times as fast passes", "by Student's t",
    ]  # fmt: skip
    keys = [f"{by}{key}" for key in ("faster", "slower_passes", "tenfold_passes") for by in ("", "student_")]
    rows = [
        [
            str(row["starts"]),
            f"{row['share']:.0%}",
            f"{row['times']:g} times as long",
            *(percent(row, key) for key in keys),
        ]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def candidates(page: Page, figures: list[Figure]) -> None:
    head = [
        "candidates", "samples", "each loses, where 1 % is allowed", "lost by all or none of them", "one passes",
        "by `confidence_of: winner`",
    ]  # fmt: skip
    rows = [
        [
            str(row["count"]),
            str(row["samples"]),
            f"{row['loses']:.1%}",
            f"{row['alike']:.0%}",
            percent(row, "published"),
            percent(row, "winner_published"),
        ]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def mixed(page: Page, figures: list[Figure]) -> None:
    head = [
        "mixed candidates", "samples", "one that holds 1 % is published", "by `confidence_of: winner`",
        "one that loses more", "by `confidence_of: winner`",
    ]  # fmt: skip
    keys = ("good", "winner_good", "bad", "winner_bad")
    rows = [
        [str(row["count"]), f"{row['samples']:,}", *(percent(row, key) for key in keys)]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def searches(page: Page, figures: list[Figure]) -> None:
    head = [
        "search for mixed precision: samples", "with no node kept it loses", "finds a set that loses more than 1 %",
        "where it goes on", "finds a set", "nodes kept of 40", "where it goes on", "trials", "where it goes on",
    ]  # fmt: skip
    rows = [
        [
            f"{row['samples']:,}",
            f"{row['loses']:.1%}",
            percent(row, "bad"),
            percent(row, "going_on_bad"),
            percent(row, "found"),
            *(f"{row[by + key]:.0f}" for key in ("kept", "trials") for by in ("", "going_on_")),
        ]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def tries(page: Page, figures: list[Figure]) -> None:
    head = [
        "limit of", "processes differ by", "at its limit passes in three runs", "in one", "2 % beyond it, in three",
        "in one", "10 % within it, in three", "in one",
    ]  # fmt: skip
    keys = [f"{name}{runs}" for name in ("at", "two_beyond", "ten_within") for runs in ("", "_once")]
    rows = [
        [str(row["kind"]), f"{row['processes']:.0%}", *(percent(row, key) for key in keys)]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def percentiles(page: Page, figures: list[Figure]) -> None:
    head = [
        "processes", "calls", "spread of calls", "of a call's variance, its round's", "processes differ by",
        "a p95 5 % above the limit passes", "processes not looked at", "the bound is too low",
        "a p95 10 % below the limit passes",
    ]  # fmt: skip
    rows = [
        [
            str(row.get("starts", 3)),
            str(row["calls"]),
            f"{row.get('spread', 0.5):g}",
            f"{row['shared']:.0%}",
            f"{row.get('processes', 0.0):.0%}",
            percent(row, "passes"),
            percent(row, "before_passes") if "processes" in row else "",
            percent(row, "too_low"),
            percent(row, "fast_passes"),
        ]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def undecided(page: Page, figures: list[Figure]) -> None:
    head = [
        "a limit that is open after three starts", "processes differ by", "what misses it passes", "always five starts",
        "what is at it passes", "always five", "what holds it by 5 % passes", "always five", "by 10 %", "always five",
    ]  # fmt: skip
    names = {"p95": "`p95_latency_ms`", "speedup": "`min_speedup`"}
    keys = [key for name in ("misses", "at", "five_below", "ten_below") for key in (name, f"five_{name}")]
    rows = [
        [names[row["kind"]], f"{row['processes']:.0%}", *(percent(row, key) for key in keys)]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def served(page: Page, figures: list[Figure]) -> None:
    head = [
        "queue", "it stops for", "it holds", "`throughput_at_p99` of that passes, in 60 s", "by searches alone",
        "in 120 s", "by searches alone", "80 % of that, in 60 s", "in 120 s", "60 % of that, in 60 s", "in 120 s",
    ]  # fmt: skip
    keys = ("passes_1", "by_search_1", "long_passes_1", "long_by_search_1", "passes_0.8", "long_passes_0.8")
    rows = [
        [
            row["kind"],
            f"{row['pause_s']:g} s in {row['every_s']:g}" if row.get("pause_s") else "",
            f"{row['true_per_s']:.0f} requests/s",
            *(percent(row, key) for key in (*keys, "passes_0.6", "long_passes_0.6")),
        ]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def perplexity(page: Page, figures: list[Figure]) -> None:
    head = [
        "prompts", "what they lose", "the bound on `perplexity` is too low", "bootstrap (BCa)",
        "half of the limit passes", "bootstrap (BCa)",
    ]  # fmt: skip
    rows = [
        [
            str(row["count"]),
            f"lognormal, spread {row['spread']:g}" if row["spread"] else "normal",
            *(percent(row, key) for key in ("too_low", "bca_too_low", "good_passes", "bca_good_passes")),
        ]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def own_metrics(page: Page, figures: list[Figure]) -> None:
    head = [
        "a user's rmse: samples", "labels", "5 % above the limit passes", "bootstrap (BCa)",
        "errors of half that size pass", "bootstrap (BCa)",
    ]  # fmt: skip
    keys = ("bad_passes", "bca_bad_passes", "good_passes", "bca_good_passes")
    rows = [
        [str(row["count"]), row["labels"], *(percent(row, key) for key in keys)]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def tokens(page: Page, figures: list[Figure]) -> None:
    head = ["prompts", "spread from prompt to prompt", "the bound on `token_kl` is too low", "if tokens counted"]
    rows = [
        [str(row["count"]), f"{row['prompts']:g}", percent(row, "too_low"), percent(row, "by_tokens")]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def ruined(page: Page) -> None:
    """Artifacts that ruin a few answers, by metric."""
    figures = page.newest("ruined-answers", by=("metric", "labels"))
    if not figures:
        return
    page.section(
        "Do limits on task metrics see a few ruined answers?",
        "Simulated with the stage's own functions: an artifact that gives a share of the samples the answer to another "
        "one, and loses 5 % more than its limit allows at 0.95. By the bootstrap alone: as it was for artifacts in "
        "floats until 2026-11-28. Beside it artifacts that ruin nothing, at the same limit. What is simulated: "
        "`benchmarks/ruined_answers.py` "
        "([decision 0122](decisions/0122-a-few-ruined-answers-that-no-sample-shows.md), "
        "[0124](decisions/0124-a-loss-that-few-samples-decide.md)).",
    )
    head = [
        "metric", "labels", "answers ruined", "samples", "limit", "it passes", "by the bootstrap alone",
        "one that rounds passes", "its check is NOT_RUN", "one that is 3 % off passes",
    ]  # fmt: skip
    rows = [
        [
            f"`{row['metric']}`",
            row["labels"],
            f"{row['ruined']:.0%}" + (" of a class" if row["labels"] == "rare" else ""),
            str(row["samples"]),
            f"{row['limit']:.3g}",
            *(
                percent(row, key)
                for key in ("passes", "bootstrap_passes", "rounded_passes", "not_run", "eight_bits_pass")
            ),
        ]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def ends_of_starts(page: Page) -> None:
    """What is lost where starts end as soon as they are known as they differ, and where three are enough."""
    figures = [one for one in page.newest("simulations", by=("question",)) if one.row["question"] == "starts"]
    page.section(
        "When has a measurement enough rounds and starts?",
        "Simulated: a noisy machine, by the stage's rule of when a start ends and when three starts are enough; beside "
        "it five starts, each ended without a look at what the earlier ones differed by (decisions "
        "[0104](decisions/0104-a-start-is-known-no-more-narrowly-than-starts-differ.md) and "
        "[0105](decisions/0105-three-starts-that-agree-are-enough.md)).",
    )
    head = [
        "autocorrelation of rounds", "processes differ by", "interval holds the truth", "always five",
        "median half width", "always five", "rounds", "always five",
    ]  # fmt: skip
    rows = [
        [
            f"{row['memory']:g}",
            f"{row['processes']:.0%}",
            percent(row, "held"),
            percent(row, "fixed_held"),
            *(f"±{row[key]:.1%}" for key in ("half_width", "fixed_half_width")),
            *(f"{row[key]:.0f}" for key in ("rounds", "fixed_rounds")),
        ]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def allocation(page: Page) -> None:
    """How the time for measuring is shared among starts and rounds."""
    figures = [one for one in page.newest("simulations", by=("question",)) if one.row["question"] == "allocation"]
    page.section(
        "More starts or more rounds?",
        "Simulated: a minute for measuring, of which a start takes 6 s and a round 0.35 s, shared by the stage's rule, "
        "and beside it three starts with as many rounds as there is time for "
        "([decision 0111](decisions/0111-more-starts-rather-than-more-rounds.md)).",
    )
    head = [
        "rounds wander by", "processes differ by", "interval holds the truth", "three", "median half width", "three",
        "unstable", "three", "seconds", "three",
    ]  # fmt: skip
    rows = [
        [
            f"{row['noise']:.0%}",
            f"{row['processes']:.0%}",
            *(percent(row, key) for key in ("held", "three_held")),
            *(f"±{row[key]:.1%}" for key in ("half_width", "three_half_width")),
            *(percent(row, key) for key in ("unstable", "three_unstable")),
            *(f"{row[key]:.0f}" for key in ("seconds", "three_seconds")),
        ]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def selection(page: Page) -> None:
    """The winner among equal candidates, by noise and number."""
    figures = page.newest("selection", by=("noise",))
    if not figures:
        return
    page.section(
        "Is the best of several candidates believed too much?",
        "Simulated with the stage's own functions: candidates of one speed, 3 starts each. Before: the interval of "
        "each candidate by itself. Again: three fresh starts of the winner decide. What is simulated is written in "
        "`benchmarks/selection.py`.",
    )
    head = [
        "noise", "candidates", "the fastest looks faster by", "the winner by",
        "winner's interval holds the truth", "before", "median half width", "before", "unstable", "before",
        "3 % slower wins", "before", "again", "10 % faster wins", "before", "again",
    ]  # fmt: skip
    page.table(head, [selection_cells(figure.row) for figure in figures], figures)


def leaving(page: Page) -> None:
    """Losers that leave the rounds, by noise."""
    figures = page.newest("leaving", by=("noise",))
    if not figures:
        return
    page.section(
        "Is anything lost where losers leave the rounds?",
        "Simulated with the stage's own functions: six candidates, the slowest at a third of the fastest's speed. All "
        "are started once, and those that may win twice more. Before: everybody stays to the end of the first start's "
        "rounds. Wrong: the winner is more than 5 % slower than the fastest. What is simulated: "
        "`benchmarks/leaving.py`.",
    )
    head = [
        "noise", "turns of the first start", "before", "left, of 6", "winner's interval holds the truth", "before",
        "that of who left", "wrong winner", "before", "no winner", "before",
    ]  # fmt: skip
    rows = [
        [
            row["noise"],
            f"{row['now_turns']:.0f}",
            f"{row['before_turns']:.0f}",
            f"{row['now_left']:.1f}",
            *(percent(row, key) for key in ("now_held", "before_held", "now_losers_held", "now_wrong", "before_wrong")),
            *(percent(row, key) for key in ("now_none", "before_none")),
        ]
        for row in (figure.row for figure in figures)
    ]
    page.table(head, rows, figures)


def selection_cells(row: Row) -> list[str]:
    return [
        row["noise"],
        str(row["candidates"]),
        *(f"{row[key]:+.1%}" for key in ("fastest_bias", "now_bias")),
        *(percent(row, key) for key in ("now_held", "alone_held")),
        *(f"±{row[key]:.1%}" for key in ("now_half_width", "alone_half_width")),
        *(percent(row, key) for key in ("now_unstable", "alone_unstable")),
        *(percent(row, f"{way}_slower") for way in ("now", "alone", "again")),
        *(percent(row, f"{way}_faster") for way in ("now", "alone", "again")),
    ]


def neighbour(page: Page) -> None:
    """Runs beside a neighbour, by what it does."""
    figures = page.newest("neighbour", by=("original",))
    if not figures:
        return
    page.section(
        "Is the winner the same beside other work?",
        "The stage measures four candidates again and again beside a process that uses 0.5 to 1.5 cores, and should "
        "choose the winner of a quiet run, or one that the quiet run calls a tie. How: `benchmarks/neighbour.py`.",
    )
    rows = []
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in (figure.row for figure in figures):
        groups.setdefault((row.get("original", "onnx"), row["kind"]), []).append(row)
    for (original, kind), runs in groups.items():
        winners = list(dict.fromkeys(row["winner"] for row in runs))
        agreed = [row["agrees"] for row in runs if "agrees" in row]
        ties = runs[0].get("ties")
        rows.append(
            [
                {"onnx": "ONNX Runtime", "pytorch": "PyTorch"}[original],
                kind,
                str(len(runs)),
                f"{sum(agreed)}" if agreed else "",
                "; ".join(f"{name} ({sum(row['winner'] == name for row in runs)})" for name in winners),
                "; ".join(ties) if ties else "",
                f"{sum(not row['stable'] for row in runs)}",
            ]
        )
    page.table(
        ["original", "neighbour", "runs", "agree", "winners", "winner and its ties", "unstable speedups"], rows, figures
    )


def percent(row: Row, key: str) -> str:
    return f"{row[key]:.1%}" if key in row else ""
