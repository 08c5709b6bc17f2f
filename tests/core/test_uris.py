"""What is read as a path, and what as a URI: a folder in the checkout must not stand for the registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_stage.core import plugins
from compile_stage.core.errors import CompileStageError
from compile_stage.core.uris import is_uri

# MLflow's own: its database layer uses what SQLAlchemy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "text", ["models:/c/1", "runs:/r/m", "folder:/srv/m/1", "folder:m/1", "oci://h/n", "Models:/c/1"]
)
def test_what_begins_with_a_scheme_is_no_path(text: str) -> None:
    """Broken: a folder called `models:` in the current directory would be looked at in place of the registry."""
    assert is_uri(text)


@pytest.mark.parametrize(
    "text", ["./models:/c/1", "/srv/models:/c", "out/bundles/cpu", "C:/m", "a/b:c", Path("models:/c")]
)
def test_a_path_is_no_uri(text: str | Path) -> None:
    """Broken: bundles on disk could not be verified."""
    assert not is_uri(text)


def test_every_registry_is_reached_by_what_is_a_uri() -> None:
    """Broken: a registry whose URIs are read as paths could be shadowed by a folder."""
    for name in plugins.names("registries"):
        registry = plugins.load("registries", name)
        taken = [
            text for text in ("models:/c/1", "runs:/r/m", "folder:/srv/m/1", "oci://h/n:1") if registry.accepts(text)
        ]
        assert taken, name
        assert all(is_uri(text) for text in taken)
        assert not registry.accepts("c/1")


@pytest.mark.parametrize("command", ["verify", "validate", "promote", "export", "load_model", "compare"])
def test_a_folder_that_is_named_like_a_uri_is_never_looked_at(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: whoever may commit a folder to a checkout decides what CI verifies, and the alias moves on the registry's
    damaged version of that name."""
    from compile_stage import api, flavor

    folder = tmp_path / "models:" / "c1" / "1"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    uri = "models:/c1/1"
    calls = {
        "verify": lambda: api.verify(uri),
        "validate": lambda: api.validate(uri),
        "promote": lambda: api.promote(uri, "x"),
        "export": lambda: api.export_version(uri, "triton", tmp_path / "exported"),
        "load_model": lambda: flavor.load_model(uri),
        "compare": lambda: api.compare(uri, uri),
    }
    with pytest.raises(Exception, match=r"(?i)not found|there is no|no such|does not exist") as caught:
        calls[command]()
    assert "manifest" not in str(caught.value)
    assert command == "load_model" or isinstance(caught.value, CompileStageError)
