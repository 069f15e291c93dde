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
