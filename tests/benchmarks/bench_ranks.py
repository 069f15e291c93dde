"""What the recorder of an audit costs each rank: seconds, bytes on disk, and what is sent between the ranks.

    python tests/benchmarks/bench_ranks.py [--width 1024] [--updates 10] [--repeats 3]

Two forked gloo ranks train two square layers under DDP and under FSDP2, two micro-batches per update, with the recorder
in place and without. The collectives have to be the same ones: the recorder sends nothing, however large the model is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Prints a line for each engine and rank."""
    from recorded_ranks import trained

    from gaverify.records.ranks import Engine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for engine in Engine:
        sides = []
        for recorded in (False, True):
            runs = []
            for _ in range(options.repeats):
                with tempfile.TemporaryDirectory() as folder:
                    size = {"width": options.width, "updates": options.updates}
                    runs.append(trained(Path(folder), engine, recorded=recorded, **size))
            sides.append(runs)
        for rank, (bare, recorded_) in enumerate(zip(sides[0][0], sides[1][0], strict=True)):
            least = [min(run[rank].seconds for run in runs) / options.updates for runs in sides]
            print(
                f"{engine.value}, rank {rank}: {least[1]:.3f} s per update recorded, {least[0]:.3f} s bare; "
                f"{recorded_.stored / options.updates:,.0f} bytes stored per update; "
                f"{recorded_.traffic.bytes_moved:,} bytes sent recorded, {bare.traffic.bytes_moved:,} bare; "
                f"{recorded_.collectives} collectives recorded, {bare.collectives} bare"
            )


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    main()
