"""What a verdict costs against the two bare passes: one table, one thread, processor time, memory of fresh processes.

    python tests/benchmarks/bench_price.py [--rounds 5] [--only NAME …]

Time is the median of ratios of processor time, measured in turns; memory the ratio of the high-water marks of resident
memory of fresh processes that run the one or the other. `exact` is the same verdict by float64 alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import measuring
import torch
import torch.nn.functional as F
from torch import nn

import gaverify
from gaverify import Problem
from gaverify.passes.batching import take

STEPS = measuring.STEPS


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(8, after)
        self.second, self.second_norm = nn.Conv2d(after, after, 3, 1, 1), nn.GroupNorm(8, after)
        self.short = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.short(x) + self.second_norm(self.second(inner)))


def convolutions(size: int = 32) -> Problem:
    """A residual network of 2.8 million parameters with GroupNorm: rounding grows through its depth."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1), nn.GroupNorm(8, 32), nn.ReLU()]
    for before, after in ((32, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256)):
        layers.append(_Residual(before, after, 1 if before == after else 2))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    return Problem(model, _cross_entropy, (torch.randn(size, 3, 32, 32), torch.randint(10, (size,))))


def mlp() -> Problem:
    """Three layers on 4,096 samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
    return Problem(model, _cross_entropy, (torch.randn(4096, 256), torch.randint(10, (4096,))))


def usual_language_model() -> Problem:
    """29.4 million parameters with GPT-2's initialisation."""
    return measuring.language_model()


class _Centred(nn.Module):
    """Takes the mean over a row's tokens away, so that the bias of the norm before it has no gradient."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x - x.mean(1, keepdim=True)


def language_model_with_a_zero_gradient() -> Problem:
    """The same with embeddings of N(0, 1), and one LayerNorm whose bias has a gradient of zero in exact arithmetic."""
    problem = measuring.language_model()
    for table in (problem.model.tokens, problem.model.positions):
        nn.init.normal_(table.weight)
    problem.model.norm = _Centred(problem.model.norm)
    return problem


def _cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


MODELS: dict[str, tuple[Callable[[], Problem], str, str]] = {
    "language-model": (usual_language_model, "1.15", "1.05"),
    "mlp": (mlp, "1.15", "1.05"),
    "convolutions": (convolutions, "1.50", "1.10"),
    "zero-gradient": (language_model_with_a_zero_gradient, "1.50", "1.10"),
}


def bare(problem: Problem) -> None:
    """The full batch and the micro-batches as a user would run them, with one clone of the gradients."""
    model, size = problem.model, gaverify_size(problem)
    model.zero_grad()
    problem.loss(model, problem.batch).backward()
    kept = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    for start in range(0, size, size // STEPS):
        (problem.loss(model, take(problem.batch, start, start + size // STEPS, size)) / STEPS).backward()
    del kept
    model.zero_grad()


def gaverify_size(problem: Problem) -> int:
    """Samples in the full batch."""
    batch = problem.batch
    return len(batch["input_ids"] if isinstance(batch, dict) else batch[0])


def verified(problem: Problem, exact: bool = False) -> gaverify.Verdict:
    """The verification; its verdict is equivalent."""
    verdict = gaverify.verify(problem, steps=STEPS, exact=exact)
    assert verdict.outcome is gaverify.Outcome.EQUIVALENT, verdict.method
    return verdict


def in_fresh_process(kind: str, name: str) -> None:
    """Runs one side, for the memory measurement."""
    torch.set_num_threads(1)
    problem = MODELS[name][0]()
    {"bare": bare, "verified": verified, "exact": lambda problem: verified(problem, True)}[kind](problem)


def processor_ratio(measured: Callable[[], object], base: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Returns the median of the ratios of processor time, and the base's seconds."""

    def seconds(run: Callable[[], object]) -> float:
        started = time.process_time()
        run()
        return time.process_time() - started

    base(), measured()
    pairs = [(seconds(measured), seconds(base)) for _ in range(rounds)]
    return median(a / b for a, b in pairs), median(b for _, b in pairs)


def equivalent(name: str, rounds: int) -> None:
    """Prints a line for a verdict, and one for the same by float64 alone."""
    build, time_wanted, memory_wanted = MODELS[name]
    problem = build()
    base = measuring.peak_of("bench_price", "in_fresh_process", "bare", name)
    for kind, exact in (("verified", False), ("exact", True)):
        found, seconds = processor_ratio(lambda exact=exact: verified(problem, exact), lambda: bare(problem), rounds)
        peak = measuring.peak_of("bench_price", "in_fresh_process", kind, name)
        verdict = verified(problem, exact)
        wanted = f"{time_wanted}, {memory_wanted}" if not exact else "-"
        figure = f"{found:.2f} × time, {peak / base:.2f} × memory, sees {verdict.resolution:.1e}"
        measuring.show(f"{name} ({seconds:.2f} s, {base / 1e6:.0f} MB): {verdict.method}", figure, wanted)


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.02 * self.layer(x)


def many_parameters(rounds: int) -> None:
    """Prints what comparing 5,000 small parameters costs."""
    from gaverify.verdict.comparison import measure
    from gaverify.verdict.criteria import decide_at_once

    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(_Small() for _ in range(2500))), torch.randn(512, 32)

    def both() -> None:
        model.zero_grad()
        model(inputs).square().mean().backward()

    both()
    reference = {name: parameter.grad for name, parameter in model.named_parameters()}
    accumulated = {name: gradient * (1 + 1e-7) for name, gradient in reference.items()}
    found, seconds = processor_ratio(
        lambda: decide_at_once(measure(accumulated, reference), 2.0**-24, {}), lambda: (both(), both()), rounds
    )
    measuring.show(f"5,000 small parameters : two passes of 512 rows ({seconds:.2f} s)", f"{found:.1%}", "< 5 %")


def many_values(rounds: int) -> None:
    """Prints at which share of the speed of a sum (one read of everything) two large gradients are compared."""
    from gaverify.verdict.comparison import measure

    reference = torch.randn(1 << 27)
    accumulated = reference + 1e-7
    found, _ = processor_ratio(
        lambda: measure({"w": accumulated}, {"w": reference}), lambda: (reference.sum(), accumulated.sum()), rounds
    )
    measuring.show("134 million values : reading them once", f"{1 / found:.0%} of the bandwidth", "> 50 %")


def main() -> None:
    """Measures all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[*MODELS, "many-parameters", "many-values"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.only:
        if name in MODELS:
            equivalent(name, options.rounds)
        else:
            {"many-parameters": many_parameters, "many-values": many_values}[name](options.rounds)


if __name__ == "__main__":
    main()
