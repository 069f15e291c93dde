"""Proves a suspect: neutralises it in both runs, then runs the remedies that would be printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from torch import nn

from gaverify.control import failure_sentence, perturbed
from gaverify.errors import GaverifyError
from gaverify.gradients import PassProbe, full_batch_gradients
from gaverify.isolation import ModelState
from gaverify.measurements import Cause, ControlRun, StateChange, StateProbe, Suspect, WeightFit
from gaverify.probes.controls import Bench, Evaluated, cached_gradients
from gaverify.probes.holding import DecisionsHeld, Held, OutputHeld
from gaverify.probes.micro_batch_weights import fitted
from gaverify.probes.state import StateHeld, StateRestored
from gaverify.remedies.batch_norm import group_norm_for

_HELPS = 0.5  # a neutralised suspect that leaves more than half of the difference was not the cause
# Of each weight, up or down: near, where the loss surely stays finite, and far, where a maximum, a threshold or a
# branch falls otherwise.
_MOVED = (0.0, 0.01, 0.5)
_SINGLE = 5  # changed values that are tried one by one
_NEARER = 0.5  # of what one control leaves over: the other one is kept unless it leaves less than this
_NO_EFFECT = 1e-6  # relative change of the difference below which holding a value changed nothing


@dataclass(frozen=True)
class Tried:
    """A suspect with its control run, and the probe that keeps it neutralised while others are looked for."""

    cause: Cause
    neutral: PassProbe | None
    failures: tuple[str, ...] = ()
    helps: bool = True


def weights_remedy(bench: Bench, fit: WeightFit) -> ControlRun:
    """Runs the accumulation with the fitted weights."""
    task = replace(bench.task, weighting=list(fit.weights))
    return replace(bench, task=task).run("with these weights")


def blame_state(bench: Bench, changes: tuple[StateChange, ...], left: float) -> tuple[StateProbe, PassProbe | None]:
    """Holds what the forward changes still; returns the control run, which of the changes it blames, and its probe.

    First every micro-batch starts from the full batch's state (a remedy as well), then writes have no effect at all.
    Where neither explains everything, the control that comes nearer is returned and nothing is blamed yet.
    """
    read = read_changes(changes)
    if not read:
        return StateProbe(changes), None
    probe: PassProbe = StateRestored(bench.state)
    restored = state_restored(bench)
    if restored.rounding:
        return StateProbe(changes, restored, blamed(bench, read, left), (restored,)), probe
    still = StateHeld(bench.task, [change.name for change in read])
    try:
        held = bench.run("state held still", still, fit=True)
    except GaverifyError:  # a counter that stays at zero stops the model
        return StateProbe(changes, restored), probe
    if held.rounding:
        return StateProbe(changes, held, blamed(bench, read, left)), still
    nearer = _unexplained(held) < _NEARER * _unexplained(restored)
    return (StateProbe(changes, held), still) if nearer else (StateProbe(changes, restored), probe)


def _unexplained(control: ControlRun) -> float:
    """What a control leaves over, with the best weights."""
    return control.left if control.fit is None or control.fit.vacuous else control.fit.residual


def read_changes(changes: tuple[StateChange, ...]) -> tuple[StateChange, ...]:
    """The changes that a forward may read: fused normalisations write running statistics and do not in training."""
    read = tuple(c for c in changes if c.writer is None or "batch_norm" not in c.writer.name)
    return tuple(c for c in read if not c.name.endswith("num_batches_tracked"))


def state_restored(bench: Bench) -> ControlRun:
    """Starts every micro-batch from the state that the full batch started from."""
    return bench.run("state restored before each micro-batch", StateRestored(bench.state), fit=True)


def blamed(bench: Bench, changes: tuple[StateChange, ...], left: float) -> tuple[StateChange, ...]:
    """The changes that matter: single ones that are enough to hold, else those with an effect that cannot be spared.

    Parameters and buffers go before attributes: what the forward works out anew each time is no state of its own.

    Args:
        bench: Where to run.
        changes: What a forward may read.
        left: The relative difference with none of them held.
    """
    changes = _narrowed(bench, changes)
    if not 1 < len(changes) <= _SINGLE:
        return changes
    runs = {change: _tried_alone(bench, change) for change in changes}
    alone = [change for change, run in runs.items() if run is not None and run.rounding]
    if alone:
        return tuple(change for change in alone if change.place in ("parameter", "buffer")) or tuple(alone)
    effective = [c for c, run in runs.items() if run is None or abs(run.left - left) > _NO_EFFECT * left]
    return _spared(bench, tuple(effective)) or changes


def _tried_alone(bench: Bench, change: StateChange) -> ControlRun | None:
    """The control run with one value held; None where that stops the model (a step counter that stays at zero)."""
    try:
        return _held(bench, [change])
    except GaverifyError:
        return None


def _narrowed(bench: Bench, changes: tuple[StateChange, ...]) -> tuple[StateChange, ...]:
    """Where there are many changes, those of one kind, if holding them is enough."""
    if len(changes) <= _SINGLE:
        return changes
    kinds = {change.place: tuple(c for c in changes if c.place == change.place) for change in changes}
    written = tuple(c for c in changes if c.writer is not None and c.writer.name)
    for some in (written, *kinds.values()):
        if 0 < len(some) < len(changes) and _held(bench, some).rounding:
            return _narrowed(bench, some)
    return changes


def _spared(bench: Bench, changes: tuple[StateChange, ...]) -> tuple[StateChange, ...]:
    """Leaves out what need not be held beside the others."""
    if len(changes) < 2 or not _held(bench, changes).rounding:
        return changes
    kept = list(changes)
    for change in sorted(changes, key=lambda c: c.place in ("parameter", "buffer")):
        others = [c for c in kept if c is not change]
        if others and _held(bench, others).rounding:
            kept = others
    return tuple(kept)


def _held(bench: Bench, changes: Sequence[StateChange]) -> ControlRun:
    names = [change.name for change in changes]
    return bench.run(f"{', '.join(f'`{name}`' for name in names)} held still", StateHeld(bench.task, names))


def drawing_constants(bench: Bench) -> tuple[ControlRun, Bench]:
    """Holds every random draw at one typical value, in both runs; returns what is left, and the bench in that state."""
    still = replace(bench, record=replace(bench.record, constant=True, unaligned={}))
    return still.run("every random draw held constant"), still


def joint_fit(bench: Bench) -> WeightFit:
    """Fits the weights at the model's parameters and at moved ones together.

    Weights that belong to the data (counts, class weights, masks) explain both; factors that come out of the model
    itself, such as 1/√L_k of a root mean squared error, change with its parameters.
    """
    runs = []
    for moved in _MOVED:
        with perturbed(bench.task, moved) if moved else nullcontext():
            there = replace(bench, state=ModelState(bench.task.modules, (bench.task.problem.loss,)))
            probe = there.with_probe(None)
            full, _ = full_batch_gradients(there.task, there.state, there.record, lift=there.lift, probe=probe)
            sketches = there.sketched(full, probe)[0]
            if bool(sketches.target.isfinite().all()) and bool(sketches.columns.isfinite().all()):
                runs.append(sketches)
    return fitted(runs)


def try_suspect(bench: Bench, suspect: Suspect, left: float, residual: float) -> Tried | None:
    """Runs the controls that fit the suspect until one helps; None where none could tell anything.

    A control that does not help by itself may still be one of several causes: the best of them is returned then, with
    `helps` false.

    Args:
        bench: Where to run.
        suspect: Whom to try.
        left: The relative difference before.
        residual: What the best micro-batch weights left over before: wrong weights may hide that a control helps.
    """
    failures: list[str] = []
    best: Tried | None = None
    for make in _controls(bench, suspect):
        try:
            control, neutral = make()
        except Exception as error:
            failures.append(failure_sentence(error))
            continue
        fit = control.fit
        weighted = fit.residual / residual if fit is not None and not fit.vacuous and residual > 0 else 1.0
        explained = 1.0 - min(control.left / max(left, 1e-300), weighted)
        if control.rounding or explained > 1.0 - _HELPS:
            remedies = tuple(_remedies(bench, suspect)) if control.rounding else ()
            return Tried(Cause(suspect, control, remedies, explained), neutral, tuple(failures))
        if neutral is not None and (best is None or explained > best.cause.explained):
            best = Tried(Cause(suspect, control, (), explained), neutral, tuple(failures), helps=False)
    return best or Tried(Cause(suspect, None), None, tuple(failures), helps=False)


def _controls(bench: Bench, suspect: Suspect) -> Iterator[Callable[[], tuple[ControlRun, PassProbe | None]]]:
    """Yields the controls in the order of how much of the model they leave running."""
    path = suspect.operation.module

    def run(what: str, probe: PassProbe) -> Callable[[], tuple[ControlRun, PassProbe | None]]:
        return lambda: (bench.run(what, probe, fit=True), probe)

    if suspect.statistics and path is not None:
        modules = _same_kind(bench, path)
        names = f"`{path}`" if len(modules) == 1 else f"all {len(modules)} {type(modules[0]).__name__} layers"
        yield run(f"{names} frozen", Evaluated(modules))
    if suspect.kind in ("matrix", "non-additive") or (suspect.kind != "random" and not suspect.in_model):
        yield lambda: (cached_gradients(bench, frozenset(suspect.calls)), None)
    if suspect.frame is not None:
        yield run("the full batch's decisions taken by every micro-batch", DecisionsHeld(suspect.frame))
    held = ((suspect.source_functions, "what is reduced over the batch held constant"),
            (suspect.functions, f"the result of `{suspect.operation.name}` held constant"),
            (suspect.exits, f"what the samples get from `{suspect.operation.name}` held constant"))  # fmt: skip
    bounds, size = list(bench.task.bounds()), bench.task.batch_size
    for functions, what in held:
        if functions and not (functions is suspect.functions and suspect.kind == "matrix" and suspect.in_model):
            yield run(what, Held(functions, bounds, size))
    module = _module(bench, path)
    if suspect.in_model and path and module is not None:
        yield run(f"the output of `{path}` held constant", OutputHeld(module, bounds, size))


def _module(bench: Bench, path: str | None) -> nn.Module | None:
    modules = {name: module for root in bench.task.modules for name, module in root.named_modules()}
    return modules.get(path) if path is not None else None


def _same_kind(bench: Bench, path: str) -> list[nn.Module]:
    """The suspect's module and every other of its class: they are repaired together."""
    modules = {name: module for root in bench.task.modules for name, module in root.named_modules()}
    kind = type(modules[path])
    return [module for module in modules.values() if type(module) is kind]


def _remedies(bench: Bench, suspect: Suspect) -> Iterator[ControlRun]:
    """Runs the repairs that can be made without the user's code."""
    path = suspect.operation.module
    if not suspect.statistics or path is None:
        return
    layers = [m for m in _same_kind(bench, path) if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not layers:
        return
    try:
        with _group_norms(bench, layers) as name:
            yield bench.run(name)
    except Exception:  # a layer whose channels cannot be grouped: the remedy is not printed
        return


@contextmanager
def _group_norms(bench: Bench, layers: Sequence[nn.modules.batchnorm._BatchNorm]) -> Iterator[str]:
    """Puts GroupNorm in the place of BatchNorm layers, with their own scale and shift, and back in the end."""
    swapped: list[tuple[nn.Module, str, nn.modules.batchnorm._BatchNorm]] = []
    names = []
    for root in bench.task.modules:
        for parent in list(root.modules()):
            for name, child in list(parent._modules.items()):
                if isinstance(child, nn.modules.batchnorm._BatchNorm) and any(child is layer for layer in layers):
                    swapped.append((parent, name, child))
    try:
        for parent, name, child in swapped:
            norm = group_norm_for(child)
            names.append(f"GroupNorm({norm.num_groups}, {norm.num_channels})")
            parent._modules[name] = norm
        if not names:
            raise ValueError("the layer is the model itself")
        yield names[0] if len(set(names)) == 1 else "GroupNorm"
    finally:
        for parent, name, child in swapped:
            parent._modules[name] = child
