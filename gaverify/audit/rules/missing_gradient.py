"""GAV502 missing-gradient: a parameter has a gradient in one run only.

What it finds

A parameter whose `.grad` is None at the step of one run and a tensor in the other.

Why gradients diverge

The optimizer skips a parameter without a gradient: no decay, no momentum, no step count. A branch of the forward was
not reached by any micro-batch, or frozen parameters differ between the runs.

Signature in the numbers

`None` against a tensor; all other parameters agree or not.

Example

    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        if len(x) > 4:
            loss = loss + model.auxiliary_loss()
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

Use instead

    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y) + model.auxiliary_loss()
        (loss / K).backward()
        if (i + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()

When it is harmless

Where the gradient on the other side is zero and the optimizer has neither decay nor momentum.

References

https://pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.audit.records import Record
from gaverify.results import Evidence, Finding, Location

CODE, NAME = "GAV502", "missing-gradient"


def judge(record: Record) -> Iterator[Finding]:
    """Yields a finding where a parameter has a gradient on one side only."""
    update = record.divergent
    rows = [row for row in (update.parameters if update else ()) if math.isnan(row.difference_norm)]
    rows = [row for row in rows if row.reason.startswith("no gradient")]
    if update is None or not rows:
        return
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    if _other_optimizers(record, update.number):
        yield Finding(
            CODE, NAME, "fault", f"not the same optimizers step in update {update.number} of both runs",
            evidence=(Evidence("events", "measured",
                               f"`{rows[0].name}`{more} is stepped in one run only",
                               {"parameters": [row.name for row in rows]}),),
            remedy="step all optimizers at the same place, at the end of the window", proven=True,
        )  # fmt: skip
        return
    yield Finding(
        CODE, NAME, "fault", f"`{rows[0].name}`{more} has {rows[0].reason} (update {update.number})",
        location=Location(rows[0].name.rpartition(".")[0]),
        evidence=(Evidence("comparison", "measured", f"{_count(len(rows))} a gradient on one side only",
                           {"parameters": [row.name for row in rows]}),),
        remedy="look for a branch that depends on the batch: the parameter is reached in one run only", proven=True,
    )  # fmt: skip


def _other_optimizers(record: Record, number: int) -> bool:
    whole = next((window for window in record.full_windows if window.number == number), None)
    window = record.window_of(number)
    return whole is not None and window is not None and set(whole.optimizers) != set(window.optimizers)


def _count(parameters: int) -> str:
    return "1 parameter has" if parameters == 1 else f"{parameters} parameters have"
