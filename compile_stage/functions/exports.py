"""`export`: a published version in the form of a server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from compile_stage.core import plugins
from compile_stage.core.errors import UsageError
from compile_stage.core.events import Reporter
from compile_stage.core.run_context import open_context
from compile_stage.core.spelling import did_you_mean
from compile_stage.exports.options import FORMS, Exported, ExportOptions

PathLike = str | os.PathLike[str]


def export_version(
    uri: str,
    to: str,
    out: PathLike | None = None,
    *,
    options: ExportOptions | None = None,
    check: bool | None = None,
    force: bool = False,
    allow_code: bool = False,
    trusted_keys: Sequence[PathLike] = (),
    reporter: Reporter | None = None,
) -> Exported:
    """Write a published version in the form of a server: its artifact byte for byte, with manifest, lineage and
    signature.

    Args:
        uri: Of a published version, or the folder of a bundle.
        to: `triton`, `kserve`, `oci` or `bentoml`.
        out: The folder; by default `compile-stage-export/NAME-VERSION/FORM`. It is complete or absent.
        options: What the form asks for.
        check: Ask the export what the version was validated with, and refuse one that answers otherwise. None: where it
            can be run here; True: an error where it can't; False: never.
        force: Replace an export that is there.
        allow_code: It may be run here though nothing that this machine knows vouches for it.
        trusted_keys: As for `verify`.

    Raises:
        UsageError: There is no such form, or an option is missing; or there is something at `out`.
        IntegrityError: The version's files or its signature are not what was published.
        GateError: Its verdict does not pass today; or the export answers otherwise, or can't be asked and must be.
        RegistryError: A registry can't be reached, or refuses.
    """
    options = options or ExportOptions()
    if to not in FORMS:
        near = did_you_mean(to, list(FORMS))
        raise UsageError(f"there is no form {to!r}", fix=f"did you mean {near!r}?" if near else ", ".join(FORMS))
    if (refused := options.refuse(to)) is not None:
        problem, fix = refused
        raise UsageError(problem, fix=fix)
    if options.push:
        plugins.demand(plugins.load("registries", "oci"))  # before anything is written
    from compile_stage.exports.run import Asked, export
    from compile_stage.verification import named_trust

    asked = Asked(options=options, check=check, force=force, allow_code=allow_code)
    with open_context(reporter, "local") as context:
        return export(context, (uri, named_trust(trusted_keys)), to, Path(out) if out is not None else None, asked)
