"""Where in the running code a draw is made: the same place for every sample of a loop, another one for every layer.

Places are numbers that hold in every process that runs the same code on the same model, and under DDP and FSDP2 as
without: the draws that one process recorded are found again by the ranks, which may be processes of their own.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch import nn

from gaverify.tracebacks import Owner, owner_of

_CALL = getattr(nn.Module._call_impl, "__code__", None)
_CALLS = "torch.nn.modules.module"  # frames between a caller and `forward`, more of them where there are hooks
_WRAPPERS = "torch.nn.parallel."
_DEPTH = 600  # numbers of a place; deeper frames are recursion

_codes: dict[int, tuple[CodeType, int]] = {}  # by id; the code is held, so that no other one gets its id
_modules: dict[int, int] = {}  # by id, for as long as `named_modules` lasts


@contextmanager
def named_modules(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Tells the modules of a model apart by their names while it lasts; others are told apart in this process only."""
    before = dict(_modules)
    for number, root in enumerate(roots):
        _modules.update((id(module), _number(f"{number} {name}")) for name, module in root.named_modules())
    try:
        yield
    finally:
        _modules.clear()
        _modules.update(before)


def call_site() -> int:
    """Returns a number for the place that is running now: every frame's instruction, and the modules being called."""
    place: list[int] = []
    frame = sys._getframe(1)
    while frame is not None and len(place) < _DEPTH:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if code.co_name == "loss_of" and module == "gaverify.passes.task":
            break
        if code is _CALL:
            # Only torch's own frame is asked for its locals: in a user's, the answer would keep tensors alive.
            place += _called(frame.f_locals.get("self"))
        elif _counts(module):
            place += (_number_of(code), frame.f_lasti)
        frame = frame.f_back  # type: ignore[assignment]
    return hash(tuple(place))


def loop_site() -> int:
    """Returns a number for the place of a draw in a script's loop: the instructions up to the user's own line.

    Of the functions further out only which they are: a loop that loads its next batch ahead calls the same function
    from two lines.
    """
    place: list[int] = []
    frame, inside = sys._getframe(1), True
    while frame is not None and len(place) < _DEPTH:
        if not frame.f_globals.get("__name__", "").startswith(("gaverify.", "torch.utils._python_dispatch")):
            place += (_number_of(frame.f_code), frame.f_lasti if inside else 0)
            inside = inside and owner_of(frame.f_code.co_filename) is not Owner.USER
        frame = frame.f_back  # type: ignore[assignment]
    return hash(tuple(place))


def _called(module: Any) -> tuple[int, ...]:
    """The number of a module that is called; none for a wrapper of torch's around the user's."""
    if type(module).__module__.startswith(_WRAPPERS):
        return ()
    return (_modules.get(id(module), id(module)),)


def _number_of(code: CodeType) -> int:
    known = _codes.get(id(code))
    if known is None:
        known = _codes[id(code)] = code, _number(f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}")
    return known[1]


def _number(text: str) -> int:
    """A number for a text that is the same in every process, as `hash` is for numbers and is not for texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=7).digest(), "big")


def _counts(module: str) -> bool:
    """Whether frames of a module tell places apart: modes come and go between a user's code and the dispatcher."""
    if module.startswith("torch."):
        return module.startswith("torch.nn.") and module != _CALLS and not module.startswith(_WRAPPERS)
    return not module.startswith("gaverify.") or module.startswith("gaverify.zoo")
