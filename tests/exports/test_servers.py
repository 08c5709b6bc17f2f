"""KServe and BentoML: what is written, and, in environments of their own, the servers themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from exports_of import exported

from compile_stage import api
from compile_stage.exports.kserve import UVLOOP
from compile_stage.serving.manifest import check_integrity
from compile_stage.serving.missing_numbers import MissingNumbers
from compile_stage.serving.refused_values import RefusedValues

pytestmark = [  # what MLflow says of its own type hints, and its queries
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred as AnyType:UserWarning"),
]

KSERVE = api.ExportOptions(storage_uri="s3://models/perceptron/1", image="registry.example/serving:1")

# Whether KServe's own classes of its API know each field, and have a place for each value.
READ_BY_KSERVE = """
import json, sys
import kserve.models as kserve
import kubernetes.client.models as kubernetes

def walk(document, kind, path):
    if kind.startswith("list["):
        for item in document:
            yield from walk(item, kind[5:-1], path)
    elif hasattr(kserve, kind):
        fields = getattr(kserve, kind)
        names = {json_name: name for name, json_name in fields.attribute_map.items()}
        for key, value in document.items():
            if key not in names:
                yield f"{path}.{key}"
            else:
                yield from walk(value, fields.openapi_types[names[key]], f"{path}.{key}")
    elif hasattr(kubernetes, kind):
        getattr(kubernetes, kind).from_dict(document)

print(json.dumps(list(walk(json.load(sys.stdin), "V1beta1InferenceService", ""))))
"""


@pytest.fixture(scope="module")
def kserve(versions: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return exported(versions.native, "kserve", tmp_path_factory.mktemp("kserve") / "out", options=KSERVE, check=False)


@pytest.fixture(scope="module")
def bento(versions: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return exported(versions.native, "bentoml", tmp_path_factory.mktemp("bentoml") / "out", check=False)


def test_an_inference_service_says_what_was_proven(kserve: Any) -> None:
    """Broken: the cluster would serve another model, with other threads, on machines that can't run it."""
    service = yaml.safe_load((Path(kserve.folder) / "inferenceservice.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert service["metadata"]["name"] == "perceptron-compiled"
    assert service["metadata"]["annotations"]["compile-stage/artifact-digest"] == kserve.artifact_digest
    predictor = service["spec"]["predictor"]
    assert predictor["model"] == {
        "modelFormat": {"name": "mlflow"},
        "protocolVersion": "v2",
        "runtime": "kserve-mlserver",
        "storageUri": "s3://models/perceptron/1",
        "image": "registry.example/serving:1",
        "resources": {"requests": {"cpu": "1"}, "limits": {"cpu": "1"}},
    }
    assert predictor["nodeSelector"]["kubernetes.io/arch"] in ("amd64", "arm64")
    check_integrity(Path(kserve.folder) / "bundle", beside=True)
    dockerfile = (Path(kserve.folder) / "Dockerfile").read_text()
    assert "COPY bundle/requirements.txt" in dockerfile
    assert f"'{UVLOOP}'" in dockerfile
    assert f"'{UVLOOP}'" in (Path(kserve.folder) / "README.md").read_text()
    assert any("`Dockerfile` makes one. It was not built" in line for line in kserve.differs)


def test_a_bentofile_holds_the_lineage(bento: Any) -> None:
    """Broken: a bento in a store could not be traced to what it was made from, or lack the files that it loads."""
    bentofile = yaml.safe_load((Path(bento.folder) / "bentofile.yaml").read_text())
    assert bentofile["service"] == "service:PublishedModel"
    assert bentofile["labels"]["artifact_digest"] == bento.artifact_digest[7:39]
    assert all(len(value) <= 63 for value in bentofile["labels"].values())
    assert set(bentofile["include"]) >= {"service.py", "bundle/**", "export.json"}
    pinned = (Path(bento.folder) / "requirements.txt").read_text()
    assert pinned == (Path(bento.folder) / "bundle" / "requirements.txt").read_text()
    assert "onnxruntime==" in pinned


def test_mlflow_loads_the_exported_bundle(versions: Any, tmp_path: Path) -> None:
    """Broken: an export for MLServer or BentoML that no serving process can load would be called proven."""
    made = exported(versions.native, "kserve", tmp_path / "out", options=KSERVE, check=True)
    assert made.proven
    assert made.said.startswith("MLflow loads it in a new process, and it answers a batch of validation samples")


# ------------------------------------------------------------------------------------------- the servers themselves


def post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


@pytest.mark.orchestrators
def test_kserves_own_classes_know_every_field(kserve: Any, server_environment: Any) -> None:
    """Broken: kubectl would refuse the service, or the cluster ignore a field that was mistyped."""
    bundle = Path(kserve.folder) / "bundle"
    programs = server_environment("kserve", bundle / "requirements.txt")
    service = yaml.safe_load((Path(kserve.folder) / "inferenceservice.yaml").read_text())

    def unknown(document: Any) -> list[str]:
        done = subprocess.run(
            [programs / "python", "-c", READ_BY_KSERVE], input=json.dumps(document), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found: list[str] = json.loads(done.stdout)
        return found

    assert unknown(service) == []
    service["spec"]["predictor"]["model"]["modelFromat"] = {}
    assert unknown(service) == [".spec.predictor.model.modelFromat"]


@pytest.mark.orchestrators
def test_mlserver_answers_as_the_version_does(
    versions: Any, kserve: Any, server_environment: Any, start_server: Any, tmp_path: Path
) -> None:
    """Broken: KServe's runtime for MLflow models could not load the bundle in its worker process, or answer
    otherwise."""
    out = shutil.copytree(kserve.folder, tmp_path / "served")
    programs = server_environment("mlserver", out / "bundle" / "requirements.txt", UVLOOP)
    ports = start_server.ports(3)
    variables = {
        "MLSERVER_HOST": "127.0.0.1", "MLSERVER_HTTP_PORT": str(ports[0]), "MLSERVER_GRPC_PORT": str(ports[1]),
        "MLSERVER_METRICS_PORT": str(ports[2]),
    }  # fmt: skip
    base = f"http://127.0.0.1:{ports[0]}/v2/models/perceptron-compiled"
    start_server([str(programs / "mlserver"), "start", "."], out, f"{base}/ready", variables)
    rows = versions.rows[:5]  # five was not proven: the loader fills it up
    asked = {"name": "x", "shape": [5, 8], "datatype": "FP32", "data": rows.ravel().tolist()}
    status, answer = post(f"{base}/infer", {"inputs": [asked]})
    assert status == 200
    [output] = answer["outputs"]
    np.testing.assert_allclose(np.reshape(output["data"], output["shape"]), versions.answers[:5], rtol=1e-4, atol=1e-4)


class RefusedError(Exception):
    """Stands for BentoML's own InvalidArgument, which it answers with status 400."""


@pytest.fixture
def service(bento: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The exported service, in this process: of BentoML there are only the names that it uses."""
    stub = types.ModuleType("bentoml")
    vars(stub).update(
        service=lambda **_: lambda one: one,
        api=lambda one: one,
        exceptions=SimpleNamespace(InvalidArgument=RefusedError),
    )
    monkeypatch.setitem(sys.modules, "bentoml", stub)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("service", Path(bento.folder) / "service.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "service", module)
    spec.loader.exec_module(module)
    served = module.PublishedModel()
    yield served
    served.model.close()


def test_bentomls_service_refuses_a_missing_number_as_predict_does(versions: Any, service: Any) -> None:
    """Broken: a null in JSON becomes a NaN, and is answered where the published model refuses it, since the original
    does."""
    rows = versions.rows[:2].tolist()
    rows[1][3] = None
    rule = MissingNumbers([{"input": "x", "columns": [5], "reason": "the original refuses it"}])
    service.model.refused_values = RefusedValues(rule, None)
    assert np.isnan(service.predict({"x": rows})["y"][1]).any()
    rows[1][5] = None
    with pytest.raises(RefusedError, match=r"column 5 of input 'x' holds a missing number \(NaN\), which is refused"):
        service.predict({"x": rows})


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [("int64", 1.5), ("uint8", 300), ("uint8", -1), ("int32", 1e30), ("float32", 1e39), ("bool", 2), ("int64", None)],
)
def test_bentomls_service_refuses_numbers_that_the_models_type_does_not_hold(
    kind: str, wrong: Any, service: Any
) -> None:
    """Broken: a fraction for a whole number is cut off, and an overflow made infinite, and both are
    answered; or what was sent ends as an error of the server."""
    convert = sys.modules[type(service).__module__].converted
    right = [[True, False]] if kind == "bool" else [[1, 100]]
    assert convert("x", right, kind).tolist() == right
    assert convert("x", [[1, 0]], kind).dtype == kind
    with pytest.raises(ValueError, match=f"input 'x' holds .*{kind} can't hold"):
        convert("x", [[1, wrong]], kind)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("float32", [[1, 10**39]]),
        ("float32", [[None, 1e39]]),
        ("float32", [[1.0, float("inf")]]),
        ("float64", [[1.0, float("-inf")]]),
        ("bool", [[True, None]]),
        ("bool", [[True, 10**39]]),
    ],
    ids=["long-integer", "beside-null", "infinite", "infinite-64", "null-for-bool", "integer-for-bool"],
)
def test_bentomls_service_answers_no_overflow_and_no_null_for_a_truth_value(
    kind: str, given: Any, service: Any
) -> None:
    """Broken: what predict() refuses is answered with status 200: an overflow with null, and a missing truth value as
    if it were false."""
    convert = sys.modules[type(service).__module__].converted
    with pytest.raises(ValueError, match=f"input 'x' holds .*{kind} can't hold"):
        convert("x", given, kind)


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        ("str", [["Oslo"], [None]], "must be text, and holds a missing one"),
        ("str", [[5]], "must be text, and holds 5"),
        ("str", [["a", 5]], "must be text, and holds 5"),
        ("float32", [["60"]], "holds the text '60', which float32 can't hold"),
        ("int64", [[1, "2"]], "holds the text '2'"),
        ("float64", [[None, "nan"]], "holds the text 'nan'"),
    ],
)
def test_bentomls_service_takes_text_for_text_only(kind: str, given: Any, says: str, service: Any) -> None:
    """Broken: a missing text is answered as the text "None", and a number as its digits."""
    convert = sys.modules[type(service).__module__].converted
    assert convert("x", [["Oslo"]], "str").tolist() == [["Oslo"]]
    with pytest.raises(ValueError, match=f"input 'x' {says}"):
        convert("x", given, kind)


@pytest.mark.orchestrators
def test_bentoml_answers_as_the_version_does(
    versions: Any, bento: Any, server_environment: Any, start_server: Any, tmp_path: Path
) -> None:
    """Broken: the service could not be started, answer otherwise, or end with a request that does not fit."""
    out = shutil.copytree(bento.folder, tmp_path / "served")
    programs = server_environment("bentoml", out / "requirements.txt")
    [port] = start_server.ports(1)
    variables = {
        "BENTOML_HOME": str(tmp_path / "home"), "BENTOML_DO_NOT_TRACK": "True",
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    command = [str(programs / "bentoml"), "serve", "service:PublishedModel", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    start_server(command, out, f"{url}/readyz", variables)
    status, answer = post(f"{url}/predict", {"inputs": {"x": versions.rows[:5].tolist()}})
    assert status == 200
    np.testing.assert_allclose(answer["y"], versions.answers[:5], rtol=1e-4, atol=1e-4)
    status, said = post(f"{url}/predict", {"inputs": {"x": [[1.0, 2.0]]}})
    assert status == 400
    assert "does not fit" in said
    assert post(f"{url}/predict", {"inputs": {"x": versions.rows[:1].tolist()}})[0] == 200
