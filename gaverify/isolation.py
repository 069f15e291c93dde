"""Context managers that leave everything as it was: generators, global flags, modes, gradients, parameters, buffers, attributes."""

from __future__ import annotations

import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

# What every `nn.Module` carries for its own bookkeeping; the user's state lies beside these.
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_DEPTH = 4  # how far state is followed into a user's own helper objects


@contextmanager
def isolated_generators() -> Iterator[None]:
    """Restores the states of the torch (CPU and CUDA), Python and NumPy generators."""
    restore = generator_states()
    try:
        yield
    finally:
        restore()


def generator_states() -> Callable[[], None]:
    """Takes the states of all global generators and returns the function that puts them back."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    python = random.getstate()
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    numpy = numpy_random.get_state() if numpy_random is not None else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if mps is not None:
            torch.mps.set_rng_state(mps)
        random.setstate(python)
        if numpy_random is not None and numpy is not None:
            numpy_random.set_state(numpy)

    return restore


def foreign_generator_states() -> tuple[Any, ...]:
    """Returns comparable states of the Python and NumPy generators, whose draws the dispatcher does not see."""
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    if numpy_random is None:
        return (random.getstate(), None)
    kind, keys, position, *rest = numpy_random.get_state()
    return (random.getstate(), (kind, keys.tobytes(), position, *rest))


@contextmanager
def deterministic() -> Iterator[None]:
    """Uses deterministic algorithms where they exist, with gradients enabled, and restores every flag in the end."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark = torch.backends.cudnn.benchmark
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
            warnings.filterwarnings("ignore", message=".*[Dd]eterministic behavior was enabled.*")
            torch.use_deterministic_algorithms(True, warn_only=True)
            # Filling every `torch.empty` with NaN would cost a pass over memory and finds nothing here.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark = False
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def eager_when_compiled(modules: list[nn.Module]) -> Iterator[None]:
    """Runs models from `torch.compile` eagerly: the draws inside a compiled graph cannot be replayed per sample."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def mode_set(modules: list[nn.Module], mode: str | None) -> Iterator[None]:
    """Puts models into `train` or `eval` mode (None: as they are) and every module back into its own."""
    flags = [(module, module.training) for root in modules for module in root.modules()]
    try:
        if mode is not None:
            for root in modules:
                root.train(mode == "train")
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def gradients_kept(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Takes the `.grad` of every parameter away and gives it back in the end."""
    kept = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


class ModelState:
    """The values that a forward may change, taken once and restorable any number of times.

    Buffers and plain attributes are copied. Parameters are copied only when something is about to write to them
    (`before_write`, called from the dispatcher), because a copy of a large model would double its memory for the rare
    forward that writes (`Embedding(max_norm=…)`, an optimizer step in a hook).
    """

    def __init__(self, modules: list[nn.Module], others: tuple[Any, ...] = ()) -> None:
        self._restorers: list[Callable[[], None]] = []
        self._parameters: dict[int, nn.Parameter] = {}
        self._written: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        self._memo: set[int] = set()
        for root in modules:
            for module in root.modules():
                self._take_module(module)
        for other in others:
            self._take(other, 0)

    @property
    def written(self) -> tuple[nn.Parameter, ...]:
        """The parameters that some pass has written to."""
        return tuple(parameter for parameter, _ in self._written.values())

    def before_write(self, tensor: torch.Tensor) -> None:
        """Keeps the value of the parameter that shares storage with `tensor`, if there is one, before it changes."""
        pointer = _storage(tensor)
        parameter = self._parameters.get(pointer) if pointer else None
        if parameter is not None and pointer not in self._written:
            self._written[pointer] = (parameter, parameter.detach().clone())

    @torch.no_grad()
    def restore(self) -> None:
        """Puts every value back, in place, so that ties and outside references survive."""
        for parameter, value in self._written.values():
            parameter.data.copy_(value)
        for restore in self._restorers:
            restore()

    def _take_module(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and _storage(parameter):
                self._parameters[_storage(parameter)] = parameter
        if not isinstance(module, torch.jit.ScriptModule):  # its registries are views that take no update
            self._restorers.append(_registries(module))
        for buffer in module._buffers.values():
            self._take(buffer, 0)
        self._take_attributes(module, OWN_ATTRIBUTES, 0)

    def _take_attributes(self, owner: Any, skip: frozenset[str], depth: int) -> None:
        own = vars(owner)
        kept = {name: value for name, value in own.items() if name not in skip}

        def restore() -> None:
            for name in [name for name in own if name not in skip and name not in kept]:
                del own[name]
            own.update(kept)

        self._restorers.append(restore)
        for value in kept.values():
            self._take(value, depth + 1)

    def _take(self, value: Any, depth: int) -> None:
        """Keeps whatever of `value` can change in place."""
        if isinstance(value, (*_PLAIN, type, ModuleType, nn.Module, nn.Parameter)) or depth > _DEPTH:
            return
        if id(value) in self._memo:
            return
        self._memo.add(id(value))
        if isinstance(value, torch.Tensor):
            self._restorers.append(_tensor_restorer(value))
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._restorers.append(lambda: _set_generator(value, state))
        elif isinstance(value, random.Random):
            kept = value.getstate()
            self._restorers.append(lambda: value.setstate(kept))
        elif isinstance(value, list | dict | set | deque):
            self._take_container(value, depth)
        elif isinstance(value, tuple):
            for entry in value:
                self._take(entry, depth + 1)
        elif isinstance(value, FunctionType | MethodType):
            self._take_function(value, depth)
        elif hasattr(value, "__dict__") and not type(value).__module__.startswith("torch"):
            self._take_attributes(value, frozenset(), depth)

    def _take_container(self, value: Any, depth: int) -> None:
        kept = value.copy()

        def restore() -> None:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(kept)

        self._restorers.append(restore)
        for entry in kept.values() if isinstance(kept, dict) else kept:
            self._take(entry, depth + 1)

    def _take_function(self, function: Any, depth: int) -> None:
        """Follows what a loss function keeps between calls: its closure, its owner, the globals that it names."""
        if isinstance(function, MethodType):
            self._take(function.__self__, depth)
            function = function.__func__
        if not isinstance(function, FunctionType):
            return
        for cell in function.__closure__ or ():
            self._take_cell(cell, depth)
        names = [name for name in function.__code__.co_names if name in function.__globals__]
        kept = {name: function.__globals__[name] for name in names}
        plain = {name: value for name, value in kept.items() if isinstance(value, (*_PLAIN, tuple, torch.Tensor))}
        self._restorers.append(lambda: function.__globals__.update(plain))
        for value in kept.values():
            if isinstance(value, list | dict | set | deque | torch.Tensor | torch.Generator | random.Random):
                self._take(value, depth + 1)

    def _take_cell(self, cell: CellType, depth: int) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return

        def restore() -> None:
            cell.cell_contents = value

        self._restorers.append(restore)
        self._take(value, depth + 1)


def _registries(module: nn.Module) -> Callable[[], None]:
    """Puts the very objects back that a module had registered: a forward may assign `self.buffer = new`."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    flags = [(parameter, parameter.requires_grad) for parameter in parameters.values() if parameter is not None]

    def restore() -> None:
        module._parameters.update(parameters)
        module._buffers.update(buffers)
        for parameter, flag in flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)

    return restore


def _tensor_restorer(tensor: torch.Tensor) -> Callable[[], None]:
    data, value = tensor.data, tensor.detach().clone()

    def restore() -> None:
        tensor.data = data  # a forward may have resized it, or moved it elsewhere
        data.copy_(value)

    return restore


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors and subclasses without storage
        return 0
