"""The data set of the source's run that an artifact was validated on, as an input of the publication's run, and in the
metrics that were measured on it: MLflow then shows the compiled model beside others by their data."""

from __future__ import annotations

from typing import Any

from compile_stage.core.records import Bundle, SourceModel
from compile_stage.registry.mlflow_connection import is_code

_SCHEME = "mlflow-dataset:"
_CLOSED = ("PERMISSION_DENIED", "RESOURCE_DOES_NOT_EXIST")


def validation_dataset(client: Any, bundle: Bundle, source: SourceModel) -> Any:
    """The input (`DatasetInput`) of the source's run that the validation samples came from; None where they came from
    elsewhere, or from an artifact of the run, or where the run can't be read any more."""
    from mlflow.exceptions import MlflowException

    spec = bundle.manifest.get("data", {}).get("spec", {}).get("validation", {}).get("source", "")
    if not source.run_id or not spec.startswith(_SCHEME):
        return None
    try:
        run = client.get_run(source.run_id)
    except MlflowException as error:
        if not is_code(error, *_CLOSED):
            raise
        return None
    held = run.inputs.dataset_inputs if run.inputs else ()
    named = [entry for entry in held if entry.dataset.name == spec.removeprefix(_SCHEME)]
    return named[0] if len(named) == 1 else None  # of several with one name, nobody knows which was read


def measured_on(bundle: Bundle, key: str) -> bool:
    """True for a metric that the policy's tolerances judge, which is measured on the validation samples; false for
    times, memory and size."""
    gates = bundle.manifest.get("job", {}).get("gates", ())
    return key.partition(".")[0] in {gate["metric"].replace(":", "_") for gate in gates}
