"""Which framework's loop runs a backward pass, read from the functions that are running."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

from gaverify.records.frameworks import Framework, FrameworkLoop

Locals = Mapping[str, Any]
"""The local variables of a function that is running."""


class _Loop(NamedTuple):
    """A function of a framework that is running while a loss is differentiated, and how to read its settings."""

    module: str
    function: str
    read: Callable[[Locals], FrameworkLoop]


def _of_trainer(local: Locals) -> FrameworkLoop:
    trainer, items = local["self"], local.get("num_items_in_batch")
    accepts = getattr(trainer, "model_accepts_loss_kwargs", False) or getattr(trainer, "compute_loss_func", None)
    return FrameworkLoop(
        Framework.TRANSFORMERS,
        trainer.args.gradient_accumulation_steps,
        divides=not accepts or items is None,
        # Versions that count no items have no such variable.
        counts_items=items is not None if "num_items_in_batch" in local else None,
    )


def _of_accelerator(local: Locals) -> FrameworkLoop:
    return FrameworkLoop(Framework.ACCELERATE, local["self"].gradient_accumulation_steps)


def _of_lightning(local: Locals) -> FrameworkLoop:
    return FrameworkLoop(Framework.LIGHTNING, local["self"].trainer.accumulate_grad_batches)


# The Trainer comes first: it differentiates through Accelerate, which it keeps from dividing.
_LOOPS = (
    _Loop("transformers.trainer", "training_step", _of_trainer),
    _Loop("accelerate.accelerator", "backward", _of_accelerator),
    _Loop("lightning.pytorch.loops.optimization.automatic", "run", _of_lightning),
    _Loop("pytorch_lightning.loops.optimization.automatic", "run", _of_lightning),
)


def find_framework() -> FrameworkLoop | None:
    """Returns the loop of a framework that is running now; None where the script's own is, or its settings are hidden.

    Only functions that are running are looked at: a framework that is merely imported says nothing.
    """
    running: dict[tuple[str, str], FrameType] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        running.setdefault((frame.f_globals.get("__name__", ""), frame.f_code.co_name), frame)
        frame = frame.f_back
    for loop in _LOOPS:
        if running_frame := running.get((loop.module, loop.function)):
            try:
                return loop.read(running_frame.f_locals)
            except (AttributeError, KeyError):  # another version, which keeps its settings elsewhere
                return None
    return None
