"""Faults that only the backward shows (GAV104), losses that are no sums (GAV103), and what a loss or a layer keeps.

Shapes: B = 16 samples of 6 features, embeddings of 4, a queue of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from problems import Parts, cross_entropy, fault, mlp, quiet, squared_error
from torch import nn

from gaverify import Problem


class NormalisedGradient(torch.autograd.Function):
    """Identity whose backward divides by the norm of everything that reaches it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm()


class GradientByRows(torch.autograd.Function):
    """Identity whose backward divides by the number of rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / len(gradient)


class PerSample(torch.autograd.Function):
    """Identity whose backward clamps every element on its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2.0 * gradient


class SlopesOfForward(torch.autograd.Function):
    """A head with its loss per row, whose backward multiplies slopes that the forward has computed.

    By the first row's incoming gradient alone, or by each row's.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, first: bool
    ) -> torch.Tensor:
        logits = hidden @ weight.T
        ctx.save_for_backward(hidden, weight, logits.softmax(-1) - F.one_hot(target, len(weight)))
        ctx.first = first
        return F.cross_entropy(logits, target, reduction="none")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, slopes = ctx.saved_tensors
        slopes = slopes * (gradient[0] if ctx.first else gradient[:, None])
        return slopes @ weight, slopes.T @ hidden, None, None


def weighted_slopes(first: bool) -> Problem:
    """The first row's importance stands for all: the factors of micro-batches belong to the data, as weights do."""
    problem = _classifier(nn.Tanh())
    importance = torch.rand(16) + 0.2

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, target, importance = batch
        losses = SlopesOfForward.apply(model[:-1](inputs), model[-1].weight, target, first)
        return (losses * importance).mean()

    return replace(problem, loss=loss, batch=(*problem.batch, importance))


class ByFactor(torch.autograd.Function):
    """Identity whose backward multiplies by a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


def beside_constant(*, of_batch: bool, detached: bool) -> Problem:
    """A constant of the batch is added: the losses do not add up, and yet the backward alone is to blame."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, classes = batch
        factor = inputs.abs().mean() if of_batch else inputs.new_tensor(0.8)
        outputs = model(inputs)
        scaled = ByFactor.apply(outputs, factor)  # planted constant-beside-backward
        return F.cross_entropy(scaled, classes) + (outputs.std().detach() if detached else inputs.std())

    return replace(_classifier(nn.Tanh()), loss=loss)


class Applied(nn.Module):
    def __init__(self, function: type) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x)


def _classifier(*between: nn.Module) -> Problem:
    model = nn.Sequential(nn.Linear(6, 8), *between, nn.Linear(8, 4))
    return Problem(model, cross_entropy, (torch.randn(16, 6), torch.randint(4, (16,))))


def hooked_weight() -> Problem:
    problem = _classifier(nn.Tanh())
    problem.model[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    return problem


def masked_by_hook() -> Problem:
    problem = _classifier(nn.Tanh())
    problem.model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    return problem


def normalised_in_the_loss() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(NormalisedGradient.apply(model(batch[0])), batch[1])  # planted backward-of-loss

    return replace(_classifier(nn.Tanh()), loss=loss)


def divided_in_the_loss() -> Problem:
    """One factor for all gradients, as a forgotten division makes; the losses are right."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(GradientByRows.apply(model(batch[0])), batch[1])

    return replace(_classifier(nn.Tanh()), loss=loss)


def _regression(loss: Any) -> Problem:
    torch.manual_seed(0)
    return Problem(mlp(classes=1), loss, (torch.randn(16, 6), torch.randn(16, 1)))


def masked_mean() -> Problem:
    """A hand-written mean over what a mask leaves: the weights belong to the data."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets, mask = batch
        return ((model(inputs) - targets).square()[:, 0] * mask).sum() / mask.sum()

    problem = _regression(loss)
    mask = torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0])
    return replace(problem, batch=(*problem.batch, mask))


def dice() -> Problem:
    """A ratio of sums over the batch: no weights make it a sum over micro-batches."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        p, t = model(batch[0]).sigmoid(), (batch[1] > 0).float()
        return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())  # planted dice

    return _regression(loss)


class KeyQueue(nn.Module):
    """Logits against the embeddings of earlier micro-batches, as MoCo keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.register_buffer(
            "queue", F.normalize(torch.randn(32, 8, generator=torch.Generator().manual_seed(0)), dim=1)
        )

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        query, key = F.normalize(self.encoder(pair[:, 0]), dim=1), F.normalize(self.encoder(pair[:, 1]), dim=1).detach()
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.T.clone()], 1) / 0.2
        self.queue = torch.cat([key, self.queue])[:32]  # planted queue
        return F.cross_entropy(logits, torch.zeros(len(pair), dtype=torch.long))


def momentum_queue() -> Problem:
    return Problem(KeyQueue(), lambda model, batch: model(batch), torch.randn(16, 2, 6))


class MovingWeights:
    """A loss of two terms, each divided by the average of what it was (dynamic weight averaging)."""

    def __init__(self, moves: bool) -> None:
        self.averages, self.moves = [1.0, 1.0], moves

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch[0])
        terms = [F.cross_entropy(logits, batch[1]), logits.square().mean()]
        total = sum(term / average for term, average in zip(terms, self.averages, strict=True))
        if self.moves:
            pairs = list(zip(self.averages, (float(term.detach()) for term in terms), strict=True))
            self.averages = [0.9 * average + 0.1 * value for average, value in pairs]  # planted averages
        return total


KEYS: list[torch.Tensor] = []


def _against_keys(model: nn.Module, batch: Any, keep: bool) -> torch.Tensor:
    logits = model(batch[0])
    keys = torch.cat(KEYS[-3:]) if KEYS else torch.zeros(1, 4, dtype=logits.dtype)
    loss = F.cross_entropy(logits, batch[1]) + (logits @ keys.T).logsumexp(1).mean()
    if keep:
        KEYS.append(logits.detach())  # planted key-list
    return loss


def key_list() -> Problem:
    KEYS.clear()
    return replace(_classifier(nn.Tanh()), loss=lambda model, batch: _against_keys(model, batch, True))


def empty_key_list() -> Problem:
    KEYS.clear()
    return replace(_classifier(nn.Tanh()), loss=lambda model, batch: _against_keys(model, batch, False))


class Target(nn.Module):
    """An online and a target network; the target follows in every forward."""

    def __init__(self, follows: bool) -> None:
        super().__init__()
        self.online, self.target, self.follows = nn.Linear(6, 4), nn.Linear(6, 4), follows
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (F.normalize(self.online(x), dim=1) - F.normalize(self.target(x), dim=1)).square().sum(1).mean()
        if self.follows:
            with torch.no_grad():
                self.target.weight.lerp_(self.online.weight, 0.1)  # planted target-network
        return loss


def target_network() -> Problem:
    return Problem(Target(True), lambda model, x: model(x), torch.randn(16, 6))


def resting_target() -> Problem:
    return Problem(Target(False), lambda model, x: model(x), torch.randn(16, 6))


class Queue(nn.Module):
    """A ring of embeddings from earlier batches that serve as negatives.

    Args:
        inside: Whether the batch's own embeddings are negatives as well.
        moves: Whether the forward puts the batch into the ring; else the training loop does, once per update.
    """

    def __init__(self, *, inside: bool, moves: bool) -> None:
        super().__init__()
        self.inside, self.moves, self.head = inside, moves, 0
        self.bank = F.normalize(torch.randn(32, 4), dim=1)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        embeddings = F.normalize(embeddings, dim=1)
        earlier = embeddings @ self.bank.T / 0.2
        if self.inside:
            logits = torch.cat([embeddings @ embeddings.T / 0.2, earlier], 1)
            loss = F.cross_entropy(logits, torch.arange(len(embeddings)))
        else:
            loss = earlier.logsumexp(1).mean()
        if self.moves:
            places = (self.head + torch.arange(len(embeddings))) % len(self.bank)
            self.bank = self.bank.index_copy(0, places, embeddings.detach())  # planted queue-moves
            self.head = (self.head + len(embeddings)) % len(self.bank)
        return loss


class Scale(Parts):
    """Divides by a deviation: of the first batch that comes, or given from the start."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = x.detach().std(0) + 1e-3  # planted scale-set
        return x / self.scale


class Membrane(Parts):
    """A neuron's potential over three steps of time, with a row per sample: kept for the next batch, or begun anew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.anew or self.potential.shape != x.shape:
            self.potential = torch.zeros_like(x)
        for _ in range(3):
            self.potential = 0.9 * self.potential.detach() + x  # planted membrane
        return torch.sigmoid(4 * (self.potential - 1))


def _embedding() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 6), torch.randint(3, (16,))


def _queued(*, inside: bool, moves: bool) -> Problem:
    model, criterion = _embedding(), Queue(inside=inside, moves=moves)
    return Problem(model, lambda model, b: criterion(model(b[0])), _batch())


def _scaled(scale: torch.Tensor | None) -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Scale(scale=scale), nn.Tanh(), nn.Linear(8, 3))
    return Problem(model, lambda model, b: F.cross_entropy(model(b[0]), b[1]), _batch())


def _spiking(anew: bool) -> Problem:
    model = nn.Sequential(nn.Linear(6, 8), Membrane(anew=anew, potential=nn.Buffer(torch.zeros(0))), nn.Linear(8, 3))
    return Problem(model, lambda model, b: F.cross_entropy(model(b[0]), b[1]), _batch())


def _clearing(clear: Callable[[nn.Module], Any]) -> Problem:
    model = _embedding()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0])
        clear(model)
        return F.cross_entropy(output, batch[1])

    return Problem(model, loss, _batch())


def _set_to_none(model: nn.Module) -> None:
    model.zero_grad()  # planted cleared


def _filled_with_zeros(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()  # planted zeroed


def clears() -> Problem:
    return _clearing(_set_to_none)


def clears_another() -> Problem:
    critic = nn.Linear(4, 1)
    return _clearing(lambda _: critic.zero_grad())


class Cached(Parts):
    """A loss that runs the model without a graph first, and once more in its backward, `part` samples at a time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split(self.part)
        with torch.no_grad():
            found = [self.model(part) for part in parts]
        leaves = [output.requires_grad_() for output in found]
        rows = F.normalize(torch.cat(leaves), dim=1)
        targets = torch.arange(len(rows))
        scores = rows @ rows.roll(1, 1).T / 0.2 if self.pairs else rows  # planted own-cache
        loss = F.cross_entropy(scores, targets if self.pairs else targets % 4)
        gradients = torch.autograd.grad(loss, leaves)

        def replay(weight: torch.Tensor) -> None:
            with torch.enable_grad():
                for part, gradient in zip(parts, gradients, strict=True):
                    (self.model(part) * gradient * weight).sum().backward()

        loss = loss.detach().requires_grad_()
        loss.register_hook(replay)
        return loss


def _caching(*, part: int, pairs: bool) -> Problem:
    model = _embedding()
    criterion = Cached(model=model, part=part, pairs=pairs)
    return Problem(model, lambda model, x: criterion(x), torch.randn(16, 6))


def _of_nodes(pairs: Callable[[torch.Tensor, list[int]], torch.Tensor]) -> Problem:
    """Graphs of 4 to 6 nodes, packed one behind the other; the loss is a mean over nodes, and over pairs of them."""
    model = _embedding()
    graphs = [torch.randn(4 + i % 3, 6) for i in range(12)]

    def loss(model: nn.Module, graphs: Any) -> torch.Tensor:
        counts = [len(graph) for graph in graphs]
        return pairs(F.normalize(model(torch.cat(graphs)), dim=1), counts)

    return Problem(model, loss, graphs, split=lambda batch, start, stop: batch[start:stop], batch_size=12)


def _all_pairs(nodes: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return (nodes @ nodes.T / 0.2).logsumexp(1).sum() / len(counts)  # planted node-pairs


def _pairs_of_a_graph(nodes: torch.Tensor, counts: list[int]) -> torch.Tensor:
    parts = nodes.split(counts)
    return sum((part @ part.T / 0.2).logsumexp(1).sum() for part in parts) / len(counts)


# What differs in these forwards is innocent: no output and no gradient depends on it. A control that keeps it constant
# hides what is wrong before it, unless the gradients before it go on.


def _normed(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / gradient.norm()


def _doubled(gradient: torch.Tensor) -> torch.Tensor:
    return 2 * gradient


def _hook_rows(hook: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def hooked(rows: torch.Tensor) -> torch.Tensor:
        rows = rows * 1.0
        rows.register_hook(hook)
        return rows

    return hooked


class Masked(nn.Module):
    """The largest value of each feature behind the padding's mask, which is turned before it is used."""

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(rows.shape[1]) < lengths[:, None]).unsqueeze(-1)
        return rows.masked_fill(~mask, -9.0).amax(1)


class Filled(nn.Module):
    """The same where padding is filled with less than the smallest value of the batch."""

    def __init__(self, before: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows, *, skips: bool = False):
        super().__init__()
        self.before, self.skips = before, skips

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        padding = (torch.arange(rows.shape[1]) >= lengths[:, None]).unsqueeze(-1)
        largest = torch.where(padding, rows.detach().min() - 1.0, self.before(rows)).amax(1)
        return largest + rows.masked_fill(padding, 0.0).sum(1) if self.skips else largest


class Pooled(Parts):
    """Sequences, padded to the longest of their batch, with one answer each."""

    def forward(self, sequences: list[torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
        rows = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        return self.head(self.pool(torch.tanh(self.a(rows)), lengths))


_UNEQUAL = (5, 2, 3, 5, 4, 2, 5, 3)  # the third of four micro-batches has no sequence of the full length
_EQUAL = (5, 2, 3, 5, 5, 2, 5, 3)


def _padded(
    pool: nn.Module,
    hook: Callable[[torch.Tensor], torch.Tensor] | None = None,
    lengths: tuple[int, ...] = _UNEQUAL,
) -> Problem:
    model, counts = Pooled(a=nn.Linear(3, 8), pool=pool, head=nn.Linear(8, 4)), torch.tensor(lengths)
    if hook is not None:
        model.a.weight.register_hook(hook)
    batch = [torch.randn(length, 3) for length in lengths], counts, torch.randint(4, (8,))
    return Problem(
        model, lambda model, batch: F.cross_entropy(model(batch[0], batch[1]), batch[2]), batch, batch_size=8
    )


class Scratch(Parts):
    """Moves memory that is not yet written, and writes all of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), 8, dtype=x.dtype)
        out[:, :5] = torch.tanh(self.lin(x))
        out[:, 3:] = out[:, 3:].flip(1)
        out[:, :5], out[:, 5:] = torch.tanh(self.lin(x)), x[:, :3]
        return out


def _scratched(hook: Callable[[torch.Tensor], torch.Tensor]) -> Problem:
    _ = [torch.randn(16, 8) for _ in range(50)]  # memory that is no longer zero
    scratch = Scratch(lin=nn.Linear(6, 5))
    scratch.lin.weight.register_hook(hook)
    batch = torch.randn(16, 6), torch.randint(4, (16,))
    return Problem(nn.Sequential(scratch, nn.Linear(8, 4)), cross_entropy, batch)


class Numbered(Parts):
    """Multiplies rows by their numbers, which Python makes, and divides by them again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.tensor([[1.0 + number] for number in range(len(x))], dtype=x.dtype)
        return self.head(torch.tanh(self.lin(x)) * numbers / numbers)


class Mixing(Parts):
    """Adds to each row a little of a mean of all rows."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + 0.2 * (rows @ rows.T).softmax(-1) @ self.values(rows)


def mixed_behind_hook() -> Problem:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Mixing(values=nn.Linear(8, 8)), nn.Linear(8, 4))
    model[0].weight.register_hook(_normed)
    return Problem(model, cross_entropy, (torch.randn(16, 6), torch.randint(4, (16,))))


def numbered() -> Problem:
    model = Numbered(lin=nn.Linear(6, 8), head=nn.Linear(8, 4))
    model.lin.weight.register_hook(_normed)
    return Problem(model, cross_entropy, (torch.randn(16, 6), torch.randint(4, (16,))))


FAULTS = (
    fault(
        "constant-beside-backward",
        lambda: beside_constant(of_batch=True, detached=False),
        "GAV104",
        "a constant of the batch makes all sums of losses wrong",
    ),
    fault(
        "detached-beside-backward",
        lambda: beside_constant(of_batch=True, detached=True),
        "GAV104",
        "the same with one that moves with the parameters",
    ),
    fault(
        "averages",
        lambda: replace(_classifier(nn.Tanh()), loss=MovingWeights(True)),
        "GAV403",
        "the next micro-batch is weighted by this one",
    ),
    fault("key-list", key_list, "GAV403", "a global list of keys grows with every forward"),
    fault("target-network", target_network, "GAV401", "frozen parameters that the forward moves", module="target"),
    fault(
        "backward-norm",
        lambda: _classifier(Applied(NormalisedGradient)),
        "GAV104",
        "a backward divides by what reaches it",
        module="1",
    ),
    fault(
        "backward-rows",
        divided_in_the_loss,
        "GAV104",
        "a backward divides by the number of rows",
    ),
    fault("hook-before-mask", lambda: _padded(Masked(), hook=_normed), "GAV104", "masks of other lengths", module="a"),
    fault(
        "hook-before-fill", lambda: _padded(Filled(), hook=_normed), "GAV104", "values that no row keeps", module="a"
    ),
    fault("hook-before-junk", lambda: _scratched(_normed), "GAV104", "memory that is moved before it is written"),
    fault(
        "hook-beside-fill",
        lambda: _padded(Filled(_hook_rows(_normed), skips=True), lengths=_EQUAL),
        "GAV104",
        "parameters stay seen",
    ),
    fault(
        "function-beside-fill",
        lambda: _padded(Filled(lambda rows: NormalisedGradient.apply(rows)), lengths=_EQUAL),
        "GAV104",
        "the module's outputs agreed before they were kept constant",
        module="pool",
    ),
    fault("hook-before-mixing", mixed_behind_hook, "GAV102 GAV104", "samples interact behind a layer with a hook"),
    fault("hook-beside-numbers", numbered, "GAV104", "numbers of rows from outside torch that cancel", module="lin"),
    fault("gradient-hook", hooked_weight, "GAV104", "a hook divides by the micro-batch's norm", module="0"),
    fault("first-slope", lambda: weighted_slopes(True), "GAV104", "a backward scales all rows by the first one's"),
    fault("backward-of-loss", normalised_in_the_loss, "GAV104", "the same inside the loss"),
    fault(
        "root-mean-squared",
        lambda: _regression(lambda model, batch: squared_error(model, batch).sqrt()),
        "GAV103",
        "a root of a mean is no mean",
    ),
    fault("dice", dice, "GAV103", "a ratio of sums over the batch"),
    fault("masked-mean", masked_mean, "GAV202", "a mean over what the mask leaves weighs by the mask"),
    fault("queue", momentum_queue, "GAV401", "a micro-batch meets the keys of the one before"),
    fault("own-cache", lambda: _caching(part=32, pairs=True), "GAV103", "handed a micro-batch it caches that alone"),
    fault("own-cache-of-parts", lambda: _caching(part=2, pairs=True), "GAV103", "the same in smaller parts"),
    fault("node-pairs", lambda: _of_nodes(_all_pairs), "GAV103", "nodes meet those of other graphs"),
    fault(
        "queue-moves",
        lambda: _queued(inside=False, moves=True),
        "GAV403",
        "later micro-batches meet the earlier ones",
    ),
    fault("scale-set", lambda: _scaled(None), "GAV401", "the first micro-batch sets the scale"),
    fault("membrane", lambda: _spiking(False), "GAV401", "the second micro-batch goes on from the first's"),
    fault("cleared", clears, "GAV603", "each forward throws earlier gradients away"),
    fault("zeroed", lambda: _clearing(_filled_with_zeros), "GAV603", "zeros are written over earlier gradients"),
)

TWINS = (
    quiet(
        "constant-beside-backward",
        lambda: beside_constant(of_batch=False, detached=False),
        "the backward multiplies by the same number for every batch",
    ),
    quiet("averages", lambda: replace(_classifier(nn.Tanh()), loss=MovingWeights(False)), "constant weights"),
    quiet("key-list", empty_key_list, "a list that stays empty"),
    quiet("target-network", resting_target, "a target that rests"),
    quiet("backward-norm", lambda: _classifier(Applied(PerSample)), "a backward that treats every element alike"),
    quiet("first-slope", lambda: weighted_slopes(False), "a backward scales every row by what reaches it"),
    quiet("hook-before-mask", lambda: _padded(Masked(), hook=_doubled), "a hook that doubles"),
    quiet("hook-before-fill", lambda: _padded(Filled(), hook=_doubled), "a hook that doubles"),
    quiet("hook-before-junk", lambda: _scratched(_doubled), "a hook that doubles"),
    quiet(
        "hook-beside-fill",
        lambda: _padded(Filled(_hook_rows(_doubled), skips=True), lengths=_EQUAL),
        "a hook that doubles",
    ),
    quiet(
        "function-beside-fill",
        lambda: _padded(Filled(PerSample.apply), lengths=_EQUAL),
        "a backward that treats elements alike",
    ),
    quiet("gradient-hook", masked_by_hook, "a hook that scales by a constant"),
    quiet(
        "root-mean-squared",
        lambda: _regression(lambda model, batch: ((model(batch[0]) - batch[1]).square() + 1e-6).sqrt().mean()),
        "the root of every sample's own error",
    ),
    quiet("own-cache-alone", lambda: _caching(part=32, pairs=False), "a mean over samples, however its gradient comes"),
    quiet("node-pairs-within", lambda: _of_nodes(_pairs_of_a_graph), "nodes meet those of their own graph"),
    quiet(
        "queue-still",
        lambda: _queued(inside=False, moves=False),
        "a queue that the loop moves is a constant of the window",
    ),
    quiet("membrane-anew", lambda: _spiking(True), "a state that begins anew with every batch"),
    quiet("scale-given", lambda: _scaled(torch.ones(8)), "a scale that is there from the start is a constant"),
    quiet("cleared-elsewhere", clears_another, "the gradients of another model are none of this one's"),
)

COMBINED = (
    fault(
        "queue-and-negatives",
        lambda: _queued(inside=True, moves=True),
        "GAV103 GAV403",
        "negatives, and a queue that moves",
    ),
)
