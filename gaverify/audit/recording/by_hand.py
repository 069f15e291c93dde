"""Scripts that move their weights themselves: the moved weights are the step of an optimizer that nobody announces.

A `ByHand` stands where an optimizer of torch's would. Between two looks at the weights the script has taken a step if
they have moved. What it used is its `.grad`; where it has none, what it has taken away from the weights stands for it:
a rate, a division and a clipping are in that, wherever the script does them, and a step that is the same whatever the
gradient's size (Adam, a sign) shows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gaverify.audit.recording.sampling import Sample
from gaverify.audit.recording.values import copied
from gaverify.tracebacks import Place

_CERTAIN = 2
"""Moves of the weights after which a script without an optimizer is taken to move them itself."""
_CERTAIN_BESIDE_AN_OPTIMIZER = 256
"""The same beside an optimizer that holds them: the script may move weights between micro-batches of one window."""


class ByHand:
    """The parameters that a script moves itself, and what they were before it did.

    Args:
        parameters: Those of one of its models.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self._before: list[torch.Tensor | None] = []
        self._older: list[torch.Tensor | None] = []
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Keeps the weights as they are."""
        self._before = [copied(parameter) for parameter in self.param_groups[0]["params"]]

    @torch.no_grad()
    def change(self) -> list[torch.Tensor | None]:
        """Returns what was taken away from every parameter since, and keeps the weights as they are now."""
        before = self._older = self._before
        self.take()
        return [
            None if old is None or new is None or old.shape != new.shape else old - new
            for old, new in zip(before, self._before, strict=True)
        ]

    @torch.no_grad()
    def back(self) -> None:
        """Puts the weights back to what they were before the last change."""
        for parameter, old in zip(self.param_groups[0]["params"], self._older, strict=True):
            if old is not None:
                parameter.data.copy_(old)
        self._before = self._older


@dataclass(frozen=True)
class Waiting:
    """A call of `autograd.grad` for parameters: what it gave each optimizer, at the sampled elements."""

    place: Place | None
    reached: list[int]
    targets: list[tuple[int, int]]
    changes: dict[int, torch.Tensor]


class Unannounced:
    """Counts how often weights moved after a differentiation without a step: by no optimizer of torch's."""

    def __init__(self) -> None:
        self._samples: dict[int, tuple[nn.Module, Sample, torch.Tensor]] = {}
        self._differentiated = False
        self.moves = 0

    def certain(self, held: Callable[[], bool]) -> bool:
        """Whether the script moves its weights itself.

        Args:
            held: Tells whether an optimizer, which has not stepped so far, holds them; asked only where it matters.
        """
        return self.moves >= _CERTAIN and (self.moves >= _CERTAIN_BESIDE_AN_OPTIMIZER or not held())

    def differentiated(self) -> None:
        """A gradient was computed: what moves the weights after it may be a step."""
        self._differentiated = True

    def look(self, module: nn.Module) -> None:
        """Looks at the weights of a module whose forward begins."""
        if id(module) not in self._samples:
            sample = Sample(list(module.parameters()))
            self._samples[id(module)] = (module, sample, sample.weights())
            return
        _, sample, before = self._samples[id(module)]
        now = sample.weights()
        if self._differentiated and not torch.equal(now, before):
            self.moves += 1
            self._differentiated = False
        self._samples[id(module)] = (module, sample, now)
