"""Faults that gradients show by themselves (GAV501 to GAV503, GAV901), and unexplained divergences (GAV000)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gaverify.records.audit import Calls
from gaverify.records.comparison import Comparison
from gaverify.records.events import Backward
from gaverify.records.experiment import DifferenceKind, FirstDifference
from gaverify.records.findings import Evidence, Finding, Location
from gaverify.records.numbers import count_text
from gaverify.records.outcomes import NotCompared, Outcome, ParameterComparison
from gaverify.records.windows import SCRIPT
from gaverify.rules.rule import (
    finding_of,
    join_texts,
    measured_evidence,
    quote_names,
    rule,
    trace_evidence,
    word_control,
    word_difference,
)
from gaverify.rules.shares import empty_micro_batches
from gaverify.thresholds import AGREE_FLOAT64, BITS_WORTH_A_NOTE


@rule("GAV000")
def unexplained(comparison: Comparison, findings: tuple[Finding, ...]) -> Iterator[Finding]:
    """Yields a note where a divergence was looked into and nothing of severity fault came out, or something is left."""
    faults = [finding for finding in findings if finding.severity == "fault"]
    first, update = comparison.record.controls.first_difference, comparison.record.divergent
    # what is suspected may be innocent: beside it stands what was seen
    explained = any(fault.proven for fault in faults) if first is not None else bool(faults)
    if comparison.record.edit is not None:
        return  # all of it is a finding of its own
    # a search that ran out of time may have found one cause of several
    if (
        not comparison.compared.divergent
        or (explained and comparison.stopped_after is None)
        or not comparison.diagnosed
    ):
        return
    if comparison.undecided:
        return  # with constant draws nothing is left to explain
    evidence = [Evidence("all", "ruled out", "; ".join(_list_ruled_out(comparison)) or "nothing")]
    summary = "the divergence is real; no rule explains it"
    remedy = f"{_advice(comparison)}; please report a small example"
    if update is not None:
        evidence.insert(0, measured_evidence("comparison", word_difference(update), update=update.number))
    if update is not None and first is not None:
        summary = f"update {update.number} differs, and nothing proves why; {_word_first_difference(first)}"
        evidence.insert(1, trace_evidence(first))
        run = first.control
        evidence += [] if run is None else [word_control("trace", f"with {run.what} the difference", run.left, False)]
        remedy = _remedy_of(first)
    elif update is not None and comparison.stopped_after is None:
        summary = f"the difference in update {update.number} is real; no rule of the audit explains it"
        remedy = (
            "look for samples that interact in the model or the loss, or for state that one forward leaves to the next "
            "(a counter, a queue); `gaverify run --model FILE:FACTORY` finds both"
        )
    elif comparison.stopped_after is not None:
        summary = f"the time limit of {comparison.stopped_after:g} s ended the search for the cause"
        remedy = "give the search more time (`--time-limit`), or fewer samples"
    location = first.operation.location if update is not None and first is not None else None
    yield finding_of(summary, *evidence, remedy=remedy, severity="note", proven=False, location=location)


_WHERE_FIRST = {
    DifferenceKind.VALUES: "the two runs first compute other values for the same samples here",
    DifferenceKind.STATE: "this line leaves a value that a later micro-batch reads and the full batch does not",
    DifferenceKind.BRANCH: "the two runs first take another branch here",
    DifferenceKind.BACKWARD: "all values of the forward pass agree, and a backward pass first differs in this code",
    DifferenceKind.AFTER_PASSES: "the backward passes agree, and what changes gradients after them first differs here",
    DifferenceKind.BETWEEN_PASSES: "all traced values agree, and this line changes gradients between backward passes",
}


def _word_first_difference(first: FirstDifference) -> str:
    where = _WHERE_FIRST[first.kind]
    return f"{where}: `{first.operation.source}`" if first.operation.source else where


def _remedy_of(first: FirstDifference) -> str:
    if first.kind is DifferenceKind.BETWEEN_PASSES:
        return "change gradients once per update, after the last backward pass"
    if first.kind is DifferenceKind.BACKWARD:
        return "make this code treat each sample separately: it gets the micro-batch's gradient, not the full batch's"
    if first.kind is DifferenceKind.STATE:
        return "change the state once per update, after the last backward pass"
    if first.kind is DifferenceKind.BRANCH:
        return "let the branch not depend on the micro-batch, nor on how many came before"
    return "let this line compute the same for a sample in every micro-batch: what else it reads must not depend on it"


def _list_ruled_out(comparison: Comparison) -> Iterator[str]:
    """Yields what the search or the controls of an audit ruled out."""
    fit, windows = comparison.window.fit, comparison.calls.windows
    if fit is not None and not comparison.window.has_recipe and fit.used_residual > comparison.tolerance:
        # the weights of a recipe are given; those of a script are fitted, and may not fit at all
        yield "no weighting of the micro-batches' gradients yields what the optimizer sees"
    elif fit is not None and (comparison.window.has_recipe or fit.residual > comparison.tolerance):
        # Weights of a script that leave nothing are not ruled out: as many gradients as weights are fitted by anything.
        yield f"weights: the best ones leave a difference of {fit.residual:.1e}"
    if windows:
        yield "all calls are in the right order"
        terms = max((backward.terms for window in windows for backward in window.of(Backward)), default=0)
        if comparison.record.ranks > 1 and terms > 1:
            yield f"the {terms} terms of the loss were not tested one by one, which is not possible with several ranks"
    # atomic additions in another order leave less than this in float64
    if comparison.repeatability is not None and comparison.repeatability.backward < AGREE_FLOAT64:
        yield "repeatability: running the same twice gives the same result"
    if comparison.state is not None:
        changed = quote_names(change.name for change in comparison.state.changes)
        tried = (
            f"keeping {changed} fixed does not help"
            if comparison.state.control
            else "nothing that the forward changes is read again"
        )
        yield f"state: {tried}"
    if comparison.forward.agree:
        yield "operations: all forward values agree"
    for suspect in dict.fromkeys(map(str, comparison.forward.ruled_out)):
        yield f"{suspect}: without it the difference stays"
    yield from _word_failures(comparison)


def _word_failures(comparison: Comparison) -> Iterator[str]:
    """Yields the controls that could not run, each reason once."""
    reasons: dict[str, list[str]] = {}
    for name, why in comparison.failures.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        yield f"{join_texts(names)} could not run: {why}"


def _advice(comparison: Comparison) -> str:
    """Where to look, by what is known."""
    halves = "bisect: run with half of the layers in evaluation mode or bypassed"
    if comparison.failures:
        return f"enable what could not run (a smaller batch, kernels with float64), or {halves}"
    if comparison.forward.agree:
        return f"check custom `backward` functions and hooks, because all forward values agree; else {halves}"
    in_model = next((operation for operation in comparison.forward.ruled_out if operation.module is not None), None)
    return f"look at what differs first in the model, {in_model}; {halves}" if in_model is not None else halves


@rule("GAV901")
def uninformative_batch(comparison: Comparison) -> Iterator[Finding]:
    """Yields a note where one micro-batch, identical samples, zero gradients or equal counts could hide a fault."""
    reasons = list(_list_reasons(comparison))
    counts = comparison.window.valid_targets
    # weights by tokens are right for any counts, so equal counts hide nothing
    averaged = comparison.window.weighting in ("uniform", SCRIPT)
    equal = len(counts) > 1 and len(set(counts)) == 1
    if comparison.window.ignored_targets and equal and averaged and not comparison.compared.divergent:
        reasons.append(
            f"every micro-batch has {counts[0]:g} valid targets: equal weights are right for this batch only"
        )
    if comparison.unpadded and comparison.window.steps > 1 and not comparison.compared.divergent:
        reasons.append(f"{join_texts(comparison.unpadded)}: padded samples were not tested")
    if reasons:
        text = "; ".join(reasons)
        remedies = ["use a batch of different samples with different numbers of valid targets"]
        if comparison.same_split and comparison.window.steps == 1:
            remedies = ["compare at least two micro-batches (`--steps 2`)", *remedies[: len(reasons) - 1]]
        yield finding_of(
            text,
            measured_evidence("batch-quality", text, valid_targets=list(map(float, counts))),
            remedy="; ".join(remedies),
            severity="note",
            proven=True,
        )


def _list_reasons(comparison: Comparison) -> Iterator[str]:
    """Yields why a fault may not show; of several updates only while the first one does not differ."""
    rows = comparison.compared.rows
    if comparison.record.updates:
        # those of `comparison.compared` are of the first update that differs, if any does
        rows = comparison.record.updates[0].parameters
        if comparison.record.updates[0].outcome is Outcome.DIVERGENT:
            return
    if comparison.same_split:
        yield f"{comparison.same_split}: the full batch was compared with itself"
    if comparison.identical:
        unseen = "" if comparison.blind else "; only their random draws differ"
        yield f"all samples are identical, so interactions between samples cannot be seen{unseen}"
    known_rows = [row for row in rows if not math.isnan(row.difference_norm)]
    if known_rows and all(row.reference_norm == row.accumulated_norm == 0 for row in known_rows):
        yield "every gradient is zero"
    hooked = comparison.backward.hooked
    if hooked and all(math.isnan(row.difference_norm) for row in rows):
        hook_names = ", ".join(f"`{name}`" for name in hooked[:3])
        yield f"hooks on {hook_names} remove the gradients before they are compared (optimizer in backward?)"


@rule("GAV501")
def low_precision_accumulation(comparison: Comparison) -> Iterator[Finding]:
    """Yields a note where the accumulated gradient has fewer correct bits than the full-batch one."""
    loss = comparison.compared.precision
    # Where a sum in float32 regains nothing, the micro-batches' own gradients are rounded, and adding up loses nothing.
    if loss is None or min(loss.bits_lost, loss.bits_regained) < BITS_WORTH_A_NOTE:
        return
    better = ""
    if loss.in_float32 is not None:
        better = f"; gaverify ran it: the error is {loss.in_float32:.1e} instead of {loss.accumulated:.1e}"
    of = f" (of {loss.samples} samples, plus the loss from summing)" if loss.samples else ""
    yield finding_of(
        f"accumulating in {loss.dtype} loses {min(loss.bits_lost, loss.bits_regained):.1f} bits of the gradient",
        measured_evidence(
            "precision",
            f"error against float64: accumulated {loss.accumulated:.1e}, full batch {loss.full:.1e}{of}",
            full=loss.full,
            accumulated=loss.accumulated,
            bits_lost=min(loss.bits_lost, loss.bits_regained),
        ),
        remedy=f"accumulate the gradients in float32{better}",
        severity="note",
        proven=loss.samples == 0,
    )


@rule("GAV502")
def missing_gradient(comparison: Comparison) -> Iterator[Finding]:
    """Yields a finding where a parameter has a gradient on one side only."""
    rows, branch = comparison.compared.one_sided, comparison.forward.branch
    # sharded parameters without any gradient are GAV702
    if not rows or (comparison.ranks is not None and comparison.ranks.reduction.stepped_without):
        return
    number, parameters = comparison.compared.update, [row.name for row in rows]
    named = join_texts([f"`{name}`" for name in parameters], 1)
    if _have_other_optimizers(comparison.calls, number):
        yield finding_of(
            f"different optimizers step in update {number} of the two runs",
            measured_evidence("events", f"{named} is stepped in one run only", parameters=parameters),
            remedy="step all optimizers together, after the last micro-batch",
            proven=True,
        )
        return
    where = f" (update {number})" if number is not None else ""
    only = f"; {branch} runs in one run only" if branch is not None else ""
    yield finding_of(
        f"{named} {'has' if len(rows) == 1 else 'have'} {rows[0].reason}{where}",
        measured_evidence(
            "comparison",
            f"{count_text(len(rows), 'parameter')} with a gradient in one run only{only}",
            parameters=parameters,
        ),
        remedy="look for a branch that depends on the batch: the parameter is used in one run only",
        location=branch.location if branch is not None else Location(rows[0].name.rpartition(".")[0]),
        proven=True,
        together=[Location(name.rpartition(".")[0]) for name in parameters],
    )


def _have_other_optimizers(calls: Calls, number: int | None) -> bool:
    full_window = next((window for window in calls.full_windows if window.number == number), None)
    window = calls.window_of(number)
    return full_window is not None and window is not None and set(full_window.optimizers) != set(window.optimizers)


@rule("GAV503")
def non_finite_gradient(comparison: Comparison) -> Iterator[Finding]:
    """Yields a fault where one run's gradients alone are not finite, a note where both are.

    Nothing where an empty micro-batch is to blame, or causes are named that explain it.
    """
    if (empty_micro_batches(comparison) or comparison.cleared) and comparison.compared.divergent:
        return
    for update, compared in comparison.comparisons:
        rows = [row for row in compared if row.why is not None and row.why.not_finite]
        if rows:
            yield _finding_of_rows(rows, update)
            return
    # a script's losses are NaN where nothing showed them
    losses = comparison.window.losses if comparison.window.has_recipe and not comparison.compared.divergent else ()
    broken = [str(k + 1) for k, loss in enumerate(losses) if not math.isfinite(loss)]
    if broken:
        which = f"losses of micro-batches {join_texts(broken)} are" if len(broken) > 1 else ""
        which = which or f"loss of micro-batch {broken[0]} is"
        values = ", ".join(f"{loss:.4g}" for loss in losses)
        yield finding_of(
            f"the {which} not finite, although the gradients agree",
            measured_evidence("comparison", f"losses of the micro-batches: {values}"),
            remedy="look for a mean over nothing (a micro-batch without valid targets): leave it out, or divide the "
            "sum by the count of all micro-batches",
            severity="note",
            proven=True,
        )


def _finding_of_rows(rows: list[ParameterComparison], update: int | None) -> Finding:
    one_sided = [row for row in rows if row.why is not NotCompared.NOT_FINITE_IN_BOTH]
    # a gradient that is broken in one run only is the fault; those broken in both could not be compared
    listed_rows = one_sided or rows
    more_parameters = f" and {count_text(len(listed_rows) - 1, 'more parameter')}" if len(listed_rows) > 1 else ""
    where = f" (update {update})" if update is not None else ""
    return finding_of(
        f"the gradient of `{listed_rows[0].name}`{more_parameters} is {listed_rows[0].reason}{where}",
        measured_evidence(
            "comparison", f"{count_text(len(rows), 'gradient')} not finite", parameters=[row.name for row in rows]
        ),
        remedy="look for divisions by zero, logarithms of zero, means over nothing, and overflow in low precision",
        severity="fault" if one_sided else "note",
        location=Location(listed_rows[0].name.rpartition(".")[0]),
        proven=True,
        together=[Location(row.name.rpartition(".")[0]) for row in listed_rows],
    )
