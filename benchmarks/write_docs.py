"""Make docs/benchmarks.md and its pictures from benchmarks/results/*.json.

    python benchmarks/write_docs.py            # writes the page
    python benchmarks/write_docs.py --check    # ends with 1 when the page is not what the data give

One table for each question; of each network and kind of hardware the newest run is shown, side by side.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402
from by_hand_tables import by_hand, roofline  # noqa: E402
from cache_tables import cache_hits  # noqa: E402
from fleet_tables import fleets  # noqa: E402
from goal_tables import goals  # noqa: E402
from language_tables import language_models  # noqa: E402
from memory_tables import memory  # noqa: E402
from page import Figure, Page, Row, by_network, number, ordered  # noqa: E402
from pictures import Bar, bar_chart  # noqa: E402
from ray_tables import ray_overhead  # noqa: E402
from results import Run  # noqa: E402
from rewrite_tables import graph_rewrites  # noqa: E402
from serving_tables import predict_cost, served  # noqa: E402
from simulation_tables import (  # noqa: E402
    allocation,
    ends_of_starts,
    leaving,
    neighbour,
    ruined,
    selection,
    statistics,
)

DOCS = results.ROOT / "docs"
HEAD = """\
# Benchmarks

Made by `python benchmarks/write_docs.py` from the files in [benchmarks/results/](../benchmarks/results): change those,
not this page. Each benchmark writes such a file with `--save`. Where several runs answer a question, the newest of each
network and kind of hardware is shown. How latencies are taken: [measurement.md](measurement.md).

All networks but gradient boosting and digits have random weights. Unless a table says otherwise: batch 1, two threads.
A speed-up is over the original in its own framework (PyTorch eager, FP32; scikit-learn for gradient boosting), with its
95 % interval.
"""


def machines(page: Page) -> None:
    seen = {run.hardware: run.content["hardware"] for run in page.runs}
    rows = [
        [
            kind,
            machine["cpu"],
            machine["machine"],
            str(machine["cores"]),
            ", ".join(machine["accelerators"]),
            machine["fingerprint"] or "not recorded",
        ]
        for kind, machine in sorted(seen.items())
    ]
    page.table(["called here", "CPU", "architecture", "cores", "accelerators", "fingerprint"], rows)


def speed_of_winners(page: Page) -> None:
    page.section(
        "How much faster than the original is the winner?",
        "The whole stage on each network: all candidates that the policy allows, the fastest that passes every gate.",
    )
    winners = [figure for figure in page.newest("stage", "backends") if figure.row["state"] == "won"]
    kinds = list(dict.fromkeys(figure.hardware for figure in winners))
    bars = [
        Bar(figure.network, figure.hardware, figure.row["speedup"], f"{figure.row['speedup']:.1f}×", interval(figure))
        for figure in ordered(winners)
        if figure.row["network"] != "boosting"  # 294 times, which would hide all others
    ]
    page.picture(
        "speedup.svg",
        "Speed-up of the winner by network and hardware",
        bar_chart("Speed-up over the original", bars, 1.0),
    )
    rows = []
    for network in dict.fromkeys(figure.network for figure in ordered(winners)):
        cells = [network]
        for kind in kinds:
            match = [figure for figure in winners if (figure.network, figure.hardware) == (network, kind)]
            cells.append(winner_words(match[0]) if match else "")
        rows.append(cells)
    page.table(["network", *kinds], rows, winners)


def winner_words(figure: Figure) -> str:
    row = figure.row
    spread = f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
    doubt = "" if row.get("stable", True) else ", unstable"
    return f"**{row['speedup']:.2f}** ({spread}{doubt}), {row['p50_ms']:.2f} ms, {row['backend']} {row['scheme']}"


def interval(figure: Figure) -> tuple[float, float]:
    return figure.row["speedup_low"], figure.row["speedup_high"]


def every_backend(page: Page) -> None:
    figures = ordered(figure for figure in page.newest("stage", "backends") if figure.row["network"] != "boosting")
    columns = list(dict.fromkeys((figure.network, figure.hardware) for figure in figures))
    questions: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
        (
            "How fast is each backend?",
            "Speed-up over the original. Bold: the winner. In italics: rejected, being slower than the original or "
            "not shown to be "
            "faster, or missing a tolerance. Empty: not asked, or refused.",
            speed_cell,
        ),
        (
            "How exact is each backend?",
            "The worst sample's cosine distance from the original (1 − cosine; 0 is exact).",
            error_cell,
        ),
        ("How large is an artifact, and how much memory does it take?",
         "MB on disk / peak MB of a fresh process that runs it.", size_cell),
        (
            "How long does a compilation take?",
            "Wall seconds of the compiler and the lowering, mostly beside another job. The last row: the whole run.",
            compile_cell,
        ),
    )  # fmt: skip
    for title, words, cell in questions:
        page.section(title, words)
        rows = matrix(figures, columns, cell)
        if cell is compile_cell:
            rows.append(totals(figures, columns))
        shown = [0, *(place for place in range(1, 1 + len(columns)) if any(row[place] for row in rows))]
        head = ["backend, scheme", *(f"{network}<br>{kind}" for network, kind in columns)]
        cells = [[row[place] for place in shown] for row in rows if any(row[1:])]
        page.table([head[place] for place in shown], cells, figures if cell is speed_cell else ())


def matrix(
    figures: Sequence[Figure], columns: Sequence[tuple[str, str]], cell: Callable[[Row], str]
) -> list[list[str]]:
    """A row for each backend and scheme, a column for each network and hardware. What never became an artifact has no
    cell."""
    figures = [figure for figure in figures if {"cosine_distance", "worst_cosine"} & figure.row.keys()]
    candidates = sorted({(figure.row["backend"], figure.row["scheme"]) for figure in figures})
    held = {
        (figure.row["backend"], figure.row["scheme"], figure.network, figure.hardware): figure.row for figure in figures
    }
    return [
        [f"{backend} {scheme}",
         *(cell(held[key]) if (key := (backend, scheme, *column)) in held else "" for column in columns)]
        for backend, scheme in candidates
    ]  # fmt: skip


def speed_cell(row: Row) -> str:
    if "speedup" not in row:
        return "*rejected*"
    speedup = f"{row['speedup']:.2f}"
    return {"won": f"**{speedup}**", "failed": f"*{speedup}*"}.get(row["state"], speedup)


def error_cell(row: Row) -> str:
    if "cosine_distance" in row:
        return f"{row['cosine_distance']:.0e}" if row["cosine_distance"] else "0"
    if "worst_cosine" not in row:  # pruned before its proof
        return ""
    # Of a cosine that was kept with five digits, less than half of the last one is not known.
    distance = 1 - row["worst_cosine"]
    return f"{distance:.0e}" if distance > 5e-6 else "< 5e-06"


def size_cell(row: Row) -> str:
    size = f"{row['size_mb']:.1f}" if "size_mb" in row else "?"
    peak = f"{row['peak_mb']:.0f}" if "peak_mb" in row else "?"
    return f"{size} / {peak}"


def compile_cell(row: Row) -> str:
    return f"{row['compile_s']:.1f}" if "compile_s" in row else ""


def totals(figures: Sequence[Figure], columns: Sequence[tuple[str, str]]) -> list[str]:
    seconds = {
        (figure.network, figure.hardware): f"{total:.0f}"
        for figure in figures
        if (total := figure.run.content["settings"].get("total_s", {}).get(figure.row["network"])) is not None
    }
    return ["**the whole run**", *(seconds.get(column, "") for column in columns)]


def static_int8(page: Page) -> None:
    page.section(
        "How good is our static int8, beside NNCF, ONNX Runtime's quantizer and Olive?",
        "Signal-to-noise ratio against FP32 as served, in dB (more is better) / latency over that of NNCF's graph "
        "in OpenVINO (less is "
        "better). OpenVINO runs NNCF's graphs, ONNX Runtime those of `quantize_static` and Olive. What the lowering "
        "does: [int8.md](int8.md).",
    )
    figures = ordered(page.newest("int8"))
    quantised = [figure for figure in figures if "served_snr_db" in figure.row]
    bars = [
        Bar(figure.network, figure.row["by"], figure.row["served_snr_db"], f"{figure.row['served_snr_db']:.1f} dB")
        for figure in quantised
        if figure.row["by"]
        in ("NNCF", "quantize_static", "Olive", "ours, openvino int8-sym", "ours, onnxruntime int8-u8s8")
    ]
    page.picture(
        "int8.svg",
        "Signal-to-noise ratio of int8 graphs by network",
        bar_chart("Signal-to-noise ratio as served, dB", bars),
    )
    page.table(
        *by_network(
            figures,
            "by",
            lambda row: f"{number(row.get('served_snr_db'), 1) or 'FP32'} / {row['latency_over_nncf']:.2f}",
        ),
        figures,
    )

    page.section(
        "How exact would it be on a CPU with VNNI?",
        "Signal-to-noise ratio of the graph with full 8-bit weights, in dB, computed without integer kernels.",
    )
    figures = ordered(page.newest("int8-full-weights"))
    page.table(*by_network(figures, "by", lambda row: f"{row['graph_snr_db']:.1f}"), figures)

    page.section(
        "How fast is it in OpenVINO, beside NNCF's graph?", "Latency over that of NNCF's graph, only these in turns."
    )
    figures = ordered(page.newest("int8-openvino"))
    page.table(*by_network(figures, "by", lambda row: f"{row['latency_over_nncf']:.3f}"), figures)

    page.section(
        "Are products of two activations faster in int8?",
        "An attention of two products and a Softmax in OpenVINO: latency with quantised products over latency in "
        "float32.",
    )
    figures = page.newest("products", by=("length", "width", "heads"))
    sizes = list(dict.fromkeys(attention_size(figure.row) for figure in figures))
    ratios = {
        (figure.hardware, attention_size(figure.row)): f"{figure.row['int8_over_float32']:.2f}" for figure in figures
    }
    rows = [[kind, *(ratios.get((kind, size), "") for size in sizes)] for kind in kinds_of(figures)]
    page.table(["int8 over float32, by length × width of a head, heads", *sizes], rows, figures)

    page.section(
        "Is a quantised graph faster with its rest in 16-bit floats?",
        "Graphs in OpenVINO with what is not quantised in float32, bfloat16 or float16: latency over that of the same "
        "graph with float32, and in brackets the signal-to-noise ratio against the FP32 original in dB.",
    )
    figures = [
        Figure(figure.run, {**figure.row, "name": f"{figure.row['graph']}, rest in {figure.row['hint']}"})
        for figure in ordered(page.newest("float-rest"))
    ]
    page.table(*by_network(figures, "name", rest_cell), figures)

    page.section(
        "What does an int8 embedding table cost?",
        "SNR of the 6-layer BERT's output and size of the graph, by the granularity of the table's scales.",
    )
    figures = page.newest("embedding-tables", by=())
    rows = [[figure.row["table"], f"{figure.row['snr_db']:.2f}", f"{figure.row['size_mb']:.1f}"] for figure in figures]
    page.table(["table", "SNR dB", "MB"], rows, figures)


def attention_size(row: Row) -> str:
    return f"{row['length']} × {row['width']}, {row['heads']}"


def kinds_of(figures: Sequence[Figure]) -> list[str]:
    """The kinds of hardware that the figures are from, the one of the oldest run first."""
    return list(dict.fromkeys(figure.hardware for figure in figures))


def rest_cell(row: Row) -> str:
    return f"{row['latency_over_f32']:.2f} ({row['served_snr_db']:.1f})"


def accuracy_control(page: Page) -> None:
    page.section(
        "What does it take to hold a tolerance, beside NNCF's accuracy control?",
        "NNCF's `quantize_with_accuracy_control` and the stage on OpenVINO, with the same calibration and "
        "validation samples and the same "
        "gate: the smallest signal-to-noise ratio of 32 samples, or the accuracy on 599 labelled samples of a "
        "trained network. "
        "*digits CNN, uneven channels* has channels whose sizes differ by orders of magnitude, as those of large "
        "trained networks do.",
    )
    figures = page.newest("accuracy-control", by=("network", "gate"))
    several = len(kinds_of(figures)) > 1
    rows = []
    for figure in figures:
        row = figure.row
        by = row["by"] + (f" ({row['scheme']})" if "scheme" in row else "")
        ended = ", stopped" if row["stopped"] else ""
        measured = (row["reached"], number(row.get("latency_over_fp32"), 2))
        where = [figure.hardware] if several else []
        evaluations = f"{row['evaluations']}{ended}"
        rows.append([figure.network, *where, row["gate"], by, evaluations, f"{row['seconds']:.0f}", *measured])
    head = [
        "network",
        *(["CPU"] if several else []),
        "gate",
        "by",
        "evaluations",
        "s until proven",
        "reached",
        "latency over FP32's",
    ]
    page.table(head, rows, figures)


def precisions(page: Page) -> None:
    page.section(
        "What does each precision cost and gain?",
        "MB on disk / times as fast as FP32 in the same backend / SNR in dB against FP32, over 8 samples. One "
        "thread. *8 products* is a "
        "network of eight products of 1024 × 1024, one row a call, where reading the weights takes the time.",
    )
    figures = ordered(page.newest("precisions"))
    named = [
        Figure(figure.run, {**figure.row, "name": f"{figure.row['backend']} {figure.row['scheme']}"})
        for figure in figures
    ]
    page.table(*by_network(named, "name", precision_cell), figures)


def precision_cell(row: Row) -> str:
    return f"{row['size_mb']:.1f} / {row['times_as_fast_as_fp32']:.2f} / {number(row.get('snr_db'), 1) or 'exact'}"


def own_cost(page: Page) -> None:
    page.section(
        "How long does a job take beyond its compiler?",
        "Worker, protocol, digests and cache of the stage beside a plain script of the same interpreter that "
        "compiles the same small "
        "CNN in FP32, in turns, each in a fresh process. Medians, and the least and most of the differences.",
    )
    figures = page.newest("overhead", by=("backend",))
    bars = [
        Bar(figure.row["backend"], series, figure.row[key], f"{figure.row[key]:.1f} s")
        for figure in figures
        for series, key in (("plain script", "script_s"), ("job of the stage", "job_s"))
    ]
    page.picture(
        "overhead.svg", "Seconds of a job beside a plain script", bar_chart("Seconds to compile the small CNN", bars)
    )
    rows = []
    for figure in figures:
        row = figure.row
        name = row["backend"] + (f", {row['note']}" if "note" in row else "")
        difference = f"{row['more_s']:+.2f} ({row['more_low_s']:+.2f} to {row['more_high_s']:+.2f})"
        rows.append([name, row["runs_in"], f"{row['script_s']:.2f}", f"{row['job_s']:.2f}", difference])
    page.table(["backend", "runs in", "script s", "job s", "more s (least to most)"], rows, figures)

    page.section(
        "What does the stage itself cost?",
        "Wall time of a run without a cache over the workers' own time, and peak memory of the stage's own process.",
    )
    figures = ordered(page.newest("own-cost"))
    rows = [
        [
            figure.network,
            figure.hardware,
            f"{figure.row['wall_over_workers']:.2f}",
            f"{figure.row['stage_peak_mb']:.0f}",
        ]
        for figure in figures
    ]
    page.table(["network", "hardware", "wall over workers' time", "peak MB"], rows, figures)

    page.section(
        "How fast does a command answer?", "Median wall seconds; in brackets, how much more than `import mlflow`."
    )
    figures = page.newest("start-up", by=("command",))
    kinds = list(dict.fromkeys(figure.hardware for figure in figures))
    held = {(figure.row["command"], figure.hardware): figure.row for figure in figures}
    commands = dict.fromkeys(figure.row["command"] for figure in figures)
    rows = [[f"`{command}`", *(start_cell(held.get((command, kind))) for kind in kinds)] for command in commands]
    page.table(["command", *kinds], rows, figures)


def time_to_verdict(page: Page) -> None:
    """Nothing before there is a run."""
    figures = page.newest("time-to-verdict", by=("commit",))
    if not figures:
        return
    page.section(
        "How long is it until the verdict?",
        "The digits CNN in two backends and three precisions, batch 1, two threads, without a cache and without "
        "publishing: from the command to its end, in turns with an earlier commit (`benchmarks/time_to_verdict.py`).",
    )
    rows = []
    for figure in figures:
        row = figure.row
        speedup = f"{row['speedup']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        rows.append(
            [row["commit"], figure.hardware, f"{row['wall_s']:.1f}", f"{row['cpu_s']:.1f}", row["winner"], speedup]
        )
    page.table(["commit", "hardware", "wall s", "CPU s", "winner", "its speed-up"], rows, figures)


def start_cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['median_s']:.2f}" + (
        f" ({row['over_import_s']:+.2f})" if row.get("over_import_s") is not None else ""
    )


def option_tuning(page: Page) -> None:
    page.section(
        "What does option tuning gain?",
        "ResNet-50, logged as ONNX, on ONNX Runtime with `ladder: true`: what each step of [option "
        "tuning](option-tuning.md) gained "
        "over the step before. The original is ONNX Runtime itself.",
    )
    figures = page.newest("option-tuning", by=())
    rows = []
    for figure in figures:
        row = figure.row
        ratio = (
            f"{row['over_step_before']:.2f} ({row['over_low']:.2f} to {row['over_high']:.2f})"
            if "over_step_before" in row
            else ""
        )
        cells = (number(row.get("p50_ms"), 1), ratio, number(row.get("peak_mb"), 0), number(row.get("size_mb"), 1))
        rows.append([row["step"], row["candidate"], *cells])
    page.table(["step", "candidate", "p50 ms", "over the step before", "peak MB", "MB on disk"], rows, figures)


def tvm_tuning(page: Page) -> None:
    figures = page.newest("tune-tvm", by=("way",))
    if figures:
        page.section("What does tuning gain on TVM?", "A small CNN, 64 × 64, in turns within one process.")
        rows = [[f.row["way"], f.hardware, f"{f.row['p50_ms']:.3f}", f"{f.row['over_untuned']:.1f}"] for f in figures]
        page.table(["way", "hardware", "p50 ms", "times as fast as untuned"], rows, figures)


def operators(page: Page) -> None:
    page.section(
        "Does a wrong output ever pass?",
        "The operator cases of the onnx package, each through source, `refuse`, `compile`, session and verdict of a "
        "backend, with the "
        "standard's own outputs as the baseline and the tolerance of onnx's test runner (rtol 1e-3, atol 1e-7) as "
        "the gate. NumPy compares "
        "the same outputs apart from the verdict. *Right*: both find the output right. *Refused*: by source or "
        "backend, with a reason. "
        "*Caught*: the verdict fails a wrong output, or an error for people. *Unproven*: NumPy finds it right, the "
        "verdict does not pass. "
        "*Crashed*: the process ended, or an exception that is none of ours. *Passed wrong* must be 0.",
    )
    figures = page.newest("node-cases", by=("backend",))
    keys = ("cases", "right", "refused", "caught", "unproven", "crashed", "passed_wrong")
    rows = [
        [
            f"{figure.row['backend']} ({figure.row['versions']})",
            *(str(figure.row[key]) for key in keys),
            f"{figure.row['seconds']:.0f}",
        ]
        for figure in figures
    ]
    page.table(["backend", *(key.replace("_", " ") for key in keys), "s"], rows, figures)


def runs(page: Page) -> None:
    page.section(
        "Runs",
        "Where a commit is not recorded, the commit in brackets is the one that entered the figures into the "
        "repository. Commits of 2026-11-23 that the history does not have were put together into 4210cb4. Quiet: other "
        f"processes used less than {results.QUIET_CORES:g} cores in the two seconds before and after (older figures: "
        "as noted then).",
    )
    rows = []
    for place, run in enumerate(page.runs, 1):
        content = run.content
        link = f"[{run.name.removesuffix('.json')}](../benchmarks/results/{run.name})"
        quiet = {True: "yes", False: "no", None: "not recorded"}[content["quiet"]]
        command = "<br>".join(f"`{line}`" for line in (content["command"] or "").splitlines()) or "not recorded"
        rows.append([str(place), link, run.hardware, quiet, commit_words(content), versions_words(content), command])
    page.table(["", "file", "hardware", "quiet", "commit", "versions", "command"], rows)


def commit_words(content: dict[str, Any]) -> str:
    if content["commit"] is None:
        return f"not recorded ({content['entered']['commit']})"
    return content["commit"][:7] + (" with uncommitted changes" if content["uncommitted_changes"] else "")


def versions_words(content: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in content["versions"].items()) or "not recorded"


SECTIONS = (
    goals, speed_of_winners, by_hand, roofline, every_backend, static_int8, accuracy_control, precisions,
    graph_rewrites, option_tuning, tvm_tuning, own_cost, memory, time_to_verdict, predict_cost, served, language_models,
    operators, statistics, ruined, ends_of_starts, allocation, selection, leaving, neighbour, fleets, cache_hits,
    ray_overhead,
    runs,
)  # fmt: skip


def make(files: list[Run]) -> dict[Path, str]:
    """The page and its pictures, by path below docs/."""
    page = Page(files, [HEAD])
    machines(page)
    for section in SECTIONS:
        section(page)
    pictures = {Path("pictures") / name: svg for name, svg in page.pictures.items()}
    return {Path("benchmarks.md"): "".join(page.text), **pictures}


def outdated(docs: Path = DOCS, folder: Path = results.FOLDER) -> list[str]:
    """What is wrong for a reader: incomplete data files, and files of docs/ that the data don't give."""
    files = results.load(folder)
    wrong = [problem for run in files for problem in results.problems(run)]
    if wrong:
        return wrong
    return [
        f"docs/{path} is not what benchmarks/results gives: run `python benchmarks/write_docs.py`"
        for path, text in make(files).items()
        if not (docs / path).exists() or (docs / path).read_text(encoding="utf-8") != text
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 when something is out of date")
    if parser.parse_args().check:
        print("\n".join(wrong := outdated()))
        raise SystemExit(bool(wrong))
    files = results.load()
    for problem in (problem for run in files for problem in results.problems(run)):
        raise SystemExit(problem)
    for path, text in make(files).items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
