"""Suspected operations and the control runs that cleared or proved them, in words."""

from __future__ import annotations

from collections.abc import Sequence

from gaverify.records.experiment import Cause, ControlKind, ControlRun, Operation, Suspect
from gaverify.records.facts import Facts
from gaverify.records.findings import Evidence
from gaverify.rules.rule import control_evidence, measured_evidence
from gaverify.thresholds import FIT_FLOAT64, SMALL_PART

_INEXACT = {
    ControlKind.RESULT_PINNED: "it fixes values, and gradients can flow around them",
    ControlKind.CACHED_GRADIENTS: "modules that the loss itself calls and trains still run per micro-batch",
    ControlKind.DECISIONS: "it fixes decisions, but not the values behind them",
    ControlKind.DRAWS_PINNED: "it inserts typical values, which later code may treat differently",
}
"""Why a control may leave something although nothing else is at fault."""

_MOVES_ROWS = frozenset({"index", "index_select", "flip", "roll", "gather", "take"})
"""Operations of the dispatcher that compute nothing: where they couple samples, a row met another one's."""


def first_operation(facts: Facts, cause: Cause) -> Evidence:
    """What the trace saw: the difference, the operation, how many samples."""
    suspect = cause.suspect
    where = f"first operation that differs: {suspect.operation}"
    # a reduction alone moves nothing between samples: the difference shows where its result is applied
    if suspect.source is not None:
        where = f"`{suspect.source.name}`{_at(suspect.source)} reduces over the batch, and `{suspect.operation.name}`"
        where += f"{_at(suspect.operation)} applies the result to each sample"
    # only traces that compare row by row know how many samples differ
    if suspect.kind in ("rows", "random") and suspect.samples:
        where += f", for {suspect.samples} of {facts.batch_size} samples"
    culprit = suspect.culprit
    line = f": `{culprit.source}`" if culprit.source else ""
    if culprit.caller:
        line += f" ({culprit.caller})"
    return measured_evidence(
        "operations",
        f"{facts.compared.largest}; {where}{line}",
        operation=suspect.operation.name,
        difference=suspect.difference,
        samples=suspect.samples,
        source=culprit.source,
    )


def _at(operation: Operation) -> str:
    return f" at {operation.file}:{operation.line}" if operation.file is not None else ""


def control(facts: Facts, cause: Cause) -> Evidence:
    """What the control run showed."""
    run = cause.control
    if run is None:
        why = cause.failure or "it cannot be kept fixed or replaced from outside"
        return control_evidence("control", f"no control run was possible ({why}): suspected, not proven")
    text = word_difference_left(run)
    if not run.rounding:
        remainder = "the other causes listed explain the rest" if facts.cleared else explain_rest(facts, run)
        # with all causes removed, what this one leaves can only come from the weights
        weighs = facts.cleared and cause.explained > 1 - FIT_FLOAT64
        text += (
            ": this and other micro-batch weights together explain all of it"
            if weighs
            else f": {_word_share(cause.explained)}{remainder}"
        )
    if cause.difference_alone > 0 and has_several_causes(facts):
        text += f"; with the other causes removed, it alone makes a difference of {cause.difference_alone:.0e}: proven"
    repairs = [{"what": tried.what, "left": tried.left, "rounding": tried.rounding} for tried in cause.remedies]
    more = {"repairs": repairs} if repairs else {}
    return control_evidence(
        "control", text, left=run.left, explained=cause.explained, alone=cause.difference_alone, **more
    )


def _word_share(share: float) -> str:
    """How much of the difference went away."""
    # 99.9% would hide how much is left
    most = f"all but {1 - share:.1g} of it" if share > 1 - SMALL_PART else f"{share:.0%}"
    return f"this explains {most}, " if share > 0 else ""


def word_difference_left(run: ControlRun, article: str = "") -> str:
    """Says what was neutralised and what difference that left; `proven` where none is left."""
    text = f"with {article}{run.what} in both runs the difference is {run.left:.0e}"
    return f"{text}: proven" if run.rounding else text


def explain_rest(facts: Facts, run: ControlRun) -> str:
    """Says what a control leaves: another cause where one was seen that a control could remove, else why it may not."""
    # a term with a wrong factor is another cause, whatever the control of this one leaves
    fits = [term.fit for term in facts.loop.controls.terms] if facts.loop is not None else []
    is_term_wrong = any(
        fit.factor_residual < SMALL_PART < abs(fit.factor - 1) for fit in fits
    )  # a term that counts wrongly
    if has_several_causes(facts) or facts.forward.ruled_out or is_term_wrong or run.kind not in _INEXACT:
        return "another cause remains"
    return f"the control is not exact, because {_INEXACT[run.kind]}"


def find_constant_remedy(cause: Cause) -> str:
    """The repair "hold it constant", where it was run and gave the full batch's gradient; empty where not."""
    # constant in both runs is the proof; constant in the accumulated run alone is the repair, which may lose a gradient
    run = next((run for run in cause.remedies if run.kind is ControlKind.FULL_BATCH_VALUE), None)
    if run is None or not run.repairs:
        return ""
    return "compute it once over the full batch and use this constant in every micro-batch: tested, equivalent"


def find_pairing_remedy(suspect: Suspect) -> str:
    """The repair of partners (mixup): operations that only move rows; empty for others, as for a choice of rows."""
    if suspect.kind == "control-flow" or suspect.culprit.name.partition(".")[0] not in _MOVES_ROWS:
        return ""
    return "pair the samples before the batch is split, so that partners and their targets share a micro-batch"


def number_remedy(facts: Facts, remedy: str, cause: Cause | None = None) -> str:
    """A remedy with its number, where operations have several, or one and the weights: they are made one by one.

    Args:
        facts: What was measured.
        remedy: In words.
        cause: Whose it is; None: that of the weights, which come last where they do not explain nearly everything.
    """
    causes = facts.forward.causes
    # the larger share of the difference is repaired first, so that each step shows an effect
    order = (None, *causes) if facts.weights_first else (*causes, None)
    total = len(causes) + facts.window.has_wrong_weights
    return f"fix {order.index(cause) + 1} of {total}, in this order: {remedy}" if total > 1 else remedy


def word_earlier_fixes(before: Sequence[Cause]) -> str:
    """What a repair was tested with: those before it, or values held constant, which is none; empty of one alone."""
    if not before:
        return ""
    # freezing a layer is a repair itself, while constant values are a control that nobody can train with
    applied = all(cause.control is not None and cause.control.kind is ControlKind.EVALUATION_MODE for cause in before)
    return " together with the fixes before it" if applied else " with the earlier causes kept constant"


def word_other_fixes(facts: Facts) -> str:
    """What weights were tested with: the causes of the forward, else the state that moves beside them; empty alone."""
    moving = facts.state is not None and bool(facts.state.blamed)
    return ("" if facts.weights_first else word_earlier_fixes(facts.forward.causes)) or (
        " with the state kept fixed" if moving else ""
    )


def has_several_causes(facts: Facts) -> bool:
    """Whether more than one cause was found."""
    state = facts.state is not None and bool(facts.state.blamed)
    weights = facts.window.has_wrong_weights
    return len(facts.forward.causes) + state + weights + (facts.draws.difference_alone > 0) > 1


def proven(facts: Facts, cause: Cause) -> bool:
    """Whether the difference falls to rounding without the suspect, or without it and the causes named beside it."""
    # its own control decides first; next to other causes it has to explain a share when all of them are removed
    if cause.control is None or cause.control.rounding:
        return cause.control is not None
    return facts.cleared and (cause.difference_alone > 0 or cause.explained > SMALL_PART)
