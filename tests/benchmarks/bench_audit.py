"""What an audit costs: recording time against the script's own, bytes on disk against the gradients' size.

    python tests/benchmarks/bench_audit.py [--repeats 3]

The script is a language model of 30 million parameters with dropout. Its own time is that of `python script.py` until the
second update has been made, import of torch included; the recorded time is that of the child process of an audit, less
the time that a plain `torch.save` of the same gradients takes (the one-time write, measured beside it).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = '''
import argparse, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accum", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(2)

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
'''
FULL, ACCUMULATED = ("--batch-size", "8", "--accum", "1"), ("--batch-size", "2", "--accum", "4")


def main() -> None:
    """Prints the figures of every repeat and their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        ratios = [_measure(script) for _ in range(repeats)]
    for at, role in enumerate(("full batch", "accumulated")):
        print(f"recording, {role}: {median(ratio[at] for ratio in ratios):.3f} × the script's own time (target 1.10)")


def _measure(script: Path) -> tuple[float, float]:
    """Returns recorded over own time of both runs."""
    own = [_own(script, arguments) for arguments in (FULL, ACCUMULATED)]
    recorded, write = _recorded(script), 2 * _write(script)
    ratios = [(seconds - write) / alone for seconds, alone in zip(recorded, own, strict=True)]
    print(f"own {own[0]:.2f} s and {own[1]:.2f} s, recorded {recorded[0]:.2f} s and {recorded[1]:.2f} s, "
          f"of which the two gradient writes take {write:.2f} s: {ratios[0]:.3f}, {ratios[1]:.3f}")  # fmt: skip
    return ratios[0], ratios[1]


def _own(script: Path, arguments: tuple[str, ...]) -> float:
    begun = time.monotonic()
    subprocess.run([sys.executable, str(script), *arguments], check=True, cwd=script.parent)
    return time.monotonic() - begun


def _recorded(script: Path) -> tuple[float, float]:
    """Runs the jobs of an audit one after the other, without the third run beside the second."""
    from gaverify.audit.job import Job
    from gaverify.audit.processes import run_jobs
    from gaverify.audit.reading import Run

    with tempfile.TemporaryDirectory() as folder:
        seconds = []
        for role, arguments in (("full", FULL), ("accumulated", ACCUMULATED)):
            path = Path(folder) / role
            source = str(Path(folder) / "full") if role == "accumulated" else None
            job = Job(role, str(script), False, arguments, str(path), 2, source)  # type: ignore[arg-type]
            (child,) = run_jobs([(job, str(script))], 600, lambda _: None)
            run = Run(job.role, path, child.seconds)
            size = sum(gradient.numel() for gradient in run.gradients(1).values())
            print(f"    {role}: {size:,} parameters, {run.disk_bytes:,} bytes = "
                  f"{run.disk_bytes / (4 * size * run.updates):.4f} × (4 × parameters × updates)")  # fmt: skip
            seconds.append(child.seconds)
        return seconds[0], seconds[1]


def _write(script: Path) -> float:
    """The seconds that writing tensors of the gradients' shapes adds."""
    code = (
        "import torch, time, sys\n"
        f"shapes = {_shapes()!r}\n"
        "tensors = {str(at): torch.randn(shape) for at, shape in enumerate(shapes)}\n"
        "begun = time.monotonic(); torch.save(tensors, sys.argv[1]); print(time.monotonic() - begun)\n"
    )
    target = script.parent / "written.pt"
    done = subprocess.run([sys.executable, "-c", code, str(target)], check=True, capture_output=True, text=True)
    target.unlink()
    return float(done.stdout)


def _shapes() -> list[tuple[int, ...]]:
    width, words = 512, 16000
    layer = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
    layer += [(width, 4 * width), (width,), (width,), (width,), (width,), (width,)]
    return [(words, width), (64, width), *(layer * 4), (words, width), (words,)]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)
    main()
