"""The command line: parse, call the API, render, exit code."""
