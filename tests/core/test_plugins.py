"""The plug-in door."""

from __future__ import annotations

import pytest

from compile_stage.core import plugins
from compile_stage.core.errors import MissingDependencyError, UsageError


class Absent:
    name, requires, extra = "openvino", ("surely_not_installed",), "openvino"


def test_a_typo_gets_the_nearest_name() -> None:
    """Broken: a typo in a policy would leave its author guessing."""
    with pytest.raises(UsageError) as caught:
        plugins.load("backends", "onnxruntme")
    assert "did you mean 'onnxruntime'?" in caught.value.fix


def test_a_missing_package_names_the_pip_line() -> None:
    """Broken: the user would not know what to install."""
    assert plugins.missing(Absent()) == (
        'openvino needs surely_not_installed, which is not installed: pip install "compile-stage[openvino]"'
    )
    with pytest.raises(MissingDependencyError) as caught:
        plugins.demand(Absent())
    assert caught.value.fix == 'pip install "compile-stage[openvino]"'


@pytest.mark.parametrize("group", ["backends", "sources", "lowerings", "registries", "engines"])
def test_every_built_in_loads_through_its_entry_point(group: plugins.Group) -> None:
    """Broken: a name that `doctor` lists could not be used."""
    assert plugins.names(group)
    for name in plugins.names(group):
        assert plugins.load(group, name).name == name


def test_a_uri_that_nobody_understands_is_explained() -> None:
    """Broken: a mistyped model URI would end in a traceback."""
    with pytest.raises(UsageError, match="no registry understands"):
        plugins.registry_for("s3//nonsense")
