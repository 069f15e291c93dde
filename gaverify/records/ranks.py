"""What several ranks did in one window: collectives, gradients before and after the reduction. No tensors, no torch.

Shapes: R ranks, K micro-batches in each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from gaverify.records.weights import WeightFit

# Units of roundoff: right fits over 2 to 4 ranks left 2e-7 to 3e-7 in float32, faults 0.13 and more. In bfloat16 so
# many units would be half of the gradient.
_FIT_UNITS, _COARSE_UNITS, _FINE = 256.0, 16.0, 1e-3


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
class RankFacts:
    """What was measured on R ranks.

    Attributes:
        ranks: R.
        engine: How the ranks hold the model; None where the user's own script decided it and nothing was recognised.
        apart: The largest difference between the ranks' reduced gradients, relative to the first one's norm; exactly
            0.0 where they are the same bits. NaN where every rank holds a shard of its own.
        window: Collectives between the first forward and the step, of the rank with the most.
        own: Those that the model and the loss made themselves, without the engine.
        weights: The fit over the ranks' own gradients: `weights` make the gradient of one process, `used` the ranks'.
        unit: Unit roundoff u of the arithmetic that the ranks trained in.
        difference: ‖ranks − full‖ / ‖full‖ of the whole gradient.
        divergent: Whether any parameter's difference is more than rounding.
        buffers_apart: Names of buffers that differ between the ranks when the window ends.
        from_one_process: ‖ranks − one‖ / ‖one‖, where one process ran the same micro-batches.
        gather_control: The difference that is left where every all-gather of the loss hands its gradient back;
            NaN where that control did not run.
    """

    ranks: int
    engine: Engine | None
    apart: float
    window: Traffic
    own: Traffic
    weights: WeightFit | None
    difference: float
    unit: float = 2.0**-24
    divergent: bool = False
    buffers_apart: tuple[str, ...] = ()
    from_one_process: float = 0.0
    gather_control: float = math.nan

    @property
    def as_one_process(self) -> bool:
        """Whether one process that runs the same micro-batches gets the same gradient, but for rounding."""
        return self.from_one_process <= self.rounding

    @property
    def at_fault(self) -> bool:
        """Whether the gradient is wrong because there are several ranks."""
        return self.divergent and not self.as_one_process

    @property
    def rounding(self) -> float:
        """What rounding alone may leave between two gradients, or over from a fit, relative to their norm."""
        return min(_FIT_UNITS * self.unit, max(_COARSE_UNITS * self.unit, _FINE))

    @property
    def gathers(self) -> bool:
        """Whether the model or the loss gathers tensors of all ranks."""
        return self.own.count(Collective.GATHER) > 0
