"""The examples on the audit's rule pages, run as scripts: each raises its code, and its repair does not."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from audits import audit

from gaverify.rulebook import A_LOOP, find_page

pytestmark = pytest.mark.slow

HEAD = """
import argparse
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
parser.add_argument("--accum", type=int)
parser.add_argument("--samples", type=int)
parser.add_argument("--text", action="store_true")
args = parser.parse_args()
K, device, epochs = args.accum, "cpu", 2
torch.manual_seed(0)
if args.text:
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
    x, y = torch.randint(8, (args.samples, 6)), torch.randint(8, (args.samples, 6))
    for row in range(args.samples):
        y[row, (3 if row >= 4 else 0) if EMPTY else (row * 5) % 6 + 1 :] = -100
else:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
    x, y = torch.randn(args.samples, 16), 20 * torch.randn(args.samples, 1)
criterion = nn.MSELoss()
loader = list(zip(x.split(args.batch_size), y.split(args.batch_size)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
scaler = torch.amp.GradScaler(device, init_scale=256.0)
average = AveragedModel(model)

def rate_at(count):
    return 1e-4 / (1 + count)

def windows(batches, size):
    return [batches[at : at + size] for at in range(0, len(batches), size)]

"""
TEXT, TAIL = {"GAV202", "GAV203"}, {"GAV604", "GAV605"}
CODES = (
    "GAV101",
    "GAV201",
    "GAV202",
    "GAV203",
    "GAV402",
    "GAV601",
    "GAV602",
    "GAV603",
    "GAV604",
    "GAV605",
    "GAV606",
    "GAV607",
    "GAV608",
    "GAV609",
    "GAV610",
    "GAV611",
)


@pytest.mark.parametrize("heading", ["Example", "Use instead"])
@pytest.mark.parametrize("code", CODES)
def test_a_page_is_right_about_its_example(code: str, heading: str, tmp_path: Path) -> None:
    page = find_page(code)
    loop = page.code_block(heading, A_LOOP) or page.code_block(heading)
    if "for epoch" not in loop:
        loop = "for epoch in range(epochs):\n" + textwrap.indent(loop, "    ")
    script = tmp_path / "train.py"
    script.write_text(HEAD.replace("EMPTY", str(code == "GAV203")) + loop + "\n", encoding="utf-8")
    common = f"--samples {24 if code in TAIL else 32}" + (" --text" if code in TEXT else "")
    result = audit(script, "--batch-size 16 --accum 1", "--batch-size 4 --accum 4", common)
    if heading == "Example":
        assert code in result.faults | result.notes, result
        assert result.faults <= {code}, result
    else:
        assert code not in result.faults | result.notes, result
        assert (result.outcome, result.faults) == ("equivalent", set()), result
