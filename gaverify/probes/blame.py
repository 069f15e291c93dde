"""Which of the state that a forward changes is to blame: values held still, alone and together.

Shapes: none; every control runs the full batch and its K micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from gaverify.errors import GaverifyError
from gaverify.gradients import PassProbe
from gaverify.measurements import ControlRun, StateChange, StateProbe
from gaverify.probes.controls import Bench
from gaverify.probes.state import StateHeld, StateRestored

_SINGLE = 5  # changed values that are tried one by one
_NEARER = 0.5  # of what one control leaves over: the other one is kept unless it leaves less than this
_NO_EFFECT = 1e-6  # relative change of the difference below which holding a value changed nothing


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
