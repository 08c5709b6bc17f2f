"""The keys of a policy's `performance` section, and the metric that each limits."""

from __future__ import annotations

PERFORMANCE_KEYS = {
    "min_speedup": "speedup",
    "p95_latency_ms": "p95_latency_ms",
    "ttft_p95_ms": "ttft_p95_ms",
    "tpot_p95_ms": "tpot_p95_ms",
    "min_tokens_per_s": "tokens_per_s",
    "throughput_at_p99": "throughput_at_p99",
    "max_cost_per_million": "cost_per_million",
    "max_size_mb": "size_mb",
    "max_memory_mb": "memory_mb",
}
"""Key → metric."""

_KEYS = {metric: key for key, metric in PERFORMANCE_KEYS.items()}


def policy_key(metric: str) -> str:
    """What a policy calls the limit on a metric: `max_size_mb` of `size_mb`; of a tolerance the metric itself."""
    return _KEYS.get(metric, metric)
