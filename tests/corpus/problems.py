"""Cases: a problem, how to verify it, and what must come out, with the reason why.

Shapes: B samples of D features (or T tokens) in K micro-batches; all models are small enough for the CPU.

Every planted fault has its healthy twin, which must stay quiet. A line of user code that holds the fault carries the
comment `# planted ID`, so that a test can compare a finding's location with it.
"""

from __future__ import annotations

import functools
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

    def verify(self) -> Verdict:
        """Verifies a fresh problem with the options of the case; verdicts are frozen, so each is made once."""
        key = (inspect.unwrap(self.build), self.steps, repr(sorted(self.options.items())))
        if key not in _VERDICTS:
            _VERDICTS[key] = gaverify.verify(self.build(), steps=self.steps, **self.options)
        return _VERDICTS[key]

    def check(self) -> Verdict:
        """Verifies, and asserts what must come out: outcome, codes and notes, and the place where it is known."""
        verdict = self.verify()
        told = f"{self.why}\n{story(verdict)}"
        found = fault_codes(verdict)
        assert verdict.outcome.value == self.outcome, told
        assert found <= self.codes and bool(found) == bool(self.codes), f"expected {set(self.codes)}: {told}"
        assert self.notes <= note_codes(verdict), f"expected the notes {set(self.notes)}: {told}"
        assert verdict.divergent if self.codes else verdict.parameters, "a verdict about nothing proves nothing"
        places = [finding.location for finding in verdict.findings if finding.code in self.codes and finding.location]
        assert self.module is None or self.module in [place.module for place in places], told
        lines = [(Path(place.file).name, place.line) for place in places if place.file]
        assert not self.codes or self.planted_line is None or self.planted_line in lines, told
        return verdict

    @property
    def planted_line(self) -> tuple[str, int] | None:
        """File name and number of the line that carries the marker of this fault, where one does."""
        path = Path(inspect.getfile(inspect.unwrap(self.build)))
        lines = path.read_text(encoding="utf-8").splitlines()
        numbers = [number for number, line in enumerate(lines, 1) if line.endswith(f"# planted {self.id}")]
        assert len(numbers) < 2, f"{path.name} has {len(numbers)} lines that end in `# planted {self.id}`"
        return (path.name, numbers[0]) if numbers else None


def seeded(build: Builder) -> Builder:
    """A builder that starts from the same seed each time."""

    @functools.wraps(build)
    def build_seeded() -> Problem:
        torch.manual_seed(0)
        return build()

    return build_seeded


def fault(id: str, build: Builder, codes: str, why: str, **changes: Any) -> Case:
    """A case that must diverge with one of `codes`, written "GAV101 GAV102"."""
    return quiet(id, build, why, codes=frozenset(codes.split()), outcome="divergent", **changes)


def quiet(id: str, build: Builder, why: str, **changes: Any) -> Case:
    """A case that must be equivalent without any finding of severity "fault"; other names are options of `verify`."""
    notes = frozenset(changes.pop("notes", "").split())
    own = {name: changes.pop(name) for name in [*changes] if name in Case.__dataclass_fields__}
    return Case(id=id, build=seeded(build), why=why, notes=notes, options=changes, **own)


def listed(cases: list[Case], **defaults: Any) -> Callable[..., Callable[[Builder], Builder]]:
    """A decorator that adds builders, by their names, to cases that must be quiet or, with `codes`, diverge."""

    def described(why: str, codes: str = "", **changes: Any) -> Callable[[Builder], Builder]:
        def add(build: Builder) -> Builder:
            made = functools.partial(fault, codes=codes) if codes else quiet
            cases.append(made(build.__name__, build, why=why, **defaults, **changes))
            return build

        return add

    return described


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


class Parts(nn.Module):
    """A module, or what it keeps, by the names of its parts."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Net(Parts):
    """Parts whose forward is a `function` of the net and its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__(function=function, **parts)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


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
