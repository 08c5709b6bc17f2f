"""A model that the stage compiled, as a Dagster asset whose checks are the gates of result.json.

    from compiled_model import compiled_model
    defs = dg.Definitions(assets=[compiled_model("fraud", "models:/fraud@candidate", "policies/cpu.yaml", ["cpu"])])

The stage lives in an environment of its own: `COMPILE_STAGE` in the environment is its executable, `compile-stage` on
the path without it. Arguments are a list, which no shell reads.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

GATES = ("answers", "performance", "winner")
# All other metrics are of answers.
PERFORMANCE = (
    "speedup", "p95_latency_ms", "ttft_p95_ms", "tpot_p95_ms", "tokens_per_s", "throughput_at_p99", "cost_per_million",
    "size_mb", "memory_mb", "max_slowdown",
)  # fmt: skip
GATE_FAILED, REGISTRY_TROUBLE, INTERRUPTED = 3, 4, 130


def compiled_model(
    name: str,
    model_uri: str,
    policy: str,
    targets: Sequence[str],
    *,
    arguments: Sequence[str] = (),
    out: str | None = None,
) -> dg.AssetsDefinition:
    """An asset that runs the stage, with three blocking checks for each target.

    Args:
        name: Of the asset.
        model_uri: The model in the registry, for instance `models:/fraud@candidate`.
        policy: Path of the policy file, or `shipped:NAME`.
        targets: Names of the policy's targets; Dagster wants to know the checks before the run.
        arguments: More arguments of `compile-stage run`, for instance `["--no-promote"]`.
        out: Folder for the reports and bundles; `compile-stage-out/NAME` by default.

    Raises (when it is materialized):
        Failure: The stage did not come to its end; tried again only where the registry was out of reach.
    """
    folder = Path(out or Path("compile-stage-out", name))
    checks = [
        dg.AssetCheckSpec(check_name(target, gate), asset=name, blocking=True) for target in targets for gate in GATES
    ]

    @dg.asset(name=name, check_specs=checks, kinds={"mlflow"}, retry_policy=dg.RetryPolicy(max_retries=2))
    def run_stage(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        command = [os.environ.get("COMPILE_STAGE", "compile-stage"), "run", "--policy", policy, "--out", str(folder)]
        for target in targets:
            command += ["--target", target]
        result_file = folder / "result.json"
        result_file.unlink(missing_ok=True)  # of an earlier run; it must not be taken for this one's
        code = subprocess.run([*command, *arguments, "--", model_uri], check=False).returncode  # noqa: S603 (a list: no shell reads it)
        if code not in (0, GATE_FAILED) or not result_file.exists():
            raise dg.Failure(
                f"compile-stage ended with exit code {code}; its messages are in the run's logs",
                allow_retries=code in (REGISTRY_TROUBLE, INTERRUPTED),
            )
        result = json.loads(result_file.read_text(encoding="utf-8"))
        return dg.MaterializeResult(
            metadata={
                "status": result["status"],
                "exit_code": code,
                "source": result["source"]["uri"],
                "report": dg.MetadataValue.md((folder / "report.md").read_text(encoding="utf-8")),
                "report.html": dg.MetadataValue.path(str((folder / "report.html").absolute())),
                "result.json": dg.MetadataValue.path(str(result_file.absolute())),
                "junit.xml": dg.MetadataValue.path(str((folder / "junit.xml").absolute())),
            },
            check_results=list(checks_of(result)),
        )

    return run_stage


def check_name(target: str, gate: str) -> str:
    """`cpu_server_answers`: Dagster takes letters, digits and underscores only."""
    return f"{re.sub(r'[^A-Za-z0-9_]', '_', target)}_{gate}"


def checks_of(result: dict[str, Any]) -> Iterator[dg.AssetCheckResult]:
    """The gates of each target in result.json: a candidate's answers are near enough to the original's; one of these is
    fast and small enough; one passes all, was chosen, and was published and promoted as the policy wants. Of a target
    that is not required, a missed gate is a warning. Where the run failed, a check that blocks does not pass."""
    failed = result["status"] != "passed"
    # Without a required target the run needs a winner in any of them.
    needed = [target for target in result["targets"] if target["required"]] or result["targets"]
    # Winners that could not be published or promoted: the run failed, though nothing lacks one.
    stopped = result["problem"] if failed and all(target["winner"] for target in needed) else None
    for target in result["targets"]:
        blocks = target["required"] or (failed and target in needed)
        severity = dg.AssetCheckSeverity.ERROR if blocks else dg.AssetCheckSeverity.WARN
        yield from _checks_of(target, severity, stopped if target in needed else None)


def _checks_of(
    target: dict[str, Any], severity: dg.AssetCheckSeverity, stopped: str | None
) -> Iterator[dg.AssetCheckResult]:
    """`stopped`: what kept the winner from being published or promoted, or None."""
    checked = {one["job_id"]: one["verdict"]["checks"] for one in target["candidates"] if one["verdict"] is not None}
    answers = {job: [c for c in checks if c["metric"] not in PERFORMANCE] for job, checks in checked.items()}
    # What answers otherwise was not measured, so it misses no limit on speed.
    right = [job for job, checks in answers.items() if _hold(checks)]
    performance = {job: [c for c in checked[job] if c["metric"] in PERFORMANCE] for job in right}
    for gate, looked_at in (("answers", answers), ("performance", performance)):
        yield dg.AssetCheckResult(
            check_name=check_name(target["name"], gate),
            passed=any(_hold(checks) for checks in looked_at.values()),
            severity=severity,
            metadata={
                job: [f"{c['metric']}: {c['outcome']}, {c['reason']}" for c in checks]
                for job, checks in looked_at.items()
            },
        )
    yield dg.AssetCheckResult(
        check_name=check_name(target["name"], "winner"),
        passed=target["winner"] is not None and stopped is None,
        severity=severity,
        metadata={
            "winner": str(target["winner"]),
            "published": str((target["receipt"] or {}).get("uri")),
            "reason": str(stopped or target["reason"]),
        },
    )


def _hold(checks: list[dict[str, Any]]) -> bool:
    return all(check["outcome"] == "pass" or check["waiver"] for check in checks)
