"""Compile a trained model from a registry, prove it, measure it, and publish it back.

The public entry points are in `compile_stage.api`; the command line is `compile-stage`.
"""

__version__ = "0.1.0"
