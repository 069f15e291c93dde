"""Look-alikes: what a suspicious reader would try in the hope of a false alarm, in models, batches and recipes."""

from __future__ import annotations

import warnings
from collections import namedtuple
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from problems import Case, Net, Parts, classified, cross_entropy, listed, mlp, squared_error
from problems_quiet import Pooled
from problems_weights import mean_loss
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from gaverify import Problem

LOOKALIKES: list[Case] = []
lookalike = listed(LOOKALIKES)


@lookalike("the mask hides padding of each sample")
def attention_with_padding_mask() -> Problem:
    mask = torch.arange(5)[None] >= torch.tensor([5, 3, 4, 1, 2, 5, 3, 4])[:, None]
    return Problem(
        Pooled(),
        lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]),
        (torch.randn(8, 5, 8), mask, torch.randint(4, (8,))),
    )


@lookalike("the bias of the keys has a gradient of zero in exact arithmetic")
def key_bias() -> Problem:
    def attend(net: Net, x: torch.Tensor) -> torch.Tensor:
        return ((net.q(x) @ net.k(x).mT / 8**0.5).softmax(-1) @ net.v(x)).mean(1)

    return classified(Net(attend, q=nn.Linear(8, 8), k=nn.Linear(8, 8), v=nn.Linear(8, 4)), 5, 8, size=8)


@lookalike("the bias before an InstanceNorm has a gradient of zero in exact arithmetic")
def bias_before_instance_norm() -> Problem:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.InstanceNorm2d(4, affine=True),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.InstanceNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 4),
    )
    return classified(model, 3, 6, 6, size=8)


@lookalike("the last bias shifts all scores of a list and cancels in its softmax")
def listwise_ranking() -> Problem:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten())
    return classified(model, 5, 6, classes=5)


@lookalike("groups lie within a sample")
def group_norm() -> Problem:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    return classified(model, 3, 6, 6, size=8)


@lookalike("neighbouring channels of the same sample")
def local_response_norm() -> Problem:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LocalResponseNorm(2), nn.Flatten(), nn.Linear(64, 4))
    return classified(model, 3, 6, 6, size=8)


@lookalike("the norm is that of the weight")
def weight_norm() -> Problem:
    return classified(nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 4)), 6)


@lookalike("the power iteration stands still in eval mode", mode="eval")
def spectral_norm_in_eval() -> Problem:
    return classified(nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 4)), 6)


@lookalike("a parametrisation of the weight alone")
def symmetric_parametrisation() -> Problem:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Net(lambda _, x: x.triu() + x.triu(1).mT))
    return classified(nn.Sequential(layer, nn.Linear(6, 4)), 6)


@lookalike("time comes first; `split` cuts the second dimension")
def batch_second_lstm() -> Problem:
    lstm = nn.LSTM(6, 5, num_layers=2, dropout=0.4)
    return Problem(
        Net(lambda net, x: net.head(net.lstm(x)[0][-1]), lstm=lstm, head=nn.Linear(5, 4)),
        cross_entropy,
        (torch.randn(7, 8, 6), torch.randint(4, (8,))),
        batch_size=8,
        split=lambda b, start, stop: (b[0][:, start:stop], b[1][start:stop]),
    )


@lookalike("time comes first inside the model, with dropout; the batch itself leads with B")
def batch_second_transformer() -> Problem:
    layer, head = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3), nn.Linear(8, 4)
    model = Net(lambda net, x: net.head(net.layer(x.transpose(0, 1)).mean(0)), layer=layer, head=head)
    return classified(model, 5, 8, size=8)


@lookalike("as many time steps as samples: the dimension of the batch is not told by its size")
def as_long_as_the_batch() -> Problem:
    return classified(Pooled(0.2), 8, 8, size=8)


@lookalike("recurrence over time")
def gru() -> Problem:
    layer = nn.GRU(6, 4, batch_first=True, bidirectional=True)
    return classified(Net(lambda net, x: net.gru(x)[0].sum((1,)), gru=layer), 5, 6, size=8, classes=8)


@lookalike("packed sequences of each sample's own length")
def packed_lstm() -> Problem:
    def last(net: Net, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return net.head(net.lstm(packed)[1][0][-1])

    return Problem(
        Net(last, lstm=nn.LSTM(6, 5, batch_first=True), head=nn.Linear(5, 4)),
        lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]),
        (torch.randn(8, 6, 6), torch.tensor([6, 2, 4, 5, 1, 3, 6, 2]), torch.randint(4, (8,))),
    )


@lookalike("gradients of the embedding are sparse and uncoalesced")
def sparse_embedding() -> Problem:
    model = nn.Sequential(nn.Embedding(11, 8, sparse=True), nn.Flatten(), nn.Linear(24, 4))
    return Problem(model, cross_entropy, (torch.randint(11, (16, 3)), torch.randint(4, (16,))))


@lookalike("bags of one sample each")
def embedding_bag() -> Problem:
    model = nn.Sequential(nn.EmbeddingBag(11, 8, mode="mean"), nn.Linear(8, 4))
    return Problem(model, cross_entropy, (torch.randint(11, (16, 3)), torch.randint(4, (16,))))


@lookalike("frozen parameters have no gradient to compare")
def frozen_parameters() -> Problem:
    problem = mean_loss()
    problem.model[0].requires_grad_(False)
    return problem


@lookalike("an unused parameter has no gradient in either run")
def unused_parameters() -> Problem:
    problem = mean_loss()
    problem.model.register_parameter("spare", nn.Parameter(torch.ones(3)))
    return problem


@lookalike("one module, called twice")
def shared_module() -> Problem:
    layer = nn.Linear(6, 6)
    return classified(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 4)), 6)


@lookalike("complex parameters")
def complex_parameters() -> Problem:
    weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
    return classified(Net(lambda net, x: (x.to(net.weight.dtype) @ net.weight).abs(), weight=weight), 6)


@lookalike("spectral layers of the same sample")
def fourier_layer() -> Problem:
    def filtered(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.head(torch.fft.irfft(torch.fft.rfft(x) * net.weight, n=8))

    return classified(
        Net(filtered, weight=nn.Parameter(torch.randn(5, dtype=torch.complex64)), head=nn.Linear(8, 4)), 8
    )


@lookalike("the loss freezes the critic while the generator learns")
def requires_grad_toggles() -> Problem:
    def loss(model: nn.ModuleDict, batch: torch.Tensor) -> torch.Tensor:
        model["critic"].requires_grad_(False)
        value = -model["critic"](model["generator"](batch)).mean()
        model["critic"].requires_grad_(True)
        return value

    return Problem(nn.ModuleDict({"generator": mlp(6, 8, 6), "critic": mlp(6, 8, 1)}), loss, torch.randn(16, 6))


@lookalike("a forward hook that scales the outputs")
def forward_hook() -> Problem:
    problem = mean_loss()
    problem.model[0].register_forward_hook(lambda module, inputs, output: 1.5 * output)
    return problem


@lookalike("a straight-through estimator")
def custom_function() -> Problem:
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sign()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    return classified(nn.Sequential(nn.Linear(6, 8), Net(lambda _, x: Sign.apply(x)), nn.Linear(8, 4)), 6)


@lookalike("casts to float32 in the middle: the control's precision is capped unless they are lifted")
def casts_to_float32() -> Problem:
    def cast(_: Net, x: torch.Tensor) -> torch.Tensor:
        return x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt().to(x.dtype) * x

    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), Net(cast))]
    return classified(nn.Sequential(*layers, nn.Linear(8, 4)), 8)


@lookalike("a model called with its parameters as arguments")
def functional_call() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, dict(model.named_parameters()), batch[0]), batch[1])

    return replace(mean_loss(), loss=loss)


@lookalike("vmap over the samples")
def mapped_over_samples() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(torch.func.vmap(lambda x: model(x))(batch[0]), batch[1])

    return replace(mean_loss(), loss=loss)


@lookalike("a loss with parameters of its own")
def loss_module() -> Problem:
    class Weighted(Parts):
        def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return cross_entropy(model, batch) * torch.exp(-self.log_scale) + self.log_scale

    return replace(mean_loss(), loss=Weighted(log_scale=nn.Parameter(torch.tensor(0.3))))


@lookalike("the loss writes into the batch that it was given")
def writes_into_the_batch() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        batch[0].mul_(2)
        return cross_entropy(model, batch)

    return replace(mean_loss(), loss=loss)


@lookalike("TorchScript")
def scripted() -> Problem:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return replace(mean_loss(), model=torch.jit.script(mlp()))


@lookalike("hinges: samples that win have a gradient of exactly zero")
def hinge() -> Problem:
    return replace(mean_loss(), loss=lambda m, b: F.multi_margin_loss(m(b[0]), b[1]))


@lookalike("weight decay in the loss, once per micro-batch and divided by K, is one decay")
def decay_in_the_loss() -> Problem:
    return replace(
        mean_loss(), loss=lambda m, b: cross_entropy(m, b) + 0.1 * sum(p.square().sum() for p in m.parameters())
    )


@lookalike("triplets lie side by side in one sample")
def triplets() -> Problem:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        anchor, positive, negative = (model(part) for part in batch.unbind(1))
        return F.triplet_margin_loss(anchor, positive, negative)

    return Problem(mlp(), loss, torch.randn(16, 3, 6))


@dataclass
class Pictures:
    pixels: torch.Tensor
    classes: torch.Tensor
    names: list[str]


@lookalike("a dataclass with names beside the tensors")
def dataclass_batch() -> Problem:
    batch = Pictures(torch.randn(16, 6), torch.randint(4, (16,)), [f"picture {n}" for n in range(16)])

    def loss(model: nn.Module, batch: Pictures) -> torch.Tensor:
        assert len(batch.names) == len(batch.pixels)
        return F.cross_entropy(model(batch.pixels), batch.classes)

    return Problem(mlp(), loss, batch)


Sample = namedtuple("Sample", "x y")


@lookalike("a named tuple in a dict")
def nested_batch() -> Problem:
    return Problem(
        mlp(),
        lambda m, b: F.cross_entropy(m(b["a"].x), b["a"].y) * b["scale"],
        {"a": Sample(torch.randn(16, 6), torch.randint(4, (16,))), "scale": 2.0},
    )


@lookalike("a list of samples of different length")
def variable_lengths() -> Problem:
    samples = [(torch.randn(length, 6), n % 4) for n, length in enumerate((3, 9, 4, 1, 7, 7, 2, 5))]

    def loss(model: nn.Module, batch: list[Any]) -> torch.Tensor:
        logits = torch.stack([model(x).mean(0) for x, _ in batch])
        return F.cross_entropy(logits, torch.tensor([label for _, label in batch]))

    return Problem(mlp(), loss, samples)


@lookalike("samples of 3, 3, 3 and 1, weighted by their number", weighting="samples")
def short_tail() -> Problem:
    return classified(mlp(), 6, size=10)


@lookalike("each sample has a weight of its own; the divisor is the number of samples")
def sample_weights() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (batch[2] * F.cross_entropy(model(batch[0]), batch[1], reduction="none")).mean()

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,)), torch.rand(16) + 0.1))


@lookalike(
    "divided by the sum of the sample weights, and weighted accordingly",
    weighting=lambda micro_batch, batch: micro_batch[2].sum() / batch[2].sum(),
)
def normalised_sample_weights() -> Problem:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (batch[2] * F.cross_entropy(model(batch[0]), batch[1], reduction="none")).sum() / batch[2].sum()

    return Problem(mlp(), loss, (torch.randn(16, 6), torch.randint(4, (16,)), torch.rand(16) + 0.1))


@lookalike("class weights make the divisor; tokens counts them", weighting="tokens")
def class_weights() -> Problem:
    return replace(mean_loss(), loss=nn_loss(torch.tensor([0.2, 1.0, 2.0, 5.0])))


def nn_loss(weight: torch.Tensor) -> Any:
    """Cross entropy with class weights."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1], weight=weight.to(logits.dtype))

    return loss


@lookalike("float64 throughout", dtype="float64")
def in_float64() -> Problem:
    return mean_loss()


@lookalike("float16 throughout", dtype="float16")
def in_float16() -> Problem:
    return mean_loss()


@lookalike("bfloat16 parameters, LayerNorm and attention", dtype="bfloat16")
def transformer_in_bfloat16() -> Problem:
    return classified(Pooled(), 5, 8, size=8)


@lookalike("autocast rounds activations to bfloat16", autocast="bfloat16")
def autocast_bfloat16() -> Problem:
    return classified(Pooled(0.2), 5, 8, size=8)


@lookalike("a mean times a million")
def large_loss() -> Problem:
    return replace(mean_loss(), loss=lambda m, b: 1e6 * cross_entropy(m, b))


@lookalike("a mean over a million")
def tiny_loss() -> Problem:
    return replace(mean_loss(), loss=lambda m, b: 1e-6 * cross_entropy(m, b))


@lookalike("a loss so small that its gradients are near the smallest normal number")
def vanishing_loss() -> Problem:
    return replace(mean_loss(), loss=lambda m, b: 1e-30 * cross_entropy(m, b))


@lookalike("one sample each", steps=16)
def one_sample_each() -> Problem:
    return mean_loss()


@lookalike("K = 1 compares the batch with itself", steps=1, notes="GAV901")
def one_step() -> Problem:
    return mean_loss()


@lookalike("data of size 1e4 beside data of size 1e-4")
def extreme_values() -> Problem:
    x = torch.randn(16, 6) * torch.logspace(-4, 4, 16)[:, None]
    return Problem(nn.Linear(6, 3), squared_error, (x, torch.randn(16, 3)))


@lookalike("terms that cancel to a thousandth of their size")
def cancelling_gradients() -> Problem:
    x = torch.randn(8, 6)
    x, y = torch.cat([x, x]), torch.cat([torch.full((8, 1), 100.0), torch.full((8, 1), -100.0)])
    return Problem(nn.Linear(6, 1), squared_error, (x + 1e-3 * torch.randn(16, 6), y))
