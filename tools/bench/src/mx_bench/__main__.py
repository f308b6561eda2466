"""`python -m mx_bench`, where the command is not installed."""

import sys

from mx_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
