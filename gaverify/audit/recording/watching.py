"""Watches the gradients, weights and settings of every optimizer for changes since the last look.

A rank's own gradients are seen before they are reduced. Shapes: S sampled elements of an optimizer's gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gaverify.audit.recording.sketching import KeptGradients
from gaverify.audit.recording.values import Sample, plain, same
from gaverify.torch_internals import has_post_accumulate_hooks


@dataclass
class Increment:
    """The change by one backward pass of the sampled gradients of an optimizer.

    `backward` is its number in the run; `cleared` says that `zero_grad` took it away before a step.
    """

    backward: int
    change: torch.Tensor
    cleared: bool = False


@dataclass
class WatchedOptimizer:
    """One optimizer: its sampled elements as they were at the last look, and what its open window holds.

    Args:
        pending: Backward passes that changed its gradients since its last step or clearing.
        increments: The change by each backward pass since its last step.
        forwards: The numbers of the forwards that those passes reached.
        steps: How many steps it has made.
        summed: Its gradients as its last backward pass left them; replaced before the first clipping, and after
            a `GradScaler` took its scale out, by what they were then.
        used: By position, the gradients of parameters that the script has moved itself, as it used them.
        clipped: Whether clipping has changed them since.
    """

    index: int
    optimizer: Any
    sample: Sample
    gradients: torch.Tensor
    weights: torch.Tensor
    pending: int = 0
    increments: list[Increment] = field(default_factory=list)
    forwards: set[int] = field(default_factory=set)
    steps: int = 0
    summed: KeptGradients | None = None
    used: dict[int, KeptGradients] = field(default_factory=dict)
    clipped: bool = False

    @property
    def is_cleared(self) -> bool:
        """Whether no gradient is left."""
        return not bool(self.gradients.any())

    def receive(self, backward: int, change: torch.Tensor | None, forwards: Iterable[int]) -> None:
        """Notes what a backward pass has added, and the forwards that it reached; None where it added nothing."""
        self.increments.append(Increment(backward, torch.zeros_like(self.gradients) if change is None else change))
        self.forwards |= set(forwards)

    def keep(self) -> None:
        """Keeps the gradients as they are now."""
        self.summed, self.used = KeptGradients(self.index, self.sample, self.gradients), {}

    def keep_used(self) -> bool:
        """Keeps the gradients of parameters that have just moved, unless they are gone; returns whether any moved."""
        sizes = self.sample.sizes
        pairs = zip(self.weights.split(sizes), self.sample.weights().split(sizes), strict=True)
        moved = [at for at, pair in enumerate(pairs) if at not in self.used and not same(*pair)]
        gradients = {at: self.sample.parameters[at].grad for at in moved}
        nonzero = {at: gradient for at, gradient in gradients.items() if gradient is not None and bool(gradient.any())}
        for at, gradient in nonzero.items():
            self.used[at] = KeptGradients(self.index, self.sample, self.sample.elements(at, gradient), only=at)
        return bool(moved)


@dataclass
class Look:
    """The findings of one look: optimizers whose gradients were removed or changed, and whose weights moved.

    `moved` holds the sampled weights as they were before.
    """

    cleared: list[int] = field(default_factory=list)
    changed: dict[int, torch.Tensor] = field(default_factory=dict)
    moved: dict[int, torch.Tensor] = field(default_factory=dict)


class StandIn:
    """Stands for the optimizer of a model whose weights the script moves itself; has what optimizers have.

    Args:
        parameters: The parameters that the model trains.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.param_groups = [{"params": parameters}]


class Watch:
    """All optimizers of the script, in the order in which they were made."""

    def __init__(self) -> None:
        self._optimizers: list[Any] = []
        self._watched: dict[int, WatchedOptimizer] = {}

    def __len__(self) -> int:
        return len(self._optimizers)

    def __iter__(self) -> Iterator[WatchedOptimizer]:
        """The sampled state of every optimizer; see `of`."""
        return map(self.of, range(len(self._optimizers)))

    def add(self, optimizer: Any) -> int:
        """Notes an optimizer and returns its number."""
        for at, each in enumerate(self._optimizers):
            if each is optimizer:  # an optimizer may define equality otherwise
                return at
        self._optimizers.append(optimizer)
        return len(self._optimizers) - 1

    @property
    def has_stand_ins(self) -> bool:
        """Whether the script has no optimizer of torch's."""
        return any(isinstance(optimizer, StandIn) for optimizer in self._optimizers)

    def drop_idle(self) -> None:
        """Drops what stands for optimizers if none of it has stepped: the script makes an optimizer of torch's."""
        if self.has_stand_ins and not any(entry.steps for entry in self):
            self._optimizers.clear()
            self._watched.clear()

    def parameters(self, index: int) -> list[torch.Tensor]:
        """Returns the parameters of an optimizer in the order of its groups."""
        return parameters_of(self._optimizers[index])

    def all_parameters(self) -> Iterator[torch.Tensor]:
        """Yields the parameters of all optimizers."""
        for optimizer in self._optimizers:
            yield from parameters_of(optimizer)

    def of(self, index: int) -> WatchedOptimizer:
        """Returns the sampled state of an optimizer; parameters that were added later join here."""
        optimizer = self._optimizers[index]
        entry = self._watched.get(index)
        parameters = parameters_of(optimizer)
        # A lazy module's parameters have values from its first forward on: until then each look samples them again.
        if entry is None or len(entry.sample.parameters) != len(parameters) or not entry.sample.complete:
            sample = Sample(parameters)
            if entry is not None and entry.sample.sizes == sample.sizes:
                return entry  # parameters that can never be read: its window goes on
            # Steps go on counting: files of the full-batch run are found by their numbers.
            steps = entry.steps if entry is not None else 0
            entry = WatchedOptimizer(index, optimizer, sample, sample.gradients(), sample.weights(), steps=steps)
            self._watched[index] = entry
        return entry

    def let_go(self) -> None:
        """Drops the gradients that were kept, before a backward pass makes others: only one copy is in memory."""
        for entry in self._watched.values():
            entry.summed, entry.used = None, {}

    def clear(self) -> bool:
        """Makes all gradients zero; returns whether any was not."""
        had_gradients = any(not entry.is_cleared for entry in self)
        for parameter in self.all_parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        # Else the next look would say that the script has cleared them.
        self.look()
        return had_gradients

    def settings(self) -> dict[int, list[dict[str, float]]]:
        """Returns the settings of all optimizers."""
        return {index: settings_of(optimizer) for index, optimizer in enumerate(self._optimizers)}

    def changed_settings(self, before: dict[int, list[dict[str, float]]]) -> list[int]:
        """Returns the optimizers whose settings are not those of `before`; new ones have none to change."""
        return [index for index, now in self.settings().items() if index in before and now != before[index]]

    def look(self) -> Look:
        """Compares everything with the last look and remembers how it is now."""
        look = Look()
        for entry in self:
            index, had = entry.index, not entry.is_cleared
            gradients, weights = entry.sample.gradients(), entry.sample.weights()
            if not same(entry.gradients, gradients):  # an exact comparison: a division by 1.0 is no change
                look.changed[index] = gradients - entry.gradients
                entry.gradients = gradients
                if had and entry.is_cleared:
                    look.cleared.append(index)
            if not same(entry.weights, weights):
                look.moved[index], entry.weights = entry.weights, weights
        return look

    def keep_unclipped(self, look: Look) -> None:
        """Keeps the gradients that have changed since their last backward pass and were not clipped."""
        for entry in map(self.of, look.changed):
            if entry.summed is not None and not entry.clipped:
                entry.keep()

    def forget(self, indices: Iterable[int]) -> None:
        """Notes that the gradients of these optimizers are gone."""
        for index in indices:
            entry = self.of(index)
            entry.pending, entry.summed, entry.used = 0, None, {}
            for part in entry.increments:  # kept: another optimizer's step may still use the same passes
                part.cleared = True

    def differs(self) -> bool:
        """Whether weights moved or gradients vanished since the last look; remembers nothing."""
        return any(
            not same(entry.weights, entry.sample.weights())
            or (not entry.is_cleared and not bool(entry.sample.gradients().any()))
            for entry in self
        )

    def has_edits(self) -> bool:
        """Whether gradients are no longer those of the last look; remembers nothing."""
        return any(not same(entry.gradients, entry.sample.gradients()) for entry in self)


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Returns the parameters of an optimizer in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def settings_of(optimizer: Any) -> list[dict[str, float]]:
    """Returns the numbers among the settings of every parameter group; pairs such as Adam's betas one by one."""
    return [_numbers(group) for group in optimizer.param_groups]


def rates_of(optimizer: Any) -> list[float]:
    """Returns the learning rates of the groups that have one."""
    return [group["lr"] for group in settings_of(optimizer) if "lr" in group]


def counted_steps(optimizer: Any) -> float | None:
    """Returns how many steps the optimizer itself has counted; None where it counts none."""
    # An optimizer counts for each parameter; the first counter stands for all.
    for state in list(getattr(optimizer, "state", {}).values())[:1]:
        step = state.get("step") if isinstance(state, Mapping) else None
        return _number(step)
    return None


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in group.items():
        if name == "params":
            continue
        parts = {f"{name}[{at}]": part for at, part in enumerate(value)} if isinstance(value, (tuple, list)) else {}
        for label, part in (parts or {name: value}).items():
            number = _number(part)
            if number is not None:
                numbers[label] = number
    return numbers


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta else None
    return float(value) if isinstance(value, (int, float)) else None


class IncomingGradients:
    """Sums what each backward pass of this process gives, at the sampled elements of every optimizer.

    A leaf's hook sees the gradient before DDP reduces it, and before another hook moves it out of `.grad` (into main
    gradients in float32). FSDP2's sharded parameters have no such moment: nothing is known of them here.

    Args:
        always: Listen to every pass. Else to the first one of each optimizer, and to those behind it where a hook may
            move gradients away: reading them costs time.
    """

    def __init__(self, *, always: bool) -> None:
        self._always = always
        self._parts: dict[int, list[torch.Tensor]] = {}
        self._sharded: set[int] = set()
        self._hooks: dict[tuple[int, int], Any] = {}  # a parameter may be several optimizers'
        self._complete: set[int] = set()  # optimizers whose `.grad` shows all that the first pass gave
        self._steps: dict[int, int] = {}  # those that each optimizer had made when the pass began

    def listen(self, entry: WatchedOptimizer) -> None:
        """Listens to the parameters of an optimizer that are not listened to yet, where that is needed."""
        index, sample = entry.index, entry.sample
        self._steps[index] = entry.steps
        # Asked at each pass, because a hook may be registered after the first one.
        if index in self._complete and not any(map(has_post_accumulate_hooks, sample.parameters)):
            return
        if index in self._parts and len(self._parts[index]) == len(sample.parameters):
            return
        self._parts[index] = [torch.zeros(size, dtype=torch.float64, device="cpu") for size in sample.sizes]
        for at, parameter in enumerate(sample.parameters):
            if type(parameter.data) is not torch.Tensor:
                self._sharded.add(index)
            elif parameter.requires_grad and (index, id(parameter)) not in self._hooks:
                hook = parameter.register_hook(partial(self._add, index, at, sample))
                self._hooks[index, id(parameter)] = hook

    def _add(self, index: int, at: int, sample: Sample, gradient: torch.Tensor) -> None:
        values = plain(gradient)
        if values is not None:
            self._parts[index][at] += sample.elements(at, values)

    def take(self, index: int) -> torch.Tensor | None:
        """Returns what was added since it was taken last, shape (S,); None where nothing is known."""
        parts = self._parts.get(index)
        if parts is None or index in self._sharded:
            return None
        total = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device="cpu")
        self._parts[index] = [torch.zeros_like(part) for part in parts]
        return total

    def take_moved(self, entry: WatchedOptimizer, seen: Look) -> torch.Tensor | None:
        """Returns what a pass gave an optimizer some of whose gradients were moved out of `.grad` inside it.

        None where `.grad` shows all of it, or where a step inside the pass has used it. Shape (S,).
        """
        incoming = self.take(entry.index)
        if incoming is None or entry.steps != self._steps.get(entry.index) or entry.index in seen.moved:
            return None
        change = seen.changed.get(entry.index, torch.zeros_like(incoming))
        pieces = [part.split(entry.sample.sizes) for part in (entry.gradients, change, incoming)]
        # A parameter that was given something and has a `.grad` of zero lost it to a hook inside the pass.
        moved = [not bool(now.any()) and bool(arrived.any()) for now, _, arrived in zip(*pieces, strict=True)]
        if not any(moved):
            # A pass that gave nothing, of a micro-batch without targets, does not show where gradients go.
            if bool(incoming.any()):
                self._stop(entry)
            return None
        rows = zip(moved, *pieces[1:], strict=True)
        return torch.cat([arrived if is_moved else added for is_moved, added, arrived in rows])

    def _stop(self, entry: WatchedOptimizer) -> None:
        """Ends listening to an optimizer whose `.grad` shows all that a pass gives, unless hooks may move it later."""
        if self._always or any(map(has_post_accumulate_hooks, entry.sample.parameters)):
            return
        self._complete.add(entry.index)
        del self._parts[entry.index]
        for key in [key for key in self._hooks if key[0] == entry.index]:
            self._hooks.pop(key).remove()
