"""One run, read top to bottom: `run.py` is the order, `target.py` one target, `evaluate.py` one candidate."""
