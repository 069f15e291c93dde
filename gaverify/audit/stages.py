"""Compares the steps of one round at each stage: the summed gradient, the one that was used, the change of the weights.

Which weights of the micro-batches would have given the full-batch gradient, and which were used, is read by a fit.
Every term of a loss is fitted for itself, from runs in which it alone was differentiated.

Shapes: S sampled elements of an optimizer's parameters, K backward passes of its window.

    g_full ≈ c₁ g₁ + … + c_K g_K        the right weights, on top of what the script did to each loss
    g_used ≈ u₁ g₁ + … + u_K g_K        what reached the optimizer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gaverify.audit.reading import ParameterPlace, RecordedRun, Samples
from gaverify.passes.sketches import SINGULAR_FLOAT32, fit_weights
from gaverify.records.audit import Clip, SettingDifference, Stage, StageComparison
from gaverify.records.events import Backward, Clipping, Step
from gaverify.records.experiment import LossTerm, WeightFit
from gaverify.records.outcomes import Method, Outcome, ParameterComparison, outcome_of, relative_total
from gaverify.records.windows import Round, Window, common_rounds
from gaverify.thresholds import (
    COMPUTED_FLOAT32,
    FEW_UNITS,
    LAST_DIGITS,
    LITTLE,
    MOSTLY,
    REST_UNITS,
    SAME_IN_FLOAT32,
    TINY,
    U32,
)
from gaverify.verdict.comparison import measure
from gaverify.verdict.control import judge_by_floor
from gaverify.verdict.criteria import Difference


def fit_of(full: Samples, accumulated: Samples, *, summed: bool = True) -> WeightFit | None:
    """Returns the fit over the sampled elements of all optimizers that stepped; None where there is nothing to fit.

    Args:
        full: The steps of the full-batch run.
        accumulated: Those of the accumulated run.
        summed: Fit the gradients as the last backward pass left them; else as the optimizers saw them.
    """
    finals = [samples.summed_gradients if summed else samples.of("final") for samples in (full, accumulated)]
    return fit_gradients(finals[0], full.stretches, finals[1], accumulated.increments)


def fit_gradients(
    target_of: Mapping[int, torch.Tensor],
    stretches: Mapping[int, torch.Tensor],
    used_of: Mapping[int, torch.Tensor],
    increments: list[dict[int, torch.Tensor]],
) -> WeightFit | None:
    """Returns the fit of a full-batch gradient and of a used one by what each backward pass added.

    Args:
        target_of: The full-batch gradient by optimizer, shape (S,).
        stretches: How many elements each sampled one stands for, shape (S,).
        used_of: The gradient that reached each optimizer, shape (S,).
        increments: One entry per backward pass.
    """
    optimizers = [at for at in target_of if at in used_of]
    if any(len(used_of[at]) != len(stretches[at]) for at in optimizers) or not optimizers:
        return None

    def flat(parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """All sampled elements; zeros for optimizers that a backward pass did not reach, or that took more since."""
        reached = {at: parts[at] for at in parts if at in optimizers and len(parts[at]) == len(stretches[at])}
        return torch.cat([reached.get(at, torch.zeros_like(stretches[at])) * stretches[at].sqrt() for at in optimizers])

    target, used = flat(target_of), flat(used_of)
    columns = torch.stack([flat(part) for part in increments], 1) if increments else target.new_zeros(len(target), 0)
    # One NaN would spread to all weights of the fit, and a target of zeros is fitted by any weights of zero.
    everything = torch.cat([target[None], used[None], columns.T])
    if not bool(torch.isfinite(everything).all()) or not bool(target.any()):
        return None
    return fit_weights(columns, target, used=used, singular=SINGULAR_FLOAT32)


def fit_terms(
    runs: tuple[RecordedRun, RecordedRun],
    alone: Sequence[tuple[RecordedRun, RecordedRun]],
    tolerance: float,
    update: int = 1,
) -> tuple[LossTerm, ...]:
    """Returns the terms that have a gradient; none unless those of all terms add up to what both runs had.

    Args:
        runs: The full-batch and the accumulated run.
        alone: The same with one term of each loss alone, in the order of the terms.
        tolerance: The relative difference that rounding leaves.
        update: The update that is looked at.
    """
    rounds = common_rounds(runs[0].events, runs[1].events)
    if len(rounds) < update:
        return ()
    round_ = rounds[update - 1]
    pairs = [tuple(run.samples(round_) for run in pair) for pair in alone]
    for at, run in enumerate(runs):
        # A term alone shows its part only if a script does nothing but add the terms up: clipping, say, is no sum.
        if not add_up(run.samples(round_), [pair[at] for pair in pairs], tolerance):
            return ()
    terms = []
    for number, (pair, (full, accumulated)) in enumerate(zip(alone, pairs, strict=True), 1):
        fit = fit_of(full, accumulated)
        passes = [
            event for event in pair[1].events if isinstance(event, Backward) and event.update in accumulated.updates
        ]
        # A term without gradient (a constant, a detached value) cannot be weighted wrongly.
        if fit is None or not passes:
            continue
        place = passes[-1].origin.term or (None, None)
        terms.append(LossTerm(number, len(alone), fit, _feels_samples(accumulated, tolerance), *place))
    return tuple(terms)


def _feels_samples(samples: Samples, tolerance: float) -> bool:
    """Whether a term's gradient depends on the samples: then it differs between micro-batches."""
    first, *following = samples.increments
    return any(
        float(torch.linalg.vector_norm(increment[at] - gradient))
        > tolerance * float(torch.linalg.vector_norm(gradient))
        for increment in following
        for at, gradient in first.items()
        if at in increment
    )


def add_up(total: Samples, parts: Sequence[Samples], tolerance: float) -> bool:
    """Whether the gradients of the parts add up to the total gradient, for every optimizer."""
    for at, gradient in total.summed_gradients.items():
        members = [
            part.summed_gradients[at] for part in parts if len(part.summed_gradients.get(at, ())) == len(gradient)
        ]
        # Measured by the sizes of the terms: where terms cancel, their rounding is large beside their sum.
        residual = float((gradient - sum(members)).norm())
        if len(members) < len(parts) or not residual <= tolerance * sum(float(member.norm()) for member in members):
            return False
    return bool(total.steps)


@dataclass(frozen=True)
class Runs:
    """The runs that are compared, and what their parameters are called."""

    full: RecordedRun
    perturbed: RecordedRun
    accumulated: RecordedRun
    names: Mapping[ParameterPlace, str]
    extra_perturbed: tuple[tuple[RecordedRun, float], ...] = ()
    """More runs with moved weights, and what their losses are multiplied by."""


@dataclass(frozen=True)
class ComparedRows:
    """One comparison of all parameters, and the noise of the whole gradient, relative."""

    parameters: tuple[ParameterComparison, ...]
    noise: float

    @property
    def outcome(self) -> Outcome:
        """All parameters together."""
        return outcome_of(self.parameters)

    def stage(self, stage: Stage) -> StageComparison:
        """Returns one comparison of a stage that sums up all rows."""
        # One parameter with NaN must not make the numbers of all others unreadable: its own row tells.
        rows = [row for row in self.parameters if math.isfinite(row.difference_norm)]
        size = math.hypot(*(row.reference_norm for row in rows))
        ratio = math.hypot(*(row.accumulated_norm for row in rows)) / size if size else math.nan
        difference = relative_total((row.difference_norm, row.reference_norm) for row in rows)
        return StageComparison(stage, self.outcome, difference, ratio)


def compare_gradients(
    runs: Runs, round_: Round, unit: float, terms: Mapping[ParameterPlace, float], *, summed: bool
) -> ComparedRows:
    """Returns every parameter's comparison at one of the two stages of gradients.

    Args:
        runs: The recorded runs.
        round_: The steps.
        unit: Unit roundoff of the coarsest arithmetic.
        terms: Σ_k ‖g_k‖ of every parameter: a sum whose terms cancel keeps their rounding.
        summed: At the first of the two.
    """
    full, accumulated = (run.gradients(round_, summed=summed) for run in (runs.full, runs.accumulated))
    places = list(dict.fromkeys([*full, *accumulated]))
    keys = {str(at): place for at, place in enumerate(places)}  # `measure` wants words
    reference = {key: full.get(place) for key, place in keys.items()}
    working = measure({key: accumulated.get(place) for key, place in keys.items()}, reference)
    norms = [run.norms(round_, summed=summed) for run in (runs.full, runs.accumulated)]
    shapes = runs.full.parameters
    working = [
        _complete(row, shapes[keys[row.name]][1], [norm.get(keys[row.name]) for norm in norms])
        if keys[row.name] in shapes
        else row
        for row in working
    ]
    floor = dict.fromkeys(keys, 0.0)
    # The largest difference counts: one run with moved weights may round alike by chance and measure no noise.
    for run, factor in ((runs.perturbed, 1.0), *runs.extra_perturbed):
        unmoved = full if run.role == runs.full.role else accumulated
        moved = run.gradients(round_, summed=summed)
        moved_by_key = {key: moved[place] / factor if place in moved else None for key, place in keys.items()}
        unmoved_by_key = {key: unmoved.get(place) for key, place in keys.items()}
        rows = [row for row in measure(moved_by_key, unmoved_by_key) if math.isfinite(row.difference)] if moved else []
        # A run that is far off under a factor was clipped, say: no rounding. All parameters together tell, because a
        # gradient that is zero in exact arithmetic is far off by rounding alone.
        if factor == 1.0 or relative_total((row.difference, row.reference) for row in rows) < COMPUTED_FLOAT32:
            floor |= {row.name: max(row.difference, floor[row.name]) for row in rows}
    noise = relative_total((floor[row.name], row.reference) for row in working)
    sizes = {key: terms.get(place, 0.0) for key, place in keys.items()}
    decided = judge_by_floor({row.name: row for row in working}, floor, sizes, unit)
    named = tuple(row._replace(name=runs.names[keys[row.name]]) for row in decided)
    return ComparedRows(named, noise)


def _complete(row: Difference, shape: tuple[int, ...], norms: Sequence[float | None]) -> Difference:
    """Returns what was measured of two sketches as what it says of the gradients, given their norms.

    Which element differs most is not known of a sketch.
    """
    reference, accumulated = norms
    if reference is None and accumulated is None:
        return row
    row = row._replace(shape=shape, worst=None)
    if reference is None or accumulated is None or not row.scale > 0.0 or not math.isfinite(row.difference):
        return row
    # A sketch is off by a few percent, and both norms by as much where one gradient is a multiple of the other.
    factor = max(reference, accumulated) / row.scale
    return row._replace(reference=reference, accumulated=accumulated, difference=row.difference * factor)


def terms_of(samples: Samples, fit: WeightFit | None) -> dict[ParameterPlace, float]:
    """Returns Σ_k ‖u_k g_k‖ of every parameter: the size of what was summed, in the units of the sum."""
    increments = samples.increments
    # Micro-batches that are divided by K enter the sum with 1/K, and so does their rounding.
    used = fit.used if fit is not None and len(fit.used) == len(increments) else (1.0,) * len(increments)
    sizes: dict[ParameterPlace, float] = {}
    for weight, increment in zip(used, increments, strict=True):
        for optimizer, change in increment.items():
            step = samples.steps[optimizer]
            squares = (change.square() * step.stretches).split(step.sizes)
            for at, square in enumerate(squares):
                sizes[optimizer, at] = sizes.get((optimizer, at), 0.0) + abs(weight) * math.sqrt(float(square.sum()))
    # An infinite size would allow any difference: without it the comparison itself finds the value not finite.
    return {place: size for place, size in sizes.items() if math.isfinite(size)}


def compare_changes(full: Samples, accumulated: Samples, unit: float, noise: float = 0.0) -> StageComparison | None:
    """Returns how far the changes of the weights are apart; None where no optimizer stepped in both runs.

    Args:
        full: The steps of the full-batch run.
        accumulated: Those of the accumulated run.
        unit: Unit roundoff of the coarsest arithmetic.
        noise: How far the gradients behind the steps may be apart, relative: 0 where both used the same.
    """
    before, after = full.of("before"), full.of("weights")
    own_before, own_after = accumulated.of("before"), accumulated.of("weights")
    common = [at for at in after if at in own_after and len(own_after[at]) == len(after[at])]
    if not common:
        return None
    reference = {at: after[at] - before[at] for at in common}
    actual = {at: own_after[at] - own_before[at] for at in common}
    size, own_size = full.norm(reference), full.norm(actual)
    difference = full.norm({at: actual[at] - reference[at] for at in common})
    scale = full.norm({at: after[at] for at in common})
    # Weights are rounded by their own size, not by that of their change: a small step loses most of its digits.
    allowed = FEW_UNITS * unit * scale + noise * max(size, own_size)
    outcome = Outcome.EQUIVALENT if difference <= allowed else Outcome.DIVERGENT
    # NaN in the weights: a comparison with NaN is false, which would read as a difference of the step.
    if not math.isfinite(difference):
        outcome = Outcome.INCONCLUSIVE
    relative = 0.0 if difference == 0.0 else difference / size if size else math.inf
    # The norm ratio tells a rate from a direction: a higher learning rate only makes the change longer.
    return StageComparison(Stage.CHANGE, outcome, relative, own_size / size if size else math.nan)


def is_led(samples: Samples) -> bool:
    """Whether every step used the full-batch run's gradients, so that what it made of them can be compared."""
    return bool(samples.steps) and all(step.led for step in samples.steps.values())


def clips_of(window: Window) -> tuple[Clip, ...]:
    """Returns the clippings after the last backward pass of a window."""
    # Clipping between micro-batches is another fault, with a rule of its own: it does not limit the sum.
    last = max((at for at, event in enumerate(window.events) if isinstance(event, Backward)), default=-1)
    step = max((at for at, event in enumerate(window.events) if isinstance(event, Step)), default=len(window.events))
    return tuple(
        Clip(
            event.call,
            event.active,
            norm=math.nan if event.norm is None else event.norm,
            limit=math.nan if event.limit is None else event.limit,
            after_step=at > step,
        )
        for at, event in enumerate(window.events)
        if at > last and isinstance(event, Clipping)
    )


def setting_differences(full: Samples, accumulated: Samples) -> tuple[SettingDifference, ...]:
    """Returns the settings that differ at the same steps; how many steps the optimizer has counted is one of them."""
    differences = []
    for at, step in full.steps.items():
        own_step = accumulated.steps.get(at)
        if own_step is None or len(own_step.settings) != len(step.settings):
            continue
        for group, (mine, theirs) in enumerate(zip(step.settings, own_step.settings, strict=True)):
            differences += [
                SettingDifference(at, group, name, value, theirs[name])
                for name, value in mine.items()
                if name in theirs and not math.isclose(value, theirs[name], rel_tol=SAME_IN_FLOAT32, abs_tol=TINY)
            ]
        # Adam divides by 1 - beta^t: one that has counted K times as many steps makes others of the same gradient.
        counted, own_counted = step.counted, own_step.counted
        if counted is not None and own_counted is not None and counted != own_counted:
            differences.append(SettingDifference(at, 0, "steps counted", counted, own_counted))
    return tuple(differences)


def decide_by_weights(rows: ComparedRows, fit: WeightFit | None, unit: float) -> ComparedRows:
    """Returns the rows decided by the fitted weights; unchanged in float32, and where the fit decides nothing.

    Args:
        rows: The measured differences, decided by the noise floor.
        fit: The fit of the gradients at the same stage.
        unit: Unit roundoff of the coarsest arithmetic.
    """
    # In float32 the noise floor is low enough; a fit with as many weights as elements explains anything.
    if unit <= U32 or fit is None or fit.vacuous or any(row.why is not None for row in rows.parameters):
        return rows
    size = math.hypot(*(row.reference_norm for row in rows.parameters))
    difference = relative_total((row.difference_norm, row.reference_norm) for row in rows.parameters)
    allowed = REST_UNITS * unit
    if not size > 0.0 or not math.isfinite(difference) or not fit.residual <= allowed:
        return rows
    # Rounding has no direction, so that other weights explain little of it; a wrong weight is explained wholly.
    explained = 1.0 - (fit.residual / difference) ** 2 if difference > 0.0 else 0.0
    if difference <= allowed and (difference <= LAST_DIGITS * unit or explained <= LITTLE):
        decided = [_by_weights(row, Outcome.EQUIVALENT, allowed * size) for row in rows.parameters]
    elif difference > allowed and explained > MOSTLY:
        # the weights are wrong for every parameter; a row shows it where it differs by more than rounding leaves
        limits = [fit.residual * max(row.reference_norm, row.accumulated_norm) for row in rows.parameters]
        decided = [
            _by_weights(row, Outcome.DIVERGENT if row.difference_norm > limit else Outcome.INCONCLUSIVE, limit)
            for row, limit in zip(rows.parameters, limits, strict=True)
        ]
    else:
        return rows
    return replace(rows, parameters=tuple(decided), noise=fit.residual)


def _by_weights(row: ParameterComparison, outcome: Outcome, allowed: float) -> ParameterComparison:
    return row._replace(outcome=outcome, method=Method.WEIGHTS, allowed=allowed)
