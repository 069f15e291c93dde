"""`--diff`, `--fix` and `--unsafe`: which combinations there are, and what becomes of a patch that was tried."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import samples

from gaverify.audit.launchers import find_remote_word
from gaverify.cli import main
from gaverify.cli.patching import RunTrial, Wish, settle_patch
from gaverify.cli.showing import show
from gaverify.cli.workers import verify_in_worker
from gaverify.patches import apply, render_diff
from gaverify.records.audit import Record
from gaverify.records.audit_report import Audit
from gaverify.records.findings import Acceptance
from gaverify.records.outcomes import Outcome
from gaverify.records.patch import Edit, Patch
from gaverify.report import render
from gaverify.spec import parse_spec
from gaverify.spec.project import project_settings

BEFORE, AFTER = "a\r\nloss.backward()\r\n", "a\r\n(loss / K).backward()\r\n"
DIFF, FIX = Wish(diff=True), Wish(fix=True)
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_bytes(BEFORE.encode())
    return tmp_path / "train.py"


@pytest.fixture
def report(file: Path) -> Audit:
    """A divergent audit with a patch that was tried."""
    edits = (Edit(str(file), 2, 0, 2, 4, "(loss / K)"),)
    digests = {str(file): hashlib.sha256(BEFORE.encode()).hexdigest()}
    patch = Patch(edits, ("GAV201",), "Divides the loss by `K`.", "", digests=digests)
    before = {str(file): BEFORE}
    patch = replace(patch, diff=render_diff(before, apply(patch, before)))
    finding = replace(samples.batchnorm(), code="GAV201")
    return replace(samples.audited(), findings=(finding,), patch=patch)


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True)


def test_a_diff_changes_no_file_and_the_outcome_decides(report: Audit, file: Path) -> None:
    assert settle_patch(report, DIFF) == report
    assert report.exit_code == 1 and file.read_bytes() == BEFORE.encode()


@needs_git
def test_a_written_patch_is_a_success(report: Audit, file: Path) -> None:
    settled = settle_patch(report, FIX)
    assert file.read_bytes() == AFTER.encode()
    assert settled.exit_code == 0 and settled.outcome is Outcome.DIVERGENT
    text = render([settled], "text")
    assert "written into `train.py`; to undo it, save the diff as `repair.diff`" in " ".join(text.split())
    assert "☑️ divergent, repaired" in render([settled], "markdown")
    assert "<failure" not in render([settled], "junit")
    (file.parent / "repair.diff").write_text(text, encoding="utf-8", newline="")
    subprocess.run(["git", "apply", "-R", "repair.diff"], cwd=file.parent, check=True)
    assert file.read_bytes() == BEFORE.encode()


def test_strict_entries_that_are_stale_fail_all_the_same(report: Audit) -> None:
    stale = replace(report, acceptance=Acceptance(strict=True, stale=("an entry matches nothing",)))
    assert settle_patch(stale, FIX).exit_code == 1


@needs_git
@pytest.mark.parametrize("state", ["committed", "changed since", "untracked", "ignored"])
def test_git_undoes_only_what_it_has(report: Audit, file: Path, state: str) -> None:
    git(file.parent, "init", "-q")
    if state in ("committed", "changed since"):
        file.write_bytes((BEFORE if state == "committed" else "older").encode())
        git(file.parent, "-c", "core.autocrlf=false", "add", "train.py")
        git(file.parent, "commit", "-q", "-m", "x")
        file.write_bytes(BEFORE.encode())
    elif state == "ignored":
        (file.parent / ".gitignore").write_text("*.py\n", encoding="utf-8")
    written = settle_patch(report, FIX).patch_written
    assert ("git checkout -- train.py" in written) == (state == "committed")
    assert ("git apply -R" in written) == (state != "committed")


def test_a_file_that_changed_is_not_written(report: Audit, file: Path) -> None:
    file.write_text("changed", encoding="utf-8")
    settled = settle_patch(report, FIX)
    assert file.read_text(encoding="utf-8") == "changed"
    assert settled.exit_code == 1 and settled.patch is not None
    text = render([settled], "text")
    assert "not written `train.py` has changed since it was read; no file was changed" in text
    assert "+++ b/train.py" in text  # what would have been written can be applied by hand


@pytest.mark.parametrize("wish", [DIFF, FIX])
def test_what_is_accepted_or_expected_is_not_repaired(report: Audit, file: Path, wish: Wish) -> None:
    accepted = replace(report, findings=(replace(report.findings[0], accepted="on purpose"),))
    expected = replace(report, acceptance=Acceptance(expected=Outcome.DIVERGENT))
    for answer, words in ((accepted, "GAV201, which you accept: on purpose"), (expected, '`expect = "divergent"`')):
        settled = settle_patch(answer, wish)
        assert settled.patch is None and words in settled.patch_refused
        assert settled.exit_code == 0 and file.read_bytes() == BEFORE.encode()


def test_quietly_only_the_diff_is_on_stdout(
    report: Audit, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report.patch is not None
    show([report], "text", (), quiet=True, only_diffs=True)
    out, err = capfd.readouterr()
    assert out.replace("\r", "") == report.patch.diff.replace("\r", "") and err == ""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")  # whose annotations would spoil a diff that is redirected
    show([replace(report, patch=None, patch_refused="its shape is not known")], "text", (), quiet=True, only_diffs=True)
    assert capfd.readouterr() == ("", "gaverify: no patch: its shape is not known\n")


def test_a_document_on_stdout_leaves_what_happened_to_stderr(report: Audit, capfd: pytest.CaptureFixture[str]) -> None:
    show([settle_patch(report, FIX)], "json", ())
    out, err = capfd.readouterr()
    assert json.loads(out)["exit_code"] == 0
    assert err.startswith("gaverify: written: into `train.py`; to undo it")


def test_every_audit_of_a_folder_is_fixed(
    report: Audit, file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def audit_at_once(request: object, progress: object, *, patches: str) -> Audit:
        asked.append(patches)
        return report if patches == "safe" else replace(report, patch=None, patch_refused="it is unsafe")

    monkeypatch.setattr("gaverify.audit.flow.audit", audit_at_once)
    for name in ("a", "b"):
        options = f'script = "train.py"\nname = "{name}"\nfull = "--accum 1"\naccumulated = "--accum 4"'
        Path(f"{name}.toml").write_text(options, encoding="utf-8")
    assert main(["audit", ".", "-q", "--diff"]) == 1
    out = capfd.readouterr().out
    assert out.count("+++ b/train.py") == 1 and "DIVERGENT" not in out
    assert main(["audit", ".", "--fix", "--unsafe"]) == 1 and file.read_bytes() == BEFORE.encode()
    assert "no patch" in capfd.readouterr().out
    # The first writes the patch, and what the second has tried is no longer what the file holds.
    assert main(["audit", ".", "--fix"]) == 1 and file.read_bytes() == AFTER.encode()
    out = capfd.readouterr().out
    assert out.index("written     into") < out.index("has changed since it was read")
    assert asked == ["safe", "safe", "unsafe", "unsafe", "safe", "safe"]


MODEL = """import torch
from torch import nn


def factory():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    batch = torch.randn(16, 4), torch.randint(3, (16,))
    return model, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), batch
"""
NORMED, REPEATED = ("nn.BatchNorm1d(8)", "nn.GroupNorm(2, 8)"), ("nn.BatchNorm1d(8), ", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "safe", "repairs"),
    [
        (("return model, lambda", "return  model, lambda"), False, False),  # the fault stays
        (NORMED, False, True),
        (NORMED, True, False),  # another gradient than that of the unpatched full batch
        (("lambda model, batch: ", "lambda model, batch: 0 * "), True, False),
        (("import torch", "import tarch"), False, False),
    ],
)
def test_a_run_is_made_again_with_patched_sources(
    file: Path, change: tuple[str, str], safe: bool, repairs: bool
) -> None:
    model = file.with_name("net.py")
    model.write_text(MODEL, encoding="utf-8")
    spec = parse_spec({}, "command line", {"model": "net.py:factory"}, project_settings())
    trial = RunTrial(verify_in_worker(spec), spec, Record())
    assert trial({str(model): MODEL.replace(*change)}, safe=safe).is_equivalent == repairs
    assert model.read_text(encoding="utf-8") == MODEL


def test_a_run_is_patched_where_that_may_change_the_model(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = file.with_name("net.py")
    model.write_text(MODEL, encoding="utf-8")
    assert main(["run", "net.py:factory", "-q", "--diff"]) == 1
    assert capfd.readouterr()[0] == ""
    assert main(["run", "net.py:factory", "-q", "--fix", "--unsafe"]) == 0
    assert "+    model = nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3))\n" in capfd.readouterr()[0]
    assert model.read_text(encoding="utf-8") == MODEL.replace(*NORMED)


@pytest.mark.parametrize("flags", [["--diff"], ["--fix", "--unsafe"]])
def test_a_run_says_why_there_is_no_patch(file: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    file.with_name("net.py").write_text(MODEL.replace("nn.BatchNorm1d(8)", "Centred()") + CENTRED, encoding="utf-8")
    assert main(["run", "net.py:factory", "--format", "json", *flags]) == 1
    out, err = capsys.readouterr()
    verdict = json.loads(out)["answers"][0]
    assert verdict["patch"] is None and "shapes that gaverify can patch" in verdict["patch_refused"]
    assert err.count(f"gaverify: no patch: {verdict['patch_refused']}") == 1


CENTRED = """
class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)
"""


def test_an_expected_divergence_is_left_alone(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.with_name("net.py").write_text(MODEL, encoding="utf-8")
    file.with_name("spec.toml").write_text('model = "net.py:factory"\nexpect = "divergent"', encoding="utf-8")
    assert main(["run", "spec.toml", "-q", "--fix", "--unsafe"]) == 0
    assert capsys.readouterr() == ("", "")
    assert file.with_name("net.py").read_text(encoding="utf-8") == MODEL


def test_an_equivalent_run_needs_no_patch(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.with_name("net.py").write_text(MODEL.replace(*REPEATED), encoding="utf-8")
    assert main(["run", "net.py:factory", "-q", "--diff"]) == 0
    assert capsys.readouterr() == ("", "")


SCRIPTED = ["audit", "train.py", "--full", "--accum 1", "--accumulated", "--accum 4"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*SCRIPTED, "--diff", "--fix"], "--diff and --fix: the first only prints the patch"),
        ([*SCRIPTED, "--unsafe"], "--unsafe says which patches are tried; add --diff, which prints one, or --fix"),
        (
            ["run", "mlp", "--diff"],
            "--diff: `mlp` is a built-in model of gaverify, and a patch changes a file of yours",
        ),
        (["run", "mlp", "--list", "--fix"], "--fix: --list runs nothing"),
        (["audit", "--from", "records", "--diff"], "--diff: --from runs nothing, and a patch is tried in runs"),
        (["audit", "train.py", "--events-only", "--fix"], "--fix: --events-only makes one run"),
        ([*SCRIPTED, "--in-place", "--fix"], "--fix: a patch is tried on copies of your files, and --in-place"),
        (
            [*SCRIPTED, "--launcher", "torchrun --nnodes 2 --nproc-per-node 2", "--fix"],
            "--fix: `--nnodes` of the launcher starts processes on other machines",
        ),
    ],
)
def test_what_does_not_go_together_is_told_before_a_run(
    file: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert sentence in err and out == ""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("torchrun --nproc-per-node 2", ""),
        ("torchrun --nnodes 1 --nproc-per-node 2", ""),
        ("torchrun --nnodes=1:4", "--nnodes"),
        ("torchrun --nnodes=1:1", ""),
        ("accelerate launch --num_machines 2", "--num_machines"),
        ("/usr/bin/srun -n 2 python", "/usr/bin/srun"),
        ("mpirun -n 2 -H localhost:2", ""),
        ("mpirun -n 2 --host=a,b", "--host"),
        ("deepspeed --hostfile hosts", "--hostfile"),
        ("", ""),
    ],
)
def test_words_of_launchers_that_reach_other_machines(words: str, found: str) -> None:
    assert find_remote_word(words.split()) == found
