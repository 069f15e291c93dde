"""What an audit costs: recording time against the script's own, bytes on disk against the gradients' size.

    python tests/benchmarks/bench_audit.py [--repeats 3] [--threads 1]

The script is a language model of 30 million parameters with dropout. Its own time is that of `python script.py` until
the second update has been made, import of torch included; the recorded time is that of the child process of an audit,
less the time that a plain `torch.save` of the same gradients takes (the one-time write, measured beside it). Wall clock
and processor time are given: on a machine that has other work, only the second one says something.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import argparse, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--threads", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(args.threads)

class Model(nn.Module):
    def __init__(self, words=16000, width=512, layers=4, length=64):
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(tokens) + self.places(torch.arange(length))
        return self.head(self.layers(hidden, mask=mask, is_causal=True))

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.randint(0, 16000, (64, 65), generator=torch.Generator().manual_seed(1))
updates = 0
for i, rows in enumerate(data.split(args.batch_size)):
    logits = model(rows[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    (loss / args.accum).backward()
    if (i + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
        if updates == 2:
            break
"""
ROLES = {"full": ("--batch-size", "8", "--accum", "1"), "accumulated": ("--batch-size", "2", "--accum", "4")}


def main() -> None:
    """Prints the figures of every repeat and their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", default="1", help="of torch; more only on a machine that does nothing else")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        measured = [_measure(script, options.threads) for _ in range(options.repeats)]
    for role in ROLES:
        for clock in ("wall", "processor"):
            own, recorded = (min(times[role, clock][at] for times in measured) for at in (0, 1))
            middle = median(times[role, clock][1] / times[role, clock][0] for times in measured)
            print(
                f"recording, {role}, {clock} time: least {recorded:.2f} s / {own:.2f} s = {recorded / own:.3f}, "
                f"median of ratios {middle:.3f} (target 1.10)"
            )


def _measure(script: Path, threads: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Returns own and recorded time of each run, by both clocks, the latter without the gradient writes."""
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        for role, arguments in ROLES.items():
            words = (*arguments, "--threads", threads)
            own = _timed(lambda words=words: subprocess.run([sys.executable, str(script), *words], check=True))
            recorded = _timed(lambda role=role, words=words: _recorded(script, Path(folder), role, words))
            write = _written(Path(folder), role)
            for clock, alone, with_recorder, saved in zip(("wall", "processor"), own, recorded, write, strict=True):
                times[role, clock] = (alone, with_recorder - 2 * saved)
    return times


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Returns wall clock and the processor time of the child processes."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    work()
    wall, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _recorded(script: Path, folder: Path, role: str, arguments: tuple[str, ...]) -> None:
    """Runs one job of an audit."""
    from gaverify.audit.job import Command, Job, LeadSteps
    from gaverify.audit.processes import run_jobs

    follows = role == "accumulated"
    job = Job(
        Command(str(script), arguments=arguments),
        role,  # type: ignore[arg-type]
        2,
        (str(folder / "full"),) if follows else (),
        (LeadSteps(),) if follows else (),
        folder=str(folder / role),
    )
    run_jobs([job], 600, lambda _: None)


def _written(folder: Path, role: str) -> tuple[float, float]:
    """Prints what a run has stored; returns what writing its gradients takes, by both clocks."""
    import torch

    from gaverify.audit.reading import RecordedRun

    run = RecordedRun(role, folder / role, 0.0)  # type: ignore[arg-type]
    gradients = run.gradients(((0, 1),))
    size = sum(gradient.numel() for gradient in gradients.values())
    share = run.disk_bytes / (4 * size * run.updates)
    print(f"    {role}: {size:,} parameters, {run.disk_bytes:,} bytes = {share:.4f} × (4 × parameters × updates)")
    begun = time.monotonic(), time.process_time()
    torch.save(gradients, folder / "written.pt")
    return time.monotonic() - begun[0], time.process_time() - begun[1]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)
    main()
