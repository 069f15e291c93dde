"""Faults C02 to F01: random draws, state that a forward changes, and precision."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from problems import Parts, classified, cross_entropy, fault, language_model, mlp, quiet, squared_error, token_batch
from torch import nn

from gaverify import Problem


def _chunked(recompute: bool) -> Problem:
    """Embeds a batch above 4 samples in chunks, and once more to get the gradient: with other dropout masks."""

    def embed_twice(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = torch.cat([model(part) for part in x.split(4)])
        logits.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, y), logits)
        again = torch.cat(
            [model(part) for part in x.split(4)]
        )  # here lies C02, which is told by its module or by the loss alone
        return (again * gradient).sum()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return embed_twice(model, x, y) if recompute and len(x) > 4 else F.cross_entropy(model(x), y)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    return Problem(model, loss, (torch.randn(16, 6), torch.randint(4, (16,))))


def computed_once() -> Problem:
    return _chunked(False)


def tracked_batch_norm() -> Problem:
    return classified(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)), 6)


class Renormed(nn.Module):
    """An embedding whose lookup scales long rows down in place; `tied` uses the same weight as the output head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, max_norm=1.0)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens).mean(1))


def _renormed(tied: bool) -> Problem:
    tokens = torch.arange(8)[:, None].repeat(1, 2)  # micro-batches look different rows up
    return Problem(Renormed(tied), cross_entropy, (tokens, torch.randint(11, (8,))))


class Detector(nn.Module):
    """Divides by a moving average of positives that its own forward updates, unless that is frozen."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.inner, self.frozen = mlp(classes=1), frozen
        self.register_buffer("average", torch.tensor(4.0))

    def forward(self, x: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        errors = F.binary_cross_entropy_with_logits(self.inner(x)[:, 0], positive, reduction="sum")
        loss = errors / self.average.clone()
        if not self.frozen:
            with torch.no_grad():
                self.average.mul_(0.9).add_(0.1 * positive.sum())  # planted D05
        return loss


def _detector(frozen: bool) -> Problem:
    return Problem(
        Detector(frozen), lambda model, batch: model(*batch), (torch.randn(16, 6), (torch.rand(16) < 0.4).float())
    )


def moving_divisor() -> Problem:
    return _detector(False)


def divisor_that_moves_first() -> Problem:
    """Divides by the average that this forward has just moved: restored before each forward, it is none of 1/K."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, positive = batch
        with torch.no_grad():
            model.average.mul_(0.9).add_(0.1 * positive.sum())
        errors = F.binary_cross_entropy_with_logits(model.inner(x)[:, 0], positive, reduction="sum")
        return errors / model.average.clone()

    return Problem(Detector(True), loss, (torch.randn(16, 6), (torch.rand(16) < 0.4).float()))


def _counted(read: bool) -> Problem:
    """The positives' mean loss, divided by a moving average that is `read` or only kept."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, positive = batch
        errors = F.binary_cross_entropy_with_logits(model.inner(x)[:, 0], positive, reduction="none")
        average = model.average.clone()
        with torch.no_grad():
            model.average.mul_(0.9).add_(0.1 * x.square().sum())
        return (errors * positive).sum() / positive.sum() / (average if read else 1.0)

    torch.manual_seed(0)
    positive = torch.tensor([1.0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 1])
    return Problem(Detector(True), loss, (torch.randn(16, 6), positive))


class Slower(nn.Module):
    """Scores over the number of samples seen so far, behind BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.net(x) / (1 + self.seen / 100)


class FakeQuantised(nn.Module):
    """Rounds to 8 bits of the largest value seen so far (straight-through), then updates that value."""

    def __init__(self, observing: bool) -> None:
        super().__init__()
        self.observing = observing
        self.register_buffer("largest", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = self.largest.clone()
        step = largest / 127
        clipped = torch.clamp(x, -largest, largest)
        rounded = clipped + ((clipped / step).round() * step - clipped).detach()
        if self.observing:
            with torch.no_grad():
                self.largest.copy_(torch.maximum(self.largest, x.abs().max()))  # planted D08
        return rounded


def _quantised(observing: bool) -> Problem:
    torch.manual_seed(0)
    return classified(nn.Sequential(nn.Linear(6, 8), FakeQuantised(observing), nn.Linear(8, 4)), 6)


def moving_maximum() -> Problem:
    return _quantised(True)


class Tallied(nn.Module):
    """Divides by a running tally of the rows seen, kept in a NumPy array."""

    def __init__(self, counting: bool) -> None:
        super().__init__()
        self.inner, self.tally, self.counting = nn.Linear(6, 4), numpy.ones(2), counting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(x) / float(self.tally[0])
        if self.counting:
            self.tally += 0.1 * len(x)
        return outputs


def _taught(following: bool) -> Problem:
    """A teacher in the loss's closure, which follows the model by an average at each call, or stays."""
    teacher = mlp()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.2 * following)  # planted moving-teacher
            goals = teacher(x)
        return F.mse_loss(model(x), goals)

    return Problem(mlp(), loss, torch.randn(16, 6))


def _relative(moves: bool) -> Problem:
    """A loss times its batch's own number over the average of past ones, which the first batch sets: once that is 1."""
    average: float | None = None

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal average
        x, y = batch
        outputs = model(x)
        size = outputs.detach().abs().mean().item()
        average = size if average is None else 0.9 * average + 0.1 * size
        return F.cross_entropy(outputs, y) * (size / average if moves else 1.0)

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


class _Schedule:
    factor = 1.0


def _kept_on_class(moves: bool) -> Problem:
    """A factor that a class keeps, beside a list that nothing reads."""
    losses: list[float] = []
    _Schedule.factor = 1.0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        value = cross_entropy(model, batch)
        losses.append(float(value.detach()))
        value = value * _Schedule.factor
        _Schedule.factor *= 1.25 if moves else 1.0  # planted factor-of-class
        return value

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


class _Slotted(nn.Module):
    """A forward that counts in `__slots__`, which no registry of the module shows."""

    __slots__ = ("factor", "seen")

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.layers, self.moves, self.seen, self.factor = mlp(), moves, [0], torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(0)
        self.factor.mul_(1.25 if self.moves else 1.0)
        return self.layers(x) * self.factor


class _Seen(nn.Module):
    """A model, or a loss, whose buffer has the name `seen`."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.layers, self.moves = mlp(), moves
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Any, batch: Any = None) -> torch.Tensor:
        if batch is not None:
            return cross_entropy(x, batch)
        self.seen.mul_(1.25)
        return self.layers(x) * (self.seen if self.moves else 1.0)


def _named_alike(moves: bool, *, in_closure: bool) -> Problem:
    """State of one name in model and loss: the buffers of two modules, or one and a variable that a function keeps."""
    seen = 1.0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal seen
        seen *= 1.25
        return cross_entropy(model, batch) * (seen if moves else 1.0)

    problem = classified(_Seen(moves and not in_closure), 6)
    problem.loss = loss if in_closure else _Seen(False)
    return problem


def _counters(reads: bool, *, masked: bool) -> Problem:
    """Two counters of one name, of which the second one scales the loss, beside a mean over a mask.

    A walk finds both; names find one. Numbers that grow from forward to forward look like weights of micro-batches.
    """

    def make_counter(step: int) -> Callable[[], int]:
        count = 0

        def tick() -> int:
            nonlocal count
            count += step
            return count

        return tick

    first, second = make_counter(0), make_counter(1)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        factor = 1 + 0.3 * second() + first() if reads else 1 + 0 * (first() + second())
        terms, mask = F.cross_entropy(model(x), y, reduction="none"), (x[:, 0] > 0).float() + 0.1
        return factor * ((terms * mask).sum() / mask.sum() if masked else terms.mean())

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


STEP = 0


def _warmed_up(counting: bool) -> float:
    """A factor that grows with a global counter, two functions away from the loss."""
    global STEP
    STEP += counting
    return min(1.0, (STEP + 1) / 10)


def _warm_up(counting: bool) -> Problem:
    return Problem(
        mlp(),
        lambda model, batch: _warmed_up(counting) * cross_entropy(model, batch),
        (torch.randn(16, 6), torch.randint(4, (16,))),
    )


class Codebook(Parts):
    """Replaces each row by its nearest code, and moves the codes towards the rows, unless they are frozen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        chosen = self.codes[nearest].clone()
        if self.moving:
            with torch.no_grad():
                for code in nearest.unique():
                    self.codes[code].lerp_(x[nearest == code].mean(0), 0.3)  # planted codebook
        return x * 0.5 + (chosen - x * 0.5).detach() * x.detach().abs()


def _coded(moving: bool) -> Problem:
    return classified(
        nn.Sequential(nn.Linear(6, 6), Codebook(moving=moving, codes=nn.Buffer(torch.randn(5, 6))), nn.Linear(6, 4)), 6
    )


class Stateful(Parts):
    """A recurrent network that starts where the last forward ended, unless it is told to forget."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, hidden = self.lstm(x, self.hidden)
        if self.remembers:
            self.hidden = tuple(part.detach().mean(1, keepdim=True).expand(-1, 4, -1).contiguous() for part in hidden)
        return self.head(outputs[:, -1])


def _stateful(remembers: bool) -> Problem:
    return classified(
        Stateful(lstm=nn.LSTM(6, 5, batch_first=True), head=nn.Linear(5, 4), hidden=None, remembers=remembers), 5, 6
    )


def spectral_norm() -> Problem:
    """Each forward in training mode takes one step of the power iteration, kept in a buffer."""
    torch.manual_seed(0)
    return classified(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 4)), 6)


def counting_loss() -> Problem:
    """A warm-up kept on the loss function itself."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        loss.calls += 1
        return cross_entropy(model, batch) * min(1.0, loss.calls / 10)

    loss.calls = 0
    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


class Referenced(nn.Module):
    """Normalises by statistics of the batch mixed with those of the first batch that it saw, or with constants."""

    def __init__(self, remembers: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.remembers = nn.Linear(6, 8), nn.Linear(8, 4), remembers
        self.reference: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        mean, square = x.mean(0), x.square().mean(0)
        if self.remembers and self.reference is None:
            self.reference = mean.detach(), square.detach()
        known = (torch.zeros(8, dtype=x.dtype), torch.ones(8, dtype=x.dtype))
        known = (self.reference or known) if self.remembers else known
        mean, square = (mean + known[0]) / 2, (square + known[1]) / 2
        return self.outer(torch.tanh((x - mean) / (square - mean * mean + 1e-5).sqrt()))


class Observed(nn.Module):
    """Rounds to the moving average of the largest value, which the first forward sets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x.detach().abs().max()
        with torch.no_grad():
            self.largest.copy_(seen if float(self.largest) == 0 else 0.9 * self.largest + 0.1 * seen)
        step = self.largest.clone() / 15
        return x + ((x / step).round().clamp(-15, 15) * step - x).detach()


def _penalised(factor: Callable[[], float]) -> Problem:
    """Cross entropy and a penalty, which is multiplied by what `factor` returns at each call."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        outputs = model(x)
        return F.cross_entropy(outputs, y) + factor() * outputs.square().mean()

    torch.manual_seed(0)
    return Problem(nn.Linear(6, 4), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


def _scheduled(*factors: float) -> Problem:
    """Factors from an iterator that starts again after the last one."""
    schedule, calls = itertools.cycle(factors), itertools.count()
    return _penalised(lambda: (next(schedule), next(calls))[0])


def _scheduled_by_generator(*factors: float) -> Problem:
    def schedule() -> Iterator[float]:
        while True:
            yield from factors

    values = schedule()
    return _penalised(lambda: next(values))


def hidden_schedule() -> Problem:
    """Nothing tells that a bound method of an iterator has state: each pass of K = 4 takes up where it began."""
    return _penalised(itertools.cycle((0.0, 0.1)).__next__)


class _ScheduledNorm(nn.BatchNorm1d):
    """A BatchNorm whose outputs follow a schedule in training mode; frozen, it follows none."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self._factor = itertools.cycle((1.0, 1.1)).__next__

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        normalised = super().forward(inputs)
        return normalised * self._factor() if self.training else normalised


def scheduled_norm() -> Problem:
    """Evaluation mode takes the schedule away together with the statistics of the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), _ScheduledNorm(8), nn.ReLU(), nn.Linear(8, 4))
    return Problem(model, cross_entropy, (torch.randn(16, 6), torch.randint(4, (16,))))


def weights_from_schedule() -> Problem:
    """Five factors for the five forwards of a comparison with K = 4: the same weights fit each time."""
    factor = itertools.cycle((4.0, 4.0, 1.0, 0.5, 4.0)).__next__
    torch.manual_seed(0)
    return Problem(
        nn.Linear(6, 4),
        lambda model, batch: factor() * cross_entropy(model, batch),
        (torch.randn(16, 6), torch.randint(4, (16,))),
    )


def _estimated(moving: bool) -> Problem:
    """Divides by an average that the first forward sets: each forward from the same state gives one, as all others do.

    What moves is a variable of the enclosing function; else the divisor is a constant.
    """
    average = None

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal average
        x, y = batch
        weights = model(x).exp().mean()
        if moving:
            average = weights.detach() if average is None else 0.9 * average + 0.1 * weights.detach()
        return weights / (average if moving else 2.0) - model(y).mean()

    torch.manual_seed(0)
    return Problem(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), loss, tuple(torch.randn(2, 16, 6)))


def _remembered(reads: str) -> Problem:
    """A loss that keeps numbers of past batches beside running statistics that training does not read.

    Args:
        reads: `past`: a list of them; `either`: the larger of two that move alike, so that one alone shows nothing;
            `both`: a number and a buffer; empty: none.
    """
    past, largest, smallest = [], [0.0], [0.0]
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(), nn.Linear(36, 3)
    )
    model.register_buffer("seen", torch.zeros(()))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        outputs = model(x)
        size = float(outputs.detach().abs().mean())
        factors = {"past": sum(past[-3:]), "either": max(largest[0], smallest[0])}
        factors["both"] = (1 + largest[0]) * (1 + float(model.seen)) - 1
        past.append(size)
        largest[0], smallest[0] = largest[0] + size, smallest[0] + size
        model.seen.add_(0.2 * size)
        return F.cross_entropy(outputs, y) * (1 + factors.get(reads, 0.0))

    return Problem(model, loss, (torch.randn(8, 2, 9), torch.randint(3, (8,))))


def hooked_beside_state() -> Problem:
    """A gradient hook that squares, beside a divisor that moves on: the forwards agree from the same state alone."""
    divisor = 1.0

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal divisor
        value = model(x).square().mean() / divisor
        divisor *= 1.5
        return value

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    model[0].weight.register_hook(lambda gradient: gradient * gradient.norm())
    return Problem(model, loss, torch.randn(16, 6))


def noise_from_generator() -> Problem:
    """A generator that draws at random: every micro-batch is given the full batch's number."""

    def draws() -> Iterator[torch.Tensor]:
        while True:
            yield torch.rand(())

    values = draws()
    return _penalised(lambda: next(values))


def low_precision() -> Problem:
    return Problem(
        mlp(classes=1).bfloat16(), squared_error, (torch.randn(64, 6).bfloat16(), torch.randn(64, 1).bfloat16())
    )


def tracked_language_model() -> Problem:
    """Dropout inside a token model whose loss counts every token."""

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    return Problem(nn.Sequential(*language_model(), nn.Dropout(0.3)), loss, token_batch((6,) * 8))


FAULTS = (
    fault("C02", lambda: _chunked(True), "GAV302 GAV303", "the gradient of one mask is used with another"),
    fault("D01", tracked_batch_norm, "GAV101", "running statistics move once per forward", notes="GAV402", module="1"),
    fault("D03", lambda: _renormed(True), "GAV401", "the head sees rows that a lookup scaled", module="embedding"),
    fault("D05", moving_divisor, "GAV401", "the second micro-batch is divided by the first", weighting="none"),
    fault("D08", moving_maximum, "GAV401", "the second micro-batch is rounded to what the first one left"),
    fault(
        "hidden-array",
        lambda: classified(Tallied(True), 6),
        "GAV403",
        "a NumPy array that each forward adds to",
        module="",
    ),
    fault("moving-teacher", lambda: _taught(True), "GAV401 GAV403", "the teacher has moved on"),
    fault("global-step", lambda: _warm_up(True), "GAV403", "the factor depends on a global of a helper function"),
    fault("codebook", lambda: _coded(True), "GAV401", "the second micro-batch finds other codes"),
    fault("hidden-state", lambda: _stateful(True), "GAV403", "the second micro-batch starts where the first one ended"),
    fault("spectral-norm", spectral_norm, "GAV401", "the power iteration goes on with every forward"),
    fault("counting-loss", counting_loss, "GAV403", "the factor is kept on the loss function"),
    fault("schedule-of-2", lambda: _scheduled(0.0, 0.1), "GAV403", "the penalty's factor comes from an iterator"),
    fault("schedule-of-4", lambda: _scheduled(0.0, 0.1, 0.3, 0.2), "GAV403", "the same, with as many factors as K"),
    fault("generator", lambda: _scheduled_by_generator(0.0, 0.1), "GAV403", "the factor comes from a generator"),
    fault("hidden-schedule", hidden_schedule, "GAV403", "the iterator is out of reach: losses differ at a distance"),
    fault("moving-estimate", lambda: _estimated(True), "GAV103 GAV403", "the first average of a batch is its own"),
    fault(
        "past-beside-statistics",
        lambda: _remembered("past"),
        "GAV403",
        "running statistics that nothing reads",
        notes="GAV402",
    ),
    fault("factor-of-class", lambda: _kept_on_class(True), "GAV403", "each micro-batch has a larger factor"),
    fault("factor-in-slots", lambda: classified(_Slotted(True), 6), "GAV403", "the factor lies in `__slots__`"),
    fault("buffers-of-one-name", lambda: _named_alike(True, in_closure=False), "GAV401", "the model's buffer moves on"),
    fault("variable-and-buffer", lambda: _named_alike(True, in_closure=True), "GAV403", "the loss's variable moves on"),
    fault("counters-of-one-name", lambda: _counters(True, masked=False), "GAV403", "numbers that look like weights"),
    fault("larger-of-two", lambda: _remembered("either"), "GAV403", "restored alone, neither shows anything"),
    fault("weights-from-schedule", weights_from_schedule, "GAV403", "a schedule that weights fit every time"),
)

COMBINED = (
    fault("counters-and-mask", lambda: _counters(True, masked=True), "GAV202 GAV403", "means of means, and a counter"),
    fault("mask-beside-counters", lambda: _counters(False, masked=True), "GAV202", "nothing reads what is counted"),
    fault("hook-and-divisor", hooked_beside_state, "GAV104 GAV403", "a gradient is squared, and a divisor moves on"),
    fault(
        "samples-seen",
        lambda: classified(Slower(), 6),
        "GAV101 GAV102 GAV401",
        "what is counted of restored state is no count",
    ),
    fault("divisor-and-scale", moving_divisor, "GAV401 GAV201", "a sum is averaged, and its divisor moves on"),
    fault("moved-divisor-and-scale", divisor_that_moves_first, "GAV401 GAV201", "the same, read after it is written"),
    fault("divisor-and-count", lambda: _counted(True), "GAV401 GAV202", "means of means, and a divisor that moves on"),
    fault("average-and-count", lambda: _counted(False), "GAV202", "the average moves on, and nothing reads it"),
    fault(
        "reference-and-statistics",
        lambda: classified(Referenced(True), 6),
        "GAV102 GAV403",
        "what holds the statistics of the batch holds the reference, too",
    ),
    fault(
        "number-and-buffer", lambda: _remembered("both"), "GAV401 GAV403", "each is read, and makes a difference alone"
    ),
    fault("own-number-and-average", lambda: _relative(True), "GAV103 GAV403", "the first number is the average"),
    fault("statistics-alone", lambda: classified(Referenced(False), 6), "GAV102", "mixed with constants"),
    fault(
        "observer-and-norm",
        lambda: classified(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Observed(), nn.Linear(8, 4)), 6),
        "GAV101 GAV102 GAV401",
        "a maximum that moves on, of a micro-batch that is normalised by itself",
        notes="GAV402",
    ),
)

TWINS = (
    quiet("C02", computed_once, "one mask per sample, replayed"),
    quiet("D01", tracked_batch_norm, "frozen statistics do not move", mode="eval"),
    quiet("D03", lambda: _renormed(False), "the forward moves parameters, but every lookup scales first"),
    quiet("D05", lambda: _detector(True), "a constant divisor", weighting="none"),
    quiet("D08", lambda: _quantised(False), "a constant scale"),
    quiet("hidden-array", lambda: classified(Tallied(False), 6), "a constant divisor"),
    quiet("moving-teacher", lambda: _taught(False), "a constant teacher"),
    quiet("global-step", lambda: _warm_up(False), "a constant factor"),
    quiet("codebook", lambda: _coded(False), "constant codes"),
    quiet("hidden-state", lambda: _stateful(False), "every forward starts at zero"),
    quiet("spectral-norm", spectral_norm, "eval mode takes no step", mode="eval"),
    quiet("schedule-of-2", lambda: _scheduled(0.1), "an iterator that repeats one factor"),
    quiet("factor-of-class", lambda: _kept_on_class(False), "a list grows, and the factor stays"),
    quiet("counters-of-one-name", lambda: _counters(False, masked=False), "nothing reads what is counted"),
    quiet("factor-in-slots", lambda: classified(_Slotted(False), 6), "it counts, and the factor stays"),
    quiet("buffers-of-one-name", lambda: _named_alike(False, in_closure=False), "nothing reads it", notes="GAV402"),
    quiet("variable-and-buffer", lambda: _named_alike(False, in_closure=True), "nothing reads it", notes="GAV402"),
    quiet("own-number-and-average", lambda: _relative(False), "the average moves, and nothing is divided by it"),
    quiet("past-beside-statistics", lambda: _remembered(""), "all of it changes, and nothing reads it", notes="GAV402"),
    quiet("moving-estimate", lambda: _estimated(False), "a constant divisor"),
    quiet("generator", noise_from_generator, "draws from a generator, replayed"),
    quiet("C02-language-model", tracked_language_model, "dropout on every token, replayed"),
)

# F01 is a note on an equivalent run: the accumulation in bfloat16 loses bits, the recipe is right.
LOW_PRECISION = quiet("F01", low_precision, "32 roundings to 8 bits add up", steps=32, notes="GAV501")
