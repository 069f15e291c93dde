"""What a run alone can be given besides arguments, seeds, and records that are kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from audits import SCRIPTS, Audited, gaverify, refused

slow = pytest.mark.slow
CONSTANTS = str(SCRIPTS / "train_constants.py")
SET = ("--accumulated-set", "BATCH_SIZE=4", "--accumulated-set", "Config.steps=4")


def audit(*options: str, script: str = CONSTANTS) -> Audited:
    return gaverify(["audit", script, "--format", "json", *options])


@slow
class TestWhatOneRunIsGiven:
    def test_constants_and_defaults(self) -> None:
        result = audit(*SET)
        assert (result.code, result.outcome) == (0, "equivalent"), str(result)
        run = next(run for run in result.document["runs"] if run["role"] == "accumulated")
        assert run["command"].endswith("with BATCH_SIZE=4 with Config.steps=4")

    def test_a_fault_is_found_with_them(self) -> None:
        result = audit(*SET, "--set", "FORGOTTEN=True")
        assert (result.code, result.faults) == (1, {"GAV201"}), str(result)

    def test_the_environment(self) -> None:
        steps = ("--accumulated-set", "Config.steps=4")
        result = audit("--full-env", "BATCH_SIZE=16", "--accumulated-env", "BATCH_SIZE=4", *steps)
        assert (result.code, result.outcome) == (0, "equivalent"), str(result)

    def test_another_script(self, tmp_path: Path) -> None:
        other = tmp_path / "large.py"
        shutil.copy(CONSTANTS, other)
        text = Path(CONSTANTS).read_text(encoding="utf-8")
        small = tmp_path / "small.py"
        small.write_text(text.replace("BATCH_SIZE = 16", "BATCH_SIZE = 4").replace("= 1\n", "= 4\n"), encoding="utf-8")
        result = audit("--full-script", str(other), "--accumulated", "", script=str(small))
        assert (result.code, result.outcome) == (0, "equivalent"), str(result)

    def test_a_name_that_is_not_there(self) -> None:
        refused(audit("--accumulated-set", "BATCH_SIZ=4"), "assigns no `BATCH_SIZ`", "did you mean `BATCH_SIZE` (line")

    def test_text_for_a_number(self) -> None:
        refused(audit("--accumulated-set", "BATCH_SIZE=4x"), "it is 16", "write a number")

    def test_a_seed_makes_the_runs_start_alike(self) -> None:
        assert audit(*SET, "--set", "SEEDED=False").code == 3
        result = audit(*SET, "--set", "SEEDED=False", "--seed", "3")
        assert (result.code, result.outcome) == (0, "equivalent"), str(result)


@slow
class TestRecordsThatAreKept:
    def test_they_are_reported_again(self, tmp_path: Path) -> None:
        kept = tmp_path / "kept"
        first = audit(*SET, "--set", "FORGOTTEN=True", "--keep", str(kept))
        assert first.code == 1, str(first)
        again = gaverify(["audit", "--from", str(kept), "--format", "json"])
        assert again.code == 1, str(again)
        for key in ("outcome", "reason", "findings", "updates"):
            assert again.document[key] == first.document[key]
        assert "GAV201" in gaverify(["audit", "--from", str(kept)]).out
        assert not list(kept.glob("*/written"))
        (kept / "1-accumulated" / "done.json").unlink()
        refused(gaverify(["audit", "--from", str(kept)]), "1-accumulated", "run the audit again")

    def test_a_failed_audit_leaves_nothing(self, tmp_path: Path) -> None:
        refused(audit("--keep", str(tmp_path / "kept"), "--accumulated-set", "NONE=1"), "NONE")
        assert not (tmp_path / "kept").exists()


class TestBadInput:
    """Refused before anything runs."""

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--accumulated-set", "BATCH"), ("--accumulated-set 'BATCH'", "BATCH_SIZE=4")),
            (("--accumulated-env", "=4"), ("--accumulated-env '=4'", "name and value")),
            ((*SET, "--accumulated-set", "BATCH_SIZE=5"), ("twice",)),
            ((*SET, "--seed", "one"), ("--seed 'one'", "whole number")),
            ((*SET, "--seed", "-1"), ("--seed -1",)),
            (("--accumulated-set", "A=1", "--full-script", "absent.py"), ("absent.py", "not there")),
            (("--accumulated-env", "A=1", "--events-only"), ("--events-only makes one run",)),
        ],
    )
    def test_a_sentence_each(self, options: tuple[str, ...], words: tuple[str, ...]) -> None:
        refused(audit(*options), *words)

    def test_kept_records_are_not_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "mine").touch()
        refused(audit(*SET, "--keep", str(tmp_path)), "not empty")
        refused(audit(*SET, "--keep", str(tmp_path / "mine")), "it is a file")
        refused(gaverify(["audit", "--from", str(tmp_path)]), "keeps no audit's records")
        refused(gaverify(["audit", "--from", str(tmp_path), CONSTANTS, *SET]), "leave out", "--accumulated-set")
