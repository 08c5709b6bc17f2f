"""Lowerings: a portable graph at another precision."""
