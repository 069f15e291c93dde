"""The program behind the command `gaverify`, and behind `python -m gaverify`."""

import faulthandler
import os
import signal
import sys
import threading
from contextlib import suppress

_leave = os._exit  # before the user's code may put its own in the place


def start() -> int:
    """Runs the command line; Ctrl-C is answered while it is still being imported, too."""
    with suppress(OSError, RuntimeError, ValueError):  # stderr is closed
        faulthandler.enable(all_threads=False)  # a kernel that crashes leaves the line of the model that called it
    try:
        from gaverify.cli import main
    except KeyboardInterrupt:
        print("gaverify: interrupted; nothing was decided", file=sys.stderr)
        return 130
    code = main()
    # The report is out. Functions that the user's code registered with `atexit` may print, but not behind it.
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the answer is there: Ctrl-C while Python ends needs no traceback
    # Python would wait, perhaps for ever, for threads that the user's code has left.
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        _leave_now(code)
    return code


def _leave_now(code: int) -> None:
    import atexit

    with suppress(Exception):
        atexit._run_exitfuncs()  # what libraries want done in the end, temporary files for one
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    _leave(code)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python puts the current folder first, where a user's `rich.py` would stand for the package of that name
        sys.path.append(sys.path.pop(0))
    sys.exit(start())
