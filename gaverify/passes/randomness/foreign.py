"""Call sites of draws, and draws from Python's and NumPy's global generators, repeated from a recorded state.

A loop over samples draws at one call site, each layer at another. A call site is a number that is the same in every
process that runs the same code on the same model, with or without DDP and FSDP2: ranks find the draws that another
process recorded.

The dispatcher does not see Python's and NumPy's draws. The functions of `random` and `numpy.random` are wrapped during
a pass. A draw of the micro-batch starts from the state in which the full batch made the same draw. Of an array with a
row per sample, a micro-batch gets its own rows. Functions that were imported by name before, and generators that are
objects of the user's, are not seen.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import CodeType
from typing import Any

from torch import nn

from gaverify.passes.isolation.globals import comparable, foreign_generators, set_state, state_of
from gaverify.passes.layouts import SampleLayout
from gaverify.torch_internals import DISPATCH_MODULE
from gaverify.tracebacks import Owner, hands_over, owner_of

_CALL = getattr(nn.Module._call_impl, "__code__", None)
_CALLS = "torch.nn.modules.module"  # frames between a caller and `forward`, more of them where there are hooks
_WRAPPERS = "torch.nn.parallel."
_DEPTH = 600  # numbers of a place; deeper frames are recursion

_codes: dict[int, tuple[CodeType, int]] = {}  # by id; the code is held, so that no other one gets its id
_modules: dict[int, int] = {}  # by id, for as long as `named_modules` lasts


@contextmanager
def named_modules(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Lets call sites name modules by their paths while it lasts; other modules are known in this process only."""
    before = dict(_modules)
    for number, root in enumerate(roots):
        _modules.update((id(module), _hash_text(f"{number} {name}")) for name, module in root.named_modules())
    try:
        yield
    finally:
        _modules.clear()
        _modules.update(before)


def call_site() -> int:
    """Returns a number for the call site: the instruction of every frame up to the loss, and the modules called."""
    place: list[int] = []
    frame = sys._getframe(1)
    while frame is not None and len(place) < _DEPTH:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        # further out, the strategies and the ranks differ
        if code.co_name == "loss_of" and module == "gaverify.passes.user_code":
            break
        if code is _CALL:
            # Only torch's own frame is asked for its locals: in a user's, the answer would keep tensors alive.
            called = frame.f_locals.get("self")
            # A wrapper of torch's around the user's module does not count: other strategies have none.
            if not type(called).__module__.startswith(_WRAPPERS):
                place.append(_modules.get(id(called), id(called)))
        elif _tells_places_apart(module):
            place += (_number_of(code), frame.f_lasti)
        frame = frame.f_back  # type: ignore[assignment]
    return hash(tuple(place))


def loop_site() -> int:
    """Returns a number for a draw's call site in a script's loop: the instructions up to the user's own line.

    Frames further out count by their functions alone: a loop that loads its next batch ahead calls the same function
    from two lines.
    """
    place: list[int] = []
    frame, inside = sys._getframe(1), True
    while frame is not None and len(place) < _DEPTH:
        if not frame.f_globals.get("__name__", "").startswith(("gaverify.", DISPATCH_MODULE)):
            place += (_number_of(frame.f_code), frame.f_lasti if inside else 0)
            inside = inside and owner_of(frame.f_code.co_filename) is not Owner.USER
        frame = frame.f_back  # type: ignore[assignment]
    return hash(tuple(place))


def _number_of(code: CodeType) -> int:
    number = _codes.get(id(code))
    if number is None:
        number = _codes[id(code)] = code, _hash_text(f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}")
    return number[1]


def _hash_text(text: str) -> int:
    """A number for a text. Python's `hash` of a text differs between processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=7).digest(), "big")


def _tells_places_apart(module: str) -> bool:
    """Whether frames of a module tell places apart: modes come and go between a user's code and the dispatcher."""
    if module.startswith("torch."):
        return module.startswith("torch.nn.") and module != _CALLS and not module.startswith(_WRAPPERS)
    return not module.startswith("gaverify.") or module.startswith("gaverify.zoo")


MOST = 4096
"""Draws of a pass that are kept, a state of 2 to 20 KiB each; a pass that makes more is left alone."""
_STATE = frozenset({"seed", "getstate", "setstate", "get_state", "set_state", "get_bit_generator", "set_bit_generator"})


@dataclass(frozen=True)
class UpcomingDraw:
    """A draw that is about to be made."""

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


Handler = Callable[[UpcomingDraw, Callable[[], Any]], Any]
"""`handler(call, run)` returns what the caller gets; `run()` makes the draw."""


@dataclass(frozen=True)
class ForeignDraw:
    """One draw of the full batch: where it was made, the generator's state before it, and the array it gave."""

    site: int
    call: UpcomingDraw
    state: Any
    array: Any


@contextmanager
def watch_generators(handler: Handler) -> Iterator[None]:
    """Gives every draw from a global generator to `handler`, which runs it and returns its result."""
    depth = 0
    originals: list[tuple[Any, str, Any]] = []

    def wrap(module: str, name: str, function: Any) -> Any:
        @wraps(function)
        @hands_over
        def drawing(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                if depth > 1:  # one function of `random` calls another
                    return function(*args, **kwargs)
                return handler(UpcomingDraw(module, name, args, kwargs), partial(function, *args, **kwargs))
            finally:
                depth -= 1

        return drawing

    try:
        for module, holder in foreign_generators().items():
            owner = getattr(holder, "_inst", None) if module == "random" else getattr(holder.rand, "__self__", None)
            for name, function in list(vars(holder).items()):
                if getattr(function, "__self__", None) is owner and name not in _STATE:
                    originals.append((holder, name, function))
                    setattr(holder, name, wrap(module, name, function))
        yield
    finally:
        for holder, name, function in originals:
            setattr(holder, name, function)


def record_draws(draws: list[ForeignDraw]) -> Handler:
    """Returns what keeps each draw of the full batch."""

    @hands_over
    def keep(call: UpcomingDraw, run: Callable[[], Any]) -> Any:
        if len(draws) >= MOST:
            return run()
        site, state = call_site(), state_of(foreign_generators()[call.module])
        result = run()
        array = result.copy() if getattr(result, "shape", ()) else None
        draws.append(ForeignDraw(site, call, state, array))
        return result

    return keep


def rows_of_micro_batch(
    draw: ForeignDraw, call: UpcomingDraw, result: Any, micro_batch: tuple[int, int], batch_size: int
) -> Any:
    """Returns the rows of the full batch's array that are a micro-batch's; None where its draw is no such array."""
    shape = getattr(result, "shape", ())
    if draw.array is None or not _differ_in_size_alone(draw.call, call):
        return None
    start, stop = micro_batch
    layout = SampleLayout.find(draw.array.shape, shape, batch_size, stop - start)
    if layout is None or layout.kind != "rows":
        return None
    return layout.take(draw.array, range(start, stop), batch_size).copy()  # the user's code may write into its rows


def _differ_in_size_alone(full: UpcomingDraw, ours: UpcomingDraw) -> bool:
    """Whether two draws differ in nothing but the size that was asked for; a permutation has no rows of its own."""
    if full.name != ours.name or full.name in ("permutation", "shuffle") or ours.kwargs.get("replace") is False:
        return False
    if full.name in ("rand", "randn"):
        return True
    fixed, fixed_ours = full.args, ours.args
    if "size" not in ours.kwargs:  # the last of the arguments is the size
        fixed, fixed_ours = fixed[:-1], fixed_ours[:-1]
    named = {key: value for key, value in full.kwargs.items() if key != "size"}
    named_ours = {key: value for key, value in ours.kwargs.items() if key != "size"}
    return repr((fixed, named)) == repr((fixed_ours, named_ours))


def state_after(draws: Sequence[ForeignDraw], at: int, end: Mapping[str, Any]) -> Any:
    """Returns the state in which the full batch's draw number `at` left its generator."""
    module = draws[at].call.module
    return next((draw.state for draw in draws[at + 1 :] if draw.call.module == module), end[module])


def is_in_state(module: str, state: Any) -> bool:
    """Whether a generator is in that state."""
    return bool(comparable(state_of(foreign_generators()[module])) == comparable(state))


def foreign_states() -> dict[str, Any]:
    """Returns the states of both global generators."""
    return {module: state_of(generator) for module, generator in foreign_generators().items()}


def set_generator(module: str, state: Any) -> None:
    """Sets the state of one of them."""
    set_state(foreign_generators()[module], state)
