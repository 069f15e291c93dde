"""A callback for Hugging Face's `Trainer`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import Trainer
from transformers import TrainerCallback as _Base

from gaverify.callbacks.verifying import FirstWindow, Gate, shared_problem
from gaverify.errors import ProblemError
from gaverify.passes.isolation import isolated_generators


class TrainerCallback(_Base):  # type: ignore[misc]
    """Verifies the Trainer's first window at the beginning of training.

    The loss is the one that the Trainer would hand to its backward, with everything that it divides by: its own
    `training_step` runs, and only the backward is left out.

    Args:
        accept: Known divergences: tables with `code`, `location` and `reason`.
        stop: Raise `DivergentTraining` on a divergence that is not accepted.
        options: The options of `gaverify.verify`.
    """

    def __init__(self, accept: Sequence[Mapping[str, Any]] = (), *, stop: bool = True, **options: Any) -> None:
        self.gate = Gate(accept, stop=stop, **options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Verifies, unless training goes on from a checkpoint or runs on several processes."""
        trainer, steps = _calling_trainer(), args.gradient_accumulation_steps
        if trainer is None:
            return self.gate.skip("no Trainer called the callback")
        if steps == 1 or args.world_size > 1:
            return self.gate.skip("nothing is accumulated" if steps == 1 else "several processes train; see `--ranks`")
        # Samplers and data sets draw: training has to go on as if nothing had been verified.
        with isolated_generators():
            try:
                window = FirstWindow(trainer.get_train_dataloader(), steps)
            except ProblemError as error:
                return self.gate.skip(str(error))
            loss = _Loss(trainer, window)
            # Training calls the wrapped model, which may be compiled.
            model = trainer.model_wrapped if trainer.model_wrapped is not None else trainer.model
            problem = shared_problem(model, loss, window, type(trainer.model).__name__)
            self.gate.check(problem, len(window.batches), "none")  # what the Trainer divides by is in its loss
        return None


class _Loss:
    """The loss that the Trainer would differentiate for some of the window's samples."""

    def __init__(self, trainer: Any, window: FirstWindow) -> None:
        self.trainer, self.window = trainer, window
        batches = [
            window.collate(window.samples[at : at + len(window.batches[0])])
            for at in range(0, len(window.samples), len(window.batches[0]))
        ]
        self.items = self._count(batches)

    def _count(self, batches: list[Any]) -> Any:
        count = getattr(self.trainer, "_get_num_items_in_batch", None)
        if count is not None:
            return count(batches, self.trainer.args.device)
        counting = getattr(self.trainer, "get_batch_samples", None)  # transformers 4.46 to 4.49
        if counting is None:
            return None
        return _call_with_accepted(counting, iter(batches), len(batches), self.trainer.args.device)[1]

    def __call__(self, model: torch.nn.Module, samples: list[Any]) -> torch.Tensor:
        trainer, is_full_batch = self.trainer, len(samples) == len(self.window.samples)
        steps = 1 if is_full_batch else len(self.window.batches)
        current = "current_gradient_accumulation_steps"  # of transformers 4.52 and later
        saved = {current: getattr(trainer, current)} if hasattr(trainer, current) else {}
        configured = trainer.args.gradient_accumulation_steps
        accelerator = trainer.accelerator
        losses: list[torch.Tensor] = []
        # `training_step` puts the model into training mode, whatever mode a run in evaluation mode asked for.
        training = [module.training for module in model.modules()]
        # An attribute hides the method until it is removed.
        accelerator.backward = lambda loss, **_: losses.append(loss)
        try:
            if saved:
                setattr(trainer, current, steps)
            # Some versions of TrainingArguments refuse plain assignments.
            object.__setattr__(trainer.args, "gradient_accumulation_steps", steps)
            inputs = self.window.collate(samples)
            _call_with_accepted(trainer.training_step, model, inputs, self.items)
        finally:
            del accelerator.backward
            object.__setattr__(trainer.args, "gradient_accumulation_steps", configured)
            for name, value in saved.items():
                setattr(trainer, name, value)
            for module, mode in zip(model.modules(), training, strict=True):
                module.training = mode
        # Accelerate's own backward divides by the accumulation steps that it was made with
        return losses[0] / (1 if is_full_batch else accelerator.gradient_accumulation_steps)


def _call_with_accepted(function: Any, *arguments: Any) -> Any:
    """Calls with as many of the arguments as the function takes: the last ones came with later versions."""
    import inspect

    return function(*arguments[: len(inspect.signature(function).parameters)])


def _calling_trainer() -> Any:
    """The Trainer whose call of its callbacks is running: callbacks are not told which one it is."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None
