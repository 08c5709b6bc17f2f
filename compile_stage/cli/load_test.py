"""`compile-stage load-test`: a published version behind its server, under load."""

from __future__ import annotations

from pathlib import Path

import click

from compile_stage.cli.options import (
    Number,
    allow_code_option,
    display,
    example,
    json_option,
    quiet_option,
    refuse_without_effect,
    trusted_keys_option,
    verbose_option,
)
from compile_stage.cli.output import print_json


@click.command(
    "load-test",
    short_help="Measure a published version behind its server.",
    epilog=example(
        "compile-stage load-test models:/fraud-compiled@cpu-server-prod --p99-ms 50",
        "compile-stage load-test models:/fraud-compiled/3 --rate 100 --rate 200 --instances 2 --price-per-hour 0.34",
    ),
)
@click.argument("uri")
@click.option("--p99-ms", type=Number(), help="Look for the highest rate at which 99 % of the requests hold this.")
@click.option("--rate", "rates", type=Number(), multiple=True, help="Requests a second that arrive. Repeatable.")
@click.option(
    "--clients", type=int, multiple=True, default=(1, 2, 4, 8, 16), show_default=True,
    help="Clients at a time that wait for their answers. Repeatable.",
)  # fmt: skip
@click.option("--instances", type=int, multiple=True, help="Processes to try. Repeatable.  [default: 1, 2, 4, ...]")
@click.option("--threads", type=int, multiple=True, help="Threads of each. Repeatable.  [default: the target's]")
@click.option("--rows", type=int, help="Rows of a request.  [default: the target's first batch size]")
@click.option("--seconds", type=Number(), default=60.0, show_default=True, help="For all trials.")
@click.option("--price-per-hour", type=Number(), help="Of a machine like this one.")
@click.option("--currency", default="USD", show_default=True, help="Of the price.")
@allow_code_option
@trusted_keys_option
@json_option
@quiet_option
@verbose_option
def load_test(
    uri: str,
    p99_ms: float | None,
    rates: tuple[float, ...],
    clients: tuple[int, ...],
    instances: tuple[int, ...],
    threads: tuple[int, ...],
    rows: int | None,
    seconds: float,
    price_per_hour: float | None,
    currency: str,
    allow_code: bool,
    trusted_keys: tuple[Path, ...],
    as_json: bool,
    quiet: int,
    verbose: int,
) -> None:
    """Start MLflow's server for a published version (or a bundle's folder), and measure how many requests it answers in
    time, and what they cost. Nothing is published."""
    from compile_stage import api
    from compile_stage.core.errors import UsageError
    from compile_stage.core.records import Serving

    if price_per_hour is None:
        refuse_without_effect("without --price-per-hour", "currency")
    single = [value for value in (p99_ms, rows, price_per_hour, seconds) if value is not None]
    if min([*rates, *clients, *instances, *threads, *single]) <= 0:
        raise UsageError("rates, limits, counts, seconds and prices are above 0")
    serving = Serving(
        p99_ms=p99_ms, rates=rates, clients=clients, instances=instances, threads=threads, rows=rows, seconds=seconds,
        price_per_hour=price_per_hour, currency=currency,
    )  # fmt: skip
    with display(as_json, quiet, verbose) as shown:
        found = api.load_test(uri, serving, allow_code=allow_code, trusted_keys=trusted_keys, reporter=shown)
        shown.close()
        if as_json:
            from compile_stage.report.serving import serving_document

            print_json(serving_document(found))
        else:
            shown.show_load(found)
        if found.winner is None:
            raise UsageError(f"nothing was measured: {found.reason}", where=uri)
        asked = [point for point in found.winner.points if point.kind == "open"]
        if p99_ms is None and asked and all(point.invalid for point in asked):
            raise UsageError(
                f"no rate that was asked for could be measured: {asked[0].invalid}",
                where=uri,
                fix="name a lower --rate, or measure on a machine with more free cores",
            )
