"""The command watch: a service that runs the stage when a model is promoted, and what goes with it."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from compile_stage.cli.options import Decorator, NamedPath, NumberRange, example, refuse_without_effect
from compile_stage.core import errors, plugins
from compile_stage.core.errors import UsageError

_STATE = Path("compile-stage-watch")
_WEBHOOK = "compile-stage-watch"
_state: Decorator = click.option(
    "--state", type=NamedPath(file_okay=False, path_type=Path), default=_STATE, show_default=True, metavar="FOLDER",
    help="Folder of the queue, and of the runs' logs and results.",
)  # fmt: skip
_secret: Decorator = click.option(
    "--secret-file", type=NamedPath(dir_okay=False, path_type=Path), metavar="FILE",
    help="The webhook's secrets, one a line.  [default: COMPILE_STAGE_WATCH_SECRET holds one]",
)  # fmt: skip
_policies: Decorator = click.option(
    "--policies", type=NamedPath(file_okay=False, path_type=Path), metavar="FOLDER",
    help="Folder of policy files; `applies_to` of each says which models it is for.",
)  # fmt: skip


@click.group(
    "watch",
    invoke_without_command=True,
    short_help="Run the stage when MLflow reports a promotion.",
    epilog=example(
        "compile-stage watch --policies policies --secret-file /run/secrets/webhook",
        "compile-stage watch register --url https://ci.example.com/webhook --secret-file /run/secrets/webhook",
        "compile-stage watch --requalify --once",
        "compile-stage watch again models:/fraud/7 --policy cpu-server",
    ),
)
@_policies
@_state
@_secret
@click.option(
    "--insecure-no-signature", is_flag=True, help="Take deliveries that nobody signed: anybody can start runs."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8321, show_default=True, help="Port to listen on.")
@click.option(
    "--alias", "aliases", multiple=True, default=("*",), show_default=True, metavar="GLOB",
    help="A version with such an alias is compiled. Repeatable.",
)  # fmt: skip
@click.option("--every-version", is_flag=True, help="Compile new versions without an alias too.")
@click.option("--backlog", is_flag=True, help="Compile too what was there before the first start.")
@click.option(
    "--runs", type=click.IntRange(1, 64), default=1, show_default=True,
    help="So many runs at once; they measure one after the other.",
)  # fmt: skip
@click.option(
    "--max-age", type=NumberRange(1, 86400), default=300, show_default=True, metavar="SECONDS",
    help="Refuse deliveries that were signed longer ago.",
)  # fmt: skip
@click.option(
    "--poll", type=NumberRange(1), default=300, show_default=True, metavar="SECONDS",
    help="Search the registry this often for what no delivery reported.",
)  # fmt: skip
@click.option(
    "--drain", type=NumberRange(0), default=600, show_default=True, metavar="SECONDS",
    help="After SIGTERM, the running run has so long to end before it is interrupted.",
)  # fmt: skip
@click.option("--requalify", is_flag=True, help="Validate published versions anew where this machine changed.")
@click.option(
    "--requalify-hours", type=NumberRange(0.01), default=24, show_default=True, metavar="HOURS",
    help="How often the service does so.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="With --requalify: look once, without a service. 3: one failed.")
@click.option("-v", "--verbose", count=True, help="Say more.")
@click.pass_context
def watch(context: click.Context, /, **given: Any) -> int:
    """Run the stage when MLflow reports that a version got an alias, one run for each version and policy.

    The webhook's address is http://HOST:PORT/webhook; the page at / shows the queue, the runs and their reports.
    """
    if context.invoked_subcommand is not None:
        return errors.EXIT_OK
    _set_up_logging(given["verbose"])
    if not given["requalify"]:
        refuse_without_effect("without --requalify", "requalify_hours")
    if given["once"]:
        return _requalify_once(given)
    if given["policies"] is None:
        raise UsageError("no folder of policies is named", fix="compile-stage watch --policies FOLDER")
    from compile_stage.service.server import serve

    settings = _settings(given)
    serve(settings, given["host"], given["port"], lambda line: click.echo(line, err=True))
    return errors.EXIT_OK


@watch.command(
    short_help="Make the webhook at the tracking server.",
    epilog=example("compile-stage watch register --url https://ci.example.com/webhook --secret-file secret.txt"),
)
@click.option("--url", required=True, help="Where MLflow reaches the service: its /webhook, as a rule over https.")
@_secret
@click.option("--name", default=_WEBHOOK, show_default=True, help="The webhook's name; one of that name is changed.")
@click.option("--insecure-no-signature", is_flag=True, help="Make one whose deliveries nobody signs.")
def register(url: str, secret_file: Path | None, name: str, insecure_no_signature: bool) -> int:
    """Have MLflow report new versions, aliases and tags to the service, signed with the secret, and send an example.

    The first line of the secret file counts. The server needs MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY, or it forgets
    the secret when it restarts.
    """
    from compile_stage.service.settings import read_secrets

    secrets = read_secrets(secret_file, insecure=insecure_no_signature)
    trouble = plugins.load("registries", "mlflow").register_webhook(name, url, next(iter(secrets), None))
    if trouble is None:
        click.echo(f"the webhook {name!r} reports to {url}, and an example got there")
        return errors.EXIT_OK
    click.echo(f"error: the webhook {name!r} is there, and its example did not get through: {trouble}", err=True)
    click.echo("fix: see docs/watch.md#what-the-tracking-server-needs", err=True)
    return errors.EXIT_REGISTRY


@watch.command(
    short_help="Run a policy once more on a version.",
    epilog=example("compile-stage watch again models:/fraud/7 --policy cpu-server"),
)
@click.argument("uri")
@click.option("--policy", required=True, metavar="NAME", help="The policy's name, as the page shows it.")
@_state
def again(uri: str, policy: str, state: Path) -> None:
    """Queue a run of a version under a policy, though there was one. The service takes it up."""
    from compile_stage.service.queue import Queue
    from compile_stage.service.settings import DATABASE_VARIABLE, Settings
    from compile_stage.service.store import Store

    name, _, version = uri.removeprefix("models:/").rpartition("/")
    if not uri.startswith("models:/") or not name or not version.isdigit():
        raise UsageError(f"{uri!r} names no version", fix="write models:/NAME/VERSION")
    settings = Settings(Path(), state.absolute(), database=os.environ.get(DATABASE_VARIABLE, ""))
    if not settings.database and not (settings.state / "queue.db").is_file():
        raise UsageError("there is no queue in this folder", where=str(state), fix="name the service's with --state")
    store = Store(settings.database_url)
    queue = Queue(store, settings.owner)
    known = queue.subjects("run")
    queued = queue.add("run", name, version, policy, again=True)
    store.close()
    click.echo(f"{uri} under {policy}: {'queued' if queued else 'it is queued or running already'}")
    if policy not in known:  # it may be new: the service's folder decides, which is not known here
        others = f", but under {', '.join(known)}" if known else ""
        note = f"the queue had no run under {policy!r} before{others}; it waits until the service's folder has one"
        click.echo(f"note: {note}", err=True)


def _requalify_once(given: dict[str, Any]) -> int:
    from compile_stage.service.requalification import requalify

    if not given["requalify"]:
        raise UsageError("--once goes with --requalify", fix="compile-stage watch --requalify --once")
    return requalify(_settings(given), click.echo)


def _settings(given: dict[str, Any]) -> Any:
    from compile_stage.service.settings import DATABASE_VARIABLE, SECRET_VARIABLE, Settings, alert_url, read_secrets

    alert_url()
    named = given["secret_file"] is not None or bool(os.environ.get(SECRET_VARIABLE))
    insecure = given["insecure_no_signature"] or (given["once"] and not named)  # which takes no deliveries
    return Settings(
        policies=(given["policies"] or Path()).absolute(),
        state=given["state"].absolute(),
        secrets=read_secrets(given["secret_file"], insecure=insecure),
        database=os.environ.get(DATABASE_VARIABLE, ""),
        aliases=given["aliases"],
        every_version=given["every_version"],
        backlog=given["backlog"],
        runs=given["runs"],
        max_age_s=given["max_age"],
        poll_s=given["poll"],
        drain_s=given["drain"],
        requalify_s=given["requalify_hours"] * 3600 if given["requalify"] else 0.0,
    )


def _set_up_logging(verbose: int) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose > 1 else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("urllib3", "alembic", "mlflow", "asyncio", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING if verbose < 2 else logging.INFO)
