"""Activations of the full batch that do not stay on the device: made again block by block, or kept in host memory.

The blocks are those of a model's modules that are repeated. A block that runs twice must do the second time what it did
the first, and leave no second trace. So it is run again from the state that it had before its first run (statistics,
counters, caches among its arguments, every generator), and afterwards everything is as the forward left it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gaverify.passes.isolation import ModelState, generator_states, storage
from gaverify.passes.randomness import unwatched
from gaverify.records.comparison import Reference
from gaverify.torch_internals import no_dispatch_modes
from gaverify.tracebacks import hands_over

_CHAIN = 4  # members from which on a plain chain of layers is cut into parts


def blocks_of(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the modules that are checkpointed one by one: none lies inside another, each is named once.

    A block has modules of its own and a sibling of its class. A chain (`nn.Sequential`) is looked into first, because
    its members keep what it keeps and are smaller; one without repeated members is a block itself, and where it is a
    long one `parts_of` cuts it. A single layer is none: of a layer hardly more is saved than the input, which
    checkpointing saves as well.
    """
    found: dict[int, nn.Module] = {}
    for root in modules:
        found |= {id(block): block for block in _inside(root)}
    return list(found.values())


def _inside(module: nn.Module) -> list[nn.Module]:
    """The blocks inside a module; the module itself where it is a long chain without any."""
    if isinstance(module, torch.jit.ScriptModule):  # its forward cannot be exchanged
        return []
    children = list(_called(module.children()))
    alike = Counter(type(child) for child in children)
    found: list[nn.Module] = []
    for child in children:
        if not any(True for _ in child.children()):
            continue
        repeated = alike[type(child)] > 1
        inner = _inside(child) if is_chain(child) or not repeated else []
        found += inner or ([child] if repeated else [])
    return found or ([module] if is_chain(module) and len(children) >= _CHAIN else [])


def _called(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Modules that a forward calls: a list of modules is never called, its entries are."""
    for module in modules:
        if type(module).forward is nn.Module.forward and "forward" not in vars(module):
            yield from _called(module.children())
        elif not isinstance(module, torch.jit.ScriptModule):
            yield module


def is_chain(module: nn.Module) -> bool:
    """Whether a module does nothing but run its members one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def parts_of(chain: nn.Module) -> list[nn.Sequential]:
    """Cuts a long chain of n members into √n parts: as many inputs are kept as members are run again at a time."""
    members = list(chain.children())
    if len(members) < _CHAIN:
        return [nn.Sequential(*members)]
    size = math.isqrt(max(len(members) - 1, 0)) + 1
    return [nn.Sequential(*members[at : at + size]) for at in range(0, len(members), size)]


_ABSENT = object()
Forward = Callable[..., Any]


@contextmanager
def recomputed(modules: Sequence[nn.Module], states: WeakSet[ModelState]) -> Iterator[None]:
    """Checkpoints every block of `modules` for as long as it is open.

    Args:
        modules: The model, and the loss where it is a module.
        states: Takes the state of each block before its first run; whoever watches writes tells them.
    """
    with ExitStack() as stack:
        for block in blocks_of(modules):
            stack.enter_context(_exchanged(block, _chained(block, modules, states)))
        yield


def _chained(block: nn.Module, modules: Sequence[nn.Module], states: WeakSet[ModelState]) -> Forward:
    """The checkpointed forward of a block; of a chain, part by part."""
    if not is_chain(block):
        return _checkpointed(block, block.forward, modules, states)
    parts = [_checkpointed(part, part.forward, modules, states) for part in parts_of(block)]

    def forward(value: Any) -> Any:
        for part in parts:
            value = part(value)
        return value

    return forward


def _checkpointed(
    block: nn.Module, inner: Forward, modules: Sequence[nn.Module], states: WeakSet[ModelState]
) -> Forward:
    @hands_over
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        from torch.utils.checkpoint import checkpoint

        state = partial(ModelState, [block], (args, kwargs), part_of=modules)
        before, generators = state(), generator_states()
        states.add(before)
        return checkpoint(
            partial(inner, **kwargs),
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # `generators` are all of them, Python's and NumPy's as well
            context_fn=lambda: (nullcontext(), _again(state, before, generators)),
        )

    return forward


@contextmanager
def _again(state: Callable[[], ModelState], before: ModelState, generators: Callable[[], None]) -> Iterator[None]:
    """Runs a block from the state `before`, and puts back what that changed."""
    now, running = state(), generator_states()
    before.restore()
    generators()
    try:
        with unwatched():
            yield
    finally:
        now.restore()
        running()


@contextmanager
def _exchanged(block: nn.Module, forward: Forward) -> Iterator[None]:
    """Gives a module another `forward`, on the instance: its hooks run around it as before, and once."""
    own = vars(block)
    kept = own.get("forward", _ABSENT)
    own["forward"] = forward
    try:
        yield
    finally:
        if kept is _ABSENT:
            own.pop("forward", None)
        else:
            own["forward"] = kept


_SMALL = 1 << 14  # elements that stay where they are: a transfer costs more than it frees


@contextmanager
def offloaded(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Moves what autograd saves to the host, and back when the backward asks for it.

    What lies on a CPU is there already and is left alone. So are parameters and buffers, which stay on the device
    anyway. The transfers are hidden from gaverify's modes: a control run compares the operations of both strategies.
    """
    if device.type == "cpu":
        yield
        return
    own = {storage(tensor) for root in modules for tensor in (*root.parameters(), *root.buffers())}

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device | None]:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "cpu"
        if not plain or tensor.numel() <= _SMALL or storage(tensor) in own:
            # detached: a node that saves its own output would otherwise keep itself alive
            return tensor.detach(), None
        with no_dispatch_modes(), torch.no_grad():
            return tensor.to("cpu"), tensor.device

    def unpack(packed: tuple[torch.Tensor, torch.device | None]) -> torch.Tensor:
        tensor, where = packed
        if where is None:
            return tensor
        with no_dispatch_modes(), torch.no_grad():
            return tensor.to(where)

    with saved_tensors_hooks(pack, unpack):
        yield


@dataclass
class Fitting:
    """The way that a verification runs its full batch; all its passes share one, so that what did not fit stays out.

    Args:
        asked: What the user asked for.
    """

    asked: Reference = Reference.FULL
    failed: list[Reference] = field(default_factory=list)
    states: WeakSet[ModelState] = field(default_factory=WeakSet)

    @property
    def way(self) -> Reference:
        """The way that is run now."""
        if self.asked is not Reference.AUTO:
            return self.asked
        return next(way for way in (Reference.FULL, Reference.OFFLOAD, Reference.RECOMPUTE) if way not in self.failed)

    def falls_through(self, device: torch.device) -> bool:
        """Notes that memory ran out; returns whether another way is left to try.

        On a CPU the saved activations lie in the host's memory already, so that offloading them would change nothing.
        """
        if self.asked is not Reference.AUTO or self.way is Reference.RECOMPUTE:
            return False
        self.failed.append(self.way)
        if self.way is Reference.OFFLOAD and device.type == "cpu":
            self.failed.append(Reference.OFFLOAD)
        return True

    def before_write(self, tensor: torch.Tensor) -> None:
        """Tells the blocks that will be recomputed that something is about to write to a tensor."""
        for state in list(self.states):
            state.before_write(tensor)


@contextmanager
def fitted(fitting: Fitting, modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Runs the forward and the backward inside the way that `fitting` says."""
    if fitting.way is Reference.OFFLOAD:
        with offloaded(modules, device):
            yield
    elif fitting.way is Reference.RECOMPUTE:
        with recomputed(modules, fitting.states):
            yield
    else:
        yield
