"""What an audit costs beside the script alone: bytes on the disk, peak memory of a process, time.

    python tests/benchmarks/bench_audit.py [--sizes 1 50 300] [--wrong] [--dtype bfloat16] [--threads 1]

The script trains blocks of two linear layers with AdamW, until its second update. Its own figures are those of `python
script.py` with the full batch, import of torch included. An audit's are the largest folder of a run without copied
gradients, all copies together, the most memory that one of its processes had, and its time as a multiple of the
script's. On a machine that has other work, times say little; memory and disk do not depend on it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import argparse, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--wrong", action="store_true")
parser.add_argument("--width", type=int)
parser.add_argument("--depth", type=int)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--threads", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(args.threads)
width = args.width

def block():
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(args.depth))

    def forward(self, x):
        for each in self.blocks:
            x = x + each(x)
        return x.float().square().mean(1)

model = Model().to(getattr(torch, args.dtype))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
size = args.rows // args.accum
updates = 0
for number, rows in enumerate(torch.randn(2 * args.rows, width).to(getattr(torch, args.dtype)).split(size), 1):
    loss = model(rows).mean()
    (loss if args.wrong else loss / args.accum).backward()
    if number % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
        if updates == 2:
            break
"""


@dataclass(frozen=True)
class Size:
    """A model of 8 · depth · width² parameters, and the rows of its full batch."""

    width: int
    depth: int
    rows: int


SIZES = {1: Size(256, 2, 1024), 50: Size(1024, 6, 512), 300: Size(2048, 9, 128)}


@dataclass
class Cost:
    """What a command took: seconds, the peak memory of its largest process, and bytes on the disk at most."""

    seconds: float = 0.0
    memory: int = 0
    folder: int = 0
    copies: int = 0


def main() -> None:
    """Prints a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[*SIZES], help="millions of parameters")
    parser.add_argument("--wrong", action="store_true", help="leave the division out")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", default="1", help="of torch; more only on a machine that does nothing else")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script, records = Path(folder) / "train.py", Path(folder) / "records"
        script.write_text(SCRIPT, encoding="utf-8")
        records.mkdir()
        for millions in options.sizes:
            size = SIZES[millions]
            rows, words = str(size.rows), f"--width {size.width} --depth {size.depth} --dtype {options.dtype}".split()
            words += ["--threads", options.threads]
            alone = _cost([sys.executable, str(script), "--rows", rows, *words], records)
            accumulated = f"--rows {rows} --accum 4" + " --wrong" * options.wrong
            command = [sys.executable, "-m", "gaverify", "audit", str(script), "--full", f"--rows {rows} --accum 1"]
            audited = _cost([*command, "--accumulated", accumulated, "--", *words], records)
            print(
                f"{millions} million parameters, {options.dtype}, {'wrong' if options.wrong else 'right'}: "
                f"folder {audited.folder / 1e6:.1f} MB, copies {audited.copies / 1e6:.0f} MB, "
                f"memory {audited.memory / 1e6:.0f} / {alone.memory / 1e6:.0f} MB = "
                f"{audited.memory / alone.memory:.2f}, time {audited.seconds:.1f} / {alone.seconds:.1f} s = "
                f"{audited.seconds / alone.seconds:.2f}",
                flush=True,
            )


def _cost(command: Sequence[str], records: Path) -> Cost:
    """Runs a command and looks ten times a second at its processes and its temporary files."""
    cost, begun = Cost(), time.monotonic()
    environment = {**os.environ, "TMPDIR": str(records), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=ROOT)
    while process.poll() is None:
        cost.memory = max([cost.memory, *map(_peak, _family(process.pid))])
        runs: dict[str, int] = {}
        copies = 0
        for folder, inner, names in os.walk(records):
            inner[:] = [name for name in inner if name != "written"]  # what the script writes itself
            for name in names:
                try:
                    size = (Path(folder) / name).stat().st_size
                except OSError:  # it has just gone
                    continue
                if name.startswith("copy-"):
                    copies += size
                else:
                    runs[folder] = runs.get(folder, 0) + size
        cost.folder, cost.copies = max([cost.folder, *runs.values()]), max(cost.copies, copies)
        time.sleep(0.1)
    cost.seconds = time.monotonic() - begun
    return cost


def _family(process: int) -> list[int]:
    """Returns a process and all that it and its children have started."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
    family = [process]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family


def _peak(process: int) -> int:
    """Returns the most memory that a process has had, in bytes."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return max((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), default=0)


if __name__ == "__main__":
    main()
