"""Where does the backward start to depend on the batch, although all forwards agree?

Gradients are compared at every module's outputs and inputs, sample by sample: with the right micro-batch weights the
gradient of sample i is the same number in the full batch and in its micro-batch.

Shapes: B samples, micro-batches of samples `start` to `stop - 1`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn

from gaverify.causes import weights
from gaverify.causes.bench import Bench
from gaverify.causes.narrowing import released
from gaverify.causes.neutral.holding import (
    ApplicationHeld,
    ConstantsHeld,
    GradientsHeld,
    GradientsPassed,
    OutputHeld,
)
from gaverify.causes.neutral.hooks import (
    WithoutHooks,
    WithoutTensorHooks,
    module_registries,
    parameter_registries,
)
from gaverify.causes.trace.backward_listening import GradientListener
from gaverify.causes.trace.traces import Frame, source_line
from gaverify.errors import GaverifyError
from gaverify.passes.gradients import PassProbe
from gaverify.records.experiment import ControlKind, ControlRun
from gaverify.records.facts import Backward, BackwardPlace, Facts
from gaverify.records.operations import Operation
from gaverify.records.weights import WeightFit
from gaverify.thresholds import SAME_IN_FLOAT32, SAME_NUMBER
from gaverify.tracebacks import shown

T = TypeVar("T")


@dataclass(frozen=True)
class BackwardCulprit:
    """Where gradients that agreed stop to agree, with the control run that neutralises it, where one was possible."""

    place: BackwardPlace
    operation: Operation
    control: ControlRun | None


def ask(bench: Bench, facts: Facts, known: Backward | None = None) -> Facts:
    """Looks for the place where gradients part, where all forwards agree, with weights that fit the losses.

    Args:
        bench: Where to run.
        facts: What is known.
        known: What was found in a part of the batch: nothing but that is tried.
    """
    if facts.forward.causes or not facts.forward.agree:
        return facts
    used = facts.weights.used
    shares = facts.forward.shares or used
    trial = _Trial(bench.weighted(shares), facts, known.culprit if known is not None else None)
    # hooks and constants come first, because their lines are known
    searches = dict.fromkeys(_SEARCHES.values() if known is None or known.place is None else (_SEARCHES[known.place],))
    places = (culprit for search in searches if (culprit := search(trial)) is not None)
    found = bench.attempt("backward", lambda: next(places, None))
    if found is None:
        return facts
    parts = replace(facts.backward, place=found.place, culprit=found.operation, control=found.control)
    facts = replace(facts, backward=parts)
    if found.control is None or not found.control.rounding:
        return facts
    fit, left = found.control.fit, found.control.left
    right = fit.weights if fit is not None and weights.means(bench, facts, fit) else shares
    facts = replace(facts, left=left, cleared=True)
    if all(math.isclose(c, w, rel_tol=SAME_NUMBER) for c, w in zip(right, used, strict=True)):
        return facts
    noise = facts.weights.fit.noise if facts.weights.fit is not None else math.nan
    fit = WeightFit(tuple(right), left, determined=True, noise=noise)
    remedy = ControlRun("with these weights", left, True, kind=ControlKind.WEIGHTS)
    return replace(facts, weights=replace(facts.weights, fit=fit, remedy=remedy))


@dataclass(frozen=True)
class _Trial:
    """Runs controls; wrong weights beside the culprit do not hide that one helps.

    `known` is the culprit that was found in a part of the batch: it is tried alone before others like it are.
    """

    bench: Bench
    facts: Facts
    known: Operation | None = None

    def run(self, what: str, probe: PassProbe) -> ControlRun | None:
        """The control run, with the weights that were right in it; None where nothing is left to compare."""
        try:
            control = self.bench.run(what, probe, fit=True)
            fit = control.fit
            if control.rounding or fit is None or not weights.means(self.bench, self.facts, fit):
                return control
            return replace(self.bench.weighted(fit.weights).run(what, probe), fit=fit)
        except GaverifyError:
            return None

    def narrowed(
        self,
        items: Sequence[T],
        together: ControlRun,
        control: Callable[[Sequence[T]], ControlRun | None],
        is_it: Callable[[Operation, T], bool],
    ) -> tuple[T, ControlRun]:
        """Returns the first of several things that is needed, with the control run of all that are.

        Args:
            items: What was neutralised together.
            together: That control run.
            control: Runs with some of them neutralised.
            is_it: Whether one of them is the culprit that a part of the batch showed.
        """

        def run(some: Sequence[T]) -> ControlRun | None:
            return control(some) if some else None

        known = [item for item in items if self.known is not None and is_it(self.known, item)]
        alone = run(known) if len(known) < len(items) else None
        if alone is not None and alone.rounding:
            items, together = known, alone
        needed = [entry.item for entry in released(items, run)] if len(items) > 1 else items
        return needed[0], (run(needed) if len(needed) < len(items) else None) or together


def _parameter_hooks(trial: _Trial) -> BackwardCulprit | None:
    hooked = {name: p for name, p in trial.bench.task.parameters.items() if any(parameter_registries(p))}
    registries = [registry for parameter in hooked.values() for registry in parameter_registries(parameter)]
    if not registries:
        return None
    without = trial.run("gradient hooks on parameters removed", WithoutHooks(registries))
    if without is None or not without.rounding:
        return None
    owner = next(iter(hooked)).rpartition(".")[0]
    module = dict(trial.bench.task.named_modules()).get(owner)
    kind = type(module).__name__ if module is not None else ""
    return BackwardCulprit(BackwardPlace.PARAMETER_HOOK, Operation("gradient hook", owner, kind), without)


def _module_hooks(trial: _Trial) -> BackwardCulprit | None:
    hooked = [(path, module) for path, module in trial.bench.task.named_modules() if any(module_registries(module))]
    if not hooked:
        return None
    registries = [registry for _, module in hooked for registry in module_registries(module)]
    without = trial.run("backward hooks on modules removed", WithoutHooks(registries))
    if without is None or not without.rounding:
        return None

    def control(some: Sequence[tuple[str, nn.Module]]) -> ControlRun | None:
        names = ", ".join(f"`{path}`" for path, _ in some)
        probe = WithoutHooks([registry for _, module in some for registry in module_registries(module)])
        return trial.run(f"the backward hooks on {names} removed", probe)

    (path, module), run = trial.narrowed(hooked, without, control, lambda known, hook: known.module == hook[0])
    return BackwardCulprit(BackwardPlace.MODULE_HOOK, Operation("backward hook", path, type(module).__name__), run)


def _tensor_hooks(trial: _Trial) -> BackwardCulprit | None:
    probe = WithoutTensorHooks()
    without = trial.run("gradient hooks on tensors left out", probe)
    if without is None or not without.rounding or not probe.frames:
        return None
    return BackwardCulprit(BackwardPlace.TENSOR_HOOK, _at("gradient hook on a tensor", probe.frames[0]), without)


def _constants(trial: _Trial) -> BackwardCulprit | None:
    probe = ConstantsHeld(trial.bench.task)
    held = trial.run("what the forward cuts out of the graph held constant", probe)
    if held is None or not held.rounding or not probe.frames:
        return None

    def control(some: Sequence[Frame]) -> ControlRun | None:
        return trial.run("what this line cuts out of the graph held constant", ConstantsHeld(trial.bench.task, some))

    line, run = trial.narrowed(probe.frames, held, control, lambda known, f: _at("", f).location == known.location)
    return BackwardCulprit(BackwardPlace.CONSTANT, _at("constant of the batch", line), run)


def _at(name: str, frame: Frame) -> Operation:
    if frame is None:
        return Operation(name)
    return Operation(name, file=shown(frame[0]), line=frame[1], source=source_line(frame))


def _boundaries(trial: _Trial) -> BackwardCulprit | None:
    """Compares the gradients at the boundaries of modules and custom functions."""
    listener, bench = GradientListener(trial.bench), trial.bench
    bench.accumulated(bench.full_batch(listener), listener)
    call = _diverging_call(listener)
    if call is None:
        if not _starts_in_the_loss(listener):
            return None
        return BackwardCulprit(BackwardPlace.LOSS, _loss_function(bench), None)
    task = bench.task
    if call in listener.functions:
        position, kind, frame = listener.functions[call]
        what = {
            f"the result of `{kind}` held constant": ApplicationHeld,
            f"gradients passed through `{kind}` unchanged": GradientsPassed,
            f"the full batch's gradients in the place of what `{kind}` computes": GradientsHeld,
        }
        runs = (trial.run(words, held(task, position)) for words, held in what.items())
        control = next((run for run in runs if run is not None), None)
        operation = replace(_at("backward", frame), module=listener.paths.get(call), kind=kind)
        return BackwardCulprit(BackwardPlace.MODULE, operation, control)
    path = listener.paths[call]
    module = dict(task.named_modules())[path]
    control = trial.run(f"the output of `{path or '(root)'}` held constant", OutputHeld(task, module))
    return BackwardCulprit(BackwardPlace.MODULE, Operation("backward", path, type(module).__name__), control)


_SEARCHES: dict[BackwardPlace, Callable[[_Trial], BackwardCulprit | None]] = {
    BackwardPlace.PARAMETER_HOOK: _parameter_hooks,
    BackwardPlace.MODULE_HOOK: _module_hooks,
    BackwardPlace.TENSOR_HOOK: _tensor_hooks,
    BackwardPlace.CONSTANT: _constants,
    BackwardPlace.MODULE: _boundaries,
    BackwardPlace.LOSS: _boundaries,
}


def _diverging_call(listener: GradientListener) -> int | None:
    """The innermost call whose output gradients agree and whose input gradients do not.

    A custom function that returns the loss has no output gradients to compare: that of a loss is its weight.
    """
    culprits = [
        call
        for call, sides in listener.worst.items()
        if ("outputs" in sides or call in listener.functions)
        and sides.get("outputs", 0.0) <= SAME_IN_FLOAT32 < sides.get("inputs", 0.0)
    ]
    return max(culprits) if culprits else None  # the innermost call was entered last


def _starts_in_the_loss(listener: GradientListener) -> bool:
    """Whether the gradients that reach the outermost modules differ already."""
    return any(listener.worst.get(call, {}).get("outputs", 0.0) > SAME_IN_FLOAT32 for call in listener.outermost)


def _loss_function(bench: Bench) -> Operation:
    code = getattr(bench.task.problem.loss, "__code__", None)
    if code is None:
        return Operation("backward of the loss")
    return Operation("backward of the loss", file=shown(code.co_filename), line=code.co_firstlineno)
