"""Cases: a problem, how to verify it, and what must come out, with the reason why.

Shapes: B samples of D features (or T tokens) in K micro-batches; all models are small enough for the CPU.

Every planted fault has its healthy twin, which must stay quiet. A line of user code that holds the fault carries the
comment `# planted ID`, so that a test can compare a finding's location with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gaverify
from gaverify import Problem, Verdict

Builder = Callable[[], Problem]
_VERDICTS: dict[Any, Verdict] = {}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem and what must come out of it.

    Args:
        id: The row of `FAULTS.md`, or a name.
        build: Returns a fresh problem.
        why: Why the outcome is the right one.
        steps: K.
        options: Further arguments of `gaverify.verify`.
        outcome: What the verdict must be.
        codes: Any one of these must be among the findings of severity "fault", and no other code may.
        notes: Codes of notes that must be there.
        module: The module path where the fault lies, where it lies in a library module.
        planted: Whether a line of `build`'s file carries `# planted ID`.
    """

    id: str
    build: Builder
    why: str
    steps: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)
    outcome: str = "equivalent"
    codes: frozenset[str] = frozenset()
    notes: frozenset[str] = frozenset()
    module: str | None = None
    planted: bool = False

    def verify(self) -> Verdict:
        """Verifies a fresh problem with the options of the case; verdicts are frozen, so each is made once."""
        key = (self.build, self.steps, repr(sorted(self.options.items())))
        if key not in _VERDICTS:
            _VERDICTS[key] = gaverify.verify(self.build(), steps=self.steps, **self.options)
        return _VERDICTS[key]

    @property
    def planted_line(self) -> tuple[str, int]:
        """File name and number of the line that carries the marker."""
        path = Path(inspect.getfile(inspect.unwrap(self.build)))
        lines = path.read_text(encoding="utf-8").splitlines()
        numbers = [number for number, line in enumerate(lines, 1) if line.rstrip().endswith(f"# planted {self.id}")]
        assert len(numbers) == 1, f"{path.name} has {len(numbers)} lines that end in `# planted {self.id}`"
        return path.name, numbers[0]


def fault(id: str, build: Builder, codes: str, why: str, **changes: Any) -> Case:
    """A case that must diverge with one of `codes`, written "GAV101 GAV102"."""
    notes = frozenset(changes.pop("notes", "").split())
    return Case(
        id=id, build=build, codes=frozenset(codes.split()), outcome="divergent", why=why, notes=notes, **changes
    )


def quiet(id: str, build: Builder, why: str, **changes: Any) -> Case:
    """A case that must be equivalent without any finding of severity "fault"."""
    notes = frozenset(changes.pop("notes", "").split())
    return Case(id=id, build=build, why=why, notes=notes, **changes)


def fault_codes(verdict: Verdict) -> set[str]:
    """The codes of the findings that explain a divergence."""
    return {finding.code for finding in verdict.findings if finding.severity == "fault"}


def note_codes(verdict: Verdict) -> set[str]:
    """The codes of the findings that change no exit code."""
    return {finding.code for finding in verdict.findings if finding.severity == "note"}


def story(verdict: Verdict) -> str:
    """A line per divergent parameter and finding, for assertion messages."""
    rows = [
        f"  {row.name}: {row.outcome.value} by {row.method}, Δ {row.difference_norm:.2e}, "
        f"allowed {row.allowed:.2e}, ‖full‖ {row.reference_norm:.2e} {row.reason}"
        for row in verdict.parameters
        if row.outcome is not gaverify.Outcome.EQUIVALENT
    ]
    found = [
        f"  {finding.severity} {finding.code} {finding.summary} {finding.location}" for finding in verdict.findings
    ]
    return "\n".join([f"{verdict.outcome.value} by {verdict.method}", *rows[:6], *found])


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean cross entropy of a pair (inputs, classes)."""
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes)


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean squared error of a pair (inputs, targets)."""
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def classified(model: nn.Module, *shape: int, size: int = 16, classes: int = 4) -> Problem:
    """The problem of `size` normal inputs of `shape` with random classes, under cross entropy."""
    return Problem(model, cross_entropy, (torch.randn(size, *shape), torch.randint(classes, (size,))))


def mlp(features: int = 6, hidden: int = 8, classes: int = 4) -> nn.Sequential:
    """Linear, ReLU, Linear."""
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def token_batch(lengths: tuple[int, ...], vocabulary: int = 11, longest: int = 6) -> dict[str, torch.Tensor]:
    """Random tokens; a row's labels beyond its length are -100."""
    tokens = torch.randint(vocabulary, (len(lengths), longest))
    labels = torch.randint(vocabulary, (len(lengths), longest))
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return {"tokens": tokens, "labels": labels}


def language_model(vocabulary: int = 11, width: int = 8) -> nn.Sequential:
    """Embedding, Linear, GELU, Linear: every token on its own."""
    return nn.Sequential(
        nn.Embedding(vocabulary, width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, vocabulary)
    )


def token_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over the valid tokens of this (micro-)batch."""
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
