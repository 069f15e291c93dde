"""What else tells whether accumulation computes the full batch's gradient? The same faults, time and memory of each.

    python tests/benchmarks/bench_peers.py [--write]

`--write` puts the tables into PEERS.md. Opacus and TorchLens are looked at where they are installed
(`pip install --no-deps opacus torchlens` and what they import). A peer sees a fault where it calls the faulty problem
different, and raises a false alarm where it says so of a problem that is equivalent. What each of them is asked is
written below: none was made for this question, and their authors promise nothing of the kind.

Shapes: B = 8 samples in K = 4 micro-batches for the faults; the language model of `measuring` for time and memory.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import platform
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import measuring
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

sys.path.insert(0, str(measuring.ROOT / "tests" / "corpus"))

from peers_problems import PROBLEMS, Peer, Planted

import gaverify
from gaverify.passes.batching import take

B, STEPS = 8, 4
PAGE = Path(__file__).with_name("PEERS.md")


def hand(problem: Planted) -> bool:
    """A loop as people write it: both gradients, `assert_close` with its defaults. True: it calls them different."""
    model, size = problem.model, B
    torch.manual_seed(0)
    model.zero_grad()
    problem.loss(model, problem.batch).backward()
    full = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(0)
    for k, start in enumerate(range(0, size, size // STEPS)):
        part = take(problem.batch, start, start + size // STEPS, size)
        (problem.loss(model, part) * problem.weights[k]).backward()
    try:
        for expected, parameter in zip(full, model.parameters(), strict=True):
            assert_close(parameter.grad, expected)
    except AssertionError:
        return True
    return False


def gradcheck(problem: Planted) -> bool:
    """`torch.autograd.gradcheck` of the full batch's loss in every parameter, in float64."""
    model = copy.deepcopy(problem.model).double()
    batch = tuple(t.double() if t.is_floating_point() else t for t in problem.batch)
    names = [name for name, _ in model.named_parameters()]

    def loss(*values: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        with torch.nn.utils.stateless._reparametrize_module(model, dict(zip(names, values, strict=True))):
            return problem.loss(model, batch)

    values = [p.detach().clone().requires_grad_() for p in model.parameters()]
    return not torch.autograd.gradcheck(loss, values, raise_exception=False, fast_mode=True)


def opacus(problem: Planted) -> bool:
    """Opacus' gradient of each sample, averaged, against the full batch's gradient; a refused layer counts as seen."""
    from opacus.grad_sample import GradSampleModule
    from opacus.validators import ModuleValidator

    model = copy.deepcopy(problem.model)
    if ModuleValidator.validate(model, strict=False):
        return True
    torch.manual_seed(0)
    problem.loss(model, problem.batch).backward()
    full = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    wrapped = GradSampleModule(model, loss_reduction="mean")
    torch.manual_seed(0)
    problem.loss(wrapped, problem.batch).backward()
    try:
        for expected, parameter in zip(full, model.parameters(), strict=True):
            assert_close(parameter.grad_sample.mean(0), expected)
    except AssertionError:
        return True
    return False


def torchlens(problem: Planted) -> bool:
    """TorchLens' capture of two forwards: rows of a micro-batch against the full batch's, operation by operation."""
    from torchlens import trace

    def captured(inputs: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [op.out for op in trace(problem.model, inputs).layer_list if isinstance(op.out, torch.Tensor)]

    n, inputs = B // STEPS, problem.batch[0]
    full, part = captured(inputs), captured(inputs[:n])
    try:
        for whole, own in zip(full, part, strict=True):
            if whole.dim() and whole.shape[0] == B and own.shape[0] == n:
                assert_close(own, whole[:n])
    except (AssertionError, ValueError):
        return True
    return False


def ours(problem: Planted) -> bool:
    """`gaverify.verify`, without the diagnosis."""
    whole = gaverify.Problem(problem.model, problem.loss, problem.batch)
    verdict = gaverify.verify(whole, steps=STEPS, weighting=problem.weights, diagnose=False)
    return verdict.outcome is gaverify.Outcome.DIVERGENT


PEERS: dict[str, Peer] = {
    "gaverify": ours,
    "loop + assert_close": hand,
    "gradcheck": gradcheck,
    "Opacus": opacus,
    "TorchLens": torchlens,
}


def seen(peer: Peer, problem: Planted) -> str:
    """What one peer says of one problem, as a word of the table."""
    try:
        different = peer(problem)
    except Exception as error:  # what a peer cannot run is a result
        return f"cannot run: {type(error).__name__}"
    if problem.fault:
        return "sees it" if different else "-"
    return "false alarm" if different else "quiet"


def in_fresh_process(name: str) -> None:
    """Runs a peer once on the language model, for the memory measurement."""
    _large()[name]()


def _large() -> dict[str, Callable[[], object]]:
    """Each peer on the MLP with 4,096 samples; gradcheck would need a forward per parameter and is left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
    batch = torch.randn(4096, 256), torch.randint(10, (4096,))
    problem = gaverify.Problem(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch)
    inputs, targets = problem.batch

    def by_hand() -> None:
        measuring.bare(problem)

    def per_sample() -> None:
        from opacus.grad_sample import GradSampleModule

        wrapped = GradSampleModule(copy.deepcopy(problem.model))
        F.cross_entropy(wrapped(inputs), targets).backward()

    def capture() -> None:
        from torchlens import trace

        full = trace(problem.model, inputs)
        part = trace(problem.model, inputs[: len(inputs) // STEPS])
        for whole, own in zip(full.layer_list, part.layer_list, strict=True):
            if whole.out.dim() and len(whole.out) == len(inputs):
                (own.out - whole.out[: len(own.out)]).norm()

    return {
        "loop + assert_close": by_hand,
        "gaverify": lambda: gaverify.verify(problem, steps=STEPS),
        "Opacus": per_sample,
        "TorchLens": capture,
    }


def faults() -> list[list[str]]:
    """The rows of the first table: a problem, and what each peer says of it."""
    rows = []
    for name, build in PROBLEMS.items():
        row = [name]
        for peer in PEERS.values():
            torch.manual_seed(0)
            row.append(seen(peer, build()))
        rows.append(row)
        print(*row, sep=" | ", flush=True)
    return rows


def prices() -> list[list[str]]:
    """The rows of the second table: processor time and peak memory over the loop's."""
    runs = _large()

    def seconds(run: Callable[[], object]) -> float:
        run()
        started = time.process_time()
        run()
        return time.process_time() - started

    base, rows = "loop + assert_close", []
    taken = {
        name: (seconds(run), measuring.peak_of("bench_peers", "in_fresh_process", name)) for name, run in runs.items()
    }
    for name, (own, peak) in taken.items():
        rows.append([name, f"{own / taken[base][0]:.2f} ×", f"{peak / taken[base][1]:.2f} ×"])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(seen_by: list[list[str]], price: list[list[str]]) -> str:
    """The page."""
    names = ("torch", "opacus", "torchlens")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return f"""# Beside its peers

Measured, not asserted: written by `python tests/benchmarks/bench_peers.py --write` on {datetime.date.today()}, on one
thread of {platform.machine()} under {platform.system()}, Python {platform.python_version()}, {versions}.
None of the peers was made to answer this question; the functions in `bench_peers.py` say what each was asked.

What each sees of {B} samples in {STEPS} micro-batches (`-`: it calls a faulty problem right):

{table(["problem", *PEERS], seen_by)}

Processor time and peak memory of a fresh process over those of the loop, on an MLP of 400,000 parameters and 4,096
samples (`gradcheck` needs two forwards per parameter, or one in a random direction, and is left out; Opacus runs the
full batch only, TorchLens two forwards):

{table(["", "time", "memory"], price)}
"""


def main() -> None:
    """Measures both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into PEERS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = page(faults(), prices())
    if options.write:
        PAGE.write_text(found, encoding="utf-8")


if __name__ == "__main__":
    main()
