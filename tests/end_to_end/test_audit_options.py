"""What a run of an audit can be given besides arguments, records that are kept, and a folder that is the user's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from audits import SCRIPTS, Audited, audit, folder, gaverify, refused

from gaverify.audit import outputs

slow = pytest.mark.slow
CONSTANTS = str(SCRIPTS / "train_constants.py")
SET = ("--accumulated-set", "BATCH_SIZE=4", "--accumulated-set", "Config.steps=4")


def constants(*options: str, script: str = CONSTANTS) -> Audited:
    return gaverify(["audit", script, "--format", "json", *options])


@slow
class TestWhatOneRunIsGiven:
    def test_constants_and_defaults(self) -> None:
        result = constants(*SET)
        assert (result.code, result.outcome) == (0, "equivalent"), str(result)
        run = next(run for run in result.document["runs"] if run["role"] == "accumulated")
        assert run["command"].endswith("with BATCH_SIZE=4 with Config.steps=4")

    def test_the_environment(self) -> None:
        steps = ("--accumulated-set", "Config.steps=4")
        result = constants("--full-env", "BATCH_SIZE=16", "--accumulated-env", "BATCH_SIZE=4", *steps)
        assert (result.code, result.outcome) == (0, "equivalent"), str(result)

    def test_another_script(self, tmp_path: Path) -> None:
        other = tmp_path / "large.py"
        shutil.copy(CONSTANTS, other)
        text = Path(CONSTANTS).read_text(encoding="utf-8")
        small = tmp_path / "small.py"
        small.write_text(text.replace("BATCH_SIZE = 16", "BATCH_SIZE = 4").replace("= 1\n", "= 4\n"), encoding="utf-8")
        result = constants("--full-script", str(other), "--accumulated", "", script=str(small))
        assert (result.code, result.outcome) == (0, "equivalent"), str(result)

    def test_a_seed_makes_the_runs_start_alike(self) -> None:
        assert constants(*SET, "--set", "SEEDED=False").code == 3
        result = constants(*SET, "--set", "SEEDED=False", "--seed", "3")
        assert (result.code, result.outcome) == (0, "equivalent"), str(result)


@slow
class TestRecordsThatAreKept:
    def test_they_are_reported_again(self, tmp_path: Path) -> None:
        kept = tmp_path / "kept"
        first = constants(*SET, "--set", "FORGOTTEN=True", "--keep", str(kept))
        assert (first.code, first.faults) == (1, {"GAV201"}), str(first)
        again = gaverify(["audit", "--from", str(kept), "--format", "json"])
        assert again.code == 1, str(again)
        for key in ("outcome", "reason", "findings", "updates"):
            assert again.document[key] == first.document[key]
        assert "GAV201" in gaverify(["audit", "--from", str(kept)]).out
        assert not list(kept.glob("*/written"))
        (kept / "1-accumulated" / "done.json").unlink()
        refused(gaverify(["audit", "--from", str(kept)]), "1-accumulated", "run the audit again")

    def test_a_failed_audit_leaves_nothing(self, tmp_path: Path) -> None:
        refused(constants("--keep", str(tmp_path / "kept"), "--accumulated-set", "NONE=1"), "NONE")
        assert not (tmp_path / "kept").exists()


class TestBadInput:
    """Refused before anything runs."""

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (
                ("--accumulated-set", "BATCH"),
                ('--accumulated-set: must be NAME=VALUE, each name once, got "BATCH"', "BATCH_SIZE=4"),
            ),
            (("--accumulated-env", "=4"), ('--accumulated-env: must be K=V, each name once, got "=4"',)),
            ((*SET, "--accumulated-set", "BATCH_SIZE=5"), ('each name once, got "BATCH_SIZE=5"',)),
            ((*SET, "--seed", "one"), ("--seed: must be a whole number from 0", 'got "one"')),
            ((*SET, "--seed", "-1"), ("got -1; write `--seed 0`",)),
            (("--accumulated-set", "A=1", "--full-script", "absent.py"), ("absent.py", "does not exist")),
            (("--accumulated-env", "A=1", "--events-only"), ("--events-only makes one run",)),
            (("--accumulated-set", "BATCH_SIZ=4"), ("assigns no `BATCH_SIZ`", "did you mean `BATCH_SIZE` (line")),
            (("--accumulated-set", "BATCH_SIZE=4x"), ("it is 16", "write a number")),
        ],
    )
    def test_a_sentence_each(self, options: tuple[str, ...], words: tuple[str, ...]) -> None:
        refused(constants(*options), *words)

    def test_kept_records_are_not_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "mine").touch()
        refused(constants(*SET, "--keep", str(tmp_path)), "not empty")
        refused(constants(*SET, "--keep", str(tmp_path / "mine")), "it is a file")
        refused(gaverify(["audit", "--from", str(tmp_path)]), "it holds no records of an audit")
        (tmp_path / "audit.json").write_text('{"version": 3, "request": {}}')
        refused(gaverify(["audit", "--from", str(tmp_path)]), "another version of gaverify", "run the audit again")
        refused(gaverify(["audit", "--from", str(tmp_path), CONSTANTS, *SET]), "leave out", "--accumulated-set")


@pytest.fixture(autouse=True)
def here(tmp_path: Path) -> Iterator[Path]:
    with folder(tmp_path):
        yield tmp_path


def resumed(*options: str, common: str = "") -> Audited:
    """Audits the script anew: what it answers hangs on the folder."""
    return audit(SCRIPTS / "train_resuming.py", common=common, options=options)


def saved(path: Path) -> bytes:
    """A checkpoint of the user's own, and a log beside it."""
    path.mkdir()
    torch.manual_seed(5)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "last.pt")
    (path / "log.txt").write_text("mine\n", encoding="utf-8")
    return (path / "last.pt").read_bytes()


@slow
class TestAViewForEveryRun:
    @pytest.fixture(autouse=True)
    def _possible(self, tmp_path: Path) -> None:
        import os
        import sys

        child = os.fork() if sys.platform == "linux" else 0
        if child == 0 and sys.platform == "linux":
            os._exit(bool(outputs.enter(tmp_path, [], [])))
        if sys.platform != "linux" or os.waitpid(child, 0)[1]:
            pytest.skip("this system makes no private views of files")

    @pytest.mark.parametrize("common", ["", "--other-program"])
    def test_the_users_checkpoint_is_resumed_by_all_and_changed_by_none(self, common: str, here: Path) -> None:
        before = saved(here / "out")
        result = resumed(common=common)
        assert (result.code, result.faults) == (0, set()), str(result)
        assert (here / "out" / "last.pt").read_bytes() == before
        assert (here / "out" / "log.txt").read_text(encoding="utf-8") == "mine\n"
        assert sorted(path.name for path in (here / "out").iterdir()) == ["last.pt", "log.txt"]

    def test_no_run_goes_on_from_another(self, here: Path) -> None:
        result = resumed()
        assert (result.code, result.faults) == (0, set()), str(result)
        assert not (here / "out").exists()

    def test_a_fault_is_found_all_the_same(self) -> None:
        result = resumed(common="--undivided")
        assert (result.code, result.faults) == (1, {"GAV201"}), str(result)

    def test_absolute_paths_are_seen_through_the_view_too(self, here: Path) -> None:
        elsewhere = here / "elsewhere"
        before = saved(elsewhere)
        assert resumed(common=f"--out {elsewhere}").code == 0
        assert (elsewhere / "last.pt").read_bytes() == before

    def test_in_place_changes_what_the_script_changes(self, here: Path) -> None:
        result = resumed("--in-place")
        assert (here / "out" / "last.pt").exists()
        assert result.code == 3, str(result)  # the second run went on from the first one's checkpoint
        assert "resume" in result.document["reason"], str(result)


@slow
def test_other_weights_without_a_checkpoint_want_a_seed() -> None:
    result = resumed(common="--unseeded")
    assert result.code == 3 and "--seed" in result.document["reason"], str(result)
    assert "resume" not in result.document["reason"], str(result)
