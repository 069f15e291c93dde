"""What every test run starts from: one thread, sources that are compiled once, and an interrupt that interrupts."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest

# The models of the tests are so small that handing work to other threads takes longer than doing it. Set before torch
# is imported, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where it is set, each of the Pythons that tests start compiles all that it imports, and pytest rewrites every test.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) is not None:
    sys.dont_write_bytecode = False
# What failed last is remembered: of tests in a folder that nobody else reads.
os.environ["GAVERIFY_CACHE"] = tempfile.mkdtemp(prefix="gaverify-cache-")
# Where a CI says that it is one, each started run has a line on stderr.
os.environ.pop("CI", None)
# A shell starts what it runs in the background with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# `nohup` ignores SIGHUP, for all that it starts; tests send it to processes that must obey.
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_unconfigure() -> None:
    """Removes the folder of what failed last; children that were forked leave it alone, as they run no hooks."""
    shutil.rmtree(os.environ["GAVERIFY_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _audits_are_forked() -> Iterator[None]:
    from forking import forked_runs

    with forked_runs():
        yield
