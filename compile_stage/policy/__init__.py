"""The policy language: the only place that knows YAML and the schema library."""
