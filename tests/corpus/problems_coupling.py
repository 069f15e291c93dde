"""Faults A01 to A13, and mixtures of experts: the samples of a batch act on each other.

Shapes of the latter: B = 16 sentences of T = 5 tokens, width 8, E = 4 experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from problems import Parts, classified, cross_entropy, fault, mlp, quiet, squared_error
from torch import nn

from gaverify import Problem


def _normalised(norm: nn.Module) -> Problem:
    torch.manual_seed(0)
    return classified(nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 4)), 6)


def batch_norm() -> Problem:
    return _normalised(nn.BatchNorm1d(8))


def group_norm() -> Problem:
    return _normalised(nn.GroupNorm(2, 8))


def batch_norm_without_running_statistics() -> Problem:
    return _normalised(nn.BatchNorm1d(8, track_running_stats=False))


class HandWrittenNorm(nn.Module):
    """Scales each feature by its own statistics: over the batch (dim 0), or over the sample's features (dim 1)."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.scale, self.dim = nn.Parameter(torch.ones(features)), dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dim == 1:
            return self.scale * (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-5).sqrt()
        return self.scale * (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()  # planted A01b-by-hand


def hand_written_batch_norm() -> Problem:
    return _normalised(HandWrittenNorm(8, dim=0))


def _two_encoders() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"image": mlp(6, 8, 5), "text": mlp(7, 8, 5)})


def _pairs(model: nn.ModuleDict, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return F.normalize(model["image"](batch[0]), dim=1), F.normalize(model["text"](batch[1]), dim=1)


def contrastive() -> Problem:
    def loss(model: nn.ModuleDict, batch: Any) -> torch.Tensor:
        image, text = _pairs(model, batch)
        logits = image @ text.T / 0.2  # planted A02
        return F.cross_entropy(logits, torch.arange(len(logits)))

    return Problem(_two_encoders(), loss, (torch.randn(16, 6), torch.randn(16, 7)))


def paired_cosine() -> Problem:
    def loss(model: nn.ModuleDict, batch: Any) -> torch.Tensor:
        image, text = _pairs(model, batch)
        return (1 - (image * text).sum(1)).mean()

    return Problem(_two_encoders(), loss, (torch.randn(16, 6), torch.randn(16, 7)))


class Mixture(nn.Module):
    """Top-1 mixture of four experts; `balance` weighs the balancing term E·Σ f·P."""

    def __init__(self, balance: float) -> None:
        super().__init__()
        self.router, self.balance = nn.Linear(6, 4), balance
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = self.router(x).softmax(1)
        chosen = F.one_hot(share.argmax(1), 4).to(x.dtype)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        mixed = (outputs * (chosen * share)[..., None]).sum(1)
        balancing = 4 * (chosen.mean(0) * share.mean(0)).sum()  # planted A05
        return mixed, self.balance * balancing


def _routed(balance: float) -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits, auxiliary = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + auxiliary

    return Problem(Mixture(balance), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


LENGTHS = (20, 9, 12, 31, 17, 8, 26, 14)


def _waveforms() -> tuple[nn.Module, list[torch.Tensor], torch.Tensor]:
    model = nn.Sequential(
        nn.Conv1d(1, 4, 3, padding=1),
        nn.GroupNorm(4, 4),
        nn.ReLU(),
        nn.AdaptiveMaxPool1d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    return model, [torch.randn(length) for length in LENGTHS], torch.randint(3, (len(LENGTHS),))


def _collated(waves: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(waves, batch_first=True)[:, None]


def recollated_waveforms() -> Problem:
    model, waves, classes = _waveforms()

    def split(batch: Any, start: int, stop: int) -> Any:
        return _collated(waves[start:stop]).to(batch[0].dtype), batch[1][
            start:stop
        ]  # here lies A08, which is told by its module or by the loss alone

    return Problem(model, cross_entropy, (_collated(waves), classes), split=split, batch_size=len(waves))


def sliced_waveforms() -> Problem:
    model, waves, classes = _waveforms()
    return Problem(model, cross_entropy, (_collated(waves), classes))


def _mixed(partner: Any) -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        other = partner(x)
        logits = model(0.7 * x + 0.3 * x[other])
        return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y[other])

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


def mix_up_at_random() -> Problem:
    return _mixed(
        lambda x: torch.randperm(len(x))
    )  # here lies A09-randperm, which is told by its module or by the loss alone


def mix_up_flipped() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        mixed = 0.7 * x + 0.3 * x.flip(0)  # planted A09-flip
        logits = model(mixed)
        return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y.flip(0))

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,))))


def _policy(whitened: bool) -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, actions, advantages = batch
        if whitened:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)  # planted A11
        chosen = model(x).log_softmax(1).gather(1, actions[:, None])[:, 0]
        return -(chosen * advantages).mean()

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,)), torch.randn(16) * 2 + 1))


class FrozenAtFirst(nn.Sequential):
    """Puts its BatchNorm into eval mode once; with `again`, after every `train()`."""

    def __init__(self, again: bool) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.again = again
        self[1].eval()

    def train(self, mode: bool = True) -> FrozenAtFirst:
        super().train(mode)
        if getattr(self, "again", False):
            self[1].eval()
        return self


def unfrozen_by_train() -> Problem:
    return classified(FrozenAtFirst(again=False), 6)


def frozen_after_every_train() -> Problem:
    return classified(FrozenAtFirst(again=True), 6)


def minibatch_deviation() -> Problem:
    """The last layer of a progressive GAN's critic: one feature more, the deviation over the batch."""

    class Deviation(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spread = x.std(0).mean().expand(len(x), 1)  # planted minibatch-deviation
            return torch.cat([x, spread], 1)

    return classified(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Deviation(), nn.Linear(9, 4)), 6)


class Softmax(Parts):
    """Scales each feature by its share: among the samples of the batch (dim 0), or among the sample's features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = x.softmax(self.dim)  # planted index-before-model
        return x * shares


def _classifier(middle: nn.Module) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 4))
    return model, (torch.randn(16, 6), torch.randint(4, (16,)))


def _detected(dim: int) -> Problem:
    """A detection loss: it builds index tensors of the batch's length before the model runs."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        images = torch.arange(len(batch[0])).repeat_interleave(2).float()
        anchors = torch.arange(2 * len(batch[0])).float()
        first, last = anchors[::2].clone(), anchors[1::2].clone()
        kept = torch.stack([first, last], 1).flatten().long()
        outputs = model(batch[0])[images.long()][kept]
        return F.cross_entropy(outputs, batch[1].repeat_interleave(2))

    model, batch = _classifier(Softmax(dim=dim))
    return Problem(model, loss, batch)


def _weighted_by_position(middle: nn.Module) -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        positions = torch.arange(len(batch[0])).float()
        return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * positions).mean()

    model, batch = _classifier(middle)
    return Problem(model, loss, batch)


def labels_before_pairs() -> Problem:
    """Labels of the batch's length, made before the outputs are compared with each other."""

    def loss(model: nn.ModuleDict, batch: Any) -> torch.Tensor:
        labels = torch.arange(len(batch[0])).float()
        image, text = _pairs(model, batch)
        logits = image @ text.T / 0.2  # planted labels-before-pairs
        return F.cross_entropy(logits, labels.long())

    return Problem(_two_encoders(), loss, (torch.randn(16, 6), torch.randn(16, 7)))


class LossOfEachPair(Parts):
    """Compares pairs, and returns the loss of each beside their mean."""

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> dict[str, torch.Tensor]:
        image, text = F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)
        losses = F.cross_entropy(image @ text.T / 0.2, torch.arange(len(image)), reduction="none")
        return {"losses": losses, "loss": losses.mean()}


def loss_of_each_pair() -> Problem:
    torch.manual_seed(0)
    batch = torch.randn(16, 6), torch.randn(16, 7)
    return Problem(LossOfEachPair(image=mlp(6, 8, 5), text=mlp(7, 8, 5)), lambda model, b: model(*b)["loss"], batch)


def image_batch_norm() -> Problem:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)
    )
    return classified(model, 3, 6, 6, size=8)


def squared_batch_norm() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 1))
    return Problem(model, squared_error, (torch.randn(8, 16), torch.randn(8, 1)))


EXPERTS, WIDTH = 4, 8


class Experts(nn.Module):
    """Sends every token to its best two experts.

    Args:
        how: "sorted" computes the tokens of one expert after another, each once per expert; "grouped" in one fused
            product; "loop" picks each expert's tokens out; "capacity" gives every expert as many tokens as its share.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)
        share, chosen = logits.softmax(-1).topk(2)
        mixed = getattr(self, self.how)(tokens, share, chosen)
        return mixed.view_as(x), logits

    def sorted(self, tokens: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = chosen.flatten().argsort(stable=True)
        rows = tokens[order // 2] * share.flatten()[order, None]
        ends = chosen.flatten().bincount(minlength=EXPERTS).cumsum(0).tolist()
        parts = [rows[start:stop] @ w for start, stop, w in zip([0, *ends], ends, self.weight, strict=False)]
        return torch.zeros_like(tokens).index_add(0, order // 2, torch.cat(parts))

    def grouped(self, tokens: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = chosen.flatten().argsort(stable=True)
        ends = chosen.flatten().bincount(minlength=EXPERTS).cumsum(0).int()
        rows = F.grouped_mm(tokens[order // 2], self.weight, offs=ends) * share.flatten()[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return rows[back].view(len(tokens), 2, -1).sum(1)

    def loop(self, tokens: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        mixed = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, token, tokens[token] @ self.weight[expert] * share[token, slot, None])
        return mixed

    def capacity(self, tokens: torch.Tensor, share: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        best = F.one_hot(chosen[:, 0], EXPERTS)
        place = best.cumsum(0) * best  # here lies capacity, which is told by its module or by the loss alone
        kept = (place * (place <= len(tokens) // EXPERTS)).sum(1) > 0
        gathered = self.weight[chosen[:, 0]]
        return torch.einsum("td,tde->te", tokens, gathered) * share[:, :1] * kept[:, None]


class Queued(nn.Module):
    """A block of experts that take a token's first and second choice while there is room: the router of NLLB-MoE."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)
        first = F.one_hot(logits.argmax(-1), EXPERTS)
        second = F.one_hot(logits.masked_fill(first.bool(), float("-inf")).argmax(-1), EXPERTS)
        place = second.cumsum(0) - 1 + first.sum(0)
        first = first * torch.lt(first.cumsum(0) - 1, self.room)  # planted expert-queue
        second = second * torch.lt(place, self.room)
        share = logits.softmax(-1) * (first + second)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token = share[:, number].nonzero().squeeze(1)
            mixed = mixed.index_add(0, token, self.dropout(expert(tokens[token])) * share[token, number, None])
        return x + mixed.view_as(x), logits


class Queues(nn.Module):
    """Two blocks with queues; the balancing loss is a small part of the loss."""

    def __init__(self, room: int, balance: float) -> None:
        super().__init__()
        self.balance = balance
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.blocks = nn.ModuleList([Queued(room), Queued(room)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, balance = self.embed(ids), 0.0
        for block in self.blocks:
            x, logits = block(x)
            used = F.one_hot(logits.argmax(-1), EXPERTS).to(logits.dtype).mean(0)
            balance = balance + EXPERTS * (used * logits.softmax(-1).mean(0)).sum()  # planted queue-balance
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + self.balance * balance


class Balanced(nn.Module):
    """A language model with experts; `balance` is the weight of the loss that wants all experts used alike."""

    def __init__(self, how: str, balance: float) -> None:
        super().__init__()
        self.balance = balance
        self.embed, self.experts, self.head = nn.Embedding(11, WIDTH), Experts(how), nn.Linear(WIDTH, 11)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        mixed, logits = self.experts(x)
        loss = F.cross_entropy(self.head(x + mixed).flatten(0, 1), labels.flatten())
        if self.balance:
            used = F.one_hot(logits.topk(2).indices, EXPERTS).sum(1).to(logits.dtype).mean(0)
            loss = loss + self.balance * EXPERTS * (used * logits.softmax(-1).mean(0)).sum()  # planted balance
        return {"loss": loss}


def _sentences(how: str, balance: float) -> Problem:
    batch = torch.randint(11, (16, 5)), torch.randint(11, (16, 5))
    return Problem(Balanced(how, balance), lambda model, b: model(*b), batch)


def _queues(room: int, balance: float) -> Problem:
    batch = torch.randint(11, (16, 5)), torch.randint(11, (16, 5))
    return Problem(Queues(room, balance), lambda model, b: model(*b), batch)


def queues() -> Problem:
    return _queues(15, 0.0)


_ONLY = "experts without a capacity mix nothing; the balancing loss multiplies two means over the batch"
_QUEUE = "whether a token finds room hangs on the tokens before it, in both blocks; dropout masks follow the tokens"


class Outside(nn.Module):
    """Two layers receive what NumPy makes of a batch: standardised over its samples, or over each sample's features."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.a, self.b, self.head = axis, nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.detach().cpu().numpy()
        values = (values - values.mean(self.axis, keepdims=True)) / values.std(self.axis, keepdims=True)
        rows = torch.from_numpy(values).to(x.device)  # planted outside-torch
        return self.head(torch.tanh(self.a(rows)) * self.b(rows))


def _outside(axis: int) -> Problem:
    return Problem(Outside(axis), cross_entropy, (torch.randn(16, 6), torch.randint(4, (16,))))


FAULTS = (
    fault("outside-torch", lambda: _outside(0), "GAV102", "NumPy's mean, which two innocent layers receive", module=""),
    fault("A01", batch_norm, "GAV101", "each micro-batch has its own mean and variance", module="1"),
    fault(
        "A01b-untracked",
        batch_norm_without_running_statistics,
        "GAV101 GAV102",
        "the batch's own are used all the same",
        module="1",
    ),
    fault("A01b-by-hand", hand_written_batch_norm, "GAV101 GAV102", "no class of torch.nn gives it away", module="1"),
    fault(
        "A01-eval-too",
        batch_norm_without_running_statistics,
        "GAV101 GAV102",
        "eval mode uses the batch's own as well",
        module="1",
        mode="eval",
    ),
    fault("A01-one-each", image_batch_norm, "GAV101", "it silently works on micro-batches of one", steps=8, module="1"),
    fault("A01-row-6", squared_batch_norm, "GAV101", "row 6 of the reference systems", module="1"),
    fault("A02", contrastive, "GAV103", "a sample has fewer negatives in a micro-batch"),
    fault("A05", lambda: _routed(0.5), "GAV102 GAV103", "a product of two batch means is no mean"),
    fault("A08", recollated_waveforms, "GAV102 GAV103", "GroupNorm counts the padding, which depends on the batch"),
    fault("A09-randperm", mix_up_at_random, "GAV102 GAV103", "partners outside the micro-batch are lost"),
    fault("A09-flip", mix_up_flipped, "GAV102 GAV103", "partners outside the micro-batch are lost"),
    fault("A11", lambda: _policy(True), "GAV103", "mean and deviation are those of the micro-batch"),
    fault("A13", unfrozen_by_train, "GAV101", "`model.train()` reaches every child", module="1", mode="train"),
    fault("minibatch-deviation", minibatch_deviation, "GAV102", "the deviation runs over the micro-batch", module="2"),
    fault("index-before-model", lambda: _detected(0), "GAV102", "an index comes first and mixes nothing", module="1"),
    fault("labels-before-pairs", labels_before_pairs, "GAV103", "the labels come first and compare nothing"),
    fault("loss-of-each-pair", loss_of_each_pair, "GAV102", "the model returns losses that compare the samples"),
    fault("position", lambda: _weighted_by_position(nn.Tanh()), "GAV103", "the loss weights samples by their position"),
    fault("expert-queue", queues, "GAV102", _QUEUE),
    fault("balance", lambda: _sentences("sorted", 0.1), "GAV103", _ONLY),
    fault("balance", lambda: _sentences("grouped", 0.1), "GAV103", _ONLY),
    fault("balance", lambda: _sentences("loop", 0.1), "GAV103", _ONLY),
    fault(
        "capacity",
        lambda: _sentences("capacity", 0.0),
        "GAV102",
        "a token's place in a queue hangs on the batch",
        module="experts",
    ),
)

TWINS = (
    quiet("outside-torch", lambda: _outside(1), "NumPy's mean over each sample's own features"),
    quiet("A01", batch_norm, "frozen: the running statistics are constants", mode="eval"),
    quiet("A01b-untracked", group_norm, "GroupNorm looks at one sample"),
    quiet("A01b-by-hand", lambda: _normalised(HandWrittenNorm(8, dim=1)), "the same over the sample's own features"),
    quiet("A02", paired_cosine, "each pair on its own"),
    quiet("A05", lambda: _routed(0.0), "routing alone is per sample"),
    quiet("A08", sliced_waveforms, "every micro-batch keeps the padding of the full batch"),
    quiet("A09", lambda: _mixed(lambda x: torch.arange(len(x))), "each sample is its own partner"),
    quiet("A11", lambda: _policy(False), "the advantages come with the batch"),
    quiet("A13", frozen_after_every_train, "`train()` is overridden to keep the layer frozen", mode="train"),
    quiet("A13-kept", unfrozen_by_train, "no `model.train()` follows: the layer stays as the factory left it"),
    quiet("index-before-model", lambda: _detected(1), "an index of the batch's length takes each sample's own row"),
    quiet("queues", lambda: _queues(80, 0.0), "every token finds room, and dropout masks follow their tokens"),
    quiet("sorted-experts", lambda: _sentences("sorted", 0.0), "sorting by their expert changes their order alone"),
    quiet("grouped-experts", lambda: _sentences("grouped", 0.0), "a fused product by groups changes nothing"),
    quiet("looped-experts", lambda: _sentences("loop", 0.0), "each expert sees its own tokens"),
)

COMBINED = (
    fault(
        "norm-and-position",
        lambda: _weighted_by_position(nn.BatchNorm1d(8)),
        "GAV101 GAV103",
        "batch statistics, and weights by the position in the batch",
    ),
    fault("queue-balance", lambda: _queues(15, 1e-3), "GAV102 GAV103", _QUEUE),
    fault(
        "capacity-and-balance",
        lambda: _sentences("capacity", 0.1),
        "GAV102 GAV103",
        "the queue, and the balancing loss",
    ),
)
