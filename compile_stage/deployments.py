"""The target `compile-stage` of `mlflow deployments`: MLflow loads this module by its entry point when the target is
named, and not before.

A deployment is an alias of a published version. To create one is a run that moves the alias; to delete one takes the
alias away, and the versions stay.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from mlflow.deployments import BaseDeploymentClient
from mlflow.exceptions import MlflowException

from compile_stage.api import default_out, run
from compile_stage.core import plugins
from compile_stage.core.errors import EXIT_GATE, EXIT_REGISTRY, EXIT_USAGE, CompileStageError
from compile_stage.core.events import Silent
from compile_stage.core.records import RegisteredVersion, RunResult, record
from compile_stage.core.shipped import policy_file
from compile_stage.core.spelling import did_you_mean
from compile_stage.policy.load import load_policy

if TYPE_CHECKING:
    from mlflow.deployments import PredictionsResponse

_FLAVOR = "compile_stage"
_FLAVORS = (None, "", _FLAVOR, "python_function")
_SOURCES = ("models:/", "runs:/")
_TAG = "compile_stage."
_KEYS = {
    "policy": "The policy: a file, or shipped:NAME. Needed to create, to update and to run locally.",
    "targets": "Glob patterns over the policy's targets, with commas between; all by default.",
    "alias": "The alias that moves instead of NAME; {target} stands for the target's name.",
    "out": "Folder for the reports and bundles; compile-stage-out/MODEL-VERSION/POLICY by default.",
}

_logger = logging.getLogger("mlflow.compile_stage")  # MLflow's command line shows what is below `mlflow`


class DeploymentError(MlflowException, click.ClickException):  # type: ignore[misc]  # `message`, the same in both
    """What MLflow's interface asks for, and its command line shows as one message instead of a traceback.

    Args:
        message: The problem, and below it the fix.
        exit_code: As of the command `compile-stage`.
        error_code: One of MLflow's.
    """

    def __init__(self, message: str, exit_code: int = EXIT_USAGE, error_code: str = "INVALID_PARAMETER_VALUE") -> None:
        from mlflow.protos.databricks_pb2 import ErrorCode

        super().__init__(message, error_code=ErrorCode.Value(error_code))
        self.exit_code = exit_code  # type: ignore[misc]  # click reads it of the instance


@record
class _Config:
    """What `-C key=value` gave."""

    policy: Path
    targets: tuple[str, ...]
    alias: str
    out: str | None


class _Steps(Silent):
    """A line in MLflow's log for each step that ended."""

    def ended(self, step: str, job_id: str, seconds: float, outcome: str) -> None:
        _logger.info("%s %s: %s (%.1f s)", step, job_id, outcome, seconds)


class CompileStageDeployments(BaseDeploymentClient):
    """Deployments that are aliases of published versions, in the MLflow that its own variables name.

    A name is an alias, MODEL@ALIAS where several models have that alias, or MODEL/VERSION of a published version.
    Every method raises DeploymentError.
    """

    def create_deployment(
        self,
        name: str,
        model_uri: str,
        flavor: str | None = None,
        config: Mapping[str, str] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, str]:
        """Compile, validate, measure and publish the model, and move the alias to what was published.

        Args:
            name: The alias; no published version has it yet.
            config: `policy`, and perhaps `targets`, `alias`, `out`.

        Returns:
            As `get_deployment`.
        """
        _refuse_endpoint(endpoint)
        settings = _settings(name, model_uri, flavor, config)
        for alias in _aliases(settings):
            if held := [one for one in _explained(_published) if alias in one.aliases]:
                _fail(
                    f"there is a deployment {alias!r} already: {held[0].uri}",
                    "update it, or choose another name",
                    error_code="RESOURCE_ALREADY_EXISTS",
                )
        return _deployed(model_uri, settings)

    def update_deployment(
        self,
        name: str,
        model_uri: str | None = None,
        flavor: str | None = None,
        config: Mapping[str, str] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, str]:
        """Run again, on a further version of the model or on the same one, and move the alias to what was published.

        Args:
            model_uri: By default what the deployed version was made from.
            config: As for `create_deployment`.
        """
        _refuse_endpoint(endpoint)
        now, alias = _found(name)
        if not alias:
            _fail(f"{name!r} is a version, and versions do not change", "name an alias of it")
        made_from = now.tags.get(f"{_TAG}source", "")
        source = model_uri or made_from
        if _model_of(source) and _model_of(made_from) and _model_of(source) != _model_of(made_from):
            _fail(
                f"deployment {name!r} is made from {_model_of(made_from)!r}, not from {_model_of(source)!r}",
                "create another deployment",
            )
        return _deployed(source, _settings(alias, source, flavor, config))

    def delete_deployment(
        self, name: str, config: Mapping[str, str] | None = None, endpoint: str | None = None
    ) -> None:
        """Take the alias away. The version stays. Nothing happens where there is no such deployment."""
        _refuse_endpoint(endpoint)
        held = _matches(name)
        if not held:
            return
        now, alias = _only(name, held)
        if not alias:
            _fail(f"{name!r} is a version, which is never deleted here", "name an alias of it")
        _explained(lambda: plugins.load("registries", "mlflow").remove_alias(now.name, alias, expected=now.version))

    def list_deployments(self, endpoint: str | None = None) -> list[dict[str, str]]:
        """Every published version, once for each alias that points to it; without one, by its number."""
        _refuse_endpoint(endpoint)
        held = _explained(_published)
        pairs = [(one, alias) for one in held for alias in (one.aliases or ("",))]
        aliases = [alias for _, alias in pairs]
        return [_described(one, alias, unique=aliases.count(alias) == 1) for one, alias in pairs]

    def get_deployment(self, name: str, endpoint: str | None = None) -> dict[str, str]:
        """What the alias points to now: `name`, `flavor`, `uri`, `model`, `version`, `alias`, `source`, `target`,
        `backend`, `precision` and `verdict`."""
        _refuse_endpoint(endpoint)
        return _got(name)

    def predict(
        self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None
    ) -> PredictionsResponse:
        """Load the published version in this process, as `mlflow.pyfunc.load_model` does, and call it.

        Args:
            inputs: What the published model's predict() takes: a data frame, an array, a dict of arrays.
        """
        import mlflow
        from mlflow.deployments import PredictionsResponse
        from mlflow.utils.proto_json_utils import NumpyEncoder

        _refuse_endpoint(endpoint)
        now, _ = _found(deployment_name or "")
        try:
            model = mlflow.pyfunc.load_model(now.uri)
            answers = model.predict(with_floats(inputs, model.metadata.get_input_schema()))
        except Exception as error:  # the model's own code, its runtime, or MLflow that compares with the signature
            code = getattr(error, "exit_code", EXIT_USAGE)  # an error of the loader that the version carries has one
            raise DeploymentError(f"{now.uri} does not answer that: {error}", code) from error
        return PredictionsResponse(json.loads(json.dumps({"predictions": _plain(answers)}, cls=NumpyEncoder)))

    def explain(self, deployment_name: str | None = None, df: Any = None, endpoint: str | None = None) -> NoReturn:
        """Refused: a published version answers, and explains nothing."""
        _fail(
            "compile-stage computes no explanations of predictions",
            "explain the source model: the published one answers as it does, within the policy's limits",
        )


def with_floats(inputs: Any, schema: Any) -> Any:
    """A data frame whose whole numbers are floats in the columns that a schema of MLflow has as such. The command line
    reads its file with pandas, which makes a whole number of `[{"income": 30000.0}]`, and MLflow refuses those for
    doubles. What is no data frame, or has no schema, stays as it is."""
    if schema is None or not schema.has_input_names() or not hasattr(inputs, "dtypes"):
        return inputs
    wanted = {
        name: spec.type.to_numpy() for name, spec in schema.input_dict().items() if hasattr(spec.type, "to_numpy")
    }
    floats = {
        name: dtype
        for name, dtype in wanted.items()
        if name in inputs.columns and dtype.kind == "f" and inputs[name].dtype.kind in "iu"
    }
    return inputs.astype(floats)


def run_local(name: str, model_uri: str, flavor: str | None = None, config: Mapping[str, str] | None = None) -> None:
    """Run the policy on the model and publish nothing; the reports and bundles are in the folder that is printed.
    Raises DeploymentError where it does not pass."""
    settings = _settings(name, model_uri, flavor, config)
    _, folder = _ran(model_uri, settings, publish=False)
    click.echo(f"{name}: passed; nothing was published; the report is {folder / 'report.html'}")


def target_help() -> str:
    """What `mlflow deployments help -t compile-stage` prints."""
    keys = "\n".join(f"  {key:<8} {text}" for key, text in _KEYS.items())
    return f"""\
compile-stage compiles a registered model, compares it with the original, measures it, and publishes it as a new version
of MODEL-compiled. A deployment is an alias of such a version.

Target URI: compile-stage. The registry is the one that MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI name.

  mlflow deployments create -t compile-stage --name fraud-prod -m models:/fraud/7 -C policy=policy.yaml
  mlflow deployments update -t compile-stage --name fraud-prod -m models:/fraud/8 -C policy=policy.yaml
  mlflow deployments predict -t compile-stage --name fraud-prod -I inputs.json

Configuration (-C KEY=VALUE):

{keys}

Each deployment has one alias, so a policy with several targets needs `targets` that match one of them, or an alias with
{{target}}. `delete` takes the alias away and deletes no version. `list` shows every published version; a name is ALIAS,
MODEL@ALIAS, or, to get and to predict, MODEL/VERSION. `predict` loads the version in its own process. `explain` and
endpoints are not supported."""


# ------------------------------------------------------------------------------------------------------------ runs


def _settings(name: str, model_uri: str, flavor: str | None, config: Mapping[str, str] | None) -> _Config:
    given = dict(config or {})
    for key in given:
        if key not in _KEYS:
            near = did_you_mean(key, tuple(_KEYS))
            _fail(
                f"there is no setting {key!r}" + (f"; did you mean {near!r}?" if near else ""),
                f"settings are {', '.join(_KEYS)}",
            )
    if flavor not in _FLAVORS:
        _fail(f"what is deployed has the flavor {_FLAVOR}, not {flavor!r}", "leave out --flavor")
    if not model_uri.startswith(_SOURCES):
        _fail(f"{model_uri!r} is no model of MLflow's registry", "name it as models:/NAME/VERSION or runs:/ID/NAME")
    if not given.get("policy"):
        _fail("no policy is named", "add -C policy=FILE; `compile-stage init MODEL_URI` writes a first one")
    return _Config(
        policy=_explained(lambda: policy_file(given["policy"])),
        targets=tuple(filter(None, map(str.strip, given.get("targets", "").split(",")))),
        alias=given.get("alias") or name,
        out=given.get("out"),
    )


def _aliases(settings: _Config) -> tuple[str, ...]:
    """The alias of each target that would run; no two of them have the same."""
    sets = [f"promote.alias={json.dumps(settings.alias)}"]
    policy = _explained(lambda: load_policy(settings.policy, sets=sets, targets=settings.targets))
    aliases = tuple({target.published_as: target.alias or "" for target in policy.targets}.values())
    if len(set(aliases)) < len(aliases):
        names = ", ".join(target.target.name for target in policy.targets)
        _fail(
            f"the targets {names} can't all be the deployment {settings.alias!r}",
            "choose one with -C targets=NAME, or give each an alias: -C alias='{target}-prod'",
        )
    return aliases


def _ran(model_uri: str, settings: _Config, *, publish: bool) -> tuple[RunResult, Path]:
    """A run that passed, and the folder of its reports."""
    sets = [f"promote.alias={json.dumps(settings.alias)}"] if publish else []
    result = _explained(
        lambda: run(
            model_uri,
            settings.policy,
            targets=settings.targets,
            sets=sets,
            out=settings.out,
            publish=publish,
            reporter=_Steps(),
        )
    )
    folder = Path(settings.out) if settings.out else default_out(result.source, result.policy)
    if result.exit_code:
        _fail(result.problem or f"the run ended as {result.status}", f"see {folder / 'report.html'}", result.exit_code)
    return result, folder


def _deployed(model_uri: str, settings: _Config) -> dict[str, str]:
    aliases = _aliases(settings)
    result, folder = _ran(model_uri, settings, publish=True)
    receipts = [target.receipt for target in result.targets if target.receipt is not None]
    for receipt in receipts:
        if receipt.promoted_to is None:
            _fail(
                f"{receipt.uri} was published, and no alias points to it: {receipt.note or 'see the report'}",
                f"see {folder / 'report.html'}",
                EXIT_GATE,
            )
        _logger.info("%s@%s is %s", receipt.name, receipt.promoted_to, receipt.uri)
    if not receipts:
        _fail("nothing was published", f"see {folder / 'report.html'}", EXIT_GATE)
    first = receipts[0]
    described = [_got(f"{one.name}@{one.promoted_to}") for one in receipts]
    name = str(first.promoted_to) if len(aliases) == 1 else settings.alias
    return {**described[0], "name": name, "uri": ", ".join(one["uri"] for one in described)}


# ------------------------------------------------------------------------------------------------- published versions


def _published() -> list[RegisteredVersion]:
    return [one for one in plugins.load("registries", "mlflow").versions() if one.published]


def _matches(name: str) -> list[tuple[RegisteredVersion, str]]:
    """The published versions that a name means, each with the alias in it."""
    model, at, alias = name.rpartition("@")
    held = _explained(_published)
    if not at and "/" in name:
        return [(one, "") for one in held if name == f"{one.name}/{one.version}"]
    return [(one, alias) for one in held if alias in one.aliases and (not at or one.name == model)]


def _found(name: str) -> tuple[RegisteredVersion, str]:
    return _only(name, _matches(name))


def _got(name: str) -> dict[str, str]:
    return {**_described(*_found(name)), "name": name}


def _only(name: str, held: list[tuple[RegisteredVersion, str]]) -> tuple[RegisteredVersion, str]:
    if not held:
        _fail(
            f"there is no deployment {name!r}",
            "mlflow deployments list -t compile-stage names them all",
            EXIT_REGISTRY,
            "RESOURCE_DOES_NOT_EXIST",
        )
    if len(held) > 1:
        names = " or ".join(sorted(f"{one.name}@{alias}" for one, alias in held))
        _fail(f"several models have the alias {name!r}", f"name one of them: {names}")
    return held[0]


def _described(version: RegisteredVersion, alias: str, *, unique: bool = True) -> dict[str, str]:
    name = (alias if unique else f"{version.name}@{alias}") if alias else f"{version.name}/{version.version}"
    tags = {key: version.tags.get(_TAG + key, "") for key in ("source", "target", "backend", "precision", "verdict")}
    return {
        "name": name,
        "flavor": _FLAVOR,
        "uri": version.uri,
        "model": version.name,
        "version": version.version,
        "alias": alias,
        **tags,
    }


def _model_of(uri: str) -> str:
    """The registered model of `models:/NAME/VERSION` or `models:/NAME@ALIAS`; empty where the URI names none."""
    path = uri.removeprefix("models:/")
    return path.partition("@")[0].partition("/")[0] if path != uri and ("/" in path or "@" in path) else ""


# ------------------------------------------------------------------------------------------------------------- answers


def _plain(answers: Any) -> Any:
    """Answers as JSON holds them: a data frame as a list of rows, arrays as lists."""
    if isinstance(answers, Mapping):
        return {key: _plain(value) for key, value in answers.items()}
    if hasattr(answers, "to_dict"):
        return answers.to_dict(orient="records") if hasattr(answers, "columns") else answers.to_list()
    return answers.tolist() if hasattr(answers, "tolist") else answers


def _explained(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except CompileStageError as error:
        raise DeploymentError(str(error), error.exit_code) from error


def _refuse_endpoint(endpoint: str | None) -> None:
    if endpoint is not None:
        _fail("compile-stage has no endpoints", "leave out --endpoint")


def _fail(problem: str, fix: str, exit_code: int = EXIT_USAGE, error_code: str = "INVALID_PARAMETER_VALUE") -> NoReturn:
    raise DeploymentError(f"{problem}\n  fix: {fix}", exit_code, error_code)
