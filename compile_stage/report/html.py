"""`report.html`: one file without outside assets, so it shows the same from disk, from CI and in MLflow's sandboxed
frame. Without scripts all of it is there too, as tables and pictures."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from compile_stage import __version__
from compile_stage.core.errors import InternalError
from compile_stage.core.language_models import SHIPPED_DEFAULTS
from compile_stage.core.records import RunResult, Timing
from compile_stage.report import numbers, profiles, summary
from compile_stage.report.charts import timeline_chart
from compile_stage.report.language import HEAD
from compile_stage.report.option_tuning import KIND_WORDS
from compile_stage.report.page_data import data_of
from compile_stage.report.sections import section
from compile_stage.report.serving import HEAD as SERVING_HEAD

if TYPE_CHECKING:
    from jinja2 import Environment


def render_html(result: RunResult, *, scripts: bool = True) -> str:
    """The page. Every name and sentence of others is escaped by the template engine, and the page's own policy lets no
    script run but ours.

    Args:
        scripts: False leaves out what makes charts and tables answer, a megabyte: for frames where no script may run.
    """
    several = len(result.targets) > 1
    labels = {
        row.job_id: f"{target.policy.target.name} {row.label}" if several else row.label
        for target in result.targets
        for row in summary.rows(result, target)
    }
    sections = [section(result, target, index) for index, target in enumerate(result.targets)]
    ours = _scripts() if scripts else ()
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            result=result,
            headline=summary.headline(result),
            run_notes=summary.run_notes(result),
            sections=sections,
            contents=_contents(result),
            set_by=_set_by(result),
            timeline=timeline_chart(result.events, labels),
            version=__version__,
            data=data_of(sections),
            scripts=ours,
            script_hashes=Markup(" ").join(_script_hash(script) for script in ours),
        )
    )


def _set_by(result: RunResult) -> list[str]:
    """The policy's files in layer order, without the shipped defaults, and `--set` where it set a value."""
    origins = [value.origin for value in result.policy_values if not value.is_default]
    from_sets = ["--set"] if any(origin.startswith("--set") for origin in origins) else []
    return [*(file for file in result.policy.files if file != SHIPPED_DEFAULTS), *from_sets]


def _contents(result: RunResult) -> list[tuple[str, str]]:
    """(anchor, title) of the parts beside the targets."""
    parts = [
        ("timeline", "Timeline", result.events),
        ("policy", "The policy as resolved", result.policy_values),
        ("provenance", "Where it comes from", True),
        ("environment", "Where it was measured", True),
    ]
    return [(anchor, title) for anchor, title, there in parts if there]


@cache
def _scripts() -> tuple[Markup, ...]:
    """The plotting library and the page's own script. Neither may hold what ends a script element."""
    folder = files("compile_stage.report")
    texts = [
        folder.joinpath("vendored", "vega-embed.min.js").read_text(encoding="utf-8"),
        folder.joinpath("templates", "report.js").read_text(encoding="utf-8"),
    ]
    if any("</script" in text.lower() or "<!--" in text for text in texts):
        raise InternalError("a script of the report's page would end its own element")
    return tuple(Markup(text) for text in texts)  # noqa: S704 - both are ours


def _script_hash(script: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return Markup("'sha256-{0}'").format(digest)


@cache
def environment() -> Environment:
    """The templates, with the words and numbers of a report as filters."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from compile_stage.report.compiled_templates import CompiledTemplates

    environment = Environment(
        loader=PackageLoader("compile_stage.report"),
        bytecode_cache=CompiledTemplates(files("compile_stage.report").joinpath("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "check_name": summary.check_name,
        "quantity": numbers.quantity,
        "duration": numbers.duration,
        "size": numbers.size,
        "rate": numbers.rate,
        "ratio": numbers.ratio,
        "span": numbers.span,
        "ratio_span": numbers.ratio_span,
        "short": numbers.short,
        "measured": summary.measured_text,
        "limit": summary.limit_text,
        "error": summary.error_text,
        "outcome": summary.outcome_word,
        "speedup": summary.speedup_text,
        "readable": _readable,
        "small": _small,
        "state_word": summary.STATE_WORDS.__getitem__,
        "kind_word": KIND_WORDS.__getitem__,
        "operator_name": profiles.operator_name,
        "percent": numbers.percent,
    }
    environment.globals["count"] = numbers.count
    environment.globals["sorting_speedup"] = _sorting_speedup
    environment.globals["megabytes"] = numbers.Column("MB", 1e-6)
    environment.globals["milliseconds"] = numbers.Column("ms", 1e3)
    environment.globals["language_head"] = HEAD
    environment.globals["serving_head"] = SERVING_HEAD
    environment.globals["outcome_counts"] = summary.outcome_counts
    return environment


def _readable(value: Any) -> str:
    """Plain JSON values as a phrase: lists with commas, maps as `key: value`."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_readable(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_readable, value))
    return str(value)


def _small(error: float) -> str:
    """`0`, `0.031`, `2.4e-07`: an error of a sample."""
    return f"{error:.2g}"


def _sorting_speedup(timing: Timing | None) -> float | str:
    """What a speedup is sorted by: of an unstable one the lower end of its interval, since no figure stands for it."""
    if timing is None or timing.speedup is None:
        return ""
    if timing.stable or timing.speedup_interval is None:
        return timing.speedup
    return timing.speedup_interval[0]
