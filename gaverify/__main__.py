"""`python -m gaverify`."""

import sys

from gaverify.cli import main

if __name__ == "__main__":
    sys.exit(main())
