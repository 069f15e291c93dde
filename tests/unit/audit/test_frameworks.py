"""Which framework's loop runs, by functions of its names; the frameworks themselves are in test_audit_frameworks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gaverify.audit.recording.listeners.gradients import find_framework
from gaverify.records.events import Framework, FrameworkLoop

ACCELERATE, LIGHTNING = FrameworkLoop(Framework.ACCELERATE, 4), FrameworkLoop(Framework.LIGHTNING, 4)
TRAINER = FrameworkLoop(Framework.TRANSFORMERS, 4, divides=False, counts_items=True)


class Loop:
    """The loop of a framework, with its arguments, its trainer, and the steps of a window."""

    gradient_accumulation_steps = accumulate_grad_batches = 4

    def __init__(self) -> None:
        self.args = self.trainer = self


def running(module: str, function: str, local: str, this: Any, inner: Any = find_framework) -> Any:
    """Calls `inner` in a function of another module."""
    space: dict[str, Any] = {"__name__": module, "inner": inner}
    exec(f"def {function}(self{local}):\n    return inner()", space)
    return space[function](this)


def test_the_loop_that_is_running_is_found() -> None:
    this = Loop()
    assert find_framework() is None
    assert running("accelerate.accelerator", "backward", "", this) == ACCELERATE
    assert running("lightning.pytorch.loops.optimization.automatic", "run", "", this) == LIGHTNING
    assert running("accelerate.accelerator", "backward", "", object()) is None

    def differentiate() -> Any:
        return running("accelerate.accelerator", "backward", "", this)

    def trained(local: str) -> Any:
        return running("transformers.trainer", "training_step", local, this, differentiate)

    assert trained("") == FrameworkLoop(Framework.TRANSFORMERS, 4, divides=True, counts_items=None)
    this.model_accepts_loss_kwargs = True
    assert trained(", num_items_in_batch=47") == TRAINER
    assert trained(", num_items_in_batch=None") == replace(TRAINER, divides=True, counts_items=False)
