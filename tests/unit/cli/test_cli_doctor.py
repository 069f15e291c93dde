"""`gaverify doctor`: the controls come out as known here, and the page says so where one does not."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gaverify import checkup
from gaverify.cli import main
from gaverify.records.comparison import Outcome
from gaverify.zoo import BUILTINS


def test_everything_is_as_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "mlp-batchnorm" in out and "divergent (GAV101), as known" in out and "WRONG" not in out
    assert torch.__version__ in out and out.endswith("would be seen on this machine.\n")


def test_every_builtin_is_there_and_some_are_at_fault() -> None:
    assert {known.model for known in checkup.KNOWN} == {builtin.name for builtin in BUILTINS}
    assert {known.outcome for known in checkup.KNOWN} == {Outcome.EQUIVALENT, Outcome.DIVERGENT}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"outcome": Outcome.EQUIVALENT, "codes": frozenset()}, "divergent (GAV101); known is equivalent"),
        ({"codes": frozenset({"GAV102"})}, "divergent (GAV101); known is divergent (GAV102)"),
        ({"options": {"steps": 99}}, "divergent (GAV101) expected, but: steps = 99"),
    ],
)
def test_a_verdict_that_is_not_as_known_is_told(
    changes: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = next(known for known in checkup.KNOWN if known.model == "mlp-batchnorm")
    monkeypatch.setattr(checkup, "KNOWN", (dataclasses.replace(known, **changes),))  # type: ignore[arg-type]
    assert main(["doctor"]) == 70
    out = capsys.readouterr().out
    assert "WRONG" in out and said in " ".join(out.split()) and "1 of these are not as they should be" in out


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dataclasses.replace(checkup.KNOWN[0], needs="no_such_package")
    assert checkup.verified(known, torch.device("cpu"))[1:] == ("left out: `no_such_package` is not installed", None)


def test_what_a_device_cannot_do_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("no kernel for float64\nand more")

    monkeypatch.setattr(checkup, "_backward", refuses)
    lines = {subject: (found, fine) for subject, found, fine in checkup.support(torch.device("cpu"))}
    assert lines["float64"] == ("for the control run: no kernel for float64", False)
    monkeypatch.setattr(checkup, "_backward", lambda device, dtype: torch.rand(3))
    lines = {subject: (found, fine) for subject, found, fine in checkup.support(torch.device("cpu"))}
    assert lines["repeatable"] == ("the same backward twice, bit for bit: no", False)


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cuda:99"]) == 2
    assert "there is no device `cuda:99` here" in capsys.readouterr().err
