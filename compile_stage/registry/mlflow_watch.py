"""MLflow, looked at from outside of a run: which versions there are, and the webhook that reports new ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from compile_stage.core.errors import RegistryError
from compile_stage.core.records import RegisteredVersion
from compile_stage.registry.mlflow_connection import is_code, trouble
from compile_stage.registry.mlflow_versions import own_tags
from compile_stage.registry.model_files import KEY_TAG, TAG, check_name

EVENTS = ("model_version.created", "model_version_alias.created", "model_version_tag.set")
"""What `compile-stage watch` acts on."""
_PAGE = 100  # entries a call; more than a thousand make one slow on a large registry
PROMPT = "mlflow.prompt.is_prompt"
"""The tag of prompts, which are registered as models are."""
_ORDER = ["name ASC", "version_number ASC"]  # pages are counted from the start: nothing may move while they are read


def versions(client: Any) -> Iterator[RegisteredVersion]:
    """Every version of every registered model, by pages, prompts left out."""
    aliases: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for model in pages(client.search_registered_models, order_by=["name ASC"]):
        for alias, version in (model.aliases or {}).items():
            aliases[model.name][str(version)].append(alias)
    for version in pages(client.search_model_versions, order_by=_ORDER):
        if PROMPT not in (version.tags or {}):
            yield registered(version, aliases[version.name][str(version.version)])


def version(client: Any, name: str, number: str) -> RegisteredVersion | None:
    """One version as it is now; None where there is none."""
    from mlflow.exceptions import MlflowException

    check_name(name)
    with trouble(f"models:/{name}/{number}"):
        try:
            held = client.get_model_version(name, number)
        except MlflowException as error:
            if is_code(error, "RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        if PROMPT in (held.tags or {}):
            return None
        return registered(held, held.aliases or [])


def register_webhook(client: Any, name: str, url: str, secret: str | None) -> str | None:
    """Make the webhook of that name, or bring it to this address and secret, and have MLflow send it an example.

    Returns:
        None when the example was taken, or what became of it.

    Raises:
        RegistryError: The server refuses: an address that is not https, or not public; a store without webhooks.
    """
    with trouble(url):
        held = next((hook for hook in pages(client.list_webhooks) if hook.name == name), None)
        fields = {"url": url, "events": list(EVENTS), "secret": secret}
        if held is None:
            held = client.create_webhook(name=name, description="compile-stage watch", **fields)
        else:
            held = client.update_webhook(held.webhook_id, status="ACTIVE", **fields)
        tested = client.test_webhook(held.webhook_id)
    if tested.success:
        return None
    return str(tested.error_message or f"it answered {tested.response_status}: {tested.response_body}")


def registered(held: Any, aliases: list[str], owner: str = "") -> RegisteredVersion:
    """A version that MLflow answered with, as a record."""
    tags = own_tags(held)
    return RegisteredVersion(
        uri=f"models:/{held.name}/{held.version}",
        name=held.name,
        version=str(held.version),
        tags=tags,
        aliases=tuple(sorted(aliases)),
        published=KEY_TAG in tags,
        approval=(tags.get(f"{TAG}approval", ""), tags.get(f"{TAG}approval_alias", "")),
        owner=owner or tags.get("owner", ""),
        location=f"models:/{held.model_id}" if held.model_id else str(held.source or ""),
    )


def pages(search: Callable[..., Any], **arguments: Any) -> Iterator[Any]:
    """All that a search of MLflow finds, a page in memory."""
    token = None
    while True:
        with trouble("the registry"):
            page = search(max_results=_PAGE, page_token=token, **arguments)
        yield from page
        if not page.token:
            return
        if page.token == token:
            raise RegistryError("the registry gives the same page again and again")
        token = page.token
