"""`load-test`: a published version behind its server, measured under load by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from compile_stage.core.digest import revive
from compile_stage.core.errors import UsageError
from compile_stage.core.events import Reporter
from compile_stage.core.records import Budget, Job, Serving, ServingCost
from compile_stage.core.run_context import open_context

if TYPE_CHECKING:
    from compile_stage.steps.serving_cost import ServingRequest
    from compile_stage.verification import Published

PathLike = str | os.PathLike[str]

_SAMPLES = 64  # requests are made of these in turn


def load_test(
    uri: str,
    serving: Serving,
    *,
    allow_code: bool = False,
    trusted_keys: Sequence[PathLike] = (),
    reporter: Reporter | None = None,
) -> ServingCost:
    """What serving a published version costs on this machine (docs/serving-cost.md). Nothing is published or judged.

    Args:
        uri: Of a published version, or the folder of a bundle.
        serving: The load; a limit (`p99_ms`) or `rates` must be given.
        allow_code, trusted_keys: As for `verify`.

    Raises:
        UsageError: No load is named; the version can't be served here.
        IntegrityError: It is not what was published.
        RegistryError: It can't be had.
    """
    from compile_stage import verification
    from compile_stage.steps.serving_cost import measure_serving

    if not serving.asked:
        raise UsageError("no load is named", fix="--p99-ms looks for a throughput; --rate measures one rate")
    with open_context(reporter, "local") as context:
        published = verification.open_published(context, uri, verification.named_trust(trusted_keys))
        verification.demand_vouched(published, allow_code=allow_code)
        if published.manifest.get("signature_required"):
            raise UsageError(
                "it is served with its signature verified, which a load test does not do",
                fix="measure it in the run that makes it: the section `serving` of its policy",
                where=uri,
            )
        request = _request(context, published, serving)
        return measure_serving(replace(context, remeasure=True), request)


def _request(context: object, published: Published, serving: Serving) -> ServingRequest:
    from compile_stage.core.context import Context
    from compile_stage.promotability import published_samples
    from compile_stage.serving.manifest import artifact_of, data_folder
    from compile_stage.steps.serving_cost import WINNER, ServedModel, ServingRequest

    assert isinstance(context, Context)
    manifest = published.manifest
    job, budget = revive(Job, manifest["job"]), revive(Budget, manifest.get("budget", {}))
    samples = published_samples(
        context, published, job, budget, max(_SAMPLES, serving.rows or job.target.batch_sizes[0])
    )
    if samples is None:
        raise UsageError("there are no samples that it takes", where=published.uri)
    model = ServedModel(path=str(published.folder), artifact=artifact_of(manifest, data_folder(published.folder)))
    return ServingRequest(
        models={WINNER: model}, target=job.target, serving=serving, samples=samples, budget=budget, seed=0
    )
