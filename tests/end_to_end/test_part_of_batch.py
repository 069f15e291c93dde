"""A large divergent batch through the front door: float64 runs on a part of it, and the report says on which."""

from __future__ import annotations

import json
from pathlib import Path

from audits import gaverify

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
    document = json.loads(gaverify(["run", "--model", f"{path}:centred", "--steps", "4", "--format", "json"]).out)
    assert (document["method"], document["run"]["part"]) == ("float64-part", [2, 2])
    exact = ["run", "--model", f"{path}:centred", "--steps", "4", "--format", "json", "--exact"]
    assert json.loads(gaverify(exact).out)["run"]["part"] == []


def test_an_equivalent_twin_is_decided_as_before(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(_MODEL, encoding="utf-8")
    run = gaverify(["run", "--model", f"{path}:twin", "--steps", "4", "--format", "json"])
    assert (run.code, json.loads(run.out)["run"]["part"]) == (0, []), run.out


def test_a_cause_that_float64_confirms_on_everything_was_looked_for_in_a_part(tmp_path: Path) -> None:
    """Of more samples than working precision could confirm it for: terminal, document and page say in which."""
    path, page = tmp_path / "model.py", tmp_path / "page.html"
    path.write_text(_MODEL + _MANY, encoding="utf-8")
    run = gaverify(["run", "--model", f"{path}:many", "--steps", "2", "--format", "json"])
    document = json.loads(run.out)
    assert run.code == 1 and document["method"] == "float64-control", run.out
    size = sum(document["run"]["part"])
    assert 0 < size < 20_000
    text = gaverify(["run", "--model", f"{path}:many", "--steps", "2", "--format", "html", "--output", str(page)])
    said = " ".join(text.out.split()) + page.read_text(encoding="utf-8")
    assert f"(the batch's first {size})" in said and f"among the first {size} samples" in said, text.out
    assert f"the cause was looked for in the first {size} of 20000 samples" in said, text.out
