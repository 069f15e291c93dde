"""Comparisons of updates from one flat list of names, so that a case names only what it changes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from gaverify.records.audit import StepComparison, UpdateComparison
from gaverify.records.windows import AccumulationWindow


def update_of(number: int, **values: Any) -> UpdateComparison:
    """An update whose window and step take the values that bear their fields' names."""
    window, step = (
        {field.name: values.pop(field.name) for field in fields(kind) if field.name in values}
        for kind in (AccumulationWindow, StepComparison)
    )
    micro_batches = AccumulationWindow(**window).refit(window.get("fit"))
    return UpdateComparison(number, window=micro_batches, step=StepComparison(**step), **values)
