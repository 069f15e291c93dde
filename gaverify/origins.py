"""Where processes that are not forked get a problem from: its spec, or a file that the user's process left for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from gaverify.children.launching import ended_as_interrupted, working_folder
from gaverify.collective.launching import load_in_fresh, save_for_fresh
from gaverify.errors import ProblemError
from gaverify.passes.experiment import Experiment
from gaverify.passes.fingerprints import digest_of
from gaverify.passes.nesting import leaves
from gaverify.passes.problem import Problem
from gaverify.preparation import prepare_experiment, problem_of_spec
from gaverify.spec import Spec
from gaverify.verdict.settings import Settings


@dataclass(frozen=True)
class LoadedAfresh:
    """A problem that every process loads for itself.

    Args:
        settings: What the verification is asked to do.
        spec: What to build the problem from.
        file: Where there is no spec: the problem, pickled.
        digests: Of the numbers that the verification found in it; None before it has looked.
    """

    settings: Settings
    spec: Spec | None = None
    file: Path | None = None
    digests: Mapping[str, str] | None = None

    def problem(self) -> Problem:
        """Loads the problem.

        Raises:
            GaverifyError: It cannot be loaded.
        """
        if self.spec is not None:
            return problem_of_spec(self.spec)
        assert self.file is not None
        problem: Problem = load_in_fresh(self.file)
        return problem

    def with_digests(self, problem: Problem) -> LoadedAfresh:
        """Returns the same with the numbers of the problem, which all processes must find."""
        return replace(self, digests=_digests_of(problem))

    def experiment(self, stack: ExitStack, device: torch.device) -> Experiment:
        """Returns the experiment on a device.

        Raises:
            ProblemError: The problem was built with other numbers than in the verification.
        """
        problem = self.problem()
        digests = _digests_of(problem)
        differing = [what for what, digest in (self.digests or {}).items() if digest != digests[what]]
        if differing:
            raise ProblemError(
                f"`{problem.name}` builds other numbers in every process: its {' and '.join(differing)} differ from "
                f"those of another one with the same seed; let it draw from torch's, NumPy's or Python's generators, "
                "seeded inside, or hide the accelerator (CUDA_VISIBLE_DEVICES=) and write device='cpu': then the ranks "
                "share what was built once"
            )
        return prepare_experiment(stack, problem, replace(self.settings, device=device))


@contextmanager
def provide_origin(problem: Problem, settings: Settings, spec: Spec | None) -> Iterator[LoadedAfresh]:
    """Gives where fresh processes find a problem, for as long as the block runs.

    Raises:
        ProblemError: There is no spec, and the problem cannot be pickled.
    """
    if spec is not None:
        yield LoadedAfresh(settings, spec)
        return
    with ended_as_interrupted(), working_folder("gaverify-ranks-") as folder:
        save_for_fresh(problem, folder / "problem.pt")
        yield LoadedAfresh(settings, file=folder / "problem.pt")


def _digests_of(problem: Problem) -> dict[str, str]:
    """Returns digests of a problem's parameters, its buffers and its batch, as its factory made them."""
    modules = [module for module in (problem.model, problem.loss) if isinstance(module, nn.Module)]
    return {
        "parameters": digest_of(entry for module in modules for entry in module.named_parameters()),
        "buffers": digest_of(entry for module in modules for entry in module.named_buffers()),
        "batch": digest_of(leaves(problem.batch)),
    }
