"""Where does the backward start to depend on the batch, although all forwards agree?

Gradients are compared at every module's outputs and inputs, sample by sample: with the right micro-batch weights the
gradient of sample i is the same number in the full batch and in its micro-batch.

Shapes: B samples, micro-batches of samples `start` to `stop - 1`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from gaverify.errors import GaverifyError
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import PassProbe
from gaverify.records.comparison import BackwardPlace, Comparison
from gaverify.records.experiment import Cause, ControlKind, ControlRun, Operation, Suspect, WeightFit
from gaverify.search import state, weights
from gaverify.search.bench import Bench, Intervention, find_needed
from gaverify.search.neutral import (
    PinnedConstants,
    PinnedGradients,
    PinnedOutputs,
    Registry,
    StraightThrough,
    WithoutHooks,
    WithoutTensorHooks,
)
from gaverify.search.trace.first_divergence import BoundaryGradients
from gaverify.search.trace.traces import Frame, locate_operation
from gaverify.thresholds import SAME_IN_FLOAT32, SAME_NUMBER
from gaverify.torch_internals import backward_hooks_of, gradient_hooks_of
from gaverify.tracebacks import display_path

T = TypeVar("T")


@dataclass(frozen=True)
class BackwardCulprit:
    """Where gradients that agreed start to differ."""

    place: BackwardPlace
    """The kind of place: a hook, a constant, a module or the loss."""
    operation: Operation
    """The operation or hook."""
    control: ControlRun | None
    """The run that neutralises it; None where none was possible."""


def ask(bench: Bench, comparison: Comparison) -> Comparison:
    """Looks for the place at which gradients start to differ although all forwards agree."""
    if not comparison.forward.shows_nothing:
        return comparison
    used = comparison.window.used
    # Gradients of a sample are the same number in both runs only with the right weights. The weights with which the
    # losses add up are right in the forward, and gradients must follow them.
    shares = comparison.forward.shares or used
    # The forwards agreed from the same state. Where the state changes between micro-batches, that is another cause,
    # and every gradient behind it would differ here.
    neutral = state.neutralise_state(comparison)
    trial = _Trial(bench.neutralise(*neutral, weights.weigh(shares)), comparison)
    # Hooks and constants come first, because their lines are known; a boundary only names a module.
    searches = (_try_parameter_hooks, _try_module_hooks, _try_tensor_hooks, _try_constants, _try_boundaries)
    places = (culprit for search in searches if (culprit := search(trial)) is not None)
    first_culprit = bench.attempt("backward", lambda: next(places, None))
    if first_culprit is None:
        return comparison
    is_proven = first_culprit.control is not None and first_culprit.control.proves
    if is_proven:
        comparison = replace(comparison, forward=replace(comparison.forward, causes=()))
    elif not comparison.forward.agree:
        return comparison
    if is_proven and neutral and comparison.state is not None:
        comparison = replace(comparison, state=state.blame_beside_control(bench, comparison.state))
    if comparison.state is not None and comparison.state.blamed and first_culprit.place is BackwardPlace.CONSTANT:
        # The losses agreed only because the state was neutralised. A detached value of moving state changes the forward
        # too, so that the cause belongs to the loss and not to its backward.
        suspect = Suspect(
            "non-additive", first_culprit.operation, None, comparison.left, 0, in_model=False, statistics=False
        )
        forward = replace(comparison.forward, causes=(Cause(suspect, first_culprit.control),), agree=False)
        return replace(
            comparison, forward=forward, left=first_culprit.control.left if first_culprit.control else 0.0, cleared=True
        )
    backward_facts = replace(
        comparison.backward, place=first_culprit.place, culprit=first_culprit.operation, control=first_culprit.control
    )
    comparison = replace(comparison, backward=backward_facts)
    if first_culprit.control is None or not is_proven:
        return comparison
    fit, difference_left = first_culprit.control.fit, first_culprit.control.left
    right = fit.weights if fit is not None and weights.is_meaningful(bench, comparison, fit) else shares
    comparison = replace(comparison, left=difference_left, cleared=True)
    # The control ran with other weights than the user's: these are a second cause, and a repair beside the first.
    if all(math.isclose(c, w, rel_tol=SAME_NUMBER) for c, w in zip(right, used, strict=True)):
        return comparison
    noise = comparison.window.fit.noise if comparison.window.fit is not None else math.nan
    fit = WeightFit(tuple(right), difference_left, determined=True, noise=noise)
    remedy = ControlRun("with these weights", difference_left, True, kind=ControlKind.WEIGHTS)
    return replace(comparison, window=replace(comparison.window, fit=fit, remedy=remedy))


@dataclass(frozen=True)
class _Trial:
    """Runs controls in which wrong weights cannot hide that the suspect matters."""

    bench: Bench
    comparison: Comparison

    def run(self, intervention: Intervention) -> ControlRun | None:
        """The control run, with the weights that were right in it; None where it was impossible."""
        try:
            control = self.bench.run(intervention, fit=True)
            fit = control.fit
            if control.rounding or fit is None or not weights.is_meaningful(self.bench, self.comparison, fit):
                return control
            return replace(self.bench.neutralise(weights.weigh(fit.weights)).run(intervention), fit=fit)
        except GaverifyError:  # each search tries many probes: one that does not fit this model is nothing to report
            return None

    def find_needed(
        self, items: Sequence[T], control: Callable[[Sequence[T]], ControlRun | None]
    ) -> tuple[T, ControlRun] | None:
        """Returns the first item that has to be neutralised, with the control run of all such items.

        None without items, or where neutralising all of them with `control` leaves more than rounding.
        """
        control_run = control(items)
        if control_run is None or not control_run.proves:
            return None
        # hooks that change nothing must not be named beside the one that does
        needed = [entry.item for entry in find_needed(items, control)] if len(items) > 1 else items
        return needed[0], (control(needed) if len(needed) < len(items) else None) or control_run


def _try_parameter_hooks(trial: _Trial) -> BackwardCulprit | None:
    return _try_hooks(trial, _list_parameter_hooks, BackwardPlace.PARAMETER_HOOK, "gradient hook", "parameters")


def _try_module_hooks(trial: _Trial) -> BackwardCulprit | None:
    return _try_hooks(trial, _list_module_hooks, BackwardPlace.MODULE_HOOK, "backward hook", "modules")


def _list_parameter_hooks(experiment: Experiment) -> dict[str, list[Registry]]:
    """Parameter → its registries of hooks, where these hold any."""
    named = experiment.parameters.items()
    return {name: registries for name, p in named if any(registries := gradient_hooks_of(p))}


def _list_module_hooks(experiment: Experiment) -> dict[str, list[Registry]]:
    """Path of a module → its registries of hooks, where these hold any."""
    named = experiment.named_modules()
    return {path: registries for path, module in named if any(registries := backward_hooks_of(module))}


def _try_hooks(
    trial: _Trial,
    list_hooks: Callable[[Experiment], dict[str, list[Registry]]],
    place: BackwardPlace,
    name: str,
    on: str,
) -> BackwardCulprit | None:
    """Removes the hooks of some parameters, or of some modules."""
    hooked = list(list_hooks(trial.bench.experiment))
    owners = {each: each.rpartition(".")[0] if place is BackwardPlace.PARAMETER_HOOK else each for each in hooked}

    def control(some: Sequence[str]) -> ControlRun | None:
        some_hooks = f"the {name}s on {', '.join(f'`{owners[each]}`' for each in some)}"
        what = some_hooks if len(some) < len(hooked) else f"{name}s on {on}"
        remove = Intervention(f"{what} removed", probe=partial(_remove_hooks, list_hooks, some))
        return trial.run(remove) if some else None

    needed = trial.find_needed(hooked, control)
    if needed is None:
        return None
    path, run = owners[needed[0]], needed[1]
    module = dict(trial.bench.experiment.named_modules()).get(path)
    kind = type(module).__name__ if module is not None else ""
    return BackwardCulprit(place, Operation(name, path, kind), run)


def _remove_hooks(
    list_hooks: Callable[[Experiment], dict[str, list[Registry]]], owners: Sequence[str], experiment: Experiment
) -> PassProbe:
    hooks = list_hooks(experiment)
    return WithoutHooks([registry for owner in owners for registry in hooks[owner]])


def _try_tensor_hooks(trial: _Trial) -> BackwardCulprit | None:
    leave_out = Intervention("gradient hooks on tensors left out", probe=WithoutTensorHooks)
    leave_out = leave_out.share_probe(trial.bench.experiment)
    without, probe = trial.run(leave_out), leave_out.shared
    if without is None or not without.proves or not isinstance(probe, WithoutTensorHooks):
        return None
    return BackwardCulprit(
        BackwardPlace.TENSOR_HOOK, locate_operation("gradient hook on a tensor", probe.frames[0]), without
    )


def _try_constants(trial: _Trial) -> BackwardCulprit | None:
    pin = Intervention("the values that the forward detaches kept constant", probe=PinnedConstants)
    pin = pin.share_probe(trial.bench.experiment)
    constants_run, probe = trial.run(pin), pin.shared
    if constants_run is None or not constants_run.proves or not isinstance(probe, PinnedConstants):
        return None
    frames = probe.frames

    def control(some: Sequence[Frame]) -> ControlRun | None:
        if len(some) == len(frames):
            return constants_run
        what = "the values that this line detaches kept constant"
        return trial.run(Intervention(what, probe=partial(PinnedConstants, only=some)))

    needed = trial.find_needed(frames, control)
    return needed and BackwardCulprit(
        BackwardPlace.CONSTANT, locate_operation("constant of the batch", needed[0]), needed[1]
    )


def _try_boundaries(trial: _Trial) -> BackwardCulprit | None:
    """Compares the gradients at the boundaries of modules and custom functions."""
    listener, bench = BoundaryGradients(trial.bench), trial.bench
    bench.experiment.micro_batches(bench.experiment.full_batch(listener), listener)
    call = _find_diverging_call(listener)
    if call is None:
        outermost = (listener.worst.get(call, {}).get("outputs", 0.0) for call in listener.outermost)
        if not any(difference > SAME_IN_FLOAT32 for difference in outermost):
            return None
        # Gradients that differ before any module was reached come from the loss, of which no part can be neutralised.
        return BackwardCulprit(BackwardPlace.LOSS, _locate_loss(bench), None)
    experiment = bench.experiment
    if call in listener.functions:
        position, kind, frame = listener.functions[call]
        probe_types = {
            f"gradients passed through `{kind}` unchanged": StraightThrough,
            f"the full batch's gradients in the place of what `{kind}` computes": PinnedGradients,
        }
        tries = (
            trial.run(Intervention(what, probe=partial(change_gradients, position=position)))
            for what, change_gradients in probe_types.items()
        )
        runs = [run for run in tries if run is not None]
        control = next((run for run in runs if run.proves), next(iter(runs), None))
        operation = locate_operation("backward", frame, listener.paths.get(call), kind)
        return BackwardCulprit(BackwardPlace.MODULE, operation, control)
    path = listener.paths[call]
    module = dict(experiment.named_modules())[path]
    what = f"outputs and gradients of `{path or '(root)'}` replaced by the full batch's"
    control = trial.run(Intervention(what, probe=partial(PinnedOutputs, path=path, with_gradients=True)))
    # the values agree; that the gradients differ, which it pins too, was measured at the boundaries
    control = control and replace(control, values_differed=True)
    return BackwardCulprit(BackwardPlace.MODULE, Operation("backward", path, type(module).__name__), control)


def _find_diverging_call(listener: BoundaryGradients) -> int | None:
    """The innermost call whose output gradients agree and whose input gradients do not."""
    culprits = [
        call
        for call, sides in listener.worst.items()
        # A custom function that returns the loss has no rows at its output: the gradient there is the loss's weight.
        if ("outputs" in sides or call in listener.functions)
        and sides.get("outputs", 0.0) <= SAME_IN_FLOAT32 < sides.get("inputs", 0.0)
    ]
    return max(culprits) if culprits else None  # the innermost call was entered last


def _locate_loss(bench: Bench) -> Operation:
    code = getattr(bench.experiment.problem.loss, "__code__", None)
    if code is None:  # a callable object or a builtin has no line of its own
        return Operation("backward of the loss")
    return Operation("backward of the loss", file=display_path(code.co_filename), line=code.co_firstlineno)
