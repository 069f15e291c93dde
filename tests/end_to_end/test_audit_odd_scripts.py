"""Scripts that do odd things: they are audited all the same, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from audits import HEAD, SCRIPTS, TRAIN, audit, audited, events_of, folder, refused

slow = pytest.mark.slow


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


ODD = {
    "leaves with sys.exit(0)": TRAIN + "sys.exit(0)\n",
    "leaves with sys.exit(1) after its updates": TRAIN + "sys.exit(1)\n",
    "fails after its updates": TRAIN + "raise RuntimeError('no validation set')\n",
    "would go on for an hour": TRAIN + "time.sleep(3600)\n",
    "threads that never end": "threading.Thread(target=lambda: time.sleep(3600)).start()\n" + TRAIN,
    "an exit handler that waits": "import atexit\natexit.register(time.sleep, 3600)\n" + TRAIN,
    "another folder": "import tempfile\nos.chdir(tempfile.mkdtemp())\n" + TRAIN,
    "a lot of output": "for n in range(200_000): print('epoch', n, file=sys.stderr if n % 2 else sys.stdout)\n" + TRAIN,
    "closes its output": "sys.stdout.close()\nsys.stderr.close()\n" + TRAIN,
    "reads its input": "sys.stdin.read()\n" + TRAIN,
    "catches everything": f"try:\n{textwrap.indent(TRAIN, '    ')}except BaseException: pass\n",
    "deletes the optimizer": TRAIN + "del optimizer, model\nimport gc\ngc.collect()\n",
}


@slow
@pytest.mark.parametrize("what", ODD, ids=str)
def test_an_odd_script_is_recorded_all_the_same(what: str, script: Path) -> None:
    before = Path.cwd()
    script.write_text(HEAD + ODD[what], encoding="utf-8")
    result = events_of(script, "--batch-size 2 --accum 4", ("--timeout", "120"))
    assert (result.code, result.faults) == (3, set()), str(result)
    assert [count["backward"] for count in result.document["counts"]] == [4, 4], str(result)
    assert Path.cwd() == before


@slow
def test_an_odd_script_is_compared_all_the_same(script: Path) -> None:
    odd = "leaves with sys.exit(1) after its updates"
    result = audited(script, "print('epoch ' * 100_000)\n" + ODD[odd], options=("--updates", "4"))
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)


@slow
def test_annotations_stay_what_they_are(script: Path) -> None:
    """A parser of options by annotations must see types, not their names."""
    script.write_text("class Options:\n    lr: float\nassert Options.__annotations__['lr'] is float\n" + HEAD + TRAIN)
    result = events_of(script, "--batch-size 2 --accum 4")
    assert result.code == 3, str(result)


@slow
def test_a_script_that_is_given_by_a_relative_path(script: Path) -> None:
    script.write_text(HEAD + TRAIN, encoding="utf-8")
    with folder(script.parent):
        result = audit(Path("train.py"), "--batch-size 8", "--batch-size 2 --accum 4")
    assert (result.code, result.outcome) == (0, "equivalent"), str(result)


@slow
def test_events_of_a_script_that_fails_after_some_updates(script: Path) -> None:
    script.write_text(HEAD + TRAIN + "raise RuntimeError('late')\n", encoding="utf-8")
    result = events_of(script, "--batch-size 2 --accum 4", ("--updates", "2"))
    assert result.code in (0, 3), str(result)


@slow
@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limit of file sizes")
def test_a_full_disk(script: Path) -> None:
    body = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))\n"
    body += "model = torch.nn.Sequential(torch.nn.Linear(4, 20_000), torch.nn.Linear(20_000, 1))\n"
    refused(audited(script, body + TRAIN), "full-batch run", "TMPDIR")


@slow
@pytest.mark.parametrize(("free", "code"), [(50_000, 2), (50_000_000, 0)])
def test_a_disk_that_is_too_small_is_told_before_it_is_full(script: Path, free: int, code: int) -> None:
    body = f"import shutil, types\nshutil.disk_usage = lambda path: types.SimpleNamespace(free={free})\n"
    body += "model = torch.nn.Sequential(torch.nn.Linear(4, 2_000), torch.nn.Linear(2_000, 1))\n"
    result = audited(script, body + TRAIN)
    if code:
        refused(result, "full-batch run has to store 96.0 kB of gradients, and", "has 50.0 kB left; free some")
    else:
        assert result.code == 0, str(result)


@slow
def test_an_interrupt_leaves_nothing_behind(script: Path, tmp_path: Path) -> None:
    script.write_text(HEAD + "print(os.getpid(), flush=True)\ntime.sleep(600)\n", encoding="utf-8")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    arguments = [str(script), "--full", "--accum 1", "--accumulated", "--accum 4"]
    root = str(SCRIPTS.parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-m", "gaverify", "audit", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": root},
    )
    child = _child(temporary)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode not in (0, 1), err
    assert list(temporary.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def _child(folder: Path) -> int:
    """Waits until the script runs, and returns its process id."""
    for _ in range(600):
        for log in folder.rglob("log.txt"):
            words = log.read_text(encoding="utf-8").split()
            if words:
                return int(words[0])
        time.sleep(0.1)
    raise AssertionError("the script has not begun")
