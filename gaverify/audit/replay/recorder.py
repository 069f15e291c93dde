"""The recorder of a run that watches, keeps or is given what lies outside the model: samples, and draws of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gaverify.audit.job import Job
from gaverify.audit.recording.hand_recorder import HandRecorder
from gaverify.audit.recording.storage import Storage
from gaverify.audit.replay.draws import DealtLoopDraws, KeptLoopDraws, Loop
from gaverify.audit.replay.inputs import GivenInputs, KeptInputs, has_loss
from gaverify.audit.replay.loaders import Loaders
from gaverify.audit.replay.samples import GivenSamples, KeptSamples
from gaverify.records.events import Ending


class ReplayingRecorder(HandRecorder):
    """Adds to the recorder what happens between its calls."""

    def __init__(self, job: Job, storage: Storage) -> None:
        super().__init__(job, storage)
        self._loaders: Loaders
        if not job.replay:
            self._loop = Loop()
            self._loaders = Loaders(self._loop.paused)
        elif job.source is None:
            self._loop = KeptLoopDraws(storage.folder)
            tail = job.tail / job.parts if job.tail else 0.0
            self._loaders = KeptSamples(storage.folder, self._loop.paused, tail, collated=job.collated)
        else:
            self._loop = DealtLoopDraws(Path(job.source), job.parts, turns=job.order == "turns")
            # in parts: a whole batch and the short one behind it
            length = (job.parts + job.tail if job.parts > 1 else 2) if job.tail else None
            self._loaders = GivenSamples(Path(job.source), job.parts, self._loop.paused, length, collated=job.collated)
            if job.order:
                self._loaders = Loaders(self._loop.paused)
        self._loaders.install()
        self._inputs: KeptInputs | GivenInputs | None = None
        if job.inputs:
            self._inputs = KeptInputs(storage.folder) if job.source is None else GivenInputs(Path(job.source))
        self._returns_loss = True  # every forward with something to train

    def optimizer_made(self, optimizer: Any) -> None:
        """The loop begins once there is an optimizer."""
        super().optimizer_made(optimizer)
        self._loop.start()

    @contextmanager
    def forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[Callable[[Any], None]]:
        """Surrounds the forward of an outermost module."""
        with self._loop.paused():
            if self.job.by_hand:  # there is no optimizer that would be made
                self._loop.start()
            if torch.is_grad_enabled():
                self._loop.forward(_rows(args, kwargs))
                if self._inputs is not None:
                    with self._work():
                        self._inputs.forward(module, args, kwargs)
            with super().forward(module, args, kwargs) as listen:

                def listened(output: Any) -> None:
                    listen(output)
                    self._returns_loss = self._returns_loss and (not torch.is_grad_enabled() or has_loss(output))

                yield listened

    @contextmanager
    def backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Surrounds a backward pass."""
        with self._loop.paused():
            with super().backward(tensors, *args, **kwargs):
                yield
            self._passed()

    @contextmanager
    def differentiation(self, outputs: Any, inputs: Sequence[Any]) -> Iterator[Callable[[Sequence[Any]], None]]:
        """Surrounds a call of `autograd.grad` for parameters."""
        with self._loop.paused():
            with super().differentiation(outputs, inputs) as ended:
                yield ended
            self._passed()

    def step_begins(self, optimizer: Any, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Before an optimizer's step."""
        with self._loop.paused():
            return super().step_begins(optimizer, closure)

    def step_ended(self, optimizer: Any) -> None:
        """After an optimizer's step."""
        with self._loop.paused():
            super().step_ended(optimizer)
        if not self.off:
            self._loop.after_step()

    def close(self, reason: Ending, code: str = "") -> None:
        """Writes everything, once; nothing is recorded any more."""
        with self._work():
            self._loop.close()
        super().close(reason, code)

    def _passed(self) -> None:
        self._loop.after_backward()
        if self._inputs is not None:
            self._inputs.after_backward()

    def _meta(self, reason: Ending) -> dict[str, Any]:
        meta = super()._meta(reason)
        return {
            **meta,
            "unaligned": {**meta["unaligned"], **self._loop.unaligned},
            "returns_loss": self._returns_loss,
            "dealt": meta["dealt"] + self._loop.count,
            "draws": meta["draws"] + self._loop.count,
            "loop_draws": self._loop.moved,
            "epochs": self._loaders.ended,
            "loaders": self._loaders.count,
        }


def _rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim() > 0)
    return next((int(value.shape[0]) for value in tensors), None)
