"""A cause that was found in a part of the batch, confirmed on all of it: its control and its repairs run once there.

The runs are in working precision, where the difference has to fall to what correct models show there. What does not is
not confirmed, and the search begins again with the whole batch in float64.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from gaverify.causes import coupling, proof, weights
from gaverify.causes.bench import FORESEEN, Bench
from gaverify.causes.earlier import kept
from gaverify.causes.sketches import fitted
from gaverify.causes.trace.first_divergence import trace_divergences
from gaverify.passes.gradients import full_batch_gradients
from gaverify.passes.task import Task
from gaverify.records.experiment import ControlRun
from gaverify.records.facts import Facts, State
from gaverify.records.weights import WeightFit
from gaverify.verdict.judging import Judgement

# What float32 leaves of correct models is 2e-7 to 7e-6 (`bench`); more than this may be a second cause.
_ROUNDING = 2e-5
_DENOMINATOR, _DIGITS = 1000, 10.0  # of a weight as a fraction, and times the fit's residual that it may be off
_REPEATS = 1e-9  # of float64: a batch that differs from itself is looked into as a whole


def confirmed(task: Task, judgement: Judgement, facts: Facts, found: Facts) -> Facts | None:
    """Returns the facts of the whole batch with the cause that its part showed; None where it is not confirmed there.

    Args:
        task: The whole batch's.
        judgement: With its passes.
        facts: What they showed.
        found: What the search showed in the part.
    """
    if not _one_cause(found):
        return None
    try:
        bench, facts = _begun(task, judgement, facts, found)
        facts = _cause(bench, facts, found) if found.forward.causes else _weights(bench, facts, found)
    except FORESEEN:
        return None
    return facts if facts.cleared and facts.left <= min(_ROUNDING, bench.rounding) else None


def _one_cause(found: Facts) -> bool:
    """Whether one operation, or the weights alone, explain everything in the part."""
    state, twice = found.state, found.repeatability
    still = (state is None or not state.blamed) and twice is not None and max(twice.forward, twice.backward) < _REPEATS
    plain = found.draws.control is None and found.backward.place is None and found.backward.kept is None
    remedy, causes = found.weights.remedy, found.forward.causes
    weighted = not causes and remedy is not None and remedy.rounding
    coupled = len(causes) == 1 and not found.weights.blamed and causes[0].control is not None
    return found.cleared and still and plain and (weighted or coupled)


def _begun(task: Task, judgement: Judgement, facts: Facts, found: Facts) -> tuple[Bench, Facts]:
    """Both strategies once more, as sketches: the micro-batches' own gradients, and one of the full batch."""
    task.progress("the whole batch again")
    full, _ = full_batch_gradients(task, judgement.state, judgement.record)
    earlier = kept(full)
    bench = Bench(task, judgement.state, judgement.record, False, earlier=earlier, total=facts.compared.total)
    sketches = bench.sketched(full, None, target=earlier.gradient)[0]
    bench = replace(bench, earlier=replace(earlier, shares=sketches))
    fit = _plain(fitted([replace(sketches, elements=earlier.elements)]))
    changes = State(found.state.changes) if found.state is not None else None
    facts = replace(
        facts,
        weights=replace(facts.weights, fit=fit),
        state=changes,
        repeatability=found.repeatability,
        failures=found.failures,
        left=bench.total,
    )
    return bench, facts


def _plain(fit: WeightFit) -> WeightFit:
    """The fit with the fractions that its weights stand for: working precision tells only their first digits."""
    near = [Fraction(weight).limit_denominator(_DENOMINATOR) for weight in fit.weights]
    close = [abs(float(f) - w) <= _DIGITS * fit.residual * abs(w) for f, w in zip(near, fit.weights, strict=True)]
    return replace(fit, weights=tuple(map(float, near))) if all(close) else fit


def _weights(bench: Bench, facts: Facts, found: Facts) -> Facts:
    """Accumulates with the weights that fit all micro-batches, where they have a meaning."""
    fit = facts.weights.fit
    if fit is None or not weights.means(bench, facts, fit):
        return facts
    facts = weights.tried(bench, facts, fit)
    return replace(facts, weights=replace(facts.weights, place=found.weights.place))


def _cause(bench: Bench, facts: Facts, found: Facts) -> Facts:
    """Runs the control that helped, and the repairs, where no other operation diverges first.

    What differs by less than working precision tells in a forward names none. A repair has to come out as in the part.
    """
    (before,) = found.forward.causes
    first = trace_divergences(bench, weights=facts.weights.used, valid_targets=facts.weights.valid_targets)
    seen = [suspect for suspect in first.suspects if str(suspect.culprit) not in found.forward.ruled_out]
    suspect = seen[0] if seen else replace(before.suspect, samples=0)
    if str(suspect.culprit) != str(before.suspect.culprit):
        return facts
    suspect = replace(suspect, statistics=before.suspect.statistics)
    cause = proof.again(bench, replace(before, suspect=suspect))
    control = cause.control if cause is not None else None
    if cause is None or control is None or _repairs(before.remedies, 1.0) != _repairs(cause.remedies, _ROUNDING):
        return facts
    forward = replace(
        found.forward,
        causes=(cause,),
        agree=first.forwards_agree,
        loss_gap=first.loss_gap,
        shares=first.shares,
        modules=first.modules,
    )
    facts = replace(facts, forward=forward, left=control.left, cleared=control.rounding)
    return coupling.ask(bench, facts) if found.forward.coupling is not None else facts


def _repairs(runs: tuple[ControlRun, ...], most: float) -> list[tuple[object, bool]]:
    return [(run.kind, run.rounding and run.left <= most) for run in runs]
