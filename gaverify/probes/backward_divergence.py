"""Where does the backward start to depend on the batch, although all forwards agree?

Gradients are compared at every module's outputs and inputs, sample by sample: with the right micro-batch weights the
gradient of sample i is the same number in the full batch and in its micro-batch.

Shapes: B samples, micro-batches of samples `start` to `stop - 1`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gaverify.errors import GaverifyError
from gaverify.gradients import PassProbe, accumulated_gradients, full_batch_gradients
from gaverify.measurements import ControlRun, Operation, WeightFit
from gaverify.probes.backward_controls import (
    ConstantsHeld,
    OutputsHeld,
    WithoutHooks,
    WithoutTensorHooks,
    module_registries,
    parameter_registries,
)
from gaverify.probes.backward_listening import GradientListener
from gaverify.probes.controls import Bench
from gaverify.probes.holding import OutputHeld
from gaverify.probes.traces import Frame, source_line
from gaverify.tracebacks import shown

_AGREE = 1e-6
_LINES = 6  # lines or modules that are tried one by one


@dataclass(frozen=True)
class BackwardCulprit:
    """Where gradients that agreed stop to agree, with the control run that neutralises it, where one was possible."""

    operation: Operation
    control: ControlRun | None


def backward_culprit(bench: Bench, means: Callable[[WeightFit | None], bool]) -> BackwardCulprit | None:
    """Returns where the backward diverges, with a control run; None where no single place was found.

    Hooks and constants are tried first, where there are any, because their lines are known.

    Args:
        bench: Where to run, with the weights that fit the losses.
        means: Whether fitted weights explain everything and are shares of something.
    """
    trial = _Trial(bench, means)
    for search in (_parameter_hooks, _module_hooks, _tensor_hooks, _constants, _boundaries):
        culprit = search(trial)
        if culprit is not None:
            return culprit
    return None


@dataclass(frozen=True)
class _Trial:
    """Runs controls; wrong weights beside the culprit do not hide that one helps."""

    bench: Bench
    means: Callable[[WeightFit | None], bool]

    def run(self, what: str, probe: PassProbe) -> ControlRun | None:
        """The control run, with the weights that were right in it; None where nothing is left to compare."""
        try:
            control = self.bench.run(what, probe, fit=True)
            if control.rounding or control.fit is None or not self.means(control.fit):
                return control
            task = replace(self.bench.task, weighting=list(control.fit.weights))
            return replace(replace(self.bench, task=task).run(what, probe), fit=control.fit)
        except GaverifyError:
            return None


def _parameter_hooks(trial: _Trial) -> BackwardCulprit | None:
    hooked = {name: p for name, p in trial.bench.task.parameters.items() if any(parameter_registries(p))}
    registries = [registry for parameter in hooked.values() for registry in parameter_registries(parameter)]
    if not registries:
        return None
    without = trial.run("gradient hooks on parameters removed", WithoutHooks(registries))
    if without is None or not without.rounding:
        return None
    owner = next(iter(hooked)).rpartition(".")[0]
    return BackwardCulprit(Operation("gradient hook", owner, _kinds(trial.bench).get(owner, "")), without)


def _module_hooks(trial: _Trial) -> BackwardCulprit | None:
    modules = [(path, module) for root in trial.bench.task.modules for path, module in root.named_modules()]
    hooked = [(path, module) for path, module in modules if any(module_registries(module))]
    if not hooked:
        return None
    registries = [registry for _, module in hooked for registry in module_registries(module)]
    without = trial.run("backward hooks on modules removed", WithoutHooks(registries))
    if without is None or not without.rounding:
        return None
    path, module = hooked[0]
    for path, module in hooked if len(hooked) <= _LINES else []:
        alone = trial.run(f"the backward hooks on `{path}` removed", WithoutHooks(module_registries(module)))
        if alone is not None and alone.rounding:
            without = alone
            break
    return BackwardCulprit(Operation("backward hook", path, type(module).__name__), without)


def _tensor_hooks(trial: _Trial) -> BackwardCulprit | None:
    probe = WithoutTensorHooks()
    without = trial.run("gradient hooks on tensors left out", probe)
    if without is None or not without.rounding or not probe.frames:
        return None
    return BackwardCulprit(_at("gradient hook on a tensor", probe.frames[0]), without)


def _constants(trial: _Trial) -> BackwardCulprit | None:
    probe = ConstantsHeld()
    held = trial.run("what the forward cuts out of the graph held constant", probe)
    if held is None or not held.rounding or not probe.frames:
        return None
    frames = list(probe.frames)
    for frame in frames if 1 < len(frames) <= _LINES else []:
        alone = trial.run("what this line cuts out of the graph held constant", ConstantsHeld(frame))
        if alone is not None and alone.rounding:
            return BackwardCulprit(_at("constant of the batch", frame), alone)
    return BackwardCulprit(_at("constant of the batch", frames[0]), held)


def _at(name: str, frame: Frame) -> Operation:
    if frame is None:
        return Operation(name)
    return Operation(name, file=shown(frame[0]), line=frame[1], source=source_line(frame))


def _boundaries(trial: _Trial) -> BackwardCulprit | None:
    """Compares the gradients at the boundaries of modules and custom functions."""
    listener = _listened(trial.bench)
    call = _diverging_call(listener)
    if call is None:
        return BackwardCulprit(_loss_function(trial.bench), None) if _starts_in_the_loss(listener) else None
    bounds, size = list(trial.bench.task.bounds()), trial.bench.task.batch_size
    if call in listener.functions:
        position, kind, frame = listener.functions[call]
        control = trial.run(f"the result of `{kind}` held constant", OutputsHeld(position, bounds, size))
        if control is None:
            straight = OutputsHeld(position, bounds, size, straight=True)
            control = trial.run(f"gradients passed through `{kind}` unchanged", straight)
        operation = replace(_at("backward", frame), module=listener.paths.get(call), kind=kind)
        return BackwardCulprit(operation, control)
    path = listener.paths[call]
    modules = {name: module for root in trial.bench.task.modules for name, module in root.named_modules()}
    what = f"the output of `{path or '(root)'}` held constant"
    control = trial.run(what, OutputHeld(modules[path], bounds, size))
    return BackwardCulprit(Operation("backward", path, _kinds(trial.bench)[path]), control)


def _kinds(bench: Bench) -> dict[str, str]:
    return {path: type(module).__name__ for root in bench.task.modules for path, module in root.named_modules()}


def _listened(bench: Bench) -> GradientListener:
    """Runs both strategies and compares the gradients at all boundaries."""
    listener = GradientListener(bench)
    probe = bench.with_probe(listener)
    full, _ = full_batch_gradients(bench.task, bench.state, bench.record, lift=bench.lift, probe=probe)
    accumulated_gradients(bench.task, bench.state, bench.record, full, lift=bench.lift, probe=probe)
    return listener


def _diverging_call(listener: GradientListener) -> int | None:
    """The innermost call whose output gradients agree and whose input gradients do not."""
    culprits = [
        call
        for call, sides in listener.by_call().items()
        if sides.get("outputs") and max(sides["outputs"]) <= _AGREE and max(sides.get("inputs", [0.0])) > _AGREE
    ]
    return max(culprits) if culprits else None  # the innermost call was entered last


def _starts_in_the_loss(listener: GradientListener) -> bool:
    """Whether the gradients that reach the outermost modules differ already."""
    outermost = [listener.by_call().get(call, {}).get("outputs", []) for call in listener.outermost]
    return any(outputs and max(outputs) > _AGREE for outputs in outermost)


def _loss_function(bench: Bench) -> Operation:
    code = getattr(bench.task.problem.loss, "__code__", None)
    if code is None:
        return Operation("backward of the loss")
    return Operation("backward of the loss", file=shown(code.co_filename), line=code.co_firstlineno)
