"""`python -m anydecode` is the command line."""

from anydecode.cli.main import run

if __name__ == "__main__":
    run()
