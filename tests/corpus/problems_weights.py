"""Faults B01 to B14 and L19: additive losses that weigh micro-batches wrongly, and losses that call modules.

Shapes of the latter: B = 16 samples of D = 6 features, two views of each where the loss compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from problems import Parts, classified, fault, language_model, mlp, quiet, squared_error, token_batch, token_loss
from torch import nn

from gaverify import Problem

RAGGED = (6, 5, 1, 2, 4, 3, 2, 1)  # micro-batches of two rows hold 11, 3, 7 and 3 of 24 valid tokens


def ragged_tokens() -> Problem:
    torch.manual_seed(0)
    return Problem(language_model(), token_loss, token_batch(RAGGED))


def tokens_by_hand(*, masked: bool = False) -> Problem:
    """A mean over labels that are not -1, divided by hand: the calls of the loss ignore them, or a mask does."""

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        scores, labels = model(batch["tokens"]).transpose(1, 2), batch["labels"]
        keep = labels >= 0
        if masked:
            return (F.cross_entropy(scores, labels.clamp(min=0), reduction="none") * keep).sum() / keep.sum()
        return F.cross_entropy(scores, labels, ignore_index=-1, reduction="sum") / keep.sum()  # planted tokens-by-hand

    torch.manual_seed(0)
    batch = token_batch(RAGGED)
    labels = batch["labels"] if masked else batch["labels"].clamp(min=-1)
    return Problem(language_model(), loss, {**batch, "labels": labels})


class Packed(nn.Module):
    """A recurrent network on packed rows, with dropout between its layers or on its inputs: its rows are time steps."""

    def __init__(self, of_inputs: bool = False, sorts_unseen: bool = False) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 5, 2, batch_first=True, dropout=0.3 * (not of_inputs)), nn.Linear(5, 4)
        self.of_inputs, self.sorts_unseen = of_inputs, sorts_unseen

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        order = list(range(len(lengths)))
        if self.sorts_unseen:
            order.sort(key=lambda at: -int(lengths[at]))
            features, lengths = (torch.stack([rows[at] for at in order]) for rows in (features, lengths))
        packed = nn.utils.rnn.pack_padded_sequence(features, lengths.cpu(), batch_first=True, enforce_sorted=False)
        if self.of_inputs:
            packed = packed._replace(data=F.dropout(packed.data, 0.3))
        scores: torch.Tensor = self.head(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])
        return torch.stack([scores[order.index(at)] for at in range(len(order))])


def packed_tokens(
    *, of_inputs: bool = False, by_hand: bool = False, evenly: bool = True, sorts_unseen: bool = False
) -> Problem:
    """Means over labels of rows of different lengths.

    `of_inputs`: time steps look alike, and `evenly` there are as many in each micro-batch. `sorts_unseen`: Python sorts
    the samples, so that nothing tells whose they are.
    """

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        scores = model(*batch[:2]).transpose(1, 2)
        labels = batch[2][:, : scores.shape[2]]
        if by_hand:
            total = F.cross_entropy(scores, labels.clamp(min=0), reduction="none") * (labels >= 0)
            return total.sum() / (labels >= 0).sum()  # planted packed-by-hand
        return F.cross_entropy(scores, labels)  # planted packed-dropout

    torch.manual_seed(0)
    lengths = (6, 2, 5, 3, 4, 4, 3, 5) if of_inputs and evenly else (6, 2, 1, 3, 5, 6, 2, 4)
    features = torch.randn(6) * torch.randint(2, (8, 6, 1)) if of_inputs else torch.randn(8, 6, 6)
    return Problem(
        Packed(of_inputs, sorts_unseen), loss, (features, torch.tensor(lengths), token_batch(lengths, 4)["labels"])
    )


def few_numbers() -> Problem:
    """One weight in 8 micro-batches, of two samples and of one: any gradient is a multiple of any other one."""
    torch.manual_seed(0)
    return Problem(nn.Linear(1, 1, bias=False), squared_error, (torch.randn(15, 1), torch.randn(15, 1)))


def few_numbers_coupled() -> Problem:
    """Three weights and a bias in 8 micro-batches: loss weights that always fit say nothing of a loss that couples."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        scores = model(batch)
        return scores.std() + scores.mean() ** 2  # planted few-coupled

    torch.manual_seed(0)
    return Problem(nn.Linear(3, 1), loss, torch.randn(16, 3))


def even_tokens() -> Problem:
    """The same with two rows of every micro-batch holding 7 valid tokens together."""
    torch.manual_seed(0)
    return Problem(language_model(), token_loss, token_batch((6, 1, 2, 5, 4, 3, 3, 4)))


def mean_loss() -> Problem:
    torch.manual_seed(0)
    return classified(mlp(), 6)


def some_ignored() -> Problem:
    """Of ten targets two count for nothing: micro-batches of two hold 1, 2, 1, 2 and 2."""
    torch.manual_seed(0)
    problem = classified(mlp(), 6, size=10)
    problem.batch[1][[1, 5]] = -100
    return problem


def sum_by_samples() -> Problem:
    """A sum divided by a fixed number adds up by itself, where 11 samples make micro-batches of 3, 3, 3 and 2."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 11  # planted sum-by-samples

    torch.manual_seed(0)
    return Problem(mlp(), loss, (torch.randn(11, 6), torch.randint(4, (11,))))


def two_micro_batches() -> Problem:
    return classified(mlp(), 6, size=8)


class ForgetsTheCount(nn.Module):
    """Takes the token count that its trainer relies on; with `heeds`, it uses it as well."""

    def __init__(self, heeds: bool) -> None:
        super().__init__()
        self.inner, self.heeds = language_model(), heeds

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int | None = None) -> Any:
        logits = self.inner(tokens).flatten(0, 1)
        if self.heeds and num_items_in_batch is not None:
            return {"loss": F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch}
        return {"loss": F.cross_entropy(logits, labels.flatten())}  # planted B06


def _counted(heeds: bool) -> Problem:
    torch.manual_seed(0)
    batch = token_batch((6,) * 8)
    return Problem(ForgetsTheCount(heeds), lambda model, batch: model(**batch, num_items_in_batch=48), batch)


def _windowed(other: int | None) -> Problem:
    """The summed loss over the valid tokens of a window; the micro-batches carry `other` as its count."""
    batch = token_batch(RAGGED)
    window: dict[str, Any] = {**batch, "items": float((batch["labels"] != -100).sum())}

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        logits = model(batch["tokens"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / batch["items"]

    def split(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        return {name: batch[name][start:stop] for name in ("tokens", "labels")} | {"items": other or batch["items"]}

    return Problem(language_model(), loss, window, split=split, batch_size=8)


def _matched(divided: bool) -> Problem:
    """Mean over the matched targets of an image, as a detector forms it, times the number of images."""
    matched = torch.zeros(16, 5)
    for row, count in enumerate((5, 4, 3, 5, 1, 1, 2, 1, 2, 3, 2, 2, 5, 5, 1, 1)):
        matched[row, :count] = 1

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, targets, matched = batch
        errors = (model(x) - targets).square() * matched
        return errors.sum() / 43 if divided else errors.sum() / matched.sum() * len(x)  # planted B11

    return Problem(mlp(classes=5), loss, (torch.randn(16, 6), torch.randn(16, 5), matched))


def _elements(loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Problem:
    """A loss of outputs, targets and a mask over their elements, of which later samples hold more and more."""
    mask = torch.rand(16, 4) < torch.linspace(0.2, 0.95, 16)[:, None]
    return Problem(mlp(), lambda model, b: loss(model(b[0]), *b[1:]), (torch.randn(16, 6), torch.randn(16, 4), mask))


def over_kinds() -> Problem:
    """A mean over the kinds that a batch holds: 4, and 2 in every micro-batch of this one, by chance."""
    kinds = torch.tensor([0, 1, 0, 1, 2, 3, 2, 3, 0, 2, 0, 2, 1, 3, 1, 3])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, kinds = batch
        return (model(x) - y).square().mean() / len(kinds.unique())  # planted kinds

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randn(16, 4), kinds))


def normalised_sum(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Min-SNR weights, normalised over the batch: a rule that no two batches have the same numbers for."""
    weights = 1 / (1 + y[:, 0].exp())
    return (weights / weights.sum() * (x - y).square().mean(1)).sum()  # planted normalised-sum


def normalised_mean(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weights = 1 / (1 + y[:, 0].exp())
    return (weights / weights.mean() * (x - y).square().mean(1)).mean()  # planted normalised-mean


def hard_examples(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    errors = (x - y).square().mean(1)
    return errors[errors > 0.8].mean()  # planted hard-examples


def positives_and_elements(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Two terms with a count each, one of which depends on the outputs, and one over all rows, of shape (1,)."""
    errors, positive = (x - y).square(), x[:, 0] > -0.2
    found = (errors[:, 1:].sum(1) * positive).sum() / positive.sum().clamp(min=1)
    return (errors * mask).sum() / max(1, int(mask.sum())) + found + errors.mean(dim=0, keepdim=True).mean(1)


def constant_weights(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (1 / (1 + y[:, 0].exp()) * (x - y).square().mean(1)).mean()


def summed_beside_mean(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A reconstruction that is averaged and a divergence that is summed, as in many a VAE."""
    return (x - y).square().mean() + 0.1 * x.square().sum()  # planted summed-term


def averaged_beside_mean(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x - y).square().mean() + 0.01 * x.square().sum(1).mean()


def penalised(mean: bool = False) -> Problem:
    """Summed losses with a penalty on the parameters, which every micro-batch adds once more."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        errors = (model(batch[0]) - batch[1]).square()
        return (errors.mean() if mean else errors.sum()) + 0.1 * penalty  # planted penalty

    return replace(_elements(summed_beside_mean), loss=loss)


def sum_over_one_length() -> Problem:
    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["tokens"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / batch["labels"].shape[1]

    return Problem(language_model(), loss, token_batch((6,) * 8))


class Cosine(Parts):
    """A distance: the matrix of all similarities, or of each sample with its own partner."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
        return (a * b).sum(1) if self.healthy else a @ b.T  # planted modules-of-the-loss


class Reducer(nn.Module):
    """Averages the losses of the samples."""

    def forward(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.mean()


class Metric(Parts):
    """A loss made of modules, as libraries for metric learning build them; the last two see what samples met in."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        near = self.temper(5 * self.distance(a, b))
        if self.healthy:
            return self.reducer(-near)
        return self.reducer(F.cross_entropy(near, torch.arange(len(near)), reduction="none"))


def _views(healthy: bool, twice: bool) -> Problem:
    metric = Metric(healthy=healthy, distance=Cosine(healthy=healthy), temper=nn.Softplus(), reducer=Reducer())

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if twice:
            return metric(model(batch[0]), model(batch[1]))
        return metric(*model(torch.cat(batch, 1)).chunk(2, 1))

    batch = torch.randn(16, 6), torch.randn(16, 6)
    return Problem(mlp() if twice else mlp(12, classes=8), loss, batch)


class Scaled(nn.Module):
    """Two encoders, and the scale of their similarities as an output: a parameter, or made from one."""

    def __init__(self, exp: bool) -> None:
        super().__init__()
        self.exp = exp
        self.image, self.text = mlp(), mlp()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = self.logit_scale.exp() if self.exp else self.logit_scale
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), scale


def _scaled(exp: bool, healthy: bool) -> Problem:
    torch.manual_seed(0)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        image, text, scale = model(*batch)
        if healthy:
            return -(scale * (image * text).sum(1)).mean()
        logits = scale * image @ text.T
        return F.cross_entropy(logits, torch.arange(len(logits)))

    return Problem(Scaled(exp), loss, (torch.randn(16, 6), torch.randn(16, 6)))


class Terms(Parts):
    """Two criteria, each averaged by a module of its own; together they are no sum over samples."""

    def forward(self, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        squares, absolute = self.squares(found, wanted), self.absolute(found, wanted)
        return squares * absolute if self.product else squares + absolute  # planted product-of-criteria


def _terms(product: bool) -> Problem:
    criterion = Terms(product=product, squares=nn.MSELoss(), absolute=nn.L1Loss())
    return Problem(mlp(), lambda m, b: criterion(m(b[0]), b[1]), (torch.randn(16, 6), torch.randn(16, 4)))


def _of_slopes(whole: bool) -> Problem:
    """The model's slopes at the samples, differentiated by a transform: an energy, or its share of their deviation."""

    def loss(model: nn.Module, x: Any) -> torch.Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda sample: model(sample[None]).squeeze()))(x)
        energy = slopes.square().sum(1)
        return energy.mean() / (1 + energy.std()) if whole else energy.mean()  # planted slopes

    return Problem(mlp(classes=1), loss, torch.randn(16, 6))


def _centred(kernel: bool) -> Problem:
    """Two views less the centre of all, as kernels take them: it cancels in every distance, and couples nothing."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        a, b = model(batch[0]), model(batch[1])
        centre = torch.cat((a, b)).mean(0)
        a, b = a - centre, b - centre
        if not kernel:
            return (a - b).square().sum(1).mean()
        return -torch.exp(-torch.cdist(a, b)).mean()  # planted centred-kernel

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randn(16, 6)))


class Divided(nn.Module):
    """Hidden values over their deviation in the batch, or of each sample."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.hidden, self.head = dim, nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.hidden(x))
        return self.head(h / h.std(self.dim, keepdim=True))  # planted slopes-in-the-loss


def _penalised(dim: int) -> Problem:
    """Scores, and their slopes at the samples: what is held as a constant leaves the loss nothing to differentiate."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        scores = model(x)
        (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return F.cross_entropy(scores, batch[1]) + slopes.square().sum(1).mean()

    return Problem(Divided(dim), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


class LearnedStep(nn.Module):
    """Rounds to multiples of a learned step, whose gradient is scaled by the elements of the batch, or of a sample."""

    def __init__(self, of_batch: bool) -> None:
        super().__init__()
        self.step, self.of_batch = nn.Parameter(torch.tensor(0.2)), of_batch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = ((x if self.of_batch else x[0]).numel() * 127) ** -0.5
        step = (self.step - self.step * scale).detach() + self.step * scale  # planted learned-step
        clipped = (x / step).clamp(-127, 127)
        return (clipped + (clipped.round() - clipped).detach()) * step


def _learned_step(of_batch: bool) -> Problem:
    torch.manual_seed(0)
    return classified(nn.Sequential(nn.Linear(6, 8), LearnedStep(of_batch), nn.Tanh(), nn.Linear(8, 4)), 6)


FAULTS = (
    fault("B01", ragged_tokens, "GAV202", "the mean of means weighs 3 tokens like 11"),
    fault("tokens-by-hand", tokens_by_hand, "GAV202", "the same, divided by hand"),
    fault("zero-weight", some_ignored, "GAV202", "it counts for nothing", steps=5, weighting=(0.2, 0.2, 0.2, 0.0, 0.2)),
    fault("packed-dropout", packed_tokens, "GAV202", "draws per time step hide no weights", notes="GAV301"),
    fault(
        "packed-alike",
        lambda: packed_tokens(of_inputs=True, evenly=False),
        "GAV202",
        "what packed them tells time steps of equal contents apart",
        notes="GAV301",
    ),
    fault("packed-by-hand", lambda: packed_tokens(by_hand=True), "GAV202", "the same, divided by hand", notes="GAV301"),
    fault("few-coupled", few_numbers_coupled, "GAV103", "weights that fit any gradient explain none", steps=8),
    fault("few-numbers", few_numbers, "GAV202", "a fit of many weights to few numbers", steps=8),
    fault("B02", mean_loss, "GAV201", "four means are added", weighting="none"),
    fault("B04", two_micro_batches, "GAV201", "two divided by the configured four", steps=2, weighting=(0.25, 0.25)),
    fault("B05", mean_loss, "GAV201", "divided by K twice", weighting=(1 / 16,) * 4),
    fault("B06", lambda: _counted(False), "GAV201", "the trainer leaves it to the model", weighting="none"),
    fault("B09", lambda: _windowed(36), "GAV201", "divided by another window's 36", weighting="none"),
    fault("B11", lambda: _matched(divided=False), "GAV202", "17, 5, 9 and 12 matched targets", weighting="none"),
    fault("B13", mean_loss, "GAV202", "6, 6 and 4 samples averaged equally", steps=3),
    fault("learned-step", lambda: _learned_step(True), "GAV202", "the root of a count, in one parameter alone"),
    fault("kinds", over_kinds, "GAV201", "a factor of this window stands for a count"),
    fault("normalised-sum", lambda: _elements(normalised_sum), "GAV202", "divided by its own weights"),
    fault("normalised-mean", lambda: _elements(normalised_mean), "GAV202", "the same by their mean"),
    fault("hard-examples", lambda: _elements(hard_examples), "GAV202", "a count that outputs decide"),
    fault("sum-by-samples", sum_by_samples, "GAV202", "a sum needs no shares", weighting="samples"),
    fault("summed-term", lambda: _elements(summed_beside_mean), "GAV201", "one term is a sum"),
    fault("penalty", penalised, "GAV201", "counts K times", weighting="none"),
    fault("positives", lambda: _elements(positives_and_elements), "GAV202", "a count per term"),
    fault("B14", sum_over_one_length, "GAV201", "a sum over the batch is already additive; / K is once too often"),
    fault("L19", mean_loss, "GAV201", "`backward()` ran on the undivided loss", weighting="none"),
    fault("slopes-in-the-loss", lambda: _penalised(0), "GAV102", "a loss that differentiates refuses some controls"),
    fault("centred-kernel", lambda: _centred(True), "GAV103", "what cancels is not the line, though caches repair it"),
    fault("slopes", lambda: _of_slopes(True), "GAV103", "what runs in a transform is left alone"),
    fault("modules-of-the-loss", lambda: _views(False, False), "GAV103", "they are no encoder"),
    fault("twice", lambda: _views(False, True), "GAV103", "both calls of the model are cut"),
    fault("logit-scale", lambda: _scaled(False, False), "GAV103", "a parameter has one gradient per window"),
    fault("logit-scale-exp", lambda: _scaled(True, False), "GAV103", "so has what is made of a parameter alone"),
    fault("product-of-criteria", lambda: _terms(True), "GAV103", "criteria hand out no samples"),
)

TWINS = (
    quiet("learned-step", lambda: _learned_step(False), "the root of a sample's elements"),
    quiet("B01", ragged_tokens, "weighted by valid tokens", weighting="tokens"),
    quiet("tokens-by-hand", tokens_by_hand, "the loss's call says what it ignores", weighting="tokens"),
    quiet("masked-by-hand", lambda: tokens_by_hand(masked=True), "it ignores no target", weighting="tokens"),
    quiet("zero-weight", some_ignored, "weighted by valid targets", steps=5, weighting="tokens"),
    quiet(
        "packed-alike",
        lambda: packed_tokens(of_inputs=True, evenly=False),
        "the same, weighted by valid tokens",
        weighting="tokens",
        notes="GAV301",
    ),
    quiet("packed-dropout", packed_tokens, "weighted by valid tokens", weighting="tokens", notes="GAV301"),
    quiet("few-numbers", few_numbers, "weighted n_k/N", steps=8, weighting="samples"),
    quiet("B02", mean_loss, "divided by K"),
    quiet("B04", two_micro_batches, "divided by the two that there are", steps=2, weighting=(0.5, 0.5)),
    quiet("B05", mean_loss, "divided once", weighting=(1 / 4,) * 4),
    quiet("B06", lambda: _counted(True), "the model divides by the window's tokens", weighting="none"),
    quiet("B09", lambda: _windowed(None), "the window's own count", weighting="none"),
    quiet("B11", lambda: _matched(divided=True), "one constant divisor", weighting="none"),
    quiet("B13", mean_loss, "weighted n_k/N", steps=3, weighting="samples"),
    quiet("normalised-sum", lambda: _elements(constant_weights), "weights of the samples, not normalised"),
    quiet("sum-by-samples", sum_by_samples, "losses that add up are added up", weighting="none"),
    quiet("summed-term", lambda: _elements(averaged_beside_mean), "both terms are means"),
    quiet("penalty", lambda: penalised(mean=True), "each micro-batch adds its share"),
    quiet("B14", sum_over_one_length, "not divided once more", weighting="none"),
    quiet("slopes-in-the-loss", lambda: _penalised(1), "each sample by its own deviation"),
    quiet("centred-kernel", lambda: _centred(False), "what is taken off both partners cancels"),
    quiet("slopes", lambda: _of_slopes(False), "a mean over samples of what a transform gives"),
    quiet("modules-of-the-loss", lambda: _views(True, False), "each sample meets its own partner"),
    quiet("twice", lambda: _views(True, True), "two calls, no coupling"),
    quiet("logit-scale", lambda: _scaled(False, True), "the scale multiplies a mean"),
    quiet("product-of-criteria", lambda: _terms(False), "a sum of two means"),
)
