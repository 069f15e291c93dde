"""Children end with their parent, whatever ends it; folders go with their owner, or with the next run."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gaverify.children.folders import remove_abandoned, working_folder
from gaverify.children.last_words import cause_of, last_lines
from gaverify.children.launching import ended_as_interrupted, start_command
from gaverify.errors import GaverifyError, as_foreseen

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and process groups are POSIX's")

# A child with a worker in its group and a daemon in a session of its own; each writes its number.
CHILD = """
import os, subprocess, sys, time
from pathlib import Path
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
worker, daemon = subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)
new = Path(sys.argv[1] + ".new")
new.write_text(f"{os.getpid()} {worker.pid} {daemon.pid}")
new.rename(sys.argv[1])
time.sleep(600)
"""
PARENT = """
import sys, time
from gaverify.children.folders import working_folder
from gaverify.children.launching import ended_as_interrupted, start_command
with ended_as_interrupted(), working_folder("gaverify-test-") as folder:
    kept = start_command([sys.executable, "-c", sys.argv[1], sys.argv[2]])
    try:
        print(folder, flush=True)
        time.sleep(600)
    finally:
        kept.end()
"""


def _until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    limit = time.monotonic() + seconds
    while not true():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _numbers(path: Path) -> list[int]:
    assert _until(path.exists)
    return [int(word) for word in path.read_text(encoding="ascii").split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
class TestTheEndOfTheParent:
    @pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
    def test_everything_ends_with_it(self, number: signal.Signals, tmp_path: Path) -> None:
        path = tmp_path / "numbers"
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, CHILD, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert parent.stdout is not None
        folder = Path(parent.stdout.readline().strip())
        numbers = _numbers(path)
        assert all(map(_lives, numbers)) and folder.is_dir()  # all of it could be left behind
        parent.send_signal(number)
        parent.wait(20)
        assert _until(lambda: not any(map(_lives, numbers)))
        assert folder.exists() == (number == signal.SIGKILL)

    def test_the_keeper_may_die_as_well(self, tmp_path: Path) -> None:
        kept = start_command([sys.executable, "-c", CHILD, str(tmp_path / "numbers")])
        child = _numbers(tmp_path / "numbers")
        kept.process.kill()
        assert _until(lambda: not _lives(child[0]))
        kept.end()
        for orphan in child[1:]:  # nobody is left who could know them
            os.kill(orphan, signal.SIGKILL)

    def test_a_child_that_ends_takes_its_workers_along(self, tmp_path: Path) -> None:
        code = CHILD.replace("time.sleep(600)\n", "sys.exit(7)\n")
        assert code.count("sys.exit(7)") == 1
        kept = start_command([sys.executable, "-c", code, str(tmp_path / "numbers")])
        assert kept.process.wait(20) == 7
        assert not any(map(_lives, _numbers(tmp_path / "numbers")))
        kept.end()


class TestTheChild:
    @pytest.mark.parametrize(
        ("code", "status"),
        [
            ("", 0),
            ("import os; os._exit(5)", 5),
            ("import os; os.kill(os.getpid(), 9)", -9),
            ("import os; os.kill(os.getpid(), 15)", -15),
        ],
        ids=["ends", "leaves", "is killed", "is terminated"],
    )
    def test_its_end_is_the_keepers(self, code: str, status: int) -> None:
        kept = start_command([sys.executable, "-c", code])
        assert kept.process.wait(20) == status
        kept.end()

    def test_its_streams_are_its_own(self) -> None:
        code = "import sys; print(sys.stdin.read() + ' back'); sys.stderr.write('aside')"
        kept = start_command(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert kept.process.communicate("there and", timeout=20) == ("there and back\n", "aside")
        kept.end()

    def test_one_that_ignores_sigterm_is_ended(self) -> None:
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
        kept = start_command([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert kept.process.stdout is not None and kept.process.stdout.readline() == "up\n"
        kept.end()
        assert kept.process.returncode == -9
        kept.end()  # twice does no harm


class TestFolders:
    @pytest.fixture(autouse=True)
    def _elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def test_a_folder_lives_as_long_as_its_owner(self) -> None:
        with working_folder("gaverify-test-") as folder:
            (folder / "inner").mkdir()
            remove_abandoned("gaverify-test-")
            assert folder.is_dir()
        assert not folder.exists()

    def test_one_without_owner_goes_with_the_next_run(self, tmp_path: Path) -> None:
        left = tmp_path / "gaverify-test-left"
        left.mkdir()
        (left / "owner").touch()
        foreign, other = tmp_path / "gaverify-test-foreign", tmp_path / "else"
        foreign.mkdir()  # no owner was ever noted: not ours to remove
        other.mkdir()
        (other / "owner").touch()
        with working_folder("gaverify-test-"):
            assert not left.exists() and foreign.exists() and other.exists()

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        precious = tmp_path / "precious"
        precious.mkdir()
        (precious / "owner").touch()
        (tmp_path / "gaverify-test-link").symlink_to(precious)
        remove_abandoned("gaverify-test-")
        assert (precious / "owner").exists()


class TestSignals:
    def test_an_ignored_signal_stays_ignored(self) -> None:
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            with ended_as_interrupted():
                assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGHUP, before)


class TestTheCause:
    def test_an_exception_in_a_line(self) -> None:
        assert cause_of(ValueError("of this\nand more")) == "ValueError: of this"
        assert cause_of(KeyError()) == "KeyError"

    def test_another_process_s_traceback_is_told_by_its_end(self) -> None:
        text = "Caught it in worker 0.\nOriginal Traceback (most recent call last):\n  File 'a'\nValueError: deep"
        assert cause_of(RuntimeError(text)) == "ValueError: deep"

    def test_a_message_that_cannot_be_made(self) -> None:
        class Odd(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        assert cause_of(Odd()) == "Odd"

    def test_the_last_lines(self, tmp_path: Path) -> None:
        log = tmp_path / "log.txt"
        assert last_lines(log) == []
        log.write_text("\n".join(f"line {at}\n" for at in range(3000)), encoding="utf-8")
        assert last_lines(log)[-1] == "line 2999" and len(last_lines(log)) == 15

    def test_torch_without_numpy_is_no_last_word(self, tmp_path: Path) -> None:
        log = tmp_path / "log.txt"
        warning = "torch.py:368: UserWarning: Failed to initialize NumPy: No module named 'numpy'\n  cpu = _convert()\n"
        log.write_text(f"begun\n  with data\n{warning}")
        assert last_lines(log) == ["begun", "  with data"]
        log.write_text(f"{warning}Traceback (most recent call last):\n  File x\n")
        assert last_lines(log) == ["Traceback (most recent call last):", "  File x"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("basic_ios::clear: iostream error")]
)
def test_a_disk_that_fills_up_is_named(error: Exception) -> None:
    told = r"no space left in `.*gaverify-full-.*set TMPDIR to a larger disk"
    with pytest.raises(GaverifyError, match=told), working_folder("gaverify-full-"):
        raise error
    with pytest.raises(RuntimeError, match="ours"), working_folder("gaverify-full-"):
        raise RuntimeError("ours")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), "no space left to write `/tmp/x`"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/tmp/x"), "disk quota exceeded to write `/tmp/x`"),
        (RuntimeError("basic_ios::clear: iostream error"), "no space left to write temporary files"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "(no space left?)"),
    ],
)
def test_a_full_disk_is_foreseen(error: Exception, told: str) -> None:
    foreseen = as_foreseen(error)
    assert foreseen is not None and told in str(foreseen) and foreseen.exit_code == 2
