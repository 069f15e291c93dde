"""Training and evaluation mode, and other methods of `nn.Module` whose names a user's class may use for something else.

The mode is set for as long as a verification runs, as the user's training loop sets it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn

from gaverify.errors import ProblemError, text_of
from gaverify.passes.calls import OperationMode
from gaverify.passes.isolation import ModelState, written_tensors
from gaverify.passes.wrappers import keep_reducers
from gaverify.torch_internals import submodules_of
from gaverify.tracebacks import user_frame

AUTO = "auto"
"""Training mode, unless the layers of a model are in different modes: those stay, as whoever made it has decided."""
_NAMES_OF_MODE = ("mode", "training", "is_training", "train", "is_train", "train_mode")
_QUERIES: dict[str, dict[str, Any]] = {
    "parameters": {},
    "named_parameters": {"prefix": "", "recurse": True},
    "buffers": {},
    "named_buffers": {"prefix": "", "recurse": True},
    "modules": {},
    "named_modules": {"prefix": ""},
    "children": {},
}
"""The methods that list what a module holds, with the arguments that torch itself passes to them."""


def check_queries(module: nn.Module) -> None:
    """Raises `ProblemError` where a class has another method under a name by which torch lists what a module holds."""
    for name, arguments in _QUERIES.items():
        if getattr(type(module), name) is getattr(nn.Module, name) and name not in vars(module):
            continue
        try:
            list(getattr(module, name)(**arguments))
        except Exception as error:
            raise ProblemError(
                f"`{name}` of the model's class {type(module).__name__} does not list what that of torch.nn.Module "
                f"lists: it raised {type(error).__name__}: {text_of(error) or 'no message'}; give it another name"
            ) from error
    for child in submodules_of(module).values():
        if child is not None:
            check_queries(child)


@contextmanager
def mode_set(modules: Sequence[nn.Module], mode: str | None) -> Iterator[None]:
    """Puts models into a mode, and every module back into its own mode and its place.

    Submodules that were exchanged meanwhile come back here and not in `ModelState`, which is restored after every pass:
    a control run exchanges some on purpose, for longer than a pass.

    Args:
        modules: The models, and losses that are modules.
        mode: "train", "eval", "auto", or None, which changes none.

    Raises:
        ProblemError: A `train` of the user's own raises.
    """
    flags = [(module, module.training) for root in modules for module in root.modules()]
    # (the registries of a scripted module are views into C++ that take no update)
    plain = [module for module, _ in flags if not isinstance(module, torch.jit.ScriptModule)]
    places = [(module, name, child) for module in plain for name, child in submodules_of(module).items()]
    # A `train` of the user's may do more than set flags, such as merging adapters into weights.
    switches = mode is not None and any(_own_switch(module) for module, _ in flags)
    state = ModelState(list(modules)) if switches else None
    try:
        for root in modules if mode is not None else ():
            if mode != AUTO or not _is_mixed(root):
                with nullcontext() if state is None else _keep_writes(state):
                    _switch(root, mode != "eval")
        yield
    finally:
        if state is not None:
            state.restore()
            keep_reducers()  # the state is from before DistributedDataParallel's were renewed for float64
        for module, name, child in places:
            # Not by assignment to the attribute: the user's `__setattr__` may do more than that.
            if submodules_of(module).get(name) is not child:
                submodules_of(module)[name] = child
        for module, flag in flags:
            if module.training != flag:
                module.training = flag


def layers_in_evaluation(roots: Sequence[nn.Module]) -> tuple[str, ...]:
    """Returns the layers that are in evaluation mode beside others in training mode, as "6 BatchNorm2d".

    Only those count whose code reads the mode: it changes nothing in a `Linear`.
    """
    layers = [module for root in roots if _is_mixed(root) for module in root.modules()]
    kinds = Counter(type(layer) for layer in layers if not layer.training)
    return tuple(f"{count} {kind.__name__}" for kind, count in kinds.items() if _reads_mode(kind))


def mode_word(mode: str | None, in_evaluation: tuple[str, ...]) -> str:
    """Returns what a report says about a mode that was asked for: "as is" where the layers stay as they were."""
    if mode == AUTO:
        return "as is" if in_evaluation else "train"
    return mode or "as is"


def _is_mixed(root: nn.Module) -> bool:
    return len({module.training for module in root.modules()}) > 1


def _reads_mode(kind: type) -> bool:
    classes = kind.__mro__[: kind.__mro__.index(nn.Module)]
    functions = [value for each in classes for value in vars(each).values() if isinstance(value, FunctionType)]
    return any("training" in function.__code__.co_names for function in functions)


def _keep_writes(state: ModelState) -> OperationMode:
    """Returns a mode that keeps the values of parameters before something writes to them."""

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in written_tensors(func, args, kwargs):
            state.before_write(tensor)
        return func(*args, **kwargs)

    return OperationMode(handle)


def _switch(module: nn.Module, train: bool) -> None:
    """Does what `module.train(train)` does, but runs no method of the user's that only has this name."""
    switch = _own_switch(module)
    try:
        if switch is not None:
            switch(train)
        elif module.training != train:  # a `__setattr__` of the user's may refuse
            module.training = train
    except Exception as error:
        frame = user_frame(error)
        raise ProblemError(
            f"`train({train})` of the model's class {type(module).__name__} raised {type(error).__name__}: "
            f"{text_of(error) or 'no message'}{f' ({frame})' if frame else ''}"
        ) from error
    for child in submodules_of(module).values() if switch is None else ():
        if child is not None:
            _switch(child, train)


def _own_switch(module: nn.Module) -> Callable[[bool], Any] | None:
    """Returns a `train` of the user's that switches the mode, which may freeze layers; None where it is torch's.

    A method `train(epochs)` or `train(loader)` trains the model instead: it has the name by chance, and is not run.
    """
    method = vars(module).get("train", type(module).train)
    if method is nn.Module.train or not inspect.isroutine(method):
        return None
    try:
        bound = inspect.signature(module.train).bind(True)
    except (TypeError, ValueError):  # it needs more than the mode, or tells nothing about its parameters
        return None
    first = bound.signature.parameters[next(iter(bound.arguments))]
    code = getattr(method, "__code__", None)
    switches = (
        first.name in _NAMES_OF_MODE
        or first.kind is first.VAR_POSITIONAL
        # A method of the class that was set on the instance: `layer.train = disabled_train`
        or any(name in _NAMES_OF_MODE for name in bound.signature.parameters if first.name == "self")
        or (isinstance(first.default, bool) and code is not None and "train" in code.co_names)
    )
    return module.train if switches else None
