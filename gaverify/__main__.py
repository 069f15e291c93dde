"""What the command `gaverify`, and `python -m gaverify`, run."""

import sys


def start() -> int:
    """Runs the command line; Ctrl-C is answered while it is still being imported, too."""
    try:
        from gaverify.cli import main
    except KeyboardInterrupt:
        print("gaverify: interrupted; nothing was decided", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python puts the current folder first, where a user's `rich.py` would stand for the package of that name
        sys.path.append(sys.path.pop(0))
    sys.exit(start())
