"""What the diagnosis of a divergence costs against the two bare passes: one table, one thread, processor time.

    python tests/benchmarks/bench_diagnosis.py [--rounds 3] [--only NAME …]

Time is the median of ratios of processor time, measured in turns; memory the ratio of the high-water marks of resident
memory of fresh processes. A row holds the whole verification: the passes, the float64 control, the search, its
controls and repairs. The last row is the median of the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import bench_price
import measuring
import torch
from torch import nn

import gaverify
from gaverify import Problem


class _Centred(nn.Module):
    """Subtracts the mean over the batch: the planted fault."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)


def centred() -> Problem:
    """The language model of 29.4 million parameters with a cross-sample operation before its last norm."""
    problem = measuring.language_model()
    problem.model.norm = nn.Sequential(_Centred(), problem.model.norm)
    return problem


def padded() -> Problem:
    """The language model with padding that its loss ignores: means of unequal token counts."""
    return measuring.language_model("ignored")


def batch_norm() -> Problem:
    """The residual network with BatchNorm in the place of its first GroupNorm."""
    problem = bench_price.convolutions()
    problem.model[1] = nn.BatchNorm2d(32)
    return problem


def coupled_loss() -> Problem:
    """The MLP with a loss that divides by the deviation of the batch's outputs."""
    problem = bench_price.mlp()
    inner = problem.loss
    problem.loss = lambda model, batch: inner(model, batch) / model(batch[0]).std()
    return problem


def summed() -> Problem:
    """The MLP with a sum over the samples, which the weights 1/K divide K times too often."""
    problem = bench_price.mlp()
    problem.loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return problem


DIAGNOSES: dict[str, tuple[Callable[[], Problem], str, float]] = {
    "centred": (centred, "GAV102", 12.0),
    "padded": (padded, "GAV202", 8.0),
    "batch-norm": (batch_norm, "GAV101", 12.0),
    "coupled-loss": (coupled_loss, "GAV103", 12.0),
    "summed": (summed, "GAV201", 8.0),
}
MEMORY = 1.3


def diagnosed(problem: Problem, code: str) -> None:
    """The whole verification; it names the planted fault, and proves it."""
    verdict = gaverify.verify(problem, steps=measuring.STEPS)
    found = [(finding.code, finding.proven) for finding in verdict.findings if finding.severity == "fault"]
    assert found == [(code, True)], found


def in_fresh_process(kind: str, name: str) -> None:
    """Runs one side, for the memory measurement."""
    torch.set_num_threads(1)
    build, code, _ = DIAGNOSES[name]
    bench_price.bare(build()) if kind == "bare" else diagnosed(build(), code)


def main() -> None:
    """Prints a row per planted fault, and their median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(DIAGNOSES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    ratios = []
    for name in options.only:
        build, code, wanted = DIAGNOSES[name]
        problem = build()
        found, seconds = bench_price.processor_ratio(
            lambda problem=problem, code=code: diagnosed(problem, code),
            lambda problem=problem: bench_price.bare(problem),
            options.rounds,
        )
        ratios.append(found)
        ours, theirs = (
            measuring.peak_of("bench_diagnosis", "in_fresh_process", kind, name) for kind in ("run", "bare")
        )
        figure = f"{found:.1f} × time, {ours / theirs:.2f} × memory"
        label = f"{code}, {name} ({seconds:.2f} s, {theirs / 1e6:.0f} MB)"
        measuring.show(label, figure, f"<= {wanted:.0f}, <= {MEMORY}")
    measuring.show("median", f"{median(ratios):.1f} × time", "<= 12")


if __name__ == "__main__":
    main()
