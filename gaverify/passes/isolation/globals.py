"""Torch's global flags and modes and all random generators: saved, set and restored."""

from __future__ import annotations

import ctypes
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gaverify.errors import ProblemError
from gaverify.passes.precision import ACCELERATORS, generators_in_use
from gaverify.torch_internals import fp32_precision_accessors, is_compiler_imported, set_deterministic

# The random generators: torch's, Python's and NumPy's global ones, and those that the user's code holds itself.
#
# The functions here read, compare and restore the state of a generator of any of these kinds.


# Generators of Python and NumPy that a `ModelState` found in the user's code while `isolated_generators` is open: until
# it closes they count as the global ones do. Draws of a `torch.Generator` are dealt out at the dispatcher instead.
_scopes: list[dict[int, Any]] = []


@contextmanager
def isolated_generators() -> Iterator[None]:
    """Restores the states of torch's generators on every device, and of Python's and NumPy's."""
    restore = generator_states()
    _scopes.append({})
    try:
        yield
    finally:
        _scopes.pop()
        restore()


def register_generator(generator: Any) -> None:
    """Lets a Python or NumPy generator of the user's count as a global one until `isolated_generators` closes."""
    if _scopes:
        _scopes[-1][id(generator)] = generator


def foreign_generators() -> dict[str, Any]:
    """Returns Python's and, where it is loaded, NumPy's global generator: modules that answer as their objects do."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    return {"random": random} | ({"numpy": numpy} if numpy is not None else {})


def generator_states() -> Callable[[], None]:
    """Takes the states of all generators and returns the function that puts them back."""
    states = {device: state_of(generator) for device, generator in generators_in_use().items()}
    foreign_restorers = [restorer(generator) for generator in _foreign()]

    def restore() -> None:
        for device, generator in generators_in_use().items():
            if device in states:
                set_state(generator, states[device])
            else:  # first used meanwhile
                # Its state before the pass is the one that it was seeded with: nobody had drawn from it.
                generator.manual_seed(generator.initial_seed())
        for put_back in foreign_restorers:
            put_back()

    return restore


def seed_everything(seed: int) -> None:
    """Seeds the torch, Python and NumPy generators."""
    seed_torch(seed)
    for generator in foreign_generators().values():
        # NumPy refuses seeds of more than 32 bits.
        generator.seed(seed if generator is random else seed % 2**32)


def seed_torch(seed: int) -> None:
    """Seeds the default generators of all devices in use.

    Not `torch.manual_seed`: that leaves the seed waiting for devices which the user's code may use much later.
    """
    for generator in generators_in_use().values():
        generator.manual_seed(seed)


def torch_generator_states() -> list[bytes]:
    """Returns comparable states of torch's generators."""
    return [comparable(state_of(generator)) for generator in generators_in_use().values()]


def foreign_generator_states() -> tuple[Any, ...]:
    """Returns comparable states of the Python and NumPy generators, whose draws the dispatcher does not see."""
    return tuple(comparable(state_of(generator)) for generator in _foreign())


def state_of(generator: Any) -> Any:
    """Returns the state of a generator of torch, Python or NumPy, or of a module of global ones."""
    if hasattr(generator, "getstate"):
        return generator.getstate()
    if hasattr(generator, "get_state"):
        return generator.get_state()
    return getattr(generator, "bit_generator", generator).state  # numpy.random.Generator, or a bare BitGenerator


def set_state(generator: Any, state: Any) -> None:
    """Puts a generator into a state that `state_of` has returned."""
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def restorer(generator: Any) -> Callable[[], None]:
    """Takes the state of one generator and returns the function that puts it back."""
    return partial(set_state, generator, state_of(generator))


def comparable(state: Any) -> Any:
    """Returns a state as something that equals another such state; NumPy, which torch does not need, is not asked."""
    if isinstance(state, torch.Tensor):  # contiguous, and on the CPU
        return ctypes.string_at(state.data_ptr(), state.numel())
    if isinstance(state, tuple):
        return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)
    return repr(state)


def _foreign() -> list[Any]:
    return [*foreign_generators().values(), *(_scopes[-1].values() if _scopes else ())]


# Context managers that set and restore torch's global flags, and `.grad`.


Flag = tuple[Callable[[], Any], Callable[[Any], Any]]
_UNREADABLE = object()


def _attribute(owner: Any, name: str) -> Flag:
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


def _older(flag: Flag) -> Flag:
    """A precision switch of torch's older generation: it cannot be read while the newer ones say something else."""
    read, write = flag

    def read_if_consistent() -> Any:
        try:
            return read()
        except RuntimeError:
            return _UNREADABLE

    return read_if_consistent, write


def _newer(backend: str, operation: str) -> Flag:
    """A precision switch of torch's newer generation, as `torch.backends.cuda.matmul.fp32_precision`.

    Reading it returns the precision in effect, even one set by a wider switch; "none" lets that one decide again.
    """
    accessors = fp32_precision_accessors()
    assert accessors is not None
    read, write = accessors

    def restore(value: Any) -> None:
        # Inherited first: a switch that says by itself what the wider one says would no longer follow it.
        write(backend, operation, "none")
        if read(backend, operation) != value:
            write(backend, operation, value)

    return (lambda: read(backend, operation)), restore


# How float32 may be multiplied: the wider switches first, which the narrower ones inherit from; setting an older one
# sets newer ones as well, and is not possible before those agree, so that the newer ones stand on both sides of it.
_NEWER: tuple[Flag, ...] = (
    tuple(
        _newer(backend, operation)
        for backend, operation in (
            ("generic", "all"),
            *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
        )
    )
    if fp32_precision_accessors() is not None
    else ()
)
PRECISION: tuple[Flag, ...] = (
    *_NEWER,
    _older((torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)),
    _older(_attribute(torch.backends.cudnn, "allow_tf32")),
    *_NEWER,
)
# The narrowest newer switches, which inherit from none once they say something themselves.
_PRODUCTS = [(backend, operation) for backend in ("cuda", "mkldnn") for operation in ("matmul", "conv", "rnn")]
# (read, write) of the flags that a forward may set and forget; what a context manager of torch's would put back is here
# as well, because a forward may set it by hand.
ARITHMETIC: tuple[Flag, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    *PRECISION,
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_num_threads, torch.set_num_threads),
)


def _autocast(kind: str) -> tuple[Flag, Flag]:
    return (
        (lambda: torch.is_autocast_enabled(kind), lambda value: torch.set_autocast_enabled(kind, value)),
        (lambda: torch.get_autocast_dtype(kind), lambda value: torch.set_autocast_dtype(kind, value)),
    )


KERNELS: tuple[Flag, ...] = (
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    *(flag for kind in ("cpu", *ACCELERATORS) if torch.amp.is_autocast_available(kind) for flag in _autocast(kind)),
)


def flag_states(flags: tuple[Flag, ...]) -> Callable[[], None]:
    """Reads flags and returns the function that sets those back that have changed."""
    saved = [(read, write, read()) for read, write in flags]

    def restore() -> None:
        for read, write, value in saved:
            if value is not _UNREADABLE and read() != value:
                write(value)

    return restore


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiplies float32 as it is for the block, not rounded to TF32 or bfloat16.

    A state that passes start from has to be taken inside the block: one from before would switch the rounding on again.
    """
    restore = flag_states(PRECISION)
    try:
        # As in `PRECISION`: the older switches refuse to be set or read while the newer ones say something else.
        _write_newer("ieee")
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        _write_newer("ieee")
        yield
    finally:
        restore()


def _write_newer(precision: str) -> None:
    accessors = fp32_precision_accessors()
    if accessors is not None:
        for backend, operation in _PRODUCTS:
            accessors[1](backend, operation, precision)


@contextmanager
def deterministic() -> Iterator[None]:
    """Uses deterministic algorithms where they exist, with gradients enabled, and restores every flag in the end."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    restore = flag_states((*ARITHMETIC, *KERNELS))
    try:
        # Whoever calls may stand inside `no_grad` or inference mode, where no gradient is formed.
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
            warnings.filterwarnings("ignore", message=".*[Dd]eterministic behavior was enabled.*")
            # a control run that holds a result constant cuts the graph below the user's hooks on purpose
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            set_deterministic(True, warn_only=True)
            # Filling every `torch.empty` with NaN would cost a pass over memory and finds nothing here.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            # Benchmarking picks an algorithm by shape and moment: the same pass would round otherwise next time.
            torch.backends.cudnn.benchmark = False
            yield
    finally:
        set_deterministic(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        restore()


@contextmanager
def eager_when_compiled(modules: list[nn.Module]) -> Iterator[None]:
    """Runs models from `torch.compile` eagerly: the draws inside a compiled graph cannot be replayed per sample."""
    with ExitStack() as stack:
        if is_compiler_imported():
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def gradients_kept(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Takes the `.grad` of every parameter away and gives it back in the end.

    Raises:
        ProblemError: A parameter has no shape yet.
    """
    check_initialised(parameters)
    saved = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in saved:
            parameter.grad = gradient


def check_initialised(tensors: list[nn.Parameter] | list[torch.Tensor]) -> None:
    """Raises `ProblemError` when a lazy module has not seen an input yet: there is nothing to take the gradient of."""
    waiting = sum(is_lazy(tensor) for tensor in tensors)
    if waiting:
        raise ProblemError(
            f"{waiting} of the model's {len(tensors)} parameters and buffers have no shape yet, because a lazy module "
            "(such as nn.LazyLinear) has not seen an input. Run one forward first, for example `loss(model, batch)`"
        )
