"""The mode that sits at the dispatcher during a pass: random draws, writes to parameters, target counts, casts.

It also computes products of matrices by groups of rows in the precisions that the fused kernel refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gaverify.passes.calls import OperationMode
from gaverify.passes.isolation import ModelState, written_tensors
from gaverify.passes.precision import Arithmetic, product_of
from gaverify.passes.randomness import Dealer, DrawRecorder, Recomputing, tells_rows
from gaverify.torch_internals import is_in_backward, tree_map_only
from gaverify.tracebacks import hands_over

# Σ|terms| of the gradients that a backward forms as sums: their rounding grows with the terms, not with the sum.
#
#     linear bias, broadcast addition       a sum over the dimensions that were broadcast
#     bias of a normalisation, convolution  the sum of the output's gradient over everything but the channels
#     embedding                             for each row, the sum over the places that looked it up
#
# A gradient that is zero in exact arithmetic (a bias before a normalisation) is the rounding of such a sum, and
# nothing else tells so in working precision. Weights of normalisations and convolutions are sums as well, but
# hardly ever cancel.


aten = torch.ops.aten
_SLICE = 1 << 20  # terms whose magnitudes are held at a time
_LARGEST_TABLE = 1 << 22  # elements of an embedding whose terms are summed; a second table of more is too much memory


class TermNorm(NamedTuple):
    """The 2-norm of Σ|terms| over the elements of one sum, and whether the operation was a plain sum."""

    scale: torch.Tensor
    plain: bool


class TermSums:
    """Remembers the sums of one backward by the memory that their results lie in."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, StorageWeakRef, TermNorm]] = {}

    def note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Measures the terms of an operation of `SUMMING` that has just run."""
        at, magnitude = SUMMING[func]
        total = result if at is None else result[at]
        if total is None or not total.is_floating_point():
            return
        sums = magnitude(args, total)
        if sums is not None:
            terms = TermNorm(torch.linalg.vector_norm(sums), at is None and func is aten.sum.dim_IntList)
            # By address: autograd hands the very tensor on to `.grad` where nothing is added to it.
            self._found[total.data_ptr()] = total.numel(), StorageWeakRef(total.untyped_storage()), terms

    def of(self, gradient: torch.Tensor | None) -> TermNorm | None:
        """Returns the terms of a gradient that is one of the sums still: it lies in the memory that the sum was put in.

        Memory that was freed meanwhile may have been given to another gradient; the weak reference tells.
        """
        if gradient is None or gradient.layout is not torch.strided:
            return None
        numel, storage, terms = self._found.get(gradient.data_ptr(), (-1, None, None))
        return terms if numel == gradient.numel() and storage is not None and not storage.expired() else None


def _plain_sum(args: tuple[Any, ...], total: torch.Tensor) -> torch.Tensor | None:
    terms = args[0]
    # Nothing was summed: a view, or a reduction over dimensions of size 1.
    if not terms.is_floating_point() or terms.numel() <= total.numel():
        return None
    return _magnitudes(terms, [dim % terms.dim() for dim in args[1] or range(terms.dim())])


def _per_channel(at: int) -> Callable[[tuple[Any, ...], torch.Tensor], torch.Tensor]:
    """The sum over everything but dimension 1 of the gradient that is argument `at`."""
    return lambda args, total: _magnitudes(args[at], [dim for dim in range(args[at].dim()) if dim != 1])


def _per_feature(args: tuple[Any, ...], total: torch.Tensor) -> torch.Tensor:
    return _magnitudes(args[0], list(range(args[0].dim() - total.dim())))


def _per_row(args: tuple[Any, ...], total: torch.Tensor) -> torch.Tensor | None:
    if total.numel() > _LARGEST_TABLE:
        return None
    sums: torch.Tensor = aten.embedding_dense_backward.default(args[0].abs(), *args[1:])
    return sums


def _magnitudes(terms: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Σ|terms| over `dims`, without a copy of all terms; in float32 at least, where half precision would overflow."""
    wide = torch.promote_types(terms.dtype, torch.float32)
    if not dims:
        return terms.abs()
    rows = max(1, _SLICE * terms.shape[dims[0]] // max(terms.numel(), 1))
    parts = [part.abs().sum(dims, dtype=wide) for part in terms.split(rows, dims[0])]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


SUMMING: dict[Any, tuple[int | None, Callable[[tuple[Any, ...], torch.Tensor], torch.Tensor | None]]] = {
    aten.sum.dim_IntList: (None, _plain_sum),
    aten.native_layer_norm_backward.default: (2, _per_feature),
    aten.native_group_norm_backward.default: (2, _per_channel(0)),
    aten.native_batch_norm_backward.default: (2, _per_channel(0)),
    aten.convolution_backward.default: (2, _per_channel(0)),
    aten.embedding_dense_backward.default: (None, _per_row),
}
"""The operations that form sums: which of their results is one (None: the only one), and Σ|terms| of it."""


# The mode that sits at the dispatcher during a pass: random draws, writes to parameters, target counts, casts.


_HALF = (torch.bfloat16, torch.float16)
_BELOW = {torch.float64: (torch.float32, *_HALF), torch.float32: _HALF}
_MEAN = 1  # the dispatcher's code for reduction="mean"


class _Plan(NamedTuple):
    """The tasks of the mode for an operation."""

    writes: tuple[int, ...]
    random: bool
    counts_targets: bool
    sums: bool
    casts: bool
    likens: bool
    groups: bool
    packs: bool
    product: str

    @property
    def plain(self) -> bool:
        counts = self.counts_targets or self.sums
        return not (self.writes or self.random or counts or self.likens or self.groups or self.packs)


@cache
def _plan(func: Any) -> _Plan:
    arguments = func._schema.arguments
    # The schema says which arguments an operation writes to, also for operators that people register themselves.
    writes = tuple(i for i, arg in enumerate(arguments) if arg.alias_info is not None and arg.alias_info.is_write)
    return _Plan(
        writes=writes,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        counts_targets=func in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default),
        sums=func in SUMMING,
        casts=any(arg.name == "dtype" for arg in arguments),
        likens=func is aten.empty_like.default,
        groups=func._schema.name == "aten::_grouped_mm",  # unknown to older versions of torch
        packs=tells_rows(func),
        product=product_of(func),
    )


class TargetCount(NamedTuple):
    """The counts of one negative log-likelihood."""

    valid: torch.Tensor
    """Number of targets that it does not ignore."""
    divisor: torch.Tensor
    """The divisor of its mean: `valid` itself, or the sum of their class weights."""
    total: int
    """Number of all targets."""
    ignored: int
    """The target that it ignores."""
    is_mean: bool = True
    """Whether it is divided by `divisor`."""

    @property
    def is_weighted(self) -> bool:
        """Whether its mean divides by class weights."""
        return self.divisor is not self.valid


@dataclass
class Observed:
    """Facts about a pass beside its gradients."""

    target_counts: list[TargetCount] = field(default_factory=list)
    terms: TermSums = field(default_factory=TermSums)
    arithmetic: Arithmetic = field(default_factory=Arithmetic)


class PassMode:
    """Watches one forward and its backward.

    Args:
        state: Is called before an operation writes to a tensor.
        random: Runs random operations (`DrawRecorder` or `Dealer`).
        lift: Raise casts and mixed inputs to this precision, float64 or float32 (a control run); None leaves them.
        observe_terms: Measure Σ|terms| of the sums that the backward forms.
    """

    def __init__(
        self,
        state: ModelState,
        random: DrawRecorder | Dealer | Recomputing,
        *,
        lift: torch.dtype | None = None,
        observe_terms: bool = False,
    ) -> None:
        self.observed = Observed()
        self._state, self._random, self._lift, self._observe_terms = state, random, lift, observe_terms
        self._likened: tuple[Any, Any] = (None, None)
        self._open = ExitStack()

    def __enter__(self) -> PassMode:
        """Watches the generators that the dispatcher does not see as well."""
        with ExitStack() as stack:
            stack.enter_context(self._random.watching())
            stack.enter_context(OperationMode(self._handle))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.close()

    def _handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        plan = _plan(func)
        # A dropout fills a tensor made after its input, in the very next operation; longer, the input is not held.
        (likened, like), self._likened = self._likened, (None, None)
        if self._lift is not None:
            args, kwargs = _lift_arguments(plan, args, kwargs, self._lift)
        # Before the operation runs: it may write to its inputs.
        self.observed.arithmetic.note(plan.product, args)
        if plan.plain:
            return func(*args, **kwargs)
        if plan.writes:
            for tensor in written_tensors(func, args, kwargs):
                self._state.before_write(tensor)
        if plan.random:
            return self._random(func, args, kwargs, like if likened is not None and args[0] is likened else None)
        # The fused kernel of a mixture of experts exists in bfloat16 alone.
        if plan.groups and args[0].dtype in (torch.float64, self._lift):
            named = {name: kwargs[name] for name in ("offs", "bias") if name in kwargs}
            return grouped_product(*args[:4], **named)
        result = func(*args, **kwargs)
        self._observe(plan, func, args, result)
        return result

    def _observe(self, plan: _Plan, func: Any, args: Any, result: Any) -> None:
        if plan.packs:
            self._random.packed.note(func, args, result)
        if plan.likens:
            self._likened = (result, args[0])
        if plan.counts_targets:
            self._count(args, result)
        elif plan.sums and self._observe_terms and is_in_backward():
            self.observed.terms.note(func, args, result)

    def _count(self, args: Any, result: Any) -> None:
        if is_in_backward():  # a checkpointed loss that its backward runs once more
            return
        _, targets, class_weights, reduction, ignored = args
        # `total_weight` divides the mean; without class weights it is the number of valid targets.
        is_mean = reduction == _MEAN
        valid = result[1] if is_mean and class_weights is None else (targets != ignored).sum()
        divisor = result[1] if is_mean else valid
        self.observed.target_counts.append(TargetCount(valid, divisor, targets.numel(), ignored, is_mean))


def _lift_arguments(plan: _Plan, args: Any, kwargs: Any, to: torch.dtype) -> tuple[Any, Any]:
    """Raises lower-precision casts, factories and mixed inputs to `to`; tensors that are written to stay."""
    below = _BELOW[to]
    if plan.casts and kwargs.get("dtype") in below:
        kwargs = {**kwargs, "dtype": to}
    low = high = False
    for arg in args:
        for tensor in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(tensor, torch.Tensor):
                low = low or tensor.dtype in below
                high = high or tensor.dtype is to
    if not (low and high):
        return args, kwargs
    # A higher copy of what is written to would take the write, and the user's tensor would not get it.
    lifted = [
        arg if i in plan.writes else tree_map_only(torch.Tensor, lambda each: _raise_precision(each, to), arg)
        for i, arg in enumerate(args)
    ]
    return tuple(lifted), kwargs


def _raise_precision(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    return tensor.to(to) if tensor.dtype in _BELOW[to] else tensor


@hands_over  # a shape that does not fit is the caller's fault
def grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns what `aten::_grouped_mm` computes, by a loop over the groups. Rows behind the last group are zero.

    Shapes: S rows in G groups, group g ends before row `offs[g]`; an expert's matrix is (K, N).

        a (S, K), b (G, K, N)    out (S, N),     rows of group g times b[g]
        a (G, M, K), b (K, S)    out (M, S),     a[g] times the columns of group g
        a (M, S), b (S, N)       out (G, M, N),  the columns of group g times its rows
        a (G, M, K), b (G, K, N) out (G, M, N),  a[g] times b[g]

    Source: PyTorch, `torch.nn.functional.grouped_mm`.
    """
    if offs is None:
        result = torch.bmm(a, b)
    else:
        groups = list(enumerate(pairwise([0, *offs.tolist()])))
        if a.dim() == 2 and b.dim() == 3:
            result = a.new_zeros(a.shape[0], b.shape[2])
            for g, (start, stop) in groups:
                result[start:stop] = a[start:stop] @ b[g]
        elif a.dim() == 3:
            result = a.new_zeros(a.shape[1], b.shape[1])
            for g, (start, stop) in groups:
                result[:, start:stop] = a[g] @ b[:, start:stop]
        else:
            result = a.new_zeros(len(groups), a.shape[0], b.shape[1])
            for g, (start, stop) in groups:
                result[g] = a[:, start:stop] @ b[start:stop]
    return result if bias is None else result + bias
