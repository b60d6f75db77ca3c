"""`python -m anydecode` runs the command line."""

from anydecode.cli.main import run

if __name__ == "__main__":
    run()
