"""Watches and diverts the writes to some tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gaverify.isolation import written_arguments, written_tensors
from gaverify.tracebacks import calling_frame

Frame = tuple[str, int] | None


class Writes(TorchDispatchMode):
    """Sees every write to a tensor of the state."""

    def __init__(self, addresses: dict[int, str], notice: Callable[[str, str, Frame], None]) -> None:
        super().__init__()
        self.addresses, self._notice = addresses, notice

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for target in written_tensors(func, args, kwargs or {}):
            name = self.addresses.get(address(target))
            if name is not None:
                self._notice(name, str(func._schema.name.split("::")[-1]), calling_frame())
        return func(*args, **(kwargs or {}))


class Unwritten(TorchDispatchMode):
    """Lets writes to some tensors go to a copy that is thrown away."""

    def __init__(self, held: set[int]) -> None:
        super().__init__()
        self._held = held

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(address(tensor) in self._held for tensor in written_tensors(func, args, kwargs)):
            return func(*args, **kwargs)
        originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if address(tensor) not in self._held:
                return tensor
            copy = tensor.clone()
            originals[id(copy)] = (tensor, copy)
            return copy

        written = written_arguments(func)
        positions, names = {position for position, _ in written}, {name for _, name in written}
        args = [tree_map_only(torch.Tensor, copied, arg) if i in positions else arg for i, arg in enumerate(args)]
        kwargs = {key: tree_map_only(torch.Tensor, copied, v) if key in names else v for key, v in kwargs.items()}
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), (tensor,))[0], result)


def address(tensor: Any) -> int:
    """Identifies the memory that a tensor lies in; 0 where it has none, or is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        return 0
    try:
        with torch._C.DisableTorchFunction():
            return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0
