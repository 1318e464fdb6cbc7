"""`python -m cupy_gmm`: the command line. Everything is in `_cli`."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
