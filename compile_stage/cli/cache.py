"""`compile-stage cache`: finished steps, on this machine and in a cache that machines share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compile_stage.cli.options import (
    Decorator,
    Number,
    Word,
    example,
    json_option,
    policy_option,
    roots_option,
    sets_option,
)
from compile_stage.cli.output import print_json, print_text
from compile_stage.core.errors import EXIT_INTEGRITY, EXIT_OK

if TYPE_CHECKING:
    from compile_stage.functions.caches import CacheEntry


@click.group(
    short_help="Finished steps, here and shared: list, verify, delete, and a CI system's key.",
    epilog=example("compile-stage cache ls", "compile-stage cache key -p shipped:cpu-server"),
)
def cache() -> None:
    """What is finished is kept in a folder, COMPILE_STAGE_CACHE, and found again by the next run. Behind it there can
    be a cache that machines share, COMPILE_STAGE_SHARED_CACHE."""


shared_flag: Decorator = click.option("--shared", is_flag=True, help="The cache that COMPILE_STAGE_SHARED_CACHE names.")
shared_url: Decorator = click.option(
    "--shared-cache", "url", type=Word(), metavar="URL", help="The shared cache at this address."
)


def _asked(shared: bool, url: str | None) -> str | None:
    """As the api wants it: None for this machine's cache."""
    return url or ("" if shared else None)


@cache.command(
    "ls",
    short_help="What is in it, by step.",
    epilog=example("compile-stage cache ls", "compile-stage cache ls --shared --json"),
)
@shared_flag
@shared_url
@json_option
def list_entries(shared: bool, url: str | None, as_json: bool) -> None:
    """List what is in this machine's cache, or in a shared one: entries and their size, by step. --json lists each."""
    from compile_stage import api

    content = api.cache_entries(_asked(shared, url))
    if as_json:
        print_json(content)
        return
    print_text(f"{content.where}\n")
    print_text(_by_step(content.entries))


@cache.command(
    short_help="Read every entry, and hold it against its digests.",
    epilog=example("compile-stage cache verify", "compile-stage cache verify --shared --remove"),
)
@shared_flag
@shared_url
@click.option("--remove", is_flag=True, help="Delete what does not hold.")
@json_option
def verify(shared: bool, url: str | None, remove: bool, as_json: bool) -> int:
    """Read every entry of this machine's cache, or of a shared one, and hold it against its digests and its seal. Exits
    with 7 where one does not hold."""
    from compile_stage import api

    found = api.verify_cache(_asked(shared, url), remove=remove)
    if as_json:
        print_json(found)
    else:
        for path, reason in found.refused.items():
            print_text(f"{path}\n  {reason}\n")
        then = ", and were deleted" if remove and found.refused else ""
        print_text(f"{found.where}: {found.checked} entries, {len(found.refused)} do not hold{then}\n")
    return EXIT_INTEGRITY if found.refused else EXIT_OK


@cache.command(
    short_help="Delete the oldest entries.",
    epilog=example("compile-stage cache gc --max-gb 20", "compile-stage cache gc --shared --max-age 30 --dry-run"),
)
@shared_flag
@shared_url
@click.option("--max-age", "max_age", type=Number(), metavar="DAYS", help="Those that were not used for so long.")
@click.option("--max-gb", type=Number(), metavar="GB", help="Of the rest, the oldest until so many GB are left.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def gc(
    shared: bool, url: str | None, max_age: float | None, max_gb: float | None, dry_run: bool, as_json: bool
) -> None:
    """Delete the oldest entries of this machine's cache, where what was used within a day stays, or of a shared one,
    where age is counted from when an entry was written."""
    from compile_stage import api

    gone = api.collect_cache(_asked(shared, url), max_age_days=max_age, max_gb=max_gb, dry_run=dry_run)
    if as_json:
        print_json(gone)
        return
    print_text(_by_step(gone.entries))
    would = "would be deleted" if dry_run else "deleted"
    print_text(f"{gone.where}: {len(gone.entries)} entries {would}\n")


def _by_step(entries: Sequence[CacheEntry]) -> str:
    """One line a step, at most 80 columns."""
    lines = []
    for step, seal in sorted({(entry.step, entry.seal) for entry in entries}):
        sizes = [entry.bytes for entry in entries if (entry.step, entry.seal) == (step, seal)]
        lines.append(f"{step[:24]:<24} {len(sizes):>8} {sum(sizes) / 1e6:>14,.3f} MB  {seal[:26]}".rstrip())
    total = sum(entry.bytes for entry in entries)
    return "\n".join([*lines, f"{'all':<24} {len(entries):>8} {total / 1e6:>14,.3f} MB"]) + "\n"


@cache.command(
    short_help="Print the key under which a CI system keeps it between jobs.",
    epilog=example(
        "compile-stage cache key -p policy.yaml",
        "compile-stage cache key -p policy.yaml --toolchains",
        "compile-stage cache key -p policy.yaml --json",
    ),
)
@policy_option
@roots_option
@sets_option
@click.option("--toolchains", is_flag=True, help="The key of the toolchains' folder instead.")
@json_option
def key(
    policy_path: Path, policy_roots: tuple[Path, ...], sets: tuple[str, ...], toolchains: bool, as_json: bool
) -> None:
    """Print the key of the step cache, or of the toolchains, for this machine, these packages and this policy.

    What stands before the last `-` may be restored instead: it is the same but for the policy, or for the locks. --json
    says all such beginnings, and the folder.
    """
    from compile_stage.cache_keys import cache_key, toolchains_key
    from compile_stage.core.shipped import policy_file
    from compile_stage.policy.load import load_policy

    policy = load_policy(policy_file(policy_path), sets=sets, roots=policy_roots)
    found = toolchains_key(policy) if toolchains else cache_key(policy)
    if as_json:
        print_json(found)
    else:
        print_text(f"{found.key}\n")
