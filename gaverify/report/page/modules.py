"""The model's modules as the page shows them: how far their parameters' gradients, or their outputs, are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gaverify.records.comparison import Outcome, ParameterComparison
from gaverify.records.operations import ModuleDifference
from gaverify.report.junit import modules_of
from gaverify.report.page.charts import Scale, scale_of
from gaverify.report.text.layout import clean
from gaverify.report.text.wording import number, ordered

_MODULES = 400
"""Modules that the strip of the forward order shows; the worst of neighbouring ones stand for a deeper model."""


@dataclass(frozen=True)
class ModuleView:
    """A module in the model's order: how far its worst parameter is off, as a share of the strip, and its outcome."""

    name: str
    outcome: str
    difference: str
    percent: float
    culprit: bool


def by_parameters(rows: Sequence[ParameterComparison], culprits: set[str]) -> Iterator[ModuleView]:
    """Yields each module by the worst of its parameters, in the model's order.

    Args:
        rows: All parameters.
        culprits: The names of the modules that a finding blames.
    """
    groups = modules_of(rows)
    worst_of = [(name, ordered(members)[0]) for name, members in groups]
    scale = scale_of((row.relative_difference for _, row in worst_of if not row.vanishing), 100)
    size = math.ceil(len(worst_of) / _MODULES)
    for at in range(0, len(worst_of), max(size, 1)):
        piece = worst_of[at : at + size]
        first = ordered(row for _, row in piece)[0]
        name = next(name for name, row in piece if row is first)
        yield _module(name, first, scale, any(module in culprits for module, _ in piece))


def _module(name: str, row: ParameterComparison, scale: Scale, culprit: bool) -> ModuleView:
    share = 0.0 if row.vanishing or math.isnan(row.relative_difference) else scale.at(row.relative_difference)
    difference = "rounding of a zero" if row.vanishing else number(row.relative_difference)
    return ModuleView(clean(name or "(root)"), row.outcome.value, difference, round(share, 1), culprit)


def by_outputs(modules: Sequence[ModuleDifference], culprits: set[str]) -> Iterator[ModuleView]:
    """Yields how the difference travels through the forward: each module's outputs; nothing where all of them agree."""
    if all(module.difference == 0 for module in modules):
        return
    scale = scale_of((module.difference for module in modules), 100)
    size = math.ceil(len(modules) / _MODULES)
    for at in range(0, len(modules), size):
        piece = modules[at : at + size]
        most = max(piece, key=lambda module: module.difference)
        outcome = Outcome.DIVERGENT if most.difference > 0 else Outcome.EQUIVALENT
        yield ModuleView(
            clean(most.module),
            outcome.value,
            number(most.difference) if most.difference > 0 else "the same values",
            round(scale.at(most.difference), 1),
            any(module.module in culprits for module in piece),
        )


def first_to_differ(modules: Sequence[ModuleDifference]) -> str:
    """The first module whose outputs differ, and not one that only holds it: a block differs as its layers do."""
    names = [module.module for module in modules if module.difference > 0]
    holders = {name[:at] for name in names for at, character in enumerate(name) if character == "."} | {""}
    first = next((name for name in names if name not in holders), next(iter(names), ""))
    return clean(first or "(root)")
