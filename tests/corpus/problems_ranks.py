"""Problems whose loss or model talks to the other ranks, right and wrong, and some that do not know of ranks.

Each works in a group of one as well, which is what the full batch is computed in.
"""

from __future__ import annotations

import ast
import random
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from gaverify import Problem

FEATURES = 6


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    inputs, classes = torch.randn(16, FEATURES), torch.randint(3, (16,))
    classes[1:6] = -100  # most of the padding lies on the first rank
    return inputs, classes


def _model(width: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, width))


def _summed(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, classes = batch
    return cross_entropy(model(inputs), classes, reduction="sum")


def fixed_total() -> Problem:
    """Sums over a total that is known beforehand, which need no other weight; the mean over ranks divides them."""
    return Problem(_model(), lambda model, batch: _summed(model, batch) / 16, _tokens())


def scaled_on_ranks(factor: float) -> Problem:
    """Means that count a little more where there are ranks than in one process."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return _cross_entropy(model, batch) * (factor if _ranks() > 1 else 1.0)

    return Problem(_model(), loss, (_tokens()[0], _tokens()[1].clamp(min=0)))


def counted_right() -> Problem:
    """Means of which each counts as much where there are ranks as in one process."""
    return scaled_on_ranks(1.0)


def counted_too_much() -> Problem:
    """Means of which each counts 5 % more where there are ranks."""
    return scaled_on_ranks(1.05)


def plain_mean() -> Problem:
    """Means over as many samples each: the mean over ranks is what one micro-batch on each rank needs."""
    return Problem(_model(), _cross_entropy, _tokens())


def global_count() -> Problem:
    """Right: the sum over the tokens of all ranks, times R because the engine averages."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        count = (batch[1] != -100).sum()
        if dist.is_initialized():
            dist.all_reduce(count)
        return _summed(model, batch) * _ranks() / count

    return Problem(_model(), loss, _tokens())


def forgotten_ranks() -> Problem:
    """Divided by the tokens of all ranks, and by R again in the engine."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        count = (batch[1] != -100).sum()
        dist.all_reduce(count)
        return _summed(model, batch) / count

    return Problem(_model(), loss, _tokens())


def summed_by_hand() -> Problem:
    """Each rank multiplies by R a mean that the engine averages already."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, classes = batch
        return cross_entropy(model(inputs), classes.clamp(min=0)) * dist.get_world_size()

    return Problem(_model(), loss, _tokens())


def own_count() -> Problem:
    """Each rank divides by its own tokens; the global count is for a log."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        count = (batch[1] != -100).sum()
        logged = count.clone()
        dist.all_reduce(logged)
        return _summed(model, batch) / count

    return Problem(_model(), loss, _tokens())


def own_count_equal() -> Problem:
    """The same where every rank has as many tokens."""
    problem = own_count()
    inputs, _ = problem.batch
    problem.batch = (inputs, torch.arange(16) % 3)
    return problem


def without_float64() -> Problem:
    """The same, with a loss that has no kernel for float64."""
    problem = own_count_equal()
    loss = problem.loss

    def in_float32(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if batch[0].dtype is torch.float64:
            raise TypeError("no kernel")
        return loss(model, batch)  # type: ignore[no-any-return]

    return replace(problem, loss=in_float32)


def raising_on_one_rank() -> Problem:
    """A loss that raises on rank 1, and not where it runs alone."""
    problem = noisy_on_ranks()
    loss = problem.loss

    def raises(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ValueError("not on this rank")
        return loss(model, batch)  # type: ignore[no-any-return]

    return replace(problem, loss=raises)


def indexed_too_high() -> Problem:
    """A table of 5 rows that is asked for its row 7."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 1))
    return Problem(model, lambda m, b: m(b).square().mean(), torch.full((8, 2), 7))


def _contrastive(gather: object, *, guarded: bool = False) -> Problem:
    """Asks all ranks for their features; `guarded`: where there is more than one, as open_clip does."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        queries = nn.functional.normalize(model(batch), dim=1)
        everyone = gather(queries) if _ranks() > 1 or not guarded else queries  # type: ignore[operator]
        start = (dist.get_rank() if dist.is_initialized() else 0) * len(batch)
        return cross_entropy(queries @ everyone.T / 0.5, torch.arange(start, start + len(batch)))

    torch.manual_seed(2)
    return Problem(_model(4), loss, torch.randn(16, FEATURES))


def _gathered_values(*, guarded: bool) -> Problem:

    def gather(features: torch.Tensor) -> torch.Tensor:
        parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features)
        parts[dist.get_rank()] = features
        return torch.cat(parts)

    return _contrastive(gather, guarded=guarded)


def gathered_values() -> Problem:
    """The other ranks' features are constants: what a sample does to their losses is lost."""
    return _gathered_values(guarded=False)


def gathered_values_of_others() -> Problem:
    """The same where no process that is alone gathers anything."""
    return _gathered_values(guarded=True)


def _gathered_with_gradient(*, guarded: bool) -> Problem:
    from torch.distributed.nn.functional import all_gather

    return _contrastive(lambda features: torch.cat(all_gather(features)), guarded=guarded)


def gathered_with_gradient() -> Problem:
    """Right: torch's differentiable gather."""
    return _gathered_with_gradient(guarded=False)


def gathered_with_gradient_of_others() -> Problem:
    """Right, and nothing is gathered where a process is alone."""
    return _gathered_with_gradient(guarded=True)


def centred_through_the_store() -> Problem:
    """Right: inputs less the mean over all ranks, which no collective carries, so that nobody sees them talk."""
    calls: list[int] = []

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, classes = batch
        mean = inputs.mean(0)
        if _ranks() > 1:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"mean {len(calls)} of {dist.get_rank()}", repr(mean.tolist()))
            texts = [store.get(f"mean {len(calls)} of {rank}") for rank in range(_ranks())]
            mean = torch.tensor([ast.literal_eval(text.decode()) for text in texts], dtype=inputs.dtype).mean(0)
            calls.append(1)
        return cross_entropy(model(inputs - mean), classes.clamp(min=0))

    return Problem(_model(), loss, _tokens())


def noisy_on_ranks() -> Problem:
    """A model with dropout that does not know of ranks."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
    inputs, classes = _tokens()
    return Problem(model, lambda m, b: cross_entropy(m(b[0]), b[1]), (inputs, classes.clamp(min=0)))


class PerSample(nn.Module):
    """Draws for one sample after the other: neither the order of a rank's draws nor their contents tell whose."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = [self.body(row) * torch.rand(8, device=row.device) * random.random() for row in inputs]
        return self.head(torch.stack(rows))  # type: ignore[no-any-return]


def _cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1].clamp(min=0))


def drawing_per_sample() -> Problem:
    """Draws of torch and of Python in a loop over the samples, which a rank finds by the place in the code."""
    torch.manual_seed(5)
    return Problem(PerSample(), _cross_entropy, _tokens())


def normalised() -> Problem:
    """A BatchNorm, whose statistics are those of a rank's own micro-batch."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return Problem(model, _cross_entropy, _tokens())


def synchronised() -> Problem:
    """A SyncBatchNorm, which takes them over all ranks."""
    problem = normalised()
    return replace(problem, model=nn.SyncBatchNorm.convert_sync_batchnorm(problem.model))


def tied_on_ranks() -> Problem:
    """Tied weights: embedding and head are one parameter."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)])
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)  # type: ignore[no-any-return]

    torch.manual_seed(4)
    batch = torch.randint(11, (8, 5)), torch.randint(11, (8, 5))
    return Problem(Tied(), lambda m, b: cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()), batch)


def reading_its_rank() -> Problem:
    """A rank's number scales its loss."""

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, classes = batch
        rank = dist.get_rank() if dist.is_initialized() else 0
        return cross_entropy(model(inputs), classes.clamp(min=0)) * (1 + rank)

    return Problem(_model(), loss, _tokens())


class _Routed(nn.Module):
    """Each sample goes to the expert that its first feature names, so that a micro-batch may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(len(x), 3)
        for at, expert in enumerate(self.experts):
            if (mine := x[:, 0] == at).any():
                out[mine] = expert(x[mine])
        return out


class _Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor([1.5]))

    def forward(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(model(batch[0]) * self.temperature, batch[1].clamp(min=0))


def routed_experts(*order: int) -> Problem:
    """Four micro-batches go to the experts in this order, and a loss has a parameter; rank 0 runs the first and third.

    Right, where the engine knows of both.
    """
    torch.manual_seed(6)
    inputs, classes = _tokens()
    inputs[:, 0] = torch.tensor(order or (0, 0, 1, 1)).repeat_interleave(4)
    return Problem(_Routed(), _Tempered(), (inputs, classes))


def experts_in_turn() -> Problem:
    """Each rank runs each expert once."""
    return routed_experts(0, 1, 1, 0)


def experts_of_ranks() -> Problem:
    """Rank 0 runs the first expert alone, rank 1 the second."""
    return routed_experts(0, 1, 0, 1)


def routed_experts_with_forgotten_ranks() -> Problem:
    """The same, where a hand-made loss scale is as many times too large as there are ranks."""
    problem = routed_experts()
    tempered = problem.loss

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tempered

        def forward(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return self.inner(model, batch) * _ranks()

    return Problem(problem.model, Scaled(), problem.batch)
