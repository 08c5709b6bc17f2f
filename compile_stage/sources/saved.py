"""Estimators in files that may run code when they are loaded: skops archives and pickles."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from compile_stage.core import archives
from compile_stage.core.errors import SourceError
from compile_stage.core.records import Compliance, SourceModel
from compile_stage.sources import logged_code

# 0.11 and older show other types than they make (CVE-2025-54412, CVE-2025-54413); of 0.12 a model card runs code
# (CVE-2025-54886).
_SKOPS = Version("0.13")

# What a skops file may hold beyond what skops itself trusts (scikit-learn's estimators, NumPy's types and ufuncs). Only
# types that store what they are given, and functions that compute on arrays: scikit-learn, NumPy and SciPy also hold
# functions that run the text that they are given (numpy.testing), write files or open addresses.
_KNOWN = re.compile(
    r"""collections\.(OrderedDict|defaultdict)
    |   numpy\.dtype | numpy\.random\._pickle\.__randomstate_ctor | numpy\.random\.mtrand\.RandomState
    |   scipy\._lib\.array_api_compat\.numpy\._aliases\.asarray
    |   scipy\.interpolate\.(_bsplines\.BSpline | _interpolate\.interp1d)
    |   scipy\.sparse\._(csr|csc|coo|bsr)\.(csr|csc|coo|bsr)_(matrix|array)
    |   (_loss|sklearn\._loss\._loss)\.Cy\w+
    |   sklearn\._loss\.link\.(HalfLogitLink|IdentityLink|Interval|LogitLink|LogLink|MultinomialLogit)
    |   sklearn\._loss\.loss\.(AbsoluteError|ExponentialLoss|Half\w+|HuberLoss|PinballLoss)
    |   sklearn\.calibration\._(CalibratedClassifier|SigmoidCalibration|TemperatureScaling)
    |   sklearn\.compose\._column_transformer\.(_RemainderColsList|make_column_selector)
    |   sklearn\.ensemble\._hist_gradient_boosting\.(binning\._BinMapper|predictor\.TreePredictor)
    |   sklearn\.feature_selection\._univariate_selection\.(chi2|f_classif|f_oneway|f_regression|r_regression)
    |   sklearn\.feature_selection\._mutual_info\.mutual_info_(classif|regression)
    |   sklearn\.gaussian_process\.kernels\.(CompoundKernel|ConstantKernel|DotProduct|Exponentiation|ExpSineSquared)
    |   sklearn\.gaussian_process\.kernels\.(Matern|PairwiseKernel|Product|RBF|RationalQuadratic|Sum|WhiteKernel)
    |   sklearn\.linear_model\._sgd_fast\.(EpsilonInsensitive|Hinge|Huber|Log|ModifiedHuber|Squared\w+)
    |   sklearn\.metrics\._dist_metrics\.\w+Distance(32|64)?
    |   sklearn\.neighbors\._(ball|kd)_tree\.(BallTree|KDTree)(32|64)?
    |   sklearn\.neural_network\._stochastic_optimizers\.(AdamOptimizer|SGDOptimizer)
    |   sklearn\.preprocessing\._function_transformer\._identity
    |   sklearn\.preprocessing\._label\.(LabelBinarizer|LabelEncoder|MultiLabelBinarizer)
    |   sklearn\.tree\._tree\.Tree
    |   sklearn\.utils\._bunch\.Bunch""",
    re.VERBOSE,
)


def refuse(
    path: Path,
    serialization_format: str,
    trusted: Collection[str],
    compliance: Compliance,
    also_known: Collection[str] = (),
) -> str | None:
    """The reason why a file must not be loaded under this policy.

    Args:
        trusted: Types that the model's author declared. The list comes with the model, so it can't vouch for what is
            not known to be harmless.
        also_known: Full names of further types that are known to be.
    """
    if compliance.allow_pickle:
        return None
    if serialization_format != "skops":
        return (
            "it is a pickle, and pickled models execute code when loaded: log it with serialization_format='skops' "
            "(MLflow 3.9 and newer), or set compliance.allow_pickle in the policy"
        )
    if (version := Version(metadata.version("skops"))) < _SKOPS:
        return (
            f"it is a skops file, and one can make skops {version} run code that is on nobody's list: "
            f'pip install "skops>={_SKOPS}", or set compliance.allow_pickle in the policy'
        )
    import skops.io

    try:
        if (reason := archives.refuse(path)) is not None:
            return f"its skops file {reason}"
        unknown = set(skops.io.get_untrusted_types(file=path))
    except Exception as error:  # noqa: BLE001 - a broken archive may raise anything
        return f"its skops file can't be read: {error}"
    undeclared = sorted(unknown - set(trusted))
    if undeclared:
        return (
            f"its skops file holds types that nobody declared as trusted ({', '.join(undeclared[:5])}): "
            "log it with skops_trusted_types=[...], or set compliance.allow_pickle in the policy"
        )
    strange = sorted(name for name in unknown if name not in also_known and _KNOWN.fullmatch(name) is None)
    if strange:
        return (
            "its skops file holds types or functions that may run code when they are loaded "
            f"({', '.join(strange[:5])}): "
            "set compliance.allow_pickle in the policy if you trust where it comes from"
        )
    return None


def load(path: Path, serialization_format: str, source: SourceModel, logged_with: str) -> Any:
    """The estimator. The caller has asked `refuse`, so a file that could run code is one that the policy allows.

    Args:
        logged_with: Package and version that wrote it, for the message when it can't be read.
    """

    def not_loaded(error: Exception) -> SourceError:
        return SourceError(
            f"it can't be loaded: {type(error).__name__}: {error}",
            fix=f"it was logged with {logged_with}: install that version, or log it again",
            where=source.uri,
        )

    with warnings.catch_warnings():
        # Of other versions: an incompatible one raises, or differs from what validation expects.
        warnings.simplefilter("ignore")
        if serialization_format == "skops":
            return logged_code.load(source, partial(_read_skops, path), not_loaded)
        return logged_code.load_pickle(source, partial(_read_pickle, path), not_loaded)


def _read_skops(path: Path) -> Any:
    import skops.io

    return skops.io.load(path, trusted=skops.io.get_untrusted_types(file=path))


def _read_pickle(path: Path) -> Any:
    import cloudpickle  # type: ignore[import-untyped]

    with path.open("rb") as stream:
        return cloudpickle.load(stream)
