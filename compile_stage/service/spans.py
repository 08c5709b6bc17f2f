"""OpenTelemetry traces of runs: one span for a run and one for each of its steps, from its `result.json`.

They are sent as OTLP over HTTP (protobuf) to `OTEL_EXPORTER_OTLP_ENDPOINT`, after the run has ended: a run is a process
of its own, and a collector that is away must not disturb what is measured.
"""

from __future__ import annotations

import hashlib
import json
import os
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from compile_stage.core.errors import EXIT_OK
from compile_stage.service.queue import Job

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
_TIMEOUT_S = 10
_NANO = 1_000_000_000


def send(job: Job, result: Path, ended_at: float, environment: Mapping[str, str] = os.environ) -> bool:
    """Send the trace of a run that has ended; False where no collector is named, or the run left no result.

    Args:
        result: The run's folder of results.
        ended_at: Seconds since 1970.

    Raises:
        OSError: The collector does not take it.
    """
    endpoint = environment.get(ENDPOINT_VARIABLE, "")
    file = result / "result.json"
    if not endpoint.startswith(("http://", "https://")) or job.kind != "run" or not file.is_file():
        return False
    body = trace(job, json.loads(file.read_text(encoding="utf-8")), ended_at, environment)
    headers = {"Content-Type": "application/x-protobuf", **_headers(environment.get(HEADERS_VARIABLE, ""))}
    request = urllib.request.Request(f"{endpoint.rstrip('/')}/v1/traces", data=body, headers=headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310 - of http and https alone
        return True


def trace(job: Job, result: Mapping[str, Any], ended_at: float, environment: Mapping[str, str]) -> bytes:
    """An `ExportTraceServiceRequest`. The ids follow from the job, so that one that is sent twice is one trace."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    _attribute(resource.resource, "service.name", environment.get("OTEL_SERVICE_NAME", "compile-stage"))
    scope = resource.scope_spans.add()
    scope.scope.name = "compile_stage.service"
    trace_id, root = _id(job, "trace", 16), _id(job, "run", 8)
    started_at = ended_at - float(result["duration_s"])

    run = scope.spans.add(trace_id=trace_id, span_id=root, name="compile-stage run", kind=Span.SPAN_KIND_INTERNAL)
    run.start_time_unix_nano, run.end_time_unix_nano = int(started_at * _NANO), int(ended_at * _NANO)
    for key, value in _of_run(job, result):
        _attribute(run, key, value)
    if result["exit_code"] != EXIT_OK:
        run.status.code, run.status.message = Status.STATUS_CODE_ERROR, str(result.get("problem", ""))[:500]
    for number, event in enumerate(result["events"]):
        step = scope.spans.add(trace_id=trace_id, parent_span_id=root, name=event["step"], kind=Span.SPAN_KIND_INTERNAL)
        step.span_id = _id(job, f"step {number}", 8)
        step.start_time_unix_nano = int((started_at + event["started_s"]) * _NANO)
        step.end_time_unix_nano = int((started_at + event["ended_s"]) * _NANO)
        _attribute(step, "compile_stage.job", event["job_id"])
        _attribute(step, "compile_stage.cached", str(event["cached"]).lower())
    return bytes(request.SerializeToString())


def _of_run(job: Job, result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "compile_stage.model", job.uri
    yield "compile_stage.policy", job.subject
    yield "compile_stage.status", str(result["status"])
    yield "compile_stage.exit_code", str(result["exit_code"])
    yield "compile_stage.attempt", str(job.attempt)


def _attribute(where: Any, key: str, value: str) -> None:
    where.attributes.add(key=key).value.string_value = value


def _id(job: Job, part: str, size: int) -> bytes:
    whole = f"{job.id} {job.attempt} {job.uri} {job.subject} {part}"
    return hashlib.sha256(whole.encode()).digest()[:size]


def _headers(listed: str) -> dict[str, str]:
    """`key=value,key=value`, values percent-encoded, as OpenTelemetry says it."""
    pairs = (pair.partition("=") for pair in listed.split(",") if "=" in pair)
    return {key.strip(): unquote(value.strip()) for key, _, value in pairs}
