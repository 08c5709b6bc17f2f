"""`python -m compile_stage` is the same program as `compile-stage`."""

from compile_stage.cli.main import program

if __name__ == "__main__":
    program()
