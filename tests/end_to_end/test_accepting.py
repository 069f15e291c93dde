"""Accepting a known divergence through the front door: baseline, run, stale, strict, expect."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaverify.cli import main


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.toml"
    file.write_text('# mine\nmodel = "mlp-batchnorm"\n\n[model-args]\n')
    return file


def test_a_baseline_makes_the_run_pass_until_it_is_stale(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(spec)]) == 1
    assert main(["baseline", str(spec), "--print"]) == 0
    assert "[[accept]]" in capsys.readouterr().out and "accept" not in spec.read_text()
    assert main(["baseline", str(spec), "--reason", 'a "ghost" batch norm']) == 0
    assert spec.read_text().startswith("# mine\n") and 'reason = "a \\"ghost\\" batch norm"' in spec.read_text()
    capsys.readouterr()
    assert main(["run", str(spec)]) == 0
    out = capsys.readouterr().out
    assert "DIVERGENT" in out and "(accepted)" in out and 'a "ghost" batch norm' in out
    written = spec.read_text()
    assert main(["baseline", str(spec)]) == 0 and spec.read_text() == written
    spec.write_text(written.replace("mlp-batchnorm", "mlp"))
    assert main(["run", str(spec)]) == 0
    assert "stale: GAV101 at `1`" in capsys.readouterr().out
    assert main(["run", str(spec), "--strict"]) == 1


def test_expect_and_the_project(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(spec), "--expect", "divergent"]) == 0
    assert main(["run", "--model", "mlp", "--expect", "divergent"]) == 1
    spec.with_name("pyproject.toml").write_text(
        '[tool.gaverify]\naccept = [{ code = "GAV101", location = "1", reason = "known" }]\n'
    )
    assert main(["run", str(spec)]) == 0
    spec.with_name("pyproject.toml").write_text("[tool.gaverify]\naccept = 3\n")
    assert main(["run", str(spec)]) == 2
    assert "$.tool.gaverify.accept: must be a list of tables" in capsys.readouterr().err


def test_a_baseline_refuses_what_it_cannot_write(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inline = 'model = "mlp-batchnorm"\naccept = [{ code = "GAV102", location = "1", reason = "b" }]\n'
    spec.write_text(inline)
    assert main(["baseline", str(spec)]) == 2
    assert "write each of its entries as a table" in capsys.readouterr().err
    assert spec.read_text() == inline
    assert main(["baseline", str(spec), "--reason", " "]) == 2
    spec.with_name("0.toml").write_text('modle = "mlp"\n')
    spec.with_name("1.toml").write_text('model = "gone.py:factory"\n')
    spec.write_text('model = "mlp-batchnorm"\n')
    assert main(["baseline", "gone.toml", "."]) == 2  # and the last of them is written all the same
    err = capsys.readouterr().err
    assert all(f"gaverify: error: {name}.toml: " in err for name in ("gone", "0", "1"))
    assert "[[accept]]" in spec.read_text()


TWO_LAYERS = """
import torch
from torch import nn


def model(second):
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(8)
    if second == "frozen":
        layer.eval().train = lambda mode=True: layer
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), layer, nn.Linear(8, 3))
    batch = torch.randn(16, 6), torch.randint(3, (16,))
    return net, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), batch
"""


@pytest.mark.parametrize(("second", "code"), [("plain", 1), ("frozen", 0)])
def test_one_accepted_layer_accepts_no_other(
    second: str, code: int, spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are frozen in one control, which proves both; a layer that was frozen before is no part of it."""
    spec.with_name("net.py").write_text(TWO_LAYERS)
    spec.write_text(
        'model = "net.py:model"\naccept = [{ code = "GAV101", location = "1", reason = "known" }]\n'
        f'[model-args]\nsecond = "{second}"\n'
    )
    assert main(["run", str(spec), "--strict"]) == code
    assert ("not accepted: GAV101 at `1` is not all" in capsys.readouterr().out) is bool(code)
    spec.write_text(
        spec.read_text().replace("accept = [", 'accept = [{ code = "GAV101", location = "4", reason = "b" }, ')
    )
    assert main(["run", str(spec)]) == 0
