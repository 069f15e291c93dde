"""Scripts that do odd things, fail or train nothing, and senseless requests: audited all the same, or a sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from audits import HEAD, SCRIPTS, TRAIN, audit, audited, events_of, folder, gaverify, marked, refused

slow = pytest.mark.slow


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


ODD = {
    "leaves with sys.exit(0)": TRAIN + "sys.exit(0)\n",
    "fails after its updates": TRAIN + "raise RuntimeError('no validation set')\n",
    "would go on for an hour": TRAIN + "time.sleep(3600)\n",
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
    assert (result.code, result.faults) == (0, set()), str(result)
    assert [count["backward"] for count in result.document["calls"]["counts"]] == [4, 4], str(result)
    assert Path.cwd() == before


@slow
def test_an_odd_script_is_compared_all_the_same(script: Path) -> None:
    result = audited(script, f"print('epoch ' * 100_000)\n{TRAIN}sys.exit(1)\n", options=("--updates", "4"))
    assert (result.code, result.outcome, result.faults) == (0, "equivalent", set()), str(result)


@slow
def test_annotations_stay_what_they_are(script: Path) -> None:
    """A parser of options by annotations must see types, not their names."""
    script.write_text("class Options:\n    lr: float\nassert Options.__annotations__['lr'] is float\n" + HEAD + TRAIN)
    result = events_of(script, "--batch-size 2 --accum 4")
    assert result.code == 0, str(result)


@slow
def test_a_script_that_is_given_by_a_relative_path(script: Path) -> None:
    script.write_text(HEAD + TRAIN, encoding="utf-8")
    with folder(script.parent):
        result = audit(Path("train.py"), "--batch-size 8", "--batch-size 2 --accum 4")
    assert (result.code, result.outcome) == (0, "equivalent"), str(result)


def test_a_disk_that_is_full_when_a_script_fails(script: Path) -> None:
    body = "import errno, os, pathlib\ndef refuse(*_, **__): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
    body += "pathlib.Path.write_text = refuse\nraise ValueError('of the script')\n"
    refused(audited(script, body), "no space left in", "the full-batch run", "TMPDIR")


def test_threads_that_a_script_leaves_are_not_waited_for(script: Path) -> None:
    body = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    assert audited(script, body + TRAIN).code == 0


@slow
@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limit of file sizes")
def test_a_full_disk(script: Path) -> None:
    body = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))\n"
    body += "model = torch.nn.Sequential(torch.nn.Linear(4, 20_000), torch.nn.Linear(20_000, 1))\n"
    refused(audited(script, body + TRAIN), "full-batch run", "TMPDIR")


@slow
@pytest.mark.parametrize(("free", "code"), [(40_000, 2), (60_000, 0), (50_000_000, 0)])
def test_a_disk_that_is_too_small_is_told_before_it_is_full(script: Path, free: int, code: int) -> None:
    body = f"import shutil, types\nshutil.disk_usage = lambda path: types.SimpleNamespace(free={free})\n"
    body += "model = torch.nn.Sequential(torch.nn.Linear(4, 2_000), torch.nn.Linear(2_000, 1))\n"
    result = audited(script, body + TRAIN)
    if code:
        refused(result, "full-batch run has to store 48.3 kB of gradients, and", "has 40.0 kB left; free some")
    else:
        has_copy = free > 100_000
        assert result.code == 0 and len(result.document["updates"]) == 1 + has_copy, str(result)
        reason = "only update 1 was compared: update 2 needs a copy of the gradients, whose 48.0 kB are over half of"
        assert (reason in result.document["reason"]) is not has_copy, str(result)


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


RIGHT = str(SCRIPTS / "loops_scale.py")


class TestTheRequest:
    """Refused before anything runs."""

    @pytest.mark.parametrize(
        ("script", "full", "accumulated", "told"),
        [
            (Path("absent.py"), "--a", "--b", ("absent.py", "does not exist")),
            (SCRIPTS.parent, "--a", "--b", ("__main__.py",)),
            ("no_such_package.train", "--a", "--b", ("no_such_package.train",)),
            (Path(RIGHT), "--batch-size 8", None, ("--accumulated",)),
            (Path(RIGHT), "--name 'x", "--accum 4", ("--full", "quot")),
        ],
        ids=["not there", "a folder", "a module that is not there", "one run alone", "a quote that is not closed"],
    )
    def test_what_cannot_be_audited(
        self, script: str | Path, full: str, accumulated: str | None, told: tuple[str, ...]
    ) -> None:
        refused(audit(script, full, accumulated), *told)

    def test_no_script_at_all(self) -> None:
        refused(gaverify(["audit", "--full", "--a", "--accumulated", "--b"]), "name the training script")

    @pytest.mark.parametrize("option", ["--updates 0", "--timeout 0", "--timeout nan", "--steps 0", "--updates two"])
    def test_numbers_out_of_range(self, option: str) -> None:
        refused(audit(Path(RIGHT), "--accum 1", "--accum 4", options=option.split()), option.split()[0])

    @pytest.mark.parametrize("options", [[], ["--seed", "1"], ["--set", "SIZE=4"]])
    def test_runs_that_nothing_makes_different_are_a_usage_error(self, options: list[str]) -> None:
        refused(audit(Path(RIGHT), None, None, options=options), "nothing says how the two runs differ")

    def test_the_same_arguments_compare_nothing(self) -> None:
        result = audit(Path(RIGHT), "--accum 4", "--accum 4")
        assert result.code == 3, str(result)
        assert result.outcome == "inconclusive"
        assert "same" in result.out, str(result)


CUT = "--batch-size 2 --accum 4"
NO_PARAMETERS = """
w = torch.zeros(4, 1, requires_grad=True)
for x, y in batches:
    mse_loss(x @ w, y).backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
    w.grad = None
"""
NO_BACKWARD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\noptimizer.step()\n"
NO_ACCUMULATION = "assert args.accum == 1, 'no accumulation here'\n"
OTHER_PARAMETERS = "if args.odd:\n    model = torch.nn.Linear(4, 2)\n"
UNKNOWN = "--batch-size 2 --accumulate 4 --strange"
NEVER_STEPS = TRAIN.replace("        optimizer.step()\n", "")
# the script, the arguments of its accumulated run, and what is told
REFUSED = [
    (NO_ACCUMULATION + TRAIN, CUT, ("accumulated run", "no accumulation here")),
    (TRAIN, UNKNOWN, ("accumulated run", "unrecognized arguments", "--strange")),
    ("for x in:\n    pass\n", CUT, ("train.py", "SyntaxError", "for x in:")),
    ("import no_such_library\n", CUT, ("ModuleNotFoundError", "no_such_library")),
    ("raise ValueError('x' * 5_000_000)\n", CUT, ("full-batch run", "characters)")),
    ("sys.exit(5)\n", CUT, ("full-batch run", "sys.exit(5)")),
    ("os._exit(0)\n", CUT, ("full-batch run", "os._exit")),
    ("import signal; os.kill(os.getpid(), signal.SIGKILL)\n", CUT, ("SIGKILL",)),
    ("model(inputs)\n", CUT, ("neither a backward pass nor an optimizer step",)),
    ("import os\nos.closerange(3, 256)\n" + TRAIN, CUT, ("full-batch run", "a file descriptor that is not its own")),
    (NO_PARAMETERS, CUT, ("tensors that are not an `nn.Parameter`",)),
    (NEVER_STEPS, CUT, ("no optimizer step",)),
    (TRAIN, "--batch-size 8 --accum 64", ("accumulated run", "no optimizer step")),
    (NO_BACKWARD, CUT, ("without any backward pass",)),
    (OTHER_PARAMETERS + TRAIN, f"{CUT} --odd", ("different parameters", "`weight` is [1, 4] and [2, 4]")),
]


@slow
@pytest.mark.parametrize(("body", "accumulated", "told"), REFUSED, ids=[row[-1][-1] for row in REFUSED])
def test_what_fails_or_trains_nothing_is_told(body: str, accumulated: str, told: tuple[str, ...], script: Path) -> None:
    refused(audited(script, body, accumulated), *told)


class TestTheScriptFails:
    def test_its_own_traceback_is_shown(self, script: Path) -> None:
        result = audited(script, "def shape(x):\n    return x.view(3, 5)\n\nprint('epoch 1')\nshape(inputs)\n")
        refused(result, "full-batch run", "in shape", "x.view(3, 5)", "shape '[3, 5]' is invalid", "epoch 1")
        assert "runpy" not in result.err
        assert "RuntimeError: shape '[3, 5]' is invalid" in result.err.splitlines()[0], "the cause comes first"

    @slow
    def test_an_endless_loop_that_ignores_sigterm_is_ended(self, script: Path) -> None:
        body = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('stuck')\nwhile True: pass\n"
        started = time.monotonic()
        refused(audited(script, body, options=("--timeout", "5")), "5 s", "--timeout", "stuck")
        assert time.monotonic() - started < 120


class TestNothingToCompare:
    @slow
    def test_names_are_labels(self, script: Path) -> None:
        """A wrapper around the model changes names; the same parameters in the same places are compared."""
        wrapped = "if args.odd:\n    model = torch.nn.Sequential(model)\n" + TRAIN
        result = audited(script, wrapped, "--batch-size 2 --accum 4 --odd")
        assert result.update(1)["outcome"] == "equivalent", str(result)
        other = "if args.odd:\n    model = torch.nn.Sequential(torch.nn.Linear(4, 1))\n" + TRAIN
        result = audited(script, other, "--batch-size 2 --accum 4 --odd")
        assert result.code == 3 and "start from different weights" in str(result)

    @slow
    def test_other_samples_are_not_compared(self, script: Path) -> None:
        """Shuffled without a seed of its own: the outcome is open, and it says how many rows differ."""
        body = "torch.manual_seed(args.accum)\norder = torch.randperm(32)\n"
        body += "batches = [(inputs[i], targets[i]) for i in order.split(args.batch_size)]\n"
        result = audited(script, body + TRAIN)
        assert (result.code, result.outcome, result.faults) == (3, "inconclusive", set()), str(result)
        data = result.update(1)["data"]
        assert 0 < data["differing"] <= 8, str(result)

    @slow
    def test_a_batch_that_was_not_cut(self) -> None:
        """The accumulated run has four times the samples: nothing is called divergent."""
        result = audit("loops_scale.py", "--batch-size 8", "--batch-size 8 --accum 4", "--loop usual")
        assert (result.code, result.faults) == (3, set()), str(result)
        data = result.update(1)["data"]
        assert (data["full"], data["accumulated"]) == (8, 32), str(result)

    @slow
    def test_learning_rates_that_differ(self) -> None:
        """The gradients agree, and the steps are made at another rate: a fault of its own, at the step's line."""
        result = audit("loops_scale.py", "--lr 0.1", "--batch-size 4 --accum 4 --lr 0.025", "--loop usual")
        assert result.code == 1, str(result)
        assert result.faults == {"GAV609"}, str(result)
        assert result.update(1)["outcome"] == "equivalent"
        assert "lr" in result.finding("GAV609")["summary"]

    @slow
    def test_a_gradient_that_is_not_a_number(self, script: Path) -> None:
        result = audited(script, TRAIN.replace("mse_loss(model(x), y)", "(mse_loss(model(x), y) * float('nan'))"))
        assert (result.code, result.outcome) == (3, "inconclusive"), str(result)
        assert result.notes == {"GAV503"}, str(result)

    @slow
    def test_one_update_is_enough(self, script: Path) -> None:
        """The script ends after one of two updates: that one is compared."""
        result = audited(script, "batches = batches[: args.accum]\n" + TRAIN)
        assert (result.code, result.outcome) == (0, "equivalent"), str(result)
        assert len(result.document["updates"]) == 1


FITTED = """
class Own(torch.nn.Module):
    def forward(self, batch):
        return mse_loss(model(batch[0]), batch[1])  # here: made

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages"))
from fitting import fit

fit(Own(), batches, torch.optim.SGD(model.parameters(), lr=0.1), args.accum)
"""
FITTING = """
def fit(loss_of, batches, optimizer, accum):
    for i, batch in enumerate(batches):
        loss_of(batch).backward()
        if (i + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@slow
def test_a_loss_that_a_library_differentiates_is_told_at_the_line_that_made_it(script: Path) -> None:
    library = script.parent / "site-packages"
    library.mkdir()
    (library / "fitting.py").write_text(FITTING, encoding="utf-8")
    result = audited(script, FITTED, options=("--updates", "1"))
    assert result.faults == {"GAV201"} and result.line("GAV201") == marked(script, "made"), str(result)
