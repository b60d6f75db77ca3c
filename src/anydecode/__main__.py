"""The command `anydecode`, and `python -m anydecode`."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. Ctrl-C while its modules are imported has the exit code that it has
    later."""
    try:
        from anydecode.cli.main import run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
