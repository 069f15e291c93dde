"""A model that gaverify puts under an engine itself, as it was before: one process runs it without other ranks.

The full batch is run that way on every rank, in a group of one rank: a loss that reads the number of ranks, or talks to
them, then sees one, as in a program without a launcher. The same holds for the search for a cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gaverify.collective.engines import Alone, Reach, loss_factor, of_all, of_every_rank, wrap_model
from gaverify.collective.membership import Member
from gaverify.collective.traffic import TrafficMeter
from gaverify.passes.experiment import Experiment
from gaverify.passes.gradients import Gradients, PassResult
from gaverify.passes.sketches import sketch
from gaverify.passes.wrappers import THIS_RANK, is_sharded, renew_reducers
from gaverify.records.ranks import Engine, Traffic
from gaverify.torch_internals import distribute, set_default_group

_REGISTRIES = (
    "_parameters",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""What `fully_shard` changes of a module besides its class."""


@dataclass(frozen=True)
class WithoutEngine:
    """What each rank's own micro-batches show without an engine, before they are reduced."""

    sketches: Sequence[torch.Tensor]
    """The sketch of each rank's gradient."""
    calls: Traffic
    """The collectives that the model and the loss ran themselves, on the rank with the most."""
    reach: Reach
    """What the micro-batches of all ranks reach of the model."""
    ambiguous_draws: bool
    """Whether draws on some rank agree with the full batch's in shape alone."""


class PlainModel:
    """The model before it is put under an engine.

    Args:
        experiment: With the plain model.
        member: This rank. Every rank has to make one.
    """

    def __init__(self, experiment: Experiment, member: Member) -> None:
        self._experiment = experiment
        self._wrapped: list[nn.Module] = []
        self._sharded: dict[str, nn.Parameter] = {}
        # Each rank's own group; torch wants every rank to take part in making all of them.
        self._group, _ = dist.new_subgroups(1)
        self._member = member
        self._modules = [_snapshot(module) for root in experiment.modules for module in root.modules()]

    @contextmanager
    def alone(self, wrapped: Experiment | None = None) -> Iterator[Experiment]:
        """Gives the experiment with the plain model, for as long as the block runs in a group of one rank.

        Args:
            wrapped: The experiment under the engine, whose draws are used again; None: nothing has been drawn yet.
        """
        everyone, sharded = dist.group.WORLD, list(map(_snapshot, (module for module, _, _ in self._modules)))
        experiment = self._experiment
        if wrapped is not None:
            experiment = replace(
                experiment, draws=wrapped.draws, reading=wrapped.reading, math_kernels=wrapped.math_kernels
            )
        _put_back(self._modules)
        set_default_group(self._group)
        try:
            yield experiment.with_current_state()
        finally:
            set_default_group(everyone)
            _put_back(sharded)
            self._renew_reducers()

    def run_own(self, recorded: Experiment, full: PassResult, own: range) -> WithoutEngine:
        """Runs this rank's micro-batches among all ranks, but without an engine.

        Args:
            recorded: The plain experiment, with the draws of the full batch.
            full: The full batch.
            own: The numbers of the micro-batches.
        """
        meter, count, device = TrafficMeter(), self._member.count, self._member.device
        probe = Alone(recorded, loss_factor(recorded, count))
        with meter.counting():
            result = recorded.with_current_state().micro_batches(full, probe, own=own)
        said = of_every_rank(
            (sketch(result.gradients.values(), THIS_RANK).cpu(), meter.traffic, probe.reach, result.draws.ambiguous),
            count,
            device,
        )
        sketches, calls, reaches, ambiguous = zip(*said, strict=True)
        return WithoutEngine(sketches, max(calls, key=Traffic.count), of_all(reaches), any(ambiguous))

    def wrap(self, recorded: Experiment, engine: Engine, reach: Reach) -> Experiment:
        """Returns the experiment with its model under the engine."""
        wrapped = wrap_model(recorded, engine, reach)
        self._wrapped = [m for m in (wrapped.problem.model, wrapped.problem.loss) if isinstance(m, nn.Module)]
        self._sharded = {name: parameter for name, parameter in wrapped.parameters.items() if is_sharded(parameter)}
        return wrapped

    @contextmanager
    def in_float64(self, wrapped: Experiment) -> Iterator[Experiment]:
        """Gives the experiment under the engine in float64, for as long as the block runs."""
        # Call sites are known by the plain model's modules, so that the wrappers are not among the experiment's.
        try:
            with wrapped.in_float64() as exact:
                self._renew_reducers()
                yield exact
        finally:
            self._renew_reducers()

    def _renew_reducers(self) -> None:
        """Lets DistributedDataParallel hear of the weights, which may have had another type meanwhile."""
        renew_reducers(self._wrapped, hooks=True)

    def place(self, gradients: Gradients) -> Gradients:
        """Returns gradients of the plain model cut as the engine cuts the parameters."""
        parameters = self._sharded
        return {
            name: gradient if gradient is None or name not in parameters else distribute(gradient, parameters[name])
            for name, gradient in gradients.items()
        }


_Snapshot = tuple[nn.Module, type, dict[str, dict[Any, Any]]]


def _snapshot(module: nn.Module) -> _Snapshot:
    registries = {name: dict(module.__dict__[name]) for name in _REGISTRIES if name in module.__dict__}
    return module, module.__class__, registries


def _put_back(snapshots: Sequence[_Snapshot]) -> None:
    for module, kind, registries in snapshots:
        module.__class__ = kind
        for name, entries in registries.items():
            registry = module.__dict__[name]
            registry.clear()
            registry.update(entries)
