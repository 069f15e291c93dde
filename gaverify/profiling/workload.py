"""One update of each strategy as a training loop would write it: nothing watches, so that time and memory are its own.

Legend: B samples in K micro-batches; the full batch is one micro-batch of B samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gaverify.passes.batching import fresh
from gaverify.passes.isolation import ModelState, isolated_generators, mode_set, seed_everything
from gaverify.passes.problem import Problem
from gaverify.passes.task import Task, loss_of, micro_batch_of, told_as_users
from gaverify.preparation import dtype_of, task_of
from gaverify.records.profile import Plan
from gaverify.spec import Spec
from gaverify.verification import verify

OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}


@dataclass
class Workload:
    """A problem where it shall run, cut for one strategy, ready to be updated any number of times."""

    task: Task
    state: ModelState
    seed: int
    optimizer: torch.optim.Optimizer | None = None

    def micro_batches(self) -> Iterator[Any]:
        """Yields the micro-batches one after the other, as a data loader hands them over.

        A forward may change its inputs (`batch.pop("labels")`, `x.add_`), so each pass gets new ones.
        """
        if self.task.steps == 1:
            yield fresh(self.task.problem.batch)
            return
        for k, (start, stop) in enumerate(self.task.bounds(), 1):
            yield fresh(micro_batch_of(self.task, start, stop, f"micro-batch {k} of {self.task.steps}"))

    def start(self) -> None:
        """Makes every pass start from the same state and the same random draws."""
        self.clear()
        seed_everything(self.seed)

    def update(self, micro_batches: Iterable[Any]) -> None:
        """Runs one window: gradients cleared, forward and backward over every micro-batch, the optimizer's step."""
        for parameter in self.task.parameters.values():
            parameter.grad = None
        steps, total = self.task.steps, None
        places = iter(["the full batch"] if steps == 1 else [f"micro-batch {k + 1} of {steps}" for k in range(steps)])
        # 1/K stands for any recipe's weight: the value of a factor changes neither time nor bytes
        for micro_batch in micro_batches:  # no enumerate: it would keep the one before alive beside the next
            where = next(places)
            with told_as_users(where, self.task):
                loss = loss_of(self.task, micro_batch, where)
                loss = loss if steps == 1 else loss * (1.0 / steps)
                if self.task.strategy == "accumulate":
                    loss.backward()  # type: ignore[no-untyped-call]
                else:
                    total = loss if total is None else total + loss
            del loss, micro_batch  # the graph must not live on beside the next one
        if total is not None:
            with told_as_users("the summed loss", self.task):
                total.backward()  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            with told_as_users("the optimizer's step", self.task):
                self.optimizer.step()

    def start_optimizer(self) -> None:
        """Makes the optimizer's state, which every update but the very first one finds there."""
        if self.optimizer is None:
            return
        for parameter in self.task.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.clear()

    def clear(self) -> None:
        """Takes the gradients away and puts buffers and attributes back."""
        for parameter in self.task.parameters.values():
            parameter.grad = None
        self.state.restore()

    def kept_anyway(self) -> list[torch.Tensor]:
        """The parameters and buffers, whose storages are no activations."""
        return [tensor for module in self.task.modules for tensor in (*module.parameters(), *module.buffers())]


@contextmanager
def workload(problem: Problem, spec: Spec, plan: Plan, optimizer: str | None = None) -> Iterator[Workload]:
    """Puts a problem where the spec wants it, for as long as the block runs, and leaves everything as it was.

    Args:
        problem: What the spec's factory made.
        spec: Device, precision, seed and mode.
        plan: Strategy and K.
        optimizer: "sgd", "adam" or "adamw" for an update with its step; at learning rate 0, so that the weights stay
            where they are while time and state are those of a real step.

    Raises:
        ProblemError: K does not fit, nothing is trainable, or the device is not there.
    """
    modules = [module for module in (problem.model, problem.loss) if isinstance(module, nn.Module)]
    with ExitStack() as stack:
        stack.enter_context(isolated_generators())
        stack.enter_context(mode_set(modules, spec.mode))
        task = task_of(stack, problem, modules, plan.steps, spec.device, dtype_of(spec.dtype), dtype_of(spec.autocast))
        task = replace(task, strategy="summed-loss" if plan.strategy == "summed-loss" else "accumulate")
        work = Workload(task, ModelState(modules, (problem.loss,)), spec.seed)
        if optimizer is not None:
            work.optimizer = getattr(torch.optim, OPTIMIZERS[optimizer])(task.parameters.values(), lr=0.0)
        stack.callback(work.clear)
        yield work


def compared(work: Workload, spec: Spec) -> dict[str, Any]:
    """Returns outcome, method and largest relative difference of the plan against the full batch, from `verify`."""
    verdict = verify(
        work.task.problem,
        steps=work.task.steps,
        weighting=spec.weighting,
        seed=spec.seed,
        mode=spec.mode,
        autocast=spec.autocast,
        strategy=work.task.strategy,
        rtol=spec.rtol,
        atol=spec.atol,
        ignore_index=spec.ignore_index,
        diagnose=False,
        batch_size=work.task.batch_size,
        name=spec.model,
    )
    # a difference relative to a gradient that is itself nothing but rounding says nothing
    differences = [row.relative_difference for row in verdict.parameters if not row.vanishing]
    return {
        "outcome": verdict.outcome.value,
        "method": verdict.method,
        "relative_difference": max(differences, default=None),
    }
