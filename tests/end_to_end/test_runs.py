"""Runs through the front door: accepted divergences, a part of the batch, arrangements of arithmetic, no NumPy."""

from __future__ import annotations

import html
import subprocess
import sys
from pathlib import Path

import pytest
from arithmetic import ARRANGEMENTS, COMPILED, FAULTS, check
from audits import gaverify
from documents import only_answer

from gaverify.cli import main


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.toml"
    file.write_text('# mine\nmodel = "mlp-batchnorm"\n\n[model-args]\n')
    return file


@pytest.mark.smoke
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
    assert "accept entry GAV101 at `1` matches nothing any more" in capsys.readouterr().out
    assert main(["run", str(spec), "--strict"]) == 1


@pytest.mark.smoke
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


@pytest.mark.smoke
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
    assert ("not accepted: GAV101 at `1` does not cover everything" in capsys.readouterr().out) is bool(code)
    spec.write_text(
        spec.read_text().replace("accept = [", 'accept = [{ code = "GAV101", location = "4", reason = "b" }, ')
    )
    assert main(["run", str(spec)]) == 0


_MODEL = """
import torch
from torch import nn
import torch.nn.functional as F

class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)  # planted

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def factory(middle):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), middle, nn.Linear(512, 5))
    return model, loss, (torch.randn(16, 512), torch.randint(5, (16,)))

def centred():
    return factory(Centred())

def twin():
    return factory(nn.LayerNorm(512))
"""

_MANY = """
def many():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), Centred(), nn.Linear(4, 3))
    return model, loss, (torch.randn(20000, 8), torch.randint(3, (20000,)))
"""


def test_the_report_says_which_part_decided_and_the_cause_is_proven(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(_MODEL, encoding="utf-8")
    run = gaverify(["run", "--model", f"{path}:centred", "--steps", "4"])
    assert run.code == 1, run.out
    text = " ".join(run.out.split())
    assert "the first 4 of 16 samples" in text and "GAV102" in text and "proven" in text, text
    document = only_answer(gaverify(["run", "--model", f"{path}:centred", "--steps", "4", "--format", "json"]).out)
    assert (document["method"], document["run"]["part"]) == ("float64-part", [2, 2])
    exact = ["run", "--model", f"{path}:centred", "--steps", "4", "--format", "json", "--exact"]
    assert only_answer(gaverify(exact).out)["run"]["part"] == []


def test_an_equivalent_twin_is_decided_as_before(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(_MODEL, encoding="utf-8")
    run = gaverify(["run", "--model", f"{path}:twin", "--steps", "4", "--format", "json"])
    assert (run.code, only_answer(run.out)["run"]["part"]) == (0, []), run.out


def test_a_cause_that_float64_confirms_on_everything_was_looked_for_in_a_part(tmp_path: Path) -> None:
    """Of more samples than working precision could confirm it for: terminal, document and page say in which."""
    path, page = tmp_path / "model.py", tmp_path / "page.html"
    path.write_text(_MODEL + _MANY, encoding="utf-8")
    run = gaverify(["run", "--model", f"{path}:many", "--steps", "2", "--format", "json"])
    document = only_answer(run.out)
    assert run.code == 1 and document["method"] == "float64-control", run.out
    size = sum(document["run"]["part"])
    assert 0 < size < 20_000
    text = gaverify(["run", "--model", f"{path}:many", "--steps", "2", "--format", "html", "--output", str(page)])
    said = " ".join(text.out.split()) + html.unescape(page.read_text(encoding="utf-8"))
    assert f"(the batch's first {size})" in said, text.out
    assert f"the cause was looked for in the first {size} of 20000 samples" in said, text.out


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_on_the_host(name: str, fault: str) -> None:
    check(ARRANGEMENTS[name], fault, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str, fault: str) -> None:
    check(COMPILED[name], fault, "cpu")


CODE = """
import sys
{block}
from gaverify.cli import main
code = main(["run", "--model", "causal-lm", "--weighting", "tokens", "--format", "json"])
assert ("numpy" in sys.modules and sys.modules["numpy"] is not None) is False
sys.exit(code)
"""


def _run(block: str) -> subprocess.CompletedProcess[str]:
    code = CODE.format(block=block)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_dropout_is_replayed_without_numpy() -> None:
    done = _run("sys.modules['numpy'] = None  # importing it raises ImportError")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert '"equivalent"' in done.stdout


def test_ranks_exchange_what_they_reach_without_numpy() -> None:
    code = CODE.replace('"--weighting", "tokens"', '"--weighting", "tokens", "--steps", "2", "--ranks", "2"')
    block = "sys.modules['numpy'] = None"
    done = subprocess.run([sys.executable, "-c", code.format(block=block)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"equivalent"' in done.stdout
