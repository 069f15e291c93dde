"""Two modes of torch that hand what runs under them to a function: operations at the dispatcher, and torch's functions.

Whoever listens to torch writes such a function and opens one of these; no other mode is defined in gaverify.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gaverify.tracebacks import hands_over

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""`handler(func, args, kwargs)` returns what the caller of the operation gets; it runs `func` itself, or does not."""


class OperationMode(TorchDispatchMode):
    """Gives every operation that reaches the dispatcher to `handler`, in the backward as well."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handler = hands_over(handler)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch wraps a mode in `torch._dynamo.disable` unless it says no here, and that import costs a second."""
        return False

    @hands_over
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handler(func, args, kwargs or {})


class FunctionMode(TorchFunctionMode):
    """Gives every outermost call of a torch function or method to `handler`: what these call in turn is not seen."""

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = hands_over(handler)

    @hands_over
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handler(func, args, kwargs or {})


def in_transform() -> bool:
    """Whether a transform of `torch.func` runs: the tensors in it live no longer, and cannot be kept, cut or read."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def operation_name(func: Any) -> str:
    """Returns `bernoulli_` for `aten::bernoulli_.float`."""
    return str(func._schema.name.split("::")[-1])
