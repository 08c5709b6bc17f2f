"""Compilers and their runtimes: one file each; a file imports nothing of ours but `core` and `plugin_support`, since it
is vendored into bundles."""
