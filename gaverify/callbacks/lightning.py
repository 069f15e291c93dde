"""A callback for Lightning's `Trainer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

try:
    from lightning.pytorch.callbacks import Callback as _Base
except ImportError:  # the package of before 2.0, which lives on under its old name
    from pytorch_lightning.callbacks import Callback as _Base

from gaverify.callbacks.verifying import FirstWindow, Gate, shared_problem
from gaverify.errors import ProblemError
from gaverify.passes.isolation import isolated_generators


class LightningCallback(_Base):  # type: ignore[misc]
    """Verifies the first window of a `LightningModule` with automatic optimization when training starts.

    The loss of the full batch is what `training_step` returns for all samples where the trainer accumulates nothing. A
    module that divides by a number of its own divides there, too: `gaverify audit`, which starts the script with other
    arguments, sees that, and this callback cannot.

    Args:
        accept: Known divergences: tables with `code`, `location` and `reason`.
        stop: Raise `DivergentTraining` on a divergence that is not accepted.
        options: The options of `gaverify.verify`.
    """

    def __init__(self, accept: Sequence[Mapping[str, Any]] = (), *, stop: bool = True, **options: Any) -> None:
        self.gate = Gate(accept, stop=stop, **options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Verifies, unless nothing is accumulated, several processes train, or the module steps by itself."""
        steps = trainer.accumulate_grad_batches
        reasons = {
            "nothing is accumulated": steps == 1,
            "several processes train; verify with `gaverify run --ranks`": trainer.world_size > 1,
            "the module steps its optimizers itself; `gaverify audit` checks it": not pl_module.automatic_optimization,
        }
        why = next((reason for reason, holds in reasons.items() if holds), "")
        if why:
            return self.gate.skip(why)
        with isolated_generators(), _quiet(pl_module):
            try:
                window = FirstWindow(trainer.train_dataloader, steps)
            except ProblemError as error:
                return self.gate.skip(str(error))

            def loss(module: Any, samples: list[Any]) -> torch.Tensor:
                batch = trainer.strategy.batch_to_device(window.collate(samples))
                # a module that divides by what the trainer accumulates divides by 1 where nothing is
                trainer.accumulate_grad_batches = 1 if len(samples) == len(window.samples) else steps
                try:
                    # Autocast, where the trainer's precision asks for it.
                    with trainer.precision_plugin.train_step_context():
                        step_output = module.training_step(batch, 0)
                finally:
                    trainer.accumulate_grad_batches = steps
                step_loss: torch.Tensor = step_output["loss"] if isinstance(step_output, Mapping) else step_output
                return step_loss

            problem = shared_problem(pl_module, loss, window, type(pl_module).__name__)
            self.gate.check(problem, len(window.batches), "uniform")  # Lightning divides by the accumulated batches
        return None


@contextmanager
def _quiet(module: Any) -> Iterator[None]:
    """Leaves out what the module logs: these steps are none of the training's."""
    for name in ("log", "log_dict"):
        object.__setattr__(module, name, _nothing)  # an attribute hides the method until it is removed
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            object.__delattr__(module, name)


def _nothing(*_: Any, **__: Any) -> None:
    """Stands in for `log`; a function of a module, so that copies of the model can hold it."""
