"""The stage's winner beside the best that a skilled user reaches by hand with each peer's own tools.

    python benchmarks/by_hand.py                            # six networks, batch 1 and 8
    python benchmarks/by_hand.py small lstm --seconds 6     # some of them, shorter
    python benchmarks/by_hand.py --peers onnxruntime openvino --batches 1
    python benchmarks/by_hand.py --interpreter executorch=ENV/bin/python    # a peer in an environment of its own
    python benchmarks/by_hand.py --backends onnxruntime openvino --search-minutes 0   # fewer choices for the stage
    python benchmarks/by_hand.py --before c17ed4a           # beside what an earlier commit publishes, too

For each network the stage is run once, with a target for each batch size, and publishes its winners. The peers'
recipes (`benchmarks/peers/`) are made from the same network with the same 64 calibration samples. Then, for each
batch size, all take turns: a fresh process each, the same inputs, the same threads, a shuffled order and its mirror
image, NumPy arrays in and out.

1. Screening: each recipe answers the 64 validation samples, held to the policy's tolerances for its precision, and runs
   six rounds.
2. Whoever may be the fastest that passes, or the fastest at all, is started anew `--starts` times beside ours, and so
   is ours once more, as a control of what chance does. Only these rounds count.

A ratio is the peer's median over ours, with its 95 % interval over starts: above 1 ours is faster. LiteRT runs in its
toolchain where that is made, for us and as a peer; a peer that is not there is left out and said to be. The stage tunes
the runtime's options (`ladder: true`), for `--search-minutes` in combination; the recipes are what their documentation
advises. An earlier commit is checked out into a folder of its own, is given the same model and the same policy (less
`search_minutes`, where it doesn't know that), and runs with the packages that are installed here; what it publishes
is opened by its own code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

import results  # noqa: E402
from by_hand_process import HERE, PEERS, recipes  # noqa: E402
from by_hand_tables import CONTROL  # noqa: E402
from by_hand_turns import OURS, Comparison, Participant, contenders, helper, row_of  # noqa: E402
from peers.recipe import BATCHES, Given  # noqa: E402

from compile_stage.core import plugins  # noqa: E402
from compile_stage.core.errors import CompileStageError  # noqa: E402
from compile_stage.measure import speedups  # noqa: E402
from compile_stage.policy.load import load_policy  # noqa: E402

NETWORKS = ("resnet50", "bert6", "separable", "vit", "lstm", "small")
THREADS = 2
POLICY = """\
apiVersion: compile-stage/v1
kind: OptimizationPolicy
name: by-hand
owner: benchmarks
data:
  validation: {source: "mlflow-dataset:validation", max_samples: 64}
  calibration: {source: "mlflow-dataset:calibration", max_samples: 64}
  min_samples: 32
"""
TARGET = """\
  batch{batch}:
    device: cpu
    backends: [{backends}]
    precisions: [int8, int8-dynamic, bf16, fp32]
    batch_sizes: [{batch}]
    threads: {threads}
    ladder: {ladder}
"""


# ------------------------------------------------------------------------------------------------------------ the stage


@dataclass(frozen=True)
class Winner:
    """What the stage published for one batch size.

    Attributes:
        interpreter: Of the toolchain that its backend runs in; this one's where it needs none.
    """

    job: str
    folder: str
    interpreter: str


def policy_text(chosen: argparse.Namespace, searches: bool = True) -> str:
    """The policy of a run.

    Args:
        searches: Whether this commit knows `budget.search_minutes`; one that doesn't refuses the policy.
    """
    minutes = chosen.search_minutes
    given = {"threads": THREADS, "backends": ", ".join(chosen.backends), "ladder": "true" if minutes else "false"}
    targets = "".join(TARGET.format(batch=batch, **given) for batch in chosen.batches)
    search = f", search_minutes: {minutes}" if minutes and searches else ""
    budget = f"budget: {{measure_seconds: {chosen.stage_seconds}{search}}}"
    return f"{POLICY}targets:\n{targets}{budget}\n"


def usable(backends: Sequence[str]) -> list[str]:
    """Those that are here, or have a toolchain."""
    here = {name: plugins.importable(plugins.load("backends", name)) for name in backends}
    return [name for name in backends if here[name] or plugins.interpreter_of(name)]


def run_stage(
    name: str, work: Path, environment: dict[str, str], sets: Sequence[str], code: Path = results.ROOT
) -> dict[str, Any]:
    """result.json of one run of a checkout's stage, after the model was registered; of an earlier call with the same
    `--keep`, where there was one."""
    if (work / "out" / "result.json").exists():
        return json.loads((work / "out" / "result.json").read_text())
    call = f"import networks; print(networks.register({name!r}))"
    register = [sys.executable, "-c", call]
    there = {**environment, "PYTHONPATH": str(HERE)}
    done = subprocess.run(register, env=there, cwd=work, check=True, stdout=subprocess.PIPE, text=True)
    uri = done.stdout.strip().splitlines()[-1]
    command = [sys.executable, "-m", "compile_stage", "run", uri, "-p", str(work / "policy.yaml"), "-q"]
    command += ["--out", str(work / "out"), *(word for one in sets for word in ("--set", one))]
    # From the checkout's folder: `-m` looks there before it looks at what is installed.
    there = {**environment, "PYTHONPATH": str(code)}
    subprocess.run(command, env=there, cwd=code, check=False, stdout=subprocess.DEVNULL)
    return json.loads((work / "out" / "result.json").read_text())


def winners(result: dict[str, Any], work: Path, environment: dict[str, str]) -> dict[int, Winner]:
    """By batch size, the published version on this disk. Raises SystemExit where the stage published none."""
    found = {}
    for target in result["targets"]:
        batch = int(target["name"].removeprefix("batch"))
        receipt = target.get("receipt")
        if receipt is None:
            raise SystemExit(f"the stage published nothing for {target['name']}: see {work / 'out' / 'report.md'}")
        into = work / f"published-{batch}"
        into.mkdir(exist_ok=True)
        call = "import sys, mlflow; print(mlflow.artifacts.download_artifacts(sys.argv[1], dst_path=sys.argv[2]))"
        command = [sys.executable, "-c", call, receipt["uri"], str(into)]
        done = subprocess.run(command, env=environment, cwd=work, check=True, stdout=subprocess.PIPE, text=True)
        backend, *scheme = target["winner"].split("--")[2:]
        folder, python = done.stdout.strip().splitlines()[-1], plugins.interpreter_of(backend) or sys.executable
        found[batch] = Winner(" ".join([backend, *scheme]), folder, python)
    return found


# --------------------------------------------------------------------------------------------------- an earlier commit


def published_before(
    name: str, code: Path, work: Path, environment: dict[str, str], chosen: argparse.Namespace
) -> dict[int, Winner]:
    """By batch size, what the earlier commit publishes, in a registry of its own."""
    work = work / "before"
    work.mkdir(exist_ok=True)
    there = {**environment, "MLFLOW_TRACKING_URI": f"sqlite:///{work}/mlflow.db"}
    known = "search_minutes" in (code / "docs" / "policy.md").read_text(encoding="utf-8")
    (work / "policy.yaml").write_text(policy_text(chosen, searches=known))
    return winners(run_stage(name, work, there, chosen.set, code), work, there)


# ------------------------------------------------------------------------------------------------------------ the peers


def interpreters(asked: Sequence[str]) -> dict[str, str]:
    """By peer, the Python that has it; empty where none has."""
    given = dict(word.split("=", 1) for word in asked)
    found = {}
    for peer, (_, _, package) in PEERS.items():
        found[peer] = given.get(peer, "")
        if not found[peer] and importable(package):
            found[peer] = sys.executable
        if not found[peer] and peer in plugins.names("backends"):
            found[peer] = plugins.interpreter_of(peer)
    return found


def importable(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def made_by(given: Given, peer: str, python: str, log: Path) -> dict[str, str] | str:
    """By recipe, why it could not be made (empty where it was); or why none of the peer's could."""
    if not python:
        return "not installed here, nor as a toolchain, nor named by --interpreter"
    kept = given.folder / f"{peer}.json"
    if not kept.exists():
        words = (given.network, str(given.folder), str(given.threads))
        try:
            kept.write_text(json.dumps(helper("make", peer, *words, interpreter=python, log=log)["made"]))
        except ChildProcessError as error:
            kept.unlink(missing_ok=True)
            return f"{error} while its recipes were made"
    return json.loads(kept.read_text())


def made_by_peers(
    given: Given, peers: Sequence[str], pythons: dict[str, str], log: Path
) -> tuple[list[Participant], dict[str, str]]:
    """The recipes that were made, and why others were not. Peers are asked side by side: most of what they do is one
    compiler's thread."""
    made: list[Participant] = []
    left_out: dict[str, str] = {}
    longest_first = sorted(peers, key=lambda peer: peer != "pytorch")
    with ThreadPoolExecutor(THREADS) as pool:
        asked = {peer: pool.submit(made_by, given, peer, pythons[peer], log) for peer in longest_first}
    for peer in peers:
        answer = asked[peer].result()
        if isinstance(answer, str):
            left_out[peer] = answer
            continue
        for recipe in recipes(peer):
            if answer.get(recipe.name) == "":
                command = ("open", peer, recipe.name, given.network, str(given.folder), str(given.threads))
                made.append(Participant(recipe.name, command, recipe.precision, pythons[peer]))
            elif recipe.name in answer:
                left_out[recipe.name] = answer[recipe.name]
    return made, left_out


# --------------------------------------------------------------------------------------------------------- the report


def compare(
    comparison: Comparison, winner: Winner, everybody: Sequence[Participant], own: Participant,
    before: Sequence[Participant], chosen: argparse.Namespace,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each recipe, and for the winner of an earlier commit."""
    screened = comparison.screen([own, *everybody])
    if own.name not in screened:
        raise SystemExit(f"the published version can't be opened: {comparison.left_out[own.name]}")
    names = contenders(screened)
    control = replace(own, name=CONTROL)
    racing = [own, control, *before, *(who for who in everybody if who.name in names)]
    taken = comparison.race(racing, chosen.starts, chosen.seconds)
    ours_s = screened[OURS][0]
    rows = []
    for who in [control, *everybody]:
        row: dict[str, Any] = {"recipe": who.name, "precision": who.precision, "ours": winner.job}
        if who.name in screened:
            seconds, refusal = screened[who.name]
            row |= {"passes": not refusal, "screened_over_ours": round(seconds / ours_s, 3)}
            row |= {"refusal": refusal} if refusal else {}
        elif who.name != CONTROL:
            row["left_out"] = comparison.left_out.get(who.name, "not meant for this batch size")
        if who.name in taken:
            row |= row_of(taken, who.name)
        row["ours_p50_ms"] = row_of(taken, OURS)["p50_ms"]
        rows.append(row)
    for who in before:
        row = {"recipe": who.name, "precision": "", "ours": winner.job, "commit": chosen.before}
        row |= row_of(taken, who.name) if who.name in taken else {"left_out": comparison.left_out.get(who.name, "")}
        rows.append({**row, "ours_p50_ms": row_of(taken, OURS)["p50_ms"]})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| recipe | precision | passes | over ours (95 % interval) | p50 ms |", "|---|---|---|---|---|"]
    order = sorted(rows, key=lambda row: row.get("over_ours", row.get("screened_over_ours", 1e9)))
    for row in order:
        if "left_out" in row:
            lines.append(f"| {row['recipe']} | {row['precision']} | left out: {row['left_out']} | | |")
            continue
        passes = f"no, {row['refusal'][:90]}" if row.get("refusal") else "yes"
        ratio = f"{row.get('screened_over_ours')} (screening)"
        if "over_ours" in row:
            ratio = f"**{row['over_ours']:.3f}** ({row['low']:.3f} to {row['high']:.3f})"
        lines.append(f"| {row['recipe']} | {row['precision']} | {passes} | {ratio} | {row.get('p50_ms', '')} |")
    return "\n".join(lines)


def measure(
    name: str, work: Path, environment: dict[str, str], chosen: argparse.Namespace, earlier: Path | None
) -> list[dict[str, Any]]:
    """All rows of a network.

    Args:
        earlier: Where an earlier commit is checked out, if one takes part.
    """
    log = work / "processes.log"
    (work / "policy.yaml").write_text(policy_text(chosen))
    gates = dict(load_policy(work / "policy.yaml").targets[0].tolerances)
    clock = time.monotonic()
    result = run_stage(name, work, environment, chosen.set)
    published = winners(result, work, environment)
    then = published_before(name, earlier, work, environment, chosen) if earlier is not None else {}
    stage_s, clock = time.monotonic() - clock, time.monotonic()
    given = Given(name, work / "given", THREADS)
    words = (name, str(given.folder), str(given.threads))
    if not (given.folder / "original.npy").exists():
        helper("write", *words, log=log)
    made, missing = made_by_peers(given, chosen.peers, interpreters(chosen.interpreter), log)
    made_s = time.monotonic() - clock
    rows: list[dict[str, Any]] = []
    for batch in chosen.batches:
        clock = time.monotonic()
        comparison = Comparison(given, batch, gates, log)
        winner = published[batch]
        own = Participant(OURS, ("open", "published", winner.folder, *words), interpreter=winner.interpreter)
        suited = [who for who in made if batch_suits(who, name, batch)]
        before = []
        if batch in then:
            old = then[batch]
            command = ("open", "earlier", f"{earlier}={old.folder}", *words)
            before = [Participant(f"{old.job}, published by {chosen.before}", command, interpreter=old.interpreter)]
        of_batch = compare(comparison, winner, suited, own, before, chosen)
        share = round(comparison.disturbed / comparison.played, 2)
        of_batch = [{"network": name, "batch": batch, **row, "disturbed_rounds": share} for row in of_batch]
        print(f"\n### {name}, batch {batch}: ours is {winner.job}, {time.monotonic() - clock:.0f} s; "
              f"{share:.0%} of the rounds disturbed\n\n{table(of_batch)}", flush=True)  # fmt: skip
        rows += of_batch
    rows += [{"network": name, "batch": 0, "recipe": who, "left_out": why} for who, why in missing.items()]
    print("".join(f"\nleft out: {who}: {why}" for who, why in missing.items()))
    print(f"\n{name}: stage {stage_s:.0f} s, recipes {made_s:.0f} s", flush=True)
    return rows


def batch_suits(who: Participant, network: str, batch: int) -> bool:
    [recipe] = [one for one in recipes(who.command[1]) if one.name == who.name]
    return recipe.suits(network, batch)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--seconds", type=float, default=8.0, help="of rounds, a network and batch size")
    parser.add_argument("--starts", type=int, default=5, help="of each contender; at least 3")
    parser.add_argument("--stage-seconds", type=float, default=60.0, help="budget.measure_seconds of the stage's run")
    backends = ["onnxruntime", "openvino", "litert", "executorch"]
    parser.add_argument("--backends", nargs="+", default=backends, help="of the stage")
    parser.add_argument("--search-minutes", type=float, default=1.0, help="of the stage; 0: no option is tuned")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="laid over the stage's policy")
    parser.add_argument("--interpreter", action="append", default=[], metavar="PEER=PYTHON")
    parser.add_argument(
        "--before", default="", metavar="COMMIT", help="of this repository, whose winner takes turns too"
    )
    parser.add_argument("--keep", type=Path, help="folder for reports and files; what is there is used again")
    results.add_save_option(parser)
    chosen = parser.parse_args(arguments)
    if chosen.starts < speedups.FEW_PROCESSES:
        parser.error(f"--starts must be at least {speedups.FEW_PROCESSES}: fewer don't show how processes differ")
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    with tempfile.TemporaryDirectory() as scratch, results.recording("by-hand", chosen.save) as record:
        record.settings |= {"threads": THREADS, "seconds": chosen.seconds, "starts": chosen.starts}
        chosen.backends = usable(chosen.backends)
        record.settings |= {"stage_seconds": chosen.stage_seconds, "sets": chosen.set, "backends": chosen.backends}
        record.settings |= {"search_minutes": chosen.search_minutes}
        folder = Path(scratch) / "earlier"
        with results.checkout(chosen.before, folder) if chosen.before else nullcontext() as earlier:
            for name in chosen.networks:
                work, environment = results.workspace(chosen.keep, scratch, name)
                record.rows += measure(name, work, environment, chosen, earlier)


if __name__ == "__main__":
    try:
        main()
    except CompileStageError as error:
        raise SystemExit(str(error)) from error
