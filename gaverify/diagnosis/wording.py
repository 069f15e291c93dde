"""Sentences that several rules share."""

from __future__ import annotations

from collections.abc import Sequence

from gaverify.measurements import Cause, ControlRun, Measurements, Operation
from gaverify.results import Evidence


def module_name(path: str | None, kind: str = "") -> str:
    """Returns a module path in backticks, with its class."""
    return f"`{path or '(root)'}`" + (f" ({kind})" if kind else "")


def first_operation(measured: Measurements, cause: Cause) -> Evidence:
    """What the trace saw: the difference, the operation, how many samples."""
    suspect = cause.suspect
    where = f"first diverging operation {suspect.operation}"
    if suspect.source is not None:
        where = f"`{suspect.source.name}`{_at(suspect.source)} reduces over the batch, and `{suspect.operation.name}`"
        where += f"{_at(suspect.operation)} gives it back to the samples"
    samples = f", for {suspect.samples} of {measured.batch_size} samples" if suspect.kind in ("rows", "random") else ""
    culprit = suspect.culprit
    line = f": `{culprit.source}`" if culprit.source else ""
    values = {
        "operation": suspect.operation.name, "difference": suspect.difference, "samples": suspect.samples,
        "source": culprit.source,
    }  # fmt: skip
    return Evidence("operations", "measured", f"{measured.largest}; {where}{samples}{line}", values)


def _at(operation: Operation) -> str:
    return f" at {operation.file}:{operation.line}" if operation.file is not None else ""


def control(measured: Measurements, cause: Cause) -> tuple[Evidence, ...]:
    """What the control run showed."""
    run = cause.control
    if run is None:
        return (Evidence("control", "control", "no control run was possible: suspected, not proven", {}),)
    left = f"the difference is {run.left:.0e}"
    if run.rounding:
        text = f"with {run.what} in both runs {left}: proven"
    else:
        rest = "the causes named beside it explain the rest" if measured.cleared else "another cause is left"
        share = f"this explains {cause.explained:.0%}, " if cause.explained > 0 else ""
        text = f"with {run.what} in both runs {left}: {share}{rest}"
    if cause.alone > 0 and several(measured):
        text += f"; alone, with the other causes neutralised, it makes {cause.alone:.0e}: proven"
    values = {"left": run.left, "explained": cause.explained, "alone": cause.alone}
    return (Evidence("control", "control", text, values),)


def several(measured: Measurements) -> bool:
    """Whether more than one cause was found."""
    state = measured.state is not None and bool(measured.state.blamed)
    weights = measured.weight_remedy is not None
    return len(measured.causes) + state + weights + (measured.draws_alone > 0) > 1


def proven(measured: Measurements, cause: Cause) -> bool:
    """Whether the difference falls to rounding without the suspect, or without it and the causes named beside it."""
    return cause.control is not None and (cause.control.rounding or measured.cleared)


def count(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural where that is due."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listed(names: Sequence[str], most: int = 3) -> str:
    """Returns the first few names and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def tested(run: ControlRun) -> str:
    """Says how a remedy that was run came out."""
    return "tested, equivalent" if run.rounding else f"tested, leaves {run.left:.0e}"


def coupling(measured: Measurements, code: str = "") -> tuple[Evidence, ...]:
    """Whether the model lets samples meet, by the gradient of one sample's outputs with respect to the others."""
    seen = measured.coupling
    if seen is None:
        return ()
    values = {"sample": seen.sample, "others": seen.others, "strength": seen.strength}
    if seen.others == 0:
        text = "the model's outputs for a sample have an exactly zero gradient with respect to all other samples"
        if code in ("GAV101", "GAV102"):
            text += ": they meet through choices (an order, a threshold, a branch), which have no gradient"
        return (Evidence("coupling", "coupling", text, values),)
    text = (
        f"the outputs for sample {seen.sample} depend on {seen.others} of {measured.batch_size - 1} other samples "
        f"(gradient up to {seen.strength:.1e} of that to its own input)"
    )
    return (Evidence("coupling", "coupling", text, values),)


def harm(measured: Measurements) -> tuple[Evidence, ...]:
    """How large the divergence is against the sampling noise of the gradient, with a word."""
    fit = measured.fit
    total = measured.total
    if fit is None or not fit.noise > 0 or not total < float("inf"):
        return ()
    ratio = total / fit.noise
    word = "negligible" if ratio < 0.1 else "visible" if ratio < 1.0 else "severe"
    text = f"{word}: the difference is {ratio:.2g} times the gradient's sampling noise"
    return (Evidence("harm", "harm", text, {"ratio": ratio, "noise": fit.noise, "difference": total}),)
