"""Targets of one family: what a policy may say of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compile_stage.policy.load import lint, load_policy

Write = Callable[..., Path]
FLEET = """\
targets:
  x86-vnni: {family: x86, hardware: {features: avx512_vnni}}
  x86-avx2: {family: FAMILY, hardware: {features: avx2, without: avx512_vnni}OTHER}
promote: {alias: "{target}-prod"}
"""


def test_the_variants_of_a_family_have_one_alias(write: Write) -> None:
    """Broken: variants of one version would move an alias each, or be no targets of their own."""
    policy = load_policy(write(FLEET.replace("FAMILY", "x86").replace("OTHER", "")))
    assert [(rules.target.name, rules.family, rules.alias) for rules in policy.targets] == [
        ("x86-vnni", "x86", "x86-prod"),
        ("x86-avx2", "x86", "x86-prod"),
    ]
    assert dict(policy.targets[1].target.hardware) == {"features": "avx2", "without": "avx512_vnni"}
    assert policy.elsewhere == "refuse"


def test_a_policy_without_families_keeps_its_digest(write: Write) -> None:
    """Broken: with the next release every model would be published anew."""
    plain = load_policy(write("targets: {t: {threads: 1}}\n")).digest
    assert (
        plain == load_policy(write("targets: {t: {threads: 1, family: null}}\npublish: {elsewhere: refuse}\n")).digest
    )
    assert plain != load_policy(write("targets: {t: {threads: 1, family: x}}\n")).digest
    assert plain != load_policy(write("targets: {t: {threads: 1}}\npublish: {elsewhere: portable-fp32}\n")).digest


@pytest.mark.parametrize(
    ("family", "other", "expected"),
    [
        ("x86-vnni", "", "targets.x86-avx2.family: 'x86-vnni' is a target already; a name that no target has"),
        ("x86", ", batch_sizes: [1, 8]", "targets.x86-avx2.batch_sizes: differs from that of x86-vnni, which is "),
        ("x86", ", promote: {alias: other}", "targets.x86-avx2.promote: differs from that of x86-vnni"),
    ],
)
def test_what_one_version_has_only_once_is_the_same_for_all(
    write: Write, family: str, other: str, expected: str
) -> None:
    """Broken: the alias, or the latencies that are compared, would be those of whichever variant is read last."""
    (message,) = lint([write(FLEET.replace("FAMILY", family).replace("OTHER", other))])
    assert expected in message
