"""What is asked of language models, and of no other model."""

from __future__ import annotations

from collections.abc import Iterable

from compile_stage.core.records.policy import Gate

LANGUAGE_METRICS = ("token_kl", "token_top1_agreement", "perplexity", "token_accuracy")
"""Metrics of distributions of the next token, and of texts."""

LANGUAGE_MODELS_ONLY = "language_models_only"
"""Option of a shipped limit on one of these: it holds for language models, and is left out for all others."""

SHIPPED_DEFAULTS = "compile_stage/policy/defaults.yaml"
"""Where a shipped limit comes from, as its `Gate.origin` begins."""

_OF_ALL = (*LANGUAGE_METRICS, "agreement")


def fitting_gates(gates: Iterable[Gate], *, language_model: bool) -> tuple[Gate, ...]:
    """The gates that are meant for such a model.

    For a language model its own metrics stand in the place of the shipped limits on floats and classes: logits that are
    all shifted alike are the same distribution, and what 4 bits do to 50,000 logits that stand for improbable words is
    no matter. A limit that a policy sets itself holds for whatever model it is run on.
    """
    if language_model:
        return tuple(g for g in gates if g.metric in _OF_ALL or not g.origin.startswith(SHIPPED_DEFAULTS))
    return tuple(gate for gate in gates if not gate.options.get(LANGUAGE_MODELS_ONLY))


def has_language_gates(gates: Iterable[Gate]) -> bool:
    """Whether a job's gates are those of a language model."""
    return any(gate.metric in LANGUAGE_METRICS for gate in gates)
