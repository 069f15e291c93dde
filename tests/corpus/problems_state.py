"""Faults C02 to F01: random draws, state that a forward changes, and precision."""

from __future__ import annotations

from typing import Any

import numpy
import torch
import torch.nn.functional as F
from problems import classified, cross_entropy, fault, language_model, mlp, quiet, squared_error, token_batch
from torch import nn

from gaverify import Problem


def _chunked(recompute: bool) -> Problem:
    """Embeds a batch above 4 samples in chunks, and once more to get the gradient: with other dropout masks."""

    def embed_twice(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = torch.cat([model(part) for part in x.split(4)])
        logits.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, y), logits)
        again = torch.cat([model(part) for part in x.split(4)])  # planted C02
        return (again * gradient).sum()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return embed_twice(model, x, y) if recompute and len(x) > 4 else F.cross_entropy(model(x), y)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    return Problem(model, loss, (torch.randn(16, 6), torch.randint(4, (16,))))


def recomputed_with_another_mask() -> Problem:
    return _chunked(True)


def computed_once() -> Problem:
    return _chunked(False)


def tracked_batch_norm() -> Problem:
    torch.manual_seed(0)
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
    torch.manual_seed(0)
    tokens = torch.arange(8)[:, None].repeat(1, 2)  # micro-batches look different rows up
    return Problem(Renormed(tied), cross_entropy, (tokens, torch.randint(11, (8,))))


def tied_max_norm() -> Problem:
    return _renormed(True)


def untied_max_norm() -> Problem:
    return _renormed(False)


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
    torch.manual_seed(0)
    return Problem(
        Detector(frozen), lambda model, batch: model(*batch), (torch.randn(16, 6), (torch.rand(16) < 0.4).float())
    )


def moving_divisor() -> Problem:
    return _detector(False)


def frozen_divisor() -> Problem:
    return _detector(True)


def divisor_that_moves_first() -> Problem:
    """Divides by the average that this forward has just moved: restored before each forward, it is none of 1/K."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, positive = batch
        with torch.no_grad():
            model.average.mul_(0.9).add_(0.1 * positive.sum())
        errors = F.binary_cross_entropy_with_logits(model.inner(x)[:, 0], positive, reduction="sum")
        return errors / model.average.clone()

    torch.manual_seed(0)
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


def count_and_moving_divisor() -> Problem:
    return _counted(True)


def count_beside_an_average() -> Problem:
    return _counted(False)


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


def frozen_maximum() -> Problem:
    return _quantised(False)


class Counting(nn.Module):
    """Warms its output up by a Python counter that a forward increments."""

    def __init__(self, counting: bool) -> None:
        super().__init__()
        self.inner, self.calls, self.counting = nn.Linear(6, 4), 1, counting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(x) * min(1.0, self.calls / 10)
        if self.counting:
            self.calls += 1  # planted hidden-counter
        return outputs


def hidden_counter() -> Problem:
    torch.manual_seed(0)
    return classified(Counting(True), 6)


def constant_counter() -> Problem:
    torch.manual_seed(0)
    return classified(Counting(False), 6)


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


def hidden_array() -> Problem:
    torch.manual_seed(0)
    return classified(Tallied(True), 6)


def constant_array() -> Problem:
    torch.manual_seed(0)
    return classified(Tallied(False), 6)


def _taught(following: bool) -> Problem:
    """A teacher in the loss's closure, which follows the model by an average at each call, or stays."""
    torch.manual_seed(0)
    teacher = mlp()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.2 * following)  # planted moving-teacher
            goals = teacher(x)
        return F.mse_loss(model(x), goals)

    return Problem(mlp(), loss, torch.randn(16, 6))


def moving_teacher() -> Problem:
    return _taught(True)


def resting_teacher() -> Problem:
    return _taught(False)


STEP = 0


def _warmed_up(counting: bool) -> float:
    """A factor that grows with a global counter, two functions away from the loss."""
    global STEP
    STEP += counting
    return min(1.0, (STEP + 1) / 10)


def _warm_up(counting: bool) -> Problem:
    torch.manual_seed(0)
    return Problem(
        mlp(),
        lambda model, batch: _warmed_up(counting) * cross_entropy(model, batch),
        (torch.randn(16, 6), torch.randint(4, (16,))),
    )


def global_step() -> Problem:
    return _warm_up(True)


def resting_step() -> Problem:
    return _warm_up(False)


class Codebook(nn.Module):
    """Replaces each row by its nearest code, and moves the codes towards the rows, unless they are frozen."""

    def __init__(self, moving: bool) -> None:
        super().__init__()
        self.moving = moving
        self.register_buffer("codes", torch.randn(5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        chosen = self.codes[nearest].clone()
        if self.moving:
            with torch.no_grad():
                for code in nearest.unique():
                    self.codes[code].lerp_(x[nearest == code].mean(0), 0.3)  # planted codebook
        return x * 0.5 + (chosen - x * 0.5).detach() * x.detach().abs()


def _coded(moving: bool) -> Problem:
    torch.manual_seed(0)
    return classified(nn.Sequential(nn.Linear(6, 6), Codebook(moving), nn.Linear(6, 4)), 6)


def moving_codebook() -> Problem:
    return _coded(True)


def frozen_codebook() -> Problem:
    return _coded(False)


class Stateful(nn.Module):
    """A recurrent network that starts where the last forward ended, unless it is told to forget."""

    def __init__(self, remembers: bool) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 4)
        self.hidden, self.remembers = None, remembers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, hidden = self.lstm(x, self.hidden)
        if self.remembers:
            self.hidden = tuple(part.detach().mean(1, keepdim=True).expand(-1, 4, -1).contiguous() for part in hidden)
        return self.head(outputs[:, -1])


def _stateful(remembers: bool) -> Problem:
    torch.manual_seed(0)
    return classified(Stateful(remembers), 5, 6)


def carried_hidden_state() -> Problem:
    return _stateful(True)


def forgotten_hidden_state() -> Problem:
    return _stateful(False)


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
    torch.manual_seed(0)
    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


def low_precision() -> Problem:
    torch.manual_seed(0)
    return Problem(
        mlp(classes=1).bfloat16(), squared_error, (torch.randn(64, 6).bfloat16(), torch.randn(64, 1).bfloat16())
    )


def tracked_language_model() -> Problem:
    """Dropout inside a token model whose loss counts every token."""
    torch.manual_seed(0)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    return Problem(nn.Sequential(*language_model(), nn.Dropout(0.3)), loss, token_batch((6,) * 8))


FAULTS = (
    fault("C02", recomputed_with_another_mask, "GAV302 GAV303", "the gradient of one mask is used with another"),
    fault("D01", tracked_batch_norm, "GAV101", "running statistics move once per forward", notes="GAV402", module="1"),
    fault("D03", tied_max_norm, "GAV401", "the head sees rows that a lookup scaled before", module="embedding"),
    fault(
        "D05",
        moving_divisor,
        "GAV401",
        "the second micro-batch is divided by what the first one left",
        options={"weighting": "none"},
        planted=True,
    ),
    fault(
        "D08", moving_maximum, "GAV401", "the second micro-batch is rounded to what the first one left", planted=True
    ),
    fault(
        "hidden-counter",
        hidden_counter,
        "GAV403",
        "the factor is a Python number that each forward increments",
        planted=True,
    ),
    fault("hidden-array", hidden_array, "GAV403", "the divisor is a NumPy array that each forward adds to", module=""),
    fault(
        "moving-teacher",
        moving_teacher,
        "GAV401 GAV403",
        "the next micro-batch meets a teacher that has moved on",
        planted=True,
    ),
    fault("global-step", global_step, "GAV403", "the factor depends on a global of a helper function"),
    fault("codebook", moving_codebook, "GAV401", "the second micro-batch finds other codes", planted=True),
    fault("hidden-state", carried_hidden_state, "GAV403", "the second micro-batch starts where the first one ended"),
    fault("spectral-norm", spectral_norm, "GAV401", "the power iteration goes on with every forward"),
    fault("counting-loss", counting_loss, "GAV403", "the factor is kept on the loss function"),
)

COMBINED = (
    fault("divisor-and-scale", moving_divisor, "GAV401 GAV201", "a sum is averaged, and its divisor moves on"),
    fault("moved-divisor-and-scale", divisor_that_moves_first, "GAV401 GAV201", "the same, read after it is written"),
    fault(
        "divisor-and-count", count_and_moving_divisor, "GAV401 GAV202", "means of means, and a divisor that moves on"
    ),
    fault("average-and-count", count_beside_an_average, "GAV202", "the average moves on, and nothing reads it"),
)

TWINS = (
    quiet("C02", computed_once, "one mask per sample, replayed"),
    quiet("D01", tracked_batch_norm, "frozen statistics do not move", options={"mode": "eval"}),
    quiet("D03", untied_max_norm, "the forward moves parameters, but every lookup scales first"),
    quiet("D05", frozen_divisor, "a constant divisor", options={"weighting": "none"}),
    quiet("D08", frozen_maximum, "a constant scale"),
    quiet("hidden-array", constant_array, "a constant divisor"),
    quiet("moving-teacher", resting_teacher, "a constant teacher"),
    quiet("global-step", resting_step, "a constant factor"),
    quiet("codebook", frozen_codebook, "constant codes"),
    quiet("hidden-state", forgotten_hidden_state, "every forward starts at zero"),
    quiet("spectral-norm", spectral_norm, "eval mode takes no step", options={"mode": "eval"}),
    quiet("hidden-counter", constant_counter, "a constant factor"),
    quiet("C02-language-model", tracked_language_model, "dropout on every token, replayed"),
)

# F01 is a note on an equivalent run: the accumulation in bfloat16 loses bits, the recipe is right.
LOW_PRECISION = quiet("F01", low_precision, "32 roundings to 8 bits add up", steps=32, notes="GAV501")
