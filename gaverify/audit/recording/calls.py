"""The calls around which a recording is built: forwards, backward passes, optimizer steps, and the end of an update.

A call carries what its patch knows, and what listeners find out for those that subscribe behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gaverify.audit.measurements import ForwardInputs
from gaverify.audit.recording.bus import Call, FunctionCall
from gaverify.audit.recording.graph import Terms
from gaverify.audit.recording.watching import Look, Watched
from gaverify.records.events import LossOrigin
from gaverify.records.ranks import Traffic
from gaverify.tracebacks import Place


@dataclass(kw_only=True)
class ForwardCall(FunctionCall):
    """The forward of an outermost module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_graded: bool
    """Whether its operations are differentiated."""
    trains: bool = False
    """Whether its module has something to train and its operations are differentiated."""
    model: int = 0
    """Number of the module among those that train."""
    number: int = 0
    """Number of the forward among those that train."""
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of its input tensors."""
    inputs: ForwardInputs = field(default_factory=dict)
    """Fingerprints of its input tensors."""


@dataclass(kw_only=True)
class Differentiation(FunctionCall):
    """Something that computes gradients."""

    roots: Any
    """What is differentiated: a tensor, or several."""
    place: Place | None
    """The script's line."""


@dataclass(kw_only=True)
class BackwardCall(Differentiation):
    """A call of `backward`."""

    # No default: a listener that reads the terms too early fails, and does not go on with an empty loss.
    terms: Terms = field(init=False)
    """The terms of the loss, as soon as a listener has looked at its graph."""
    origin: LossOrigin = field(default_factory=LossOrigin)
    """Where the loss comes from, as far as a control asks for it."""
    reached: list[int] = field(default_factory=list)
    """Numbers of the forwards that it reached."""
    look: Look = field(default_factory=Look)
    """What it changed in `.grad`."""
    is_counted: bool = False
    """Whether it reached parameters: else it belongs to no window."""
    touched: list[int] = field(default_factory=list)
    """Optimizers whose gradients it changed."""
    targets: tuple[tuple[int, int], ...] = ()
    """Valid and all targets of the losses before it."""
    weight: float | None = None
    """Factor on the innermost loss."""
    divisor: float | None = None
    """What the loss was divided by, where no targets tell it."""
    scales: list[float] = field(default_factory=list)
    """Factors on each number on the way to the innermost loss."""
    loss: float = float("nan")
    """The number that was differentiated."""
    traffic: Traffic = field(default_factory=Traffic)
    """Its collectives."""
    reduced: int = 0
    """Bytes of whole gradients that its collectives reduced."""
    gathers: list[Place | None] = field(default_factory=list)
    """Lines that gathered trained tensors before it."""


@dataclass(kw_only=True)
class GradCall(Differentiation):
    """A call of `autograd.grad` for parameters; its result are their gradients."""

    inputs: Sequence[Any]
    """The tensors whose gradients are asked for."""


@dataclass
class StepCall(Call):
    """A step of an optimizer of torch's."""

    entry: Watched
    """The optimizer, with its window."""
    # The two halves of a step are two calls: torch's hooks have nothing in common but the optimizer.
    place: Place | None = None
    """The script's line; None after the step."""
    can_lead: bool = False
    """Whether its gradients may be replaced: a closure would compute them again."""
    was_led: bool = False
    """Whether it used the full-batch run's gradients."""


@dataclass
class UpdateEnd(Call):
    """Something new begins after the steps of an update."""

    number: int
