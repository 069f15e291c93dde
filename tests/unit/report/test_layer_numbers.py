"""At any width a name keeps the number of its layer, which is what tells it from its neighbours."""

from __future__ import annotations

import re

import pytest

from gaverify.cli import main
from gaverify.report.text.layout import Layout, cells

NAME = "encoder_transformer_stack_of_the_vision_tower.{}.self_attention_projection_output.weight"


@pytest.mark.parametrize("width", [24, 30, 40, 60])
def test_the_number_of_a_layer_stays(width: int) -> None:
    for number in (0, 7, 12):
        text = Layout().shorten(NAME.format(number), width)
        assert cells(text) <= width and f".{number}." in text and "…" in text
    assert Layout(ascii_only=True).shorten(NAME.format(3), width).isascii()


def test_names_without_a_number_keep_both_ends() -> None:
    assert re.fullmatch(
        r"encod.*…\w+weight", Layout().shorten("encoder_of_a_tower.projection_of_it.weight", 20).replace(".", "_")
    )


@pytest.mark.parametrize("width", ["40", "80", "120"])
def test_models_and_rules_break_no_words(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert max(map(cells, out.splitlines())) <= max(int(width), 60)
    for word in ("equivalent", "BatchNorm", "squared", "ragged", "mnist-mlp", "567,434"):
        assert word in out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["rules"]) == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert (
        "batch-statistics" in out
        and "normalisation" in out
        and max(map(cells, out.splitlines())) <= max(int(width), 60)
    )
