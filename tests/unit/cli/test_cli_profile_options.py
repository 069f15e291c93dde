"""`gaverify profile` offers what it reads: options of a run that would change nothing are refused."""

import pytest

from gaverify.cli import main


@pytest.mark.parametrize("option", ["--reference", "--expect"])
def test_an_option_that_profile_does_not_read_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--model", "mlp", option, "word"]) == 2
    assert option in capsys.readouterr().err


def test_the_help_names_what_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--autocast" in text
    assert "--memory" in text
    assert "--reference" not in text


def test_an_unknown_name_is_answered_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gaverify.profiling.launching.given", None)
    assert main(["profile", "--model", "nope"]) == 2
    assert "there is no built-in `nope`" in capsys.readouterr().err
