"""Compile a trained model from a registry, prove it, measure it, and publish it back.

    import compile_stage

    result = compile_stage.run("models:/fraud/7", "policy.yaml")
    result.exit_code, result.to_pandas()

The functions are those of `compile_stage.api`, the records those of `compile_stage.core.records`, the errors those of
`compile_stage.core.errors`; all are imported when a name is first used. The command line is `compile-stage`.
"""

from __future__ import annotations

__version__ = "0.1.0"

_FUNCTIONS = (
    "compare", "debug", "doctor", "lint", "plan", "profile", "promote", "rollback", "run", "validate", "validate_on",
    "verify",
)  # fmt: skip
_RECORDS = (
    "Artifact", "Bundle", "Candidate", "Check", "Gate", "Job", "Measurement", "Outcome", "Plan", "Policy", "Receipt",
    "Refusal", "RunResult", "SampleSet", "Scheme", "Selection", "SourceModel", "Target", "TargetPolicy", "TargetResult",
    "Timing", "Verdict", "Verification", "Waiver",
)  # fmt: skip
_ERRORS = (
    "AliasMovedError", "CompileStageError", "DeviceError", "GateError", "IntegrityError", "KilledError",
    "MissingDependencyError", "NothingCompiledError", "PolicyError", "RegistryError", "SourceError", "StorageError",
    "UsageError",
)  # fmt: skip
_HOMES = {
    **dict.fromkeys(_FUNCTIONS, "compile_stage.api"),
    **dict.fromkeys(_RECORDS, "compile_stage.core.records"),
    **dict.fromkeys(_ERRORS, "compile_stage.core.errors"),
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    import importlib

    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
