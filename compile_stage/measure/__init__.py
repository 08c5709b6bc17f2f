"""Pure numbers: samples, metrics, statistics, timing, memory. No registry, no YAML."""
