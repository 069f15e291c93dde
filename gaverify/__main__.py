"""`python -m gaverify`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python puts the current folder first, where a user's `rich.py` would stand for the package of that name
        sys.path.append(sys.path.pop(0))

    from gaverify.cli import main

    sys.exit(main())
