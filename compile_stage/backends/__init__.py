"""Compilers and their runtimes: one file each; a file imports nothing of ours but `core`, since it is vendored into
bundles."""
