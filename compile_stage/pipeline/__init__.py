"""The run, read top to bottom: `run.py` is the story."""
