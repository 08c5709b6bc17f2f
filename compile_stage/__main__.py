"""`python -m compile_stage` is the same program as `compile-stage`."""

from compile_stage.cli.start import start

if __name__ == "__main__":
    start()
