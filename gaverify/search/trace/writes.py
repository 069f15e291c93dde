"""Watches and diverts the writes to some tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch

from gaverify.passes.calls import OperationMode, operation_name
from gaverify.passes.isolation import written_arguments, written_tensors
from gaverify.search.trace.traces import Frame
from gaverify.torch_internals import tree_map_only, without_torch_function
from gaverify.tracebacks import calling_frame


def watch_writes(
    addresses: Mapping[int, str],
    notice: Callable[[str, str, Frame], None],
    kept: Mapping[int, str],
    read: Callable[[str], None],
) -> OperationMode:
    """Returns a mode that calls `notice` before every write to a tensor of the state.

    Args:
        addresses: The names of the state's tensors by `address`.
        notice: Takes the tensor's name, the operation and its line.
        kept: Those of them that are no parameters.
        read: Takes the name of one of these that an operation reads and does not write.
    """

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = written_tensors(func, args, kwargs)
        # In training (a True among its arguments) it writes the running statistics, which its schema does not declare.
        if "batch_norm" in func.__name__ and any(arg is True for arg in args):
            written = [*written, *(arg for arg in args[3:5] if isinstance(arg, torch.Tensor))]
        for target in written:
            name = addresses.get(address(target))
            if name is not None:
                notice(name, operation_name(func), calling_frame())
        # reading every argument of every operation is slow, and worth it only where some state is no parameter
        for tensor in _tensors_of(args, kwargs) if kept else ():
            name = kept.get(address(tensor))
            if name is not None and not any(tensor is target for target in written):
                read(name)
        return func(*args, **kwargs)

    return OperationMode(handle)


def divert_writes(addresses: Set[int]) -> OperationMode:
    """Returns a mode in which writes to the tensors at some addresses go to a copy that is thrown away."""

    def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(address(tensor) in addresses for tensor in written_tensors(func, args, kwargs)):
            return func(*args, **kwargs)
        originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def copy_target(tensor: torch.Tensor) -> torch.Tensor:
            if address(tensor) not in addresses:
                return tensor
            copy = tensor.clone()
            originals[id(copy)] = (tensor, copy)  # with the copy, so that nothing else gets its identity meanwhile
            return copy

        written = written_arguments(func)
        positions, names = {position for position, _ in written}, {name for _, name in written}
        changed = [
            tree_map_only(torch.Tensor, copy_target, arg) if i in positions else arg for i, arg in enumerate(args)
        ]
        kwargs = {key: tree_map_only(torch.Tensor, copy_target, v) if key in names else v for key, v in kwargs.items()}
        result = func(*changed, **kwargs)
        # An in-place operation returns its target: the code has to go on with the tensor itself and not with the copy.
        return tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), (tensor,))[0], result)

    return OperationMode(handle)


def _tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operation at the dispatcher, which has lists of them and nothing deeper."""
    for value in (*args, *kwargs.values()):
        for entry in value if isinstance(value, list | tuple) else (value,):
            if isinstance(entry, torch.Tensor):
                yield entry


def address(tensor: Any) -> int:
    """Identifies the memory that a tensor lies in; 0 where it has none, or is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        return 0
    try:
        with without_torch_function():
            return int(tensor.untyped_storage()._cdata)  # of the storage: views and `.data` share it with their base
    except (NotImplementedError, RuntimeError):
        return 0
