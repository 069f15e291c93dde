"""The command line against the least that it could cost: ratios of whole processes, run in turns."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median

import measuring

BY_HAND = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
inputs, targets = torch.randn(8, 16), torch.randn(8, 1)
loss = nn.functional.mse_loss
loss(model(inputs), targets).backward()
full = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()
for x, y in zip(inputs.split(2), targets.split(2)):
    (loss(model(x), y) / 4).backward()
for parameter, expected in zip(model.parameters(), full):
    torch.testing.assert_close(parameter.grad, expected)
"""


def processor_seconds(run: Callable[[], object]) -> float:
    """Returns the processor time of a process that is started and ends, its exit included."""
    before = getrusage(RUSAGE_CHILDREN)
    run()
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measures `--help` and `run --model mlp`."""
    python, own = [sys.executable], [sys.executable, "-m", "gaverify"]
    base = measuring.command([*python, "-c", "import click, rich.console"])
    found, ours, theirs = measuring.ratio(measuring.command([*own, "--help"]), base, 21)
    figure = f"{found:.2f} ({ours:.3f} s : {theirs:.3f} s)"
    measuring.show("gaverify --help : import click, rich.console", figure, "< 2.5")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "by_hand.py"
        script.write_text(BY_HAND, encoding="utf-8")
        hand = measuring.command([*python, str(script)])
        run = measuring.command([*own, "run", "--model", "mlp", "--steps", "4"])
        found, ours, theirs = measuring.ratio(run, hand, 15)
    figure = f"{found:.2f} ({ours:.2f} s : {theirs:.2f} s)"
    measuring.show("gaverify run --model mlp : the same by hand", figure, "<= 1.25")
    torch = measuring.command([*python, "-c", "import torch"])
    apart = median(processor_seconds(run) - processor_seconds(torch) for _ in range(9))
    measuring.show("gaverify run --model mlp beyond `import torch`, processor", f"{apart:.2f} s", "<= 0.25 s")


if __name__ == "__main__":
    main()
