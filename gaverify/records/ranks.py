"""Several ranks in one window: collectives, gradients before and after the reduction. No tensors, no torch.

Shapes: R ranks, K micro-batches in each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

from gaverify.records.experiment import WeightFit
from gaverify.records.json_objects import JsonRecord
from gaverify.records.numbers import Number
from gaverify.thresholds import FEW_UNITS, FIT_FLOAT32, FIT_UNITS, TINY, U32

Shares = tuple[tuple[Number, ...], ...]
"""For each rank what its losses are multiplied by, in turn: one number for all, or one for each micro-batch."""


class Engine(str, Enum):
    """How the ranks hold the model and reduce its gradients."""

    DDP = "ddp"
    FSDP2 = "fsdp2"


class Collective(str, Enum):
    """The kind of a collective operation."""

    REDUCE = "all-reduce"
    SCATTER = "reduce-scatter"
    GATHER = "all-gather"
    BROADCAST = "broadcast"
    OTHER = "other"


@dataclass(frozen=True)
class Traffic(JsonRecord):
    """Collectives of one rank in one window."""

    counts: Mapping[Collective, int] = field(default_factory=dict)
    """Kind → number of collectives."""
    bytes_moved: int = 0
    """Bytes of their tensors."""

    def count(self, *kinds: Collective) -> int:
        """Returns how many collectives of these kinds ran; of all kinds where none is named."""
        return sum(number for kind, number in self.counts.items() if not kinds or kind in kinds)


@dataclass(frozen=True)
class Share(JsonRecord):
    """A rank's part of the gradient before the step, beside the full-batch run's whole gradient.

    Its part is its shard, or, where a script reduces by hand after that, what it computed itself.
    """

    factor: Number
    """c in part ≈ c · the full batch's gradient."""
    residual: Number
    """Difference that c leaves, relative to the full batch's gradient."""
    norms: Number
    """Value of c if each part were clipped by its own norm: for a shard the whole's norm over its own."""


def rounding_of(unit: float) -> float:
    """Returns what rounding alone may leave between two gradients, or over from a fit, relative to their norm."""
    return min(FIT_UNITS * unit, max(FEW_UNITS * unit, FIT_FLOAT32))


@dataclass(frozen=True)
class Replicas(JsonRecord):
    """How far ranks that hold the same are from each other; differences are relative to the first such rank's norm."""

    difference: Number = math.nan
    """Largest difference of their final gradients; 0 if bitwise equal, NaN if no ranks share a part."""
    summed_difference: Number = math.nan
    """The same for gradients as the last backward pass produced them; NaN where not measured."""
    starting_difference: Number = 0.0
    """The same for the weights at which they computed their gradients."""
    parameters: tuple[str, ...] = ()
    """Parameters whose gradients differ while those of others agree; empty if all or none differ."""
    buffers: tuple[str, ...] = ()
    """Names of buffers that differ when the window ends."""
    fed_alike: bool = False
    """Whether two ranks were fed the same rows."""


@dataclass(frozen=True)
class Reduction(JsonRecord):
    """Reductions of the window's backward passes over the ranks."""

    bytes_by_pass: tuple[int, ...] = ()
    """Bytes that each backward pass reduced; empty where not seen."""
    update_bytes: int = 0
    """Bytes of one gradient of all parameters in the smallest reduced type; in an audit one byte per element."""
    stepped_without: bool = False
    """Whether the optimizer step found no gradient in any sharded parameter."""
    altered: Number = math.nan
    """Relative part of the gradient that is no sum of the ranks' computed gradients; NaN where not known."""


@dataclass(frozen=True)
class RankTraffic(JsonRecord):
    """The collectives of one window, on the rank with the most; in an audit on rank 0."""

    window: Traffic = field(default_factory=Traffic)
    """All of them; in an audit those of the backward passes."""
    own: Traffic = field(default_factory=Traffic)
    """Those that the model and the loss ran themselves, without the engine."""


@dataclass(frozen=True)
class RankShares(JsonRecord):
    """Weight of each rank's gradient in the one that they end up with."""

    fit: WeightFit | None = None
    """Fit over the ranks' gradients: `weights` give one process's gradient, `used` the ranks'; None without a fit."""
    mean_left: Number = math.nan
    """‖mean of the ranks' gradients − full‖ / ‖full‖; NaN where these gradients are not known."""
    shards: tuple[Share, ...] = ()
    """Factor that each rank applied to its part of the gradient; empty where none was measured."""
    targets: tuple[tuple[int, ...], ...] = ()
    """Valid targets of each rank in each of its micro-batches; empty where one count is unknown or zero."""


@dataclass(frozen=True)
class RankFacts(JsonRecord):
    """Measurements on R ranks."""

    ranks: int
    """R, the number of ranks."""
    engine: Engine | None
    """How the ranks keep the model; None where the user's script decides it and nothing was recognised."""
    difference: Number
    """‖ranks − full‖ / ‖full‖ over all parameters together."""
    divergent: bool = False
    """Whether the difference is more than rounding."""
    unit: Number = U32
    """Unit roundoff of the arithmetic that the ranks trained in."""
    tensor_parallel: bool = False
    """Whether ranks split the same layers and therefore share rows, which count once."""
    from_one_process: Number = 0.0
    """‖ranks − one‖ / ‖one‖ for one process with the same micro-batches; 0 if not measured or ranks not at fault."""
    replicas: Replicas = field(default_factory=Replicas)
    """How far ranks that hold the same are from each other."""
    reduction: Reduction = field(default_factory=Reduction)
    """Reductions of the backward passes."""
    traffic: RankTraffic = field(default_factory=RankTraffic)
    """The collectives of the window."""
    shares: RankShares = field(default_factory=RankShares)
    """Weight of each rank's gradient."""
    shares_tried: Shares = ()
    """Loss factors of each rank in `weights_control`; empty if that control did not run."""
    weights_control: Number = math.nan
    """Difference if each rank's loss is multiplied by `shares_tried`; NaN if that control did not run."""
    gather_control: Number = math.nan
    """Difference if every all-gather of the loss returns its gradient; NaN if that control did not run."""
    sync_control: Number = math.nan
    """Difference if every backward pass reduces; NaN if that control did not run."""
    evaluation_mode_control: Number = math.nan
    """Difference if layers use the statistics in their buffers; NaN if that control did not run."""

    @property
    def at_fault(self) -> bool:
        """Whether the gradient is wrong because there are several ranks: one process gets it right."""
        # `not <=` counts NaN, a single process that could not be compared, as a difference.
        return self.divergent and not self.from_one_process <= self.rounding

    @property
    def replicas_differ(self) -> bool:
        """Whether ranks that hold the same end up with gradients that differ by more than rounding."""
        return self.replicas.difference > self.rounding

    @property
    def reduced_late(self) -> bool:
        """Whether a script reduces by hand: the last backward pass leaves ranks apart, and their steps are alike."""
        return self.replicas.difference <= self.rounding < self.replicas.summed_difference

    @property
    def rounding(self) -> float:
        """The largest relative difference of the ranks' gradients that is rounding."""
        return rounding_of(self.unit)

    def is_rounding(self, left: float) -> bool:
        """Whether a control left rounding; one that did not run left nothing that could be judged."""
        # NaN compares as False.
        return left <= self.rounding

    @property
    def shares_to_try(self) -> tuple[Shares, ...]:
        """Right over used weight of each rank, which a control multiplies their losses by; empty where none fits."""
        fit = self.shares.fit
        factor, residual = self.one_factor
        if factor and residual <= self.rounding:
            # The same factor on every rank is undone on every rank.
            return (((1 / factor,),) * self.ranks,)
        if fit is None:
            return self.shares_of_targets
        if self.shares.shards:  # what scales each rank's gradient would do so again, whatever its loss counts
            return ()
        # A loss can be multiplied only where each rank has one weight, and a used weight of zero has no multiplier.
        if len(fit.weights) != self.ranks or len(fit.used) != self.ranks or not all(fit.used):
            return ()
        # A share of zero or less is fitted to noise: no rank takes part with it.
        if fit.residual > self.rounding or min(fit.weights) <= 0.0:
            return ()
        return (tuple((right / used,) for right, used in zip(fit.weights, fit.used, strict=True)),)

    @property
    def shares_of_targets(self) -> tuple[Shares, ...]:
        """The loss factors that make the ranks' means over valid targets one mean over all.

        R · n_r / N of a mean over a rank's window, K · R · n_rk / N of those over its micro-batches.
        """
        total = sum(map(sum, self.shares.targets))
        of_ranks = tuple((self.ranks * sum(counts) / total,) for counts in self.shares.targets)
        of_passes = tuple(
            tuple(len(counts) * self.ranks * count / total for count in counts) for counts in self.shares.targets
        )
        # A rank whose micro-batches have equal numbers of targets gives each the same, so that both ways are one.
        ways = [of_ranks] if all(len(set(counts)) == 1 for counts in self.shares.targets) else [of_ranks, of_passes]
        # Equal shares are what every script uses already.
        return tuple(way for way in ways if len(set(chain(*way))) > 1)

    @property
    def one_factor(self) -> tuple[float, float]:
        """The factor c in used ≈ c · full of the whole gradient, and what it leaves over; NaN where none is known."""
        if self.shares.fit is not None:
            return self.shares.fit.factor, self.shares.fit.factor_residual
        factors = [shard.factor for shard in self.shares.shards]
        if not factors or max(factors) - min(factors) > self.rounding * max(map(abs, factors)):
            return math.nan, math.inf
        # Residuals are relative to the full batch's gradient, which the factor scales.
        return factors[0], max(shard.residual for shard in self.shares.shards) / max(abs(factors[0]), TINY)

    @property
    def reductions(self) -> int:
        """How many backward passes of the window reduced whole gradients over the ranks."""
        return sum(map(self._is_whole, self.reduction.bytes_by_pass))

    @property
    def ends_unreduced(self) -> bool:
        """Whether the window's last backward pass leaves its sharded gradients unreduced, after one that did reduce."""
        return (
            self.engine is Engine.FSDP2
            and bool(self.reductions)
            and not self._is_whole(self.reduction.bytes_by_pass[-1])
        )

    def _is_whole(self, size: int) -> bool:
        """Whether so many bytes are those of whole gradients."""
        # Tensor parallelism reduces activations in every pass. A pass that lacks a rank's part of a gradient, compared
        # with the pass that reduces most, reduces no gradient.
        return size >= max(
            self.reduction.update_bytes, 1, max(self.reduction.bytes_by_pass) - self.reduction.update_bytes / self.ranks
        )

    @property
    def is_altered(self) -> bool:
        """Whether something, such as a hook that compresses, made the gradient other than a sum of the ranks' own."""
        return self.reduction.altered > self.rounding

    @property
    def gathers(self) -> bool:
        """Whether the model or the loss gathers tensors of all ranks."""
        return self.traffic.own.count(Collective.GATHER) > 0
