"""Scripts that are copied into bundles; they import public packages only."""
