"""GAV104 batch-dependent-backward."""

from __future__ import annotations

from collections.abc import Iterator

from gaverify.measurements import Measurements
from gaverify.results import Evidence, Finding, Location

CODE, NAME = "GAV104", "batch-dependent-backward"
_GAP = 1e-6


def judge(measured: Measurements) -> Iterator[Finding]:
    """Yields a finding where all forwards and the losses agree, and gradients do not."""
    repeats = measured.repeatability is None or measured.repeatability.backward <= _GAP
    if measured.causes or not measured.forwards_agree or not measured.loss_gap <= _GAP or not repeats:
        return
    if measured.left <= _GAP:
        return
    rows = [row for row in measured.divergent if row.relative_difference > row.relative_allowed]
    names = ", ".join(f"`{row.name}`" for row in rows[:3]) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")
    hooks = f"; hooks are registered on {', '.join(f'`{name}`' for name in measured.hooked)}" if measured.hooked else ""
    culprit = measured.backward_culprit
    location = culprit.location if culprit is not None else Location(parameter_module(rows[0].name) if rows else None)
    where = f"; first diverging operation of the backward {culprit}" if culprit is not None else ""
    yield Finding(
        CODE, NAME, "fault", f"the backward of {names} depends on the batch, although all forwards agree",
        location=location,
        evidence=(
            Evidence("operations", "measured",
                     f"{measured.largest}; every operation of the forward agrees, the losses to {measured.loss_gap:.0e}"
                     f"{where}{hooks}", {"loss_gap": measured.loss_gap}),
        ),
        remedy="look at custom `backward` functions and gradient hooks: they see the micro-batch's gradient, not the window's",
    )  # fmt: skip


def parameter_module(name: str) -> str:
    """Returns the path of the module that owns a parameter."""
    return name.rpartition(".")[0]
