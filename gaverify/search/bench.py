"""Control runs: both strategies again, with a suspect neutralised in both.

A suspect is the cause when the difference falls to rounding without it. Matching the forward of one run alone proves
nothing: with full-batch statistics as constants in it, gradients stay 0.4 to 1.2 off (CONTRIBUTING.md has the figures).
So every control here changes the full batch and the micro-batches alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from gaverify.errors import GaverifyError
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import (
    Gradients,
    PassProbe,
    PassResult,
)
from gaverify.passes.layouts import SampleLayout, real_numbers
from gaverify.passes.precision import widest
from gaverify.passes.sketches import sketch
from gaverify.records.experiment import ControlKind, ControlRun
from gaverify.records.outcomes import NotCompared, relative_total
from gaverify.thresholds import CAPPED_UNITS, COMPUTED_FLOAT32, SAME_IN_FLOAT32, SMALL_PART, U32
from gaverify.torch_internals import tree_flatten, tree_leaves, tree_unflatten
from gaverify.verdict.comparison import measure
from gaverify.verdict.control import failure_sentence
from gaverify.verdict.criteria import Difference
from gaverify.verdict.sketches import SketchedPass, Sketches, Sums, fit_runs

# The rows of a micro-batch in a tensor of the full batch.
#
# Shapes: B samples, micro-batches of samples `start` to `stop - 1`; a tensor may hold m rows per sample.


class ControlFailed(GaverifyError):
    """A control run that could not be made; the message says why."""


def take_rows_of_all(value: Any, result: Any, start: int, stop: int, size: int, order: int | None = None) -> Any:
    """Returns the rows of a micro-batch for every tensor of a result; `order` as in `take_rows`.

    Raises:
        ControlFailed: The micro-batch's result has another form.
    """
    full_leaves, (parts, form) = tree_leaves(value), tree_flatten(result)
    if len(full_leaves) != len(parts):
        raise ControlFailed("the micro-batches' results have another form than the full batch's")
    rows = [
        take_rows(old, new, start, stop, size, order=order) if isinstance(new, torch.Tensor) else new
        for old, new in zip(full_leaves, parts, strict=True)
    ]
    return tree_unflatten(rows, form)


def take_rows(
    value: torch.Tensor,
    part: torch.Tensor,
    start: int,
    stop: int,
    size: int,
    cotangent: torch.Tensor | None = None,
    order: int | None = None,
) -> torch.Tensor:
    """Returns the rows of samples `start` to `stop - 1` of a full-batch tensor, in the shape of the micro-batch's.

    A dimension with several rows per sample may hold the samples as its outer or as its inner index (two views of a
    batch, one after the other). If the order is not known, the reading that comes closer to the micro-batch's own
    values is taken.

    Args:
        value: The full batch's tensor.
        part: The micro-batch's tensor.
        start: The first sample.
        stop: One past the last sample.
        size: B.
        cotangent: Takes its rows in place of those of `value`, which has its shape.
        order: 0: the samples are the outer index; 1: the inner one; None: not known.

    Raises:
        ControlFailed: The shapes do not correspond.
    """
    wanted = value if cotangent is None else cotangent
    # Equal shapes: the tensor has no rows of samples (statistics, a scalar), so that each micro-batch gets all of it.
    if value.shape == part.shape:
        return wanted.clone()
    # The same folded dimension can be read in two ways, and both give tensors of the wanted shape.
    readings = list(_list_readings(value, part.shape, start, stop, size))
    if len(readings) > 1 and order is not None:
        readings = [readings[order]]
    elif len(readings) > 1:
        full_numbers, part_numbers = (real_numbers(tensor).to(widest(tensor.device)) for tensor in (value, part))
        readings.sort(key=lambda take: float((take(full_numbers) - part_numbers).abs().sum()))
    return readings[0](wanted).clone()


def _list_readings(
    value: torch.Tensor, shape: Sequence[int], start: int, stop: int, size: int
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yields how the rows may be taken: with the samples as the outer, and where that differs as the inner index."""
    layout = SampleLayout.find(value.shape, shape, size, stop - start)
    if layout is None or layout.kind not in ("rows", "matrix"):
        raise ControlFailed(f"shapes {list(value.shape)} and {list(shape)} do not correspond")
    samples = range(start, stop)
    yield partial(layout.take, samples=samples, batch_size=size)
    if max(dimension.fold for dimension in layout.dimensions) > 1:
        yield partial(layout.inside.take, samples=samples, batch_size=size)


# Control runs: both strategies again, with a suspect neutralised in both.


T = TypeVar("T")

# These errors are no fault of gaverify's: the user's code raised, a control does not fit, no memory.
FORESEEN = (GaverifyError, torch.OutOfMemoryError, MemoryError)


@dataclass(frozen=True)
class Intervention:
    """A way to neutralise a suspect or to repair it: a value that holds on any experiment of the same problem.

    The first samples' cause is confirmed by running its own intervention on all of the batch, and on another one.
    """

    what: str
    """It in words, for reports: "layer `1` in evaluation mode"."""
    kind: ControlKind = ControlKind.RESULT_PINNED
    """The same for rules."""
    probe: Callable[[Experiment], PassProbe] | None = None
    """Makes the probe for an experiment, anew for each run."""
    change: Callable[[Experiment], Experiment] | None = None
    """Returns the experiment with what no probe can change: its weights or its micro-batches."""
    accumulate: Callable[[Experiment], Callable[[PassResult], Gradients]] | None = None
    """Makes ready, before the full batch's pass, what accumulates beside it; None: one micro-batch after the other."""
    in_reference: bool = True
    """Whether the full batch is changed too, as by a control; a repair changes the micro-batches alone."""
    modules: tuple[str, ...] = ()
    """The modules that it neutralises together."""
    changes: tuple[Any, ...] = ()
    """The same for the runs of a script (`Change` of audits); empty: only the probes of a process can make it."""
    shared: PassProbe | None = None
    """A probe for all of its runs, which keeps what it saw, such as values of the full batch; None: each makes one."""

    def share_probe(self, experiment: Experiment) -> Intervention:
        """The same with one probe for all of its runs."""
        return self if self.probe is None else replace(self, shared=self.probe(experiment))

    def apply_to(self, experiment: Experiment) -> Experiment:
        """The experiment with this changed in every pass."""
        if self.change is not None:
            experiment = self.change(experiment)
        if self.probe is None:
            return experiment
        return experiment.with_probes(self.shared if self.shared is not None else self.probe(experiment))


@dataclass(frozen=True)
class Bench:
    """Where control runs happen: an experiment in the deciding precision, and what its runs are compared with."""

    experiment: Experiment
    """The experiment that is run; its probes neutralise something in every run."""
    failures: dict[str, str] = field(default_factory=dict)
    """Question → why it could not be asked."""
    reference: SketchedPass | None = None
    """A pass of the full batch that was made before, with nothing neutralised."""
    total: float = math.inf
    """The relative difference that is looked into."""
    floor: float = 0.0
    """Measured rounding, as a share of the gradient, below float32; 0 elsewhere."""
    live: Bench | None = None
    """The bench with the draws as they are, where this one holds them constant."""
    divergent: frozenset[str] = frozenset()
    """The parameters whose gradients differ, which every control has to keep connected to the loss."""
    in_part: bool = False
    """Whether the batch is the first samples of a larger one, on all of which causes and their repairs run again."""

    @property
    def watch(self) -> PassProbe | None:
        """The probe of earlier passes of the same forwards; None where these neutralise something now."""
        return self.reference.watch if self.reference is not None and not self.experiment.probes else None

    def attempt(self, name: str, ask: Callable[[], T]) -> T | None:
        """Returns what `ask` finds; None where the user's code, a kernel or memory did not let it, which is noted."""
        try:
            return ask()
        except FORESEEN as error:
            self.failures[name] = failure_sentence(error)
            return None

    def possible(self, ask: Callable[[], T]) -> T | None:
        """Returns what `ask` finds; None where it could not be asked, which is nothing to note."""
        try:
            return ask()
        except FORESEEN:
            return None

    def neutralise(self, *interventions: Intervention) -> Bench:
        """The bench with some things changed in every run."""
        experiment = self.experiment
        for intervention in interventions:
            experiment = intervention.apply_to(experiment)
        return replace(self, experiment=experiment)

    @property
    def rounding(self) -> float:
        """The relative difference that rounding explains; at most a small share of a small difference."""
        if self.experiment.is_float64:
            return CAPPED_UNITS * U32
        if self.floor:
            return self.floor
        return min(COMPUTED_FLOAT32, max(SAME_IN_FLOAT32, SMALL_PART * self.total))

    def run(self, *interventions: Intervention, fit: bool = False, exactly: bool = True) -> ControlRun:
        """Runs both strategies with something changed; says what difference is left, and whether that shows anything.

        Args:
            interventions: The changes; the last one names the run.
            fit: Whether to fit the weights that would be right in this run.
            exactly: Whether what a repair leaves is measured where it is more than rounding (`against_full_batch`).

        Raises:
            ControlFailed: An intervention does not fit, or nothing is left to compare.
        """
        last = interventions[-1]
        self.experiment.progress(f"control: {last.what}")
        repairs = [each for each in interventions if not each.in_reference]
        neutral_bench = self.neutralise(*(each for each in interventions if each.in_reference))
        repaired_bench = neutral_bench.neutralise(*repairs)
        prepared = [each.accumulate(repaired_bench.experiment) for each in repairs if each.accumulate is not None]
        sketches, cut_off = list[Sketches](), list[str]()

        def accumulate(full: PassResult) -> Gradients:
            if prepared:
                return prepared[-1](full)
            if fit:
                pass_sketches, accumulated = repaired_bench.sketch_micro_batches(full)
                sketches.append(pass_sketches)
            else:
                accumulated = repaired_bench.experiment.micro_batches(full)
            passes = full.gradients, accumulated.gradients
            cut_off[:] = (name for name in self.divergent if all(gradients.get(name) is None for gradients in passes))
            return accumulated.gradients

        if repairs:
            difference_left = neutral_bench.against_full_batch(accumulate, exactly=exactly)
            cut_off.clear()  # an earlier pass of the full batch keeps no gradients
        else:  # the full batch is changed, too
            neutral_bench = replace(neutral_bench, reference=None)
            difference_left = neutral_bench.against_full_batch(accumulate, f"with {last.what} every gradient")
        probes = neutral_bench.experiment.probes[len(self.experiment.probes) :]
        pinned = [probe.values_differed for probe in probes if probe.values_differed is not None]
        return ControlRun(
            last.what,
            difference_left,
            difference_left <= self.rounding,
            fit_runs(sketches) if sketches else None,
            last.kind,
            values_differed=any(pinned) if pinned else None,
            cut_off=tuple(sorted(cut_off)),
            modules=last.modules,
            # without their probes, which may keep values of the full batch
            interventions=tuple(replace(each, shared=None) for each in interventions),
        )

    def against_full_batch(
        self,
        accumulate: Callable[[PassResult], Gradients],
        compared: str = "every gradient of the full batch",
        *,
        exactly: bool = True,
    ) -> float:
        """Returns how far what a repair accumulates is from the gradient of the full batch, which it leaves as it is.

        An earlier pass of the full batch is not run again where its sketch shows that nothing but rounding is left.

        Args:
            accumulate: Runs the repaired micro-batches; it is given the full-batch pass, perhaps without gradients.
            compared: The words for the gradients that it is compared with, for an error.
            exactly: Whether more than rounding is measured; else the sketch tells its size to a few percent.
        """
        reference, accumulated = self.reference, None
        if reference is not None and not self.experiment.probes and reference.comparable:
            accumulated = accumulate(reference.full)
            difference_left = reference.difference(accumulated)
            if difference_left <= self.rounding or not exactly:
                return difference_left
        full = self.experiment.full_batch()
        if not _any(full.gradients):
            raise ControlFailed(f"{compared} is zero, so that nothing is left to compare")
        return self.relative_difference(accumulated if accumulated is not None else accumulate(full), full.gradients)

    def relative_difference(self, accumulated: Gradients, reference: Gradients) -> float:
        """Returns ‖accumulated − reference‖ / ‖reference‖ of all parameters; infinite where they cannot be compared."""
        return _total(measure(accumulated, reference, self.experiment.ranks))

    def sketch_micro_batches(
        self, full: PassResult, *probes: PassProbe, target: torch.Tensor | None = None
    ) -> tuple[Sketches, PassResult]:
        """Accumulates once more, with a sketch of every micro-batch's gradient; `target` is the full batch's, if known.

        That pass's own gradients are then freed.
        """
        if target is None and self.reference is not None and full is self.reference.full:
            target = self.reference.gradient
        if target is not None:
            full.gradients = dict.fromkeys(full.gradients)
        target = sketch(full.gradients.values(), self.experiment.ranks) if target is None else target
        sums, experiment = Sums(self.experiment), self.experiment.with_backwards_apart()
        accumulated = experiment.micro_batches(full, *probes, after_backward=sums.note)
        shares = sums.shares(target, accumulated.weights)
        if all(accumulated.weights):
            return shares, accumulated
        # A micro-batch with weight 0 leaves nothing in `.grad`: what it would have given shows with another weight.
        sums, weights = Sums(self.experiment), [weight or 1.0 for weight in accumulated.weights]
        experiment.with_weights(weights).micro_batches(full, *probes, after_backward=sums.note)
        return replace(shares, columns=sums.shares(target, weights).columns), accumulated


def _any(gradients: Gradients) -> bool:
    present = (g.to_dense() if g.layout is not torch.strided else g for g in gradients.values() if g is not None)
    return any(bool(gradient.any()) for gradient in present)


def _total(measured: Sequence[Difference]) -> float:
    rows = [row for row in measured if row.why is not NotCompared.UNUSED]
    if any(math.isnan(row.difference) for row in rows) or not any(row.reference > 0 for row in rows):
        return math.inf
    return relative_total((row.difference, row.reference) for row in rows)


_FEW = 5  # things that are released one by one from the start; of more, halves are released first


@dataclass(frozen=True)
class Needed(Generic[T]):
    """Something that cannot be released: the difference that it makes while the others stay neutralised.

    NaN where the run without it was impossible.
    """

    item: T
    alone: float


def find_needed(
    items: Sequence[T], control: Callable[[list[T]], ControlRun | None], keep: Callable[[T], bool] = lambda _: False
) -> list[Needed[T]]:
    """Releases one by one what was neutralised together; what is not needed beside the others stays released.

    Args:
        items: All together bring the difference to rounding. Those that are the likelier causes come last.
        control: Runs with these neutralised and whatever is neutralised beside them; None where that is impossible or
            would tell nothing.
        keep: Items that stay neutralised although the others are enough: they are causes for other reasons.

    Returns:
        The items that are needed, in the order of `items`.
    """
    neutralised, differences = list(range(len(items))), dict[int, float]()

    def release(group: list[int]) -> None:
        remaining = [place for place in neutralised if place not in group]
        run = control([items[place] for place in remaining])
        if run is not None and run.rounding and not any(keep(items[place]) for place in group):
            neutralised[:] = remaining
        elif len(group) > 1:
            release(group[: len(group) // 2])
            release(group[len(group) // 2 :])
        else:
            differences[group[0]] = run.left if run is not None and not run.rounding else math.nan

    if len(items) > _FEW:
        release(neutralised[:])
    else:
        for place in neutralised[:]:
            release([place])
    return [Needed(items[place], differences[place]) for place in neutralised]
