"""The runs of an audit share a folder with the user: none sees another's files, and none of the user's changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from audits import SCRIPTS, Audited, audit, folder, marked, refused

from gaverify.audit import ending, outputs, processes
from gaverify.audit.job import Job

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def here(tmp_path: Path) -> Iterator[Path]:
    with folder(tmp_path):
        yield tmp_path


@pytest.fixture
def no_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without private views of files."""
    original = processes._start

    def start(job: Job, command: str) -> processes.Child:
        if job.files != "view":
            return original(job, command)
        raise ending.NoView("not allowed here")

    monkeypatch.setattr(processes, "_start", start)


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


@pytest.mark.usefixtures("no_view")
class TestAGuardWhereThereIsNoView:
    def test_a_change_of_the_users_file_is_refused_before_it_is_made(self, here: Path) -> None:
        before = saved(here / "out")
        (here / "out" / "log.txt").unlink()
        result = resumed()
        refused(result, "would change", "last.pt", "--in-place", str(marked("train_resuming.py", "saves")[1]))
        assert (here / "out" / "last.pt").read_bytes() == before
        assert [path.name for path in (here / "out").iterdir()] == ["last.pt"]

    def test_what_the_runs_add_is_taken_away(self, here: Path) -> None:
        result = resumed()
        assert (result.code, result.faults) == (0, set()), str(result)
        assert not (here / "out").exists()

    def test_a_fault_is_found_all_the_same(self) -> None:
        result = resumed(common="--undivided")
        assert (result.code, result.faults) == (1, {"GAV201"}), str(result)


def test_other_weights_without_a_checkpoint_want_a_seed() -> None:
    result = resumed(common="--unseeded")
    assert result.code == 3 and "--seed" in result.document["reason"], str(result)
    assert "resume" not in result.document["reason"], str(result)
