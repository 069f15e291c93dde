"""The common part of both callbacks: the samples of a window, the verification, its output, the end of training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import nn

from gaverify.acceptance import mark_accepted
from gaverify.errors import GaverifyError, ProblemError, SpecError
from gaverify.passes.batching import Problem
from gaverify.records.verdict import Verdict
from gaverify.report import print_answer
from gaverify.spec.entries import read_entries
from gaverify.spec.project import project_settings
from gaverify.verification import verify


class DivergentTraining(GaverifyError):
    """Accumulation as it is configured does not compute the full batch's gradient; `verdict` says why.

    `exit_code` is that of a divergent `gaverify run`.
    """

    exit_code = 1

    def __init__(self, verdict: Verdict) -> None:
        faults = [f"{finding.code} {finding.name}" for finding in verdict.findings if finding.severity == "fault"]
        causes = ", ".join(faults) or "no cause found"
        super().__init__(f"training was stopped before its first step: accumulation diverges ({causes})")
        self.verdict = verdict


class Gate:
    """Verifies once and decides.

    Args:
        accept: Known divergences, as in a spec: tables with `code`, `location` and `reason`.
        stop: Raise on a divergence that is not accepted; else it is only printed.
        options: The options of `gaverify.verify`, such as `diagnose`.
    """

    def __init__(self, accept: Sequence[Mapping[str, Any]] = (), *, stop: bool = True, **options: Any) -> None:
        problems: list[str] = []
        self.accept = read_entries(list(map(dict, accept)), "accept", problems)
        if problems:
            raise SpecError(problems, "callback")
        self.stop = stop
        self.options = options
        self.verdict: Verdict | None = None

    def check(self, problem: Problem, steps: int, weighting: str) -> None:
        """Verifies and prints on stderr; raises `DivergentTraining` where training must not start."""
        # mode=None: every layer stays in the mode that the user's trainer has put it in.
        unmarked = verify(problem, steps=steps, weighting=weighting, mode=None, **self.options)
        verdict = self.verdict = mark_accepted(unmarked, self.accept, project_settings())
        # On stderr, as a script's stdout may be read by another program.
        print_answer(verdict, file=sys.stderr)
        seconds = verdict.timings.get("total", 0.0)
        print(f"gaverify: the first window was verified in {seconds:.1f} s before training", file=sys.stderr)
        if self.stop and verdict.exit_code == 1:
            raise DivergentTraining(verdict)

    @staticmethod
    def skip(why: str) -> None:
        """Says why nothing is verified; training goes on."""
        print(f"gaverify: not verified: {why}", file=sys.stderr)


class FirstWindow:
    """The samples of the first K micro-batches, and the collator that makes a batch of any of them.

    A batch of more samples than one micro-batch is made by the collator, as the loader with a larger batch size would.

    Raises:
        ProblemError: The loader does not say which samples its batches hold, or these cannot be verified.
    """

    def __init__(self, loader: Any, steps: int) -> None:
        sampler: Any = getattr(loader, "batch_sampler", None)
        dataset: Any = getattr(loader, "dataset", None)
        if sampler is None or not hasattr(dataset, "__getitem__"):
            raise ProblemError(
                "the first window cannot be put together as one batch: its loader has no batch sampler over a dataset "
                "with `__getitem__`; `gaverify audit` checks such a script"
            )
        # Indices of the sampler, not batches of the loader, which cannot be taken apart into samples again.
        self.batches = [list(indices) for indices in islice(iter(sampler), steps)]
        sizes = [len(indices) for indices in self.batches]
        # `verify` cuts micro-batches that are all equal but for a shorter last one.
        if len(sizes) < 2 or len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0]:
            raise ProblemError("the first window has fewer than two micro-batches, or uneven ones")
        self.samples = [dataset[index] for indices in self.batches for index in indices]
        self.collate: Callable[[list[Any]], Any] = loader.collate_fn


def shared_problem(model: nn.Module, loss: Callable[[nn.Module, Any], Any], window: FirstWindow, name: str) -> Problem:
    """Returns the problem whose batch is the list of the window's samples."""
    return Problem(model, loss, window.samples, _slice, len(window.samples), name)


def _slice(samples: list[Any], start: int, stop: int) -> list[Any]:
    return samples[start:stop]
