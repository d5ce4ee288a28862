"""Runs the command line: `python -m tfparallel`."""

import sys

from tfparallel.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
