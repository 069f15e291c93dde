"""What several ranks did in one window: collectives, gradients before and after the reduction. No tensors, no torch.

Shapes: R ranks, K micro-batches in each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

from gaverify.records.experiment import WeightFit
from gaverify.thresholds import FEW_UNITS, FIT_FLOAT32, FIT_UNITS, TINY, U32

Shares = tuple[tuple[float, ...], ...]
"""For each rank what its losses are multiplied by, in turn: one number for all, or one for each micro-batch."""


class Engine(str, Enum):
    """How the ranks hold the model and reduce its gradients."""

    DDP = "ddp"
    FSDP2 = "fsdp2"


class Collective(str, Enum):
    """What a collective operation does to the ranks' tensors."""

    REDUCE = "all-reduce"
    SCATTER = "reduce-scatter"
    GATHER = "all-gather"
    BROADCAST = "broadcast"
    OTHER = "other"


@dataclass(frozen=True)
class Traffic:
    """Collectives of one rank in one window: how many of each kind, and the bytes of their tensors."""

    counts: Mapping[Collective, int] = field(default_factory=dict)
    bytes_moved: int = 0

    def count(self, *kinds: Collective) -> int:
        """Returns how many collectives of these kinds ran; of all kinds where none is named."""
        return sum(number for kind, number in self.counts.items() if not kinds or kind in kinds)


@dataclass(frozen=True)
class Share:
    """What a rank made of its part of the gradient before the step, beside what the full batch's run made of the whole.

    Its part is its shard, or, where a script reduces by hand after that, what it computed itself.

    Attributes:
        factor: c in part ≈ c · the full batch's; `residual` is what that leaves over, relative.
        norms: What c is where each part is clipped by its own norm: of a shard the whole's norm over its own.
    """

    factor: float
    residual: float
    norms: float


def rounding_of(unit: float) -> float:
    """Returns what rounding alone may leave between two gradients, or over from a fit, relative to their norm."""
    return min(FIT_UNITS * unit, max(FEW_UNITS * unit, FIT_FLOAT32))


@dataclass(frozen=True)
class RankFacts:
    """What was measured on R ranks.

    Attributes:
        ranks: R.
        engine: How the ranks hold the model; None where the user's own script decided it and nothing was recognised.
        apart: The largest difference between the gradients that the ranks step with, relative to the first one's norm;
            exactly 0.0 where they are the same bits. NaN where every rank holds a shard of its own.
        summed_apart: The same of the gradients as the window's last backward pass left them.
        started_apart: The same of the weights that the ranks computed their gradients at.
        names_apart: The parameters whose gradients are apart, where others agree; empty where all are, or none.
        window: Collectives between the first forward and the step, of the rank with the most.
        own: Those that the model and the loss made themselves, without the engine.
        weights: The fit over the ranks' own gradients: `weights` make the gradient of one process, `used` the ranks'.
        counted: The same fit over the micro-batches of all ranks, where a loop of the user's own counts them.
        unit: Unit roundoff u of the arithmetic that the ranks trained in.
        difference: ‖ranks − full‖ / ‖full‖ of the whole gradient.
        divergent: Whether any parameter's difference is more than rounding.
        buffers_apart: Names of buffers that differ between the ranks when the window ends.
        from_one_process: ‖ranks − one‖ / ‖one‖, where one process ran the same micro-batches.
        gather_control: The difference that is left where every all-gather of the loss hands its gradient back;
            NaN where that control did not run.
        mean_left: ‖mean of the ranks' own gradients − full‖ / ‖full‖; NaN where they are not known.
        weights_control: The difference that is left where every rank's loss is multiplied by right over used weight.
        sync_control: The difference that is left where every backward pass reduces.
        clip_control: The difference that is left where losses are too small to be clipped.
        frozen_control: The difference that is left where layers keep the statistics in their buffers.
        reduced: Bytes that each backward pass of the window reduced over the ranks; empty where that was not seen.
        stepped_without: Whether the step found no gradient in any sharded parameter.
        shards: What each rank made of its part; empty where parts are whole gradients that were reduced before.
        fed_alike: Whether two ranks were fed the same rows.
        tensor_parallel: Whether ranks hold parts of the same layers and share rows on purpose, which count once then.
        altered: Which part of the gradient after the window's last backward pass is no sum of what the ranks' backward
            passes computed, relative; NaN where that is not known. A hook that compresses what is reduced does this.
        targets: Valid targets of each rank in each of its micro-batches of the window; empty where not known.
        shares_tried: What `weights_control` multiplied the losses of each rank by, in turn.
        update_bytes: Bytes of one gradient of the whole model in the coarsest type that an engine reduces in.
    """

    ranks: int
    engine: Engine | None
    apart: float
    window: Traffic
    own: Traffic
    weights: WeightFit | None
    difference: float
    unit: float = U32
    divergent: bool = False
    buffers_apart: tuple[str, ...] = ()
    from_one_process: float = 0.0
    gather_control: float = math.nan
    mean_left: float = math.nan
    weights_control: float = math.nan
    counted: WeightFit | None = None
    sync_control: float = math.nan
    clip_control: float = math.nan
    frozen_control: float = math.nan
    reduced: tuple[int, ...] = ()
    stepped_without: bool = False
    shards: tuple[Share, ...] = ()
    targets: tuple[tuple[int, ...], ...] = ()
    shares_tried: Shares = ()
    update_bytes: int = 0
    summed_apart: float = math.nan
    names_apart: tuple[str, ...] = ()
    started_apart: float = 0.0
    fed_alike: bool = False
    tensor_parallel: bool = False
    altered: float = math.nan

    @property
    def at_fault(self) -> bool:
        """Whether the gradient is wrong because there are several ranks: one process gets it right."""
        return self.divergent and not self.from_one_process <= self.rounding

    @property
    def reduced_late(self) -> bool:
        """Whether a script reduces by hand: the last backward pass leaves ranks apart, and their steps are alike."""
        return self.apart <= self.rounding < self.summed_apart

    @property
    def rounding(self) -> float:
        """What rounding alone may leave of the ranks' gradients."""
        return rounding_of(self.unit)

    def is_rounding(self, left: float) -> bool:
        """Whether a control left rounding; one that did not run left nothing that could be judged."""
        return left <= self.rounding

    @property
    def shares_to_try(self) -> tuple[Shares, ...]:
        """Right over used weight of each rank, which a control multiplies their losses by; empty where none fits."""
        fit = self.weights
        factor, residual = self.one_factor
        if factor and residual <= self.rounding:
            return (((1 / factor,),) * self.ranks,)
        if fit is None:
            return self.shares_of_targets
        if self.shards:  # what scales each rank's gradient would do so again, whatever its loss counts
            return ()
        if len(fit.weights) != self.ranks or len(fit.used) != self.ranks or not all(fit.used):
            return ()
        if fit.residual > self.rounding or min(fit.weights) <= 0.0:
            return ()
        return (tuple((right / used,) for right, used in zip(fit.weights, fit.used, strict=True)),)

    @property
    def shares_of_targets(self) -> tuple[Shares, ...]:
        """What would make means over valid targets one over all, where they do not count alike.

        R · n_r / N of a mean over a rank's window, K · R · n_rk / N of those over its micro-batches.
        """
        total = sum(map(sum, self.targets))
        of_ranks = tuple((self.ranks * sum(counts) / total,) for counts in self.targets)
        of_passes = tuple(
            tuple(len(counts) * self.ranks * count / total for count in counts) for counts in self.targets
        )
        ways = [of_ranks] if all(len(set(counts)) == 1 for counts in self.targets) else [of_ranks, of_passes]
        return tuple(way for way in ways if len(set(chain(*way))) > 1)

    @property
    def one_factor(self) -> tuple[float, float]:
        """The factor c in used ≈ c · full of the whole gradient, and what it leaves over; NaN where none is known."""
        if self.weights is not None:
            return self.weights.factor, self.weights.factor_residual
        factors = [shard.factor for shard in self.shards]
        if not factors or max(factors) - min(factors) > self.rounding * max(map(abs, factors)):
            return math.nan, math.inf
        return factors[0], max(shard.residual for shard in self.shards) / max(abs(factors[0]), TINY)

    @property
    def reductions(self) -> int:
        """How many backward passes of the window reduced whole gradients over the ranks."""
        return sum(map(self._is_whole, self.reduced))

    @property
    def ends_unreduced(self) -> bool:
        """Whether the window's last backward pass leaves its sharded gradients unreduced, after one that did reduce."""
        return self.engine is Engine.FSDP2 and bool(self.reductions) and not self._is_whole(self.reduced[-1])

    def _is_whole(self, size: int) -> bool:
        """Whether so many bytes are those of whole gradients.

        Tensor parallelism reduces activations in each backward pass, so that one which lacks a rank's part of a
        gradient, beside the one that reduces most, reduces none.
        """
        return size >= max(self.update_bytes, 1, max(self.reduced) - self.update_bytes / self.ranks)

    @property
    def is_altered(self) -> bool:
        """Whether something, such as a hook that compresses, made the gradient other than a sum of the ranks' own."""
        return self.altered > self.rounding

    @property
    def gathers(self) -> bool:
        """Whether the model or the loss gathers tensors of all ranks."""
        return self.own.count(Collective.GATHER) > 0
